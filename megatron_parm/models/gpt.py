"""The GPT language model, or the part of it that one pipeline stage holds. Floor 6.

Parameter names are Megatron-Core's, with the layers numbered over the whole model.
"""

import torch
from torch import Tensor, nn

from megatron_parm.layers.cross_entropy import vocabulary_cross_entropy
from megatron_parm.models.block import FeedForwardMaker
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.heads import OutputWeight, TokenEmbedding, output_logits
from megatron_parm.models.shape import ModelShape
from megatron_parm.models.stage import TransformerStage
from megatron_parm.parallel.context import Axis
from megatron_parm.shapes import expect_shape


class GPTModel(nn.Module):
    """Embedding, blocks `layers`, output head; `layers` decides whether this is the first, the last or the only stage.

    Weights are uninitialised: call `initialise_weights`. With tied embeddings a last stage that is not the first holds
    a copy of the word embedding under the same name; the gradients of both are to be summed. `generator` is the stream
    of dropout on activations that are identical on tp; None under sequence parallelism, where none is.
    """

    def __init__(
        self,
        shape: ModelShape,
        feed_forward: FeedForwardMaker,
        *,
        tp: Axis,
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device,
        layers: range | None = None,
        execution: Execution = PLAIN,
    ) -> None:
        super().__init__()
        layers = range(shape.num_layers) if layers is None else layers
        self.shape, self.tp, self.execution = shape, tp, execution
        self.is_first_stage = layers.start == 0
        self.is_last_stage = layers.stop == shape.num_layers
        if self.is_first_stage or (self.is_last_stage and shape.ties_embeddings):
            self.embedding = TokenEmbedding(
                shape, tp=tp, generator=generator, dtype=dtype, device=device, execution=execution
            )
            if not self.is_first_stage:
                self.embedding.position_embeddings = None
        self.decoder = TransformerStage(
            shape, layers, feed_forward, tp=tp, generator=generator, dtype=dtype, device=device, execution=execution
        )
        if self.is_last_stage and not shape.ties_embeddings:
            self.output_layer = OutputWeight(shape, tp=tp, dtype=dtype, device=device)

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer, [V/tp, h]; only on the last stage."""
        return self.embedding.word_embeddings.weight if self.shape.ties_embeddings else self.output_layer.weight

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Per-token loss [b, s] for `labels` [b, s], in float32 (float64 stays); without labels logits [s, b, V/tp].

        `tokens` [b, s] on the first stage, the hidden states [s, b, h] of the stage before on the others; a stage that
        is not the last returns hidden states ([s/tp, b, h] both under sequence parallelism). `position_ids` [b, s].
        `attention_mask` bool [b or 1, 1, s, s], True where a query may not attend, beside the causal rule. Call on all
        ranks of tp.
        """
        hidden: Tensor = tokens
        if self.is_first_stage:
            expect_shape(tokens, "b s", b=position_ids.shape[0], s=position_ids.shape[1])
            hidden = self.embedding(tokens, position_ids)  # [s, b, h]
        rows = position_ids.shape[1] // (self.tp.size if self.execution.sequence_parallel else 1)
        expect_shape(hidden, "s b h", s=rows, b=position_ids.shape[0], h=self.shape.hidden_size)
        hidden = self.decoder(hidden, position_ids, attention_mask)
        if not self.is_last_stage:
            return hidden
        logits = output_logits(hidden, self.output_weight, self.tp, self.execution)  # [s, b, V/tp]
        if labels is None:
            return logits
        loss = vocabulary_cross_entropy(logits, labels.t(), vocab_size=self.shape.vocab_size, tp=self.tp)  # [s, b]
        return loss.t()  # [b, s]
