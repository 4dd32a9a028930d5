"""Layout advice. References: parameters and bytes counted by hand, lines that cost one unit, the least of a search."""

from dataclasses import replace

import pytest

from megatron_parm.errors import ConfigError
from megatron_parm.moe.advise import ModelPlan, advise, for_layout, has_links, layouts, memory_gb, num_nodes, reasons
from megatron_parm.moe.choose import choose
from megatron_parm.moe.cost import PUBLISHED, CostModel, LayerShape, Line

LAYER = LayerShape(512, 256, 512, 8, 2, 1.25, 1, True, False, 2, 2, tp=1, ep=1, esp=1)
PLAN = ModelPlan(LAYER, 4, 4, 1000, 8, 1, 16, 8, 80.0)


def test_layouts_divide_everything() -> None:
    found = set(layouts(PLAN))
    assert (8, 8, 2) in found and (8, 2, 8) in found
    for tp, ep, esp in found:
        assert 16 % tp == 0 and 16 % (ep * esp) == 0 and 8 % ep == 0 and tp <= 8 and esp <= 8
    assert all(tp != 3 for tp, _, _ in layouts(replace(PLAN, ranks=12)))
    assert {tp for tp, _, _ in layouts(replace(PLAN, num_heads=2))} == {1, 2}


def test_memory_by_hand() -> None:
    """tp 2, ep 4, esp 2, bf16: 18 bytes a parameter, the activations of 4 layers, 640 slots, the logits in fp32."""
    h, f, n = 256, 512, 512
    parameters = 1000 * h / 2 + 4 * (4 * h * h / 2) + 4 * (8 * h + 2 * (2 * h * f / 2))
    activations = 4 * n * h * (10 + 5 / 2) * 2 / 2
    buckets = 4 * (8 * 160 * 2 / 2) * 2 * (h + f / 2) * 2
    assert memory_gb(PLAN, 2, 4, 2, "s1") == pytest.approx(
        (18 * parameters + activations + buckets + n * 1000 / 2 * 4) / 1e9
    )
    assert memory_gb(PLAN, 2, 4, 2, "baseline") * 1e9 == pytest.approx(memory_gb(PLAN, 2, 4, 2, "s1") * 1e9 + buckets)


def _unit(value: float) -> Line:
    return Line(value, 0.0)


def test_lines_follow_the_link_of_each_axis() -> None:
    measured = CostModel(
        "measured",
        {
            "all_to_all/ep": _unit(7),
            "all_to_all/ep_esp": _unit(8),
            "all_gather/tp": _unit(1),
            "all_gather/esp": _unit(2),
            "reduce_scatter/esp": _unit(3),
            "all_reduce/esp": _unit(4),
            "experts": _unit(5),
        },
    )
    inside = for_layout(measured, tp=4, ep=2, esp=2, ranks_per_node=8)
    assert inside.crossing == frozenset()
    assert inside.line("all_to_all", "ep").alpha == 1, "inside a node the speed of the gather there"
    assert [inside.line(name, "esp").alpha for name in ("all_gather", "reduce_scatter", "all_reduce")] == [1, 3, 4]
    spread = for_layout(measured, tp=4, ep=2, esp=8, ranks_per_node=4)
    assert spread.crossing == {"ep", "esp", "ep_esp", "inside"}, "an expert does not fit into a node"
    assert spread.line("all_gather", "esp").alpha == spread.line("all_to_all", "ep").alpha == 7
    assert spread.line("all_reduce", "esp").alpha == 14, "a scatter and a gather"
    assert spread.line("all_gather", "tp").alpha == 1
    assert has_links(measured) == (True, True)
    assert has_links(replace(measured, crossing=frozenset())) == (True, False)


def test_the_published_constants_keep_their_layout() -> None:
    """8 nodes of 4 as published: every time is that of the constants themselves."""
    shape = replace(LAYER, tp=4, ep=8, esp=4, num_nodes=num_nodes(8, 4, 4))
    assert shape.num_nodes == 8 and num_nodes(2, 2, 4) == num_nodes(3, 2, 4) == 1
    ours, theirs = choose(shape, for_layout(PUBLISHED, 4, 8, 4, 4)), choose(shape, PUBLISHED)
    for name, time in theirs.predicted_ms.items():
        if not name.startswith("s1n"):  # the constants have no AlltoAll inside a node; here it is as fast as a gather
            assert ours.predicted_ms[name] == time


def test_the_least_is_first_and_what_does_not_fit_is_left_out() -> None:
    found = advise(PLAN, PUBLISHED)
    assert [one.sample_ms for one in found] == sorted(one.sample_ms for one in found)
    assert {(one.tp, one.ep, one.esp) for one in found} == set(layouts(PLAN))
    for one in found:
        assert one.dp * one.tp == 16 and one.edp * one.ep * one.esp == 16
        assert one.sample_ms == pytest.approx((one.moe_ms + one.dense_ms) / one.dp)
    limit = sorted(one.memory_gb for one in found)[len(found) // 2]
    fitting = advise(replace(PLAN, memory_gb=limit), PUBLISHED)
    assert [one for one in found if one.memory_gb <= limit] == fitting
    with pytest.raises(ConfigError, match=r"no layout of 16 ranks fits 0.001 GB: the least is"):
        advise(replace(PLAN, memory_gb=0.001), PUBLISHED)


def test_slow_sums_over_shards_fold_esp_into_ep() -> None:
    """E >= P, and every byte over esp is dear: whole experts win, and it is said what sharding would cost."""
    dear = dict.fromkeys(("reduce_scatter/esp", "all_reduce/esp", "all_gather/esp", "all_to_all/ep_esp"), Line(0, 1e-3))
    plan = replace(PLAN, ranks=8)
    found = advise(plan, replace(PUBLISHED, lines={**PUBLISHED.lines, **dear, "all_to_all/ep": Line(0, 1e-7)}))
    assert found[0].esp == 1
    assert "ESP folded into EP" in " ".join(reasons(found, plan))


def test_1024_ranks_without_processes() -> None:
    plan = replace(PLAN, ranks=1024, layer=replace(LAYER, num_experts=64, hidden_size=4096, ffn_hidden_size=14336))
    found = advise(plan, PUBLISHED)
    assert found[0].sample_ms <= found[-1].sample_ms and all(one.memory_gb <= 80 for one in found)
