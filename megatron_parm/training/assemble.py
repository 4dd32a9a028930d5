"""From a configuration to everything a run is made of, in the order in which problems are cheapest to find. Floor 7."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch

from megatron_parm.accelerators import probe
from megatron_parm.checkpoint.save import layout_of
from megatron_parm.config.run import RunConfig, check_run, fingerprint, resolve
from megatron_parm.data.batches import Batch, micro_batches
from megatron_parm.data.build import GPTDatasets, split_requests
from megatron_parm.data.gpt_dataset import SampleSource
from megatron_parm.data.samplers import build_sampler
from megatron_parm.grads.buffer import GradientBuffers
from megatron_parm.grads.reduce import GradientReduction
from megatron_parm.models.build import BuiltModel, layer_shape
from megatron_parm.models.kernels import use_kernels
from megatron_parm.moe.cost import PUBLISHED, CostModel
from megatron_parm.observe.flops import TransformerShape
from megatron_parm.observe.log import Log
from megatron_parm.observe.records import ParameterCounts
from megatron_parm.optim.loss_scale import LossScale
from megatron_parm.optim.precision import Optimizer
from megatron_parm.optim.schedule import RateSchedule, plan_schedule
from megatron_parm.parallel import launch, transport
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.grid import RankGrid
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.parallel.randomness import RandomStates
from megatron_parm.parallel.sharding import spec_of
from megatron_parm.pipeline.micro_batches import BatchPlan
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.tokenizers.build import build_tokenizer, padded_vocab_size
from megatron_parm.tokenizers.wordpiece import WordPieceTokenizer
from megatron_parm.training.cost_model import cost_model_for
from megatron_parm.training.family import ModelFamily
from megatron_parm.training.forward_backward import ForwardBackward
from megatron_parm.training.gpt_family import GPT
from megatron_parm.training.objective import Objective
from megatron_parm.training.pipelined import stages_of_run
from megatron_parm.training.progress_state import RunProgress
from megatron_parm.training.schedule_check import ScheduleCheck, plan_check
from megatron_parm.training.updates import make_updates, memory_text


@dataclass(frozen=True)
class Assembly:
    """The parts of a run on one rank."""

    config: RunConfig
    ctx: ParallelContext
    log: Log
    tokenizer: Tokenizer
    plan: BatchPlan
    schedule: RateSchedule
    objective: Objective
    datasets: GPTDatasets
    built: BuiltModel
    buffers: GradientBuffers
    reduction: GradientReduction
    optimizer: Optimizer
    loss_scale: LossScale
    forward_backward: ForwardBackward
    random_states: RandomStates
    flop_shape: TransformerShape
    schedule_check: ScheduleCheck | None = None

    def batches(self, dataset: SampleSource, consumed_samples: int) -> Iterator[Batch]:
        """This rank's micro-batches of `dataset` from the given position on. tp peers read the same ones."""
        sampler = build_sampler(
            self.config.data.dataloader_type,
            len(dataset),
            consumed_samples,
            self.config.training.micro_batch_size,
            self.ctx.dp.rank,
            self.ctx.dp.size,
        )
        on_accelerator = self.ctx.device.type != "cpu"
        return micro_batches(dataset, sampler, self.config.data.num_workers, pin_memory=on_accelerator)


def join_ranks(config: RunConfig, environment: LaunchEnvironment, log: Log) -> tuple[RunConfig, ParallelContext]:
    """Check the configuration, compare it over the ranks, and build the groups. Call on all ranks.

    Returns the configuration with every default filled in. Raises ConfigError or LayoutError before any group exists.
    """
    check_run(config, environment.world)
    config = resolve(config, environment.world)
    parallel = config.parallel
    device, backend, note = launch.choose_device(parallel.distributed_backend, environment)
    if note:
        log.warn(note)
    is_moe = config.moe is not None
    grid = RankGrid(
        environment.world,
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        ep=parallel.expert_model_parallel_size if is_moe else 1,
        esp=parallel.esp if is_moe else 1,
    )
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    store = launch.open_store(environment, timeout)
    launch.check_fingerprint(fingerprint(config), environment, store)
    return config, launch.start(grid, environment, store, device, backend, timeout)


def make_tokenizer(config: RunConfig) -> tuple[Tokenizer, int]:
    """The tokenizer of the flags, and its vocabulary with its extra ids, before padding."""
    data = config.data
    tokenizer = build_tokenizer(
        data.tokenizer_type,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        tokenizer_model=data.tokenizer_model,
        vocab_size=data.vocab_size,
        vocab_extra_ids=data.vocab_extra_ids,
        tiktoken_pattern=data.tiktoken_pattern,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
        tokenizer_special_tokens=data.tokenizer_special_tokens,
    )
    return tokenizer, tokenizer.vocab_size


def words_of_model(tokenizer: Tokenizer, vocab_size: int, saved_words: int | None) -> int:
    """The vocabulary of the model: the tokenizer's, or that of a saved BERT which has no place for [BOS] and [EOS].

    Megatron's tokenizer adds them to every vocab.txt, models of Hugging Face lack them, and no BERT reads them.
    """
    if isinstance(tokenizer, WordPieceTokenizer) and saved_words is not None:
        return saved_words if tokenizer.least_vocab_size <= saved_words < vocab_size else vocab_size
    return vocab_size


def make_model(
    config: RunConfig,
    vocab_size: int,
    ctx: ParallelContext,
    saved_rows: int | None = None,
    cost_model: CostModel = PUBLISHED,
    family: ModelFamily = GPT,
) -> tuple[BuiltModel, RandomStates, int]:
    """The model with initial weights, its random streams, and the padded vocabulary.

    saved_rows: the padded vocabulary of a checkpoint that will be loaded; kept if it can be cut over tp. cost_model: by
    which the schedule of the MoE layers is chosen.
    """
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    padded = padded_vocab_size(vocab_size, config.model.make_vocab_size_divisible_by, ctx.tp.size)
    if saved_rows is not None and saved_rows >= vocab_size and saved_rows % ctx.tp.size == 0:
        padded = saved_rows
    random_states = RandomStates(config.training.seed, ctx)
    built = family.build_model(config, vocab_size, padded, ctx, random_states.replicated, cost_model)
    return built, random_states, padded


def assemble(
    config: RunConfig,
    ctx: ParallelContext,
    log: Log,
    *,
    saved_rows: int | None = None,
    saved_words: int | None = None,
    start: RunProgress | None = None,
    family: ModelFamily = GPT,
) -> Assembly:
    """Everything of a run but what its checkpoint holds. `config` is resolved. Call on all ranks.

    saved_rows: see `make_model`; saved_words: see `words_of_model`. start: where the run will go on, to have samples
    enough to its end.
    """
    tokenizer, vocab_size = on_all_ranks(ctx.world, lambda: make_tokenizer(config))
    vocab_size = words_of_model(tokenizer, vocab_size, saved_words)
    training = config.training
    plan = BatchPlan.of(training.global_batch_size, training.micro_batch_size, ctx.dp.size, config.ramp)
    schedule = on_all_ranks(ctx.world, lambda: make_schedule(config))
    requests = _requests(config, plan, start or RunProgress())
    datasets = on_all_ranks(ctx.world, lambda: family.build_datasets(config, tokenizer, vocab_size, requests))
    for summary in datasets.summaries:
        log.say(f" > {summary}")
    for note in datasets.notes:
        log.say(f" > {note}")
    cost_model = cost_model_for(config, ctx, log)
    built, random_states, padded = make_model(config, vocab_size, ctx, saved_rows, cost_model, family)
    accelerators = probe(ctx.device)
    use_kernels(built.model, accelerators.norms, compiles=training.compile)
    log.say(f" > {accelerators.report}" + (", compiled" if training.compile else ""))
    updates = make_updates(config, built, ctx)
    log.say(f" > {memory_text(config, built, updates, ctx)}")
    objective = family.objective(config)
    return Assembly(
        config=config,
        ctx=ctx,
        log=log,
        tokenizer=tokenizer,
        plan=plan,
        schedule=schedule,
        objective=objective,
        datasets=datasets,
        built=built,
        buffers=updates.buffers,
        reduction=updates.reduction,
        optimizer=updates.optimizer,
        loss_scale=updates.loss_scale,
        forward_backward=stages_of_run(config, built, updates.buffers, objective, ctx),
        random_states=random_states,
        flop_shape=_flop_shape(config, padded, is_causal=family.is_causal),
        schedule_check=_schedule_check(config, ctx, built),
    )


def _schedule_check(config: RunConfig, ctx: ParallelContext, built: BuiltModel) -> ScheduleCheck | None:
    """What --moe-schedule-check asks for."""
    if config.moe is None or config.moe.moe_schedule_check == 0 or built.choice is None:
        return None
    return plan_check(built.choice, layer_shape(config, ctx), config.moe.moe_schedule_check)


def make_schedule(config: RunConfig) -> RateSchedule:
    """The learning-rate and weight-decay schedules of a resolved config."""
    optim, training = config.optim, config.training
    return plan_schedule(
        lr=optim.lr,
        global_batch_size=config.global_batch_size,
        train_iters=training.train_iters,
        train_samples=training.train_samples,
        min_lr=optim.min_lr,
        lr_decay_style=optim.lr_decay_style,
        lr_decay_iters=optim.lr_decay_iters,
        lr_decay_samples=optim.lr_decay_samples,
        lr_warmup_fraction=optim.lr_warmup_fraction,
        lr_warmup_iters=optim.lr_warmup_iters,
        lr_warmup_samples=optim.lr_warmup_samples,
        lr_warmup_init=optim.lr_warmup_init,
        lr_wsd_decay_style=optim.lr_wsd_decay_style,
        lr_wsd_decay_iters=optim.lr_wsd_decay_iters,
        lr_wsd_decay_samples=optim.lr_wsd_decay_samples,
        weight_decay=optim.weight_decay,
        start_weight_decay=optim.start_weight_decay,
        end_weight_decay=optim.end_weight_decay,
        weight_decay_incr_style=optim.weight_decay_incr_style,
    )


def count_parameters(built: BuiltModel, ctx: ParallelContext) -> ParameterCounts:
    """Parameters of the whole model, and of the fullest rank. Call on all ranks."""
    parameters = list(built.model.parameters())
    held = torch.tensor([sum(p.numel() for p in parameters)], device=ctx.device)
    specs = [spec for p in parameters if not ((spec := spec_of(p)).is_tied and ctx.ends.rank > 0)]
    stage = torch.tensor([sum(prod(spec.global_shape) for spec in specs)], device=ctx.device)
    total = int(transport.sum_over(stage, ctx.pp).item())
    return ParameterCounts(total=total, per_rank=int(transport.max_over(held, ctx.world).item()))


def named_layout(ctx: ParallelContext) -> dict[str, int]:
    """The sizes of the axes, in the order of the log."""
    sizes = layout_of(ctx)
    return {name: sizes[name] for name in ("world", "tp", "pp", "ep", "esp", "dp", "edp")}


def _requests(config: RunConfig, plan: BatchPlan, start: RunProgress) -> tuple[int, int, int]:
    """Samples of train, valid and test."""
    training = config.training
    train, valid, test = split_requests(
        config.global_batch_size,
        training.eval_interval,
        training.eval_iters,
        training.train_iters,
        training.train_samples,
    )
    if config.ramp is not None:  # more, smaller steps than train samples / global batch
        evaluations = config.train_iterations // training.eval_interval + 1
        valid = evaluations * training.eval_iters * config.global_batch_size
    # after a resume with a smaller global batch more samples are behind than so many iterations of today's size
    to_come = plan.samples_of(max(0, config.train_iterations - start.iteration), start.consumed_train_samples)
    train = 0 if training.skip_train else max(train, start.consumed_train_samples + to_come)
    return train, valid, test


def _flop_shape(config: RunConfig, vocabulary_rows: int, *, is_causal: bool) -> TransformerShape:
    model, moe = config.model, config.moe
    return TransformerShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.feed_forward_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        head_size=model.head_dim,
        seq_length=config.data.seq_length,
        vocabulary_rows=vocabulary_rows,
        is_gated=model.activation == "swiglu",
        is_causal=is_causal,
        num_moe_layers=sum(config.moe_layers),
        moe_ffn_hidden_size=config.expert_size,
        moe_topk=moe.moe_router_topk if moe else 0,
        window=model.window,
        shared_expert_size=(moe.moe_shared_expert_intermediate_size or 0) if moe else 0,
        weighs_shared_expert=bool(moe and moe.moe_shared_expert_intermediate_size and moe.moe_shared_expert_gate),
        has_word_head=config.bert is not None,
    )
