"""The loop: build, restore, step, log, evaluate, save."""

import contextlib
import math
import time
from pathlib import Path
from signal import Signals

from ml_collections import ConfigDict

from jaxrank import mesh as meshes
from jaxrank import run as jobs
from jaxrank.build import check_config
from jaxrank.errors import RunError, StoppedError
from jaxrank.evaluation import days
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.report import Result, by_name, in_short
from jaxrank.features import Batch
from jaxrank.report import Report
from jaxrank.run import Job
from jaxrank.runtime import processes
from jaxrank.runtime.prefetch import Feed
from jaxrank.runtime.stop import Stop
from jaxrank.runtime.watchdog import HangWatch
from jaxrank.step import TrainState, weights_of
from jaxrank.telemetry import profiler as profile
from jaxrank.telemetry.debug_batches import LastBatches
from jaxrank.telemetry.profiler import Profile
from jaxrank.telemetry.recorder import Recorder
from jaxrank.telemetry.writers import Progress, Writer, open_writer
from jaxrank.warm_start import start
from jaxrank.workdir import files as workdirs
from jaxrank.workdir import lock

_LOOK = 1.0  # seconds between looks at whether a signal has come while the input does not


def train(
    config: ConfigDict,
    workdir: str | Path,
    *,
    report: Report = print,
    quiet: bool = False,
    allow_config_change: bool = False,
    allow_older_checkpoint: bool = False,
    init_from: str = "",
    profile_steps: str = "",
    debug_batches: int = 0,
) -> Result:
    """Trains to the end of `config`, from the newest checkpoint in `workdir` if there is one.

    Of several processes all must call this, with the same arguments; the first reports.

    Args:
        config: see `config.default`.
        workdir: of the run; made if it is not there.
        report: gets a line for each thing worth telling.
        quiet: no live progress line.
        allow_config_change: go on where a run of another config, or on other data, stopped.
        allow_older_checkpoint: where the newest checkpoint is damaged, go on from the newest that
            is not; the others are moved to `damaged` in the workdir.
        init_from: the workdir of an older run, or WORKDIR/checkpoints/STEP in it, whose model is
            started from where `workdir` has no checkpoint yet; see `warm_start.start`.
        profile_steps: FIRST:LAST, steps to trace with the profiler; see `telemetry.profiler`.
            Empty: none.
        debug_batches: batches of so many last steps are written where a loss is not finite or
            stands out; see `telemetry.debug_batches`. 0: none.

    Raises:
        InputError: config, data, workdir or `profile_steps` cannot be used.
        RunError: the loss is no longer finite, or a checkpoint or trace cannot be written.
        StoppedError: the program got SIGTERM or SIGINT; a checkpoint of the step in hand is saved.
    """
    began = time.perf_counter()
    directory = workdirs.directory(workdir)
    progress = Progress(quiet=quiet or not processes.is_first())

    def tell(text: str) -> None:
        if processes.is_first():
            progress.clear()
            report(text)

    check_config(config)
    traced = profile.parse(profile_steps)
    last = LastBatches(directory, debug_batches, config.steps_per_call)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.locked(directory))
        if not allow_config_change:
            workdirs.check_config(directory, config)
        job = jobs.build(config, directory, tell)
        stack.callback(job.checkpoints.close)
        stack.callback(job.batches.close)

        def new() -> TrainState:
            return start.start(job, init_from, tell) if init_from else job.program.init()

        state = jobs.start(
            job,
            new,
            allow_config_change=allow_config_change,
            allow_older_checkpoint=allow_older_checkpoint,
            report=tell,
        )
        workdirs.save(directory, config, job.schema, job.hot)
        workdirs.mark_finished(directory, False)  # not by a command that was refused
        described = jobs.describe(job, state)
        tell(described)

        writer = stack.enter_context(open_writer(directory, int(state.step)))
        stack.enter_context(contextlib.closing(progress))
        writer.text("config", str(config))
        writer.text("model", described)
        last.begin(int(state.step))
        newest = job.checkpoints.step()
        recorder = Recorder(
            writer,
            progress,
            last,
            tell,
            schema=job.schema,
            mesh=job.program.mesh,
            buffers=job.program.buffers,
            batch_size=config.batch_size,
            timetable=job.timetable,
            spikes=job.spikes,
            on_nonfinite=config.watch.on_nonfinite,
            most_skipped=config.watch.most_skipped,
            checkpoint="" if newest is None else job.checkpoints.directory(newest),
        )

        def put(batches: Batch) -> Batch:
            last.keep(batches)
            return meshes.put_batch(batches, job.program.mesh, leading=1)

        feed = stack.enter_context(contextlib.closing(Feed(job.batches, put)))
        with (
            Stop(job.program.largest, job.program.mesh) as stop,
            HangWatch(config.watch.hang_seconds) as watch,
            Profile(
                traced,
                directory,
                int(state.step),
                recorder.finish,
                tell,
                steps_per_call=config.steps_per_call,
                num_steps=job.timetable.num_steps,
            ) as profiler,
        ):
            state, scores = _loop(job, state, feed, writer, recorder, profiler, stop, watch, tell)
            job.checkpoints.wait()  # in here, for a signal would end the program and the save
            workdirs.mark_finished(directory, True)
        return _result(job, state, scores, recorder.examples_per_second, began)


def _loop(
    job: Job,
    state: TrainState,
    feed: Feed,
    writer: Writer,
    recorder: Recorder,
    profiler: Profile,
    stop: Stop,
    watch: HangWatch,
    report: Report,
) -> tuple[TrainState, dict[int, scoring.Scores]]:
    """Steps to the end; returns the last state, and the scores of the last evaluation and of the
    best one that this call made.

    Raises:
        StoppedError: asked to end before, by a signal.
    """
    timetable, monitor = job.timetable, job.monitor
    scores: dict[int, scoring.Scores] = {}
    step = int(state.step)
    while step < timetable.num_steps and not monitor.should_stop:
        if number := _caught_while_waiting(feed, stop):
            _tell_saving(step, number, report)
            recorder.finish()
            job.checkpoints.wait()
            if step and not job.checkpoints.is_there(step):
                _save(job, step, state, None, recorder)
            raise _stopped(job, step, number, recorder)
        profiler.start_if_due(step, state)
        with profiler.call(step):
            state, metrics = job.program.train(state, next(feed))
        step += job.config.steps_per_call

        # One call late: the devices are busy with the next one while the host writes.
        recorder.record_later(step, metrics)
        watch.alive()
        profiler.stop_if_due(step, state)
        last = step == timetable.num_steps
        split = timetable.evaluated(step)
        signal = stop.asked()
        if not split and not last and not signal and step % timetable.save_every:
            continue

        if signal and not last:
            _tell_saving(step, signal, report)
        recorder.finish()
        metric = None
        if split:
            scores[step] = _evaluate(job, state, step, split, writer, report)
            watch.alive()
            metric = _watched(job, split, scores[step])
            if monitor.update(step, metric):
                state = state._replace(rate_factor=state.rate_factor * monitor.rate_factor)
            scores = {at: scores[at] for at in (monitor.best_step, step) if at in scores}
        _save(job, step, state, metric, recorder)
        watch.alive()
        if signal and not last and not monitor.should_stop:
            raise _stopped(job, step, signal, recorder)
    return state, scores


def _caught_while_waiting(feed: Feed, stop: Stop) -> int:
    """The number of a signal that comes while the next batch does not; 0 when that is there.

    Of several processes none waits here: they learn of a signal together, after a call.
    """
    while processes.place()[1] == 1 and not feed.wait(_LOOK):
        if stop.caught:
            return stop.caught
    return 0


def _tell_saving(step: int, number: int, report: Report) -> None:
    report(
        f"{Signals(number).name}: saving step {step}; another one, a second later, ends it at once"
    )


def _save(job: Job, step: int, state: TrainState, metric: float | None, recorder: Recorder) -> None:
    if not job.program.is_finite(weights_of(state)):
        raise RunError(
            f"step {step}: parameters and tables must be finite after the update, and are not."
            f" The last good checkpoint is {recorder.checkpoint}."
        )
    jobs.save(job, step, state, metric)
    recorder.checkpoint = job.checkpoints.directory(step)


def _stopped(job: Job, step: int, number: int, recorder: Recorder) -> StoppedError:
    """When what was saved is whole."""
    job.checkpoints.wait()
    return StoppedError(
        f"stopped after step {step} of {job.timetable.num_steps} by {Signals(number).name}; the"
        f" same command resumes from {recorder.checkpoint}.",
        number,
    )


def _evaluate(
    job: Job, state: TrainState, step: int, split: str, writer: Writer, report: Report
) -> scoring.Scores:
    size = job.config.eval.batch_size
    scores = scoring.evaluate(job.program.predictor, weights_of(state), job.open_split(split), size)
    day = split.partition("/")[2] if job.timetable.next_days else ""
    if day:
        job.day_scores.add(step, day, scores.metrics)
    writer.write(step, by_name(scores.metrics), kind="valid", day=day)
    writer.flush()
    on = f", on {day}" if day else ""
    report(f"step {step}{on}: {in_short(scores.metrics)}")
    return scores


def _watched(job: Job, split: str, scores: scoring.Scores) -> float:
    """The monitored metric, that of process 0 in all: what depends on it must not differ.

    Raises:
        RunError: it is undefined, and something depends on it.
    """
    monitor = job.monitor
    metric = processes.from_first(scores.metrics[monitor.task][monitor.metric])
    if math.isnan(metric) and (monitor.stop_patience or monitor.rate_patience):
        raise RunError(
            f"eval.metric: {monitor.task}/{monitor.metric} must be defined to decide when to stop"
            f" or to lower the rates, but all labels of split {split!r} are equal or unknown."
            " Choose another metric or split."
        )
    return metric


def _result(
    job: Job,
    state: TrainState,
    scores: dict[int, scoring.Scores],
    examples_per_second: float,
    began: float,
) -> Result:
    """What the run comes to: its checkpoint, and how that scores; or how it did day by day."""
    step = job.checkpoints.step("best" if job.monitor.stop_patience else "newest")
    assert step is not None
    metrics: scoring.Metrics = {}
    reference = None
    by_day = job.day_scores.get_state() if job.timetable.next_days else []
    if by_day:
        metrics = days.mean([score["metrics"] for score in by_day])
        reference = days.references(job.store, job.config.data.train, by_day)
    elif job.timetable.valid:
        metrics = (scores.get(step) or _scores(job, state, step)).metrics
        reference = scoring.reference(job.open_split(job.timetable.valid), job.schema)
    return Result(
        step=int(state.step),
        examples_per_second=examples_per_second,
        seconds=time.perf_counter() - began,
        metrics=metrics,
        best_possible=reference.best_possible if reference else None,
        constant=reference.constant if reference else None,
        checkpoint=job.checkpoints.directory(step),
        checkpoint_step=step,
        days=by_day,
    )


def _scores(job: Job, state: TrainState, step: int) -> scoring.Scores:
    """Scores the checkpoint of `step`, which this run did not score itself."""
    weights = weights_of(state)
    if step != int(state.step):
        predictor = job.program.predictor
        weights = job.checkpoints.restore_weights(
            step, predictor.weights_shape, predictor.weights_sharding
        )
    split = job.open_split(job.timetable.valid)
    return scoring.evaluate(job.program.predictor, weights, split, job.config.eval.batch_size)
