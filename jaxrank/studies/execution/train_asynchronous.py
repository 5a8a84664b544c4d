"""A run that trains asynchronously, see `asynchronous`, and evaluates at its end."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import mesh as meshes
from jaxrank import run as runs
from jaxrank.batch_statistics import reestimated
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.report import flatten_metrics
from jaxrank.features import Batch
from jaxrank.report import Report
from jaxrank.run import Run
from jaxrank.runtime.prefetch import DevicePrefetcher
from jaxrank.step import TrainState, prediction_weights
from jaxrank.studies.execution.asynchronous import AsynchronousSteps, places, worker_order
from jaxrank.warm_start.pretrained import start_vectors


class Trained(NamedTuple):
    """Result of an asynchronous run.

    state: after the last push.
    staleness: i32[pushes].
    examples_per_second: of training, without the first execution.
    metrics: {"task/metric": value} of the validation split.
    """

    state: TrainState
    staleness: np.ndarray
    examples_per_second: float
    metrics: dict[str, float]


def train(
    config: ConfigDict, directory: Path, *, workers: int, schedule_seed: int, report: Report
) -> Trained:
    """Trains from the start of a run to its end. It writes no checkpoints.

    Each of the batches of the synchronous run is pushed once. The last evaluation is the only one:
    early stopping and the rates that it reduces do not apply.

    Raises:
        InputError: the config is invalid, has several devices, or fewer steps than workers.
        RunError: the loss is not finite.
    """
    configs.check(config)
    with contextlib.ExitStack() as stack:
        run = runs.build(config, directory, report)
        stack.callback(run.checkpoints.close)
        stack.callback(run.batches.close)
        if not 1 <= workers <= run.run_schedule.num_steps:
            raise InputError(
                "workers: must be at least 1 and at most the number of steps, which is"
                f" {run.run_schedule.num_steps}: found {workers}."
            )

        def put(batches: Batch) -> Batch:
            return meshes.put_batch(batches, run.program.mesh, leading=1)

        feed = stack.enter_context(contextlib.closing(DevicePrefetcher(run.batches, put)))
        pushes = _Pushes(run, workers, schedule_seed)
        state = pushes.run(start_vectors(run, run.first_state(report), report), feed)
        state = reestimated(run.program, run.recent_batches, pushes.num_steps, state)
        split = run.open_split(run.run_schedule.valid)
        scores = scoring.evaluate(
            run.program.predictor,
            prediction_weights(state),
            split,
            run.eval_batch_size,
            requests=run.requests,
        )
        staleness = np.concatenate(pushes.staleness)
        return Trained(state, staleness, pushes.rate(), flatten_metrics(scores.metrics))


def staleness_summary(staleness: np.ndarray) -> Mapping[str, Any]:
    """Returns mean, maximum and histogram. Entry i of that counts the pushes of staleness i."""
    return {
        "mean": float(staleness.mean()),
        "max": int(staleness.max()),
        "histogram": np.bincount(staleness).tolist(),
    }


class _Pushes:
    """All pushes of a run.

    Event j consists of push j - W and the pull of batch j, each if it exists. So the first W events
    only pull, and the last W only push, whose pulls of an old batch have no effect.
    """

    def __init__(self, run: Run, workers: int, schedule_seed: int):
        self.num_steps = run.run_schedule.num_steps
        self.staleness: list[np.ndarray] = []
        self._run, self._workers = run, workers
        self._steps = AsynchronousSteps(run.program, workers)
        self._places = places(worker_order(schedule_seed, workers, self.num_steps), workers)
        self._averages = bool(run.program.step_spec.ema_decay)
        self._times: list[tuple[int, float]] = []  # (pushes, time) after each execution
        self._pending: Any = None

    def run(self, state: TrainState, feed: Iterator[Batch]) -> TrainState:
        size, batches, in_flight = self._run.steps_per_execution, None, None
        skipped = pushed = 0
        for first in range(0, self.num_steps + self._workers, size):
            if first < self.num_steps:
                batches = next(feed)
            assert batches is not None
            in_flight = in_flight or self._steps.empty(state, batches)
            pulls = max(0, min(self._workers - first, size))
            if pulls:
                in_flight = self._steps.fill(
                    state, in_flight, batches, np.int32(first), np.int32(0), np.int32(pulls)
                )
            for start, stop in self._parts(first, pulls, size):
                push = first + start - self._workers
                read_write = np.zeros((2, size), np.int32)
                for i, of_pushes in enumerate(self._places):
                    read_write[i, start:stop] = of_pushes[push : push + stop - start]
                state, in_flight, metrics = self._steps.train(
                    state, in_flight, batches, *read_write, np.int32(start), np.int32(stop)
                )
                self._read_later(push, start, stop, metrics)
                skipped = skipped + metrics[0].skipped.sum()
                pushed += stop - start
                done = push + stop - start
                if self._averages and (done % size == 0 or done == self.num_steps):
                    state = self._steps.average(state, skipped, np.int32(pushed))
                    skipped = pushed = 0
        self._read()
        return state

    def rate(self) -> float:
        """Returns examples/s after the first execution; 0 if there is only one."""
        (first, started), (last, ended) = self._times[0], self._times[-1]
        examples = (last - first) * self._run.program.shape.batch_size
        return examples / (ended - started) if last > first else 0.0

    def _parts(self, first: int, pulls: int, size: int) -> list[tuple[int, int]]:
        """Returns the (start, stop) of an execution's pushes, divided where an average is due."""
        stop = min(size, self.num_steps + self._workers - first)
        cut = (self._workers - first) % size  # push number start + first - W is a multiple of size
        ends = [cut, stop] if self._averages and pulls < cut < stop else [stop]
        starts = [pulls, *ends[:-1]]
        return [(a, b) for a, b in zip(starts, ends, strict=True) if a < b]

    def _read_later(self, push: int, start: int, stop: int, metrics: Any) -> None:
        """Reads the metrics of the execution before this one, so that the devices never wait."""
        self._read()
        self._pending = push, start, stop, metrics

    def _read(self) -> None:
        if self._pending is None:
            return
        push, start, stop, (metrics, staleness) = self._pending
        losses = np.asarray(metrics.loss)[start:stop]
        self.staleness.append(np.asarray(staleness)[start:stop])
        self._times.append((push + stop - start, time.perf_counter()))
        skips = self._run.program.step_spec.skips
        bad = np.flatnonzero(~np.isfinite(losses))
        if bad.size and not skips:
            at = int(bad[0])
            raise RunError(
                f"the loss must be finite: found {losses[at]} at push {push + at}. Lower the"
                " learning rates."
            )
        self._pending = None
