#!/usr/bin/env python3
"""Print what every schedule of an MoE layer is predicted to cost, for any layout and shape, without any process.

    python tools/explain_schedule.py --tp 4 --ep 8 --esp 4 --seq-length 2048 --micro-batch-size 1 --hidden-size 4096 \\
        --ffn-hidden-size 14336 --num-experts 8 --topk 2 --capacity-factor 1.25 --moe-cost-model cluster.json

The speeds come from a file that `tools/calibrate.py` wrote, or are constants published for a GPU cluster.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import ConfigError, MegatronParmError
from megatron_parm.moe.calibrate import read_models
from megatron_parm.moe.choose import choose, predictions, unable
from megatron_parm.moe.cost import PUBLISHED, CostModel, LayerShape, plan
from megatron_parm.moe.schedules import SCHEDULES


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (
        ("tp", "ranks that share each dense layer"),
        ("ep", "ranks over which the experts are spread"),
        ("esp", "ranks that share each expert"),
        ("micro-batch-size", "samples of a micro-batch"),
    ):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"{text} (default: 1)")
    for name, text in (
        ("seq-length", "tokens of a sample"),
        ("hidden-size", "width of the residual stream"),
        ("ffn-hidden-size", "width of one expert"),
        ("num-experts", "experts of the layer"),
    ):
        parser.add_argument(f"--{name}", type=int, required=True, help=text)
    parser.add_argument("--topk", type=int, default=2, help="experts a token is sent to (default: 2)")
    parser.add_argument("--capacity-factor", type=float, default=None, help="default: none, nothing is dropped")
    parser.add_argument("--swiglu", action="store_true", help="gated experts: three products")
    parser.add_argument("--bytes-per-element", type=int, default=2, help="2 for bf16, 4 for fp32 (default: 2)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4], help="default: 1 2 4")
    parser.add_argument("--moe-cost-model", type=Path, help="file of tools/calibrate.py (default: published constants)")
    parser.add_argument("--cluster", help="which entry of the file, where it has several")
    return parser.parse_args(argv)


def shape_of(flags: argparse.Namespace) -> LayerShape:
    """The layer that the flags describe."""
    return LayerShape(
        num_tokens=flags.seq_length * flags.micro_batch_size,
        hidden_size=flags.hidden_size,
        ffn_hidden_size=flags.ffn_hidden_size,
        num_experts=flags.num_experts,
        topk=flags.topk,
        capacity_factor=flags.capacity_factor,
        min_capacity=1,
        has_slots=flags.capacity_factor is not None,
        pads=False,
        matrices=3 if flags.swiglu else 2,
        bytes_per_element=flags.bytes_per_element,
        tp=flags.tp,
        ep=flags.ep,
        esp=flags.esp,
    )


def model_of(flags: argparse.Namespace) -> CostModel:
    """The cost model that the flags name. Raises ConfigError where that is not one."""
    if flags.moe_cost_model is None:
        if flags.cluster is not None:
            raise ConfigError(f"--cluster {flags.cluster} names an entry of a file; give --moe-cost-model too")
        return PUBLISHED
    models = read_models(flags.moe_cost_model)
    if not models:
        raise ConfigError(f"--moe-cost-model {flags.moe_cost_model} has no entry; write one with tools/calibrate.py")
    if flags.cluster is None and len(models) == 1:
        return next(iter(models.values()))
    if flags.cluster not in models:
        raise ConfigError(f"--moe-cost-model {flags.moe_cost_model} has {', '.join(models)}; name one with --cluster")
    return models[flags.cluster]


def table(shape: LayerShape, model: CostModel, chunk_counts: Sequence[int]) -> list[str]:
    """The lines of the table: milliseconds by schedule and chunks, bytes of a rank's buffers in one pass."""
    times = predictions(shape, model, tuple(chunk_counts))
    lines = [
        f"{'schedule':12}" + "".join(f"{f'{chunks} chunks':>12}" for chunks in chunk_counts) + "  MB moved in a pass"
    ]
    for name in SCHEDULES:
        why = unable(name, shape)
        if why is not None:
            lines.append(f"{name:12}  {why}")
            continue
        stages = plan(name, shape)
        moved = [stage for stage in (*stages.once, *stages.chunked) if stage.operation != "experts"]
        shown = ", ".join(f"{stage.operation}/{stage.axis} {stage.amount / 1e6:.2f}" for stage in moved)
        lines.append(f"{name:12}" + "".join(f"{times[name, chunks]:12.3f}" for chunks in chunk_counts) + f"  {shown}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the choice; returns the exit code."""
    flags = parse(argv)
    try:
        shape, model = shape_of(flags), model_of(flags)
        shape.check()
        if min(flags.chunks) < 1 or flags.bytes_per_element < 1:
            raise ConfigError("--chunks and --bytes-per-element must be at least 1")
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"milliseconds predicted for forward and backward of one layer; {model.source}")
    print("\n".join(table(shape, model, flags.chunks)))
    choice = choose(shape, model)
    print(f"auto: {choice.schedule} in {choice.chunks} chunk{'s' if choice.chunks > 1 else ''}, {choice.reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
