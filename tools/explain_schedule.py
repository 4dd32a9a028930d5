#!/usr/bin/env python3
"""Print what every schedule of an MoE layer is predicted to cost, for any layout and shape, without any process.

    python tools/explain_schedule.py --tp 4 --ep 8 --esp 4 --seq-length 2048 --micro-batch-size 1 --hidden-size 4096 \\
        --ffn-hidden-size 14336 --num-experts 8 --topk 2 --capacity-factor 1.25 --moe-cost-model cluster.json

    python tools/explain_schedule.py --advise --ranks 1024 --memory-gb 80 --num-layers 24 --seq-length 2048 \\
        --hidden-size 4096 --ffn-hidden-size 14336 --num-experts 64 --capacity-factor 1.25

--advise searches tp, ep, esp and dp for a number of ranks and prints the ten best with the reason, which schedule each
would run, and what a rank needs of memory. The speeds come from a file that `tools/calibrate.py` wrote, or are
constants published for a GPU cluster.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import ConfigError, MegatronParmError
from megatron_parm.moe.advise import ModelPlan, advise, has_links, reasons
from megatron_parm.moe.calibrate import read_models
from megatron_parm.moe.choose import candidate_name, choose, predictions, unable
from megatron_parm.moe.cost import PUBLISHED, CostModel, LayerShape, plan
from megatron_parm.moe.schedules import SCHEDULES

NUM_ADVISED = 10


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
    advice = parser.add_argument_group("advice on the layout")
    advice.add_argument("--advise", action="store_true", help="search tp, ep, esp and dp instead of taking them")
    advice.add_argument("--ranks", type=int, help="ranks of the run")
    advice.add_argument("--memory-gb", type=float, help="memory of a rank, in 10^9 bytes")
    advice.add_argument("--ranks-per-node", type=int, default=8, help="default: 8")
    advice.add_argument("--num-layers", type=int, default=24, help="layers of the model (default: 24)")
    advice.add_argument("--num-moe-layers", type=int, help="how many of them have experts (default: all)")
    advice.add_argument("--num-attention-heads", type=int, default=0, help="tp must divide it (default: free)")
    advice.add_argument("--vocab-size", type=int, default=50304, help="default: 50304")
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


def plan_of(flags: argparse.Namespace, shape: LayerShape) -> ModelPlan:
    """The model and the cluster that the flags describe. Raises ConfigError."""
    if flags.ranks is None or flags.memory_gb is None:
        raise ConfigError("--advise needs --ranks and --memory-gb")
    moe_layers = flags.num_layers if flags.num_moe_layers is None else flags.num_moe_layers
    for name, value, least in (
        ("ranks", flags.ranks, 1),
        ("ranks-per-node", flags.ranks_per_node, 1),
        ("num-layers", flags.num_layers, 1),
        ("num-moe-layers", moe_layers, 1),
        ("vocab-size", flags.vocab_size, 1),
    ):
        if value < least:
            raise ConfigError(f"--{name} {value} must be at least {least}")
    if moe_layers > flags.num_layers:
        raise ConfigError(f"--num-moe-layers {moe_layers} must not exceed --num-layers {flags.num_layers}")
    return ModelPlan(
        layer=shape,
        num_layers=flags.num_layers,
        num_moe_layers=moe_layers,
        vocab_size=flags.vocab_size,
        num_heads=flags.num_attention_heads,
        samples=flags.micro_batch_size,
        ranks=flags.ranks,
        ranks_per_node=flags.ranks_per_node,
        memory_gb=flags.memory_gb,
    )


def advice_lines(plan: ModelPlan, model: CostModel) -> list[str]:
    """The ten best layouts, why, and what the figures rest on. Raises ConfigError if nothing fits."""
    found = advise(plan, model)
    lines = [
        f"{len(found)} layouts of {plan.ranks} ranks ({plan.ranks_per_node} a node) fit {plan.memory_gb:g} GB; "
        f"milliseconds of forward and backward, {model.source}",
        f"{'tp':>3} {'ep':>4} {'esp':>4} {'dp':>5} {'edp':>5} {'schedule':12} {'GB':>7} {'MoE layers':>11} "
        f"{'the rest':>9} {'a sample':>9}",
    ]
    for one in found[:NUM_ADVISED]:
        name = candidate_name(one.choice.schedule, one.choice.chunks)
        lines.append(
            f"{one.tp:3} {one.ep:4} {one.esp:4} {one.dp:5} {one.edp:5} {name:12} {one.memory_gb:7.1f} "
            f"{one.moe_ms:11.2f} {one.dense_ms:9.2f} {one.sample_ms:9.4f}"
        )
    lines += [f"  {line}" for line in reasons(found, plan)]
    inside, between = has_links(model)
    if not inside or not between:
        lines.append(
            f"  assumed: the cost model was measured {'between nodes' if between else 'inside one node'} only; links "
            f"{'inside a node' if between else 'between nodes'} are taken to be as fast"
        )
    lines.append(
        "  assumed: an axis inside a node has the AllGather's speed there, one across nodes the AlltoAll's, in groups "
        "of any size; gradients are reduced behind backward; every activation is kept"
    )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and the choice; returns the exit code."""
    flags = parse(argv)
    try:
        shape, model = shape_of(flags), model_of(flags)
        shape.check()
        if min(flags.chunks) < 1 or flags.bytes_per_element < 1:
            raise ConfigError("--chunks and --bytes-per-element must be at least 1")
        if flags.advise:
            print("\n".join(advice_lines(plan_of(flags, shape), model)))
            return 0
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
