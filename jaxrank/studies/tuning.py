"""Learning rates for each side of a comparison, found by runs that are part of the study."""

import dataclasses
import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from jaxrank import config_files
from jaxrank.errors import InputError
from jaxrank.metrics.registry import metric_named
from jaxrank.studies.study import RunResult, RunSpec

_SECTIONS = ("dense", "tables")
_RATE_FIELDS = ("base_learning_rate", "base_batch", "decay")
_CENTER = (0, 0)
_AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1))

# Powers of the factor for the rates of dense parameters and of tables.
Point = tuple[int, int]
Search = Generator[Sequence[RunSpec], Sequence[RunResult], Any]


def resolve(overrides: Mapping[str, Any]) -> Search:
    """Runs the choice of open fields of the config, and returns its values.

    These are `fields`, {path: value} of the config, `rows`, `num_steps`, and the names of the
    `features` that the model reads.

    Raises:
        InputError: the choice failed.
    """
    (result,) = yield [RunSpec("resolved", overrides, kind="resolve")]
    if not result.is_done:
        raise InputError(result.error)
    values = dict(result.values)
    return {**values, "fields": config_files.flatten(values.pop("config"))}


def final_evaluation(steps_per_execution: int) -> dict[str, Any]:
    """Returns overrides by which a run evaluates and saves at its end only.

    Asynchronous runs evaluate only there. Thus early stopping and lower rates after an evaluation
    affect neither side.
    """
    never = steps_per_execution * (2**30 // steps_per_execution)
    return {
        "eval.every_steps": never,
        "checkpoint.every_steps": never,
        "eval.early_stopping_patience": 0,
        "eval.reduce_lr_patience": 0,
    }


def rates(fields: Mapping[str, Any], point: Point, factor: float) -> dict[str, Any]:
    """Returns overrides that set both learning rates to a point, with their reference batch.

    Args:
        fields: {path: value} of the config without open fields.
    """
    overrides: dict[str, Any] = {}
    for name, power in zip(_SECTIONS, point, strict=True):
        rate, *others = (f"optim.{name}.{key}" for key in _RATE_FIELDS)
        overrides[rate] = float(f"{fields[rate] * factor**power:.4g}")
        overrides |= {path: fields[path] for path in others}
    return overrides


def is_higher_better(metric: str) -> bool:
    """Returns the direction of a metric of a result, such as "click/ndcg@10"."""
    return metric_named(metric.rpartition("/")[2]).higher_is_better


def first_value(result: RunResult) -> float:
    """Returns the first metric, by which runs are compared. NaN for a run that failed.

    It is the loss of the first task, or its NDCG if that task is trained by ranking alone.
    """
    return next(iter(result.metrics.values()), math.nan)


def loss(result: RunResult) -> float:
    """Returns what the search minimises: the first metric, negated if higher is better.

    Infinite for a run that failed.
    """
    value = first_value(result)
    if not math.isfinite(value):
        return math.inf
    return -value if is_higher_better(next(iter(result.metrics))) else value


def mean_loss(results: Sequence[RunResult]) -> float:
    """Returns the mean of `loss`, infinite if one of the runs failed."""
    return sum(map(loss, results)) / len(results)


def tuned(
    sides: Mapping[str, RunSpec], fields: Mapping[str, Any], *, factor: float, rounds: int
) -> Search:
    """Finds the rates of each side by pattern search, and returns {side: point}.

    Each round tries both rates times and divided by `factor`, one at a time, and moves to the best
    point. A side has ended when no neighbour is better. All use the same seed and schedule.

    Args:
        sides: specs without rates; their names are completed.
        fields: see `rates`.
        rounds: maximum number of moves; 0: the rates of the config.
    """
    centers: dict[str, Point] = dict.fromkeys(sides, _CENTER)
    losses: dict[tuple[str, Point], float] = {}
    moving = set(sides) if rounds else set()
    for _ in range(rounds):
        neighbours = {
            side: [_moved(centers[side], move) for move in (_CENTER, *_AROUND)] for side in moving
        }
        new = [
            (side, point)
            for side in sides
            for point in neighbours.get(side, ())
            if (side, point) not in losses
        ]
        results = yield [_spec(sides[side], point, fields, factor) for side, point in new]
        losses |= {key: loss(result) for key, result in zip(new, results, strict=True)}
        for side, points in neighbours.items():
            values = [losses[side, point] for point in points]
            best = points[values.index(min(values))]
            if best == centers[side]:
                moving.discard(side)
            centers[side] = best
        if not moving:
            break
    return centers


def _spec(spec: RunSpec, point: Point, fields: Mapping[str, Any], factor: float) -> RunSpec:
    name = f"tune-{spec.name}-dense{point[0]:+d}-tables{point[1]:+d}"
    overrides = {**spec.overrides, **rates(fields, point, factor)}
    return dataclasses.replace(spec, name=name, overrides=overrides)


def _moved(point: Point, difference: Point) -> Point:
    return point[0] + difference[0], point[1] + difference[1]
