"""What comes from elsewhere damaged or crafted: refused with exit code 21, nothing run, nothing read outside."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_parm.errors import CheckpointError, UntrustedCheckpointError
from megatron_parm.training.convert import convert
from tests.training.test_convert import tensors_of, their_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small Mixtral in several files."""
    folder = tmp_path_factory.mktemp("sound") / "theirs"
    their_model("Mixtral").save_pretrained(folder, max_shard_size="30KB")
    return folder


def _change(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return apply


def _config(**values: object) -> Callable[[Path], None]:
    def change(data: bytes) -> bytes:
        return json.dumps(json.loads(data) | values).encode()

    return _change("config.json", change)


def _index(name: str, file: str) -> Callable[[Path], None]:
    def change(data: bytes) -> bytes:
        table = json.loads(data)
        table["weight_map"][name] = file
        return json.dumps(table).encode()

    return _change("model.safetensors.index.json", change)


def _first_shard(folder: Path) -> Path:
    return sorted(folder.glob("model-*.safetensors"))[0]


def _shard(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = _first_shard(folder)
        file.write_bytes(change(file.read_bytes()))

    return apply


def _tensors(**more: torch.Tensor) -> Callable[[Path], None]:
    """One file in place of several, with further tensors, or without those that are empty."""

    def apply(folder: Path) -> None:
        found = tensors_of(folder) | more
        for file in (*folder.glob("model-*.safetensors"), folder / "model.safetensors.index.json"):
            file.unlink()
        save_file({name: tensor for name, tensor in found.items() if tensor.numel()}, folder / "model.safetensors")

    return apply


def _link_a_shard(folder: Path) -> None:
    file = _first_shard(folder)
    outside = folder.parent / "outside.safetensors"
    file.rename(outside)
    file.symlink_to(outside)


NOTHING = torch.empty(0)
WORDS = "model.embed_tokens.weight"
DAMAGE: dict[str, tuple[Callable[[Path], None], type[CheckpointError], str]] = {
    "truncated": (_shard(lambda data: data[: len(data) // 2]), CheckpointError, "00001-of.*its header speaks of"),
    "empty": (_shard(lambda data: b""), CheckpointError, "00001-of.*has 0 bytes"),
    "bit of the header": (_shard(lambda data: bytes([data[0] ^ 4]) + data[1:]), CheckpointError, "00001-of.*damaged"),
    "missing shard": (lambda folder: _first_shard(folder).unlink(), CheckpointError, "00001-of.*cannot be read"),
    "index leads out": (_index(WORDS, "../../secret.safetensors"), UntrustedCheckpointError, "could lead out"),
    "absolute name": (_index(WORDS, "/etc/passwd"), UntrustedCheckpointError, "could lead out"),
    "link": (_link_a_shard, UntrustedCheckpointError, "symbolic link"),
    "index of another": (_index("model.more", "config.json"), CheckpointError, "config.json is damaged or no safet"),
    "foreign tensor": (
        _tensors(**{"model.more.weight": torch.ones(2)}),
        CheckpointError,
        "no place.*model.more.weight",
    ),
    "missing tensor": (_tensors(**{"model.norm.weight": NOTHING}), CheckpointError, "missing: decoder.final_layernorm"),
    "missing expert": (
        _tensors(**{"model.layers.1.block_sparse_moe.experts.2.w3.weight": NOTHING}),
        CheckpointError,
        "weight1 is made of model.layers.1.block_sparse_moe.experts.2.w3",
    ),
    "other shape": (_tensors(**{"model.norm.weight": torch.ones(31)}), CheckpointError, r"final_layernorm.*\[31\]"),
    "no JSON": (_change("config.json", lambda data: data[:-5]), CheckpointError, "config.json is damaged"),
    "deep JSON": (_change("config.json", lambda data: b"[" * 200_000), CheckpointError, "config.json is damaged"),
    "code": (_config(auto_map={"AutoModel": "x.py"}), UntrustedCheckpointError, "config.json asks for code"),
    "trust": (_config(trust_remote_code=True), UntrustedCheckpointError, "config.json asks for code"),
    "many layers": (_config(num_hidden_layers=90_000), CheckpointError, "90000 layers"),
    "text for a number": (_config(hidden_size="__import__('os')"), CheckpointError, "hidden_size is"),
    "unknown family": (_config(model_type="mamba"), CheckpointError, 'model_type is "mamba"'),
    "other rotation": (
        _config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        CheckpointError,
        "rope_type",
    ),
    "other activation": (_config(hidden_act="relu"), CheckpointError, 'hidden_act is "relu"'),
    "wrong heads": (_config(num_attention_heads=3), CheckpointError, "config.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_bad_folder_is_refused_by_file_and_reason(
    sound: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, kind, message = DAMAGE[name]
    folder = tmp_path / "a" / "theirs"
    folder.mkdir(parents=True)
    for file in sound.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    damage(folder)
    with pytest.raises(kind, match=f"(?s){message}") as caught:
        convert("hf", folder, "megatron_parm", tmp_path / "ours", largest_file=10**9)
    assert type(caught.value) is kind and caught.value.exit_code == 21
    assert not (tmp_path / "ours").exists() or not list((tmp_path / "ours").iterdir())


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_that_would_run_code_is_refused_unrun(sound: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_bytes((sound / "config.json").read_bytes())
    torch.save({"model.norm.weight": _Payload(tmp_path / "marker")}, folder / "pytorch_model.bin")
    with pytest.raises(UntrustedCheckpointError, match=r"pytorch_model.bin holds more than tensors"):
        convert("hf", folder, "megatron_parm", tmp_path / "ours", largest_file=10**9)
    assert not (tmp_path / "marker").exists()


def test_a_flipped_bit_in_ours_is_found(sound: Path, tmp_path: Path) -> None:
    convert("hf", sound, "megatron_parm", tmp_path / "ours", largest_file=10**9)
    (file,) = (tmp_path / "ours" / "iter_0000000").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file.name} has the SHA-256"):
        convert("megatron_parm", tmp_path / "ours", "hf", tmp_path / "back", largest_file=10**9)
    assert not (tmp_path / "back").exists()


def test_tied_weights_that_differ_are_not_taken_for_one(tmp_path: Path) -> None:
    their_model("GPT-3").save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight and transformer\.wte\.weight should be one"):
        convert("hf", tmp_path / "theirs", "megatron_parm", tmp_path / "ours", largest_file=10**9)
