"""Word embedding with the vocabulary cut over tp, and learned positions. Floor 4.

Source: Shoeybi et al. 2019, section 3 (each rank looks up the words it holds, the sum joins them).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_parm.layers.initialise import Initialiser, attach
from megatron_parm.parallel.collectives import all_reduce, reduce_scatter
from megatron_parm.parallel.context import Axis
from megatron_parm.parallel.sharding import Cut, make_parameter


class VocabularyEmbedding(nn.Module):
    """Rows of a table whose `padded_vocab_size` rows are cut over tp. Call on all ranks of tp.

    Ids must lie in the vocabulary: the data room checks them. `initialiser.valid_rows` names the rows that are words.
    With `sequence_parallel` a rank gets the vectors of its own slice of the first dim alone.
    """

    def __init__(
        self,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        tp: Axis,
        initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel
        weight = make_parameter((padded_vocab_size, hidden_size), Cut(0, tp), dtype=dtype, device=device)
        self.weight = attach(weight, initialiser)

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids of any shape [...] -> [..., h], identical on tp; with `sequence_parallel` [s, ...] -> [s/tp, ..., h]."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight)  # [..., h]
        rows = self.weight.shape[0]
        local = tokens - self.tp.rank * rows
        is_elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(is_elsewhere, 0), self.weight)  # [..., h]
        found = found.masked_fill(is_elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter(found, self.tp, 0)  # [s/tp, ..., h]
        return all_reduce(found, self.tp)  # [..., h]


class PositionEmbedding(nn.Module):
    """A learned row for each of `max_positions` positions, whole on every rank.

    `is_partial_on_tp`: each rank of tp looks up the positions of its own slice of the sequence.
    """

    def __init__(
        self,
        max_positions: int,
        hidden_size: int,
        *,
        initialiser: Initialiser,
        dtype: torch.dtype,
        device: torch.device,
        is_partial_on_tp: bool = False,
    ) -> None:
        super().__init__()
        shape = (max_positions, hidden_size)
        weight = make_parameter(shape, is_partial_on_tp=is_partial_on_tp, dtype=dtype, device=device)
        self.weight = attach(weight, initialiser)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Positions of any shape [...] -> [..., h]."""
        return F.embedding(position_ids, self.weight)  # [..., h]
