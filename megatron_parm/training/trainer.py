"""The training loop, readable from top to bottom. Floor 7."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from megatron_parm import __version__
from megatron_parm.config.run import to_dict
from megatron_parm.data.batches import Batch
from megatron_parm.errors import ConfigError, CorruptionError, NonFiniteError
from megatron_parm.moe.record import RoutingSummary
from megatron_parm.observe.flops import throughput
from megatron_parm.observe.memory import peak_memory
from megatron_parm.observe.progress import Progress
from megatron_parm.observe.records import (
    EndRecord,
    MoEFigures,
    MoELayerFigures,
    ScheduleChoice,
    StartRecord,
    TrainRecord,
    ValidRecord,
)
from megatron_parm.observe.sinks import Recorder
from megatron_parm.observe.timers import StepClock, Timers, device_synchroniser, do_nothing, table_of
from megatron_parm.optim.clip import count_zeros, parameter_norm
from megatron_parm.optim.replicas import differing_replicas
from megatron_parm.parallel import transport
from megatron_parm.parallel.agreement import on_all_ranks
from megatron_parm.training.assemble import Assembly, count_parameters, named_layout
from megatron_parm.training.evaluate import evaluate
from megatron_parm.training.non_finite import ForwardWatch
from megatron_parm.training.progress_state import RunProgress
from megatron_parm.training.resume import SavedRun, load_run
from megatron_parm.training.saving import RunSaver
from megatron_parm.training.schedule_check import ScheduleTrial
from megatron_parm.training.signals import StopRequests
from megatron_parm.training.step import StepResult, TrainStep
from megatron_parm.training.tracing import TracedSteps

PREEMPTED = "PREEMPTED"  # a marker in --save: the run was stopped, saved, and is not done


class Trainer:
    """Trains an assembled run to its end, or until it is asked to stop. Every method is called on all ranks."""

    def __init__(self, run: Assembly, recorder: Recorder) -> None:
        self.run = run
        self.recorder = recorder
        self.progress = RunProgress()
        self._saver = RunSaver(run.config.checkpoint, run.ctx, run.log, recorder)
        self._started = time.monotonic()
        self._clock = StepClock(device_synchroniser(run.ctx.device))
        self._traced = TracedSteps(run.config.logging, run.ctx, run.log)
        training, moe = run.config.training, run.config.moe
        self._trial = ScheduleTrial(
            run.built, run.schedule_check, run.ctx, run.log, adapts=moe is not None and moe.moe_schedule_adapt
        )
        self._stop = StopRequests(
            run.ctx, exit_interval=training.exit_interval, duration_minutes=training.exit_duration_in_mins
        )
        waits = not run.config.logging.no_barrier_with_level_1_timing
        self._timers = Timers(
            run.config.logging.timing_log_level,
            device_synchroniser(run.ctx.device),
            partial(transport.barrier, run.ctx.world) if waits else do_nothing,
        )
        self._step = TrainStep(
            run.forward_backward,
            run.buffers,
            run.optimizer,
            run.ctx,
            max_norm=run.config.optim.clip_grad,
            per_token_loss=training.calculate_per_token_loss,
            objective=run.objective,
            timers=self._timers,
            reduction=run.reduction,
            loss_scale=run.loss_scale,
            watch=ForwardWatch(run.built.model) if training.checks_for_nan else None,
        )

    def resume(self, saved: SavedRun) -> None:
        """Go on from `saved`, as --finetune, --moe-use-upcycling and their kind say."""
        self.progress, schedule = load_run(self.run, saved)
        self.run = replace(self.run, schedule=schedule)
        if not saved.begins_anew:
            self._saver.saved_at = self.progress.iteration
        self.run.log.say(f" > loaded {saved.checkpoint.path}, going on from iteration {self.progress.iteration}")

    def train(self) -> None:
        """Train, evaluate, save; ends with an evaluation of both held-out splits and a last checkpoint."""
        config, progress = self.run.config, self.progress
        last = config.train_iterations
        self._prepare_save_folder()
        self._record_start()
        with self._stop.watching(is_enabled=config.training.exit_signal_handler):
            if config.training.skip_train:
                reason = "--skip-train: evaluated only"
            elif progress.iteration >= last:
                reason = f"nothing left to do: iteration {progress.iteration} of {last} was reached before"
            else:
                try:
                    reason = self._loop(last) or "done"
                except (NonFiniteError, CorruptionError):  # the same on all ranks: the save before it is still good
                    self._saver.settle()
                    raise
                self._traced.finish(progress.iteration)
            if config.training.skip_train or progress.iteration >= last:
                self._evaluate_at_the_end()
        self.run.optimizer.settle()  # a gather of the last update may be on its way
        self._record_end(reason)

    def _loop(self, last: int) -> str | None:
        """Steps until `last`; the reason if the run was asked to stop before."""
        config, progress = self.run.config, self.progress
        self._train_batches = self._open_train_batches()
        self._valid_batches: Iterator[Batch] | None = None
        self._timed_until = progress.iteration
        self._clock.restart()
        shown = self.run.log.is_speaking and config.logging.progress_bar != "off"
        with Progress(last, progress.iteration, is_shown=shown) as bar:
            while progress.iteration < last:
                with self._clock.paused():
                    self._traced.before_step(progress.iteration)
                result = self._one_step()
                bar.advance(loss=result.lm_loss)
                with self._clock.paused():
                    self._traced.after_step(progress.iteration)
                    self._saver.poll()
                    if progress.iteration % config.training.eval_interval == 0:
                        self._evaluate_valid(f"iteration {progress.iteration}")
                    if config.checkpoint.save_interval and progress.iteration % config.checkpoint.save_interval == 0:
                        self._save()
                    reason = self._stop.reason_at(progress.iteration)
                if reason is not None and progress.iteration < last:
                    self._stop_early()
                    return reason
        self._save()
        self._saver.settle()
        return None

    def _one_step(self) -> StepResult:
        run, progress = self.run, self.progress
        batch_size = run.plan.global_batch_size_at(progress.consumed_train_samples)
        num_micro_batches = run.plan.num_micro_batches_at(progress.consumed_train_samples)
        run.built.record.clear()
        with run.ctx.trace.span("iteration", number=progress.iteration + 1):
            result = self._trial.run(
                lambda: self._step.run(
                    self._train_batches,
                    num_micro_batches,
                    run.schedule.learning_rate(progress.scheduled_samples),
                    run.schedule.weight_decay(progress.scheduled_samples),
                ),
                num_micro_batches,
            )
        progress.iteration += 1
        progress.consumed_train_samples += batch_size
        if result.is_skipped:
            if self._stops_for(result):
                raise NonFiniteError(self._non_finite_message(result, batch_size))
            progress.skipped += 1
        else:
            progress.scheduled_samples += batch_size
        self._compare_replicas()
        self._record_step(result, batch_size)
        return result

    def _stops_for(self, result: StepResult) -> bool:
        """Whether a step that is not finite ends the run. Under a dynamic loss scale it only lowers the scale."""
        return self.run.config.training.checks_for_nan and result.is_hopeless

    def _non_finite_message(self, result: StepResult, batch_size: int) -> str:
        end = self.progress.consumed_train_samples
        scale = f" at the least loss scale, {result.loss_scale}," if self.run.loss_scale.is_dynamic else ""
        return (
            f"iteration {self.progress.iteration}: the loss is {result.lm_loss} and the gradient norm "
            f"{result.grad_norm};{scale} no update was made ({self._step.describe_fault()}). Lower --lr, raise the "
            f"warm-up or look at the data of samples {end - batch_size} to {end - 1}; "
            "--no-check-for-nan-in-loss-and-grad skips such a step and goes on"
        )

    def _compare_replicas(self) -> None:
        """--check-weight-hash-across-dp-replicas-interval. Raises CorruptionError on all ranks alike."""
        interval = self.run.config.replicas.check_weight_hash_across_dp_replicas_interval
        if interval is None or self.progress.iteration % interval:
            return
        self.run.optimizer.settle()
        differing = differing_replicas(self.run.buffers.parameters, self.run.ctx)
        if differing:
            raise CorruptionError(
                f"iteration {self.progress.iteration}: replicas of {len(differing)} weights are not equal bit by bit: "
                f"{'; '.join(differing[:4])}. Memory or a processor of the rank that differs is suspected: resume from "
                "the last checkpoint without its machine"
            )

    def _record_step(self, result: StepResult, batch_size: int) -> None:
        run, config = self.run, self.run.config
        losses = run.objective.named(result.losses)
        figures = None
        if config.moe is not None:
            summary = run.built.record.summarise(run.ctx, config.moe.moe_router_topk)
            assert summary is not None, "an MoE layer ran"
            losses |= {"load_balancing_loss": summary.load_balancing_loss, "z_loss": summary.z_loss}
            figures = _moe_figures(summary, each_layer=config.moe.moe_per_layer_logging)
            if not result.is_skipped:
                run.built.balance_experts(summary, config.moe.moe_router_bias_update_rate)
        time_ms = self._clock.lap_ms()
        logging = config.logging
        self.recorder.write(
            TrainRecord(
                iteration=self.progress.iteration,
                train_iters=config.train_iterations,
                consumed_samples=self.progress.consumed_train_samples,
                global_batch_size=batch_size,
                losses=losses,
                learning_rate=run.schedule.learning_rate(self.progress.scheduled_samples),
                loss_scale=result.loss_scale,
                iteration_time_ms=time_ms,
                throughput=throughput(run.flop_shape, batch_size, time_ms, run.ctx.world.size),
                grad_norm=result.grad_norm,
                num_zeros=count_zeros(run.buffers, run.ctx) if logging.log_num_zeros_in_grad else None,
                params_norm=parameter_norm(run.optimizer.masters, run.ctx) if logging.log_params_norm else None,
                skipped=int(result.is_skipped),
                nan=int(result.is_skipped),
                moe=figures,
                memory=peak_memory(run.ctx.device),
                spans_ms=self._times_of_the_interval(),
                moe_schedule_check=self._trial.record,
            )
        )

    def _times_of_the_interval(self) -> dict[str, tuple[float, ...]]:
        """At the end of a log interval the timers of all ranks, an iteration each; nothing in between."""
        interval, world = self.run.config.logging.log_interval, self.run.ctx.world
        if self._timers.level == 0 or self.progress.iteration % interval:
            return {}
        counted, self._timed_until = self.progress.iteration - self._timed_until, self.progress.iteration
        ranks = [json.loads(text) for text in transport.gather_text(json.dumps(self._timers.drain()), world)]
        return table_of(ranks, counted)

    def _open_train_batches(self) -> Iterator[Batch]:
        train = self.run.datasets.train
        assert train is not None
        return self.run.batches(train, self.progress.consumed_train_samples)

    def _evaluate_valid(self, place: str) -> None:
        run, config = self.run, self.run.config
        if run.datasets.valid is None or config.training.eval_iters == 0:
            return
        progress, num_samples = self.progress, config.training.eval_iters * config.global_batch_size
        if progress.consumed_valid_samples + num_samples > len(run.datasets.valid):
            # a resume that evaluates more rarely than before has planned fewer samples than were consumed
            progress.consumed_valid_samples, self._valid_batches = 0, None
        if self._valid_batches is None:
            self._valid_batches = run.batches(run.datasets.valid, progress.consumed_valid_samples)
        losses = evaluate(run.forward_backward, self._valid_batches, self._evaluation_batches, run.ctx)
        progress.consumed_valid_samples += num_samples
        self._record_evaluation(run.objective.named(losses), "valid", place)

    @property
    def _evaluation_batches(self) -> int:
        """Micro-batches that each data-parallel rank reads for one evaluation."""
        return self.run.config.training.eval_iters * self.run.plan.num_micro_batches

    def _evaluate_at_the_end(self) -> None:
        run = self.run
        self._valid_batches = None
        self._evaluate_valid(f"iteration {self.progress.iteration} on validation set")
        if run.datasets.test is not None and run.config.training.eval_iters > 0:
            batches = run.batches(run.datasets.test, 0)
            losses = evaluate(run.forward_backward, batches, self._evaluation_batches, run.ctx)
            self._record_evaluation(
                run.objective.named(losses), "test", f"iteration {self.progress.iteration} on test set"
            )

    def _record_evaluation(self, losses: dict[str, float], split: str, place: str) -> None:
        progress = self.progress
        self.recorder.write(
            ValidRecord(
                progress.iteration,
                progress.consumed_train_samples,
                losses,
                "test" if split == "test" else "valid",
                place,
            )
        )

    def _save(self) -> None:
        self._saver.save(self.run, self.progress)

    def _stop_early(self) -> None:
        self._save()
        self._saver.settle()
        root = self.run.config.checkpoint.save
        if root is None:
            self.run.log.warn("stopping before the end without a checkpoint: --save was not given")
        elif self.run.ctx.rank == 0:
            (Path(root) / PREEMPTED).write_text(f"{self.progress.iteration}\n")

    def _prepare_save_folder(self) -> None:
        """Make the folder, so that one that cannot be made is found now, and take the marker of an earlier stop away.

        Raises ConfigError on all ranks.
        """
        save, ctx = self.run.config.checkpoint.save, self.run.ctx

        def prepare() -> None:
            if save is None or ctx.rank > 0:
                return
            try:
                Path(save).mkdir(parents=True, exist_ok=True)
                (Path(save) / PREEMPTED).unlink(missing_ok=True)
            except OSError as error:
                raise ConfigError(f"--save {save}: {error.strerror}; name a folder that can be written") from None

        on_all_ranks(ctx.world, prepare)

    def _record_start(self) -> None:
        run, choice = self.run, self.run.built.choice
        self.recorder.write(
            StartRecord(
                version=__version__,
                iteration=self.progress.iteration,
                config=to_dict(run.config),
                layout=named_layout(run.ctx),
                parameters=count_parameters(run.built, run.ctx),
                moe_schedule=None
                if choice is None
                else ScheduleChoice(choice.schedule, choice.chunks, choice.reason, choice.predicted_ms),
            )
        )

    def _record_end(self, reason: str) -> None:
        transport.barrier(self.run.ctx.world)
        progress = self.progress
        seconds = time.monotonic() - self._started
        self.recorder.write(EndRecord(progress.iteration, progress.consumed_train_samples, reason, 0, seconds))


def _moe_figures(summary: RoutingSummary, *, each_layer: bool) -> MoEFigures:
    layers = tuple(MoELayerFigures(**asdict(one)) for one in summary.layers) if each_layer else ()
    return MoEFigures(summary.drop_rate, summary.max_load, summary.router_entropy, layers)
