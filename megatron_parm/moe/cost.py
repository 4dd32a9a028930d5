"""What a schedule is predicted to cost: closed forms over an alpha-beta model. Floor 5.

t(x) = alpha + beta x for each collective (x in bytes) and for the experts (x in FLOPs), in milliseconds. Source:
parm.md sections 2, 3 and 6.
"""

from dataclasses import dataclass

from megatron_parm.moe.routing import capacity_of


@dataclass(frozen=True)
class Line:
    """alpha in ms and beta in ms per byte, or per FLOP."""

    alpha: float
    beta: float

    def __call__(self, amount: float) -> float:
        """Milliseconds for `amount` bytes or FLOPs."""
        return self.alpha + self.beta * amount


@dataclass(frozen=True)
class CostModel:
    """One line per operation, and where the lines come from."""

    source: str
    all_to_all: Line
    all_gather: Line
    reduce_scatter: Line
    experts: Line


# 8 nodes x 4 RTX 2080 Ti, 100 Gb/s InfiniBand, PCIe 3; FSMoE (ASPLOS 2025), figure 5.
PUBLISHED = CostModel(
    source="constants published for 8 nodes x 4 RTX 2080 Ti (FSMoE, fig. 5)",
    all_to_all=Line(0.175, 3.06e-7),
    all_gather=Line(0.0320, 1.68e-7),
    reduce_scatter=Line(0.0391, 1.67e-7),
    experts=Line(0.0924, 4.42e-11),
)


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer on one rank: n tokens, identical on tp peers, and the sizes of the axes.

    capacity_factor None is dropless; has_slots: training and evaluation both have a capacity. matrices: products of h
    x f in an expert, 2, or 3 for a gated one.
    """

    num_tokens: int
    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    topk: int
    capacity_factor: float | None
    min_capacity: int
    has_slots: bool
    matrices: int
    bytes_per_element: int
    tp: int
    ep: int
    esp: int

    @property
    def slots(self) -> int:
        """Rows of all experts for the tokens of one rank, E * c; without a capacity the k n rows really sent."""
        capacity = capacity_of(self.num_tokens, self.num_experts, self.topk, self.capacity_factor, self.min_capacity)
        return self.topk * self.num_tokens if capacity is None else self.num_experts * capacity

    @property
    def token_bytes(self) -> int:
        """The paper's BLM."""
        return self.num_tokens * self.hidden_size * self.bytes_per_element

    @property
    def bucket_bytes(self) -> int:
        """The paper's Q, bytes of `[E, c, h]`."""
        return self.slots * self.hidden_size * self.bytes_per_element

    def expert_flops(self, rows: float) -> float:
        """Forward FLOPs of this rank's expert shards for `rows` rows."""
        return 2.0 * rows * self.matrices * self.hidden_size * self.ffn_hidden_size / self.esp


def predict(schedule: str, shape: LayerShape, model: CostModel) -> float:
    """Milliseconds of forward and backward of one layer. Every step's adjoint moves as much as the step."""
    if schedule == "baseline":
        communication, rows = _baseline(shape, model), float(shape.slots * shape.esp)
    else:
        gathered = shape.token_bytes if schedule == "s1" else shape.bucket_bytes
        communication, rows = _fused(shape, model, gathered), shape.slots * shape.esp / shape.tp
    experts = model.experts(shape.expert_flops(rows)) + model.experts(2 * shape.expert_flops(rows))
    return 2 * communication + experts


def _baseline(shape: LayerShape, model: CostModel) -> float:
    payload = shape.bucket_bytes * shape.esp
    total = 2 * model.all_to_all(payload) if shape.ep > 1 else 0.0
    if shape.esp > 1:  # ESP-AllGather of the tokens; ESP-AllReduce as ReduceScatter + AllGather
        total += model.all_gather(shape.token_bytes * shape.esp)
        total += model.reduce_scatter(payload) + model.all_gather(payload)
    return total


def _fused(shape: LayerShape, model: CostModel, gathered: int) -> float:
    payload = shape.bucket_bytes * shape.esp / shape.tp
    total = 2 * model.all_to_all(payload) if shape.ep * shape.esp > 1 else 0.0
    return total + (model.all_gather(gathered) if shape.tp > 1 else 0.0)
