"""The training loop: reads a batch, executes steps, records metrics and pauses when due.

`train` runs it, and `bench` measures it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import numpy as np

from jaxrank.run_schedule import execution_end
from jaxrank.runtime import processes
from jaxrank.runtime.stop import Asked, ShutdownSignal
from jaxrank.runtime.watchdog import Watchdog
from jaxrank.step import StepMetrics, TrainState
from jaxrank.telemetry.profiler import Profile

_LOOK = 1.0  # seconds between checks for a signal while the loop waits for input


class Records(Protocol):
    """Records the metrics of each execution; see `telemetry.recorder.Recorder`."""

    def record_later(self, step: int, count: int, metrics: StepMetrics) -> None:
        """Accepts the metrics of an execution and waits for the execution before it.

        step: the last step of the execution.
        count: number of its steps.
        """


class Milestones(Protocol):
    """Decides when the loop pauses and ends, and does the work of each pause."""

    def continues(self, step: int) -> bool:
        """Returns True if another execution follows `step`."""

    def save_is_due(self) -> bool:
        """Returns True once whenever it is time to save, as process 0 sees it."""

    def is_due(self, step: int, asked: Asked) -> bool:
        """Returns True if the loop pauses after `step`.

        asked: requests that all processes agree on.
        """

    def pause(self, step: int, state: TrainState, signal: int) -> TrainState:
        """Does the work that is due after `step` and returns the state to continue from.

        Raises:
            StoppedError: the run stops here because of the signal.
        """

    def interrupt(self, step: int, state: TrainState, signal: int) -> NoReturn:
        """Stops the run after `step` because of a signal that arrived while no batch was ready.

        Raises:
            StoppedError: always.
        """


@dataclasses.dataclass(frozen=True)
class Session:
    """Functions and objects that the loop of a started run uses.

    train: (state, batches of an execution, number of steps) -> (state, metrics); see
        `CompiledSteps`.
    steps_per_execution, num_steps: of the run; see `run_schedule.execution_end`.
    feed: batches on the devices. With a `stop` it must be a `runtime.prefetch.DevicePrefetcher`.
    stop: records signals. None: signals end the program.
    """

    train: Callable[[TrainState, Any, np.int32], tuple[TrainState, StepMetrics]]
    steps_per_execution: int
    num_steps: int
    feed: Iterator[Any]
    recorder: Records
    milestones: Milestones
    profiler: Profile
    watch: Watchdog
    stop: ShutdownSignal | None


def run(session: Session, state: TrainState) -> TrainState:
    """Trains from `state` to the end and returns the last state.

    Raises:
        StoppedError: a signal stopped the run before its end.
    """
    milestones, stop = session.milestones, session.stop
    step = int(state.step)
    while milestones.continues(step):
        if stop and (signal := _caught_while_waiting(session.feed, stop)):
            milestones.interrupt(step, state, signal)
        session.profiler.start_if_due(step, state)
        end = execution_end(step, session.num_steps, session.steps_per_execution)
        count, step = end - step, end
        with session.profiler.execution(step):
            state, metrics = session.train(state, next(session.feed), np.int32(count))

        # Metrics are read one execution late, so that the devices compute while the host writes.
        session.recorder.record_later(step, count, metrics)
        session.watch.alive()
        session.profiler.stop_if_due(step, state)
        asked = stop.asked(milestones.save_is_due()) if stop else Asked()
        if milestones.is_due(step, asked):
            state = milestones.pause(step, state, asked.signal)
    return state


def _caught_while_waiting(feed: Any, stop: ShutdownSignal) -> int:
    """Returns the number of a signal that arrives before the next batch; 0 if the batch is ready.

    Several processes do not wait here, because they agree on a signal after an execution.
    """
    while processes.place()[1] == 1 and not feed.wait(_LOOK):
        if stop.caught:
            return stop.caught
    return 0
