"""Watches one validation metric: the best value so far, when to lower the rates, when to stop."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jaxrank.features import Task
from jaxrank.metrics.registry import BY_NAME, METRICS
from jaxrank.validate import check_choice


@dataclasses.dataclass
class Monitor:
    """Early stopping and rate reduction on a plateau.

    Args:
        task, metric: what to watch.
        measures: what values can be compared that were measured by it; empty: nothing is evaluated.
        early_stopping_patience: evaluations in a row without improvement after which to stop; 0:
            never.
        reduce_lr_patience: the same before the rates are lowered; 0: never. Counting starts anew
            then.
        reduce_lr_factor: the rates are multiplied by it.
        min_delta: least change that is an improvement.
    """

    task: str
    metric: str
    measures: str = ""
    early_stopping_patience: int = 0
    reduce_lr_patience: int = 0
    reduce_lr_factor: float = 0.1
    min_delta: float = 0.0
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    since_lowered: int = 0

    @property
    def higher_is_better(self) -> bool:
        return BY_NAME[self.metric].higher_is_better

    @property
    def should_stop(self) -> bool:
        return 0 < self.early_stopping_patience <= self.since_best

    def update(self, step: int, value: float) -> bool:
        """Takes one evaluation into account; returns whether the rates are to be lowered now."""
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
        """What a checkpoint must hold, as JSON."""
        names = ("measures", "best", "best_step", "since_best", "since_lowered")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_state(cls, state: dict[str, Any], new: "Monitor") -> "Monitor":
        """Continues from a state with the settings of `new`, a monitor that has seen nothing.

        Returns `new` itself if the state is of another metric or data.
        """
        measures = state["measures"] or new.measures
        if new.measures not in (measures, ""):
            return new
        return dataclasses.replace(new, **(state | {"measures": measures}))


def make_monitor(
    tasks: Sequence[Task], metric: str, *, evaluated_on: str = "", **settings: Any
) -> Monitor:
    """A monitor of "task/metric"; empty: the first task's logloss, squared error or deviance.

    Args:
        evaluated_on: the data whose evaluations can be compared; empty: nothing is evaluated.
        settings: of `Monitor`.

    Raises:
        InputError: no such task or metric.
    """
    name = check_metric(tasks, metric)
    task, _, watched = name.rpartition("/")
    measures = f"{name} of {evaluated_on}" if evaluated_on else ""
    return Monitor(task=task, metric=watched, measures=measures, **settings)


def check_metric(tasks: Sequence[Task], metric: str) -> str:
    """The "task/metric" to watch, as of `make_monitor`, with the same errors."""
    allowed = tuple(f"{task.name}/{m.name}" for task in tasks for m in METRICS[task.kind])
    name = metric or allowed[0]
    check_choice("eval.metric", name, allowed)
    return name
