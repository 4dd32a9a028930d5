"""What a schedule is predicted to cost: closed forms over an alpha-beta model. Floor 5.

t(x) = alpha + beta x for each collective on each axis (x in bytes that leave or enter a rank's buffer) and for the
experts (x in FLOPs), in milliseconds. A schedule is a row of stages; each uses one resource: the links between nodes,
the links inside a node, or the processor. In r chunks, a pipeline takes the stages of one chunk one after the other,
and the other r - 1 chunks at the pace of the busiest resource. Source: parm.md sections 2, 3 and 6.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import comb

from megatron_parm.errors import ConfigError
from megatron_parm.moe.routing import capacity_of
from megatron_parm.moe.schedules import STARTS_FROM_SLICES

CHUNK_COUNTS = (1, 2, 4)  # what auto tries
AXES = ("ep", "ep_esp", "tp", "esp", "inside", "between")


@dataclass(frozen=True)
class Line:
    """alpha in ms and beta in ms per byte, or per FLOP; r2 of the fit, 1 where it is not a fit."""

    alpha: float
    beta: float
    r2: float = 1.0

    def __call__(self, amount: float) -> float:
        """Milliseconds for `amount` bytes or FLOPs."""
        return self.alpha + self.beta * amount


@dataclass(frozen=True)
class CostModel:
    """A line per collective and axis (`all_to_all/ep`), one for the experts, and which axes cross nodes.

    A collective without a line of its own on an axis has the line under its bare name. links_hidden, processor_hidden:
    the share of a chunk's work on other links, and of its experts, that is hidden behind the busiest resource. A
    line `rest` over the bytes of the tokens is what a forward and backward costs besides (gate, dispatch, combine), and
    `experts_backward` the experts' backward where it was measured; chunk_ms is what each further chunk adds.
    """

    source: str
    lines: Mapping[str, Line]
    crossing: frozenset[str] = frozenset({"ep", "ep_esp", "between"})
    links_hidden: float = 1.0
    processor_hidden: float = 1.0
    chunk_ms: float = 0.0

    def line(self, collective: str, axis: str) -> Line:
        """The line of a collective on an axis."""
        return self.lines.get(f"{collective}/{axis}") or self.lines[collective]

    @property
    def backward_products(self) -> Line:
        """The line of the experts' backward."""
        return self.lines.get("experts_backward") or self.lines["experts"]


# 8 nodes x 4 RTX 2080 Ti, 100 Gb/s InfiniBand, PCIe 3; FSMoE (ASPLOS 2025), figure 5.
PUBLISHED = CostModel(
    source="constants published for 8 nodes x 4 RTX 2080 Ti (FSMoE, fig. 5)",
    lines={
        "all_to_all": Line(0.175, 3.06e-7),
        "all_gather": Line(0.0320, 1.68e-7),
        "reduce_scatter": Line(0.0391, 1.67e-7),
        "all_reduce": Line(0.0711, 3.35e-7),  # a ReduceScatter and an AllGather
        "experts": Line(0.0924, 4.42e-11),
    },
)


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer on one rank: n tokens, identical on tp peers, and the sizes of the axes.

    capacity_factor None is dropless; has_slots: training and evaluation both have a capacity; pads: empty slots travel
    under every schedule. matrices: products of h x f in an expert, 2, or 3 for a gated one. num_nodes: nodes over which
    a group of ep_esp is spread. sequence_parallel: the layer's tokens are slices over tp before and after it.
    """

    num_tokens: int
    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    capacity_factor: float | None
    min_capacity: int
    has_slots: bool
    pads: bool
    matrices: int
    bytes_per_element: int
    tp: int
    ep: int
    esp: int
    num_nodes: int = 1
    sequence_parallel: bool = False

    def check(self) -> None:
        """Raises ConfigError for sizes that no layer can have; for entrances that take them one by one."""
        for name in ("num_tokens", "hidden_size", "ffn_hidden_size", "num_experts", "topk", "tp", "ep", "esp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', ' ')} {getattr(self, name)} must be at least 1")
        if self.topk > self.num_experts:
            raise ConfigError(f"--topk {self.topk} must not exceed the {self.num_experts} experts of --num-experts")
        for axis, size, what in (("ep", self.ep, "num_experts"), ("esp", self.esp, "ffn_hidden_size")):
            if getattr(self, what) % size:
                raise ConfigError(
                    f"{axis} {size} must divide the {what.replace('_', ' ')} {getattr(self, what)}; use a divisor of it"
                )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ConfigError(f"capacity factor {self.capacity_factor:g} must be above 0")

    @property
    def slots(self) -> int:
        """Rows of all experts for the tokens of one rank, E * c; without a capacity the k n choices."""
        capacity = capacity_of(self.num_tokens, self.num_experts, self.topk, self.capacity_factor, self.min_capacity)
        return self.topk * self.num_tokens if capacity is None else self.num_experts * capacity

    @property
    def rows(self) -> int:
        """Rows that packed buckets send for the tokens of one rank: every choice that can find a slot."""
        return self.slots if self.pads else min(self.slots, self.topk * self.num_tokens)

    @property
    def token_bytes(self) -> int:
        """The paper's BLM."""
        return self.num_tokens * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token, or of one row of the buckets."""
        return self.hidden_size * self.bytes_per_element

    def reached(self, parts: int) -> float:
        """Of `parts` equal parts of the experts, how many a token reaches whose k experts are drawn evenly."""
        each = self.num_experts // parts
        missed = comb(self.num_experts - each, self.topk) / comb(self.num_experts, self.topk)
        return parts * (1 - missed)

    def expert_flops(self, rows: float) -> float:
        """Forward FLOPs of this rank's expert shards for `rows` rows."""
        return 2.0 * rows * self.matrices * self.hidden_size * self.ffn_hidden_size / self.esp


@dataclass(frozen=True)
class Stage:
    """A step of a schedule: a collective on an axis with its bytes, or the experts with their FLOPs."""

    operation: str
    axis: str
    amount: float


@dataclass(frozen=True)
class Plan:
    """The stages of a schedule: what runs once, and what runs chunk by chunk."""

    once: tuple[Stage, ...]
    chunked: tuple[Stage, ...]


def plan(schedule: str, shape: LayerShape) -> Plan:
    """The forward stages of `schedule`; those over an axis of one rank are left out."""
    fused = shape.ep * shape.esp
    sizes = {"tp": shape.tp, "ep": shape.ep, "esp": shape.esp, "ep_esp": fused}
    sizes |= {"between": shape.num_nodes, "inside": fused // shape.num_nodes}

    def only_real(*stages: Stage) -> tuple[Stage, ...]:
        return tuple(stage for stage in stages if stage.operation == "experts" or sizes[stage.axis] > 1)

    found = PLANS[schedule](shape)
    joins = (schedule in STARTS_FROM_SLICES) != shape.sequence_parallel  # forward at one end, backward at the other
    once = (Stage("all_gather", "tp", shape.token_bytes),) if joins else ()
    return Plan(only_real(*once, *found.once), only_real(*found.chunked))


def _experts(shape: LayerShape, rows: float) -> Stage:
    return Stage("experts", "", shape.expert_flops(rows))


def _baseline(shape: LayerShape) -> Plan:
    rows = shape.rows * shape.esp
    payload = rows * shape.row_bytes
    return Plan(
        (Stage("all_gather", "esp", shape.token_bytes * shape.esp),),
        (
            Stage("all_to_all", "ep", payload),
            _experts(shape, rows),
            Stage("all_reduce", "esp", payload),
            Stage("all_to_all", "ep", payload),
        ),
    )


def _deepspeed(shape: LayerShape) -> Plan:
    z = shape.slots * shape.row_bytes / shape.tp
    q = z * shape.esp
    return Plan(
        (),
        (
            Stage("all_to_all", "ep", z),
            Stage("all_gather", "esp", q),
            _experts(shape, shape.slots * shape.esp / shape.tp),
            Stage("all_reduce", "esp", q),
            Stage("all_to_all", "ep", z),
            Stage("all_gather", "tp", shape.slots * shape.row_bytes),
        ),
    )


def _s1(shape: LayerShape) -> Plan:
    rows = shape.rows * shape.esp / shape.tp
    exchange = Stage("all_to_all", "ep_esp", rows * shape.row_bytes)
    return Plan((), (exchange, _experts(shape, rows), exchange))


def _s2(shape: LayerShape) -> Plan:
    rows = shape.slots * shape.esp / shape.tp
    exchange = Stage("all_to_all", "ep_esp", rows * shape.row_bytes)
    gather = Stage("all_gather", "tp", shape.slots * shape.row_bytes)
    return Plan((), (exchange, _experts(shape, rows), exchange, gather))


def _hierarchical(shape: LayerShape, rows: int) -> tuple[Stage, ...]:
    exchange = Stage("all_to_all", "ep", rows / shape.tp * shape.row_bytes)
    inside = rows * shape.esp / shape.tp
    return (
        exchange,
        Stage("all_gather", "esp", inside * shape.row_bytes),
        _experts(shape, inside),
        Stage("reduce_scatter", "esp", inside * shape.row_bytes),
        exchange,
    )


def _s1h(shape: LayerShape) -> Plan:
    return Plan((), _hierarchical(shape, shape.rows))


def _s1n(shape: LayerShape) -> Plan:
    tokens = shape.num_tokens / shape.tp
    kept = shape.rows / (shape.topk * shape.num_tokens) if not shape.pads else 1.0
    weights = shape.num_experts // shape.num_nodes * shape.bytes_per_element  # beside each token, on the way there
    between = tokens * kept * shape.reached(shape.num_nodes)
    inside = tokens * kept * shape.reached(shape.ep) * shape.esp
    choices = min(shape.slots, shape.topk * shape.num_tokens) * shape.esp / shape.tp
    return Plan(
        (),
        (
            Stage("all_to_all", "between", between * (shape.row_bytes + weights)),
            Stage("all_to_all", "inside", inside * (shape.row_bytes + weights)),
            _experts(shape, choices),
            Stage("all_to_all", "inside", inside * shape.row_bytes),
            Stage("all_to_all", "between", between * shape.row_bytes),
        ),
    )


def _s2h(shape: LayerShape) -> Plan:
    gather = Stage("all_gather", "tp", shape.slots * shape.row_bytes)
    return Plan((), (*_hierarchical(shape, shape.slots), gather))


PLANS = {
    "baseline": _baseline,
    "deepspeed": _deepspeed,
    "s1": _s1,
    "s2": _s2,
    "s1h": _s1h,
    "s2h": _s2h,
    "s1n": _s1n,
}


def predict(schedule: str, chunks: int, shape: LayerShape, model: CostModel) -> float:
    """Milliseconds of forward and backward of one layer in `chunks` chunks.

    Every step's adjoint moves as much as the step; backward multiplies twice as much as forward.
    """
    forward = plan(schedule, shape)
    backward = replace(forward, chunked=tuple(_backward(stage) for stage in forward.chunked))
    passes = sum(_pass_ms(direction, chunks, model) for direction in (forward, backward))
    rest = model.lines["rest"](shape.token_bytes) if "rest" in model.lines else 0.0
    return rest + (chunks - 1) * model.chunk_ms + passes


def _backward(stage: Stage) -> Stage:
    is_product = stage.operation == "experts"
    return replace(stage, operation="experts_backward", amount=2 * stage.amount) if is_product else stage


def _pass_ms(stages: Plan, chunks: int, model: CostModel) -> float:
    once = sum(_stage_ms(stage, 1, model) for stage in stages.once)
    busy: dict[str, float] = {}
    for stage in stages.chunked:
        resource = "processor" if not stage.axis else "between" if _crosses(stage, model) else "inside"
        busy[resource] = busy.get(resource, 0.0) + _stage_ms(stage, chunks, model)
    return once + sum(busy.values()) + (chunks - 1) * _chunk_ms(busy, model)


def _chunk_ms(busy: Mapping[str, float], model: CostModel) -> float:
    """The pace of the chunks after the first: the busiest resource, and what the others cannot hide behind it."""
    busiest = max(busy, key=lambda resource: busy[resource])
    pace = busy[busiest]
    for resource, time in busy.items():
        if resource != busiest:
            is_link_pair = "processor" not in (resource, busiest)
            pace += (1 - (model.links_hidden if is_link_pair else model.processor_hidden)) * time
    return pace


def _crosses(stage: Stage, model: CostModel) -> bool:
    return stage.axis in model.crossing


def _stage_ms(stage: Stage, chunks: int, model: CostModel) -> float:
    if stage.operation == "experts_backward":
        return model.backward_products(stage.amount / chunks)
    return model.line(stage.operation, stage.axis)(stage.amount / chunks)
