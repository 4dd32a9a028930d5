"""config/megatron_flags.py. Reference: our list of the names that Megatron users type, 2021 to today."""

import pytest

from megatron_parm.config.fields import flags_of
from megatron_parm.config.megatron_flags import MEGATRON_FLAGS, Ignored, Refused, Sets, Spelling
from megatron_parm.config.parser import Given, build_parser, parse_run_config
from megatron_parm.config.run import SECTIONS
from megatron_parm.errors import ConfigError
from tests.config.commands import TINY, config_of

MODEL = """num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention num-query-groups
max-position-embeddings position-embedding-type use-rotary-position-embeddings rotary-base rotary-percent
rotary-interleaved rotary-seq-len-interpolation-factor use-rope-scaling no-position-embedding
make-vocab-size-divisible-by normalization norm-epsilon layernorm-epsilon apply-layernorm-1p
apply-residual-connection-post-layernorm openai-gelu squared-relu swiglu onnx-safe bert-no-binary-head
untie-embeddings-and-output-weights disable-bias-linear add-qkv-bias qk-layernorm attention-backend transformer-impl
use-mcore-models use-legacy-models spec"""

REGULARIZATION = """attention-dropout hidden-dropout weight-decay start-weight-decay end-weight-decay
weight-decay-incr-style clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum seed init-method-std
init-method-xavier-uniform data-parallel-random-init"""

TRAINING = """micro-batch-size batch-size global-batch-size rampup-batch-size step-batch-size-schedule
decrease-batch-size-if-needed train-iters train-samples exit-interval exit-duration-in-mins exit-signal-handler
recompute-activations recompute-granularity recompute-method recompute-num-layers recompute-modules
distribute-saved-activations checkpoint-activations checkpoint-num-layers distribute-checkpointed-activations
activations-checkpoint-method optimizer dataloader-type no-masked-softmax-fusion no-scaled-masked-softmax-fusion
scaled-upper-triang-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion
no-rope-fusion cross-entropy-loss-fusion use-flash-attn sequence-parallel no-async-tensor-model-parallel-allreduce
no-persist-layer-norm no-gradient-accumulation-fusion deterministic-mode calculate-per-token-loss manual-gc
manual-gc-interval train-sync-interval empty-unused-memory-level no-check-for-nan-in-loss-and-grad
check-for-spiky-loss iterations-to-skip profile use-pytorch-profiler profile-step-start profile-step-end
profile-ranks"""

LEARNING_RATE = """lr min-lr lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-fraction lr-warmup-iters
lr-warmup-samples lr-warmup-init warmup lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples decoupled-lr
decoupled-min-lr override-lr-scheduler override-opt_param-scheduler use-checkpoint-lr-scheduler
use-checkpoint-opt_param-scheduler"""

CHECKPOINT = """save save-interval persistent-save-interval no-save-optim no-save-rng load no-load-optim no-load-rng
finetune pretrained-checkpoint ckpt-step no-initialization use-checkpoint-args use-mp-args-from-checkpoint-args
exit-on-missing-checkpoint ckpt-format use-dist-ckpt auto-detect-ckpt-format async-save ckpt-fully-parallel-save
no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-strictness
ckpt-convert-format ckpt-convert-save non-persistent-save-interval non-persistent-ckpt-type
non-persistent-global-ckpt-dir non-persistent-local-ckpt-dir non-persistent-local-ckpt-algo save-retain-interval"""

PRECISION = """fp16 bf16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
fp32-residual-connection apply-query-key-layer-scaling no-query-key-layer-scaling attention-softmax-in-fp32
accumulate-allreduce-grads-in-fp32 fp32-allreduce fp16-lm-cross-entropy grad-reduce-in-bf16"""

DISTRIBUTED = """tensor-model-parallel-size pipeline-model-parallel-size model-parallel-size
num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank context-parallel-size
expert-model-parallel-size expert-tensor-parallel-size distributed-backend distributed-timeout-minutes DDP-impl
use-contiguous-buffers-in-ddp no-contiguous-buffers-in-local-ddp no-scatter-gather-tensors-in-pipeline local_rank
local-rank lazy-mpu-init use-cpu-initialization use-ring-exchange-p2p overlap-p2p-communication
no-overlap-p2p-communication overlap-grad-reduce overlap-param-gather ddp-bucket-size ddp-average-in-collective
use-distributed-optimizer use-torch-fsdp2 use-megatron-fsdp data-parallel-sharding-strategy
disable-gloo-process-groups use-tp-pp-dp-mapping"""

MOE = """num-experts moe-layer-freq expert-interval moe-ffn-hidden-size moe-router-topk moe-router-pre-softmax
moe-router-score-function moe-router-num-groups moe-router-group-topk moe-router-topk-scaling-factor
moe-router-topk-limited-devices moe-router-dtype moe-router-load-balancing-type moe-aux-loss-coeff
moe-router-enable-expert-bias moe-router-bias-update-rate moe-z-loss-coeff moe-input-jitter-eps
moe-expert-capacity-factor moe-token-drop-policy moe-pad-expert-input-to-capacity moe-expert-rank-capacity-factor
moe-train-capacity-factor moe-eval-capacity-factor moe-min-capacity moe-token-dispatcher-type moe-schedule
moe-pipeline-chunks moe-permute-fusion moe-grouped-gemm moe-use-legacy-grouped-gemm
moe-shared-expert-intermediate-size moe-shared-expert-overlap moe-shared-expert-gate moe-per-layer-logging
moe-router-force-load-balancing moe-enable-routing-replay moe-routing-trace-path moe-use-upcycling
moe-upcycling-granularity moe-layer-recompute moe-apply-probs-on-input moe-extended-tp pipeline-degree
bp-pipeline-degree moe-expert-parallel-size moe-loss-coeff disable-moe-token-dropping
enable-expert-tensor-parallelism num-experts-switch expert-sharding-parallel-size"""

DATA = """data-path train-data-path valid-data-path test-data-path data-args-path per-split-data-args-path split
data-cache-path mock-data data-impl mmap-warmup no-mmap-bin-files num-dataset-builder-threads seq-length
encoder-seq-length num-workers vocab-file merge-file vocab-size vocab-extra-ids tokenizer-type tokenizer-model
tiktoken-pattern mask-prob short-seq-prob reset-position-ids reset-attention-mask eod-mask-loss
no-create-attention-mask-in-dataloader sample-rate eval-iters eval-interval skip-train adlr-autoresume input json-keys
split-sentences keep-newlines append-eod lang output-prefix workers partitions keep-sequential-samples dataset-impl"""

LOGGING = """log-interval tensorboard-dir tensorboard-log-interval tensorboard-queue-size log-timers-to-tensorboard
log-batch-size-to-tensorboard no-log-learnig-rate-to-tensorboard no-log-loss-scale-to-tensorboard
log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-world-size-to-tensorboard log-params-norm
log-num-zeros-in-grad wandb-project wandb-exp-name wandb-save-dir timing-log-level timing-log-option
no-barrier-with-level-1-timing log-progress log-throughput"""

OWN = "log-json resume verify-checkpoint progress-bar precision split-rounding moe-cost-model bert-layout"

EVERY_NAME = " ".join(
    (MODEL, REGULARIZATION, TRAINING, LEARNING_RATE, CHECKPOINT, PRECISION, DISTRIBUTED, MOE, DATA, LOGGING, OWN)
).split()

FIELDS = {flag.spelling: flag for section in SECTIONS.values() for flag in flags_of(section)}
BY_FIELD = {flag.field: flag for flag in FIELDS.values()}
PARSER = build_parser(SECTIONS.values(), knows_megatron=True)
IGNORED = {name: entry for name, entry in MEGATRON_FLAGS.items() if isinstance(entry, Ignored)}
REFUSED = {name: entry for name, entry in MEGATRON_FLAGS.items() if isinstance(entry, Refused)}


@pytest.mark.parametrize("name", EVERY_NAME)
def test_every_name_has_a_fate(name: str) -> None:
    assert f"--{name}" in FIELDS or f"--{name}" in MEGATRON_FLAGS


def test_the_table_never_repeats_a_field() -> None:
    assert not set(FIELDS) & set(MEGATRON_FLAGS)


def test_other_spellings_lead_to_fields_and_values_that_exist() -> None:
    for entry in MEGATRON_FLAGS.values():
        if isinstance(entry, Spelling | Sets):
            assert entry.field in BY_FIELD
        if isinstance(entry, Sets) and entry.value is not None:
            BY_FIELD[entry.field].read([entry.value])


@pytest.mark.parametrize("name", IGNORED)
def test_an_ignored_flag_is_noted_once_and_changes_nothing(name: str) -> None:
    value = {"none": "", "one": "1", "any": "1 2"}[IGNORED[name].values]
    given, _ = PARSER.read(f"{name} {value} {name} {value}".split())
    assert given.notes == [f"{name} is accepted and ignored: {IGNORED[name].instead}"]
    assert given.values == {}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_flag_gives_its_reason_and_what_to_do(name: str) -> None:
    for value in ("", "7"):
        with pytest.raises(ConfigError) as error:
            PARSER.read([name, value] if value else [name])
        assert str(error.value).startswith(name)
        assert REFUSED[name].reason in str(error.value)
    for value in REFUSED[name].harmless:
        assert PARSER.read([name, value])[0] == Given()


@pytest.mark.parametrize(
    ("written", "means"),
    [
        ("--layernorm-epsilon 1e-6", "--norm-epsilon 1e-6"),
        ("--encoder-seq-length 8", "--seq-length 8"),
        ("--save x --persistent-save-interval 5", "--save x --save-interval 5"),
        ("--override-lr-scheduler", "--override-opt_param-scheduler"),
        ("--use-checkpoint-lr-scheduler", "--use-checkpoint-opt_param-scheduler"),
        ("--local_rank 3", "--local-rank 3"),
        ("--local_rank=3", "--local-rank 3"),
        ("--bf16", "--precision bf16"),
        ("--use-rotary-position-embeddings", "--position-embedding-type rope"),
        ("--no-position-embedding", "--position-embedding-type none"),
        ("--num-experts 4 --moe-expert-parallel-size 2", "--num-experts 4 --expert-model-parallel-size 2"),
        ("--num-experts 4 --moe-loss-coeff 0.1", "--num-experts 4 --moe-aux-loss-coeff 0.1"),
        ("--num-experts 4 --moe-train-capacity-factor 1.5", "--num-experts 4 --moe-expert-capacity-factor 1.5"),
        ("--num-experts 4 --disable-moe-token-dropping", "--num-experts 4"),
        ("--num-experts 4 --enable-expert-tensor-parallelism", "--num-experts 4"),
        ("--num-experts 4 --expert-interval 1", "--num-experts 4 --moe-layer-freq 1"),
        ("--num-experts 4 --pipeline-degree 1", "--num-experts 4 --moe-pipeline-chunks 1"),
        ("--num-experts 4 --expert-sharding-parallel-size 2", "--num-experts 4 --expert-tensor-parallel-size 2"),
    ],
)
def test_two_spellings_of_one_command(written: str, means: str) -> None:
    tiny = " ".join(TINY)
    if "--seq-length" in means:
        tiny = tiny.replace("--seq-length 16", "")
    found = parse_run_config(f"{tiny} {written}".split())[0]
    assert found == parse_run_config(f"{tiny} {means}".split())[0] != config_of()


def test_expert_interval_two_puts_experts_in_every_second_layer() -> None:
    config = config_of("--num-layers 5 --num-experts 4 --expert-interval 2")
    assert config.moe_layers == (False, True, False, True, False)
