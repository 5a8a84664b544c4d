"""Measures the speed of input and step, alone and together, and finds the part that limits.

Input alone makes batches with the config's threads and workers. The step alone gets the same batch
again and again. Both is the loop of `train`, without recording, evaluation and saving. The stages
of the input are measured again one by one, on one thread, to find the one that costs most.
"""

import contextlib
import dataclasses
import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
from ml_collections import ConfigDict

from jaxrank import loop
from jaxrank import mesh as meshes
from jaxrank import run as runs
from jaxrank.bench import input_stages
from jaxrank.bench.advice import Setting, Throughput, find_limit, recommend
from jaxrank.config import Data
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

COMPILED = 2  # executions until the program is compiled and its arrays have their final place
_ROUND = 2.0  # seconds of step and of both, per round


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
    with runs.build_measured(config, workdir, report) as run:
        data, size = run.builder.data, run.program.shape.batch_size
        ahead = _ahead(run.steps_per_execution, data.prefetch_batches)
        execution = run.steps_per_execution * size
        put = functools.partial(meshes.put_batch, mesh=run.program.mesh, leading=1)
        report("Measuring the input")
        input_speed = executions_per_second(run.batches, ahead, seconds)
        host = next(run.batches)
        report("Measuring the step, and both")
        with contextlib.closing(DevicePrefetcher(run.batches, put)) as feed:
            meter = StepMeter(run)
            rounds = _compare(meter, put(host), feed, ahead, ahead / input_speed, seconds)
        run.batches.close()
        alone, both = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        rates = Throughput(execution * input_speed, execution * alone, execution * both)

        report("Measuring the stages")
        stages = _input_stages(run, data, 0.8 * seconds)
        stages["transfer"] = 1e6 / execution / _puts_per_second(put, host, 0.2 * seconds)
        stages["step"] = 1e6 / rates.step
        limit = find_limit(rates, stages)
        return Bench(
            rates=rates,
            stages=stages,
            limit=limit,
            advice=recommend(limit, rates, stages, _setting(run, data)),
            device=f"{run.program.mesh.size} x {jax.devices()[0].device_kind}",
            batch_size=size,
        )


def input_rate(run: Run, *, seconds: float) -> float:
    """Measures the input alone, in examples/s. Compiles nothing.

    Args:
        run: without end.
        seconds: see `bench`.
    """
    ahead = _ahead(run.steps_per_execution, run.builder.data.prefetch_batches)
    rate = executions_per_second(run.batches, ahead, seconds)
    return run.steps_per_execution * run.program.shape.batch_size * rate


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
        seconds: minimum duration of the executions after these.
        least: minimum number of the executions after these.
    """

    def __init__(self, warm: int, seconds: float, least: int = 1):
        self._warm, self._seconds, self._least = warm, seconds, least
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
        is_short = self._executions < self._warm + self._least
        return is_short or self._now - self._started < self._seconds

    def save_is_due(self) -> bool:
        return False

    def is_due(self, step: int, asked: Asked) -> bool:
        return False

    def pause(self, step: int, state: TrainState, signal: int) -> TrainState:
        raise AssertionError("nothing is due")

    def interrupt(self, step: int, state: TrainState, signal: int) -> NoReturn:
        raise AssertionError("no signal is handled")


class StepMeter:
    """Trains an endless run in the loop of `train`, with a clock in place of what writes or
    listens.
    """

    def __init__(self, run: Run):
        self._run, self._state = run, run.program.init()

    def executions_per_second(self, batches: Iterator[Any], clock: Clock) -> float:
        """Trains on batches until the clock stops. The state continues in the next call."""
        state = loop.run(self._session(batches, clock), self._state)
        self._state = jax.block_until_ready(state)
        return clock.executions_per_second

    def _session(self, batches: Iterator[Any], clock: Clock) -> loop.Session:
        run = self._run
        length = dict(
            steps_per_execution=run.steps_per_execution, num_steps=run.run_schedule.num_steps
        )
        return loop.Session(
            train=run.program.train,
            feed=batches,
            recorder=clock,
            milestones=clock,
            profiler=Profile(None, run.directory, 0, lambda: None, print, **length),
            watch=Watchdog(0),
            stop=None,
            **length,
        )


def _compare(
    meter: StepMeter, batch: Any, feed: Iterator[Any], ahead: int, pause: float, seconds: float
) -> list[tuple[float, float]]:
    """Measures executions/s with one repeated batch, and with the batches of `feed`, by round.

    The two alternate, because the load of the machine varies over time.

    Args:
        ahead: number of executions whose batches may have been prefetched.
        pause: seconds until the input has prefetched all that it can.
        seconds: for each of the two, over all rounds.
    """
    rounds = max(3, round(seconds / _ROUND))
    again = itertools.repeat(batch)
    meter.executions_per_second(again, Clock(COMPILED, 0))
    speeds = []
    for _ in range(rounds):
        time.sleep(pause)
        alone = meter.executions_per_second(again, Clock(1, seconds / rounds))
        both = meter.executions_per_second(feed, Clock(ahead, seconds / rounds))
        speeds.append((alone, both))
    return speeds


def _input_stages(run: Run, data: Data, seconds: float) -> dict[str, float]:
    on_one_thread = dataclasses.replace(data, num_workers=0, prefetch_batches=0)
    program = run.program

    def make(split: Split) -> Any:
        return runs.make_batches(
            on_one_thread,
            run.builder.pack(split),
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
    return executions_per_second(transfers, COMPILED, seconds)


def _setting(run: Run, data: Data) -> Setting:
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
