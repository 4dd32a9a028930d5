"""Closed forms of the schedules' cost. References: sums written out by hand, and the published table of speed-ups.

`Paper` below is parm.md sections 2 and 6 written again from the paper's symbols. With ideal overlap it gives the
published means of best(S1, S2) over the baseline; without overlap it is what `predict` must give.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any

import pytest

from megatron_parm.errors import ConfigError
from megatron_parm.moe.cost import PLANS, PUBLISHED, CostModel, LayerShape, Line, plan, predict

ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, GEMM = (
    (0.175, 3.06e-7),
    (0.0320, 1.68e-7),
    (0.0391, 1.67e-7),
    (0.0924, 4.42e-11),
)
E, TOPK, FACTOR = 8, 2, 1.2  # k f = 2.4


def t(line: tuple[float, float], amount: float) -> float:
    return line[0] + line[1] * amount


@dataclass(frozen=True)
class Paper:
    """A layer in the paper's symbols, fp32."""

    B: int
    L: int
    M: int
    H: int
    N_MP: int
    N_ESP: int
    N_EP: int = 8

    @property
    def slots(self) -> int:
        return E * ceil(round(TOPK * FACTOR * self.B * self.L / E, 9))

    def experts(self, rows: float) -> float:
        """Forward two products of M x H / N_ESP, backward twice that."""
        flops = 2 * 2 * rows * self.M * self.H / self.N_ESP
        return t(GEMM, flops) + t(GEMM, 2 * flops)

    def baseline(self) -> float:
        BLM, Q = 4 * self.B * self.L * self.M, 4 * self.slots * self.M
        way = 2 * t(ALL_TO_ALL, Q * self.N_ESP) if self.N_EP > 1 else 0
        if self.N_ESP > 1:
            way += t(ALL_GATHER, BLM * self.N_ESP) + t(REDUCE_SCATTER, Q * self.N_ESP) + t(ALL_GATHER, Q * self.N_ESP)
        return 2 * way + self.experts(self.slots * self.N_ESP)

    def s1(self) -> float:
        BLM, y = 4 * self.B * self.L * self.M, 4 * self.slots * self.M * self.N_ESP / self.N_MP
        way = 2 * t(ALL_TO_ALL, y) + (t(ALL_GATHER, BLM) if self.N_MP > 1 else 0)
        return 2 * way + self.experts(self.slots * self.N_ESP / self.N_MP)

    def s2(self, overlaps: bool = False) -> float:
        Q = 4 * self.slots * self.M
        exchange = t(ALL_TO_ALL, Q * self.N_ESP / self.N_MP)
        gather = t(ALL_GATHER, Q) if self.N_MP > 1 else 0
        way = exchange + (max(exchange, gather) if overlaps else exchange + gather)
        return 2 * way + self.experts(self.slots * self.N_ESP / self.N_MP)


def shape_of(paper: Paper) -> LayerShape:
    return LayerShape(
        num_tokens=paper.B * paper.L,
        hidden_size=paper.M,
        ffn_hidden_size=paper.H,
        num_experts=E,
        topk=TOPK,
        capacity_factor=FACTOR,
        min_capacity=1,
        has_slots=True,
        pads=True,
        matrices=2,
        bytes_per_element=4,
        tp=paper.N_MP,
        ep=paper.N_EP,
        esp=paper.N_ESP,
    )


SIZES = list(product((2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096), (1024, 2048, 4096)))
PUBLISHED_MEANS = {
    (1, 2): 1.56,
    (1, 4): 1.60,
    (2, 1): 1.93,
    (2, 2): 3.10,
    (2, 4): 3.20,
    (4, 1): 2.94,
    (4, 2): 5.94,
    (4, 4): 6.37,
}


@pytest.mark.parametrize(("axes", "mean"), PUBLISHED_MEANS.items(), ids=str)
def test_the_reference_gives_the_published_speed_ups(axes: tuple[int, int], mean: float) -> None:
    """To 3 %: the publication does not say how it rounds T nor how it counts the start-up of the products."""
    papers = [Paper(*size, *axes) for size in SIZES]
    speed_ups = [paper.baseline() / min(paper.s1(), paper.s2(overlaps=True)) for paper in papers]
    assert sum(speed_ups) / len(speed_ups) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("axes", PUBLISHED_MEANS, ids=str)
def test_predict_is_the_reference_without_overlap(axes: tuple[int, int]) -> None:
    for size in SIZES[::5]:
        for ep in (1, 8):
            paper = Paper(*size, *axes, N_EP=ep)
            shape = shape_of(paper)
            assert predict("baseline", 1, shape, PUBLISHED) == pytest.approx(paper.baseline(), rel=1e-12)
            if ep > 1 or axes[1] > 1:
                assert predict("s1", 1, shape, PUBLISHED) == pytest.approx(paper.s1(), rel=1e-12)
                assert predict("s2", 1, shape, PUBLISHED) == pytest.approx(paper.s2(), rel=1e-12)


OPERATIONS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "experts")
# One unit of time per started operation (alpha) or per byte or FLOP (beta), so that hand sums are whole numbers.
STARTS = CostModel("test", dict.fromkeys(OPERATIONS, Line(1.0, 0.0)))


def amount_of(operation: str, axis: str = "") -> CostModel:
    """A model in which only one operation costs anything, a unit per byte or FLOP."""
    lines = dict.fromkeys(OPERATIONS, Line(0.0, 0.0))
    return CostModel("test", {**lines, f"{operation}/{axis}" if axis else operation: Line(0.0, 1.0)})


# 12 tokens of 10 elements of 2 bytes: BLM = 240. c = ceil(2 * 2 * 12 / 8) = 6, E c = 48 slots, Q = 960; 24 choices.
SMALL = LayerShape(12, 10, 6, 8, 2, 2.0, 1, True, False, 2, 2, tp=2, ep=4, esp=2)
PADDED = replace(SMALL, pads=True)


@pytest.mark.parametrize(
    ("schedule", "shape", "starts", "amounts", "rows"),
    [
        # esp * 24 rows of 20 bytes there and back and summed, the gathered tokens
        ("baseline", SMALL, 4 + 1, {"all_to_all/ep": 2 * 960, "all_gather/esp": 480, "all_reduce/esp": 960}, 48),
        ("baseline", PADDED, 4 + 1, {"all_to_all/ep": 2 * 1920, "all_gather/esp": 480, "all_reduce/esp": 1920}, 96),
        # z = Q / tp = 480 there and back, gathers of z esp and Q, a sum of z esp
        (
            "deepspeed",
            SMALL,
            6,
            {"all_to_all/ep": 2 * 480, "all_gather/esp": 960, "all_reduce/esp": 960, "all_gather/tp": 960},
            48,
        ),
        # y = 24 rows * esp / tp there and back, a gather of BLM
        ("s1", SMALL, 3 + 1, {"all_to_all/ep_esp": 2 * 480, "all_gather/tp": 240}, 24),
        # slots, not rows, and a gather of Q
        ("s2", SMALL, 4, {"all_to_all/ep_esp": 2 * 960, "all_gather/tp": 960}, 48),
        # one copy between nodes, esp copies inside
        (
            "s1h",
            SMALL,
            5 + 1,
            {"all_to_all/ep": 2 * 240, "all_gather/esp": 480, "reduce_scatter/esp": 480, "all_gather/tp": 240},
            24,
        ),
        (
            "s2h",
            SMALL,
            6,
            {"all_to_all/ep": 2 * 480, "all_gather/esp": 960, "reduce_scatter/esp": 960, "all_gather/tp": 960},
            48,
        ),
    ],
)
def test_hand_sums(schedule: str, shape: LayerShape, starts: int, amounts: dict[str, int], rows: int) -> None:
    """Each pass has as many operations, and moves as many bytes, as the other."""
    assert predict(schedule, 1, shape, STARTS) == 2 * starts
    for name, bytes_ in amounts.items():
        assert predict(schedule, 1, shape, amount_of(*name.split("/"))) == 2 * bytes_, name
    moved = {
        f"{stage.operation}/{stage.axis}" for stage in (*plan(schedule, shape).once, *plan(schedule, shape).chunked)
    }
    assert moved - {"experts/"} == set(amounts)
    # forward 2 FLOPs per row, matrix and weight of 10 x 6 / esp; backward twice that
    assert predict(schedule, 1, shape, amount_of("experts")) == 3 * 2 * rows * 2 * 10 * 3


def test_chunks_overlap_what_uses_different_links() -> None:
    """s1h in r chunks, only bytes cost: the first chunk passes every stage, the others follow at the busiest's pace."""
    between, inside, once = 2 * 240, 2 * 480, 240
    lines = dict.fromkeys(OPERATIONS, Line(0.0, 1.0)) | {"experts": Line(0.0, 0.0)}
    for chunks in (1, 2, 4, 8):
        expected = once + (between + inside) / chunks + (chunks - 1) * inside / chunks
        assert predict("s1h", chunks, SMALL, CostModel("test", lines)) == pytest.approx(2 * expected)


def _with_rest(model: CostModel) -> CostModel:
    return replace(model, chunk_ms=5.0, lines={**model.lines, "rest": Line(7.0, 0.0)})


def test_each_chunk_pays_its_starts_again() -> None:
    assert predict("s1", 4, SMALL, STARTS) == 2 * (1 + 3 + 3 * 2), "two exchanges a chunk are the busiest"
    assert predict("s1", 3, SMALL, _with_rest(STARTS)) == 2 * (1 + 3 + 2 * 2) + 2 * 5 + 7


def test_axes_inside_a_node_share_its_links() -> None:
    """With nothing crossing nodes the exchanges and the node's collectives add up."""
    one_node = replace(CostModel("test", dict.fromkeys(OPERATIONS, Line(0.0, 1.0))), crossing=frozenset())
    free = replace(one_node, lines={**one_node.lines, "experts": Line(0.0, 0.0)})
    assert predict("s1h", 8, SMALL, free) == pytest.approx(predict("s1h", 1, SMALL, free))


def test_a_line_of_its_own_goes_before_the_bare_one() -> None:
    model = CostModel("test", {"all_to_all": Line(1.0, 0.0), "all_to_all/ep": Line(5.0, 0.0)})
    assert model.line("all_to_all", "ep").alpha == 5.0 and model.line("all_to_all", "ep_esp").alpha == 1.0


def test_a_gated_expert_has_three_products() -> None:
    gated = replace(SMALL, matrices=3)
    ratio = predict("s1", 1, gated, amount_of("experts")) / predict("s1", 1, SMALL, amount_of("experts"))
    assert ratio == pytest.approx(1.5)


def test_axes_of_one_rank_cost_nothing() -> None:
    alone = replace(SMALL, tp=1, ep=1, esp=1)
    for schedule in PLANS:
        assert predict(schedule, 1, alone, STARTS) == 2, "the experts alone, forward and backward"


def test_rows_are_those_really_sent() -> None:
    assert (SMALL.slots, SMALL.rows, PADDED.rows) == (48, 24, 48)
    assert replace(SMALL, capacity_factor=0.5).rows == replace(SMALL, capacity_factor=0.5).slots == 8 * 2
    assert replace(SMALL, capacity_factor=None).slots == 24
    assert replace(SMALL, capacity_factor=1.0, num_tokens=13).slots == 8 * 4, "ceil(2 * 13 / 8) slots an expert"
    assert replace(SMALL, capacity_factor=1.0, num_tokens=1, min_capacity=3).slots == 8 * 3


def test_the_published_constants() -> None:
    """FSMoE, figure 5, as parm.md section 6 copies it; the AllReduce is a ReduceScatter and an AllGather."""
    lines = [PUBLISHED.lines[name] for name in ("all_to_all", "all_gather", "reduce_scatter", "experts")]
    assert [(line.alpha, line.beta) for line in lines] == [ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, GEMM]
    assert PUBLISHED.lines["all_reduce"].alpha == pytest.approx(ALL_GATHER[0] + REDUCE_SCATTER[0])
    assert PUBLISHED.lines["all_reduce"].beta == pytest.approx(ALL_GATHER[1] + REDUCE_SCATTER[1])
    assert "2080 Ti" in PUBLISHED.source


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tp": 0}, "tp 0 must be at least 1"),
        ({"num_tokens": 0}, "num tokens 0 must"),
        ({"topk": 9}, "--topk 9 must not exceed the 8 experts"),
        ({"ep": 3}, "ep 3 must divide the num experts 8"),
        ({"esp": 4}, "esp 4 must divide the ffn hidden size 6"),
        ({"capacity_factor": 0.0}, "capacity factor 0 must be above 0"),
    ],
)
def test_sizes_that_no_layer_can_have(wrong: dict[str, Any], message: str) -> None:
    SMALL.check()
    with pytest.raises(ConfigError, match=message):
        replace(SMALL, **wrong).check()
