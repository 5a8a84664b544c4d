"""Calibrates the predictions of a checkpoint, and measures the result on another split."""

import time
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from jaxrank.calibration import files
from jaxrank.calibration.fit import METHODS
from jaxrank.calibration.maps import Calibration, LogitMap
from jaxrank.errors import InputError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.calibrate_by_value import (
    SHOWN,
    check_feature,
    fit_by_value,
    measure_by_value,
    measure_tasks,
    table_lines,
)
from jaxrank.evaluation.evaluate import open_run
from jaxrank.evaluation.score import Scored
from jaxrank.features import Schema
from jaxrank.report import Report
from jaxrank.runtime import processes
from jaxrank.validate import check_choice

NONE = "none"  # removes the calibration
_MIN_LABELS = 10  # positives, and negatives, of a task


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
    saved = run.saved
    if by:
        check_feature(saved.schema, by)
    name, measured_on = run.split.name, measure_on or saved.builder.data.valid
    if method != NONE and measured_on == name:
        raise InputError(
            "--measure-on: must name another split than --split, because the fit has seen its"
            f" labels: found {measured_on!r} for both."
        )
    step, weights = run.checkpoints.read(checkpoint, run.weights)
    path = files.calibration_path(saved.directory, step)
    where = run.checkpoints.directory(step)
    if method == NONE:
        if processes.is_first():
            path.unlink(missing_ok=True)
        seconds = time.perf_counter() - started
        return Calibrated(step, method, name, "", {}, {}, {}, "", where, seconds)
    schema, ranked = saved.schema, run.requests.ranked
    other = run.with_split(measure_on, "--measure-on")
    for opened in (run, other):
        scoring.check_labelled(opened.split)
    fitted_on, measured = (
        scoring.score_all(run.predictor, weights, opened.split, run.batch_size)
        for opened in (run, other)
    )
    if name == saved.builder.data.train:
        report(f"--split={name}: the model was trained on these labels, and looks better there")
    fit_path = str(run.split.path)
    maps, skipped = _fit(fitted_on, schema, method, fit_path, ranked)
    tasks = [task.name for task in schema.tasks]
    origin = {"method": method, "split": name, "tasks": [tasks[i] for i in maps]}
    corrections, rows = None, None
    if by:
        fitted_rows, rows = (
            scoring.feature_rows(opened.split, schema, by) for opened in (run, other)
        )
        corrections = fit_by_value(by, maps, fitted_on, fitted_rows, schema, fit_path)
        origin["by"] = by
    calibration = Calibration(maps, saved.builder.parents, origin, corrections)
    mapped = scoring.calibrated(measured, calibration, rows)
    values = measure_by_value(corrections, measured, mapped, other) if corrections else None
    before, after = (measure_tasks(scored, schema, ranked) for scored in (measured, mapped))
    sums = run.checkpoints.saved_checksums(step)["weights"]  # exchanged between the processes
    with processes.together():  # last: a calibration that cannot be measured is not kept
        if processes.is_first():
            files.save(saved.directory, step, calibration, tasks, sums)
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


def _fit(
    scored: Scored, schema: Schema, method: str, data: str, ranked: Collection[str]
) -> tuple[dict[int, LogitMap], dict[str, str]]:
    """Returns the map of each task, and why others have none.

    Raises:
        InputError: no task can be calibrated, or labels do not rise with the predictions.
    """
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
    if not maps:
        reasons = ", ".join(f"{task}: {why}" for task, why in skipped.items())
        raise InputError(f"{data}: must have a task to calibrate: found {reasons}.")
    return maps, skipped


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
            cells = "".join(f" {values[name]:>13.5f}" for name in SHOWN)
            lines.append(f"{task + ', ' + title:<24}{cells}")
    if result.by:
        lines.append(f"{result.by['fitted']:,} values of {result.by['feature']} have a correction")
        for task in result.after:
            if task not in result.skipped:
                lines += table_lines(result.by, task)
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
