"""Files of torch.save without torch.load. Reference: the tensors that were saved."""

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_parm.checkpoint.torch_files import StoredTensor, TorchFile
from megatron_parm.errors import CheckpointError, UntrustedCheckpointError

FORMS: dict[str, dict[str, Any]] = {
    "zip": {}, "old": {"_use_new_zipfile_serialization": False}, "protocol 4": {"pickle_protocol": 4}
}  # fmt: skip


def _example() -> dict[str, Any]:
    torch.manual_seed(0)
    whole = torch.randn(5, 6)
    parameter = torch.nn.Parameter(torch.randn(3))
    parameter.model_parallel = True  # type: ignore[attr-defined]  # as Megatron's parameters have
    return {
        "whole": whole, "turned": whole.t()[1:3], "row": whole[2], "number": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "bf16": whole.bfloat16(), "fp16": whole.half(), "fp64": whole.double(), "ids": torch.arange(4),
        "flags": torch.tensor([True, False]), "parameter": parameter, "module": torch.nn.Linear(2, 3).state_dict(),
        "rest": {
            "rng": np.random.get_state(), "scalar": np.float64(1.5), "size": torch.Size([2]), "type": torch.float16,
            "set": {1},
        },
    }  # fmt: skip


def _assert_equal(found: Any, saved: Any) -> None:
    if isinstance(saved, torch.Tensor):
        assert isinstance(found, StoredTensor) and found.info.dtype == saved.dtype
        assert torch.equal(found.read(), saved) and found.read().is_contiguous()
    elif isinstance(saved, dict) and "rng" not in saved:
        assert list(found) == list(saved)
        for name, value in saved.items():
            _assert_equal(found[name], value)


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_is_the_one_that_was_saved(tmp_path: Path, form: str) -> None:
    saved = _example()
    torch.save(saved, tmp_path / "x.pt", **FORMS[form])
    found = TorchFile(tmp_path / "x.pt").value({})
    _assert_equal(found, saved)
    assert found["rest"]["scalar"] == 1.5 and found["rest"]["size"] == (2,) and found["rest"]["set"] == {1}


def test_a_file_inside_another(tmp_path: Path) -> None:
    torch.save(torch.arange(5), tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "joined").write_bytes(b"before" + data + b"after")
    assert torch.equal(TorchFile(tmp_path / "joined", 6, len(data)).value({}).read(), torch.arange(5))
    with pytest.raises(CheckpointError, match="a part of 99999 from 6 on is not there"):
        TorchFile(tmp_path / "joined", 6, 99999).value({})


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("form", FORMS)
def test_what_runs_code_is_refused_unrun(tmp_path: Path, form: str) -> None:
    torch.save({"model": [_Payload(tmp_path / "marker")]}, tmp_path / "x.pt", **FORMS[form])
    with pytest.raises(UntrustedCheckpointError, match=r"x\.pt asks for posix\.mkdir"):
        TorchFile(tmp_path / "x.pt").value({})
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("form", FORMS)
def test_cut_anywhere_it_is_damaged(tmp_path: Path, form: str) -> None:
    torch.save({"a": torch.arange(300), "b": [1]}, tmp_path / "x.pt", **FORMS[form])
    data = (tmp_path / "x.pt").read_bytes()
    for cut in range(0, len(data), 97):
        (tmp_path / "x.pt").write_bytes(data[:cut])
        with pytest.raises(CheckpointError, match=r"x\.pt"):
            TorchFile(tmp_path / "x.pt").value({})["a"].read()


def test_a_flipped_bit_of_a_value_is_found(tmp_path: Path) -> None:
    torch.save(torch.full((300,), 7.0), tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    data[data.index(torch.tensor([7.0, 7.0]).numpy().tobytes()) + 2] ^= 1
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match="the values of x/data/0 have another checksum"):
        TorchFile(tmp_path / "x.pt").value({}).read()


def _rewritten(path: Path, change: Any, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in change(entries).items():
            archive.writestr(name, data)


def test_archives_that_torch_would_not_write(tmp_path: Path) -> None:
    file = tmp_path / "x.pt"
    saved = torch.arange(8)

    def written(change: Any, compression: int = zipfile.ZIP_STORED) -> Any:
        torch.save(saved, file)
        _rewritten(file, change, compression)
        return TorchFile(file).value({})

    assert torch.equal(written(lambda entries: entries).read(), saved)
    with pytest.raises(CheckpointError, match="it is compressed"):
        written(lambda entries: entries, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="other byte order"):
        written(lambda entries: entries | {"x/byteorder": b"big"})
    with pytest.raises(CheckpointError, match="it has no one data"):
        written(lambda entries: entries | {"y/data.pkl": b""})
    with pytest.raises(CheckpointError, match="no storage 0"):
        written(lambda entries: {name: data for name, data in entries.items() if "data/0" not in name})
    with pytest.raises(CheckpointError, match="storage 0 has 8 bytes, its pickle speaks of 8 values"):
        written(lambda entries: entries | {"x/data/0": bytes(8)}).read()
    # the tensor's shape (8,) is the only K\x08\x85: one more value than the storage has
    with pytest.raises(CheckpointError, match="reaches to value 9 of storage 0, which has 8"):
        written(lambda entries: entries | {"x/data.pkl": entries["x/data.pkl"].replace(b"K\x08\x85", b"K\x09\x85")})
