"""Records the metrics of each step, reports bad losses, and measures the training speed."""

import time
from collections.abc import Collection, Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrank import mesh as meshes
from jaxrank.errors import RunError
from jaxrank.features import Schema
from jaxrank.metrics.registry import probability_names
from jaxrank.metrics.sums import from_sums
from jaxrank.report import Report
from jaxrank.run_schedule import RunSchedule
from jaxrank.step import ExchangeMetrics, StepMetrics
from jaxrank.telemetry.debug_batches import LastBatches
from jaxrank.telemetry.loss_spikes import LossSpikeDetector
from jaxrank.telemetry.progress import Progress
from jaxrank.telemetry.writers import Writer

# Interval in steps. More than 1% of them with several rounds of the exchange are reported.
_ROUNDS_WATCHED = 200


class Recorder:
    """Writes the metrics of steps, checks losses, and measures the speed.

    Args:
        writer: receives the metrics of each step.
        progress: the live line on the terminal.
        last: batches, written when a loss is not finite or spikes.
        report: receives warnings.
        schema: of the features.
        mesh: of the run.
        buffers: capacity in ids of the exchange buffer of each stack with sharded rows.
        batch_size: examples per step.
        run_schedule: of the run.
        spikes: detector with the losses so far.
        on_nonfinite, max_skipped_steps: see `config.watch`.
        checkpoint: path of the newest one, for error messages. Empty: none.
        started: when the run was started, by `time.perf_counter`.
        ranked: tasks that are trained by ranking alone.
    """

    def __init__(
        self,
        writer: Writer,
        progress: Progress,
        last: LastBatches,
        report: Report,
        *,
        schema: Schema,
        mesh: Mesh,
        buffers: Mapping[str, int],
        batch_size: int,
        run_schedule: RunSchedule,
        spikes: LossSpikeDetector,
        on_nonfinite: str,
        max_skipped_steps: int,
        checkpoint: str = "",
        started: float,
        ranked: Collection[str] = (),
    ):
        self._started: float | None = started
        self._report = report
        self._last = last
        self._on_nonfinite, self._max_skipped_steps = on_nonfinite, max_skipped_steps
        self._spikes = spikes
        self._skipped, self._skipped_in_a_row = 0, 0
        self._mesh = mesh
        self._buffers = buffers
        self._steps_of_several_rounds = dict.fromkeys(self._buffers, 0)
        self._most_rounds = dict.fromkeys(self._buffers, 1)
        self._watched = 0
        self._writer = writer
        self._progress = progress
        self._batch_size = batch_size
        self._run_schedule = run_schedule
        self._tasks = [t.name for t in schema.tasks]
        self._kinds = [t.kind for t in schema.tasks]
        # Scores that have an order alone have no metrics of probabilities.
        self._left_out = {
            t.name: probability_names(t.kind) for t in schema.tasks if t.name in ranked
        }
        self._lists = [f.name for f in schema.ragged]
        self._examples = 0
        self._seconds = 0.0
        self._since: float | None = None  # when the previous execution was read, None after a pause
        self._pending: tuple[int, int, StepMetrics] | None = None
        self.checkpoint = checkpoint or "none"

    @property
    def examples_per_second(self) -> float:
        return self._examples / self._seconds if self._seconds else float("nan")

    def record_later(self, step: int, count: int, metrics: StepMetrics) -> None:
        """Keeps the metrics of an execution and writes those of the previous one.

        Args:
            step: the last step of the execution.
            count: its number of steps.
            metrics: with a leading axis of steps.

        Raises:
            RunError: as `finish`.
        """
        before, self._pending = self._pending, (step, count, metrics)
        if before is not None:
            self._record(*before)

    def finish(self) -> None:
        """Waits for the pending execution, writes it, and stops the clock until the next one.

        Raises:
            RunError: a loss or gradient is not finite, or too many steps were skipped.
        """
        before, self._pending = self._pending, None
        if before is not None:
            self._record(*before)
        self._since = None
        self._writer.flush()

    def _record(self, step: int, steps: int, metrics: StepMetrics) -> None:
        metrics = jax.tree.map(lambda x: x[:steps], jax.device_get(metrics))
        if self._started is not None:
            seconds = time.perf_counter() - self._started
            self._report(f"First step {seconds:.1f} s after the start")
            self._started = None
        self._count(steps)
        for i in range(steps):
            number = step - steps + i + 1
            step_metrics = jax.tree.map(lambda x, i=i: x[i], metrics)
            values = self._values(step_metrics)
            if self._on_nonfinite == "skip":
                values["skipped"] = int(step_metrics.skipped)
            if i == steps - 1 and self._seconds:
                values["examples_per_second"] = self.examples_per_second
            try:
                if spike := self._judge(number, step_metrics):
                    values["loss_spike"] = spike
            finally:  # also the step that ends the run
                self._writer.write(number, values)
        self._advise(metrics.exchange, steps)
        if step % self._run_schedule.log_every == 0:
            self._writer.flush()
            self._progress.update(
                step,
                self._run_schedule.num_steps,
                self.examples_per_second,
                float(np.mean(metrics.loss)),
            )

    def _judge(self, number: int, metrics: StepMetrics) -> float:
        """Reports a loss that is not finite or a spike, and returns its standard deviations.

        Raises:
            RunError: the loss is not finite and is not skipped, or too many steps were skipped.
        """
        loss, norm = float(metrics.loss), float(metrics.gradient_norm)
        if metrics.skipped:
            self._skip(number, f"found loss {loss}, gradient norm {norm}")
            return 0.0
        self._skipped_in_a_row = 0
        if not np.isfinite([loss, norm]).all():
            written = self._last.write(number, "not finite", self.checkpoint, at_the_end=True)
            raise RunError(
                f"step {number}: loss and gradient must be finite: found loss {loss}, gradient norm"
                f" {norm}. The last good checkpoint is {self.checkpoint}.{written}"
            )
        spike = self._spikes.add_loss(loss)
        if spike:
            written = self._last.write(number, "loss spike", self.checkpoint)
            self._report(
                f"step {number}: the loss {loss:.5f} is {spike:.1f} standard deviations above the"
                f" running mean.{written}"
            )
        return spike

    def _skip(self, number: int, why: str) -> None:
        self._skipped += 1
        self._skipped_in_a_row += 1
        limit = self._max_skipped_steps
        too_many = self._skipped_in_a_row > limit
        written = self._last.write(number, "not finite", self.checkpoint, at_the_end=too_many)
        if too_many:
            raise RunError(
                f"step {number}: at most watch.max_skipped_steps={limit} consecutive steps may be"
                f" skipped: {why}. The last good checkpoint is {self.checkpoint}.{written}"
            )
        self._report(
            f"step {number} skipped, because its gradients are not finite: {why}."
            f" {self._skipped} steps skipped since the start of this program.{written}"
        )

    def _count(self, steps: int) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self._examples += steps * self._batch_size
            self._seconds += now - self._since
        self._since = now

    def _values(self, metrics: StepMetrics) -> dict[str, float]:
        values = {
            "loss": float(metrics.loss),
            "learning_rate": float(metrics.learning_rate),
            "table_learning_rate": float(metrics.table_learning_rate),
            "gradient_norm": float(metrics.gradient_norm),
        }
        scores = from_sums(metrics.sums, self._kinds)
        for task, task_metrics in zip(self._tasks, scores, strict=True):
            left_out = self._left_out.get(task, ())
            values |= {f"{task}/{n}": v for n, v in task_metrics.items() if n not in left_out}
        for task, weight in zip(self._tasks, metrics.learned_weights, strict=False):
            values[f"{task}/weight"] = float(weight)
        values |= {
            f"dropped/{n}": int(d) for n, d in zip(self._lists, metrics.dropped, strict=True)
        }
        for name, cost in metrics.exchange.items():
            values |= self._exchange_values(name, cost)
        return values

    def _exchange_values(self, name: str, cost: ExchangeMetrics) -> dict[str, float]:
        devices, owners = self._mesh.size, self._mesh.shape[meshes.SHARD]
        unique, rounds = int(cost.unique), int(cost.rounds)
        places = devices * owners * self._buffers[name] * rounds
        return {
            f"exchange/{name}/rounds": rounds,
            f"exchange/{name}/unique_ids": unique,
            f"exchange/{name}/buffer_use": unique / places,
            f"exchange/{name}/fullest_device": int(cost.served) * devices / max(1, unique),
        }

    def _advise(self, exchange: dict[str, ExchangeMetrics], steps: int) -> None:
        """Reports buffers of the exchange that are often too small."""
        self._watched += steps
        for name, stats in exchange.items():
            self._steps_of_several_rounds[name] += int(np.count_nonzero(stats.rounds > 1))
            self._most_rounds[name] = max(self._most_rounds[name], int(stats.rounds.max()))
        if self._watched < _ROUNDS_WATCHED:
            return
        for name, count in self._steps_of_several_rounds.items():
            if count * 100 > self._watched:
                self._report(
                    f"The exchange of {name} took more than one round in {count} of the last"
                    f" {self._watched} steps, and up to {self._most_rounds[name]}: its buffers hold"
                    f" {self._buffers[name]:,} ids. Results are correct, but steps take longer."
                    " Increase embedding.exchange_slack, or set embedding.exchange_capacity to"
                    f" {self._buffers[name] * self._most_rounds[name]:,}."
                )
            self._steps_of_several_rounds[name], self._most_rounds[name] = 0, 1
        self._watched = 0
