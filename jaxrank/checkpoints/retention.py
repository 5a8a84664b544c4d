"""Decides which checkpoints of a run are kept, and which of them is the best."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrank.checkpoints import record as run_record
from jaxrank.checkpoints.record import Metric
from jaxrank.errors import InputError


class Retention:
    """Selects the checkpoints that Orbax keeps.

    These are the newest, the best, those whose metric cannot be read, and one per interval.

    Args:
        path: directory of the checkpoints, each in a directory named by its step.
        keep: number of newest checkpoints.
        keep_every: interval in steps. The first checkpoint of each interval is kept. 0: none.
    """

    def __init__(self, path: Path, *, keep: int, keep_every: int):
        self._path, self._keep, self._keep_every = path, keep, keep_every
        self._metrics: dict[int, Metric] = {}  # of checkpoints whose metric is known

    def add(self, step: int, metric: Metric) -> None:
        """Registers the metric of a checkpoint that is about to be saved."""
        self._metrics[step] = metric

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> Sequence[bool]:
        """Implements the preservation policy of Orbax."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        known, unknown = {}, set()
        for step in steps:
            try:
                known[step] = self._metric(step)
            except InputError:
                unknown.add(step)
        best = _best(known)
        kept = {*sorted(steps)[-self._keep :], *unknown, *self._interval_steps(steps), best}
        return [step in kept for step in steps]

    def _interval_steps(self, steps: Sequence[int]) -> set[int]:
        if not self._keep_every:
            return set()
        interval = [step // self._keep_every for step in sorted(steps)]
        pairs = zip(sorted(steps), interval, [0, *interval[:-1]], strict=True)
        return {step for step, now, before in pairs if now > before}

    def best(self, steps: Sequence[int]) -> int | None:
        """Returns the step with the best metric, or None if no checkpoint was evaluated.

        Only checkpoints that still exist and have the same `measures` as the newest are compared.

        Raises:
            InputError: the record of a checkpoint is damaged.
        """
        metrics = {}
        for step in steps:
            try:
                metrics[step] = self._metric(step)
            except InputError:
                if (self._path / str(step)).is_dir():
                    raise
        return _best(metrics)

    def _metric(self, step: int) -> Metric:
        if step not in self._metrics:
            record = run_record.read(self._path / str(step))
            self._metrics[step] = run_record.stored_metric(record)
        return self._metrics[step]


def _best(metrics: Mapping[int, Metric]) -> int | None:
    measured = [step for step in metrics if metrics[step].value is not None]
    if not measured:
        return None
    newest = metrics[max(measured)]
    values = {
        step: metric.value
        for step, metric in metrics.items()
        if metric.value is not None and metric.measures == newest.measures
    }
    best = (max if newest.higher_is_better else min)(values.values())
    return min(step for step, value in values.items() if value == best)
