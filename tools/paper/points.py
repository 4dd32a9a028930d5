"""The layers of the paper's experiment. The paper's own table of 1296 was not available: this grid is a reconstruction,
a full product with that many points whose axes follow the group's other papers. Call it "reconstructed" wherever it
is shown."""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

from megatron_parm.errors import ConfigError
from tools.measure.layer_grid import GridPoint

AXES = {
    "tp": (1, 2, 4),
    "esp": (1, 2, 4),
    "batch": (2, 4, 8),
    "seq": (512, 1024, 2048),
    "hidden": (1024, 2048, 4096, 8192),
    "ffn": (1024, 2048, 4096, 8192),
}
FACTOR, TOPK = 1.2, 2
SAMPLE_SEED = 1296
LEAST_TOKENS, LEAST_WIDTH = 16, 16


def reconstructed() -> list[GridPoint]:
    """All 1296 points; one expert for each rank of ep."""
    return [
        GridPoint(tp, esp, FACTOR, batch, seq, hidden, ffn, num_experts=0, topk=TOPK)
        for tp, esp, batch, seq, hidden, ffn in product(*AXES.values())
    ]


def scaled(point: GridPoint, scale: int) -> GridPoint:
    """The point for a small machine: tokens of a sample, width and expert width divided by `scale`; one sample in two.

    Divisors that differ keep the order of sizes between points. Raises ConfigError for a scale below 1.
    """
    if scale < 1:
        raise ConfigError(f"--scale {scale} must be at least 1")
    if scale == 1:
        return point
    return replace(
        point,
        batch=max(point.batch // 2, 1),
        seq=max(point.seq // scale, LEAST_TOKENS),
        hidden=max(point.hidden // scale, LEAST_WIDTH),
        ffn=max(point.ffn // scale, LEAST_WIDTH),
    )


def fits(point: GridPoint, world: int) -> bool:
    """Whether the ranks can hold the layer's groups, with at least k experts."""
    return world % point.tp == 0 and world % point.esp == 0 and world // point.esp >= 1 and point.ffn % point.esp == 0


def stratified(points: Sequence[GridPoint], count: int, seed: int = SAMPLE_SEED) -> list[GridPoint]:
    """`count` points, as evenly as they go over the pairs of tp and esp, and within a pair over sizes.

    Within a pair the points are ordered by their work and one is drawn from each of equal runs of that order. The same
    seed gives the same points; a larger count gives others.
    """
    strata: dict[tuple[int, int], list[GridPoint]] = defaultdict(list)
    for point in points:
        strata[point.tp, point.esp].append(point)
    count = min(count, len(points))
    draw = random.Random(seed)
    share, over = divmod(count, len(strata))
    chosen = []
    for place, layout in enumerate(sorted(strata)):
        own = sorted(strata[layout], key=lambda point: (_work(point), point.key))
        wanted = min(share + (place < over), len(own))
        cuts = [len(own) * number // wanted for number in range(wanted + 1)] if wanted else []
        chosen += [own[draw.randrange(first, last)] for first, last in pairwise(cuts)]
    return chosen


def _work(point: GridPoint) -> int:
    return point.batch * point.seq * point.hidden * (point.hidden + point.ffn)
