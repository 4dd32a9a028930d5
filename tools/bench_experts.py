#!/usr/bin/env python3
"""Compares an MoE layer on one process with a loop over its experts, in one run. Floor 8.

    python tools/bench_experts.py --num-experts 8 --tokens 1024 --hidden 256 --ffn 512

The loop is what a plain implementation does: for each expert gather its tokens, two products, weigh, add into the
result; router, weights and precision are those of our layer, and both give the same output and gradients, which is
checked first. Passes, forward and backward, take turns, so that a busy machine slows both; prints the median of each,
the ratio (above 1: ours is faster), and the same for the experts' products alone, which nothing can save.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.config.checks import NEED_SLOTS
from megatron_parm.moe.cost import LayerShape
from megatron_parm.moe.layer import MoELayer
from megatron_parm.moe.probe import build_probe
from megatron_parm.moe.schedules import SCHEDULES
from megatron_parm.parallel.context import ParallelContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}  # relative to the largest entry: other orders of sums


def loop_over_experts(layer: MoELayer, topk: int, x: Tensor) -> Tensor:
    """[n, 1, h] -> [n, 1, h] by the weights of `layer`, one expert after another; no balance loss."""
    tokens = x.reshape(-1, x.shape[-1])  # [n, h]
    logits = tokens.float() @ layer.router.weight.float().t()  # [n, E]
    top, expert = logits.topk(topk, dim=1)
    weights = F.softmax(top, dim=1) if topk > 1 else F.softmax(logits, dim=1).gather(1, expert)
    weights = weights.to(tokens.dtype)  # [n, k]
    output = torch.zeros_like(tokens)
    for number, (first, second) in enumerate(zip(layer.experts.weight1, layer.experts.weight2, strict=True)):
        place, choice = torch.where(expert == number)
        made = F.linear(F.gelu(F.linear(tokens[place], first), approximate="none"), second)  # [n of it, h]
        output = output.index_add(0, place, made * weights[place, choice, None])
    return output.view_as(x)


def products_alone(layer: MoELayer, topk: int, x: Tensor) -> Tensor:
    """The products of both weights with as many rows as there are choices, evenly spread: no routing at all."""
    experts = layer.experts
    rows = x.reshape(-1, x.shape[-1]).repeat(topk, 1).chunk(experts.weight1.shape[0])
    made = [
        F.linear(F.gelu(F.linear(part, first)), second)
        for part, first, second in zip(rows, experts.weight1, experts.weight2, strict=True)
    ]
    return torch.cat(made).view(topk, *x.shape).sum(0)


def gradients_of(run: Callable[[Tensor], Tensor], layer: MoELayer, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, gradient of the input, and those of the weights."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    output = run(x)
    output.backward(gradient)  # type: ignore[no-untyped-call]  # torch's
    found = [output.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [value.clone() for value in found if value is not None]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("num-experts", 8, "experts"),
        ("topk", 2, "experts of a token"),
        ("tokens", 1024, "tokens of a pass"),
        ("hidden", 256, "width of the residual stream"),
        ("ffn", 512, "width of an expert"),
        ("iters", 10, "timed passes of each"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    dropless = [name for name in SCHEDULES if name not in NEED_SLOTS]
    parser.add_argument("--schedule", choices=dropless, default="s1", help="of our layer (default s1)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="default fp32")
    parser.add_argument("--profile", action="store_true", help="print where the time of a pass of each goes")
    flags = parser.parse_args(argv)
    for name in ("num_experts", "topk", "tokens", "hidden", "ffn", "iters"):
        if getattr(flags, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(flags, name)} must be at least 1")
    if flags.topk > flags.num_experts:
        parser.error(f"--topk {flags.topk} must not be above --num-experts {flags.num_experts}")
    return flags


def compare(flags: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of a pass of each. Raises ValueError if the two layers do not agree."""
    ctx = ParallelContext.single()
    dtype = DTYPES[flags.dtype]
    shape = LayerShape(
        num_tokens=flags.tokens, hidden_size=flags.hidden, ffn_hidden_size=flags.ffn, num_experts=flags.num_experts,
        topk=flags.topk, capacity_factor=None, min_capacity=1, has_slots=False, pads=False, matrices=2,
        bytes_per_element=dtype.itemsize, tp=1, ep=1, esp=1,
    )  # fmt: skip
    layer = build_probe(shape, ctx, dtype, balance_coefficient=0.0)  # the loop has no balance loss
    layer.schedule = flags.schedule
    generator = torch.Generator().manual_seed(1)
    size = (flags.tokens, 1, flags.hidden)
    x, gradient = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))

    def ours(value: Tensor) -> Tensor:
        output: Tensor = layer(value)
        layer.router.record.clear()
        return output

    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": ours,
        "loop over experts": lambda value: loop_over_experts(layer, flags.topk, value),
        "products alone": lambda value: products_alone(layer, flags.topk, value),
    }
    pairs = zip(*(gradients_of(ways[name], layer, x, gradient) for name in ("ours", "loop over experts")), strict=True)
    for mine, theirs in pairs:
        difference = ((mine - theirs).abs().max() / theirs.abs().max()).item()
        if not difference <= TOLERANCE[flags.dtype]:
            raise ValueError(f"the layer and the loop over experts differ by {difference:.1e}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for iteration in range(2 + flags.iters):
        for name, run in ways.items():
            start = time.perf_counter()
            layer.zero_grad(set_to_none=False)
            run(x.detach().requires_grad_()).backward(gradient)  # type: ignore[no-untyped-call]  # torch's
            if iteration >= 2:
                times[name].append(1e3 * (time.perf_counter() - start))
    if flags.profile:
        for name, run in ways.items():
            with torch.profiler.profile() as recorded:
                run(x.detach().requires_grad_()).backward(gradient)  # type: ignore[no-untyped-call]  # torch's
            print(f"{name}\n{recorded.key_averages().table(sort_by='self_cpu_time_total', row_limit=16)}")
    return {name: median(taken) for name, taken in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the times and their ratios."""
    flags = parse(argv)
    found = compare(flags)
    for name, milliseconds in found.items():
        print(f"{name:>18}: {milliseconds:8.2f} ms a pass, {milliseconds / found['ours']:.2f}x of ours")
    return 0


if __name__ == "__main__":
    sys.exit(main())
