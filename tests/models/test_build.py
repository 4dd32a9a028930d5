"""From settings to a model: which layers have experts, which schedule runs and why, and the same weights everywhere."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import RunConfig, check_run, resolve
from megatron_parm.models.build import ACTIVATIONS, BuiltModel, build_gpt, choose_schedule, model_shape
from megatron_parm.moe.choose import candidate_name
from megatron_parm.moe.cost import CHUNK_COUNTS
from megatron_parm.moe.layer import MoELayer
from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import spec_of
from tests.harness.layouts import MOE_LAYOUTS, Layout
from tests.harness.pools import Pools

BASE = """
--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8
--micro-batch-size 2 --train-iters 1 --lr 0.1 --tokenizer-type NullTokenizer --vocab-size 12 --mock-data
"""
MOE = "--num-experts 4 --moe-ffn-hidden-size 32"
WORDS, ROWS = 13, 16
SINGLE = Layout(1)


def _config(more: str, layout: Layout = SINGLE) -> RunConfig:
    sizes = f"--tensor-model-parallel-size {layout.tp}"
    if "--num-experts" in more:
        sizes += f" --expert-model-parallel-size {layout.ep} --expert-tensor-parallel-size {layout.esp}"
    config, _ = parse_run_config(f"{BASE} {more} {sizes}".split())
    check_run(config, layout.world)
    return resolve(config, layout.world)


def _build(more: str, ctx: ParallelContext | None = None, layout: Layout = SINGLE, rows: int = ROWS) -> BuiltModel:
    ctx = ctx or ParallelContext.single()
    return build_gpt(_config(more, layout), WORDS, rows, ctx, torch.Generator().manual_seed(0))


def _weights(ctx: ParallelContext, more: str, layout: Layout) -> dict[str, tuple[Tensor, tuple[tuple[int, int], ...]]]:
    """Name -> this rank's part and where it begins and ends in each dim."""
    model = _build(more, ctx, layout).model
    return {
        name: (p.detach(), tuple((part.start, part.stop) for part in spec_of(p).box))
        for name, p in model.named_parameters()
    }


@pytest.mark.cover(
    layout=[layout for layout in MOE_LAYOUTS if layout.tp <= 4 and layout.ep <= 4],
    more=[
        MOE,
        f"{MOE} --ffn-hidden-size 32 --swiglu --disable-bias-linear --group-query-attention --num-query-groups 4",
    ],
)
def test_every_layout_holds_parts_of_the_same_weights(pools: Pools, layout: Layout, more: str) -> None:
    """FC-33: the parts of each rank are boxes of the one-process weights, and no two tp slices repeat."""
    whole = {name: p.detach() for name, p in _build(more).model.named_parameters()}
    for weights in pools.run(layout, _weights, more, layout):
        assert weights.keys() == whole.keys()
        for name, (part, box) in weights.items():
            assert torch.equal(part, whole[name][tuple(slice(*ends) for ends in box)]), name
    rows = whole["decoder.layers.0.self_attention.linear_qkv.weight"].chunk(4)
    assert not any(torch.equal(rows[a], rows[b]) for a in range(4) for b in range(a))


def test_rows_of_padding_are_zero_and_change_no_word() -> None:
    name = "embedding.word_embeddings.weight"
    small, large = (dict(_build("", rows=rows).model.named_parameters())[name] for rows in (13, 16))
    assert torch.equal(large[:13], small) and not large[13:].any()


def test_the_seed_decides_the_weights() -> None:
    first, again, other = (_build(f"{MOE} --seed {seed}").model.state_dict() for seed in (1, 1, 2))
    name = "decoder.layers.1.mlp.experts.weight1"
    assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])
    assert not torch.equal(first[name][0], first[name][1]), "experts start alike"


@pytest.mark.parametrize(
    ("frequency", "is_moe"),
    [("1", [True, True, True, True]), ("2", [True, False, True, False]), ("([0]+[1])*2", [False, True, False, True])],
)
def test_layers_have_experts_by_their_pattern(frequency: str, is_moe: list[bool]) -> None:
    built = _build(f"{MOE} --num-layers 4 --moe-layer-freq {frequency}")
    assert [isinstance(layer.mlp, MoELayer) for layer in built.model.decoder.layers.values()] == is_moe
    assert len(built.moe_layers) == sum(is_moe)


def test_names_are_megatron_cores() -> None:
    names = {
        name
        for name, _ in _build(
            f"{MOE} --moe-layer-freq 2 --untie-embeddings-and-output-weights"
        ).model.named_parameters()
    }
    layers = (("0", ("router.weight", "experts.weight1", "experts.weight2", "experts.bias1", "experts.bias2")),)
    layers += (("1", ("linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias")),)
    wanted = {f"decoder.layers.{layer}.mlp.{name}" for layer, mlp in layers for name in mlp}
    ends = ("input_layernorm", "pre_mlp_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj")
    wanted |= {f"decoder.layers.{n}.{end}.{kind}" for n in "01" for end in ends for kind in ("weight", "bias")}
    wanted |= {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "output_layer.weight"}
    assert names == wanted | {"decoder.final_layernorm.weight", "decoder.final_layernorm.bias"}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp64", torch.float64)]
)
def test_weights_have_the_precision_asked_for(precision: str, dtype: torch.dtype) -> None:
    """The router's arithmetic is at least that of --moe-router-dtype and never less than the model's own (FC-29)."""
    built = _build(f"{MOE} --precision {precision}")
    assert {p.dtype for p in built.model.parameters()} == {dtype}
    expected = torch.float64 if precision == "fp64" else torch.float32
    assert built.moe_layers[0].gate.settings.router_dtype == expected


def test_every_flag_of_the_model_reaches_its_shape() -> None:
    more = """--ffn-hidden-size 40 --kv-channels 8 --group-query-attention --num-query-groups 2 --rotary-base 500
    --rotary-percent 0.5 --rotary-interleaved --position-embedding-type rope --normalization RMSNorm --norm-epsilon 1e-6
    --disable-bias-linear --add-qkv-bias --qk-layernorm --untie-embeddings-and-output-weights --hidden-dropout 0.2
    --attention-dropout 0.3 --init-method-std 0.5 --swiglu"""
    shape = model_shape(_config(more), WORDS, ROWS)
    assert (shape.ffn_hidden_size, shape.head_dim, shape.num_query_groups) == (40, 8, 2)
    assert (shape.rotary.base, shape.rotary.percent, shape.rotary.is_interleaved) == (500, 0.5, True)
    assert (shape.positions, shape.normalisation, shape.norm_epsilon) == ("rope", "RMSNorm", 1e-6)
    assert (shape.has_bias, shape.has_qkv_bias, shape.has_norm_of_heads, shape.ties_embeddings) == (
        False,
        True,
        True,
        False,
    )
    assert (shape.hidden_dropout, shape.attention_dropout, shape.activation) == (0.2, 0.3, "swiglu")
    assert (shape.initialiser.kind, shape.initialiser.std) == ("normal", 0.5)
    assert (shape.vocab_size, shape.padded_vocab_size, shape.max_positions) == (WORDS, ROWS, 8)
    assert model_shape(_config("--init-method-xavier-uniform"), 1, 1).initialiser.kind == "xavier_uniform"
    assert model_shape(_config("--apply-layernorm-1p"), 1, 1).norm_is_zero_centred


@pytest.mark.parametrize("flag", ["", "--openai-gelu", "--squared-relu", "--swiglu --ffn-hidden-size 32"])
def test_every_activation_is_built(flag: str) -> None:
    config = _config(f"{MOE} --moe-layer-freq 2 {flag}")
    assert model_shape(config, WORDS, ROWS).activation == ACTIVATIONS[config.model.activation]
    _build(f"{MOE} --moe-layer-freq 2 {flag}")


def test_every_flag_of_the_router_reaches_its_gate() -> None:
    more = """--moe-router-topk 3 --moe-expert-capacity-factor 1.5 --moe-eval-capacity-factor -1 --moe-min-capacity 2
    --moe-token-drop-policy position --moe-router-pre-softmax --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.2"""
    settings = _build(f"{MOE} {more}").moe_layers[0].gate.settings
    found = (settings.num_experts, settings.topk, settings.capacity_factor, settings.eval_capacity_factor)
    assert found == (4, 3, 1.5, None)
    assert (settings.min_capacity, settings.drop_policy, settings.pre_softmax) == (2, "position", True)
    assert (settings.balance_coefficient, settings.z_coefficient) == (0.1, 0.2)
    settings = (
        _build(f"{MOE} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1").moe_layers[0].gate.settings
    )
    assert settings.balance_coefficient is None


# --- the choice of a schedule ---


def _choices(ctx: ParallelContext, more: str, layout: Layout) -> Any:
    return choose_schedule(_config(more, layout), ctx)


def test_auto_takes_the_least_prediction_alike_on_all_ranks(pools: Pools) -> None:
    layout = Layout(4, tp=2, esp=2, ep=2)
    choices = pools.run(layout, _choices, f"{MOE} --moe-expert-capacity-factor 1", layout)
    first = choices[0]
    assert all(choice == first for choice in choices)
    assert candidate_name(first.schedule, first.chunks) == min(first.predicted_ms, key=first.predicted_ms.get)
    assert set(first.predicted_ms) == {candidate_name(name, r) for name in SCHEDULES for r in CHUNK_COUNTS}
    assert first.reason.startswith(f"{min(first.predicted_ms.values()):.2f} ms predicted")


def test_auto_leaves_out_what_cannot_run(pools: Pools) -> None:
    """s2 needs slots; s1 needs tokens that tp divides (one sequence of 7 does not)."""
    layout = Layout(2, tp=2)
    dropless = f"{MOE} --moe-pipeline-chunks 1"
    assert set(pools.run(layout, _choices, dropless, layout)[0].predicted_ms) == {"baseline", "s1", "s1h", "s1n"}
    odd = f"{dropless} --moe-expert-capacity-factor 1 --seq-length 7 --micro-batch-size 1"
    assert set(pools.run(layout, _choices, odd, layout)[0].predicted_ms) == {"baseline", "deepspeed", "s2", "s2h"}


def test_a_given_schedule_is_taken_and_says_so() -> None:
    built = _build(f"{MOE} --moe-schedule s1 --moe-pipeline-chunks 3")
    assert built.choice is not None and built.choice.schedule == "s1" and "--moe-schedule s1" in built.choice.reason
    assert [(layer.schedule, layer.chunks) for layer in built.moe_layers] == [("s1", 3)] * 2
    built.use_schedule("baseline", 2, "for a test")
    assert [(layer.schedule, layer.chunks) for layer in built.moe_layers] == [("baseline", 2)] * 2
    assert (built.choice.schedule, built.choice.chunks, built.choice.reason) == ("baseline", 2, "for a test")


def test_a_dense_model_has_no_choice_and_no_moe_layers() -> None:
    built = _build("")
    assert built.choice is None and built.moe_layers == []
