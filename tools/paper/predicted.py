"""Rows that cost models give: the whole reconstructed grid, and a larger cluster predicted from a smaller one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megatron_parm.moe.choose import predictions
from megatron_parm.moe.cost import PUBLISHED, CostModel
from tools.measure.launcher import Launcher
from tools.measure.layer_grid import GridPoint
from tools.paper.growth import communication_ms, enlarged
from tools.paper.points import fits, reconstructed, scaled

Layouts = Mapping[tuple[int, int], CostModel]
# what the published constants are asked: name, ranks, nodes, capacity factor
PAPERS_CLUSTER = ("published", 32, 8, 1.2)
VARIATIONS = (
    ("published, 8 ranks", 8, 2, 1.2),
    ("published, f = 1.0", 32, 8, 1.0),
    ("published, f = 2.4", 32, 8, 2.4),
)
Setting = tuple[str, int, int, float]


@dataclass(frozen=True)
class Cluster:
    """Ranks, nodes, and the models measured there by (tp, esp)."""

    world: int
    nodes: int
    models: Layouts


def by_layout(models: Mapping[str, CostModel], launcher: Launcher) -> dict[tuple[int, int], CostModel]:
    """The models of a file that were measured on the launcher's cluster, by (tp, esp)."""
    sizes = "+".join([str(launcher.ranks_per_node)] * launcher.nodes)
    found = {}
    for key, model in models.items():
        _, nodes, layout = key.split(":")
        tp, _, esp = layout.split("-")
        if nodes == sizes:
            found[int(tp.removeprefix("tp")), int(esp.removeprefix("esp"))] = model
    return found


def predicted_rows(
    fitted: Layouts, scale: int, world: int, nodes: int, variations: Sequence[Setting] = ()
) -> Iterator[dict[str, object]]:
    """All 1296 layers in full size by the published constants, and scaled by the models fitted here."""
    for point in reconstructed():
        for name, ranks, published_nodes, factor in (PAPERS_CLUSTER, *variations):
            yield _row(name, replace(point, factor=factor), ranks, published_nodes, PUBLISHED)
        small = scaled(point, scale)
        if fits(small, world) and (point.tp, point.esp) in fitted:
            yield _row("fitted", small, world, nodes, fitted[point.tp, point.esp])


def _row(source: str, point: GridPoint, world: int, nodes: int, model: CostModel) -> dict[str, object]:
    times = predictions(point.shape(world, nodes), model)
    best = min(times, key=lambda key: times[key])
    paper_ms, paper = min((times[name, 1], name) for name in ("s1", "s2"))
    return {
        **asdict(point),
        "source": source,
        "ranks": world,
        "baseline_ms": times["baseline", 1],
        "deepspeed_ms": times.get(("deepspeed", 1), ""),
        "auto_ms": times[best],
        "schedule": best[0],
        "chunks": best[1],
        "s1_or_s2_ms": paper_ms,
        "s1_or_s2": paper,
    }


def check_rows(
    point: GridPoint, result: Mapping[str, Any], here: Cluster, there: Cluster
) -> Iterator[dict[str, object]]:
    """The communication of every schedule on the larger cluster `there`: predicted from `here`, and measured.

    Measured are its collectives alone; what the layer takes beyond them is computation and the contention of many
    processes on few cores.
    """
    layout = point.tp, point.esp
    if layout not in here.models or layout not in there.models:
        return
    small, large = point.shape(here.world, here.nodes), point.shape(there.world, there.nodes)
    guess = enlarged(here.models[layout], small, large)
    for row in result["results"][:-1]:
        if row["chunks"] == 1:
            links = communication_ms(row["schedule"], large, there.models[layout])
            yield {
                "ranks": there.world,
                "tp": point.tp,
                "esp": point.esp,
                "schedule": row["schedule"],
                "communication_predicted_ms": communication_ms(row["schedule"], large, guess),
                "communication_measured_ms": links,
                "layer_measured_ms": row["median_ms"],
                "beyond_communication_ms": row["median_ms"] - links,
                "processor_ms_of_all_ranks": row["processor_ms"],
            }
