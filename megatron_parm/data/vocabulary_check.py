"""Finds a token id outside the vocabulary before training begins. Floor 4."""

import numpy as np

from megatron_parm.data.index_cache import IndexCache, file_facts
from megatron_parm.data.index_format import bin_path
from megatron_parm.data.indexed_dataset import IndexedDataset
from megatron_parm.errors import DataError


def check_token_ids(dataset: IndexedDataset, vocab_size: int, cache: IndexCache) -> None:
    """Raise DataError naming the file, the id and its place if an id is not in 0..vocab_size-1.

    Reads the whole `.bin` once; its smallest and largest ids are kept in the cache for the next run.
    """
    if not dataset.num_tokens:
        return
    found = cache.get_or_build("token-range", file_facts(dataset.name), lambda: {"extremes": _extremes(dataset)})
    for token, place in found["extremes"].tolist():
        if not 0 <= token < vocab_size:
            sequence, inside = dataset.locate(place)
            raise DataError(
                f"{bin_path(dataset.name)}: token id {token} at place {inside} of sequence {sequence} is outside the "
                f"vocabulary, 0..{vocab_size - 1}; give the tokenizer (--vocab-file, --tokenizer-model or "
                "--vocab-size) that the data was preprocessed with"
            )


def _extremes(dataset: IndexedDataset) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """The largest and the smallest id, each with its place in the `.bin`: [2, 2]."""
    largest, smallest = (-(2**63), 0), (2**63 - 1, 0)
    start = 0
    for chunk in dataset.chunks():
        high, low = int(chunk.max()), int(chunk.min())
        if high > largest[0]:
            largest = (high, start + int(chunk.argmax()))
        if low < smallest[0]:
            smallest = (low, start + int(chunk.argmin()))
        start += len(chunk)
    return np.array([largest, smallest], dtype=np.int64)
