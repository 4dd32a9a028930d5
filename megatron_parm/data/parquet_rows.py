"""The rows of a parquet file as chunks for the workers. Floor 4. Needs the optional package pyarrow."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_parm.data.text_chunks import MAX_DOCUMENT_BYTES, TextChunk
from megatron_parm.errors import ConfigError, DataError

_ROWS = 64


def find_rows(
    path: Path, keys: Sequence[str], chunk_bytes: int, max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[TextChunk]:
    """Chunks of about `chunk_bytes` of the columns `keys`; a row's number, from 1, stands for its line.

    Raises DataError for a file that is damaged or lacks a column, ConfigError where pyarrow is missing.
    """
    try:
        from pyarrow import lib, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading parquet needs a package that is not installed: pip install pyarrow"
        ) from error
    try:
        opened: Any = parquet.ParquetFile
        with opened(path, pre_buffer=False, memory_map=True) as file:
            missing = [key for key in keys if key not in file.schema_arrow.names]
            if missing:
                raise DataError(
                    f"{path}: no column {missing[0]!r} (--json-keys); the columns are: "
                    f"{', '.join(file.schema_arrow.names[:8])}"
                )
            yield from _chunks(path, file, list(keys), chunk_bytes, max_document_bytes)
    except (lib.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file that can be read ({error})") from error


def _chunks(path: Path, file: Any, keys: list[str], chunk_bytes: int, limit: int) -> Iterator[TextChunk]:
    total_rows, file_bytes = max(file.metadata.num_rows, 1), path.stat().st_size
    rows: list[tuple[object, ...]] = []
    size, first, done, read = 0, 1, 0, 0
    for batch in file.iter_batches(batch_size=_ROWS, columns=keys):
        columns = [batch.column(batch.schema.get_field_index(key)).to_pylist() for key in keys]
        for row in zip(*columns, strict=True):
            rows.append(row)
            size += sum(len(value) if isinstance(value, str) else 8 for value in row)
            if size >= chunk_bytes:
                done += len(rows)
                behind = file_bytes * done // total_rows
                yield TextChunk(path, 0, size, first, True, limit, read=behind - read, rows=tuple(rows))
                rows, size, first, read = [], 0, done + 1, behind
    if rows:
        yield TextChunk(path, 0, size, first, True, limit, read=file_bytes - read, rows=tuple(rows))
