"""Measures the rate of simulated asynchronous training against that of synchronous steps.

    python -m benchmarks.step.asynchronous --shape quickstart --workers 56

Both train the model of `data.py` in turn, in one process, on the same batches in memory. Prints the
ratio of the rates of each round by wall time and by CPU time, which other programs disturb less,
the medians and the memory of the batches in flight.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import positive
from benchmarks.step import data
from benchmarks.step.cpu import build_run
from jaxrank.runtime import huge_pages

_PUSHES = 2**18  # more than a measurement makes


def synchronous(job: Any, batches: list[Any]) -> Iterator[None]:
    import jax

    state, size = job.program.init(), np.int32(job.steps_per_execution)
    while True:
        for batch in batches:
            state, metrics = job.program.train(state, batch, size)
            jax.block_until_ready(metrics)
            yield


def asynchronous(job: Any, batches: list[Any], workers: int) -> Iterator[None]:
    import jax

    from jaxrank.studies.execution.asynchronous import AsynchronousSteps, places, worker_order

    program, size = AsynchronousSteps(job.program, workers), job.steps_per_execution
    state = job.program.init()
    in_flight = program.empty(state, batches[0])
    for first in range(0, workers, size):
        pulls = np.int32(min(size, workers - first))
        in_flight = program.fill(state, in_flight, batches[0], np.int32(first), np.int32(0), pulls)
    used = sum(x.nbytes for x in jax.tree.leaves(in_flight))
    print(f"batches in flight of {workers} workers: {used / 2**20:,.0f} MiB", flush=True)
    order = worker_order(0, workers, _PUSHES // size * size)
    parts = [x.reshape(-1, size) for x in places(order, workers)]
    turns = zip(itertools.cycle(batches), *parts, strict=False)
    for batch, read, write in turns:
        state, in_flight, metrics = program.train(
            state, in_flight, batch, read, write, np.int32(0), np.int32(size)
        )
        jax.block_until_ready(metrics)
        yield


def rates(steps: Iterator[None], seconds: float) -> tuple[float, float]:
    """Returns executions per second of wall time and of CPU time."""
    count, wall, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < seconds:
        next(steps)
        count += 1
    return count / (time.perf_counter() - wall), count / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[*data.SHAPES, data.MAIN_JOB], default=data.MAIN_JOB)
    parser.add_argument("--workers", type=positive, default=56)
    parser.add_argument("--rounds", type=positive, default=8)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the two in a round")
    args = parser.parse_args()
    huge_pages.ensure()
    with tempfile.TemporaryDirectory() as folder:
        job, batches = build_run(args.shape, Path(folder), "highest")
        both = synchronous(job, batches), asynchronous(job, batches, args.workers)
        for steps in both:
            next(steps)
        examples = job.steps_per_execution * job.program.shape.batch_size
        ratios: list[tuple[float, float]] = []
        for number in range(args.rounds):
            each: dict[int, tuple[float, float]] = {}
            for side in (0, 1) if number % 2 else (1, 0):
                each[side] = rates(both[side], args.seconds)
            ratios.append((each[1][0] / each[0][0], each[1][1] / each[0][1]))
            print(
                f"synchronous {examples * each[0][0]:,.0f} examples/s, asynchronous"
                f" {examples * each[1][0]:,.0f}: {ratios[-1][0]:.3f} of the wall time's rate,"
                f" {ratios[-1][1]:.3f} of the CPU time's",
                flush=True,
            )
        for name, values in zip(("wall", "CPU"), zip(*ratios, strict=True), strict=True):
            low, high = min(values), max(values)
            print(f"{name}: median {statistics.median(values):.3f}, {low:.3f} to {high:.3f}")


if __name__ == "__main__":
    main()
