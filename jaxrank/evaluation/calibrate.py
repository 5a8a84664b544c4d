"""Calibrates the predictions of a checkpoint, and measures the result on another split."""

import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrank.build import task_parents
from jaxrank.calibration import by_value, files
from jaxrank.calibration.by_value import ByValue
from jaxrank.calibration.fit import METHODS
from jaxrank.calibration.maps import Calibration, LogitMap
from jaxrank.data.spec.resolve import num_numbered
from jaxrank.errors import InputError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.evaluate import load_run, open_run
from jaxrank.evaluation.report import value_name
from jaxrank.evaluation.score import Scored
from jaxrank.evaluation.slices import Clusters, Groups, metric_intervals, sort_by_size
from jaxrank.features import PAD, RESERVED_ROWS, Schema
from jaxrank.metrics import exact
from jaxrank.report import Report
from jaxrank.runtime import processes
from jaxrank.validate import check_choice

NONE = "none"  # removes the calibration
_MIN_LABELS = 10  # positives, and negatives, of a task
_MAX_VALUES = 1000  # values of a feature that are measured, the largest ones
_SHOWN_VALUES = 20
_SHOWN = ("logloss", "calibration", "calibration_error")


class Calibrated(NamedTuple):
    """Result of `calibrate`.

    before, after: {task: logloss, calibration and expected calibration error} on the split
        `measured_on`. Empty if the calibration was removed.
    skipped: {task: why it is not calibrated}.
    by: {feature, fitted: number of values with a correction, values: of the split `measured_on`,
        [{value, examples, before, after: as above}], the worst after it first}. None: all values
        have the same map.
    path: of the calibration. Empty if it was removed.
    """

    step: int
    method: str
    split: str
    measured_on: str
    before: dict[str, dict[str, float]]
    after: dict[str, dict[str, float]]
    skipped: dict[str, str]
    path: str
    checkpoint: str
    seconds: float
    by: dict[str, Any] | None = None


def calibrate(
    workdir: str,
    *,
    method: str = "platt",
    checkpoint: str = "newest",
    data: str = "",
    split: str,
    measure_on: str = "",
    batch_size: int | None = None,
    by: str = "",
    report: Report = print,
) -> Calibrated:
    """Fits an increasing map of the predictions of each binary task, and stores it.

    `evaluate`, `predict`, `compare` and exports of this checkpoint use it. Labels that are not
    known yet do not count, and examples are weighted to describe all traffic.

    Args:
        workdir, checkpoint, data, batch_size: see `evaluate.evaluate`.
        method: "platt" or "isotonic"; see `calibration.fit`. "none" removes the calibration.
        split: to fit on.
        measure_on: another split, to measure the result on. Empty: the run's validation split.
        by: a feature of one id per example, whose values are corrected where data suffices; see
            `calibration.by_value`. Empty: none.

    Raises:
        InputError: see `evaluate.evaluate`, or both splits are the same, or labels do not rise with
            the predictions.
    """
    started = time.perf_counter()
    check_choice("--method", method, (*METHODS, NONE))
    if method == NONE and by:
        raise InputError(f"--by: must be used without --method={NONE}: found {by!r}.")
    run = open_run(workdir, data=data, split=split, batch_size=batch_size)
    saved = load_run(workdir)
    if by:
        _check_feature(saved.schema, by)
    name, measured_on = run.split.name, measure_on or saved.config.data.valid
    if method != NONE and measured_on == name:
        raise InputError(
            "--measure-on: must name another split than --split, because the fit has seen its"
            f" labels: found {measured_on!r} for both."
        )
    step, weights = run.checkpoints.read(checkpoint, run.weights)
    path = files.calibration_path(run.directory, step)
    where = run.checkpoints.directory(step)
    if method == NONE:
        if processes.is_first():
            path.unlink(missing_ok=True)
        seconds = time.perf_counter() - started
        return Calibrated(step, method, name, "", {}, {}, {}, "", where, seconds)
    schema, ranked = saved.schema, run.requests.ranked
    other = open_run(
        workdir, data=data, split=measure_on, batch_size=batch_size, split_flag="--measure-on"
    )
    for opened in (run, other):
        scoring.check_labelled(opened.split)
    fitted_on, measured = (
        scoring.score_all(run.predictor, weights, opened.split, run.batch_size)
        for opened in (run, other)
    )
    if name == saved.config.data.train:
        report(f"--split={name}: the model was trained on these labels, and looks better there")
    maps, skipped = _fit(fitted_on, schema, method, str(run.split.path), ranked)
    if not maps:
        reasons = ", ".join(f"{task}: {why}" for task, why in skipped.items())
        raise InputError(f"{run.split.path}: must have a task to calibrate: found {reasons}.")
    tasks = [task.name for task in schema.tasks]
    origin = {"method": method, "split": name, "tasks": [tasks[i] for i in maps]}
    parents = task_parents(saved.config.model, schema)
    corrections, rows = None, None
    if by:
        corrections = _fit_by_value(
            by,
            maps,
            fitted_on,
            scoring.feature_rows(run.split, schema, by),
            schema,
            str(run.split.path),
        )
        rows = scoring.feature_rows(other.split, schema, by)
        origin["by"] = by
    calibration = Calibration(maps, parents, origin, corrections)
    mapped = scoring.calibrated(measured, calibration, rows)
    values = None
    if corrections is not None:
        groups, clusters = other.groups(by), other.clusters()
        assert groups is not None
        measures = _measure_by_value(groups, measured, mapped, schema, ranked, clusters)
        values = {"feature": by, "fitted": len(corrections.rows), "values": measures}
    before, after = (_measure(scored, schema, ranked) for scored in (measured, mapped))
    sums = run.checkpoints.saved_checksums(step)["weights"]  # exchanged between the processes
    with processes.together():  # last: a calibration that cannot be measured is not kept
        if processes.is_first():
            files.save(run.directory, step, calibration, tasks, sums)
    return Calibrated(
        step=step,
        method=method,
        split=name,
        measured_on=measured_on,
        before=before,
        after=after,
        skipped=skipped,
        path=str(path),
        checkpoint=where,
        seconds=time.perf_counter() - started,
        by=values,
    )


def _check_feature(schema: Schema, feature: str) -> None:
    """Raises InputError unless a feature has one id per example."""
    columns = [entry.name for entry in schema.id_columns]
    known = [name for name in columns if columns.count(name) == 1]
    check_choice("--by", feature, known, "The feature must have one id per example.")


def _fit_by_value(
    feature: str,
    maps: Mapping[int, LogitMap],
    scored: Scored,
    rows: np.ndarray,
    schema: Schema,
    data: str,
) -> ByValue:
    """Fits the corrections of the values of a feature, after the map of each task.

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


def _fit(
    scored: Scored, schema: Schema, method: str, data: str, ranked: Collection[str]
) -> tuple[dict[int, LogitMap], dict[str, str]]:
    """Returns the map of each task, and why others have none."""
    maps, skipped = {}, {}
    for i, task in enumerate(schema.tasks):
        if task.kind != "binary":
            skipped[task.name] = f"its kind is {task.kind}"
            continue
        if task.name in ranked:
            skipped[task.name] = "it is trained by ranking alone, without probabilities"
            continue
        x, y, w = (np.asarray(a[:, i], np.float64) for a in scored)
        x, y, w = (a[w > 0] for a in (x, y, w))
        rarest = min(y.sum(), (1 - y).sum()) if len(y) else 0
        if rarest < _MIN_LABELS:
            skipped[task.name] = f"it has {rarest:g} positive or negative labels"
            continue
        maps[i] = METHODS[method](x, y, w, f"{data}: task {task.name}")
    return maps, skipped


def _measure(
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
            result[task.name] = {name: metrics[name] for name in _SHOWN}
    return result


def _measure_by_value(
    groups: Groups,
    before: Scored,
    after: Scored,
    schema: Schema,
    ranked: Collection[str],
    clusters: Clusters | None,
) -> list[dict[str, Any]]:
    """Measures the largest values, the worst after calibration first.

    The worst value has the interval of a task's calibration that is farthest from 1.
    """
    members = groups.members()
    entries = []
    for i in sort_by_size(members)[:_MAX_VALUES]:
        rows = members[i]
        parts = [Scored(*(a[rows] for a in scored)) for scored in (before, after)]
        first, last = (_measure(part, schema, ranked) for part in parts)
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
    return [dict(zip(names, entry[1:], strict=True)) for entry in entries]


def _distance(scored: Scored, task: int, code: np.ndarray | None) -> float:
    """Returns the distance of 1 from the interval of a binary task's calibration, 0 if inside."""
    x, y, w = (a[:, task] for a in scored)
    low, high = metric_intervals(exact.exact(x, y, w), x, y, w, "binary", code)["calibration"]
    return max(0.0, low - 1, 1 - high)  # NaN is never larger


def _by_value_lines(by: Mapping[str, Any], task: str) -> list[str]:
    title = f"{task} by {by['feature']}"
    heads = ("examples", "calibration", "after", "logloss", "after")
    lines = [f"{title:<32}" + "".join(f"{head:>13}" for head in heads)]
    for entry in by["values"][:_SHOWN_VALUES]:
        first, last = entry["before"][task], entry["after"][task]
        numbers = [f"{part[name]:>13.5f}" for name in _SHOWN[1::-1] for part in (first, last)]
        lines.append(
            f"  {value_name(entry['value'])[:29]:<30}{entry['examples']:>13,}" + "".join(numbers)
        )
    if len(by["values"]) > _SHOWN_VALUES:
        lines.append(f"  and {len(by['values']) - _SHOWN_VALUES:,} better ones; --json has more")
    return lines


def describe(result: Calibrated) -> str:
    """Formats the summary of `jaxrank calibrate`."""
    if result.method == NONE:
        return f"{result.checkpoint} has no calibration any more"
    lines = [
        f"{result.checkpoint}: {result.method} on {result.split}, measured on {result.measured_on}",
        f"{'':<24}" + "".join(f"{title:>14}" for title in ("logloss", "calibration", "ECE")),
    ]
    for task, after in result.after.items():
        if task in result.skipped:
            continue
        for title, values in (("before", result.before[task]), ("after", after)):
            cells = "".join(f" {values[name]:>13.5f}" for name in _SHOWN)
            lines.append(f"{task + ', ' + title:<24}{cells}")
    if result.by:
        lines.append(f"{result.by['fitted']:,} values of {result.by['feature']} have a correction")
        for task in result.after:
            if task not in result.skipped:
                lines += _by_value_lines(result.by, task)
    lines += [f"{task} is not calibrated: {why}" for task, why in result.skipped.items()]
    lines += _warnings(result)
    return "\n".join([*lines, f"calibration: {result.path}"])


def _warnings(result: Calibrated) -> list[str]:
    """Returns a line for each task whose logloss has risen on the split that was not fitted."""
    return [
        f"Warning: {task}: the logloss on {result.measured_on} is higher than before. The rate of"
        f" {result.split} may not hold there. `--method=none` removes the calibration."
        for task, after in result.after.items()
        if task not in result.skipped and after["logloss"] > result.before[task]["logloss"]
    ]
