"""Measures the speed of input and step, alone and together, and finds the part that limits.

Input alone makes batches with the config's threads and workers. The step alone gets the same batch
again and again. Both is the loop of `train`, without recording, evaluation and saving. The stages
of the input are measured again one by one, on one thread, to find the one that costs most.
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import defaults, loop
from jaxrank import mesh as meshes
from jaxrank import run as runs
from jaxrank.bench import input_stages
from jaxrank.bench.advice import Setting, Throughput, find_limit, recommend
from jaxrank.build import pack_split
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.report import Report
from jaxrank.run import Run
from jaxrank.runtime import processes, threads
from jaxrank.runtime.prefetch import AHEAD, DevicePrefetcher
from jaxrank.runtime.stop import Asked
from jaxrank.runtime.watchdog import Watchdog
from jaxrank.step import StepMetrics, TrainState
from jaxrank.telemetry.profiler import Profile
from jaxrank.workdir import files as workdirs
from jaxrank.workdir import lock

_COMPILED = 2  # executions until the program is compiled and its arrays have their final place
_ROUND = 2.0  # seconds of step and of both, per round
_MAX_STEPS = 2**30


class Bench(NamedTuple):
    """The result of the benchmark.

    rates: of input, step and both, in examples/s.
    stages: seconds per million examples of each stage alone, on one thread except the step.
    limit: the stage that limits `both`.
    advice: the setting to change, and the reason.
    device: number and kind of devices.
    batch_size: examples per step.
    """

    rates: Throughput
    stages: dict[str, float]
    limit: str
    advice: str
    device: str
    batch_size: int


def bench(config: ConfigDict, workdir: str | Path, *, seconds: float, report: Report) -> Bench:
    """Measures the run that `train` would run. Changes nothing of a run in `workdir`.

    Args:
        config: see `config.default`.
        workdir: its data is read, and prepared first if necessary.
        seconds: duration of each of input, step, both and the stages, after a warm-up of each.
        report: gets lines to print.

    Raises:
        InputError: as `train`, or there are several processes.
    """
    if processes.place()[1] > 1:
        raise InputError(f"bench must run in one process: found {processes.place()[1]}.")
    if not 0 < seconds < float("inf"):
        raise InputError(f"--seconds: must be a positive number: found {seconds}.")
    with _built(config, workdir, report) as run:
        config = run.config
        ahead = _ahead(config.steps_per_execution, config.data.prefetch_batches)
        execution = config.steps_per_execution * config.batch_size
        put = functools.partial(meshes.put_batch, mesh=run.program.mesh, leading=1)
        report("Measuring the input")
        input_speed = executions_per_second(run.batches, ahead, seconds)
        host = next(run.batches)
        report("Measuring the step, and both")
        with contextlib.closing(DevicePrefetcher(run.batches, put)) as feed:
            rounds = _compare(run, put(host), feed, ahead, ahead / input_speed, seconds)
        run.batches.close()
        alone, both = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        rates = Throughput(execution * input_speed, execution * alone, execution * both)

        report("Measuring the stages")
        stages = _input_stages(run, config.data, 0.8 * seconds)
        stages["transfer"] = 1e6 / execution / _puts_per_second(put, host, 0.2 * seconds)
        stages["step"] = 1e6 / rates.step
        limit = find_limit(rates, stages)
        return Bench(
            rates=rates,
            stages=stages,
            limit=limit,
            advice=recommend(limit, rates, stages, _setting(run, config.data)),
            device=f"{run.program.mesh.size} x {jax.devices()[0].device_kind}",
            batch_size=config.batch_size,
        )


def input_rate(config: ConfigDict, workdir: str | Path, *, seconds: float, report: Report) -> float:
    """Measures the input alone, in examples/s. Compiles nothing. See `bench`."""
    with _built(config, workdir, report) as run:
        ahead = _ahead(run.steps_per_execution, run.config.data.prefetch_batches)
        rate = executions_per_second(run.batches, ahead, seconds)
        return run.steps_per_execution * run.config.batch_size * rate


@contextlib.contextmanager
def _built(config: ConfigDict, workdir: str | Path, report: Report) -> Iterator[Run]:
    """Builds the run of a run without evaluation and without end."""
    directory = workdirs.directory(workdir)
    config = _unevaluated(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.locked(directory))  # no run uses the workdir at the same time
        most = _MAX_STEPS // config.steps_per_execution * config.steps_per_execution
        if (directory / "config.json").is_file():
            config = defaults.inherit(config, workdirs.load_config(directory))
        run = runs.build(config, directory, report, inherits_store=True, num_steps=most)
        stack.callback(run.batches.close)
        run.checkpoints.close()
        yield run


def _unevaluated(config: ConfigDict) -> ConfigDict:
    """Returns the config without evaluation."""
    configs.check(config)
    config = config.copy_and_resolve_references()
    config.data.valid = ""
    config.eval.early_stopping_patience = config.eval.reduce_lr_patience = 0
    return config


def executions_per_second(batches: Iterator[Any], warm: int, seconds: float) -> float:
    """Measures the rate of `next`, after `warm` calls."""
    for _ in range(warm):
        next(batches)
    started = time.perf_counter()
    for executions in itertools.count(1):
        next(batches)
        took = time.perf_counter() - started
        if took >= seconds:
            return executions / took
    raise AssertionError


def _ahead(steps_per_execution: int, prefetch_batches: int) -> int:
    """Returns the number of executions whose batches may have been prefetched."""
    return AHEAD + -(-prefetch_batches // steps_per_execution) + 1


class Clock:
    """Stops the loop after some time and measures it, in place of a run's recorder and milestones.

    Args:
        warm: number of executions that are not measured.
        seconds: minimum duration of the executions after these, at least one.
    """

    def __init__(self, warm: int, seconds: float):
        self._warm, self._seconds = warm, seconds
        self._executions = 0
        self._started = self._now = 0.0
        self._before: StepMetrics | None = None

    @property
    def executions_per_second(self) -> float:
        return (self._executions - self._warm) / (self._now - self._started)

    def record_later(self, step: int, count: int, metrics: StepMetrics) -> None:
        # Like the recorder, the host waits for the previous execution while this one is in the
        # queue.
        jax.block_until_ready(self._before)
        self._before, self._now = metrics, time.perf_counter()
        self._executions += 1
        if self._executions == self._warm:
            self._started = self._now

    def continues(self, step: int) -> bool:
        return self._executions <= self._warm or self._now - self._started < self._seconds

    def save_is_due(self) -> bool:
        return False

    def is_due(self, step: int, asked: Asked) -> bool:
        return False

    def pause(self, step: int, state: TrainState, signal: int) -> TrainState:
        raise AssertionError("nothing is due")

    def interrupt(self, step: int, state: TrainState, signal: int) -> NoReturn:
        raise AssertionError("no signal is handled")


def _session(run: Run, batches: Iterator[Any], clock: Clock) -> loop.Session:
    """Makes the session of `train`, with a clock in place of everything that writes or listens."""
    execution = run.steps_per_execution
    profiler = Profile(
        None,
        run.directory,
        0,
        lambda: None,
        print,
        steps_per_execution=execution,
        num_steps=_MAX_STEPS,
    )
    return loop.Session(
        train=run.program.train,
        steps_per_execution=execution,
        num_steps=_MAX_STEPS,
        feed=batches,
        recorder=clock,
        milestones=clock,
        profiler=profiler,
        watch=Watchdog(0),
        stop=None,
    )


def _compare(
    run: Run, batch: Any, feed: Iterator[Any], ahead: int, pause: float, seconds: float
) -> list[tuple[float, float]]:
    """Measures executions/s with one repeated batch, and with the batches of `feed`, by round.

    The two alternate, because the load of the machine varies over time.

    Args:
        ahead: number of executions whose batches may have been prefetched.
        pause: seconds until the input has prefetched all that it can.
        seconds: for each of the two, over all rounds.
    """
    state = run.program.init()

    def executions_per_second(batches: Iterator[Any], warm: int, seconds: float) -> float:
        nonlocal state
        clock = Clock(warm, seconds)
        state = jax.block_until_ready(loop.run(_session(run, batches, clock), state))
        return clock.executions_per_second

    rounds = max(3, round(seconds / _ROUND))
    again = itertools.repeat(batch)
    executions_per_second(again, _COMPILED, 0)
    speeds = []
    for _ in range(rounds):
        time.sleep(pause)
        alone = executions_per_second(again, 1, seconds / rounds)
        speeds.append((alone, executions_per_second(feed, ahead, seconds / rounds)))
    return speeds


def _input_stages(run: Run, data: Mapping[str, Any], seconds: float) -> dict[str, float]:
    on_one_thread = {**data, "num_workers": 0, "prefetch_batches": 0}
    program = run.program

    def make(split: Split) -> Any:
        return runs.make_batches(
            on_one_thread,
            pack_split(run.config, split),
            program.predictor.layout,
            batch_size=program.shape.batch_size,
            steps_per_execution=run.steps_per_execution,
            seed=program.step_spec.seed,
            num_steps=run.run_schedule.num_steps,
            room_steps=run.batches.room_steps,
        )

    execution = run.steps_per_execution * program.shape.batch_size
    return input_stages.measure(run.train_split, make, execution, seconds)


def _puts_per_second(put: Any, batch: Any, seconds: float) -> float:
    transfers = map(lambda b: jax.block_until_ready(put(b)), itertools.repeat(batch))
    return executions_per_second(transfers, _COMPILED, seconds)


def _setting(run: Run, data: ConfigDict) -> Setting:
    return Setting(
        cores=threads.available_cores(),
        on_host=meshes.platform(run.program.mesh) == "cpu",
        batch_size=run.program.shape.batch_size,
        steps_per_execution=run.steps_per_execution,
        shards=data.shards,
        num_workers=run.batches.num_workers,
        prefetch_batches=data.prefetch_batches,
        window_blocks=data.window_blocks,
        compression=data.compression,
        direct=data.direct,
    )
