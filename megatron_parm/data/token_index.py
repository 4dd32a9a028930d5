"""Which tokens make sample number i: the document, sample and shuffle indices. Floor 4. Source: formats C.2.

Same lengths, seed, sequence length and request give Megatron's arrays, element for element; nothing is looped over in
Python. One numpy `RandomState(seed)` is used first for the document index, then for the shuffle index.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from megatron_parm.errors import DataError

Integers: TypeAlias = "NDArray[np.integer]"

_INT32_MAX = 2**31 - 1
_CHUNK_ROWS = 1 << 20


@dataclass(frozen=True)
class EpochPlan:
    """How often the data is walked through for a request. Tokens are counted over the split, not the file."""

    tokens_per_epoch: int
    sequence_length: int
    requested: int
    epochs: int
    is_last_epoch_separate: bool

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one epoch alone."""
        return (self.tokens_per_epoch - 1) // self.sequence_length

    @property
    def total_samples(self) -> int:
        """Samples of all epochs: at least those requested."""
        return (self.epochs * self.tokens_per_epoch - 1) // self.sequence_length

    @property
    def samples_before_last_epoch(self) -> int:
        """Samples that need no token of the last epoch."""
        return ((self.epochs - 1) * self.tokens_per_epoch - 1) // self.sequence_length


@dataclass(frozen=True)
class TokenIndex:
    """The three arrays: sequence numbers in reading order, sample starts [samples + 1, 2], and the sample order."""

    document: Integers
    sample: Integers
    shuffle: Integers

    def __len__(self) -> int:
        return len(self.shuffle)


def plan_epochs(tokens_per_epoch: int, sequence_length: int, requested: int | None, source: str) -> EpochPlan:
    """The smallest number of epochs that holds `requested` samples of `sequence_length` + 1 tokens; None: one epoch.

    Raises DataError naming `source` when the data cannot give a single sample.
    """
    if tokens_per_epoch < 1:
        raise DataError(f"{source}: holds no tokens, so no sample can be made of it")
    if requested is None:
        requested = (tokens_per_epoch - 1) // sequence_length
        if requested < 1:
            raise DataError(
                f"{source}: {tokens_per_epoch} tokens make no sample of --seq-length {sequence_length} "
                f"(+ 1 label); use a shorter sequence or more text"
            )
    epochs = max(1, -(-(requested * sequence_length + 1) // tokens_per_epoch))
    separate = False
    if epochs > 1:
        before = ((epochs - 1) * tokens_per_epoch - 1) // sequence_length
        per_epoch = (tokens_per_epoch - 1) // sequence_length
        separate = requested - before < int(0.80 * per_epoch)
    return EpochPlan(tokens_per_epoch, sequence_length, requested, epochs, separate)


def build_token_index(lengths: Integers, sequences: Integers, plan: EpochPlan, seed: int) -> TokenIndex:
    """The indices over the given `sequences` of a file whose sequence lengths are `lengths`."""
    random = np.random.RandomState(seed)
    document = _document_index(sequences, plan, random)
    sample = _sample_index(lengths, document, plan)
    return TokenIndex(document, sample, _shuffle_index(plan, random))


def sample_dtype(num_positions: int, max_length: int) -> "np.dtype[np.integer]":
    """The type of the sample index: i32, or i64 if a position in the document index or an offset could exceed it."""
    return np.dtype(np.int32 if max(num_positions, max_length) <= _INT32_MAX else np.int64)


def document_dtype(max_sequence: int) -> "np.dtype[np.integer]":
    """The type of the document index: i32 as in Megatron, i64 if a sequence number exceeds it."""
    return np.dtype(np.int32 if max_sequence <= _INT32_MAX else np.int64)


def shuffle_dtype(num_samples: int) -> "np.dtype[np.integer]":
    """The type of the shuffle index: u32, or i64 for four thousand million samples and more."""
    return np.dtype(np.int64 if num_samples >= 2**32 - 2 else np.uint32)


def _document_index(sequences: Integers, plan: EpochPlan, random: np.random.RandomState) -> Integers:
    ids = sequences.astype(document_dtype(int(sequences.max())))
    last = 1 if plan.is_last_epoch_separate else 0
    first_epochs = np.tile(ids, plan.epochs - last)
    random.shuffle(first_epochs)
    if not last:
        return first_epochs
    random.shuffle(ids)
    return np.concatenate([first_epochs, ids])


def _sample_index(lengths: Integers, document: Integers, plan: EpochPlan) -> Integers:
    """Row i points at token i * sequence_length of the joined documents: where sample i begins and i - 1 ends."""
    sizes = lengths[document]
    ends = np.cumsum(sizes, dtype=np.int64)
    rows = np.zeros((plan.total_samples + 1, 2), dtype=sample_dtype(len(document), int(sizes.max())))
    for start in range(0, len(rows), _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, len(rows))
        token = np.arange(start, stop, dtype=np.int64) * plan.sequence_length
        position = np.searchsorted(ends, token, side="right")
        rows[start:stop, 0] = position
        rows[start:stop, 1] = token - (ends[position] - sizes[position])
    rows[0] = 0
    return rows


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> Integers:
    total = plan.total_samples
    first = plan.samples_before_last_epoch if plan.is_last_epoch_separate else total
    order = np.arange(total, dtype=shuffle_dtype(total))
    random.shuffle(order[:first])
    if first != total:
        random.shuffle(order[first:])
    return order
