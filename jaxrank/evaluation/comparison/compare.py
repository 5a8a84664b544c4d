"""Compares runs on the same examples, with intervals of the paired differences."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from ml_collections import ConfigDict

from jaxrank import config_files
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation import slices
from jaxrank.evaluation.evaluate import Opened, load_run, open_saved
from jaxrank.evaluation.requests import NO_REQUESTS, Requests, RequestSpec
from jaxrank.features import Task
from jaxrank.metrics import exact, intervals
from jaxrank.metrics.ranking import RequestValues
from jaxrank.metrics.registry import metric_named, probability_names
from jaxrank.metrics.regression import Floats
from jaxrank.report import Report

_MAX_SLICES = 1_000  # the largest ones


class Comparison(NamedTuple):
    """Result of `compare`. The first run is the one that others are compared with.

    runs: workdir, checkpoint, step, and metrics and their intervals by task of each run.
    differences: of each run but the first, {task: {metric: {difference, low, high}}}: its metric
        minus that of the first run, and the ends of the 95% interval. NaN where undefined.
    examples: number of rows.
    by: {column, values}: of each value its rows, and metrics and differences as above, in order
        of the runs. Days, hours and buckets of numbers are in their order. Of other values the
        worst of the first task are first, see `surely_worse`, and those without an interval are
        last, by falling rows. Others is the number of values that are left out. None unless
        requested.
    config: {field, values} of each field that differs between the runs.
    cluster: as in `Evaluation`, by the field `eval.cluster` of the run that `Rows` were read from.
        It is the first run of `compare`, and the new one of a gate.
    requests: {column, k} of the metrics of requests, by the same run. None: there are none.
    """

    runs: list[dict[str, Any]]
    differences: list[dict[str, dict[str, dict[str, float]]]]
    examples: int
    by: dict[str, Any] | None
    config: list[dict[str, Any]]
    cluster: dict[str, Any] | None = None
    requests: dict[str, Any] | None = None


class Rows(NamedTuple):
    """The groups and clusters of the examples that runs are compared on.

    groups: slices. None: there are none.
    clusters: by the field `eval.cluster`. None: examples are independent.
    spec, requests: see `requests.RequestSpec`.
    tasks: names of the columns of `requests.candidates`. Compared runs may have other tasks.
    """

    groups: slices.Groups | None = None
    clusters: slices.Clusters | None = None
    spec: RequestSpec = NO_REQUESTS
    requests: Requests | None = None
    tasks: tuple[str, ...] = ()

    @classmethod
    def read(cls, run: Opened, by: str) -> "Rows":
        """Reads the rows of an opened run. See `slices.read_groups` for `by` and errors."""
        tasks = tuple(task.name for task in run.predictor.layout.schema.tasks)
        requests = run.requests.read(run.split)
        return cls(run.groups(by), run.clusters(), run.requests, requests, tasks)


class ScoredRun(NamedTuple):
    """A run with the scores of all examples; see `scoring.Scored`.

    ranked: tasks that are trained by ranking alone, whose metrics of probabilities are NaN.
    """

    workdir: str
    config: ConfigDict
    step: int
    checkpoint: str
    tasks: Mapping[str, Task]
    split: Split
    scores: scoring.Scored
    ranked: tuple[str, ...] = ()

    @classmethod
    def from_scores(
        cls, workdir: str, run: Opened, step: int, scores: scoring.Scored
    ) -> "ScoredRun":
        tasks = {task.name: task for task in run.predictor.layout.schema.tasks}
        checkpoint, ranked = run.checkpoints.directory(step), run.requests.ranked
        config = run.saved.config
        return cls(workdir, config, step, checkpoint, tasks, run.split, scores, ranked)


def compare(
    workdirs: Sequence[str],
    *,
    data: str = "",
    split: str = "",
    batch_size: int | None = None,
    by: str = "",
    report: Report = print,
) -> Comparison:
    """Scores each run on its validation data and compares them with the first.

    The checkpoint is the best one of a run with early stopping, and the newest one of others.

    Args:
        workdirs: of at least two runs.
        data, split, batch_size: as in `evaluate.evaluate`.
        by: columns of the store of the first run, see `slices.read_groups`. Empty: none.
        report: receives a line per run.

    Raises:
        InputError: runs are absent, have no task in common, or were evaluated on other rows.
    """
    if len(workdirs) < 2:
        raise InputError(f"RUN: at least two runs must be given: found {len(workdirs)}.")
    paths = [str(Path(workdir).resolve()) for workdir in workdirs]
    if len(set(paths)) < len(paths):
        raise InputError(f"RUN: each run must be given once: found {', '.join(workdirs)}.")
    runs = [load_run(workdir) for workdir in workdirs]  # before the first one is scored
    opened = open_saved(runs[0], data=data, split=split, batch_size=batch_size)
    rows = Rows.read(opened, by)
    scored: list[ScoredRun] = []
    for workdir, run in zip(workdirs, runs, strict=True):
        report(f"Scoring {workdir}")
        if scored:
            opened = open_saved(run, data=data, split=split, batch_size=batch_size)
        scored.append(score(workdir, opened))
        if len(scored) > 1:
            check_rows(scored[0], scored[-1])
    return compare_scored(scored, rows)


def compare_scored(
    scored: Sequence[ScoredRun],
    rows: Rows,
    *,
    simultaneous: bool = False,
) -> Comparison:
    """Compares runs that were scored on the same rows with the first of them.

    Args:
        rows: what the examples belong to, read from any of the runs.
        simultaneous: widens the intervals of slices so that with 95% confidence all of them contain
            what they estimate (Bonferroni).
    """
    tasks = common_tasks([run.tasks for run in scored])
    every = np.arange(len(scored[0].scores.labels))
    compared, differences = _compared(scored, tasks, every, rows, intervals.CONFIDENCE)
    runs = [
        {"workdir": s.workdir, "checkpoint": s.checkpoint, "step": s.step} | of_run
        for s, of_run in zip(scored, compared, strict=True)
    ]
    flat = [config_files.flatten(config_files.to_plain(s.config)) for s in scored]
    fields = [
        {"field": field, "values": values} for field, *values in config_files.differing_fields(flat)
    ]
    sliced = None
    if rows.groups:
        sliced = _sliced(rows.groups, scored, tasks, rows, simultaneous)
        if not rows.groups.is_ordered:
            task, metrics = next(iter(compared[0]["metrics"].items()))
            metric = leading_metric(metrics)
            sliced["values"].sort(key=lambda entry: -surely_worse(entry, task, metric))
    cluster = rows.clusters.to_json() if rows.clusters else None
    requests = {"column": rows.spec.column, "k": rows.spec.k} if rows.requests else None
    return Comparison(runs, differences, len(every), sliced, fields, cluster, requests)


def score(workdir: str, run: Opened) -> ScoredRun:
    """Scores the checkpoint that represents a run.

    Raises:
        InputError: no label is known, or the checkpoint cannot be restored.
    """
    scoring.check_labelled(run.split)
    step, (weights, calibration) = run.checkpoints.read(
        run.saved.default_checkpoint,
        lambda step: (run.weights(step), run.calibration(step)),
    )
    scores = scoring.score_all(run.predictor, weights, run.split, run.batch_size, calibration)
    return ScoredRun.from_scores(workdir, run, step, scores)


def check_rows(first: ScoredRun, other: ScoredRun) -> None:
    """Raises InputError unless two runs were scored on the same examples in the same order."""
    if first.split.fingerprint == other.split.fingerprint:
        return
    where = f"{first.split.path} of {first.workdir} and {other.split.path} of {other.workdir}"
    must = f"{where} must hold the same examples in the same order"
    hint = "Give the data to score as --data, and the split as --split."
    rows = len(first.scores.labels), len(other.scores.labels)
    if rows[0] != rows[1]:
        raise InputError(f"{must}: found {rows[0]:,} and {rows[1]:,}. {hint}")
    for task in [name for name in first.tasks if name in other.tasks]:
        a, b = (list(run.tasks).index(task) for run in (first, other))
        labels = first.scores.labels[:, a] != other.scores.labels[:, b]
        weights = ~np.isclose(first.scores.weights[:, a], other.scores.weights[:, b])
        for kind, differ in (("labels", labels), ("weights", weights)):
            if differ.any():
                raise InputError(
                    f"{must}: found other {kind} of task {task!r} in {int(differ.sum()):,} of"
                    f" {rows[0]:,} rows, first in row {int(differ.argmax()) + 1:,}. {hint}"
                )
    kept = [_kept(run.split) for run in (first, other)]
    for name in [name for name in kept[0] if name in kept[1]]:
        if not kept[0][name].equals(kept[1][name]):
            raise InputError(f"{must}: found other values of column {name!r}. {hint}")


def _kept(split: Split) -> dict[str, pa.Array]:
    """Reads the columns that a split keeps, without dictionaries."""
    batches = [block.kept for block in split.blocks() if block.kept is not None]
    columns = {}
    for name in batches[0].schema.names if batches else []:
        column = pa.chunked_array([batch.column(name) for batch in batches])
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        columns[name] = column.combine_chunks()
    return columns


def common_tasks(of_runs: Sequence[Mapping[str, Task]]) -> list[Task]:
    """Returns the tasks that all runs have.

    Raises:
        InputError: there are none.
    """
    tasks = [
        task
        for name, task in of_runs[0].items()
        if all(name in tasks and tasks[name].kind == task.kind for tasks in of_runs)
    ]
    if not tasks:
        names = "; ".join(", ".join(tasks) for tasks in of_runs)
        raise InputError(f"RUN: the runs must have a task in common: found {names}.")
    return tasks


def leading_metric(metrics: Mapping[str, float]) -> str:
    """Returns the metric by which slices are compared: the first one that is defined."""
    # The loss of a task that is only ranked is NaN.
    defined = [name for name, value in metrics.items() if not math.isnan(value)]
    return (defined or list(metrics))[0]


def surely_worse(entry: Mapping[str, Any], task: str, metric: str) -> float:
    """Returns the bound of the interval by which a metric of a slice is worse than the first run's,
    of the worst run. It is the lowest number where it is undefined.
    """
    spans = [of_run[task][metric] for of_run in entry["differences"]]
    is_higher_better = metric_named(metric).higher_is_better
    bounds = [-span["high"] if is_higher_better else span["low"] for span in spans]
    return max((bound for bound in bounds if not math.isnan(bound)), default=-math.inf)


def _compared(
    scored: Sequence[ScoredRun],
    tasks: Sequence[Task],
    members: np.ndarray,
    rows: Rows,
    confidence: float,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compares runs on the examples `members`, i64[n].

    Returns:
        Metrics and intervals of each run, and the differences of all but the first.
    """
    runs: list[dict[str, Any]] = [{"metrics": {}, "intervals": {}} for _ in scored]
    differences: list[dict[str, Any]] = [{} for _ in scored[1:]]
    code = rows.clusters.code[members] if rows.clusters else None
    for task in tasks:
        models = [_influences(run, task, members, rows, code) for run in scored]
        base = models[0]
        for of_run, model in zip(runs, models, strict=True):
            of_run["metrics"][task.name] = model.metrics
            margins = model.margins(confidence)
            of_run["intervals"][task.name] = slices.interval_ends(model.metrics, margins)
        for of_task, model in zip(differences, models[1:], strict=True):
            of_task[task.name] = {
                name: _interval(model.metrics[name] - base.metrics[name], margin)
                for name, margin in model.margins(confidence, base).items()
            }
    return runs, differences


class _Influences(NamedTuple):
    """Metrics of one task of a run, and what each example or request adds to them."""

    metrics: dict[str, float]
    influence: dict[str, Floats]
    weights: np.ndarray
    requests: RequestValues | None
    code: np.ndarray | None

    def margins(
        self, confidence: float, other: "_Influences | None" = None
    ) -> dict[str, intervals.Margins]:
        """Returns the margins of each interval, of the difference if there is another."""
        paired = other.influence if other else None
        margins = intervals.margins(self.influence, self.weights, paired, self.code, confidence)
        if self.requests is None:
            return margins
        of_other = other.requests if other else None
        return margins | intervals.request_margins(self.requests, of_other, self.code, confidence)


def _influences(
    run: ScoredRun,
    task: Task,
    members: np.ndarray,
    rows: Rows,
    code: np.ndarray | None,
) -> _Influences:
    """Scores a task of a run."""
    column = list(run.tasks).index(task.name)
    logits, labels, weights = (array[members, column] for array in run.scores)
    metrics = exact.exact(logits, labels, weights, task.kind)
    if task.name in run.ranked:
        metrics |= dict.fromkeys(metrics.keys() & probability_names(task.kind), math.nan)
    influence = intervals.influences(logits, labels, weights, task.kind, code)
    requests = None
    if rows.requests:
        index = rows.tasks.index(task.name)
        requests = rows.requests.score(index, task.kind, logits, labels, weights, members)
    if requests is not None:
        metrics |= requests.metrics()
    return _Influences(metrics, influence, weights, requests, code)


def _interval(difference: float, margin: intervals.Margins) -> dict[str, float]:
    low, high = margin.ends(difference)
    return {"difference": difference, "low": low, "high": high}


def _sliced(
    groups: slices.Groups,
    scored: Sequence[ScoredRun],
    tasks: Sequence[Task],
    rows: Rows,
    simultaneous: bool,
) -> dict[str, Any]:
    """Compares the runs on each of the largest slices."""
    members = groups.members()
    chosen = slices.sort_by_size(members)[:_MAX_SLICES]
    tail = 1 - intervals.CONFIDENCE
    confidence = 1 - tail / max(len(chosen), 1) if simultaneous else intervals.CONFIDENCE
    values = []
    for i in sorted(chosen) if groups.is_ordered else chosen:
        compared, differences = _compared(scored, tasks, members[i], rows, confidence)
        values.append(
            {
                "value": groups.values[i],
                "examples": len(members[i]),
                "runs": compared,
                "differences": differences,
            }
        )
    return {
        "column": groups.column,
        "is_ordered": groups.is_ordered,
        "simultaneous": simultaneous,
        "values": values,
        "others": sum(len(rows) > 0 for rows in members) - len(values),
    }
