"""Small data files for the tests of this room."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_parm.data.indexed_writer import IndexedWriter


def write_documents(prefix: str | Path, documents: Sequence[Sequence[int]], dtype: str = "u2") -> str:
    """Write one sequence per document; returns the prefix as text."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=np.int64))
    return str(prefix)


def numbered_documents(lengths: Sequence[int], eod: int) -> list[list[int]]:
    """Documents of running numbers, each ended by `eod`: every token but the ends tells its place."""
    documents, number = [], 0
    for length in lengths:
        documents.append([*range(number, number + length - 1), eod])
        number += length - 1
    return documents
