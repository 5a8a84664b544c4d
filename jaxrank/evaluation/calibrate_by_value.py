"""Corrects calibrated predictions by the values of a feature, and measures the values."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxrank.calibration import by_value
from jaxrank.calibration.by_value import ByValue
from jaxrank.calibration.maps import LogitMap
from jaxrank.data.spec.resolve import num_numbered
from jaxrank.errors import InputError
from jaxrank.evaluation.evaluate import Opened
from jaxrank.evaluation.report import value_name
from jaxrank.evaluation.score import Scored
from jaxrank.evaluation.slices import metric_intervals, sort_by_size
from jaxrank.features import PAD, RESERVED_ROWS, Schema
from jaxrank.metrics import exact
from jaxrank.validate import check_choice

SHOWN = ("logloss", "calibration", "calibration_error")
_MAX_VALUES = 1000  # values of a feature that are measured, the largest ones
_SHOWN_VALUES = 20


def check_feature(schema: Schema, feature: str) -> None:
    """Raises InputError unless a feature has one id per example."""
    columns = [entry.name for entry in schema.id_columns]
    known = [name for name in columns if columns.count(name) == 1]
    check_choice("--by", feature, known, "The feature must have one id per example.")


def fit_by_value(
    feature: str,
    maps: Mapping[int, LogitMap],
    scored: Scored,
    rows: np.ndarray,
    schema: Schema,
    data: str,
) -> ByValue:
    """Fits the corrections of the values of a feature, after the map of each task.

    Args:
        rows: of the feature's table, of the scored examples.
        data: name of the scored data in errors.

    Raises:
        InputError: no value has enough examples.
    """
    column = next(entry for entry in schema.id_columns if entry.name == feature)
    table = next(table for table in schema.tables if table.name == column.table)
    shared = range(RESERVED_ROWS)
    if table.encoding == "integer":
        shared = range(num_numbered(table), table.rows)  # of invalid ids
    reserved = [int(PAD), *shared]
    is_known = np.any(scored.weights[:, list(maps)] > 0, axis=1)
    chosen = by_value.frequent_rows(rows, is_known, reserved)
    if not len(chosen):
        raise InputError(
            f"--by: {feature!r} must have a value with at least {by_value.MIN_EXAMPLES} examples"
            f" whose labels are known: found none in {data}."
        )
    place = np.minimum(np.searchsorted(chosen, rows), len(chosen) - 1)
    value = np.where(chosen[place] == rows, place, -1)
    slopes, offsets = np.ones((2, len(chosen), len(schema.tasks)))
    offsets[:] = 0
    for task, mapped in maps.items():
        x, y, w = (np.asarray(a[:, task], np.float64) for a in scored)
        used = w > 0
        fitted = by_value.fit(
            mapped(x[used]), y[used], w[used] / w[used].mean(), value[used], len(chosen)
        )
        slopes[:, task], offsets[:, task] = fitted.T
    pairs = (tuple(map(tuple, a.tolist())) for a in (slopes, offsets))
    return ByValue(feature, tuple(chosen.tolist()), *pairs)


def measure_tasks(
    scored: Scored, schema: Schema, ranked: Collection[str]
) -> dict[str, dict[str, float]]:
    """Returns {task: {metric: value}} of the binary tasks that have probabilities."""
    result = {}
    for i, task in enumerate(schema.tasks):
        if task.kind == "binary" and task.name not in ranked:
            x, y, w = (a[:, i] for a in scored)
            metrics = exact.exact(x, y, w)
            buckets = exact.calibration_buckets(x, y, w)
            metrics["calibration_error"] = exact.calibration_error(buckets)
            result[task.name] = {name: metrics[name] for name in SHOWN}
    return result


def measure_by_value(fitted: ByValue, before: Scored, after: Scored, run: Opened) -> dict[str, Any]:
    """Measures the largest values of a split, the worst after calibration first.

    The worst value has the interval of a task's calibration that is farthest from 1.

    Args:
        before, after: of the split of `run`, without and with its calibration.

    Returns:
        {feature, fitted, values}; see `calibrate.Calibrated`.
    """
    schema, ranked = run.predictor.layout.schema, run.requests.ranked
    # Without a limit, because only the largest values are measured.
    groups, clusters = run.groups(fitted.feature, is_limited=False), run.clusters()
    assert groups is not None
    members = groups.members()
    entries = []
    for i in sort_by_size(members)[:_MAX_VALUES]:
        rows = members[i]
        parts = [Scored(*(a[rows] for a in scored)) for scored in (before, after)]
        first, last = (measure_tasks(part, schema, ranked) for part in parts)
        code = clusters.code[rows] if clusters else None
        distance = max(
            (
                _distance(parts[1], t, code)
                for t, task in enumerate(schema.tasks)
                if task.name in last
            ),
            default=0.0,
        )
        entries.append((distance, groups.values[i], len(rows), first, last))
    entries.sort(key=lambda entry: -entry[0])
    names = ("value", "examples", "before", "after")
    values = [dict(zip(names, entry[1:], strict=True)) for entry in entries]
    return {"feature": fitted.feature, "fitted": len(fitted.rows), "values": values}


def _distance(scored: Scored, task: int, code: np.ndarray | None) -> float:
    """Returns the distance of 1 from the interval of a binary task's calibration, 0 if inside."""
    x, y, w = (a[:, task] for a in scored)
    low, high = metric_intervals(exact.exact(x, y, w), x, y, w, "binary", code)["calibration"]
    return max(0.0, low - 1, 1 - high)  # NaN is never larger


def table_lines(by: Mapping[str, Any], task: str) -> list[str]:
    """Formats the table of a task's worst values. See `measure_by_value` for `by`."""
    title = f"{task} by {by['feature']}"
    heads = ("examples", "calibration", "after", "logloss", "after")
    lines = [f"{title:<32}" + "".join(f"{head:>13}" for head in heads)]
    for entry in by["values"][:_SHOWN_VALUES]:
        first, last = entry["before"][task], entry["after"][task]
        numbers = [f"{part[name]:>13.5f}" for name in SHOWN[1::-1] for part in (first, last)]
        lines.append(
            f"  {value_name(entry['value'])[:29]:<30}{entry['examples']:>13,}" + "".join(numbers)
        )
    if len(by["values"]) > _SHOWN_VALUES:
        lines.append(f"  and {len(by['values']) - _SHOWN_VALUES:,} better ones; --json has more")
    return lines
