"""Rows of a parquet file. Reference: the table that was written."""

import builtins

import pyarrow
import pytest
from pyarrow import parquet

from megatron_parm.data.parquet_rows import find_rows
from megatron_parm.data.text_chunks import read_texts
from megatron_parm.errors import ConfigError, DataError


def table(path, texts, **more):
    parquet.write_table(pyarrow.table({"text": texts, **more}), path, row_group_size=30)
    return path


@pytest.mark.parametrize("chunk_bytes", [1, 100, 10**6])
def test_rows_come_in_order_with_their_numbers(tmp_path, chunk_bytes) -> None:
    texts = [f"text {number} \u00e9" for number in range(200)]
    path = table(tmp_path / "x.parquet", texts, other=[str(number) for number in range(200)])
    chunks = list(find_rows(path, ["other", "text"], chunk_bytes))
    found = [row for chunk in chunks for row in read_texts(chunk, ["other", "text"])[0]]
    assert found == [(number + 1, [str(number), text]) for number, text in enumerate(texts)]
    assert sum(chunk.read for chunk in chunks) == path.stat().st_size
    assert (len(chunks) > 1) == (chunk_bytes < 10**6)


def test_values_that_are_no_text_and_too_long_ones_are_broken(tmp_path) -> None:
    path = table(tmp_path / "x.parquet", ["a", None, "b" * 50])
    (chunk,) = find_rows(path, ["text"], 10**6, max_document_bytes=20)
    found, broken = read_texts(chunk, ["text"])
    assert found == [(1, ["a"])]
    assert [(place.line, place.is_too_long) for place in broken] == [(2, False), (3, True)]
    assert "must be text, found NoneType" in broken[0].reason


def test_files_and_packages_that_cannot_serve_are_named(tmp_path, monkeypatch) -> None:
    path = table(tmp_path / "x.parquet", ["a"])
    with pytest.raises(DataError, match=r"x.parquet: no column 'body' .*; the columns are: text"):
        list(find_rows(path, ["body"], 10))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match="not a parquet file"):
        list(find_rows(path, ["text"], 10))
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        list(find_rows(path, ["text"], 10))
