"""Measures the cost model on the live groups, and keeps it in a file. Floor 5.

Every rank runs the same collective at the same time, so what groups share (a node's uplink, the processor) is in the
figures. A time is that of the slowest rank; a line is the least-squares fit over sizes. A few seconds for 8 ranks.
Source: parm.md section 6.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megatron_parm.errors import DataError
from megatron_parm.moe.cost import AXES, CHUNK_COUNTS, CostModel, LayerShape, Line, predict
from megatron_parm.moe.layer import MoELayer
from megatron_parm.moe.probe import Pass, build_probe
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import Axis, ParallelContext
from megatron_parm.parallel.grid import AXES as GRID_AXES
from megatron_parm.parallel.grid import cut_by_nodes

SIZES_BYTES = (1 << 14, 1 << 17, 1 << 19, 1 << 20, 1 << 21)  # of a rank's buffer
ROWS = (32, 128, 512, 1024)
REPEATS = 5
COLLECTIVES: tuple[tuple[str, str], ...] = (
    ("all_to_all", "ep"),
    ("all_to_all", "ep_esp"),
    ("all_to_all", "inside"),
    ("all_to_all", "between"),
    ("all_gather", "tp"),
    ("all_gather", "esp"),
    ("reduce_scatter", "esp"),
    ("all_reduce", "esp"),
)


def fit(amounts: Sequence[float], times_ms: Sequence[float]) -> Line:
    """The least-squares line through the points; neither coefficient is below zero."""
    n = len(amounts)
    mean_x, mean_y = sum(amounts) / n, sum(times_ms) / n
    spread = sum((x - mean_x) ** 2 for x in amounts)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(amounts, times_ms, strict=True)) / spread
    slope = max(slope, 0.0)
    start = max(mean_y - slope * mean_x, 0.0)
    missed = sum((y - start - slope * x) ** 2 for x, y in zip(amounts, times_ms, strict=True))
    total = sum((y - mean_y) ** 2 for y in times_ms)
    return Line(start, slope, 1 - missed / total if total > 0 else 1.0)


def measure(shape: LayerShape, ctx: ParallelContext, dtype: torch.dtype, synchronise: Callable[[], None]) -> CostModel:
    """The cost model of the groups of `ctx` for layers like `shape`. Call on all ranks; every rank gets the same one.

    `synchronise` waits for the device.
    """

    def timed(action: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS):
            transport.barrier(ctx.world)
            started = time.perf_counter()
            action()
            synchronise()
            elapsed = torch.tensor([(time.perf_counter() - started) * 1000], dtype=torch.float64, device=ctx.device)
            times.append(transport.max_over(elapsed, ctx.world).item())
        return median(times[1:])

    layer = build_probe(shape, ctx, dtype)
    lines: dict[str, Line] = {}
    for collective, axis in COLLECTIVES:
        action = _collective(collective, ctx.axis(axis), ctx.device)
        times = [timed(partial(action, size)) for size in SIZES_BYTES]
        lines[f"{collective}/{axis}"] = fit(SIZES_BYTES, times)
    flops = [shape.expert_flops(rows) for rows in ROWS]
    lines["experts"] = fit(flops, [timed(partial(_forward, layer, rows)) for rows in ROWS])
    both = fit(flops, [timed(partial(_forward_and_backward, layer, rows)) for rows in ROWS])
    lines["experts_backward"] = _second_of(lines["experts"], both)
    links, processor = _overlaps(ctx, partial(_forward, layer, ROWS[-1]), timed)
    model = CostModel(
        source=f"measured on this cluster, {ctx.world.size} ranks",
        lines=lines,
        crossing=frozenset(_crossing(ctx)),
        links_hidden=links,
        processor_hidden=processor,
    )
    model = _with_the_rest(model, layer, shape, ctx, timed)
    return from_json(json.loads(transport.broadcast_text(json.dumps(to_json(model)), ctx.world)))


def _inbox(layer: MoELayer, rows: int) -> Tensor:
    """`rows` rows, spread evenly over this rank's experts: `[1, e, rows / e, h]`."""
    weight = layer.experts.weight1
    return torch.zeros(1, weight.shape[0], max(rows // weight.shape[0], 1), weight.shape[-1]).to(weight)


def _forward(layer: MoELayer, rows: int) -> None:
    with torch.no_grad():
        layer.experts(_inbox(layer, rows))


def _forward_and_backward(layer: MoELayer, rows: int) -> None:
    inbox = _inbox(layer, rows).requires_grad_()
    output = layer.experts(inbox)
    assert isinstance(output, Tensor)
    output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]  # torch's


def _second_of(first: Line, both: Line) -> Line:
    """The line of backward per FLOP of backward (twice those of forward), from forward and both together."""
    return Line(max(both.alpha - first.alpha, 0.0), max(both.beta - first.beta, 0.0) / 2, both.r2)


def _with_the_rest(
    model: CostModel,
    layer: MoELayer,
    shape: LayerShape,
    ctx: ParallelContext,
    timed: Callable[[Callable[[], object]], float],
) -> CostModel:
    """The model with what whole passes take beyond it: the gate, dispatch and combine, and the program itself."""
    multiple = 2 * ctx.tp.size
    sizes = [max(shape.num_tokens // part // multiple, 1) * multiple for part in (4, 2, 1)]
    shapes = [replace(shape, num_tokens=size) for size in sizes]
    missing = [
        timed(partial(Pass(layer, like.num_tokens, ctx).run, "s1h", 1)) - predict("s1h", 1, like, model)
        for like in shapes
    ]
    rest = fit([like.token_bytes for like in shapes], missing) if len(set(sizes)) > 1 else Line(missing[-1], 0.0)
    model = replace(model, lines={**model.lines, "rest": Line(max(rest.alpha, 0.0), rest.beta, rest.r2)})
    chunks, last = CHUNK_COUNTS[-1], shapes[-1]
    further = timed(partial(Pass(layer, last.num_tokens, ctx).run, "s1h", chunks)) - predict("s1h", chunks, last, model)
    return replace(model, chunk_ms=max(further / (chunks - 1), 0.0))


def _collective(name: str, axis: Axis, device: torch.device) -> Callable[[int], object]:
    """An action on a buffer of the given bytes, as the schedules count them."""

    def run(size_bytes: int) -> object:
        rows = max(size_bytes // 4 // axis.size, 1)
        if name == "all_gather":
            return transport.gather_stack(torch.zeros(rows, device=device), axis)
        stack = torch.zeros(axis.size, rows, device=device)
        if name == "all_to_all":
            return transport.exchange(stack, axis)
        if name == "reduce_scatter":
            return transport.scatter_sum(stack, axis)
        return transport.sum_over(stack, axis)

    return run


def _overlaps(
    ctx: ParallelContext, experts: Callable[[], object], timed: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    """The share of the shorter of two that is hidden when both run: (two links, a link and the processor)."""
    exchange = torch.zeros(ctx.ep.size, SIZES_BYTES[-1] // 4 // ctx.ep.size, device=ctx.device)
    gather = torch.zeros(SIZES_BYTES[-1] // 4 // ctx.esp.size, device=ctx.device)
    alone = timed(lambda: transport.exchange(exchange, ctx.ep))

    def both_links() -> None:
        flights = [transport.start_exchange(exchange, ctx.ep), transport.start_gather_stack(gather, ctx.esp)]
        for flight in flights:
            flight.land()

    def link_and_processor() -> None:
        flight = transport.start_exchange(exchange, ctx.ep)
        experts()
        flight.land()

    gather_alone = timed(lambda: transport.gather_stack(gather, ctx.esp))
    experts_alone = timed(experts)

    def hidden(first: float, second: float, together: float) -> float:
        return min(max((first + second - together) / max(min(first, second), 1e-6), 0.0), 1.0)

    return hidden(alone, gather_alone, timed(both_links)), hidden(alone, experts_alone, timed(link_and_processor))


def _crossing(ctx: ParallelContext) -> list[str]:
    """The axes whose groups, somewhere in the world, span nodes."""
    nodes = transport.gather_text(ctx.node, ctx.world)
    tables = {name: ctx.grid.groups(name) for name in AXES if name in GRID_AXES} | cut_by_nodes(ctx.grid, nodes)
    return [name for name, table in tables.items() if any(len({nodes[rank] for rank in group}) > 1 for group in table)]


def cluster_key(ctx: ParallelContext) -> str:
    """What a measured model is good for: the nodes' sizes, the device and the layout. Call on all ranks."""
    nodes = transport.gather_text(ctx.node, ctx.world)
    sizes = sorted(nodes.count(node) for node in set(nodes))
    layout = f"tp{ctx.tp.size}-ep{ctx.ep.size}-esp{ctx.esp.size}"
    return f"{ctx.device.type}:{'+'.join(map(str, sizes))}:{layout}"


def to_json(model: CostModel) -> dict[str, Any]:
    """The model as JSON values."""
    lines = {name: [line.alpha, line.beta, line.r2] for name, line in model.lines.items()}
    return {
        "source": model.source,
        "lines_ms": lines,
        "crossing": sorted(model.crossing),
        "links_hidden": model.links_hidden,
        "processor_hidden": model.processor_hidden,
        "chunk_ms": model.chunk_ms,
    }


def from_json(values: Any) -> CostModel:
    """The model that `to_json` gave. Raises DataError for anything else."""
    try:
        lines = {str(name): Line(*map(float, line)) for name, line in values["lines_ms"].items()}
        numbers = {name: float(values[name]) for name in ("links_hidden", "processor_hidden", "chunk_ms")}
        crossing = frozenset(values["crossing"])
        model = CostModel(str(values["source"]), lines, crossing, **numbers)
        _check(model)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the cost model is damaged ({type(error).__name__}: {error}); delete the file of --moe-cost-model to "
            "measure anew"
        ) from None
    return model


def _check(model: CostModel) -> None:
    """Raises ValueError or KeyError for what no prediction can be made from."""
    for collective, axis in (*COLLECTIVES, ("experts", "")):
        model.line(collective, axis)
    numbers = [number for line in model.lines.values() for number in (line.alpha, line.beta)]
    numbers += [model.links_hidden, model.processor_hidden, model.chunk_ms]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError("a time is below zero or not a number")
    if not model.crossing <= set(AXES):
        raise ValueError(f"crossing names other axes than {', '.join(AXES)}")


def read_models(path: Path) -> dict[str, CostModel]:
    """The models of a file by cluster key; none if there is no file. Raises DataError."""
    try:
        if not path.exists():
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"--moe-cost-model {path} cannot be read: {error}; delete it to measure anew") from None
    if not isinstance(found, dict):
        raise DataError(f"--moe-cost-model {path} holds no table of cost models; delete it to measure anew")
    return {key: from_json(values) for key, values in found.items()}


def keep_model(path: Path, key: str, model: CostModel) -> None:
    """Add a model to a file, in one rename. Raises DataError where it cannot be written."""
    models = {**read_models(path), key: replace(model, source=f"{model.source} ({path.name})")}
    draft = path.with_name(path.name + ".tmp")
    text = json.dumps({name: to_json(kept) for name, kept in models.items()}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise DataError(f"--moe-cost-model {path} cannot be written: {error}; name a file that can be") from None
