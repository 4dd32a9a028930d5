"""Predicted times for clusters that are not at hand: kinds of clusters by name, and a model fitted on few ranks made
larger. Everything here is a prediction."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_parm.moe.choose import predictions
from megatron_parm.moe.cost import CostModel, LayerShape, Line, Plan, Stage, plan

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
START_MS = {"all_to_all": 0.02, "all_gather": 0.03, "reduce_scatter": 0.03, "all_reduce": 0.05}
EXPERTS_START_MS = 0.05


@dataclass(frozen=True)
class ClusterKind:
    """Links and processors of a kind of cluster, as their makers name them: GB/s each way, for one rank.

    `inside` between ranks of a node, `between` a rank's share of its node's network; `efficiency` is the share of
    both, and of the processor's TFLOP/s, that programs reach. Assumed, not measured.
    """

    name: str
    ranks_per_node: int
    inside: float
    between: float
    tflops: float
    efficiency: float = 0.7

    def model(self, shape: LayerShape, num_nodes: int) -> CostModel:
        """The cost model of a layer's groups on this kind of cluster."""
        wide = _spans(shape, self.ranks_per_node)
        lines = {}
        for axis, crosses in wide.items():
            parts = _size(shape, axis, num_nodes)
            far = 1 / (self.between * self.efficiency * 1e6)  # ms a byte
            near = 1 / (self.inside * self.efficiency * 1e6)
            share = crossing_share(axis, shape, num_nodes) if crosses else 0.0
            left = 1 - 1 / parts if parts > 1 else 0.0
            beta = share * far + max(left - share, 0.0) * near
            for collective, start in START_MS.items():
                messages = max(parts - 1, 1) if collective == "all_to_all" else 1
                lines[f"{collective}/{axis}"] = Line(
                    start * (1 + 0.1 * messages), beta * (2 if collective == "all_reduce" else 1)
                )
        lines |= {name: Line(alpha, 0.0) for name, alpha in START_MS.items()}
        lines["experts"] = Line(EXPERTS_START_MS, 1 / (self.tflops * self.efficiency * 1e9))
        crossing = frozenset(axis for axis, crosses in wide.items() if crosses)
        return CostModel(f"assumed: {self.name}", lines, crossing)


KINDS = (
    ClusterKind("PCIe + 100 Gb/s", ranks_per_node=4, inside=12.0, between=12.5 / 4, tflops=50.0),
    ClusterKind("NVLink + 400 Gb/s", ranks_per_node=8, inside=300.0, between=50.0, tflops=400.0),
    ClusterKind("Ethernet 10 Gb/s", ranks_per_node=8, inside=12.0, between=1.25 / 8, tflops=50.0),
)


def _spans(shape: LayerShape, ranks_per_node: int) -> dict[str, bool]:
    """Which axes leave a node: esp and tp are consecutive ranks, ep strides by esp."""
    return {
        "tp": shape.tp > ranks_per_node,
        "esp": shape.esp > ranks_per_node,
        "ep": shape.ep * shape.esp > ranks_per_node,
        "ep_esp": shape.ep * shape.esp > ranks_per_node,
        "inside": False,
        "between": shape.num_nodes > 1,
    }


def _size(shape: LayerShape, axis: str, num_nodes: int) -> int:
    fused = shape.ep * shape.esp
    sizes = {"tp": shape.tp, "esp": shape.esp, "ep": shape.ep, "ep_esp": fused}
    return (sizes | {"between": num_nodes, "inside": max(fused // num_nodes, 1)})[axis]


def crossing_share(axis: str, shape: LayerShape, num_nodes: int) -> float:
    """Of a rank's buffer, the part whose receivers lie on other nodes."""
    return 1 - 1 / num_nodes if axis in ("ep", "ep_esp", "between") and num_nodes > 1 else 0.0


def on(world: int, ranks_per_node: int, shape: LayerShape) -> tuple[LayerShape, int]:
    """The layer on `world` ranks: as many experts a rank as before, all ranks in one group of ep_esp."""
    num_nodes = max(world // ranks_per_node, 1)
    ep = max(world // shape.esp, 1)
    experts = ep * max(shape.num_experts // shape.ep, 1)
    return replace(shape, ep=ep, num_experts=experts, num_nodes=num_nodes), num_nodes


def enlarged(model: CostModel, fitted: LayerShape, wanted: LayerShape) -> CostModel:
    """A model fitted on few nodes for more of them, of the same size and links.

    What crosses nodes grows from 1 - 1/N to 1 - 1/N' of a buffer; a start of an AlltoAll is paid for every peer.
    """
    lines = dict(model.lines)
    for axis in ("ep", "ep_esp", "between"):
        before, after = (_size(one, axis, one.num_nodes) for one in (fitted, wanted))
        old = lines.get(f"all_to_all/{axis}")
        if old is None or before < 2:
            continue
        first, second = (crossing_share(axis, one, one.num_nodes) for one in (fitted, wanted))
        grown = second / first if first > 0 else 1.0
        lines[f"all_to_all/{axis}"] = Line(old.alpha * (after - 1) / (before - 1), old.beta * grown, old.r2)
    return replace(model, source=f"{model.source}, enlarged to {wanted.num_nodes} nodes", lines=lines)


def communication_ms(schedule: str, shape: LayerShape, model: CostModel) -> float:
    """Milliseconds of the collectives alone, forward and backward, in one chunk."""
    found: Plan = plan(schedule, shape)
    stages: tuple[Stage, ...] = (*found.once, *found.chunked)
    collectives = [stage for stage in stages if stage.operation != "experts"]
    return 2 * sum(model.line(stage.operation, stage.axis)(stage.amount) for stage in collectives)


@dataclass(frozen=True)
class Grown:
    """Predicted milliseconds of a layer on a kind of cluster."""

    kind: str
    ranks: int
    baseline_ms: float
    deepspeed_ms: float | None
    auto_ms: float
    schedule: str
    chunks: int


def grown(shape: LayerShape, kinds: tuple[ClusterKind, ...] = KINDS, ranks: tuple[int, ...] = RANKS) -> Iterator[Grown]:
    """The layer on every kind and number of ranks that can hold it."""
    for kind in kinds:
        for world in ranks:
            if world < max(shape.tp, shape.esp):
                continue
            larger, num_nodes = on(world, kind.ranks_per_node, shape)
            times = predictions(larger, kind.model(larger, num_nodes))
            best = min(times, key=lambda key: times[key])
            yield Grown(
                kind.name, world, times["baseline", 1], times.get(("deepspeed", 1)), times[best], best[0], best[1]
            )
