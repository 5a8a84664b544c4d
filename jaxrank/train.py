"""Trains a run from start to end: build, restore, step, log, evaluate, save."""

import contextlib
import dataclasses
import math
import textwrap
import time
from collections.abc import Iterable
from pathlib import Path
from signal import Signals
from typing import Any, NoReturn

from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import loop, opening
from jaxrank import mesh as meshes
from jaxrank import run as runs
from jaxrank.batch_statistics import reestimated
from jaxrank.config_files import hyperparameters
from jaxrank.errors import RunError, StoppedError
from jaxrank.evaluation import baseline as regression
from jaxrank.evaluation import days, slices
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.report import Result, evaluation_line, flatten_metrics, worse_than_constant
from jaxrank.features import Batch
from jaxrank.metrics.early_stopping import Monitor
from jaxrank.metrics.registry import METRICS
from jaxrank.report import Report
from jaxrank.run import Run
from jaxrank.run_report import collect, summary
from jaxrank.run_report import page as pages
from jaxrank.runtime import processes
from jaxrank.runtime.prefetch import DevicePrefetcher
from jaxrank.runtime.stop import Asked, ShutdownSignal
from jaxrank.runtime.watchdog import Watchdog
from jaxrank.step import TrainState, Weights, prediction_weights
from jaxrank.telemetry import profiler as profile
from jaxrank.telemetry.debug_batches import LastBatches
from jaxrank.telemetry.phases import PhaseTimer
from jaxrank.telemetry.profiler import Profile, Steps
from jaxrank.telemetry.progress import Progress
from jaxrank.telemetry.recorder import Recorder
from jaxrank.telemetry.reliability_image import draw_reliability
from jaxrank.telemetry.writers import Writer, open_writer
from jaxrank.warm_start import pretrained, start
from jaxrank.workdir import files as workdirs
from jaxrank.workdir import lock, user_code


def train(
    config: ConfigDict,
    workdir: str | Path,
    *,
    report: Report = print,
    quiet: bool = False,
    allow_config_change: bool = False,
    allow_older_checkpoint: bool = False,
    init_from: str = "",
    baseline: bool = False,
    profile_steps: str = "",
    debug_batches: int = 0,
    page: bool = True,
) -> Result:
    """Trains to the end of `config`, from the newest checkpoint in `workdir` if there is one.

    All processes of a run must call it with the same arguments. Only the first one reports.

    Args:
        config: see `config.default`.
        workdir: directory of the run. It is created if it does not exist.
        report: called with each line of the report.
        quiet: no live progress line.
        allow_config_change: continue a run that had another config or other data.
        allow_older_checkpoint: if the newest checkpoint is damaged, continue from the newest one
            that is not, and move the others to `damaged` in the workdir.
        init_from: the workdir of an older run, or WORKDIR/checkpoints/STEP in it. Training starts
            from its model if `workdir` has no checkpoint yet; see `warm_start.start`.
        baseline: also fit logistic regression; see `evaluation.baseline`.
        profile_steps: FIRST:LAST, steps to trace with the profiler; see `telemetry.profiler`.
            Empty: none.
        debug_batches: number of recent batches that are written after a loss that is not finite or
            that spikes; see `telemetry.debug_batches`. 0: none.
        page: also write WORKDIR/report.html.

    Raises:
        InputError: config, data, workdir or `profile_steps` are invalid.
        RunError: the loss is no longer finite, or a checkpoint or trace cannot be written.
        StoppedError: the program received SIGTERM or SIGINT, and a checkpoint is saved.
    """
    timer = PhaseTimer()
    directory = workdirs.directory(workdir)
    progress = Progress(quiet=quiet or not processes.is_first())

    def report_once(text: str) -> None:
        if processes.is_first():
            progress.clear()
            report(text)

    configs.check(config)
    if baseline:
        regression.check_installed()
        configs.check_validated(config, "--baseline", "on which the regression is scored")
    traced = profile.parse(profile_steps)
    last = LastBatches(directory, debug_batches)
    with contextlib.ExitStack() as stack:
        stack.enter_context(timer)
        stack.enter_context(lock.locked(directory))
        inherits_names = not opening.names_features(config)
        with processes.together():
            older = start.parse_source(init_from)[0] if init_from else None
            config = opening.inherit(config, directory, older)
        if not allow_config_change:
            workdirs.check_config(directory, config)
            user_code.check(directory)
        run = runs.build(config, directory, report_once, inherits_names=inherits_names)
        stack.callback(run.checkpoints.close)
        stack.callback(run.batches.close)

        state = _start(
            run,
            init_from,
            report_once,
            allow_config_change=allow_config_change,
            allow_older_checkpoint=allow_older_checkpoint,
        )
        first_step = int(state.step)
        workdirs.save(directory, run.config, run.schema, run.hot)
        workdirs.mark_finished(directory, False)  # only now, after all checks of the command
        described = runs.describe(run, state)
        report_once(described)

        writer = stack.enter_context(open_writer(directory, first_step, started=timer.started))
        stack.enter_context(contextlib.closing(progress))
        writer.text("config", str(run.config))
        writer.hparams(hyperparameters(run.config), _compared(run))
        writer.text("model", textwrap.indent(described, " " * 4))  # a table in Markdown too
        outputs = _Outputs(writer, progress, last, timer, report_once)
        state, scores, examples_per_second = _execute(run, state, outputs, traced)
        timer.enter("evaluation")
        result, shown = _result(run, state, scores, examples_per_second, timer)
        result = result._replace(trained_steps=result.step - first_step)
        if baseline and shown:
            result = result._replace(baseline=_baseline(run, shown.scored))
        writer.flush()
        _summarise(run, result, described, page)
        return result


def _start(run: Run, init_from: str, report: Report, **allowed: bool) -> TrainState:
    """Returns the state to train from. See `Run.start` for `allowed`, and `train` for the rest."""

    def new() -> TrainState:
        if init_from:
            return start.start(run, init_from, report)
        return pretrained.start_vectors(run, run.first_state(report), report)

    return run.start(new, report=report, **allowed)


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Outputs of a run while it trains."""

    writer: Writer
    progress: Progress
    last: LastBatches
    timer: PhaseTimer
    report: Report

    def make_recorder(self, run: Run) -> Recorder:
        newest = run.checkpoints.step()
        return Recorder(
            self.writer,
            self.progress,
            self.last,
            self.report,
            schema=run.schema,
            mesh=run.program.mesh,
            buffers=run.program.buffers,
            batch_size=run.program.shape.batch_size,
            run_schedule=run.run_schedule,
            spikes=run.history.spikes,
            on_nonfinite=run.builder.watch.on_nonfinite,
            max_skipped_steps=run.builder.watch.max_skipped_steps,
            checkpoint="" if newest is None else run.checkpoints.directory(newest),
            started=self.timer.started,
            ranked=run.requests.ranked,
        )


def _execute(
    run: Run, state: TrainState, outputs: _Outputs, traced: Steps | None
) -> tuple[TrainState, dict[int, scoring.Scores], float]:
    """Runs the loop to its end.

    Args:
        traced: steps to trace with the profiler.

    Returns:
        The last state, `Milestones.scores`, and the speed in examples/s.
    """
    first_step = int(state.step)
    outputs.last.begin(first_step, run.steps_per_execution)
    recorder = outputs.make_recorder(run)
    length = dict(steps_per_execution=run.steps_per_execution, num_steps=run.run_schedule.num_steps)

    def put(batches: Batch) -> Batch:
        outputs.last.keep(batches)
        return meshes.put_batch(batches, run.program.mesh, leading=1)

    with (
        contextlib.closing(DevicePrefetcher(run.batches, put)) as feed,
        ShutdownSignal(run.program.largest, run.program.mesh) as stop,
        Watchdog(run.builder.watch.hang_seconds) as watch,
        Profile(
            traced, run.directory, first_step, recorder.finish, outputs.report, **length
        ) as profiler,
    ):
        milestones = Milestones(run, recorder, outputs, watch)
        session = loop.Session(
            train=run.program.train,
            feed=feed,
            recorder=recorder,
            milestones=milestones,
            profiler=profiler,
            watch=watch,
            stop=stop,
            **length,
        )
        outputs.timer.enter("training")
        state = loop.run(session, state)
        outputs.timer.enter("saving")
        run.checkpoints.wait()  # within the block, or a signal would interrupt the save
        workdirs.mark_finished(run.directory, True)
    return state, milestones.scores, recorder.examples_per_second


def _compared(run: Run) -> list[str]:
    """Returns the tags that TensorBoard compares runs by: the first two metrics of each task."""
    return [f"{t.name}/{m.name}" for t in run.schema.tasks for m in METRICS[t.kind][:2]]


def _summarise(run: Run, result: Result, described: str, page: bool) -> None:
    """Writes summary.json, and the report if it is wanted, in process 0."""
    with processes.together():
        if not processes.is_first():
            return
        summary.write(
            run.directory,
            result,
            config=run.config,
            store=run.store,
            tables=summary.describe_tables(
                run.schema, run.hot, workdirs.load_coverage(run.directory)
            ),
            devices=f"{run.program.mesh.size} x {meshes.platform(run.program.mesh)}",
            description=described,
        )
        if page:
            pages.write([collect.collect(run.directory)], run.directory / pages.NAME)


def _baseline(run: Run, scored: scoring.Scored) -> dict[str, Any]:
    """Fits the regression on the splits of the run, in process 0.

    Args:
        scored: scores of the model on the validation split.
    """
    fitted: dict[str, Any] | None = None
    with processes.together():
        if processes.is_first():
            valid = run.open_split(run.run_schedule.valid)
            clusters = slices.read_clusters(run.store, valid, run.builder.eval.cluster)
            fitted = regression.fit(
                run.train_split, valid, run.schema, model=scored, clusters=clusters
            )._asdict()
            for task in run.requests.ranked:  # it has no probabilities
                fitted["differences"].pop(task, None)
    return processes.broadcast_value(fitted)


class Milestones:
    """Evaluates, saves and stops a run when due; see `loop.Milestones`.

    scores: {step: scores} of the last evaluation and of the best one of this command.
    """

    def __init__(self, run: Run, recorder: Recorder, outputs: _Outputs, watch: Watchdog):
        self._run, self._recorder, self._watch = run, recorder, watch
        self._writer, self._timer, self._report = outputs.writer, outputs.timer, outputs.report
        self._saved = time.monotonic()  # or started
        self._has_warned = False  # of tasks that are worse than a constant, with the causes
        self.scores: dict[int, scoring.Scores] = {}

    def continues(self, step: int) -> bool:
        return step < self._run.run_schedule.num_steps and not self._run.history.monitor.should_stop

    def save_is_due(self) -> bool:
        now, every = time.monotonic(), self._run.save_every_seconds
        if not every or now - self._saved < every:
            return False
        self._saved = (
            now  # not due again before the other processes learn of it, one execution later
        )
        return True

    def is_due(self, step: int, asked: Asked) -> bool:
        run_schedule = self._run.run_schedule
        is_saved = step == run_schedule.num_steps or step % run_schedule.save_every == 0
        return bool(asked.signal or asked.save or is_saved or run_schedule.evaluated(step))

    def pause(self, step: int, state: TrainState, signal: int) -> TrainState:
        run_schedule, monitor = self._run.run_schedule, self._run.history.monitor
        last = step == run_schedule.num_steps
        if signal and not last:
            self._report_saving(step, signal)
        self._recorder.finish()
        run = self._run
        state = reestimated(run.program, run.recent_batches, step, state)
        metric, undefined, worse = None, "", dict[str, str]()
        if split := run_schedule.evaluated(step):
            with self._timer.phase("evaluation"):
                scores = self.scores[step] = self._evaluate(step, state, split)
            self._watch.alive()
            metric = processes.broadcast_value(monitor.value(scores.metrics))
            undefined = _undefined(monitor, split, metric)
            if not undefined and monitor.update(step, metric):
                state = state._replace(lr_multiplier=monitor.reduced(state.lr_multiplier))
            trained = {k: v for k, v in scores.metrics.items() if k not in run.untrained}
            worse = worse_than_constant(trained)
            if worse and monitor.best_step == step:
                self._report(
                    f"The best checkpoint so far, of step {step}, is worse than a constant for"
                    f" {', '.join(worse)}"
                )
            kept = (monitor.best_step, step)
            self.scores = {at: self.scores[at] for at in kept if at in self.scores}
        with self._timer.phase("saving"):
            self._save(step, state, metric, worse)
        self._watch.alive()
        if undefined:
            self._run.checkpoints.wait()
            raise RunError(f"{undefined} Step {step} is saved in {self._recorder.checkpoint}.")
        if signal and not last and not monitor.should_stop:
            raise self._stopped(step, signal)
        return state

    def interrupt(self, step: int, state: TrainState, signal: int) -> NoReturn:
        self._report_saving(step, signal)
        self._recorder.finish()
        self._run.checkpoints.wait()
        if step and not self._run.checkpoints.is_there(step):
            # Without new statistics of batch norm, because the input delivers no batches.
            self._save(step, state, None)
        raise self._stopped(step, signal)

    def _report_saving(self, step: int, number: int) -> None:
        self._report(
            f"Received {Signals(number).name}: saving a checkpoint at step {step}. Send it again"
            " after 1 s to stop immediately."
        )

    def _save(
        self, step: int, state: TrainState, metric: float | None, worse: Iterable[str] = ()
    ) -> None:
        if not self._run.program.is_finite(prediction_weights(state)):
            raise RunError(
                f"step {step}: parameters and tables must be finite: found NaN or infinity."
                f" The last good checkpoint is {self._recorder.checkpoint}."
            )
        self._run.save(step, state, metric, worse)
        self._saved = time.monotonic()
        self._recorder.checkpoint = self._run.checkpoints.directory(step)

    def _stopped(self, step: int, number: int) -> StoppedError:
        """Waits for the checkpoint and returns the error that stops the run."""
        self._run.checkpoints.wait()
        return StoppedError(
            f"stopped after step {step} of {self._run.run_schedule.num_steps} by"
            f" {Signals(number).name}; the same command resumes from {self._recorder.checkpoint}.",
            number,
        )

    def _evaluate(self, step: int, state: TrainState, split: str) -> scoring.Scores:
        run = self._run
        scores = _scores(run, prediction_weights(state), split)
        day = split.partition("/")[2] if run.run_schedule.next_days else ""
        if day:
            run.history.day_scores.add(step, day, scores.metrics)
        self._writer.write(step, flatten_metrics(scores.metrics), kind="valid", day=day)
        if processes.is_first():
            self._writer.image(step, "reliability", draw_reliability(scores.buckets))
        self._writer.flush()
        suffix = f", on {day}" if day else ""
        line = evaluation_line(
            f"step {step}{suffix}",
            scores.metrics,
            run.untrained,
            run.losses,
            is_first=not self._has_warned,
            unscaled=run.unscaled,
        )
        self._has_warned |= bool(worse_than_constant(scores.metrics).keys() - set(run.untrained))
        self._report(line)
        return scores


def _scores(run: Run, weights: Weights, split: str) -> scoring.Scores:
    predictor, size = run.program.predictor, run.eval_batch_size
    split_data = run.open_split(split)
    return scoring.evaluate(predictor, weights, split_data, size, requests=run.requests)


def _undefined(monitor: Monitor, split: str, metric: float) -> str:
    """Returns an error text if an undefined metric decides when to stop or to lower the rates.

    Args:
        metric: value of process 0 in all processes, because they must decide alike.
    """
    if not math.isnan(metric) or not (
        monitor.early_stopping_patience or monitor.reduce_lr_patience
    ):
        return ""
    return (
        f"eval.metric: {monitor.task}/{monitor.metric} must be defined to decide when to stop"
        f" or to lower the rates, but all labels of split {split!r} are equal or unknown."
        " Choose another metric or split."
    )


def _result(
    run: Run,
    state: TrainState,
    scores: dict[int, scoring.Scores],
    examples_per_second: float,
    timer: PhaseTimer,
) -> tuple[Result, scoring.Scores | None]:
    """Returns the result of the run, and the scores of its checkpoint on the validation split.

    In progressive validation the scores are of the last day, if any.
    """
    step = run.checkpoints.step("best" if run.history.monitor.early_stopping_patience else "newest")
    assert step is not None
    metrics: scoring.Metrics = {}
    reference, shown = None, scores.get(step)
    by_day = run.history.day_scores.to_state() if run.run_schedule.next_days else []
    if by_day:
        metrics = days.mean([score["metrics"] for score in by_day])
        reference = days.references(run.store, run.train_split.name, by_day)
    elif run.run_schedule.valid:
        shown = shown or _checkpoint_scores(run, state, step)
        metrics = shown.metrics
        reference = scoring.reference(run.open_split(run.run_schedule.valid), run.schema)
    phase_seconds = timer.seconds()
    result = Result(
        step=int(state.step),
        examples_per_second=examples_per_second,
        seconds=sum(phase_seconds.values()),
        phase_seconds=phase_seconds,
        metrics=metrics,
        best_possible=reference.best_possible if reference else None,
        constant=reference.constant if reference else None,
        checkpoint=run.checkpoints.directory(step),
        checkpoint_step=step,
        days=by_day,
        untrained=run.untrained,
        losses=run.losses,
        unscaled=run.unscaled,
        buckets=shown.buckets if shown else {},
        histograms=shown.histograms if shown else {},
        requests=shown.requests if shown else None,
    )
    return result, shown


def _checkpoint_scores(run: Run, state: TrainState, step: int) -> scoring.Scores:
    """Scores the checkpoint of `step`, which this command did not score during training."""
    weights = prediction_weights(state)
    if step != int(state.step):
        predictor = run.program.predictor
        weights = run.checkpoints.restore_weights(
            step, predictor.weights_shape, predictor.weights_sharding
        )
    return _scores(run, weights, run.run_schedule.valid)
