#!/usr/bin/env python3
"""Measure the links and the experts of a cluster for `--moe-schedule auto`, and keep them in a file.

    torchrun --nproc-per-node 8 tools/calibrate.py --moe-cost-model cluster.json --hidden-size 1024 --seq-length 2048 \
        --ffn-hidden-size 4096 --num-experts 8 --tensor-model-parallel-size 4 --expert-model-parallel-size 2

Training with the same file then chooses by it. An entry is good for the cluster (nodes and ranks on each), the layout
and layers of about this size.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.moe.calibrate import cluster_key, keep_model, measure, read_models
from megatron_parm.moe.cost import LayerShape
from megatron_parm.observe.timers import device_synchroniser
from megatron_parm.parallel import launch
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.entrance import guarded


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moe-cost-model", type=Path, required=True, help="file to write to; other entries are kept")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1, help="tp (default: 1)")
    parser.add_argument("--expert-model-parallel-size", type=int, default=1, help="ep (default: 1)")
    parser.add_argument("--expert-tensor-parallel-size", type=int, default=None, help="esp (default: tp)")
    parser.add_argument("--hidden-size", type=int, required=True, help="width of the residual stream")
    parser.add_argument("--ffn-hidden-size", type=int, required=True, help="width of one expert")
    parser.add_argument("--num-experts", type=int, required=True, help="experts of a layer")
    parser.add_argument("--seq-length", type=int, required=True, help="tokens of a sample")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples of a micro-batch (default: 1)")
    parser.add_argument("--topk", type=int, default=2, help="experts a token is sent to (default: 2)")
    parser.add_argument("--swiglu", action="store_true", help="gated experts: three products")
    parser.add_argument("--bf16", action="store_true", help="bf16 products (default: fp32)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and keep; returns the exit code."""
    flags = parse(argv)

    def work(environment: LaunchEnvironment) -> None:
        timeout = timedelta(minutes=10)
        device, backend, _ = launch.choose_device("auto", environment)
        store = launch.open_store(environment, timeout)
        launch.check_fingerprint({"flags": str(vars(flags))}, environment, store)
        esp = flags.expert_tensor_parallel_size or flags.tensor_model_parallel_size
        grid = RankGrid(
            environment.world, tp=flags.tensor_model_parallel_size, ep=flags.expert_model_parallel_size, esp=esp
        )
        ctx = launch.start(grid, environment, store, device, backend, timeout)
        dtype = torch.bfloat16 if flags.bf16 else torch.float32
        shape = LayerShape(
            num_tokens=flags.seq_length * flags.micro_batch_size,
            hidden_size=flags.hidden_size,
            ffn_hidden_size=flags.ffn_hidden_size,
            num_experts=flags.num_experts,
            topk=flags.topk,
            capacity_factor=None,
            min_capacity=1,
            has_slots=False,
            pads=False,
            matrices=3 if flags.swiglu else 2,
            bytes_per_element=dtype.itemsize,
            tp=ctx.tp.size,
            ep=ctx.ep.size,
            esp=ctx.esp.size,
        )
        shape.check()
        on_all_ranks(ctx.world, lambda: read_models(flags.moe_cost_model) if ctx.rank == 0 else {})  # before measuring
        key = cluster_key(ctx)
        model = measure(shape, ctx, dtype, device_synchroniser(device))
        on_all_ranks(ctx.world, lambda: keep_model(flags.moe_cost_model, key, model) if ctx.rank == 0 else None)
        if ctx.rank == 0:
            for name, line in model.lines.items():
                print(f"{name:20} {line.alpha:9.3f} ms + {line.beta * 1e6:9.3g} ms per million   r2 {line.r2:.4f}")
            print(
                f"hidden: {model.links_hidden:.0%} of the shorter of two collectives, {model.processor_hidden:.0%} of "
                f"a collective beside the experts; crossing nodes: {', '.join(sorted(model.crossing)) or 'no axis'}\n"
                f"kept in {flags.moe_cost_model} under {key}",
                flush=True,
            )
        launch.shutdown(ctx)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
