"""Compressed text. Reference: Python's gzip and the zstandard package on the same bytes."""

import builtins
import gzip
from pathlib import Path

import pytest
import zstandard

from megatron_parm.data.compressed import is_compressed, open_stream, plain_suffix
from megatron_parm.errors import ConfigError, DataError

TEXT = b"".join(b"line %d \xc3\xa9\n" % number for number in range(30_000))
PACK = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor(write_checksum=True).compress}


def read(path: Path) -> bytes:
    with open_stream(path) as (stream, position):
        text = b""
        while part := stream.read(10_000):
            text += part
        assert position() == path.stat().st_size
    return text


@pytest.mark.parametrize("suffix", PACK)
def test_streams_of_one_and_several_parts(tmp_path, suffix) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(PACK[suffix](TEXT))
    assert read(path) == TEXT
    path.write_bytes(PACK[suffix](TEXT[:1000]) + PACK[suffix](b"") + PACK[suffix](TEXT[1000:]))
    assert read(path) == TEXT
    path.write_bytes(PACK[suffix](b""))
    assert read(path) == b""
    with open_stream(path) as (stream, _):
        assert stream.readline() == b""


@pytest.mark.parametrize("suffix", PACK)
def test_what_is_cut_or_damaged_is_named(tmp_path, suffix) -> None:
    path = tmp_path / f"x.jsonl{suffix}"
    whole = PACK[suffix](TEXT)
    for content in (whole[: len(whole) // 2], whole[:-3], b"no such format", whole[:100] + b"\xff" * 50 + whole[150:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"x.jsonl{suffix}: compressed data that is cut or damaged"):
            read(path)


def test_names(tmp_path) -> None:
    assert [is_compressed(Path(name)) for name in ("a.gz", "a.ZST", "a.jsonl", "gz")] == [True, True, False, False]
    assert [plain_suffix(Path(name)) for name in ("a.txt.gz", "a.parquet", "b.gz", "c.JSONL")] == [
        ".txt",
        ".parquet",
        "",
        ".jsonl",
    ]
    (tmp_path / "x").write_bytes(TEXT)
    assert read(tmp_path / "x") == TEXT


def test_a_missing_package_is_named(tmp_path, monkeypatch) -> None:
    (tmp_path / "x.zst").write_bytes(zstandard.compress(TEXT))
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "zstandard":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="pip install zstandard"), open_stream(tmp_path / "x.zst"):
        pass
