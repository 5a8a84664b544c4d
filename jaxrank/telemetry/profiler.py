"""Traces some steps with JAX's profiler, for xprof or TensorBoard's profile plugin.

WORKDIR/profile/plugins/profile/steps_97_to_104/HOST.xplane.pb  HOST.trace.json.gz

With several processes, each writes its own two files, and their names begin with the index of the
process. Otherwise processes on one machine would overwrite each other's files.
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
    """A range of steps of a run, counted from 1. Both ends are included."""

    first: int
    last: int


def parse(text: str) -> Steps | None:
    """Parses the value of `--profile-steps`. An empty text gives None.

    Raises:
        InputError: the text is not FIRST:LAST, or the range is empty.
    """
    if not text:
        return None
    # No step has more digits, and Python raises ValueError for thousands of them.
    match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
    steps = Steps(int(match[1]), int(match[2])) if match else Steps(0, 0)
    if not 1 <= steps.first <= steps.last:
        raise InputError(
            "--profile-steps: must be FIRST:LAST, the first and the last step to trace, counted"
            f" from 1: found {text!r}. For example, 100:103 traces four steps."
        )
    return steps


def whole_executions(steps: Steps, begin: int, end: int, execution: int) -> tuple[int, int]:
    """Finds the executions with `steps` in a run from step `begin` to step `end`.

    Args:
        steps: to trace.
        begin: step after which the run starts or resumes.
        end: last step of the run.
        execution: steps per execution; see `run_schedule.execution_end`.

    Returns:
        The step after which the first execution starts, and the step at which the last one ends.
        The second is at most the first if the run has none of the steps.
    """
    if steps.last <= begin or steps.first > end:
        return end, begin
    before = (steps.first - 1) // execution * execution
    after = -(-steps.last // execution) * execution
    return max(begin, before), min(end, after)


class Profile:
    """Traces the executions of a run that contain the requested steps.

    The trace contains only these executions, because it waits for the devices before it starts and
    before it stops. If the run ends or fails meanwhile, the trace up to that point is written.

        with Profile(parse("100:103"), directory, step, recorder.finish, report, ...) as profile:
            while step < num_steps:
                profile.start_if_due(step, state)
                count = min(steps_per_execution, num_steps - step)
                step += count
                with profile.execution(step):
                    state, metrics = program.train(state, next(feed), count)
                profile.stop_if_due(step, state)

    Args:
        steps: to trace. None: no trace.
        directory: of the run.
        step: after which the run starts or resumes.
        pause: stops the clock. It is called before the trace starts and before it is written.
        report: receives a line with the traced steps, or with the reason why there are none.
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
            report(f"Steps {before + 1} to {after} are traced to {self._directory}")
        else:
            rest = f"has steps {step + 1} to {end}" if step < end else f"ended at step {step}"
            report(
                f"Nothing was traced: the run {rest}, --profile-steps={steps.first}:{steps.last}"
            )

    def start_if_due(self, step: int, state: Any) -> None:
        """Starts the trace if the first execution to trace starts after `step`.

        Args:
            step: steps done.
            state: the input of that execution.
        """
        if step != self._before:
            return
        self._pause()
        jax.block_until_ready(state)
        # Left by an earlier run that ended while it wrote.
        shutil.rmtree(self._partial, ignore_errors=True)
        options = jax.profiler.ProfileOptions()
        # All processes must use the same name to appear in one view. The default name is the time
        # of writing.
        options.session_id = f"steps_{self._before + 1}_to_{self._after}"
        # Tracing every Python call slows the host down and hides everything else.
        options.python_tracer_level = 0
        jax.profiler.start_trace(self._partial, profiler_options=options)
        self._is_tracing = True

    def execution(self, step: int) -> contextlib.AbstractContextManager[Any]:
        """Marks in the trace the execution that ends at `step`, as metrics.jsonl does."""
        self._step = step
        return jax.profiler.StepTraceAnnotation("train", step_num=self._step)

    def stop_if_due(self, step: int, state: Any) -> None:
        """Writes the trace if the last execution to trace ended at `step`.

        Args:
            step: steps done.
            state: the output of that execution.

        Raises:
            RunError: the trace cannot be written.
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
            # The error that ended the run is raised, not one of writing the trace.
            with contextlib.suppress(RunError) if kind else contextlib.nullcontext():
                self._stop()
        if kind is None and self._step < self._after:
            traced = self._step > self._before
            subject = f"Only steps up to {self._step} were" if traced else "Nothing was"
            self._report(f"{subject} traced: training ended at step {self._step}")
