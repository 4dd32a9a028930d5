"""Checkpoints of Megatron as ours and back. References: a writer of its own (`megatron_files.py`), orders by hand."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_parm.checkpoint.huggingface import run_config
from megatron_parm.checkpoint.megatron_parts import Slice, cut_out, grouped_slices, ordered_rows
from megatron_parm.checkpoint.megatron_write import TargetSizes
from megatron_parm.checkpoint.tensor_files import TensorInfo
from megatron_parm.checkpoint.whole_model import WholeModel
from megatron_parm.config.run import to_dict
from megatron_parm.errors import CheckpointError, ConfigError, UntrustedCheckpointError
from megatron_parm.training import convert as conversion
from megatron_parm.training.convert_megatron import MegatronOptions
from tests.training import megatron_files as files
from tests.training.test_convert import assert_equal_bits, tensors_of

TRUSTED = MegatronOptions(is_trusted=True)
convert = partial(conversion.convert, largest_file=10**9)
SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "max_position_embeddings": 12,
    "make_vocab_size_divisible_by": 16,
}  # fmt: skip
LLAMA = {
    "swiglu": True, "disable_bias_linear": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "group_query_attention": True, "num_query_groups": 2, "qk_layernorm": True,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
OF_EXPERTS = {
    "num_experts": 4, "moe_layer_freq": "[0,1]", "swiglu": True, "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip
MODELS = {
    "GPT": {}, "Llama": LLAMA, "experts": OF_EXPERTS, "experts with biases": {"num_experts": 4},
    "BERT": {"bert_layout": "megatron"}, "BERT with experts": {"bert_layout": "megatron", "num_experts": 2},
}  # fmt: skip


def _ours(root: Path) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor for name, tensor in tensors_of(root / "iter_0000000").items()}


class _InMemory:
    """Tensors that are in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.entries = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
        self.read = tensors.__getitem__


def _model(settings: Mapping[str, Any]) -> WholeModel:
    config = run_config(SIZES | dict(settings), torch.float32)
    config = replace(config, data=replace(config.data, vocab_size=94))
    generator = torch.Generator().manual_seed(0)
    shapes = conversion.expected_shapes(config, 95)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return WholeModel(config, 95, _InMemory(tensors))


@pytest.mark.cover(name=list(MODELS), tp=[1, 2], pp=[1, 2], ep=[1, 2])
def test_there_and_back_is_bit_for_bit(tmp_path: Path, name: str, tp: int, pp: int, ep: int) -> None:
    """FC-16 through Megatron's files of several ranks: weights, settings, vocabulary."""
    model = _model(MODELS[name])
    ep = 1 if model.config.moe is None else ep
    conversion.write_own(tmp_path / "ours", model, largest_file=10**9)
    options = MegatronOptions(sizes=TargetSizes(tp, pp, ep))
    convert("megatron_parm", tmp_path / "ours", "megatron", tmp_path / "theirs", megatron=options)
    assert len(list(tmp_path.glob("theirs/release/mp_rank_*/model_optim_rng.pt"))) == tp * pp * ep
    convert("megatron", tmp_path / "theirs", "megatron_parm", tmp_path / "back", megatron=TRUSTED)
    assert_equal_bits(_ours(tmp_path / "back"), _ours(tmp_path / "ours"))
    ours, back = (conversion.read_own(tmp_path / folder) for folder in ("ours", "back"))
    assert to_dict(back.config) == to_dict(ours.config) and back.vocab_size == 95


def test_theirs_through_ours_is_theirs(tmp_path: Path) -> None:
    """Two slices become four of another kind, and two again."""
    sizes = TargetSizes(2, 1, 1)
    conversion.write_own(tmp_path / "start", _model(OF_EXPERTS), largest_file=10**9)
    convert("megatron_parm", tmp_path / "start", "megatron", tmp_path / "a", megatron=MegatronOptions(sizes=sizes))
    convert(
        "megatron", tmp_path / "a", "megatron", tmp_path / "b", megatron=MegatronOptions(True, TargetSizes(1, 2, 2))
    )
    convert("megatron", tmp_path / "b", "megatron", tmp_path / "c", megatron=MegatronOptions(True, sizes))
    for rank in range(2):
        states = [
            torch.load(tmp_path / root / f"release/mp_rank_0{rank}/model_optim_rng.pt", weights_only=False)
            for root in "ac"
        ]
        assert_equal_bits(states[1]["model"], states[0]["model"])
        assert vars(states[1]["args"]) == vars(states[0]["args"])


@pytest.mark.cover(version=[0, 1.0, 2.0, 3.0], old=[True, False], tp=[1, 2], pp=[1, 2], kind=["GPT", "BERT", "Switch"])
def test_every_version_and_name_gives_the_same_model(
    tmp_path: Path, version: float, old: bool, tp: int, pp: int, kind: str
) -> None:
    """FC-17 and FC-19: queries, keys and values of head h are those of head h, whatever wrote them."""
    experts = 2 if kind == "Switch" else 0
    whole = files.weights(is_bert=kind == "BERT", experts=experts)
    files.write_classic(
        tmp_path / "theirs", whole, version=version, old=old, tp=tp, pp=pp, is_bert=kind == "BERT", experts=experts
    )
    told = convert("megatron", tmp_path / "theirs", "megatron_parm", tmp_path / "ours", megatron=TRUSTED).lines
    ours = _ours(tmp_path / "ours")
    body = "encoder" if kind == "BERT" else "decoder"
    used = {
        "embedding.word_embeddings.weight": whole["word"],
        "embedding.position_embeddings.weight": whole["position"],
    }
    for layer in range(files.LAYERS):
        to = f"{body}.layers.{layer}."
        for end in ("weight", "bias"):
            parts = [whole[f"{layer}.{part}.{end}"] for part in "qkv"]
            rows = [parts[part][head] for head in range(files.HEADS) for part in range(3)]
            used[f"{to}self_attention.linear_qkv.{end}"] = torch.cat(rows)
            used[f"{to}self_attention.linear_proj.{end}"] = whole[f"{layer}.dense.{end}"]
            used[f"{to}input_layernorm.{end}"] = whole[f"{layer}.first.{end}"]
            used[f"{to}pre_mlp_layernorm.{end}"] = whole[f"{layer}.second.{end}"]
            for number, name in ((1, "up"), (2, "down")):
                target = f"{to}mlp.experts.{end}{number}" if experts else f"{to}mlp.linear_fc{number}.{end}"
                used[target] = whole[f"{layer}.{name}.{end}"]
        if experts:
            used[f"{to}mlp.router.weight"] = whole[f"{layer}.router"]
    used |= {f"{body}.final_layernorm.{end}": whole[f"last.{end}"] for end in ("weight", "bias")}
    if kind == "BERT":
        used |= {"embedding.tokentype_embeddings.weight": whole["types"], "output_layer.bias": whole["words.bias"]}
        for end in ("weight", "bias"):
            used |= {f"pooler.dense.{end}": whole[f"pool.{end}"], f"lm_head.dense.{end}": whole[f"lm.{end}"]}
            used |= {f"lm_head.layer_norm.{end}": whole[f"lm_norm.{end}"], f"binary_head.{end}": whole[f"order.{end}"]}
    assert_equal_bits(ours, used)
    assert any("--finetune" in line for line in told)
    config = conversion.read_own(tmp_path / "ours").config
    assert config.model.num_layers == files.LAYERS and config.data.vocab_size == files.WORDS - 1
    assert config.moe is None or (config.moe.moe_router_topk, config.moe.moe_router_pre_softmax) == (1, True)


def test_rows_of_each_version_by_hand() -> None:
    """Two heads of two features; 10 is feature 0 of head 1. Queries, keys and values are +0, +100, +200."""
    today = [0, 1, 100, 101, 200, 201, 10, 11, 110, 111, 210, 211]
    version_0 = [0, 1, 10, 11, 100, 101, 110, 111, 200, 201, 210, 211]
    version_1 = [0, 100, 200, 1, 101, 201, 10, 110, 210, 11, 111, 211]
    for version, rows in ((0, version_0), (1, version_1), (2, today), (3, today)):
        assert ordered_rows(torch.tensor(rows), version, 2).tolist() == today
        assert ordered_rows(torch.tensor(rows)[:, None], version, 2).flatten().tolist() == today
    assert ordered_rows(torch.tensor(version_0), 1, 2).tolist() != today, "the negative control"


def test_slices_by_hand() -> None:
    """A gated weight gives each rank a half of the gate and a half of the other; a grouped product is [in, out]."""
    rows = torch.arange(8)
    assert cut_out(rows, "gated rows", 1, 2).tolist() == [2, 3, 6, 7]
    assert cut_out(rows, "rows", 1, 2).tolist() == [4, 5, 6, 7]
    assert cut_out(torch.arange(8).view(2, 4), "columns", 1, 2).tolist() == [[2, 3], [6, 7]]
    stored = torch.arange(12).view(2, 6)  # two experts of [in 2, out 3], back to back
    held = Slice(TensorInfo.of(stored), lambda: stored, "x")
    found = grouped_slices("l.mlp.experts.weight1", held, 2, 2)
    assert found["l.mlp.experts.local_experts.1.linear_fc1.weight"].read().tolist() == [[6, 9], [7, 10], [8, 11]]


def test_the_fused_bias_and_gelu_is_the_tanh_form(tmp_path: Path) -> None:
    files.write_classic(tmp_path / "theirs", files.weights(), bias_gelu_fusion=True)
    convert("megatron", tmp_path / "theirs", "megatron_parm", tmp_path / "ours", megatron=TRUSTED)
    assert conversion.read_own(tmp_path / "ours").config.model.activation == "openai_gelu"


def test_without_trust_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write_classic(tmp_path / "theirs", files.weights())
    (tmp_path / "theirs/iter_0000007/mp_rank_00/model_optim_rng.pt").write_bytes(b"not even a file of torch.save")
    with pytest.raises(UntrustedCheckpointError, match=r"are pickles.*add --trust-checkpoint\. Nothing was read"):
        convert("megatron", tmp_path / "theirs", "megatron_parm", tmp_path / "ours")


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    conversion.write_own(tmp_path / "ours", _model(LLAMA), largest_file=10**9)
    for sizes, said in (
        (TargetSizes(4, 1, 1), "--target-tensor-parallel-size 4 must divide groups of key and value heads, 2"),
        (TargetSizes(1, 3, 1), "--target-pipeline-parallel-size 3 must divide layers, 2"),
        (TargetSizes(1, 1, 2), "--target-expert-parallel-size 2: the model has no experts"),
        (TargetSizes(0, 1, 1), "--target-tensor-parallel-size 0"),
    ):
        with pytest.raises(ConfigError, match=said):
            convert(
                "megatron_parm", tmp_path / "ours", "megatron", tmp_path / "x", megatron=MegatronOptions(sizes=sizes)
            )
        assert not list(tmp_path.glob("x*"))
    other = _model({"bert_layout": "original"})
    conversion.write_own(tmp_path / "other", other, largest_file=10**9)
    with pytest.raises(ConfigError, match="--bert-layout original has no place in it"):
        convert("megatron_parm", tmp_path / "other", "megatron", tmp_path / "x")


def test_no_tensor_is_lost_and_none_is_made_up(tmp_path: Path) -> None:
    def changed(change: Any) -> Path:
        root = tmp_path / f"theirs{len(list(tmp_path.iterdir()))}"
        file = files.write_classic(root, files.weights(), tp=2, pp=2) / "mp_rank_01_001" / "model_optim_rng.pt"
        state = torch.load(file, weights_only=False)
        change(state, state["model"]["language_model"]["encoder"])
        torch.save(state, file)
        return root

    def more(state: Any, body: Any) -> None:
        body["layers.0.adapter.weight"] = torch.ones(2)

    def less(state: Any, body: Any) -> None:
        del body["layers.1.mlp.dense_h_to_4h.bias"]

    def drifted(state: Any, body: Any) -> None:
        body["layers.0.input_layernorm.weight"] = body["layers.0.input_layernorm.weight"] + 1e-3

    def another_head(state: Any, body: Any) -> None:
        state["model"]["word_embeddings_for_head"]["weight"] = torch.zeros(files.WORDS // 2, files.HIDDEN)

    def narrow(state: Any, body: Any) -> None:
        body["layers.0.mlp.dense_4h_to_h.weight"] = torch.ones(3, 3)

    def gap(state: Any, body: Any) -> None:
        body["layers.7.input_layernorm.weight"] = torch.ones(files.HIDDEN)

    for change, said in (
        (more, r"no place in the model of .*decoder\.layers\.2\.adapter\.weight"),
        (less, r"decoder\.layers\.3\.mlp\.linear_fc1\.bias: no file has the slice of tensor-parallel rank 1"),
        (drifted, r"decoder\.layers\.2\.input_layernorm\.weight must be the same on all ranks, but .*mp_rank_01_001"),
        (another_head, "must be one tensor"),
        (narrow, r"linear_fc2\.weight: the slices do not fit together: .*\[3, 3\] float32 in .*mp_rank_01_001"),
        (gap, r"its layers are \[0, 1, 7\]"),
    ):
        with pytest.raises(CheckpointError, match=f"(?s){said}"):
            convert("megatron", changed(change), "megatron_parm", tmp_path / "ours", megatron=TRUSTED)
    assert not list(tmp_path.glob("ours/iter_*"))
