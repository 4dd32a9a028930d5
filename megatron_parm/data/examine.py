"""What a `.bin`/`.idx` pair holds, everything that is wrong with it, and a whole copy of a broken one. Floor 4.

Two public faults of Megatron 2.x can be repaired, since the lengths still tell where every sequence lies: its merge
left the document index of the first part (NVIDIA/Megatron-LM#81, #718), and offsets beyond 2 GiB overflowed (#1672).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron_parm.data.index_checks import CHUNK, document_problems, index_problems
from megatron_parm.data.index_format import FLOAT_CODES, bin_path, idx_path, sequence_offsets
from megatron_parm.data.indexed_dataset import IndexedDataset, RawIndex
from megatron_parm.data.indexed_writer import IndexedWriter
from megatron_parm.data.token_file import PlainTokens
from megatron_parm.errors import ConfigError, DataError

DocumentRule = Literal["sequence", "eod"]
MOST_PROBLEMS = 20


@dataclass(frozen=True)
class Contents:
    """What the index of a pair says, sound or not."""

    code: int
    dtype: str
    sequences: int
    document_entries: int
    tokens: int
    bin_bytes: int
    trailing_bytes: int
    has_modes: bool
    shortest: int
    median: int
    longest: int
    empty_sequences: int
    empty_documents: int
    is_one_sequence_a_document: bool


@dataclass(frozen=True)
class TokenCensus:
    """A walk over all ids: the extremes, and how often a sequence ends with `eod` or holds it elsewhere."""

    smallest: int
    largest: int
    eod_at_ends: int
    eod_inside: int


def contents(prefix: str) -> Contents:
    """What the index says. Raises DataError where the header cannot be read."""
    raw = RawIndex(prefix)
    lengths, entries = raw.lengths, raw.document_index
    counts = np.diff(entries) if len(entries) else np.zeros(0, np.int64)
    return Contents(
        code=raw.header.code,
        dtype=str(raw.dtype),
        sequences=len(lengths),
        document_entries=len(entries),
        tokens=int(lengths.sum(dtype=np.int64)),
        bin_bytes=raw.bin_bytes,
        trailing_bytes=raw.header.trailing_bytes,
        has_modes=raw.modes is not None,
        shortest=int(lengths.min()) if len(lengths) else 0,
        median=int(np.median(lengths)) if len(lengths) else 0,
        longest=int(lengths.max()) if len(lengths) else 0,
        empty_sequences=int(np.count_nonzero(lengths == 0)),
        empty_documents=int(np.count_nonzero(counts == 0)),
        is_one_sequence_a_document=bool(len(entries) == len(lengths) + 1 and (counts == 1).all()),
    )


def problems(prefix: str, vocab_size: int | None = None) -> list[str]:
    """Everything wrong with lengths, offsets and document bounds, and with `vocab_size` every id outside it.

    At most 20 of each kind. Nothing is raised: a header that cannot be read is the only problem then.
    """
    try:
        raw = RawIndex(prefix)
    except DataError as error:
        return [str(error)]
    found = _first_of_each_kind(raw, prefix)
    if not found and vocab_size is not None and raw.header.code not in FLOAT_CODES:
        found = list(islice(_foreign_ids(IndexedDataset(prefix), vocab_size), MOST_PROBLEMS))
    return found


def census(prefix: str, eod: int | None) -> TokenCensus:
    """Count the ids of a sound file."""
    dataset = IndexedDataset(prefix)
    smallest, largest, num_eod = 2**63 - 1, -(2**63), 0
    for ids in dataset.chunks():
        smallest, largest = min(smallest, int(ids.min())), max(largest, int(ids.max()))
        num_eod += 0 if eod is None else int(np.count_nonzero(ids == eod))
    if not dataset.num_tokens:
        smallest, largest = 0, 0
    at_ends = 0 if eod is None else int(np.count_nonzero(_ends_with(prefix, dataset.dtype, dataset.lengths, eod)))
    return TokenCensus(smallest, largest, at_ends, num_eod - at_ends)


def repair(
    prefix: str,
    output: str,
    *,
    parts: Sequence[str] = (),
    documents: DocumentRule | None = None,
    eod: int | None = None,
) -> list[str]:
    """Write a whole copy of a broken merge to `output`; what was put right, in sentences.

    Where the document index is wrong, it is made from the `parts` that were merged, or by a rule: every sequence is a
    document (a GPT file), or one ends with each sequence that ends with `eod`. Raises DataError where that cannot be
    known or where lengths and `.bin` do not fit each other, ConfigError if `output` is the file itself.
    """
    if Path(prefix).resolve() == Path(output).resolve():
        raise ConfigError(f"--repair {output} is the broken file itself; a repair is never made in place: name another")
    raw = RawIndex(prefix)
    item_bytes = raw.dtype.itemsize
    offsets = sequence_offsets(raw.lengths, item_bytes)
    lost = list(
        index_problems(raw.lengths, offsets, np.array([0, len(raw.lengths)]), item_bytes, raw.bin_bytes, prefix)
    )
    if lost:
        raise DataError(f"{lost[0]} (no repair can bring back what is missing)")
    done = []
    if not np.array_equal(offsets, raw.offsets):
        wrong = int(np.count_nonzero(offsets != raw.offsets))
        done.append(f"{wrong} offsets counted anew in 64 bits")
    entries = raw.document_index
    problem = next(document_problems(entries, len(raw.lengths), idx_path(prefix)), None)
    if problem is not None:
        entries, how = _documents(raw, prefix, parts, documents, eod)
        done.append(f"{len(entries) - 1} documents in place of {max(len(raw.document_index) - 1, 0)}: {how}")
    numbers = _numbers(prefix, raw.dtype, raw.bin_bytes // item_bytes)
    with IndexedWriter(output, raw.dtype, has_modes=raw.modes is not None) as writer:
        writer.add_arrays(numbers, raw.lengths, entries, raw.modes)
    return done or ["nothing was wrong: the copy equals the original"]


def _first_of_each_kind(raw: RawIndex, prefix: str) -> list[str]:
    arguments = (raw.lengths, raw.offsets, raw.document_index, raw.dtype.itemsize, raw.bin_bytes, prefix)
    kinds: Counter[str] = Counter()
    found: list[str] = []
    for text in islice(index_problems(*arguments), 1000):
        kind = text.partition(": ")[2][:12]
        kinds[kind] += 1
        if kinds[kind] <= MOST_PROBLEMS:
            found.append(text)
    return found


def _foreign_ids(dataset: IndexedDataset, vocab_size: int) -> Iterator[str]:
    start = 0
    for ids in dataset.chunks():
        for bad in np.flatnonzero((ids < 0) | (ids >= vocab_size)):
            sequence, inside = dataset.locate(start + int(bad))
            yield (
                f"{bin_path(dataset.name)}: token id {ids[bad]} at place {inside} of sequence {sequence} is outside "
                f"the vocabulary, 0..{vocab_size - 1}"
            )
        start += len(ids)


def _numbers(prefix: str, dtype: "np.dtype[np.integer]", count: int) -> Iterator[NDArray[np.integer]]:
    """All numbers of a `.bin`, whatever its index says."""
    file = PlainTokens(bin_path(prefix), dtype)
    for start in range(0, count, CHUNK):
        yield file.read(start, min(CHUNK, count - start))


def _ends_with(prefix: str, dtype: "np.dtype[np.integer]", lengths: NDArray[np.int32], eod: int) -> NDArray[np.bool_]:
    """Of each sequence, whether its last id is `eod`; the sequences lie back to back."""
    ends = np.cumsum(lengths, dtype=np.int64)
    full = np.flatnonzero(lengths > 0)
    last = ends[full] - 1
    found = np.zeros(len(lengths), dtype=bool)
    start = 0
    for ids in _numbers(prefix, dtype, int(ends[-1]) if len(ends) else 0):
        low, high = np.searchsorted(last, [start, start + len(ids)])
        found[full[low:high]] = ids[last[low:high] - start] == eod
        start += len(ids)
    return found


def _documents(
    raw: RawIndex, prefix: str, parts: Sequence[str], documents: DocumentRule | None, eod: int | None
) -> tuple[NDArray[np.int64], str]:
    """The document index that belongs to the lengths, and where it comes from."""
    if parts:
        return _documents_of_parts(raw, prefix, parts), f"those of {', '.join(parts)}"
    if documents == "eod":
        if eod is None:
            raise ConfigError("--documents eod needs to know the end of document: give the tokenizer, or --eod ID")
        ends = np.flatnonzero(_ends_with(prefix, raw.dtype, raw.lengths, eod)) + 1
        if not len(ends):
            raise DataError(f"{prefix}: no sequence ends with the end of document {eod}; give --parts")
        rest = [len(raw.lengths)] if ends[-1] != len(raw.lengths) else []
        return np.concatenate([[0], ends, rest]).astype(np.int64), f"each ends with the id {eod}"
    known = np.diff(raw.document_index)
    if (known != 1).any():
        raise DataError(
            f"{idx_path(prefix)}: its first documents have several sequences each, so the lost ones cannot be told; "
            "give the files that were merged with --parts, or --documents eod with the tokenizer"
        )
    if documents is None and not len(known):
        raise ConfigError(
            f"{idx_path(prefix)}: no document is left to tell of what kind the file is; give --parts with the files "
            "that were merged, --documents sequence for a GPT file (a document is one sequence), or --documents eod"
        )
    return np.arange(len(raw.lengths) + 1, dtype=np.int64), "each is one sequence"


def _documents_of_parts(raw: RawIndex, prefix: str, parts: Sequence[str]) -> NDArray[np.int64]:
    opened = [IndexedDataset(part, allows_floats=True) for part in parts]
    joined = np.concatenate([part.lengths for part in opened])
    if not np.array_equal(joined, raw.lengths):
        raise DataError(
            f"--parts: their {len(joined)} sequences are not the {len(raw.lengths)} of {prefix}; name all the files "
            "that were merged, in that order"
        )
    starts = np.cumsum([0, *(len(part) for part in opened)])
    entries = [part.document_index[1:] + start for part, start in zip(opened, starts, strict=False)]
    return np.concatenate([[0], *entries]).astype(np.int64)
