"""The GPT language model, or what a pipeline rank holds of it. Floor 6.

Parameter names are Megatron-Core's, with the layers numbered over the whole model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_parm.layers.cross_entropy import vocabulary_cross_entropy
from megatron_parm.layers.past import Past
from megatron_parm.models.block import FeedForwardMaker
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.heads import OutputWeight, TokenEmbedding, output_logits
from megatron_parm.models.shape import ModelShape
from megatron_parm.models.stage import TransformerStage
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import tie
from megatron_parm.shapes import expect_shape


class GPTModel(nn.Module):
    """Embedding, blocks, output head, or the parts of them that a pipeline rank holds.

    `parts` are the layers of each of the rank's stages, in order: one range, or several with virtual stages; default:
    the whole model. The stage with layer 0 embeds, the one with the last layer has the head. Weights are
    uninitialised: call `initialise_weights`. With tied embeddings the last stage, where it is on another rank than the
    first, holds a copy of the word embedding under the same name; the gradients of both are to be summed (`tie`).
    `generator` is the stream of dropout on activations that are identical on tp; None under sequence parallelism, where
    none is.
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
        parts: Sequence[range] | None = None,
        execution: Execution = PLAIN,
    ) -> None:
        super().__init__()
        self.layers_of_parts = (range(shape.num_layers),) if parts is None else tuple(parts)
        self.shape, self.tp, self.execution = shape, tp, execution
        layers = [layer for part in self.layers_of_parts for layer in part]
        embeds, has_head = 0 in layers, shape.num_layers - 1 in layers
        if embeds or (has_head and shape.ties_embeddings):
            self.embedding = TokenEmbedding(
                shape, tp=tp, generator=generator, dtype=dtype, device=device, execution=execution
            )
            if not embeds:
                self.embedding.keep_words_alone()
            if shape.ties_embeddings and embeds != has_head:
                tie(self.embedding.word_embeddings.weight)
        self.decoder = TransformerStage(
            shape, layers, feed_forward, tp=tp, generator=generator, dtype=dtype, device=device, execution=execution
        )
        if has_head and not shape.ties_embeddings:
            self.output_layer = OutputWeight(shape, tp=tp, dtype=dtype, device=device)

    @property
    def output_weight(self) -> Tensor:
        """The weight of the output layer, [V/tp, h]; only on the rank of the last stage."""
        return self.embedding.word_embeddings.weight if self.shape.ties_embeddings else self.output_layer.weight

    @property
    def stages(self) -> list[nn.Module]:
        """Each part as a module of its own, over the same parameters and with the arguments of `forward`."""
        return [_Stage(self, part) for part in range(len(self.layers_of_parts))]

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        is_text: Tensor | None = None,
        *,
        part: int = 0,
        past: Past | None = None,
    ) -> Tensor:
        """Per-token loss [b, s] for `labels` [b, s], in float32 (float64 stays); without labels logits [s, b, V/tp].

        `tokens` [b, s] on the first stage, the hidden states [s, b, h] of the stage before on the others; a stage that
        is not the last returns hidden states ([s/tp, b, h] both under sequence parallelism). `position_ids` [b, s].
        `attention_mask` bool [b or 1, 1, s, s], True where a query may not attend, beside the causal rule. `is_text`
        bool [b, s], False for padding, which goes to no expert; None: all is text. `part`: which of the rank's stages.
        `past`: keys and values of the positions before `tokens`, see `TransformerStage`.
        Call on all ranks of tp.
        """
        layers = self.layers_of_parts[part]
        hidden: Tensor = tokens
        if layers.start == 0:
            expect_shape(tokens, "b s", b=position_ids.shape[0], s=position_ids.shape[1])
            hidden = self.embedding(tokens, position_ids)  # [s, b, h]
        rows = position_ids.shape[1] // (self.tp.size if self.execution.sequence_parallel else 1)
        expect_shape(hidden, "s b h", s=rows, b=position_ids.shape[0], h=self.shape.hidden_size)
        text = None if is_text is None else is_text.t()  # [s, b]
        hidden = self.decoder(hidden, position_ids, attention_mask, layers, text, past)
        if layers.stop != self.shape.num_layers:
            return hidden
        logits = output_logits(hidden, self.output_weight, self.tp, self.execution)  # [s, b, V/tp]
        if labels is None:
            return logits
        loss = vocabulary_cross_entropy(logits, labels.t(), vocab_size=self.shape.vocab_size, tp=self.tp)  # [s, b]
        return loss.t()  # [b, s]


class _Stage(nn.Module):
    def __init__(self, model: GPTModel, part: int) -> None:
        super().__init__()
        self.model = model
        self.part = part

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        is_text: Tensor | None = None,
    ) -> Tensor:
        output: Tensor = self.model(tokens, position_ids, labels, attention_mask, is_text, part=self.part)
        return output
