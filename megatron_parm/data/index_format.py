"""The byte layout of Megatron's `.idx` files and the number types of `.bin` files. Floor 4.

Header of 34 bytes (magic, u64 version, u8 dtype code, u64 sequences, u64 document entries, little-endian), then
i32 lengths, i64 byte offsets, i64 document entries, unaligned. Source: formats C.1.
"""

import struct
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megatron_parm.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES: dict[int, np.dtype[np.integer]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
FLOAT_CODES = (6, 7)
_FLOAT64, _FLOAT32 = np.dtype("<f8"), np.dtype("<f4")
SMALL_VOCABULARY = 65500
MAX_LENGTH = 2**31 - 1


def bin_path(prefix: str | Path) -> Path:
    """The file of token ids of `prefix`."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The index file of `prefix`."""
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> "np.dtype[np.integer]":
    """The type Megatron stores ids of an unpadded vocabulary in: u16 below 65500, else i32."""
    return TOKEN_DTYPES[8 if vocab_size < SMALL_VOCABULARY else 4]


def number_dtype(code: int, lengths: NDArray[np.integer], bin_bytes: int) -> "np.dtype[np.integer]":
    """The type of the numbers of a file with this code in its header.

    Floats count as numbers here, though they are no token ids. Code 7 is float64 in Megatron 2.x and float32 in
    Megatron-Core: the one in which `lengths` fill the `bin_bytes` of the `.bin`.
    """
    if code in TOKEN_DTYPES:
        return TOKEN_DTYPES[code]
    is_wide = code == 6 or int(lengths.sum(dtype=np.int64)) * _FLOAT64.itemsize == bin_bytes != 0
    return cast("np.dtype[np.integer]", _FLOAT64 if is_wide else _FLOAT32)


def dtype_code(dtype: "np.dtype[np.integer]") -> int:
    """The code of `dtype` in the header, for floats that of Megatron-Core."""
    if dtype.kind == "f":
        return 6 if dtype == _FLOAT64 else 7
    return next(code for code, known in TOKEN_DTYPES.items() if known == dtype)


def sequence_offsets(lengths: NDArray[np.integer], item_bytes: int) -> NDArray[np.int64]:
    """The byte offset of every sequence in the `.bin`, counted in 64 bits whatever the type of `lengths`."""
    offsets = np.zeros(len(lengths), dtype=np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    return offsets * np.int64(item_bytes)


def check_lengths(lengths: NDArray[np.integer], source: object) -> None:
    """Raise DataError naming `source` if a sequence length does not fit the i32 of the index."""
    if len(lengths) and (int(lengths.min()) < 0 or int(lengths.max()) > MAX_LENGTH):
        bad = int(lengths.max()) if int(lengths.min()) >= 0 else int(lengths.min())
        raise DataError(f"{source}: a sequence of {bad} tokens; the index holds lengths from 0 to {MAX_LENGTH}")
