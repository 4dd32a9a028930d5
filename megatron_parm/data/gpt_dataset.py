"""Samples of a GPT: windows of `sequence_length` tokens over the joined, shuffled documents. Floor 4."""

from dataclasses import dataclass
from typing import NotRequired, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.indexed_dataset import TokenSource
from megatron_parm.data.token_index import TokenIndex
from megatron_parm.errors import DataError


class Sample(TypedDict):
    """One sample; `attention_mask` [1, s, s] (True = may not attend) only where documents are kept apart.

    `is_text` [s], False for padding, only where samples are padded.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    position_ids: NDArray[np.int64]
    attention_mask: NotRequired[NDArray[np.bool_]]
    is_text: NotRequired[NDArray[np.bool_]]


class SampleSource(Protocol):
    """Anything that samples are taken from by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Sample: ...


@dataclass(frozen=True)
class DocumentRules:
    """What the end of a document means inside a sample. Fields are Megatron's flags; `eod` is the id that ends one.

    `eod_mask_loss` takes the loss of an input EOD out; `reset_position_ids` counts anew after it;
    `reset_attention_mask` lets no token see past it.
    """

    eod: int | None = None
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False


class GPTDataset:
    """Samples of `sequence_length` inputs and as many labels, in shuffled order.

    Neighbours in document order overlap by one token: the last label of one is the first input of the next.
    """

    def __init__(self, source: TokenSource, index: TokenIndex, sequence_length: int, rules: DocumentRules) -> None:
        self.source = source
        self.index = index
        self.sequence_length = sequence_length
        self.rules = rules

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Sample:
        ids = self.token_ids(number)
        return make_sample(ids, self.rules)

    def token_ids(self, number: int) -> NDArray[np.int64]:
        """The `sequence_length` + 1 ids of a sample."""
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {self.source.name}, which has {len(self)}")
        (first, start), (last, stop) = self._window(number)
        document = self.index.document
        if first == last:
            return self.source.read(int(document[first]), start, stop + 1).astype(np.int64)
        pieces = [self.source.read(int(document[first]), start)]
        pieces += [self.source.read(int(document[place])) for place in range(first + 1, last)]
        pieces.append(self.source.read(int(document[last]), 0, stop + 1))
        return np.concatenate(pieces, dtype=np.int64)

    def _window(self, number: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where a sample begins and ends: (place in the document index, offset). A damaged index is an error."""
        row, index = int(self.index.shuffle[number]), self.index
        if not 0 <= row < len(index.sample) - 1:
            raise self._damaged(f"sample {number} is row {row} of {len(index.sample) - 1}")
        (first, start), (last, stop) = index.sample[row].tolist(), index.sample[row + 1].tolist()
        if not 0 <= first <= last < len(index.document):
            raise self._damaged(f"row {row} spans the documents {first} to {last} of {len(index.document)}")
        sequences = index.document[first : last + 1]
        if int(sequences.min()) < 0 or int(sequences.max()) >= len(self.source.lengths):
            raise self._damaged(f"row {row} names sequences {sequences.min()} to {sequences.max()}")
        lengths = self.source.lengths[sequences]
        tokens = int(lengths.sum(dtype=np.int64)) - start - (int(lengths[-1]) - stop - 1)
        if not (0 <= start <= int(lengths[0]) and 0 <= stop < int(lengths[-1]) and tokens == self.sequence_length + 1):
            raise self._damaged(f"row {row} runs from token {start} of its first document to {stop} of its last")
        return (first, start), (last, stop)

    def _damaged(self, problem: str) -> DataError:
        return DataError(
            f"the index of {self.source.name} is damaged: {problem}, and there are {len(self.source.lengths)} "
            "sequences; delete the index cache (--data-cache-path, else the folder cache/ beside the data)"
        )


def make_sample(ids: NDArray[np.int64], rules: DocumentRules) -> Sample:
    """The sample of `sequence_length` + 1 ids, under the given rules at the ends of documents."""
    tokens, labels = ids[:-1], ids[1:]
    length = len(tokens)
    loss_mask = np.ones(length, dtype=np.float32)
    position_ids = np.arange(length, dtype=np.int64)
    is_end = tokens == rules.eod if rules.eod is not None else np.zeros(length, dtype=bool)
    if rules.eod_mask_loss:
        loss_mask[is_end] = 0.0
    document = np.cumsum(is_end) - is_end  # number of each token's document within the sample
    if rules.reset_position_ids:
        starts = np.concatenate([[0], np.flatnonzero(is_end) + 1])
        position_ids -= starts[document]
    sample = Sample(tokens=tokens, labels=labels, loss_mask=loss_mask, position_ids=position_ids)
    if rules.reset_attention_mask:
        is_later = np.triu(np.ones((length, length), dtype=bool), k=1)
        sample["attention_mask"] = (is_later | (document[:, None] != document[None, :]))[None]
    return sample
