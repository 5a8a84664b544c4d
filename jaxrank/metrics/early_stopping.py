"""Early stopping and learning rate reduction on a plateau of one validation metric."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrank import extensions
from jaxrank.features import Task
from jaxrank.metrics.registry import (
    METRICS,
    metric_named,
    probability_names,
    ranking_names,
)
from jaxrank.validate import check_choice

MEAN = "mean"  # in place of a task: the mean over tasks


@dataclasses.dataclass
class Monitor:
    """Early stopping and learning rate reduction on a plateau.

    Args:
        task, metric: the monitored metric. With the task MEAN it is the mean over `tasks`.
        measures: names the metric and the data. Only values with the same name are compared. Empty:
            nothing is evaluated.
        early_stopping_patience: consecutive evaluations without improvement before training stops.
            0: never.
        reduce_lr_patience: consecutive evaluations without improvement before learning rates are
            reduced. 0: never. The count restarts after a reduction.
        reduce_lr_factor: factor of a reduction.
        reduce_lr_least: least multiplier that reductions leave.
        min_delta: minimum change that counts as an improvement.
        tasks: those whose metric is averaged.
    """

    task: str
    metric: str
    measures: str
    early_stopping_patience: int
    reduce_lr_patience: int
    reduce_lr_factor: float
    reduce_lr_least: float
    min_delta: float
    tasks: tuple[str, ...]
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    since_lowered: int = 0

    @property
    def higher_is_better(self) -> bool:
        return metric_named(self.metric).higher_is_better

    def value(self, metrics: Mapping[str, Mapping[str, float]]) -> float:
        """Returns the monitored value, given {task: {name: metric}}. NaN if one of a mean is."""
        values = [metrics[task][self.metric] for task in self.tasks or (self.task,)]
        return math.fsum(values) / len(values)

    @property
    def should_stop(self) -> bool:
        return 0 < self.early_stopping_patience <= self.since_best

    def reduced(self, multiplier: Any) -> Any:
        """Returns a multiplier of learning rates, an array f[], after one reduction."""
        return (multiplier * self.reduce_lr_factor).clip(self.reduce_lr_least)

    def update(self, step: int, value: float) -> bool:
        """Adds one evaluation, and returns True if learning rates must be reduced now."""
        sign = 1 if self.higher_is_better else -1
        better = not math.isnan(value) and (
            self.best is None or sign * (value - self.best) > self.min_delta
        )
        if better:
            self.best, self.best_step = value, step
            self.since_best = self.since_lowered = 0
            return False
        self.since_best += 1
        self.since_lowered += 1
        if 0 < self.reduce_lr_patience <= self.since_lowered:
            self.since_lowered = 0
            return True
        return False

    def to_state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        names = ("measures", "best", "best_step", "since_best", "since_lowered")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_state(cls, state: dict[str, Any], new: "Monitor") -> "Monitor":
        """Creates a monitor from a state, with the settings of `new`, which has no evaluations.

        Returns `new` itself if the state belongs to another metric or other data.
        """
        measures = state["measures"] or new.measures
        if new.measures not in (measures, ""):
            return new
        return dataclasses.replace(new, **(state | {"measures": measures}))


class Ranked(NamedTuple):
    """Metrics of requests that a run can monitor.

    k: number of first ranks; 0: the data has no requests.
    tasks: those that are trained by ranking alone, without metrics of probabilities.
    """

    k: int = 0
    tasks: tuple[str, ...] = ()


NO_REQUESTS = Ranked()


def monitorable(task: Task, ranked: Ranked = NO_REQUESTS) -> list[str]:
    """Returns the names of the metrics of a task that a run can monitor, the default one first."""
    names = [metric.name for metric in METRICS[task.kind]]
    of_requests = ranking_names(task.kind, ranked.k) if ranked.k else ()
    if task.name not in ranked.tasks:
        return [*names, *of_requests]
    dropped = probability_names(task.kind)
    return [*of_requests, *(name for name in names if name not in dropped)]


def make_monitor(
    tasks: Sequence[Task],
    metric: str,
    *,
    evaluated_on: str = "",
    ranked: Ranked = NO_REQUESTS,
    **settings: Any,
) -> Monitor:
    """Creates a monitor of one metric.

    Args:
        tasks: of the run.
        metric: "task/metric", or "mean/metric" for the mean over all tasks that have it. Empty: the
            logloss, squared error or deviance of the first task, or its NDCG if it is only ranked.
        ranked: metrics of requests.
        evaluated_on: names the data whose evaluations are comparable. Empty: nothing is evaluated.
        settings: of `Monitor`.

    Raises:
        InputError: the task or the metric does not exist.
    """
    name = check_metric(tasks, metric, ranked)
    task, _, watched = name.rpartition("/")
    averaged = monitored_tasks(tasks, name, ranked)
    averaged = () if averaged == (task,) else averaged
    title = f"{name} ({', '.join(averaged)})" if averaged else name
    measures = f"{title} of {evaluated_on}" if evaluated_on else ""
    return Monitor(task=task, metric=watched, measures=measures, tasks=averaged, **settings)


def monitored_tasks(
    tasks: Sequence[Task], name: str, ranked: Ranked = NO_REQUESTS
) -> tuple[str, ...]:
    """Returns the names of the tasks of a monitored "task/metric", several for "mean/metric"."""
    task, _, metric = name.rpartition("/")
    if task != MEAN or task in [t.name for t in tasks]:
        return (task,)
    return tuple(t.name for t in tasks if metric in monitorable(t, ranked))


def check_metric(tasks: Sequence[Task], metric: str, ranked: Ranked = NO_REQUESTS) -> str:
    """Returns the monitored "task/metric". See `make_monitor` for arguments and errors."""
    allowed = tuple(f"{task.name}/{m}" for task in tasks for m in monitorable(task, ranked))
    means = dict.fromkeys(f"{MEAN}/{m}" for task in tasks for m in monitorable(task, ranked))
    name = metric or allowed[0]
    check_choice("eval.metric", name, (*allowed, *means), extensions.hint("metric"))
    return name
