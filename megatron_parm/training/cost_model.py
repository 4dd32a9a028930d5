"""Where `--moe-schedule auto` gets its cost model from: a file, a measurement, or published constants. Floor 7."""

import json
from pathlib import Path

from megatron_parm.config.run import RunConfig
from megatron_parm.models.build import DTYPES, layer_shape
from megatron_parm.moe.calibrate import cluster_key, from_json, keep_model, measure, read_models, to_json
from megatron_parm.moe.cost import PUBLISHED, CostModel
from megatron_parm.observe.log import Log
from megatron_parm.observe.timers import device_synchroniser
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.transport import broadcast_text

POOR_R2 = 0.9  # of a fit; a line over times that only scatter has about 0


def cost_model_for(config: RunConfig, ctx: ParallelContext, log: Log) -> CostModel:
    """The cost model of this run. Call on all ranks; all get the same one.

    The model of this cluster and layout in the file of `--moe-cost-model`, measured and added if the file lacks it; the
    published constants without the flag, or where nothing is to be chosen.
    """
    moe = config.moe
    if moe is None or moe.moe_cost_model is None or ctx.world.size == 1:
        return PUBLISHED
    if moe.moe_schedule != "auto" and moe.pipeline_chunks is not None:
        return PUBLISHED
    path, key = Path(moe.moe_cost_model), cluster_key(ctx)

    def look_up() -> str:
        kept = read_models(path).get(key) if ctx.rank == 0 else None
        return "" if kept is None else json.dumps(to_json(kept))

    found = broadcast_text(on_all_ranks(ctx.world, look_up), ctx.world)
    if found:
        return from_json(json.loads(found))
    log.say(f" > {path} has no cost model for {key}: measuring")
    dtype = DTYPES[config.training.precision]
    model = measure(layer_shape(config, ctx), ctx, dtype, device_synchroniser(ctx.device))
    on_all_ranks(ctx.world, lambda: keep_model(path, key, model) if ctx.rank == 0 else None)
    for name, line in model.lines.items():
        log.say(f" >   {name}: {line.alpha:.3f} ms + {line.beta * 1e6:.3g} ms per million, r2 {line.r2:.4f}")
    poor = [f"{name} (r2 {line.r2:.2f})" for name, line in model.lines.items() if line.r2 < POOR_R2]
    if poor:
        log.warn(
            f"--moe-cost-model {path}: the measured times of {', '.join(poor)} do not lie on a line (r2 below "
            f"{POOR_R2:g}), so predictions are rough; delete {key} there to measure on a quieter machine, or "
            "let --moe-schedule-check try the candidates"
        )
    return model
