"""Progressive validation: a model trains on a day, is scored on the next day, and trains on that.

Every example is scored by a model that has seen no example of its day or of a later one, as in
serving, and is used for training afterwards. Blum, Kalai & Langford, Beating the Hold-Out, COLT
1999. For ad clicks: McMahan et al., Ad Click Prediction: a View from the Trenches, KDD 2013.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TypedDict

from jaxrank.data.store.reader import Store
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.evaluation.score import Metrics, Reference, reference
from jaxrank.run_schedule import NEXT_DAY


class DayScore(TypedDict):
    """Metrics of the model after a step on one day, or on several short days.

    Several days are named "2024-05-02:2024-05-03".
    """

    day: str
    step: int
    metrics: Metrics


class DayScores:
    """The scores of the days so far, one per day in order of days. Checkpoints hold them."""

    def __init__(self, scores: Iterable[DayScore] = ()) -> None:
        self._scores = {score["day"]: score for score in scores}

    def add(self, step: int, day: str, metrics: Metrics) -> None:
        self._scores[day] = DayScore(day=day, step=step, metrics=metrics)

    def to_state(self) -> list[DayScore]:
        return [self._scores[day] for day in sorted(self._scores)]

    @classmethod
    def from_state(cls, state: Iterable[DayScore]) -> "DayScores":
        return cls(state)


def plan_evaluations(
    store: Store,
    split: Split,
    first_steps: Sequence[int],
    *,
    train: str,
    batch_size: int,
    steps_per_execution: int,
    num_steps: int,
) -> dict[int, str]:
    """Plans the evaluations: {step: split with the days that are evaluated after that step}.

    These are the days whose first example is in the next execution. At the end of the run it is the
    next day that no step has seen, if the store has one. Days that begin in one execution are
    evaluated together.

    Args:
        store: with the days.
        split: to train on.
        first_steps: the first step (from 0) with an example of each day of `split`.
        train: the name of `split`, as in `config.data.train`.
        batch_size: examples per step.
        steps_per_execution: of the run.
        num_steps: of the run.

    Raises:
        InputError: the run has more than one epoch, the first day is shorter than an execution, or
            there is no second day.
    """
    execution, name = steps_per_execution, train.partition("/")[0]
    most = math.ceil(split.rows / batch_size)
    if num_steps > most:
        raise InputError(
            f"data.valid = {NEXT_DAY!r}: num_steps must be at most {most}, one pass over the"
            f" {split.rows:,} examples of {train!r}, so that no step sees a day before"
            f" it is evaluated: found {num_steps} steps."
        )
    days = [day for day, _ in split.days]
    later = [day for day, _ in store.split(name).days if day > days[-1]]
    by_step: dict[int, list[str]] = {}
    for day, first in zip(days[1:], first_steps[1:], strict=True):
        if first < num_steps:
            by_step.setdefault(first // execution * execution, []).append(day)
    unseen = [day for day, first in zip(days, first_steps, strict=True) if first >= num_steps]
    if unseen + later:
        by_step[num_steps] = (unseen + later)[:1]
    if 0 in by_step:
        raise InputError(
            f"data.valid = {NEXT_DAY!r}: the first day of {train!r}, {days[0]}, must fill an"
            f" execution of batch_size * steps_per_execution = {batch_size * execution:,} examples"
            f" before {by_step[0][0]} begins: found {first_steps[1] * batch_size:,} examples in"
            " whole steps. Reduce one of them, or start data.train at a later day."
        )
    if not by_step:
        raise InputError(
            f"data.valid = {NEXT_DAY!r}: there must be a day after the first to evaluate:"
            f" {train!r} has only {days[0]}, and the store none after it."
        )
    return {
        step: f"{name}/{days[0]}" if len(days) == 1 else f"{name}/{days[0]}:{days[-1]}"
        for step, days in by_step.items()
    }


def open_day(store: Store, name: str) -> Split:
    """Opens some days, with capacity for the lists of any day.

    The batches of all days then have the same shape, so that one compiled program scores them.
    """
    whole = store.split(name.partition("/")[0])
    return store.split(name, statistics=whole.statistics)


def references(store: Store, train: str, scores: Sequence[DayScore]) -> Reference:
    """Computes the means over the days of the reference metrics of each day.

    These are the metrics of the best constant and, if the truth is known, of the truth.
    """
    name = train.partition("/")[0]
    by_day = [reference(store.split(f"{name}/{s['day']}"), store.schema) for s in scores]
    best = [f.best_possible or {} for f in by_day]
    known = [task for task in best[0] if all(task in of_day for of_day in best)]
    return Reference(
        constant=mean([f.constant for f in by_day]),
        best_possible=mean([{task: f[task] for task in known} for f in best]) if known else None,
    )


def mean(metrics: Sequence[Metrics]) -> Metrics:
    """Computes the means of metrics over days, weighted by the examples of each task.

    The numbers of examples are added up. Days on which a metric is undefined are left out of its
    mean.
    """
    return {
        task: {
            name: _mean([day_metrics[task] for day_metrics in metrics], name)
            if name != "examples"
            else sum(day_metrics[task][name] for day_metrics in metrics)
            for name in metrics[0][task]
        }
        for task in metrics[0]
    }


def _mean(days: Sequence[dict[str, float]], name: str) -> float:
    defined = [
        (day_metrics[name], day_metrics["examples"])
        for day_metrics in days
        if not math.isnan(day_metrics[name])
    ]
    weight = sum(examples for _, examples in defined)
    return sum(v * examples for v, examples in defined) / weight if weight else float("nan")
