"""What stands before the first block and after the last: embeddings and output logits. Floor 6."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_parm.layers.dropout import StreamDropout
from megatron_parm.layers.embedding import PositionEmbedding, VocabularyEmbedding
from megatron_parm.layers.initialise import Initialiser, attach
from megatron_parm.layers.linear import column_product
from megatron_parm.models.block import make_norm, residual_dtype
from megatron_parm.models.execution import PLAIN, Execution
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.collectives import split
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import Cut, make_parameter


def _vocabulary_initialiser(shape: ModelShape) -> Initialiser:
    return replace(shape.initialiser, valid_rows=shape.vocab_size)


class TokenEmbedding(nn.Module):
    """Word rows, plus learned positions and segments where the model has them, then dropout. Call on all ranks of tp.

    Where norms stand after sums, one stands before the dropout. Under sequence parallelism the result is this rank's
    slice, and `generator` None: the stream that differs on tp.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        tp: Axis,
        generator: torch.Generator | None,
        dtype: torch.dtype,
        device: torch.device,
        execution: Execution = PLAIN,
    ) -> None:
        super().__init__()
        self._sliced_over = tp if execution.sequence_parallel else Axis.single("tp")
        self.word_embeddings = VocabularyEmbedding(
            shape.padded_vocab_size,
            shape.hidden_size,
            tp=tp,
            initialiser=_vocabulary_initialiser(shape),
            dtype=dtype,
            device=device,
            sequence_parallel=execution.sequence_parallel,
        )
        self.position_embeddings: PositionEmbedding | None = None
        if shape.positions == "learned_absolute":
            self.position_embeddings = PositionEmbedding(
                shape.max_positions,
                shape.hidden_size,
                initialiser=shape.initialiser,
                dtype=dtype,
                device=device,
                is_partial_on_tp=execution.sequence_parallel,
            )
        self.tokentype_embeddings: PositionEmbedding | None = None
        if shape.num_token_types:
            self.tokentype_embeddings = PositionEmbedding(
                shape.num_token_types,
                shape.hidden_size,
                initialiser=shape.initialiser,
                dtype=dtype,
                device=device,
                is_partial_on_tp=execution.sequence_parallel,
            )
        self.layernorm: nn.Module = nn.Identity()
        if shape.norm_placement == "post":
            self.layernorm = make_norm(shape, dtype=dtype, device=device, execution=execution)
        self.dropout = StreamDropout(shape.hidden_dropout, generator)
        self.dtype = residual_dtype(shape, dtype)

    def keep_words_alone(self) -> None:
        """Drop all but the word rows: what the head of a last stage that is not the first uses."""
        self.position_embeddings = self.tokentype_embeddings = None
        self.layernorm = nn.Identity()

    def forward(self, tokens: Tensor, position_ids: Tensor, token_types: Tensor | None = None) -> Tensor:
        """[b, s] each -> [s, b, h], identical on tp, or this rank's slice [s/tp, b, h].

        Without `token_types` all tokens are of the first segment.
        """
        x = self.word_embeddings(tokens.t())  # [s, b, h]
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(split(position_ids.t(), self._sliced_over, 0))
        if self.tokentype_embeddings is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            x = x + self.tokentype_embeddings(split(types.t(), self._sliced_over, 0))
        output: Tensor = self.dropout(self.layernorm(x).to(self.dtype))
        return output


class OutputWeight(nn.Module):
    """The weight of an output layer of its own (`--untie-embeddings-and-output-weights`), [V/tp, h]."""

    def __init__(self, shape: ModelShape, *, tp: Axis, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight = make_parameter((shape.padded_vocab_size, shape.hidden_size), Cut(0, tp), dtype=dtype, device=device)
        self.weight = attach(weight, _vocabulary_initialiser(shape))


def output_logits(hidden: Tensor, weight: Tensor, tp: Axis, execution: Execution = PLAIN) -> Tensor:
    """[s, b, h], identical on tp (or slices [s/tp, b, h]), and a tied or own weight [V/tp, h] -> [s, b, V/tp]."""
    return column_product(hidden, weight, None, tp, sequence_parallel=execution.sequence_parallel)  # [s, b, V/tp]
