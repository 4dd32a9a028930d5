"""Which layout a number of ranks should take: a search over tp, ep, esp and dp by predicted time and memory. Floor 5.

Needs no process. Every layout that fits is compared by the time of forward and backward of all layers for one sample of
the global batch: micro-batches of dp replicas run at once. Gradient reduction is taken as hidden behind backward, and a
link's speed as the same for every group that uses it. Source: parm.md section 6.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_parm.errors import ConfigError
from megatron_parm.moe.choose import Choice, choose
from megatron_parm.moe.cost import AXES, CostModel, LayerShape, Line

ADAM_BYTES = 16  # gradient, master weight and two moments of a parameter, 4 bytes each
GB = 1e9


@dataclass(frozen=True)
class ModelPlan:
    """The model and the cluster. `layer`: an MoE layer whose tp, ep and esp do not count; heads 0: not known."""

    layer: LayerShape
    num_layers: int
    num_moe_layers: int
    vocab_size: int
    num_heads: int
    samples: int  # of a micro-batch
    ranks: int
    ranks_per_node: int
    memory_gb: float


@dataclass(frozen=True)
class Advice:
    """A layout that fits, and what it is predicted to take."""

    tp: int
    ep: int
    esp: int
    dp: int
    choice: Choice
    memory_gb: float
    moe_ms: float  # of all MoE layers of a micro-batch
    dense_ms: float  # of everything else
    sample_ms: float

    @property
    def edp(self) -> int:
        """Replicas of each expert."""
        return self.tp * self.dp // (self.ep * self.esp)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def layouts(plan: ModelPlan) -> Iterator[tuple[int, int, int]]:
    """Every (tp, ep, esp) that the sizes allow; tp and esp stay inside a node."""
    layer = plan.layer
    inside = [size for size in _divisors(plan.ranks) if size <= plan.ranks_per_node]
    for tp in inside:
        if layer.hidden_size % tp or plan.num_heads % tp:
            continue
        for esp in inside:
            if layer.ffn_hidden_size % esp:
                continue
            for ep in _divisors(layer.num_experts):
                if plan.ranks % (ep * esp) == 0:
                    yield tp, ep, esp


def memory_gb(plan: ModelPlan, tp: int, ep: int, esp: int, schedule: str) -> float:
    """Gigabytes of weights, optimizer state and activations of a rank, every activation kept.

    Weights count bytes_per_element, and 16 for gradient, master and moments (12 where the weights are fp32 themselves).
    A dense layer keeps n h (10 + 24 / tp) half-precision bytes (Korthikanti et al. 2022, attention without its matrix
    of scores); of an MoE layer, 10 + 5 / tp of it, the buckets of a rank twice, and the experts' hidden rows twice.
    """
    layer = plan.layer
    h, n, size = layer.hidden_size, layer.num_tokens, layer.bytes_per_element
    attention = 4 * h * h / tp
    dense_ffn = layer.matrices * h * layer.ffn_hidden_size / tp
    expert = layer.matrices * h * layer.ffn_hidden_size / esp
    moe = layer.num_experts * h + layer.num_experts // ep * expert
    num_dense = plan.num_layers - plan.num_moe_layers
    parameters = plan.vocab_size * h / tp + plan.num_layers * attention + num_dense * dense_ffn
    parameters += plan.num_moe_layers * moe
    state = parameters * (size + ADAM_BYTES - (4 if size >= 4 else 0))
    duplicates = tp if schedule == "baseline" else 1
    rows = layer.slots * esp / tp * duplicates
    kept = num_dense * n * h * (10 + 24 / tp) * size / 2
    kept += plan.num_moe_layers * n * h * (10 + 5 / tp) * size / 2
    kept += plan.num_moe_layers * rows * 2 * (h + layer.ffn_hidden_size / esp) * size
    logits = n * plan.vocab_size / tp * 4
    return (state + kept + logits) / GB


def num_nodes(ep: int, esp: int, ranks_per_node: int) -> int:
    """Nodes over which a group of ep_esp is spread in equal runs of whole experts; 1 if it is not."""
    nodes = ep * esp // ranks_per_node
    is_even = nodes > 1 and nodes * ranks_per_node == ep * esp and ranks_per_node % esp == 0
    return nodes if is_even else 1


def for_layout(model: CostModel, tp: int, ep: int, esp: int, ranks_per_node: int) -> CostModel:
    """`model` with the lines of a layout that it was not measured on, by the link each axis uses.

    A group of neighbours crosses nodes if it is larger than one. Links between nodes have the line that the model has
    for an AlltoAll over them, links inside a node that of an AllGather over them; an AllReduce is two of either.
    """
    reach = {"tp": tp, "esp": esp, "ep": ep * esp, "ep_esp": ep * esp}
    crossing = {name for name, ranks in reach.items() if ranks > ranks_per_node}
    if "ep_esp" in crossing:
        crossing.add("between" if num_nodes(ep, esp, ranks_per_node) > 1 else "inside")
    lines = {name: line for name, line in model.lines.items() if "/" not in name}
    for axis in AXES:
        is_crossing = axis in crossing
        for operation in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"):
            lines[f"{operation}/{axis}"] = _line_on(model, operation, is_crossing)
    return replace(model, lines=lines, crossing=frozenset(crossing))


def _line_on(model: CostModel, operation: str, is_crossing: bool) -> Line:
    """The line of an operation on one kind of link: measured there, or derived from what was."""
    known = {
        "all_to_all": ("ep", "ep_esp", "between", "inside"),
        "all_gather": ("tp", "esp"),
        "reduce_scatter": ("esp",),
        "all_reduce": ("esp",),
    }
    for axis in known[operation]:
        if (axis in model.crossing) == is_crossing and (f"{operation}/{axis}" in model.lines or axis != "inside"):
            return model.line(operation, axis)
    stand_in = "all_to_all" if is_crossing else "all_gather"
    found = [axis for axis in known[stand_in] if (axis in model.crossing) == is_crossing]
    line = model.line(stand_in, found[0]) if found else model.line(operation, known[operation][0])
    return Line(2 * line.alpha, 2 * line.beta) if operation == "all_reduce" and found else line


def has_links(model: CostModel) -> tuple[bool, bool]:
    """Whether the model was measured on links (inside a node, between nodes) at all."""
    return not {"tp", "esp", "ep", "ep_esp"} <= model.crossing, bool(model.crossing)


def _dense_ms(plan: ModelPlan, tp: int, model: CostModel) -> float:
    """Everything but the MoE layers: products, and an AllReduce over tp for each half of a layer in each direction."""
    layer = plan.layer
    n, h = layer.num_tokens, layer.hidden_size
    samples = max(plan.samples, 1)
    sequence = n / samples
    attention = 2 * n * 4 * h * h / tp + 4 * n * sequence * h / tp / 2
    dense_ffn = 2 * n * layer.matrices * h * layer.ffn_hidden_size / tp
    logits = 2 * n * h * plan.vocab_size / tp
    num_dense = plan.num_layers - plan.num_moe_layers
    total = 0.0
    for flops, count in ((attention, plan.num_layers), (dense_ffn, num_dense), (logits, 1)):
        total += count * (model.line("experts", "")(flops) + model.backward_products(2 * flops))
    if tp > 1:
        total += 2 * (plan.num_layers + num_dense) * model.line("all_reduce", "tp")(layer.token_bytes)
    return total


def advise(plan: ModelPlan, model: CostModel) -> list[Advice]:
    """Every layout that fits, fastest first. Raises ConfigError if there is none."""
    found, least = [], float("inf")
    for tp, ep, esp in layouts(plan):
        here = for_layout(model, tp, ep, esp, plan.ranks_per_node)
        choice = choose(
            replace(plan.layer, tp=tp, ep=ep, esp=esp, num_nodes=num_nodes(ep, esp, plan.ranks_per_node)), here
        )
        needed = memory_gb(plan, tp, ep, esp, choice.schedule)
        least = min(least, needed)
        if needed > plan.memory_gb:
            continue
        dp = plan.ranks // tp
        moe = plan.num_moe_layers * min(choice.predicted_ms.values())
        dense = _dense_ms(plan, tp, here)
        found.append(Advice(tp, ep, esp, dp, choice, needed, moe, dense, (moe + dense) / (dp * plan.samples)))
    if not found:
        raise ConfigError(
            f"no layout of {plan.ranks} ranks fits {plan.memory_gb:g} GB: the least is {least:.1f} GB a rank; use more "
            "ranks or memory, or a smaller --micro-batch-size"
            if least < float("inf")
            else f"no tp, ep and esp divide {plan.ranks} ranks, the experts and the sizes of the layer"
        )
    return sorted(found, key=lambda one: (one.sample_ms, one.memory_gb))


def reasons(found: list[Advice], plan: ModelPlan) -> list[str]:
    """Why the first is the first: it against the best of each other kind."""
    best, lines = found[0], []
    experts = plan.layer.num_experts

    def against(others: list[Advice], text: str, why: str) -> None:
        if others:
            rival = min(others, key=lambda one: one.sample_ms)
            lines.append(
                f"{text}: {rival.sample_ms / best.sample_ms - 1:+.1%} with tp {rival.tp}, ep {rival.ep}, esp "
                f"{rival.esp}, {rival.choice.schedule} x {rival.choice.chunks}; {why}"
            )

    if best.esp == 1:
        against(
            [one for one in found if one.esp > 1],
            "expert sharding (esp > 1)",
            f"whole experts on more ranks (ESP folded into EP, {experts} experts for {plan.ranks} ranks) send no row "
            "to several shards and add no partial sums",
        )
    else:
        against(
            [one for one in found if one.esp == 1],
            "whole experts (esp 1)",
            f"{experts} experts give ep at most {experts} ranks; beyond them only esp or replicas share the work",
        )
    against(
        [one for one in found if one.tp < best.tp],
        f"less tp than {best.tp}",
        "more replicas at once, but each rank computes more of every sample",
    )
    against(
        [one for one in found if one.tp > best.tp],
        f"more tp than {best.tp}",
        "every layer sums its activations over tp, and fewer replicas run at once",
    )
    return lines
