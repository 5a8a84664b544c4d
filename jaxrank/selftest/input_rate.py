"""Compares the rate of the input with the rate of the step."""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from jaxrank import mesh as meshes
from jaxrank.bench.measure import COMPILED, Clock, StepMeter, input_rate
from jaxrank.run import Run
from jaxrank.runtime import processes, threads
from jaxrank.runtime.prefetch import DevicePrefetcher
from jaxrank.selftest.check import Verdict, passes

# Fractions of the step's rate. Where the cores are the devices, input and step share them.
_BOTH = 0.9
_INPUT = 1.2


def check(run: Run, seconds: float) -> Verdict:
    """Fails if the step waits for the input.

    Args:
        seconds: duration of each of the three measurements.
    """
    mesh, execution = run.program.mesh, run.steps_per_execution * run.program.shape.batch_size
    put = functools.partial(meshes.put_batch, mesh=mesh, leading=1)
    meter = StepMeter(run)
    batch = put(next(run.batches))
    alone = execution * _executions_per_second(meter, itertools.repeat(batch), seconds)
    read = min(processes.gather_values(input_rate(run, seconds=seconds)))
    with contextlib.closing(DevicePrefetcher(run.batches, put)) as feed:
        both = execution * _executions_per_second(meter, feed, seconds)
    return verdict(read, alone, both, on_host=meshes.platform(mesh) == "cpu")


def verdict(read: float, step: float, both: float, *, on_host: bool) -> Verdict:
    """Judges rates in examples/s.

    Args:
        on_host: the cores that make batches are also the devices.
    """
    enough = both >= _BOTH * step or (on_host and read >= _INPUT * step)
    finding = f"input {read:,.0f} examples/s, step {step:,.0f}, both together {both:,.0f}"
    cores = threads.available_cores()
    if on_host:
        advice = (
            f"Input and step share the {cores} cores of a process, so more processes for the input"
            " (data.num_workers) take cores from the step. Stop other programs on the host, give"
            f" each process more than {cores} cores, or put data on a faster disk."
        )
    else:
        advice = (
            f"Give each process more than {cores} cores, put data on a faster disk, or set"
            " data.num_workers in your config, which by default uses half of the cores at most."
        )
    bench = "`jaxrank bench` on your own config names the stage that limits."
    return passes(enough, finding, f"{advice} {bench}")


def _executions_per_second(meter: StepMeter, batches: Iterator[Any], seconds: float) -> float:
    """Returns the rate of the slowest process.

    All processes execute equally often, because their steps exchange rows.
    """

    def timed(count: int) -> float:
        clock = Clock(COMPILED, 0, least=count)
        return min(processes.gather_values(meter.executions_per_second(batches, clock)))

    return timed(max(2, int(seconds * timed(2))))
