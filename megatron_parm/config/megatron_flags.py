"""What happens to every Megatron and DeepSpeed flag that is not a field's own name: one table. Floor 1.

`Spelling`: another name of a field. `Sets`: a switch that stands for a field's value. `Ignored`: accepted with one
warning, because results do not depend on it. `Refused`: the reason and the remedy. Both vocabularies are here, that of
2021 and the current one; the names of classic scripts matter as much as today's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron_parm.config.layer_pattern import every_last_of

Values = Literal["none", "one", "any"]  # how many words follow the flag


@dataclass(frozen=True)
class Spelling:
    """Another name of `field`; `convert` turns the value's text into the field's."""

    field: str
    convert: Callable[[str], str] | None = None


@dataclass(frozen=True)
class Sets:
    """A switch that stands for `field` = `value` (text as the field's own flag would read it; None: its default).

    It gives way to the field's own flag where that says one of `yields_to`.
    """

    field: str
    value: str | None
    yields_to: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ignored:
    """Accepted with a warning that says what happens instead."""

    instead: str
    values: Values = "none"


@dataclass(frozen=True)
class Refused:
    """Not accepted, unless every value given is one of `harmless`, which means the feature is off."""

    reason: str
    values: Values = "any"
    harmless: tuple[str, ...] = ()


Entry = Spelling | Sets | Ignored | Refused


def _ignored(instead: str, names: str, values: Values = "none") -> dict[str, Entry]:
    return {f"--{name}": Ignored(instead, values) for name in names.split()}


def _refused(reason: str, names: str, harmless: tuple[str, ...] = ()) -> dict[str, Entry]:
    return {f"--{name}": Refused(reason, "any", harmless) for name in names.split()}


_FUSED = "kernels are chosen by the code, with the same results"
_WHOLE_SAVED = (
    "what is kept for recomputation is whole on every tensor-parallel rank, unless --sequence-parallel cuts it"
)
_OVERLAP = "overlap is chosen by the code, with the same results"
_ONE_FORMAT = "there is one checkpoint format, sharded and loadable by any layout"
_NOT_LOGGED = "not in this release; nothing else changes"
_ALWAYS_LOGGED = "TensorBoard always gets it"
_NOT_YET = "not in this release; leave it out"
_SHARDED = "not in this release; shard the model with --tensor-model-parallel-size and the expert sizes"
_PREPROCESS = "a flag of tools/preprocess_data.py, not of a training run"

_OLD_NAMES: dict[str, Entry] = {
    "--layernorm-epsilon": Spelling("norm_epsilon"),
    "--encoder-seq-length": Spelling("seq_length"),
    "--persistent-save-interval": Spelling("save_interval"),
    "--override-lr-scheduler": Spelling("override_opt_param_scheduler"),
    "--override-opt-param-scheduler": Spelling("override_opt_param_scheduler"),
    "--use-checkpoint-lr-scheduler": Spelling("use_checkpoint_opt_param_scheduler"),
    "--use-checkpoint-opt-param-scheduler": Spelling("use_checkpoint_opt_param_scheduler"),
    "--local_rank": Spelling("local_rank"),
    "--tiktoken-special-tokens": Spelling("tokenizer_special_tokens"),
    "--expert-sharding-parallel-size": Spelling("expert_tensor_parallel_size"),
    "--pipeline-degree": Spelling("moe_pipeline_chunks"),
    "--moe-expert-parallel-size": Spelling("expert_model_parallel_size"),
    "--moe-loss-coeff": Spelling("moe_aux_loss_coeff"),
    "--moe-train-capacity-factor": Spelling("moe_expert_capacity_factor"),
    "--expert-interval": Spelling("moe_layer_freq", every_last_of),
    "--disable-moe-token-dropping": Sets("moe_expert_capacity_factor", None),
    "--enable-expert-tensor-parallelism": Sets("expert_tensor_parallel_size", None),
    "--bf16": Sets("precision", "bf16"),
    "--fp16": Sets("precision", "fp16"),
    "--fp32-allreduce": Spelling("accumulate_allreduce_grads_in_fp32"),
    "--use-rotary-position-embeddings": Sets("position_embedding_type", "rope"),
    "--no-position-embedding": Sets("position_embedding_type", "none", yields_to=("rope", "yarn")),
    "--recompute-activations": Sets("recompute_granularity", "selective"),
    "--checkpoint-activations": Sets("recompute_granularity", "full"),
    "--checkpoint-num-layers": Spelling("recompute_num_layers"),
    "--activations-checkpoint-method": Spelling("recompute_method"),
    "--moe-layer-recompute": Sets("recompute_modules", "moe"),
    "--batch-size": Refused(
        "Megatron renamed it; use --micro-batch-size (samples of one rank) and --global-batch-size"
    ),
    "--warmup": Refused("Megatron renamed it; use --lr-warmup-fraction, a fraction where --warmup was a percentage"),
    "--model-parallel-size": Refused("Megatron renamed it; use --tensor-model-parallel-size"),
    "--num-experts-switch": Refused("use --num-experts, with --moe-router-topk 1 and --moe-router-pre-softmax"),
    "--moe-extended-tp": Refused("use --expert-tensor-parallel-size and --expert-model-parallel-size"),
    "--yaml-cfg": Refused("use --config FILE: a YAML file whose keys are flags"),
}

_MODEL: dict[str, Entry] = (
    _ignored("it only concerned ONNX export", "onnx-safe", "one")
    | _ignored(_FUSED, "attention-backend transformer-impl", "one")
    | _ignored("there is one implementation of the model", "use-mcore-models use-legacy-models")
    | _refused("not in this release; the residual is taken before the norm", "apply-residual-connection-post-layernorm")
    | _refused("a model layout cannot be given as code; use the model's flags", "spec")
    | _refused(
        "not in this release; every data-parallel rank starts with the same weights", "data-parallel-random-init"
    )
    | _refused(_NOT_YET, "multi-latent-attention mtp-num-layers fp8-format fp8-recipe fp4-format")
)

_TRAINING: dict[str, Entry] = (
    _refused(
        "not in this release; use a fixed --global-batch-size, or --rampup-batch-size",
        "step-batch-size-schedule decrease-batch-size-if-needed",
    )
    | _ignored(_WHOLE_SAVED, "distribute-saved-activations distribute-checkpointed-activations")
    | _ignored(
        _FUSED,
        "no-masked-softmax-fusion no-scaled-masked-softmax-fusion scaled-upper-triang-masked-softmax-fusion "
        "scaled-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion "
        "cross-entropy-loss-fusion use-flash-attn no-persist-layer-norm no-gradient-accumulation-fusion",
    )
    | _ignored(_FUSED, "cross-entropy-fusion-impl", "one")
    | _ignored(_OVERLAP, "no-async-tensor-model-parallel-allreduce tp-comm-overlap delay-wgrad-compute")
    | _ignored(_OVERLAP, "overlap-moe-expert-parallel-comm overlap-param-gather-with-optimizer-step")
    | _ignored("Python's garbage collector is left alone", "manual-gc")
    | _ignored("Python's garbage collector is left alone", "manual-gc-interval", "one")
    | _ignored("it only changes speed or memory", "train-sync-interval empty-unused-memory-level", "one")
    | _ignored("--trace FILE writes a timeline of the same steps and ranks", "profile use-pytorch-profiler")
    | _ignored("automatic resubmission belongs to the cluster; use --exit-duration-in-mins", "adlr-autoresume")
    | _ignored("automatic resubmission belongs to the cluster", "adlr-autoresume-interval", "one")
    | _refused(
        "not in this release; a loss that is not finite stops the run", "check-for-spiky-loss check-for-large-grads"
    )
    | _refused("not in this release; leave it out", "iterations-to-skip full-validation eval-micro-batch-size")
    | _refused("not in this release; leave it out for one learning rate", "decoupled-lr decoupled-min-lr")
    | _refused("not in this release; leave it out", "rerun-mode", harmless=("disabled",))
    | _refused("not in this release; optimizer state stays on the device", "optimizer-cpu-offload")
    | _refused("not in this release; optimizer state stays on the device", "optimizer-offload-fraction")
    | _refused("not in this release; optimizer state is fp32", "use-precision-aware-optimizer")
)

_PRECISION: dict[str, Entry] = _ignored(
    "it only kept fp16 in range", "apply-query-key-layer-scaling no-query-key-layer-scaling"
) | _refused("the loss is always computed in at least fp32; leave it out", "fp16-lm-cross-entropy")

_CHECKPOINT: dict[str, Entry] = (
    _ignored("weights are always initialised, then loaded", "no-initialization")
    | _ignored(_ONE_FORMAT, "ckpt-format", "one")
    | _ignored(_ONE_FORMAT, "use-dist-ckpt auto-detect-ckpt-format ckpt-assume-constant-structure")
    | _ignored(
        "replicas always share the writing, and every rank reads its own part",
        "ckpt-fully-parallel-save no-ckpt-fully-parallel-save ckpt-fully-parallel-load",
    )
    | _ignored("--async-save writes in a thread", "use-persistent-ckpt-worker")
    | _ignored("loading is always strict", "dist-ckpt-strictness", "one")
    | _refused("not in this release; " + _ONE_FORMAT, "ckpt-convert-format ckpt-convert-save")
    | _refused(
        "not in this release; use --save and --save-interval",
        "non-persistent-save-interval non-persistent-ckpt-type non-persistent-global-ckpt-dir "
        "non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo replication replication-jump replication-factor",
    )
    | _refused(
        "a run reads no pickle; convert the checkpoint with tools/convert_checkpoint.py --from megatron",
        "trust-checkpoint",
    )
)

_DISTRIBUTED: dict[str, Entry] = (
    _refused(
        "not in this release; say how many layers the ends hold with --decoder-first-pipeline-num-layers and "
        "--decoder-last-pipeline-num-layers",
        "account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split pipeline-model-parallel-layout "
        "standalone-embedding-stage",
    )
    | _refused("there is no encoder beside the decoder; leave it out", "pipeline-model-parallel-split-rank")
    | _ignored(
        "micro-batches go through the virtual stages in groups of about the pipeline size",
        "microbatch-group-size-per-virtual-pipeline-stage",
        "one",
    )
    | _ignored(
        "activations travel whole between stages, while other micro-batches are computed",
        "no-scatter-gather-tensors-in-pipeline use-ring-exchange-p2p overlap-p2p-communication "
        "no-overlap-p2p-communication",
    )
    | _refused("context parallelism is not in this release; use size 1", "context-parallel-size", harmless=("1",))
    | _refused("context parallelism is not in this release", "cp-comm-type hierarchical-context-parallel-sizes")
    | _ignored("gradients live in contiguous buffers of our own", "DDP-impl ddp-num-buckets", "one")
    | _ignored(
        "gradients live in contiguous buffers of our own",
        "use-contiguous-buffers-in-ddp no-contiguous-buffers-in-local-ddp ddp-average-in-collective",
    )
    | _ignored("groups are always made at start", "lazy-mpu-init", "one")
    | _ignored("weights are always drawn on the CPU, the same for every layout", "use-cpu-initialization")
    | _refused(_SHARDED, "use-torch-fsdp2 use-megatron-fsdp use-custom-fsdp num-distributed-optimizer-instances")
    | _refused(_SHARDED, "data-parallel-sharding-strategy", harmless=("no_shard",))
    | _ignored("control messages need no groups of their own", "disable-gloo-process-groups")
    | _refused("ranks are always ordered tp, dp, pp (tp fastest); leave it out", "use-tp-pp-dp-mapping")
    | _ignored("it only tunes NCCL", "nccl-communicator-config-path", "one")
    | _ignored("it only tunes NCCL", "use-sharp")
    | _ignored("it only tunes NCCL", "high-priority-stream-groups", "any")
)

_MOE: dict[str, Entry] = (
    _ignored("--moe-schedule chooses how tokens travel", "moe-token-dispatcher-type", "one")
    | _ignored(
        "the experts of a rank are always one batched product",
        "moe-grouped-gemm moe-use-legacy-grouped-gemm moe-permute-fusion",
    )
    | _ignored(
        "the shared expert is computed after the chosen ones, with the same results", "moe-shared-expert-overlap"
    )
    | _refused(
        "Megatron renamed it; use --moe-router-num-groups and --moe-router-group-topk",
        "moe-router-topk-limited-devices",
    )
    | _refused("not in this release; use --moe-expert-capacity-factor", "moe-expert-rank-capacity-factor")
    | _refused(
        "not in this release; leave it out for plain routed experts",
        "moe-apply-probs-on-input",
    )
    | _refused(
        "not in this release; every expert is a copy of the whole feed-forward, which is granularity 1",
        "moe-upcycling-granularity",
        harmless=("1",),
    )
    | _refused(
        "not in this release; leave it out for the router's own choice",
        "moe-enable-routing-replay moe-routing-trace-path",
    )
)

_DATA: dict[str, Entry] = (
    _ignored("the corpus is memory-mapped and read as needed", "mmap-warmup")
    | _ignored("indices are built by one process", "num-dataset-builder-threads", "one")
    | _ignored("the mask is built on the device", "no-create-attention-mask-in-dataloader")
    | _refused("not in this release; use 1", "sample-rate", harmless=("1", "1.0"))
    | _refused(_PREPROCESS, "input json-keys split-sentences keep-newlines append-eod lang output-prefix workers")
    | _refused(_PREPROCESS, "partitions keep-sequential-samples dataset-impl")
)

_LOGGING: dict[str, Entry] = (
    _ignored("TensorBoard is written at every --log-interval", "tensorboard-log-interval", "one")
    | _ignored("TensorBoard keeps its own queue size", "tensorboard-queue-size", "one")
    | _ignored(_ALWAYS_LOGGED, "log-batch-size-to-tensorboard log-learning-rate-to-tensorboard")
    | _ignored(_ALWAYS_LOGGED, "no-log-learnig-rate-to-tensorboard no-log-learning-rate-to-tensorboard")
    | _ignored(_ALWAYS_LOGGED, "no-log-loss-scale-to-tensorboard log-loss-scale-to-tensorboard")
    | _ignored(_NOT_LOGGED, "log-memory-to-tensorboard log-world-size-to-tensorboard")
    | _ignored(_NOT_LOGGED, "log-progress log-straggler record-memory-history")
)

MEGATRON_FLAGS: dict[str, Entry] = (
    _OLD_NAMES | _MODEL | _TRAINING | _PRECISION | _CHECKPOINT | _DISTRIBUTED | _MOE | _DATA | _LOGGING
)
