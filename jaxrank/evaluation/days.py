"""Progressive validation: a model trains on a day, is scored on the next, and trains on that.

Every example is scored by a model that no example of its day or of a later one has taught, as when
a model serves traffic, and is learned from all the same. Blum, Kalai & Langford, Beating the
Hold-Out, COLT 1999; of ad clicks: McMahan et al., Ad Click Prediction: a View from the Trenches,
KDD 2013.
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
    """What the model of a step scored on a day; or on short ones, as "2024-05-02:2024-05-03"."""

    day: str
    step: int
    metrics: Metrics


class DayScores:
    """The scores of the days so far, which a checkpoint holds: one a day, in the order of days."""

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
    """By step, the days that are to be evaluated after it, as the name of a split.

    They are those with an example in the next execution or, at the end of the run, the next day
    that no step has seen, if the store has it. Days that begin in one execution are evaluated
    together.

    Args:
        first_steps: the first step (from 0) with an example of each day of `split`.
        train: the name of `split`, as `config.data.train`.

    Raises:
        InputError: more steps than one pass, the first day is shorter than an execution, or no
            other day than it.
    """
    execution, name = steps_per_execution, train.partition("/")[0]
    most = math.ceil(split.rows / (batch_size * execution)) * execution
    if num_steps > most:
        raise InputError(
            f"data.valid = {NEXT_DAY!r}: num_steps must be at most {most}, one pass over the"
            f" {split.rows:,} examples of {train!r}, so that no step sees a day before"
            f" it is evaluated: found {num_steps} steps."
        )
    days = [day for day, _ in split.days]
    later = [day for day, _ in store.split(name).days if day > days[-1]]
    found: dict[int, list[str]] = {}
    for day, first in zip(days[1:], first_steps[1:], strict=True):
        if first < num_steps:
            found.setdefault(first // execution * execution, []).append(day)
    unseen = [day for day, first in zip(days, first_steps, strict=True) if first >= num_steps]
    if unseen + later:
        found[num_steps] = (unseen + later)[:1]
    if 0 in found:
        raise InputError(
            f"data.valid = {NEXT_DAY!r}: the first day of {train!r}, {days[0]}, must"
            f" fill an execution of batch_size * steps_per_execution = {batch_size * execution:,}"
            f" examples"
            f" before {found[0][0]} begins. Set either lower, or begin data.train at a later day."
        )
    if not found:
        raise InputError(
            f"data.valid = {NEXT_DAY!r}: there must be a day after the first to evaluate:"
            f" {train!r} has only {days[0]}, and the store none after it."
        )
    return {
        step: f"{name}/{days[0]}" if len(days) == 1 else f"{name}/{days[0]}:{days[-1]}"
        for step, days in found.items()
    }


def open_day(store: Store, name: str) -> Split:
    """The days of that name, with room for the lists of any day.

    So that the batches of all days have one shape, and one program scores them.
    """
    whole = store.split(name.partition("/")[0])
    return store.split(name, statistics=whole.statistics)


def references(store: Store, train: str, scores: Sequence[DayScore]) -> Reference:
    """The means over the days of the best constant of each and, where known, of its truth."""
    name = train.partition("/")[0]
    found = [reference(store.split(f"{name}/{s['day']}"), store.schema) for s in scores]
    best = [f.best_possible or {} for f in found]
    known = [task for task in best[0] if all(task in of_day for of_day in best)]
    return Reference(
        constant=mean([f.constant for f in found]),
        best_possible=mean([{task: f[task] for task in known} for f in best]) if known else None,
    )


def mean(metrics: Sequence[Metrics]) -> Metrics:
    """The means of the metrics over days, weighted by the examples of each task; their sum.

    A day on which a metric is not defined has no part in its mean.
    """
    return {
        task: {
            name: _mean([found[task] for found in metrics], name)
            if name != "examples"
            else sum(found[task][name] for found in metrics)
            for name in metrics[0][task]
        }
        for task in metrics[0]
    }


def _mean(days: Sequence[dict[str, float]], name: str) -> float:
    defined = [(found[name], found["examples"]) for found in days if not math.isnan(found[name])]
    weight = sum(examples for _, examples in defined)
    return sum(v * examples for v, examples in defined) / weight if weight else float("nan")
