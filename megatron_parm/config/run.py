"""A whole run's settings: all sections, the order of their checks, defaults that depend on ranks, text form. Floor 1.

The order in an entrance: parse, `check_run(config, world)`, `resolve(config, world)`, then compare `fingerprint`
between ranks before the first group exists.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_parm.config import checks, checks_activations, checks_pipeline, checks_router
from megatron_parm.config.bert import BertConfig
from megatron_parm.config.checkpoint import CheckpointConfig
from megatron_parm.config.checks_bert import check_bert, check_classify
from megatron_parm.config.checks_checkpoint import check_checkpoint
from megatron_parm.config.checks_data import check_data
from megatron_parm.config.checks_logs import check_logs
from megatron_parm.config.checks_replicas import check_loss_scale, check_replicas
from megatron_parm.config.classify import ClassifyConfig
from megatron_parm.config.data import DataConfig
from megatron_parm.config.fields import Flag, check_fields, flags_of, nearest_names
from megatron_parm.config.logs import LoggingConfig
from megatron_parm.config.loss_scale import LossScaleConfig
from megatron_parm.config.model import ModelConfig
from megatron_parm.config.moe import MoEConfig, RouterDtype
from megatron_parm.config.optim import OptimConfig
from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.ramp import RampUp
from megatron_parm.config.recompute import RecomputeConfig
from megatron_parm.config.replicas import ReplicaConfig
from megatron_parm.config.training import TrainingConfig
from megatron_parm.errors import ConfigError

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "bert": BertConfig,
    "classify": ClassifyConfig,
    "moe": MoEConfig,
    "parallel": ParallelConfig,
    "replicas": ReplicaConfig,
    "data": DataConfig,
    "optim": OptimConfig,
    "training": TrainingConfig,
    "loss_scale": LossScaleConfig,
    "recompute": RecomputeConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a training run is told. `moe` is None for a dense model, `bert` for a GPT, `classify` for all but a
    classifier of texts."""

    model: ModelConfig
    bert: BertConfig | None = None
    classify: ClassifyConfig | None = None
    moe: MoEConfig | None = None
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)
    data: DataConfig
    optim: OptimConfig
    training: TrainingConfig
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """For each layer, whether it is an MoE layer."""
        layers = self.model.num_layers
        return (False,) * layers if self.moe is None else self.moe.layer_pattern(layers)

    @property
    def expert_size(self) -> int:
        """Width of one expert; of the dense feed-forward where there are none."""
        return (self.moe and self.moe.moe_ffn_hidden_size) or self.model.feed_forward_size

    @property
    def esp(self) -> int:
        """Ranks that share each expert; 1 for a dense model."""
        return 1 if self.moe is None else self.parallel.esp

    @property
    def upcycles(self) -> bool:
        """True if the checkpoint to load is of a dense model, whose feed-forward becomes the experts."""
        return self.moe is not None and self.moe.moe_use_upcycling

    @property
    def router_dtype(self) -> RouterDtype:
        """Arithmetic of the router: never less than the model's own, so fp64 in an fp64 run. Only with experts."""
        assert self.moe is not None, "a dense model has no router"
        return "fp64" if self.training.precision == "fp64" else self.moe.moe_router_dtype

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step. Only of a resolved config."""
        size = self.training.global_batch_size
        assert size > 0, "resolve the config first"
        return size

    @property
    def ramp(self) -> RampUp | None:
        """How the global batch grows, if it does. Only of a resolved config. Raises ConfigError."""
        return RampUp.of(self.training.rampup_batch_size, self.global_batch_size)

    @property
    def train_iterations(self) -> int:
        """Optimizer steps of the run; 0 if it has no length (evaluation only). Only of a resolved config."""
        if self.training.train_samples is not None:
            if self.ramp is not None:
                return self.ramp.iterations(self.training.train_samples)
            return self.training.train_samples // self.global_batch_size
        return self.training.train_iters or 0


def check_run(config: RunConfig, world: int) -> None:
    """Check a run that is to start on `world` ranks, before any of it exists. Raises ConfigError or LayoutError."""
    for section in _sections(config):
        check_fields(section)
    moe, model, parallel = config.moe, config.model, config.parallel
    tp = parallel.tensor_model_parallel_size
    checks.check_ranks(parallel, None if moe is None else moe.num_experts, world)
    checks.check_model(model, tp, config.data.seq_length, has_dense_layer=not all(config.moe_layers))
    checks_pipeline.check_stages(parallel, model.num_layers)
    checks_pipeline.check_zero_bubble(parallel, model.num_layers, config.replicas, config.recompute)
    if moe is not None:
        checks.check_experts(moe, model, config.esp)
        checks_router.check_router(moe)
        checks_router.check_shared_expert(moe, tp)
        checks_router.check_upcycling(moe, model, config.checkpoint)
        checks.check_schedule(moe, tp, config.esp, config.data.seq_length * config.training.micro_batch_size)
    checks_activations.check_sequence_parallel(parallel, config.data.seq_length)
    checks_activations.check_recompute(config.recompute)
    batch_sizes, at_once = checks.check_batches(config.training, parallel, world)
    checks_pipeline.check_micro_batches(parallel, model.num_layers, batch_sizes, at_once)
    checks.check_length(config.training, config.optim)
    checks.check_optim(config.optim)
    check_replicas(config.replicas, config.training.precision)
    check_loss_scale(config.loss_scale)
    check_data(config.data)
    check_checkpoint(config.checkpoint)
    if config.bert is not None:
        check_bert(config.model, config.data)
    if config.classify is not None:
        check_classify(config.classify, config.data)
    check_logs(config.logging)


def resolve(config: RunConfig, world: int) -> RunConfig:
    """The config with every default that depends on other settings or on `world` filled in. Call after `check_run`."""
    model, parallel, training, moe = config.model, config.parallel, config.training, config.moe
    dp = world // parallel.tensor_model_parallel_size // parallel.pipeline_model_parallel_size
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, ffn_hidden_size=model.feed_forward_size, kv_channels=model.head_dim),
        moe=None if moe is None else dataclasses.replace(moe, moe_ffn_hidden_size=config.expert_size),
        parallel=dataclasses.replace(
            parallel,
            expert_tensor_parallel_size=config.esp,
            sequence_parallel=parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1,
        ),
        training=dataclasses.replace(
            training, global_batch_size=training.global_batch_size or training.micro_batch_size * dp
        ),
    )


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The config as {field: plain value}, for logs, checkpoints and YAML. What belongs to one rank is left out."""
    found: dict[str, Any] = {}
    for section in _sections(config):
        for flag in flags_of(type(section)):
            if not flag.about.is_per_rank:
                value = getattr(section, flag.field)
                found[flag.field] = list(value) if isinstance(value, tuple) else value
    return found


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """The config that `to_dict` gave. Raises ConfigError for an unknown key or an unsuitable value."""
    flags = {flag.field: flag for section in SECTIONS.values() for flag in flags_of(section)}
    for name in values:
        if name not in flags:
            near = nearest_names(name, [flag.spelling for flag in flags.values()])
            raise ConfigError(f"unknown setting {name}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    sections: dict[type, Any] = {}
    for owner in SECTIONS.values():
        if owner is MoEConfig and not values.get("num_experts"):
            sections[owner] = None
            continue
        if (owner is BertConfig and "bert_layout" not in values) or (
            owner is ClassifyConfig and "class_names" not in values
        ):
            sections[owner] = None
            continue
        mine = {flag.field: _plain(flag, values[flag.field]) for flag in flags_of(owner) if flag.field in values}
        missing = [flag.spelling for flag in flags_of(owner) if flag.is_required and flag.field not in mine]
        if missing:
            raise ConfigError(f"settings without {', '.join(missing)}")
        sections[owner] = owner(**mine)
    return run_from_sections(sections)


def run_from_sections(sections: Mapping[type, Any]) -> RunConfig:
    """Join the sections by class; a GPT has no BertConfig."""
    found: dict[str, Any] = {name: sections.get(owner) for name, owner in SECTIONS.items()}
    return RunConfig(**found)


def fingerprint(config: RunConfig) -> dict[str, str]:
    """Flag -> value as text, of everything in which all ranks must agree. The same keys for every config."""
    values = to_dict(config)
    flags = (flag for section in SECTIONS.values() for flag in flags_of(section))
    return {flag.spelling: str(values.get(flag.field)) for flag in flags if not flag.about.is_per_rank}


def _sections(config: RunConfig) -> list[Any]:
    return [section for name in SECTIONS if (section := getattr(config, name)) is not None]


def _plain(flag: Flag, value: Any) -> Any:
    if isinstance(value, list):
        value = tuple(value)
    if flag.kind is float and type(value) is int:
        value = float(value)
    flag.check(value)
    return value
