"""Compares the rate of the input with the rate of the step."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxrank import mesh as meshes
from jaxrank.bench.measure import executions_per_second
from jaxrank.run import Run
from jaxrank.runtime import processes, threads
from jaxrank.runtime.prefetch import DevicePrefetcher
from jaxrank.selftest.check import Verdict, passes

# Fractions of the step's rate. Where the cores are the devices, input and step share them.
_BOTH = 0.9
_INPUT = 1.2
_WARM = 2  # executions until programs are compiled and arrays have their final place


def check(run: Run, seconds: float) -> Verdict:
    """Fails if the step waits for the input.

    Args:
        seconds: duration of each of the three measurements.
    """
    mesh, execution = run.program.mesh, run.steps_per_execution * run.config.batch_size
    batches = run.batches
    host = next(batches)
    on_devices = meshes.put_batch(host, mesh, leading=1)
    state = run.program.init(run.base_rates)

    def step(batch: Any) -> None:
        nonlocal state
        count = np.int32(run.steps_per_execution)
        state, metrics = run.program.train(state, batch, count)
        jax.block_until_ready(metrics.loss)

    alone = execution / _seconds(step, itertools.repeat(on_devices), seconds)
    ahead = -(-run.config.data.prefetch_batches // run.steps_per_execution) + 1
    read = execution * min(processes.gather_values(executions_per_second(batches, ahead, seconds)))
    feed = DevicePrefetcher(batches, lambda b: meshes.put_batch(b, mesh, leading=1))
    try:
        both = execution / _seconds(step, feed, seconds)
    finally:
        feed.close()
    return verdict(read, alone, both, on_host=meshes.platform(mesh) == "cpu")


def verdict(read: float, step: float, both: float, *, on_host: bool) -> Verdict:
    """Judges rates in examples/s.

    Args:
        on_host: the cores that make batches are also the devices.
    """
    enough = both >= _BOTH * step or (on_host and read >= _INPUT * step)
    cores = threads.available_cores()
    return passes(
        enough,
        f"input {read:,.0f} examples/s, step {step:,.0f}, both together {both:,.0f}",
        f"Give each process more than {cores} cores, put data on a faster disk, or set"
        " data.num_workers. `jaxrank bench` on your own config names the stage that limits.",
    )


def _seconds(function: Callable[[Any], None], batches: Iterator[Any], seconds: float) -> float:
    """Returns the seconds per execution, of the slowest process.

    All processes execute equally often, because their steps exchange rows.
    """

    def timed(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            function(next(batches))
        return (time.perf_counter() - started) / count

    timed(_WARM)
    rate = max(processes.gather_values(timed(_WARM)))
    return max(processes.gather_values(timed(max(2, int(seconds / max(rate, 1e-6))))))
