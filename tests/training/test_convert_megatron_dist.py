"""torch_dist folders of Megatron-Core. Reference: whole tensors, cut into pieces here with torch DCP's own classes."""

import argparse
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_parm.errors import CheckpointError, UntrustedCheckpointError
from megatron_parm.training import convert as conversion
from tests.checkpoint.test_pickle_values import _Calls
from tests.training import megatron_files as files
from tests.training.test_convert import assert_equal_bits
from tests.training.test_convert_megatron import TRUSTED, _ours

convert = partial(conversion.convert, largest_file=10**9)
EXPERTS, WIDTH = 2, files.WIDTH
ARGUMENTS = files.ARGUMENTS | {
    "num_experts": EXPERTS, "moe_router_topk": 2, "moe_layer_freq": [0, 1, 1, 1], "swiglu": True,
    "untie_embeddings_and_output_weights": True, "add_bias_linear": False, "normalization": "RMSNorm",
}  # fmt: skip


def _whole() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors by names of torch_dist, layers of experts stacked and the dense one alone; and the same as ours."""
    generator = torch.Generator().manual_seed(8)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    h = files.HIDDEN
    theirs = {"embedding.word_embeddings.weight": draw(files.WORDS, h), "output_layer.weight": draw(files.WORDS, h)}
    theirs |= {"embedding.position_embeddings.weight": draw(files.LENGTH, h), "decoder.final_layernorm.weight": draw(h)}
    ours = dict(theirs)
    of_layer = {
        "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", (h,)),
        "self_attention.linear_qkv.weight": ("self_attention.linear_qkv.weight", (3 * h, h)),
        "self_attention.linear_proj.weight": ("self_attention.linear_proj.weight", (h, h)),
    }
    for name, (own, shape) in of_layer.items():
        theirs[f"decoder.layers.{name}"] = stacked = draw(files.LAYERS, *shape)
        ours |= {f"decoder.layers.{layer}.{own}": stacked[layer] for layer in range(files.LAYERS)}
    for layer in range(files.LAYERS):
        to = f"decoder.layers.{layer}."
        if layer == 0:
            theirs[f"{to}mlp.linear_fc1.layer_norm_weight"] = ours[f"{to}pre_mlp_layernorm.weight"] = draw(h)
            theirs[f"{to}mlp.linear_fc1.weight"] = first = draw(2 * WIDTH, h)
            theirs[f"{to}mlp.linear_fc2.weight"] = ours[f"{to}mlp.linear_fc2.weight"] = draw(h, WIDTH)
            ours[f"{to}mlp.linear_fc1.weight"] = first.view(2, WIDTH, h)
            continue
        theirs[f"{to}pre_mlp_layernorm.weight"] = ours[f"{to}pre_mlp_layernorm.weight"] = draw(h)
        theirs[f"{to}mlp.router.weight"] = ours[f"{to}mlp.router.weight"] = draw(EXPERTS, h)
        theirs[f"{to}mlp.experts.experts.linear_fc1.weight"] = first = draw(EXPERTS, 2 * WIDTH, h)
        theirs[f"{to}mlp.experts.experts.linear_fc2.weight"] = ours[f"{to}mlp.experts.weight2"] = draw(
            EXPERTS, h, WIDTH
        )
        ours[f"{to}mlp.experts.weight1"] = first.view(EXPERTS, 2, WIDTH, h)
    return theirs, ours


def write_dist(folder: Path, tensors: dict[str, Tensor], pieces: int = 2, **more: Any) -> Metadata:
    """Write `tensors`, each in `pieces` along its longest dim, over two files, and beside them what is no weight."""
    folder.mkdir(parents=True)
    metadata = Metadata(state_dict_metadata={}, storage_data={}, planner_data={"a": ("a",)})
    held: dict[str, bytearray] = {"__0_0.distcp": bytearray(b""), "__1_0.distcp": bytearray(b"")}
    moments = {f"optimizer.state.exp_avg.{name}": torch.ones_like(tensor) for name, tensor in tensors.items()}
    for name, tensor in (tensors | moments).items():
        dim = tensor.shape.index(max(tensor.shape))
        chunks, start = [], 0
        for number, piece in enumerate(tensor.chunk(pieces, dim)):
            offsets = torch.Size(start if one == dim else 0 for one in range(tensor.dim()))
            start += piece.shape[dim]
            chunks.append(ChunkStorageMetadata(offsets, piece.shape))
            torch.save(piece.clone(), folder / "piece")
            data, file = (folder / "piece").read_bytes(), f"__{number % 2}_0.distcp"
            index = MetadataIndex(name, offsets, number)
            metadata.storage_data[index] = _StorageInfo(file, len(held[file]), len(data))
            held[file] += data
        properties = TensorProperties(dtype=tensor.dtype)
        metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
    metadata.state_dict_metadata["rng_state/shard_0_1"] = BytesStorageMetadata()
    metadata.storage_data[MetadataIndex("rng_state/shard_0_1")] = _StorageInfo("__0_0.distcp", 0, 10)
    (folder / "piece").unlink()
    for file, data in held.items():
        (folder / file).write_bytes(data)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({"args": argparse.Namespace(**(ARGUMENTS | more)), "iteration": 7}, folder / "common.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("7")
    return metadata


def test_a_folder_of_pieces_is_the_whole_model(tmp_path: Path) -> None:
    theirs, ours = _whole()
    write_dist(tmp_path / "theirs" / "iter_0000007", theirs)
    told = convert("megatron", tmp_path / "theirs", "megatron_parm", tmp_path / "ours", megatron=TRUSTED).lines
    assert_equal_bits(_ours(tmp_path / "ours"), ours)
    assert f"{len(theirs) + 1} entries of the optimizer, random states and bytes are left unread" in told
    config = conversion.read_own(tmp_path / "ours").config
    assert config.moe_layers == (False, True, True, True) and config.model.swiglu


def _metadata(change: Callable[[Metadata], Any]) -> Callable[[Path, Metadata], None]:
    def apply(folder: Path, metadata: Metadata) -> None:
        (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))

    return apply


def _moved(path: str, offset: int | None = None, name: str = "output_layer.weight") -> Callable[[Path, Metadata], None]:
    def change(metadata: Metadata) -> None:
        index = next(index for index in metadata.storage_data if index.fqn == name)
        old = metadata.storage_data[index]
        metadata.storage_data[index] = _StorageInfo(path, old.offset if offset is None else offset, old.length)

    return _metadata(change)


def _linked(folder: Path, metadata: Metadata) -> None:
    (folder / "__1_0.distcp").rename(folder.parent / "outside")
    (folder / "__1_0.distcp").symlink_to(folder.parent / "outside")


def _without_a_piece(metadata: Metadata) -> None:
    del metadata.state_dict_metadata["output_layer.weight"].chunks[1]


def _too_large(metadata: Metadata) -> None:
    metadata.state_dict_metadata["output_layer.weight"].chunks[1].sizes = torch.Size([999, files.HIDDEN])


def _flipped(folder: Path, metadata: Metadata) -> None:
    index = next(index for index in metadata.storage_data if index.fqn == "decoder.final_layernorm.weight")
    place = metadata.storage_data[index]
    data = bytearray((folder / place.relative_path).read_bytes())
    values = _whole()[0]["decoder.final_layernorm.weight"].numpy().tobytes()[:8]
    data[data.index(values, place.offset)] ^= 1
    (folder / place.relative_path).write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path, Metadata], None], type[CheckpointError], str]] = {
    "name leads out": (_moved("../../secret"), UntrustedCheckpointError, "'../../secret', which could lead out"),
    "absolute name": (_moved("/etc/passwd"), UntrustedCheckpointError, "could lead out"),
    "link": (_linked, UntrustedCheckpointError, "symbolic link"),
    "place beyond the end": (_moved("__0_0.distcp", 10**9), CheckpointError, "is not there"),
    "place of another": (_moved("__0_0.distcp", 0, "decoder.final_layernorm.weight"), CheckpointError, "__0_0.distcp"),
    "piece missing": (
        _metadata(_without_a_piece),
        CheckpointError,
        "output_layer.weight: the pieces hold 256 of its 512",
    ),
    "piece too large": (_metadata(_too_large), CheckpointError, "a piece of output_layer.weight at"),
    "flipped bit": (_flipped, CheckpointError, "another checksum"),
    "no common.pt": (lambda folder, _: (folder / "common.pt").unlink(), CheckpointError, "no common.pt"),
    "metadata cut": (
        lambda folder, _: (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:-50]) and None,
        CheckpointError,
        ".metadata is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_folder_is_refused_by_file_and_reason(tmp_path: Path, name: str) -> None:
    damage, kind, message = DAMAGE[name]
    folder = tmp_path / "theirs" / "iter_0000007"
    damage(folder, write_dist(folder, _whole()[0]))
    with pytest.raises(kind, match=message) as caught:
        convert("megatron", tmp_path / "theirs", "megatron_parm", tmp_path / "ours", megatron=TRUSTED)
    assert type(caught.value) is kind and caught.value.exit_code == 21
    assert not list(tmp_path.glob("ours/iter_*"))


def test_a_metadata_that_runs_code_is_refused_unrun(tmp_path: Path) -> None:
    folder, marker = tmp_path / "theirs" / "iter_0000007", tmp_path / "marker"
    metadata = write_dist(folder, _whole()[0])
    metadata.planner_data = _Calls(eval, f"__import__('os').mkdir({str(marker)!r})")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedCheckpointError, match=r"\.metadata asks for builtins\.eval"):
        convert("megatron", tmp_path / "theirs", "megatron_parm", tmp_path / "ours", megatron=TRUSTED)
    assert not marker.exists()


def test_objects_saved_as_bytes_are_never_opened(tmp_path: Path) -> None:
    """One that would run code lies where the metadata says; the model is read beside it."""
    theirs, ours = _whole()
    folder, marker = tmp_path / "theirs" / "iter_0000007", tmp_path / "marker"
    metadata = write_dist(folder, theirs)
    torch.save(_Calls(eval, f"__import__('os').mkdir({str(marker)!r})"), folder / "__9_0.distcp")
    index = next(index for index in metadata.storage_data if index.fqn == "rng_state/shard_0_1")
    metadata.storage_data[index] = _StorageInfo("__9_0.distcp", 0, (folder / "__9_0.distcp").stat().st_size)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    convert("megatron", tmp_path / "theirs", "megatron_parm", tmp_path / "ours", megatron=TRUSTED)
    assert_equal_bits(_ours(tmp_path / "ours"), ours)
    assert not marker.exists()
