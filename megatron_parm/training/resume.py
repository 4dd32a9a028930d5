"""What a checkpoint of a run holds, and how a run goes on from one. Floor 7.

Tensors: `model.<name>`, `optimizer.<state>.<name>`; per rank: the random streams. JSON state: progress, schedules, the
optimizer's scalars, the MoE schedule with the layout it was chosen for, and the configuration.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_parm import __version__
from megatron_parm.checkpoint.find import find_checkpoint, has_checkpoint
from megatron_parm.checkpoint.load import has_same_layout, load_rank_tensors, load_tensors, read_state
from megatron_parm.checkpoint.save import SaveUnderway, begin_save
from megatron_parm.checkpoint.verify import VerifiedCheckpoint
from megatron_parm.checkpoint.whole_model import WholeModel
from megatron_parm.config.checkpoint import CheckpointConfig
from megatron_parm.config.run import RunConfig, to_dict
from megatron_parm.errors import CheckpointError, ConfigError
from megatron_parm.models.build import BuiltModel, layer_shape
from megatron_parm.models.classifier import HEAD
from megatron_parm.observe.log import Log
from megatron_parm.optim.schedule import RateSchedule, reconcile
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import ShardSpec, saved_tensors, spec_of
from megatron_parm.training.assemble import Assembly, named_layout
from megatron_parm.training.foreign import fill_from_foreign, foreign_state, open_foreign
from megatron_parm.training.progress_state import RunProgress
from megatron_parm.training.same_model import EXPERT_SETTINGS, HEAD_SETTINGS, check_same_model
from megatron_parm.training.schedule_check import ScheduleCheck, plan_check
from megatron_parm.training.upcycle import plan_upcycling

OPTIMIZER, MODEL = "optimizer.", "model."
REUSED = "as in the checkpoint: "
NamedTensors = dict[str, tuple[Tensor, ShardSpec]]
PRETRAINING_HEADS = ("lm_head.", "output_layer.", "binary_head.")  # of a pretrained BERT: no classifier has them
VOCABULARY_TENSORS = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class SavedRun:
    """A verified checkpoint with its JSON state. `weights_only`: a new run begins from its weights, at iteration 0."""

    checkpoint: VerifiedCheckpoint
    state: dict[str, Any]
    foreign: WholeModel | None = None  # of a folder of Hugging Face: weights only
    weights_only: bool = False
    upcycles: bool = False  # from a dense model to one with experts; weights only, too

    @property
    def vocab_size(self) -> int | None:
        """The number of tokens that the model knew."""
        found = self.state.get("vocab_size")
        return found if type(found) is int else None

    @property
    def begins_anew(self) -> bool:
        """Whether nothing but weights is taken."""
        return self.weights_only or self.upcycles

    @property
    def progress(self) -> RunProgress:
        """How far the run had come. Raises CheckpointError."""
        return RunProgress.from_state(_section(self.state, "progress"))


def model_tensors(built: BuiltModel) -> NamedTensors:
    """The weights by their checkpoint names."""
    return {MODEL + name: (t.detach(), spec_of(t)) for name, t in saved_tensors(built.model).items()}


def optimizer_tensors(run: Assembly) -> NamedTensors:
    """The optimizer's state by its checkpoint names."""
    return {
        f"{OPTIMIZER}{state}.{name}": (tensor.detach(), run.optimizer.masters.spec(name))
        for state, tensors in run.optimizer.state_tensors().items()
        for name, tensor in tensors.items()
    }


def begin_saving(run: Assembly, progress: RunProgress, root: Path) -> SaveUnderway:
    """Begin to save the run as it stands after `progress.iteration`. Call on all ranks."""
    checkpoint = run.config.checkpoint
    run.optimizer.settle()
    tensors = model_tensors(run.built)
    state: dict[str, Any] = {
        "version": __version__,
        "config": to_dict(run.config),
        "progress": progress.to_state(),
        "schedule": run.schedule.to_state(),
        "vocab_size": run.built.model.shape.vocab_size,
    }
    if not checkpoint.no_save_optim:
        tensors |= optimizer_tensors(run)
        state["optimizer"] = run.optimizer.state_scalars()
        if run.config.training.precision == "fp16":
            state["loss_scale"] = run.loss_scale.to_state()
    if run.built.choice is not None:
        choice = run.built.choice
        chosen_for = _chosen_for(run.config, run.ctx)
        state["moe_schedule"] = {
            "name": choice.schedule,
            "chunks": choice.chunks,
            "reason": choice.reason,
            "chosen_for": chosen_for,
        }
        if run.schedule_check is not None:
            state["moe_schedule"]["check"] = run.schedule_check.to_state()
    random_states = {} if checkpoint.no_save_rng else run.random_states.state_dict()
    return begin_save(root, progress.iteration, tensors, random_states, state, run.ctx)


def open_checkpoint(config: RunConfig, ctx: ParallelContext, log: Log) -> SavedRun | None:
    """The checkpoint that `--load` or, in a first start, `--pretrained-checkpoint` means; None for a fresh start.

    Call on all ranks. Raises ConfigError if there is none, unless `--load` equals `--save` and holds nothing yet;
    CheckpointError if it is of another model, or damaged.
    """
    checkpoint = config.checkpoint
    if checkpoint.load is not None and not has_checkpoint(Path(checkpoint.load), ctx):
        foreign = open_foreign(Path(checkpoint.load), ctx)
        if foreign is not None:
            return _foreign_run(config, *foreign, log)
    loads = _has_checkpoint_to_load(checkpoint, ctx, log)
    if not loads and checkpoint.pretrained_checkpoint is None:
        return None
    weights_only = checkpoint.finetune or not loads
    root = Path(str(checkpoint.load if loads else checkpoint.pretrained_checkpoint))
    if not loads and not has_checkpoint(root, ctx):
        foreign = open_foreign(root, ctx)
        if foreign is not None:
            return _foreign_run(config, *foreign, log)
        raise ConfigError(f"--pretrained-checkpoint {root}: there is no checkpoint in this folder; correct the path")
    step = checkpoint.ckpt_step if loads else None
    found = find_checkpoint(root, ctx, ckpt_step=step, resume=checkpoint.resume, verify=checkpoint.verify_checkpoint)
    for warning in found.warnings:
        log.warn(warning)
    state = read_state(found, ctx)
    settings = _section(state, "config")
    has_experts = bool(settings.get("num_experts"))
    is_restart = loads and checkpoint.pretrained_checkpoint is not None  # the dense model was taken in the first start
    if config.upcycles and has_experts and not is_restart:
        raise CheckpointError(
            f"--moe-use-upcycling: {found.path} has experts already (--num-experts {settings['num_experts']}); leave "
            "the flag out to go on from it, or name the dense model by --pretrained-checkpoint, which a restart ignores"
        )
    saved = SavedRun(found, state, weights_only=weights_only, upcycles=config.upcycles and not has_experts)
    starts_head = _starts_head(config, saved)
    check_same_model(
        config,
        settings,
        data_order=not saved.begins_anew,
        left_out=(*(EXPERT_SETTINGS if saved.upcycles else ()), *(HEAD_SETTINGS if starts_head else ())),
    )
    return saved


def _foreign_run(config: RunConfig, checkpoint: VerifiedCheckpoint, model: WholeModel, log: Log) -> SavedRun:
    for warning in checkpoint.warnings:
        log.warn(warning)
    state = foreign_state(model, config)
    left_out = (*(EXPERT_SETTINGS if config.upcycles else ()), *(HEAD_SETTINGS if config.classify is not None else ()))
    check_same_model(config, state["config"], data_order=False, left_out=left_out)
    return SavedRun(checkpoint, state, model, weights_only=True, upcycles=config.upcycles)


def _starts_head(config: RunConfig, saved: SavedRun) -> bool:
    """Whether a classifier takes a pretrained BERT: its own head is new, and those of the BERT are left behind."""
    has_head = any(name.startswith(MODEL + HEAD) for name in saved.checkpoint.manifest.tensors)
    return config.classify is not None and saved.weights_only and not has_head


def _has_checkpoint_to_load(checkpoint: CheckpointConfig, ctx: ParallelContext, log: Log) -> bool:
    """Whether `--load` names a checkpoint. Raises ConfigError where it should and does not."""
    if checkpoint.load is None:
        return False
    root = Path(checkpoint.load)
    if has_checkpoint(root, ctx):
        return True
    is_restart_line = checkpoint.save is not None and root.resolve() == Path(checkpoint.save).resolve()
    if is_restart_line and not checkpoint.exit_on_missing_checkpoint:
        log.say(f" > no checkpoint in {root} yet: starting afresh")
        return False
    raise ConfigError(
        f"--load {root}: there is no checkpoint in this folder; correct the path, leave --load out to start "
        "afresh, or give the same folder to --save and --load for a run that resumes from its own checkpoints"
    )


def vocabulary_rows(checkpoint: VerifiedCheckpoint) -> int | None:
    """The padded vocabulary of a checkpoint; None if it has no embedding."""
    entry = checkpoint.manifest.tensors.get(MODEL + VOCABULARY_TENSORS[0])
    return entry.shape[0] if entry is not None else None


def load_run(run: Assembly, saved: SavedRun) -> tuple[RunProgress, RateSchedule]:
    """Fill the run from `saved`; returns where it goes on and by which schedule. Call on all ranks."""
    settings, checkpoint, state = run.config.checkpoint, saved.checkpoint, saved.state
    if saved.foreign is not None:
        return _load_foreign(run, saved, saved.foreign), run.schedule
    check_vocabulary(run.built.model.shape.vocab_size, run.config.data.tokenizer_type, state)
    tensors = model_tensors(run.built)
    if saved.upcycles:
        return _upcycle(run, checkpoint), run.schedule
    if _starts_head(run.config, saved):
        return _start_head(run, checkpoint), run.schedule
    takes_optimizer = not (settings.no_load_optim or saved.weights_only)
    if takes_optimizer:
        _check_optimizer(run, saved)
        tensors |= optimizer_tensors(run)
    load_named(checkpoint, tensors, run.ctx, ignored_prefixes=() if takes_optimizer else (OPTIMIZER,))
    if takes_optimizer:
        run.optimizer.load_state_scalars(_section(state, "optimizer"))
        if "loss_scale" in state and run.loss_scale.is_dynamic:
            run.loss_scale.load_state(_section(state, "loss_scale"))
    else:
        run.optimizer.masters.refresh()
    if not (settings.no_load_rng or saved.weights_only):
        _load_random_states(run, checkpoint)
    _reuse_moe_schedule(run, state)
    if saved.weights_only:
        return RunProgress(), run.schedule
    progress = saved.progress
    if progress.iteration >= run.config.train_iterations:  # nothing left to do: no rate is needed any more
        return progress, run.schedule
    return progress, _schedule(run, state)


def _load_foreign(run: Assembly, saved: SavedRun, model: WholeModel) -> RunProgress:
    plan = plan_upcycling(run.built) if saved.upcycles else None
    tensors = model_tensors(run.built) if plan is None else plan.whole | plan.parts
    fill_from_foreign(model, tensors, run.built.model.shape.vocab_size, run.ctx)
    if plan is not None:
        plan.spread()
    run.optimizer.masters.refresh()
    if run.config.classify is not None:
        run.log.say(f" > the encoder is that of {saved.checkpoint.path}; the classification head is new")
    return RunProgress()


def _upcycle(run: Assembly, checkpoint: VerifiedCheckpoint) -> RunProgress:
    plan = plan_upcycling(run.built)
    tensors = {MODEL + name: entry for name, entry in (plan.whole | plan.parts).items()}
    load_named(checkpoint, tensors, run.ctx, ignored_prefixes=(OPTIMIZER,))
    plan.spread()
    run.optimizer.masters.refresh()
    run.log.say(f" > upcycled {checkpoint.path}: every expert is a copy of its layer's feed-forward")
    return RunProgress()


def _start_head(run: Assembly, checkpoint: VerifiedCheckpoint) -> RunProgress:
    tensors = {name: entry for name, entry in model_tensors(run.built).items() if not name.startswith(MODEL + HEAD)}
    left_behind = tuple(MODEL + name for name in PRETRAINING_HEADS)
    load_named(checkpoint, tensors, run.ctx, ignored_prefixes=(OPTIMIZER, *left_behind))
    run.optimizer.masters.refresh()
    run.log.say(f" > the encoder is that of {checkpoint.path}; the classification head is new")
    return RunProgress()


def load_named(
    checkpoint: VerifiedCheckpoint,
    tensors: NamedTensors,
    ctx: ParallelContext,
    *,
    ignored_prefixes: tuple[str, ...] = (),
) -> None:
    """Fill `tensors` from a checkpoint of any layout, also one that padded the vocabulary to another size.

    Rows of padding that the checkpoint lacks keep their initial zeros. Call on all ranks.
    """
    padded = [name for name in tensors if name.endswith(VOCABULARY_TENSORS)]
    load_tensors(checkpoint, tensors, ctx, ignored_prefixes=ignored_prefixes, padded=padded)


def check_vocabulary(vocab_size: int, tokenizer_type: str, state: dict[str, Any]) -> None:
    """Raise CheckpointError if the checkpoint with that JSON state was saved with another number of tokens."""
    saved = state.get("vocab_size")
    if saved != vocab_size:
        raise CheckpointError(
            f"the checkpoint is of another vocabulary: {saved} tokens there, {vocab_size} tokens here by "
            f"--tokenizer-type {tokenizer_type} with its files, --vocab-size and --vocab-extra-ids; use those of the "
            "checkpoint, or load another one"
        )


def _check_optimizer(run: Assembly, saved: SavedRun) -> None:
    if "optimizer" not in saved.state:
        raise CheckpointError(
            f"{saved.checkpoint.path} was saved without optimizer state (--no-save-optim); "
            "go on with --no-load-optim, or --finetune"
        )
    kind = _section(saved.state, "optimizer").get("kind")
    if kind != run.optimizer.kind:
        raise CheckpointError(
            f"the checkpoint holds the state of --optimizer {kind}, the run asks for --optimizer {run.optimizer.kind}; "
            f"use --optimizer {kind}, or start with fresh optimizer state by --no-load-optim"
        )


def _schedule(run: Assembly, state: dict[str, Any]) -> RateSchedule:
    optim = run.config.optim
    return reconcile(
        run.schedule,
        _section(state, "schedule"),
        override=optim.override_opt_param_scheduler or run.config.checkpoint.no_load_optim,
        use_checkpoint=optim.use_checkpoint_opt_param_scheduler,
    )


def _load_random_states(run: Assembly, checkpoint: VerifiedCheckpoint) -> None:
    if not has_same_layout(checkpoint, run.ctx):
        run.log.warn("the checkpoint is of another layout, so its random states fit no rank: dropout draws afresh")
        return
    names = tuple(run.random_states.state_dict())
    if not checkpoint.manifest.rank_tensors:
        raise CheckpointError(
            f"{checkpoint.path} was saved without random states (--no-save-rng); go on with --no-load-rng"
        )
    run.random_states.load_state_dict(load_rank_tensors(checkpoint, names, run.ctx))


def _reuse_moe_schedule(run: Assembly, state: dict[str, Any]) -> None:
    """On the same layout and shape: the schedule that auto chose before, and how far a check of it had come, so that a
    resume is bitwise."""
    saved, moe, check = state.get("moe_schedule"), run.config.moe, run.schedule_check
    if moe is None or not isinstance(saved, dict) or saved.get("chosen_for") != _chosen_for(run.config, run.ctx):
        return
    if moe.moe_schedule == "auto":
        reason = str(saved.get("reason")).removeprefix(REUSED)
        run.built.use_schedule(str(saved.get("name")), int(saved.get("chunks", 1)), REUSED + reason)
    if check is None or run.built.choice is None:
        return
    if "check" in saved:
        check.become(ScheduleCheck.from_state(saved["check"]))
    else:
        check.become(plan_check(run.built.choice, layer_shape(run.config, run.ctx), check.rounds))


def _chosen_for(config: RunConfig, ctx: ParallelContext) -> dict[str, Any]:
    settings = to_dict(config)
    names = ("seq_length", "micro_batch_size", "moe_expert_capacity_factor", "moe_eval_capacity_factor", "precision")
    return named_layout(ctx) | {name: settings[name] for name in names}


def _section(state: dict[str, Any], name: str) -> dict[str, Any]:
    section = state.get(name)
    if not isinstance(section, dict):
        raise CheckpointError(f"the checkpoint's state has no section {name!r}; it was not written by this program")
    return section
