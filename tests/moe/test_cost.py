"""Closed forms of the schedules' cost. References: sums written out by hand, and the published table of speed-ups.

`Paper` below is parm.md sections 2 and 6 written again from the paper's symbols. With ideal overlap it gives the
published means of best(S1, S2) over the baseline; without overlap it is what `predict` must give.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import ceil

import pytest

from megatron_parm.moe.cost import PUBLISHED, CostModel, LayerShape, Line, predict

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
            assert predict("baseline", shape, PUBLISHED) == pytest.approx(paper.baseline(), rel=1e-12)
            if ep > 1 or axes[1] > 1:
                assert predict("s1", shape, PUBLISHED) == pytest.approx(paper.s1(), rel=1e-12)
                assert predict("s2", shape, PUBLISHED) == pytest.approx(paper.s2(), rel=1e-12)


# One unit of time per started operation (alpha) or per byte or FLOP (beta), so that hand sums are whole numbers.
STARTS = CostModel("test", *[Line(1.0, 0.0)] * 4)
AMOUNTS = {
    name: replace(CostModel("test", *[Line(0.0, 0.0)] * 4), **{name: Line(0.0, 1.0)})
    for name in ("all_to_all", "all_gather", "reduce_scatter", "experts")
}
# 12 tokens of 10 elements of 2 bytes: BLM = 240. c = ceil(2 * 1 * 12 / 8) = 3, E c = 24 rows, Q = 480.
SMALL = LayerShape(12, 10, 6, 8, 2, 1.0, 1, True, 2, 2, tp=2, ep=4, esp=2)


@pytest.mark.parametrize(
    ("schedule", "starts", "all_to_all", "all_gather", "reduce_scatter", "rows"),
    [
        # 2 exchanges of Q esp = 960; gathers of BLM esp = 480 and 960, one reduce-scatter of 960; twice; 48 rows
        ("baseline", 2 * 5 + 2, 4 * 960, 2 * (480 + 960), 2 * 960, 48),
        # 2 exchanges of y = Q esp / tp = 480, gather of BLM; twice; 24 rows
        ("s1", 2 * 3 + 2, 4 * 480, 2 * 240, 0, 24),
        # the same with a gather of Q
        ("s2", 2 * 3 + 2, 4 * 480, 2 * 480, 0, 24),
    ],
)
def test_hand_sums(
    schedule: str, starts: int, all_to_all: int, all_gather: int, reduce_scatter: int, rows: int
) -> None:
    assert predict(schedule, SMALL, STARTS) == starts
    assert predict(schedule, SMALL, AMOUNTS["all_to_all"]) == all_to_all
    assert predict(schedule, SMALL, AMOUNTS["all_gather"]) == all_gather
    assert predict(schedule, SMALL, AMOUNTS["reduce_scatter"]) == reduce_scatter
    # forward 2 FLOPs per row, matrix and weight of 10 x 6 / esp; backward twice that
    assert predict(schedule, SMALL, AMOUNTS["experts"]) == 3 * 2 * rows * 2 * 10 * 3


def test_a_gated_expert_has_three_products() -> None:
    gated = replace(SMALL, matrices=3)
    ratio = predict("s1", gated, AMOUNTS["experts"]) / predict("s1", SMALL, AMOUNTS["experts"])
    assert ratio == pytest.approx(1.5)


def test_axes_of_one_rank_cost_nothing() -> None:
    alone = replace(SMALL, tp=1, ep=1, esp=1)
    for schedule in ("baseline", "s1", "s2"):
        assert predict(schedule, alone, STARTS) == 2, "the experts alone, forward and backward"


def test_rows_without_a_capacity_are_those_really_sent() -> None:
    assert replace(SMALL, capacity_factor=None).slots == 24
    assert replace(SMALL, capacity_factor=None, num_tokens=13).slots == 26
    assert replace(SMALL, num_tokens=13).slots == 8 * 4, "ceil(2 * 13 / 8) slots an expert"
    assert replace(SMALL, num_tokens=1, min_capacity=3).slots == 8 * 3


def test_the_published_constants() -> None:
    """FSMoE, figure 5, as parm.md section 6 copies it."""
    lines = (PUBLISHED.all_to_all, PUBLISHED.all_gather, PUBLISHED.reduce_scatter, PUBLISHED.experts)
    assert [(line.alpha, line.beta) for line in lines] == [ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER, GEMM]
    assert "2080 Ti" in PUBLISHED.source
