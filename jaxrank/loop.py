"""The loop: a batch, an execution of steps, a record, and a pause where one is due.

`train` runs it for a run, and `bench` measures it.
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

_LOOK = 1.0  # seconds between looks at whether a signal has come while the input does not


class Records(Protocol):
    """Takes the metrics of each execution, as `telemetry.recorder.Recorder`."""

    def record_later(self, step: int, count: int, metrics: StepMetrics) -> None:
        """Takes the call of `count` steps that ends at `step` and waits for the execution before
        it."""


class Milestones(Protocol):
    """When the loop pauses and ends, and what is done then."""

    def goes_on(self, step: int) -> bool:
        """Whether there is another execution after `step`."""

    def save_is_due(self) -> bool:
        """Whether it is time to save, as process 0 sees it; once for each time."""

    def is_due(self, step: int, asked: Asked) -> bool:
        """Whether the loop pauses after `step`.

        asked: what all processes have learned together.
        """

    def pause(self, step: int, state: TrainState, signal: int) -> TrainState:
        """Does what is due after `step`; returns the state to go on from.

        Raises:
            StoppedError: the run ends here, by the signal.
        """

    def interrupt(self, step: int, state: TrainState, signal: int) -> NoReturn:
        """Ends the run after `step` by a signal that came while there was no batch.

        Raises:
            StoppedError: always.
        """


@dataclasses.dataclass(frozen=True)
class Session:
    """What the loop of a started run works with.

    train: (state, batches of an execution, number of steps) -> (state, metrics); see
        `CompiledSteps`.
    steps_per_execution, num_steps: of the run; see `run_schedule.execution_end`.
    feed: batches on the devices; a `runtime.prefetch.DevicePrefetcher` where there is a `stop`.
    stop: tells of signals; None: they end the program, as anywhere else.
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
    """Steps from `state` to the end; returns the last state.

    Raises:
        StoppedError: asked to end before, by a signal.
    """
    milestones, stop = session.milestones, session.stop
    step = int(state.step)
    while milestones.goes_on(step):
        if stop and (signal := _caught_while_waiting(session.feed, stop)):
            milestones.interrupt(step, state, signal)
        session.profiler.start_if_due(step, state)
        end = execution_end(step, session.num_steps, session.steps_per_execution)
        count, step = end - step, end
        with session.profiler.execution(step):
            state, metrics = session.train(state, next(session.feed), np.int32(count))

        # One execution late: the devices are busy with the next one while the host writes.
        session.recorder.record_later(step, count, metrics)
        session.watch.alive()
        session.profiler.stop_if_due(step, state)
        asked = stop.asked(milestones.save_is_due()) if stop else Asked()
        if milestones.is_due(step, asked):
            state = milestones.pause(step, state, asked.signal)
    return state


def _caught_while_waiting(feed: Any, stop: ShutdownSignal) -> int:
    """The number of a signal that comes while the next batch does not; 0 when that is there.

    Of several processes none waits here: they learn of a signal together, after an execution.
    """
    while processes.place()[1] == 1 and not feed.wait(_LOOK):
        if stop.caught:
            return stop.caught
    return 0
