"""How a worker process starts and ends: messages without tracebacks, documented exit codes. Floor 7."""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import RunConfig
from megatron_parm.errors import MegatronParmError
from megatron_parm.observe.console import ConsoleSink
from megatron_parm.observe.json_lines import JsonLinesSink
from megatron_parm.observe.log import Log
from megatron_parm.observe.progress import is_terminal, write_above_bars
from megatron_parm.observe.sinks import Recorder
from megatron_parm.observe.tensorboard_sink import TensorBoardSink, TensorBoardTags
from megatron_parm.observe.wandb_sink import WandbSink
from megatron_parm.parallel import failures, launch
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.launch import LaunchEnvironment
from megatron_parm.training.assemble import Assembly, assemble, join_ranks
from megatron_parm.training.checkpoint_flags import settings_of_checkpoint
from megatron_parm.training.family import ModelFamily
from megatron_parm.training.gpt_family import GPT
from megatron_parm.training.progress_state import RunProgress
from megatron_parm.training.resume import SavedRun, open_checkpoint, vocabulary_rows
from megatron_parm.training.tracing import traced_context
from megatron_parm.training.trainer import Trainer

EXIT_UNEXPECTED, EXIT_HANG, EXIT_OUT_OF_MEMORY, EXIT_INTERRUPTED = 1, 22, 23, 130


def guarded(work: Callable[[LaunchEnvironment], None]) -> int:
    """Run `work` in this worker and return its exit code; what went wrong is said once for all ranks.

    Broad on purpose: it is the last place that can name the rank and tell a cause from its echoes.
    """
    try:
        environment = launch.read_environment()
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        work(environment)
    except MegatronParmError as error:
        failures.report(f"error: {error}", environment)
        return error.exit_code
    except KeyboardInterrupt:
        failures.report("interrupted", environment)
        return EXIT_INTERRUPTED
    except MemoryError:
        failures.report(f"out of memory; lower --micro-batch-size\n{traceback.format_exc()}", environment)
        return EXIT_OUT_OF_MEMORY
    except Exception as error:
        return _report_unexpected(error, environment)
    return 0


def _report_unexpected(error: Exception, environment: LaunchEnvironment) -> int:
    if failures.is_echo(error):
        reason = str(error).splitlines()[0]
        failures.report(
            f"error: lost contact with another rank, which died or hung ({reason}). Its own last lines name the cause; "
            "a rank that only computes long needs a longer --distributed-timeout-minutes",
            environment,
            echo=True,
        )
        return EXIT_HANG if failures.is_timeout(error) else EXIT_UNEXPECTED
    text = "".join(traceback.format_exception(error))
    if "out of memory" in str(error).lower() or "can't allocate memory" in str(error):
        failures.report(f"{text}error: out of memory; lower --micro-batch-size or use more ranks", environment)
        return EXIT_OUT_OF_MEMORY
    failures.report(f"{text}error: {type(error).__name__}: {error}", environment)
    return EXIT_UNEXPECTED


def pretrain(
    argv: Sequence[str] | None = None,
    family: ModelFamily = GPT,
    at_end: Callable[[Assembly], None] | None = None,
) -> int:
    """Parse the flags, train a model of `family`, and return the exit code of this worker.

    `at_end` is called on all ranks when the training has ended.
    """

    def work(environment: LaunchEnvironment) -> None:
        config, notes = parse_run_config(argv, model=family.kind, saved=settings_of_checkpoint)
        log = Log(environment.rank, write=write_above_bars) if is_terminal(sys.stderr) else Log(environment.rank)
        for note in notes:
            log.warn(note)
        config, ctx = join_ranks(config, environment, log)
        saved = open_checkpoint(config, ctx, log)
        with _recorder(config, log) as recorder:
            trainer = make_trainer(config, ctx, log, recorder, saved, family)
            trainer.train()
            if at_end is not None:
                at_end(trainer.run)
        launch.shutdown(ctx)

    return guarded(work)


def make_trainer(
    config: RunConfig,
    ctx: ParallelContext,
    log: Log,
    recorder: Recorder,
    saved: SavedRun | None,
    family: ModelFamily = GPT,
) -> Trainer:
    """A trainer at its start, or where `saved` left off. Call on all ranks."""
    ctx = traced_context(config.logging, ctx)
    if saved is None:
        return Trainer(assemble(config, ctx, log, family=family), recorder)
    start = RunProgress() if saved.begins_anew else saved.progress
    trainer = Trainer(
        assemble(
            config,
            ctx,
            log,
            saved_rows=vocabulary_rows(saved.checkpoint),
            saved_words=saved.vocab_size,
            start=start,
            family=family,
        ),
        recorder,
    )
    trainer.resume(saved)
    return trainer


def _recorder(config: RunConfig, log: Log) -> Recorder:
    """The sinks of the flags, on the speaking rank alone."""
    recorder = Recorder(log.warn_once)
    logging = config.logging
    if not log.is_speaking:
        return recorder
    recorder.add(
        "console",
        lambda: ConsoleSink(log.say, logging.log_interval, logging.log_throughput, logging.timing_log_option),
    )
    if logging.log_json is not None:
        path = logging.log_json
        recorder.add(f"the JSON log (--log-json {path})", lambda: JsonLinesSink(path))
    tags = TensorBoardTags(
        validation_ppl=logging.log_validation_ppl_to_tensorboard, timers=logging.log_timers_to_tensorboard
    )
    if logging.tensorboard_dir is not None:
        folder = logging.tensorboard_dir
        recorder.add(f"TensorBoard (--tensorboard-dir {folder})", lambda: TensorBoardSink(folder, tags))
    if logging.wandb_project is not None:
        project, save = logging.wandb_project, config.checkpoint.save
        files = logging.wandb_save_dir or str(Path(save or ".") / "wandb")
        name, entity = logging.wandb_exp_name, logging.wandb_entity
        recorder.add(
            f"wandb (--wandb-project {project})",
            lambda: WandbSink(project, files, name=name, entity=entity, tags=tags),
        )
    return recorder
