"""BERT: an encoder that sees both sides, trained on masked words and on the order of two segments. Floor 6.

Source: Devlin et al. 2018; Shoeybi et al. 2019, section 5.3 (the pre-norm layout). Names as in Megatron-Core.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_parm.layers.cross_entropy import vocabulary_cross_entropy
from megatron_parm.models.bert_heads import Pooler, WholeLinear, WordBias, WordHead, order_loss
from megatron_parm.models.block import FeedForwardMaker
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.heads import TokenEmbedding, output_logits
from megatron_parm.models.shape import ModelShape
from megatron_parm.models.stage import TransformerStage
from megatron_parm.parallel.collectives import all_gather
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import tie
from megatron_parm.shapes import expect_shape


@dataclass(frozen=True)
class BertOutput:
    """Of both heads: logits [s, b, V/tp] and [b, 2], or with labels losses [b, s] and [b].

    `order` is None where the model has no head for it.
    """

    words: Tensor
    order: Tensor | None


class BertEncoder(nn.Module):
    """Embedding and blocks, or the parts of them that a pipeline rank holds.

    `parts` are the layers of each of the rank's stages, in order; default: the whole model. The stage with layer 0
    embeds. `has_word_head`: where first and last stage are on two ranks, the last one holds a copy of the word
    embedding under the same name, and the gradients of both are to be summed (`tie`). Weights are uninitialised: call
    `initialise_weights`. `generator` is the stream of dropout on activations that are identical on tp; None under
    sequence parallelism, which ends where the blocks end: what follows sees whole sequences.
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
        has_word_head: bool,
        parts: Sequence[range] | None = None,
        execution: Execution = PLAIN,
    ) -> None:
        super().__init__()
        assert not shape.is_causal and shape.ties_embeddings
        self.layers_of_parts = (range(shape.num_layers),) if parts is None else tuple(parts)
        self.shape, self.tp, self.execution = shape, tp, execution
        self._joined_over = tp if execution.sequence_parallel else Axis.single("tp")
        layers = [layer for part in self.layers_of_parts for layer in part]
        embeds, self.is_last = 0 in layers, shape.num_layers - 1 in layers
        if embeds or (self.is_last and has_word_head):
            self.embedding = TokenEmbedding(
                shape, tp=tp, generator=generator, dtype=dtype, device=device, execution=execution
            )
            if not embeds:
                self.embedding.keep_words_alone()
            if has_word_head and embeds != self.is_last:
                tie(self.embedding.word_embeddings.weight)
        self.encoder = TransformerStage(
            shape, layers, feed_forward, tp=tp, generator=generator, dtype=dtype, device=device, execution=execution
        )

    def encode(self, tokens: Tensor, padding_mask: Tensor, token_types: Tensor | None, *, part: int = 0) -> Tensor:
        """Tokens, mask (1 or True where there is text) and segments [b, s] -> hidden states [s, b, h].

        Instead of tokens the hidden states of the stage before, on all stages but the first. No position attends to
        padding, and padding goes to no expert; what stands there means nothing. Between stages [s/tp, b, h] under
        sequence parallelism.
        """
        layers = self.layers_of_parts[part]
        batch, length = padding_mask.shape
        position_ids = torch.arange(length, device=tokens.device).expand(batch, length)
        hidden: Tensor = tokens
        if layers.start == 0:
            expect_shape(tokens, "b s", b=batch, s=length)
            hidden = self.embedding(tokens, position_ids, token_types)  # [s, b, h]
        expect_shape(hidden, "s b h", s=length // self._joined_over.size, b=batch, h=self.shape.hidden_size)
        is_padding = padding_mask == 0
        output: Tensor = self.encoder(
            hidden, position_ids, is_padding[:, None, None, :], layers, ~is_padding.t()
        )  # [s, b, h]
        if layers.stop != self.shape.num_layers:
            return output
        return all_gather(output, self._joined_over, 0)  # [s, b, h]


class BertModel(BertEncoder):
    """An encoder with the heads of pretraining, or what a pipeline rank holds of it (see `BertEncoder`).

    `has_order_head`: two segments, and a head for their order.
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
        has_order_head: bool = True,
        parts: Sequence[range] | None = None,
        execution: Execution = PLAIN,
    ) -> None:
        super().__init__(
            shape,
            feed_forward,
            tp=tp,
            generator=generator,
            dtype=dtype,
            device=device,
            has_word_head=True,
            parts=parts,
            execution=execution,
        )
        self.pooler: Pooler | None = None
        self.binary_head: WholeLinear | None = None
        if self.is_last:
            self.lm_head = WordHead(shape, dtype=dtype, device=device)
            self.output_layer = WordBias(shape, tp=tp, dtype=dtype, device=device)
        if self.is_last and has_order_head:
            self.pooler = Pooler(shape, dtype=dtype, device=device)
            self.binary_head = WholeLinear(
                shape.hidden_size, 2, initialiser=shape.initialiser, dtype=dtype, device=device
            )

    @property
    def stages(self) -> list[nn.Module]:
        """Each part as a module of its own, over the same parameters and with the arguments of `forward`."""
        return [_Stage(self, part) for part in range(len(self.layers_of_parts))]

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor,
        token_types: Tensor | None = None,
        labels: Tensor | None = None,
        is_random: Tensor | None = None,
        *,
        part: int = 0,
    ) -> Tensor | BertOutput:
        """Logits, or with `labels` [b, s] and `is_random` [b] the losses, in float32 (float64 stays).

        Everything else as in `encode`; a stage that is not the last returns its hidden states. `part`: which of the
        rank's stages. Call on all ranks of tp.
        """
        hidden = self.encode(tokens, padding_mask, token_types, part=part)  # [s, b, h]
        if self.layers_of_parts[part].stop != self.shape.num_layers:
            return hidden
        logits = output_logits(self.lm_head(hidden), self.embedding.word_embeddings.weight, self.tp)  # [s, b, V/tp]
        logits = logits + self.output_layer.bias
        order: Tensor | None = None
        if self.pooler is not None and self.binary_head is not None:
            order = self.binary_head(self.pooler(hidden))  # [b, 2]
        if labels is None:
            return BertOutput(logits, order)
        loss = vocabulary_cross_entropy(logits, labels.t(), vocab_size=self.shape.vocab_size, tp=self.tp)  # [s, b]
        if order is not None:
            assert is_random is not None, "a model with an order head needs its labels"
            order = order_loss(order, is_random)  # [b]
        return BertOutput(loss.t(), order)


class _Stage(nn.Module):
    def __init__(self, model: BertModel, part: int) -> None:
        super().__init__()
        self.model = model
        self.part = part

    def forward(self, *inputs: Tensor) -> Tensor | BertOutput:
        output: Tensor | BertOutput = self.model(*inputs, part=self.part)
        return output
