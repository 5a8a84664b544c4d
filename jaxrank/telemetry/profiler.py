"""A trace of some steps by JAX's profiler, to be read with xprof or TensorBoard's profile plugin.

WORKDIR/profile/plugins/profile/steps_97_to_104/HOST.xplane.pb  HOST.trace.json.gz

Of several processes each writes its own two files, whose names begin with its number: processes of
one machine would write over each other's otherwise.
"""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxrank.errors import InputError, RunError
from jaxrank.report import Report
from jaxrank.runtime import processes


class Steps(NamedTuple):
    """Steps of a run, counted from 1; both are included."""

    first: int
    last: int


def parse(text: str) -> Steps | None:
    """The steps that `--profile-steps` asks for; none if it is empty.

    Raises:
        InputError: it is not FIRST:LAST, or holds no step.
    """
    if not text:
        return None
    # More digits than these are no step, and Python refuses to read thousands of them.
    found = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
    steps = Steps(int(found[1]), int(found[2])) if found else Steps(0, 0)
    if not 1 <= steps.first <= steps.last:
        raise InputError(
            "--profile-steps must be FIRST:LAST, the first and the last step to trace, counted from"
            f" 1: found {text!r}. 100:103 are four steps."
        )
    return steps


def whole_executions(steps: Steps, begin: int, end: int, execution: int) -> tuple[int, int]:
    """The executions that hold `steps`, of a run that goes on after step `begin` up to `end`.

    Args:
        execution: steps of an execution; the first execution of the run begins after step `begin`.

    Returns:
        The step after which the first execution begins and the one after which the last ends; the
        second is not above the first where the run has none of the steps.
    """
    before = begin + (steps.first - 1 - begin) // execution * execution
    after = begin - (begin - steps.last) // execution * execution
    return max(begin, before), min(end, after)


class Profile:
    """Traces the executions of a run that hold the steps asked for.

    The trace holds these executions and nothing of others: the devices are waited for before it
    starts and before it stops. A run that ends within it, by an error too, leaves what was traced
    so far.

        with Profile(parse("100:103"), directory, step, recorder.finish, report, ...) as profile:
            while step < num_steps:
                profile.start_if_due(step, state)
                with profile.call(step):
                    state, told = program.train(state, next(feed))
                step += steps_per_execution
                profile.stop_if_due(step, state)

    Args:
        steps: to trace; none if None.
        directory: of the run.
        step: after which the run goes on.
        pause: called before the trace starts and before it is written, for that takes time.
        report: gets a line that says which steps are traced, or that none are.
        steps_per_execution: steps in one launched program.
        num_steps: of the whole run.
    """

    def __init__(
        self,
        steps: Steps | None,
        directory: Path,
        step: int,
        pause: Callable[[], None],
        report: Report,
        *,
        steps_per_execution: int,
        num_steps: int,
    ):
        self._pause, self._report = pause, report
        self._directory = directory / "profile"
        self._partial = self._directory / f".process_{processes.place()[0]}"
        self._execution = steps_per_execution
        self._step = step
        self._is_tracing = False
        self._before = self._after = -1
        if steps is None:
            return
        end = num_steps
        before, after = whole_executions(steps, step, end, self._execution)
        if before < after:
            self._before, self._after = before, after
            report(f"Steps {before + 1} to {after} are traced, into {self._directory}")
        else:
            rest = f"goes from step {step + 1} to {end}" if step < end else f"ended at step {step}"
            report(
                f"Nothing was traced: the run {rest}, --profile-steps={steps.first}:{steps.last}"
            )

    def start_if_due(self, step: int, state: Any) -> None:
        """Starts the trace if the first execution to trace begins after `step`.

        Args:
            state: that the execution is given.
        """
        if step != self._before:
            return
        self._pause()
        jax.block_until_ready(state)
        # An earlier run's, if it ended while it wrote.
        shutil.rmtree(self._partial, ignore_errors=True)
        options = jax.profiler.ProfileOptions()
        # All processes must name their trace alike to be seen side by side; by default its name is
        # the second in which it is written.
        options.session_id = f"steps_{self._before + 1}_to_{self._after}"
        # Python's executions are most of what happens on the host: to trace each of them slows it,
        # and buries the rest.
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._partial, profiler_options=options)
        self._is_tracing = True

    def execution(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Marks in the trace the execution after `step`, by its last step, as metrics and files
        are."""
        self._step = step + self._execution
        return jax.profiler.StepTraceAnnotation("train", step_num=self._step)

    def stop_if_due(self, step: int, state: Any) -> None:
        """Writes the trace if the last execution to trace ended at `step`.

        Args:
            state: that the execution returned.

        Raises:
            RunError: it cannot be written.
        """
        if step == self._after and self._is_tracing:
            self._pause()
            jax.block_until_ready(state)
            self._stop()

    def _stop(self) -> None:
        self._is_tracing = False
        index, count = processes.place()
        try:
            jax.profiler.stop_trace()
            for file in [path for path in self._partial.rglob("*") if path.is_file()]:
                target = self._directory / file.relative_to(self._partial)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target if count == 1 else target.with_name(f"{index}_{file.name}"))
            shutil.rmtree(self._partial)
        except (OSError, RuntimeError) as error:
            raise RunError(f"{self._directory}: the trace cannot be written: {error}") from error

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if self._is_tracing:
            # What ended the run is what is told, whatever becomes of the trace.
            with contextlib.suppress(RunError) if kind else contextlib.nullcontext():
                self._stop()
        if kind is None and self._step < self._after:
            traced = self._step > self._before
            what = f"Only steps up to {self._step} were" if traced else "Nothing was"
            self._report(f"{what} traced: training ended at step {self._step}")
