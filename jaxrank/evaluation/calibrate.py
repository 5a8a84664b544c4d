"""Calibrates the predictions of a checkpoint, and measures the result on another split."""

import time
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from jaxrank.build import task_parents
from jaxrank.calibration import files
from jaxrank.calibration.fit import METHODS
from jaxrank.calibration.maps import Calibration, LogitMap
from jaxrank.errors import InputError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.evaluate import load_run, open_run
from jaxrank.evaluation.score import Scored
from jaxrank.features import Schema
from jaxrank.metrics import exact
from jaxrank.report import Report
from jaxrank.runtime import processes
from jaxrank.validate import check_choice

NONE = "none"  # removes the calibration
_MIN_LABELS = 10  # positives, and negatives, of a task
_SHOWN = ("logloss", "calibration", "calibration_error")


class Calibrated(NamedTuple):
    """Result of `calibrate`.

    before, after: {task: logloss, calibration and expected calibration error} on the split
        `measured_on`. Empty if the calibration was removed.
    skipped: {task: why it is not calibrated}.
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


def calibrate(
    workdir: str,
    *,
    method: str = "platt",
    checkpoint: str = "newest",
    data: str = "",
    split: str,
    measure_on: str = "",
    batch_size: int | None = None,
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

    Raises:
        InputError: see `evaluate.evaluate`, or both splits are the same, or labels do not rise with
            the predictions.
    """
    started = time.perf_counter()
    check_choice("--method", method, (*METHODS, NONE))
    run = open_run(workdir, data=data, split=split, batch_size=batch_size)
    saved = load_run(workdir)
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
    calibration = Calibration(maps, parents, origin)
    sums = run.checkpoints.saved_checksums(step)["weights"]  # exchanged between the processes
    with processes.together():
        if processes.is_first():
            files.save(run.directory, step, calibration, tasks, sums)
    return Calibrated(
        step=step,
        method=method,
        split=name,
        measured_on=measured_on,
        before=_measure(measured, schema, ranked),
        after=_measure(scoring.calibrated(measured, calibration), schema, ranked),
        skipped=skipped,
        path=str(path),
        checkpoint=where,
        seconds=time.perf_counter() - started,
    )


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
    lines += [f"{task} is not calibrated: {why}" for task, why in result.skipped.items()]
    return "\n".join([*lines, f"calibration: {result.path}"])
