"""What is written of each step, and how fast training is."""

import time

import jax
import numpy as np

from jaxrank import metrics
from jaxrank.errors import RunError
from jaxrank.job import Job
from jaxrank.step import StepMetrics
from jaxrank.writers import Progress, Writer


class Recorder:
    """Writes what steps told, watches for a loss that is not finite, and measures the speed."""

    def __init__(self, writer: Writer, progress: Progress, job: Job):
        self._writer = writer
        self._progress = progress
        self._batch_size = job.config.batch_size
        self._plan = job.plan
        self._tasks = [t.name for t in job.schema.tasks]
        self._lists = [f.name for f in job.schema.lists]
        self._examples = 0
        self._seconds = 0.0
        self._since: float | None = None  # when the last call was read, in a run of calls
        self._pending: tuple[int, StepMetrics] | None = None
        step = job.checkpoints.step()
        # The checkpoint that an error message points to.
        self.checkpoint = "none" if step is None else job.checkpoints.directory(step)

    @property
    def examples_per_second(self) -> float:
        return self._examples / self._seconds if self._seconds else float("nan")

    def record_later(self, step: int, told: StepMetrics) -> None:
        """Takes the call that ends at `step` and writes the call before it, as `finish` does."""
        before, self._pending = self._pending, (step, told)
        if before is not None:
            self._record(*before)

    def finish(self) -> None:
        """Waits for the call in hand and writes it; the clock stops until the next call.

        Raises:
            RunError: a loss or gradient is not finite.
        """
        before, self._pending = self._pending, None
        if before is not None:
            self._record(*before)
        self._since = None
        self._writer.flush()

    def _record(self, step: int, told: StepMetrics) -> None:
        told = jax.device_get(told)
        steps = len(told.loss)
        self._count(steps)
        finite = np.isfinite(told.loss) & np.isfinite(told.gradient_norm)
        good = steps if finite.all() else int(finite.argmin())
        for i in range(good):
            values = self._values(jax.tree.map(lambda x, i=i: x[i], told))
            if i == steps - 1 and self._seconds:
                values["examples_per_second"] = self.examples_per_second
            self._writer.write(step - steps + i + 1, values)
        if good < steps:
            self._writer.flush()
            raise RunError(
                f"step {step - steps + good + 1}: loss and gradient must be finite: the loss is"
                f" {told.loss[good]}, the norm of the gradient {told.gradient_norm[good]}."
                f" The last good checkpoint is {self.checkpoint}."
            )
        if step % self._plan.log_every == 0:
            self._writer.flush()
            self._progress.update(
                step, self._plan.num_steps, self.examples_per_second, float(np.mean(told.loss))
            )

    def _count(self, steps: int) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self._examples += steps * self._batch_size
            self._seconds += now - self._since
        self._since = now

    def _values(self, told: StepMetrics) -> dict[str, float]:
        values = {
            "loss": float(told.loss),
            "rate": float(told.rate),
            "table_rate": float(told.table_rate),
            "gradient_norm": float(told.gradient_norm),
        }
        for task, found in zip(self._tasks, metrics.from_sums(told.sums), strict=True):
            values |= {f"{task}/{name}": value for name, value in found.items()}
        values |= {f"dropped/{n}": int(d) for n, d in zip(self._lists, told.dropped, strict=True)}
        return values
