"""How fast input and step are alone and together, and which part of them limits.

Input alone makes batches with the config's threads and workers; the step alone has one batch fed
again and again; both is the loop of `train`, where nothing is recorded, evaluated or saved. The
parts of the input are measured once more one after another, on one thread, to say which of them
costs most.
"""

import contextlib
import functools
import itertools
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import loop
from jaxrank import mesh as meshes
from jaxrank import run as jobs
from jaxrank.bench import input_stages
from jaxrank.bench.advice import Setting, Throughput, advice_on, limit_of
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.report import Report
from jaxrank.run import Run
from jaxrank.runtime import processes
from jaxrank.runtime.prefetch import AHEAD, DevicePrefetcher
from jaxrank.runtime.watchdog import Watchdog
from jaxrank.step import StepMetrics, TrainState
from jaxrank.telemetry.profiler import Profile
from jaxrank.workdir import files as workdirs
from jaxrank.workdir import lock

_COMPILED = 2  # executions after which a program is compiled and its arrays are where they stay
_ROUND = 2.0  # seconds of step and of both in turn
_MOST_STEPS = 2**30


class Bench(NamedTuple):
    """What was measured.

    rates: of input, step and both, examples a second.
    stages: seconds for a million examples, each alone; all but the step on one thread.
    limit: the stage that bounds `both`.
    advice: the setting to change, and why.
    device: how many of what.
    batch_size: examples of a step.
    """

    rates: Throughput
    stages: dict[str, float]
    limit: str
    advice: str
    device: str
    batch_size: int


def bench(config: ConfigDict, workdir: str | Path, *, seconds: float, report: Report) -> Bench:
    """Measures the job that `train` would run; of a run in `workdir` it changes nothing.

    Args:
        config: see `config.default`.
        workdir: whose data is read, and prepared first if need be.
        seconds: that input, step, both, and the stages together take; each also warms up.
        report: gets a line for each thing worth telling.

    Raises:
        InputError: as `train`; more than one process.
    """
    if processes.place()[1] > 1:
        raise InputError(f"bench measures one process: found {processes.place()[1]}.")
    if not 0 < seconds < float("inf"):
        raise InputError(f"--seconds must be a positive number: found {seconds}.")
    directory = workdirs.directory(workdir)
    config = _unevaluated(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock.locked(directory))  # no run uses the workdir meanwhile
        most = _MOST_STEPS // config.steps_per_execution * config.steps_per_execution
        job = jobs.build(config, directory, report, inherits_store=True, num_steps=most)
        stack.callback(job.batches.close)
        job.checkpoints.close()
        ahead = _ahead(config.steps_per_execution, config.data.prefetch_batches)
        execution = config.steps_per_execution * config.batch_size
        put = functools.partial(meshes.put_batch, mesh=job.program.mesh, leading=1)
        report("Measuring the input")
        made = executions_per_second(job.batches, ahead, seconds)
        host = next(job.batches)
        report("Measuring the step, and both")
        with contextlib.closing(DevicePrefetcher(job.batches, put)) as feed:
            rounds = _compare(job, put(host), feed, ahead, ahead / made, seconds)
        job.batches.close()
        alone, both = (statistics.median(rates) for rates in zip(*rounds, strict=True))
        rates = Throughput(execution * made, execution * alone, execution * both)

        report("Measuring the stages")
        stages = _input_stages(job, config.data, 0.8 * seconds)
        stages["transfer"] = 1e6 / execution / _puts_per_second(put, host, 0.2 * seconds)
        stages["step"] = 1e6 / rates.step
        limit = limit_of(rates, stages)
        return Bench(
            rates=rates,
            stages=stages,
            limit=limit,
            advice=advice_on(limit, rates, stages, _setting(job, config.data)),
            device=f"{job.program.mesh.size} x {jax.devices()[0].device_kind}",
            batch_size=config.batch_size,
        )


def _unevaluated(config: ConfigDict) -> ConfigDict:
    """The same job without evaluation."""
    configs.check(config)
    config = config.copy_and_resolve_references()
    config.data.valid = ""
    config.eval.early_stopping_patience = config.eval.reduce_lr_patience = 0
    return config


def executions_per_second(batches: Iterator[Any], warm: int, seconds: float) -> float:
    """How often `next` gives something, after it was called `warm` times."""
    for _ in range(warm):
        next(batches)
    began = time.perf_counter()
    for executions in itertools.count(1):
        next(batches)
        took = time.perf_counter() - began
        if took >= seconds:
            return executions / took
    raise AssertionError


def _ahead(steps_per_execution: int, prefetch_batches: int) -> int:
    """Calls whose batches may have been made while nobody asked for them."""
    return AHEAD + -(-prefetch_batches // steps_per_execution) + 1


class Clock:
    """Ends the loop after some time and measures it, in place of a run's recorder and milestones.

    Args:
        warm: executions that are not measured.
        seconds: that the executions after these take at least; there is one of them.
    """

    def __init__(self, warm: int, seconds: float):
        self._warm, self._seconds = warm, seconds
        self._executions = 0
        self._began = self._now = 0.0
        self._before: StepMetrics | None = None

    @property
    def executions_per_second(self) -> float:
        return (self._executions - self._warm) / (self._now - self._began)

    def record_later(self, step: int, count: int, metrics: StepMetrics) -> None:
        # As the recorder does, the host waits for the execution before while this one is in the
        # queue.
        jax.block_until_ready(self._before)
        self._before, self._now = metrics, time.perf_counter()
        self._executions += 1
        if self._executions == self._warm:
            self._began = self._now

    def goes_on(self, step: int) -> bool:
        return self._executions <= self._warm or self._now - self._began < self._seconds

    def is_due(self, step: int, signal: int) -> bool:
        return False

    def pause(self, step: int, state: TrainState, signal: int) -> TrainState:
        raise AssertionError("nothing is due")

    def interrupt(self, step: int, state: TrainState, signal: int) -> NoReturn:
        raise AssertionError("nobody listens for signals")


def _session(job: Run, batches: Iterator[Any], clock: Clock) -> loop.Session:
    """That of `train`, with a clock in place of all that a run writes and listens to."""
    execution = job.steps_per_execution
    profiler = Profile(
        None,
        job.directory,
        0,
        lambda: None,
        print,
        steps_per_execution=execution,
        num_steps=_MOST_STEPS,
    )
    return loop.Session(
        train=job.program.train,
        steps_per_execution=execution,
        num_steps=_MOST_STEPS,
        feed=batches,
        recorder=clock,
        milestones=clock,
        profiler=profiler,
        watch=Watchdog(0),
        stop=None,
    )


def _compare(
    job: Run, batch: Any, feed: Iterator[Any], ahead: int, pause: float, seconds: float
) -> list[tuple[float, float]]:
    """Calls a second with one batch again and again, and with those of `feed`, by round.

    In turn, for whatever else the machine does comes and goes.

    Args:
        ahead: executions whose batches may have been made while nobody asked for them.
        pause: seconds in which the input has made all that it makes ahead.
        seconds: for each of the two, in all rounds.
    """
    state = job.program.init()

    def executions_per_second(batches: Iterator[Any], warm: int, seconds: float) -> float:
        nonlocal state
        clock = Clock(warm, seconds)
        state = jax.block_until_ready(loop.run(_session(job, batches, clock), state))
        return clock.executions_per_second

    rounds = max(3, round(seconds / _ROUND))
    again = itertools.repeat(batch)
    executions_per_second(again, _COMPILED, 0)
    found = []
    for _ in range(rounds):
        time.sleep(pause)
        alone = executions_per_second(again, 1, seconds / rounds)
        found.append((alone, executions_per_second(feed, ahead, seconds / rounds)))
    return found


def _input_stages(job: Run, data: Mapping[str, Any], seconds: float) -> dict[str, float]:
    on_one_thread = {**data, "num_workers": 0, "prefetch_batches": 0}
    program = job.program

    def make(split: Split) -> Any:
        return jobs.make_batches(
            on_one_thread,
            split,
            program.predictor.layout,
            batch_size=program.shape.batch_size,
            steps_per_execution=job.steps_per_execution,
            seed=program.step_spec.seed,
            num_steps=job.run_schedule.num_steps,
            room_steps=job.batches.room_steps,
        )

    execution = job.steps_per_execution * program.shape.batch_size
    return input_stages.measure(job.train_split, make, execution, seconds)


def _puts_per_second(put: Any, batch: Any, seconds: float) -> float:
    made = map(lambda b: jax.block_until_ready(put(b)), itertools.repeat(batch))
    return executions_per_second(made, _COMPILED, seconds)


def _setting(job: Run, data: ConfigDict) -> Setting:
    return Setting(
        cores=len(os.sched_getaffinity(0)),
        on_host=meshes.platform(job.program.mesh) == "cpu",
        batch_size=job.program.shape.batch_size,
        steps_per_execution=job.steps_per_execution,
        shards=data.shards,
        num_workers=data.num_workers,
        prefetch_batches=data.prefetch_batches,
        window_blocks=data.window_blocks,
        compression=data.compression,
        direct=data.direct,
    )
