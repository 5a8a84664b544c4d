"""Compares runs on the same examples, with intervals of the paired differences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank import config_files
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation import slices
from jaxrank.evaluation.evaluate import load_run, open_run
from jaxrank.features import Task
from jaxrank.metrics import exact, intervals
from jaxrank.report import Report

_MOST_SLICES = 1_000  # the largest ones


class Comparison(NamedTuple):
    """Result of `compare`. The first run is the one that others are compared with.

    runs: workdir, checkpoint, step and metrics by task of each run.
    differences: of each run but the first, {task: {metric: {difference, low, high}}}: its metric
        minus that of the first run, and the ends of the 95% interval. NaN where undefined.
    examples: number of rows.
    by: {column, values}: of each value its rows, and metrics and differences as above, in order
        of the runs. None unless requested.
    config: {field, values} of each field that differs between the runs.
    """

    runs: list[dict[str, Any]]
    differences: list[dict[str, dict[str, dict[str, float]]]]
    examples: int
    by: dict[str, Any] | None
    config: list[dict[str, Any]]


class _Scored(NamedTuple):
    """A run with the scores of all examples; see `scoring.Scored`."""

    workdir: str
    step: int
    checkpoint: str
    tasks: Mapping[str, Task]
    split: Split
    scores: scoring.Scored


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
        by: a column that the store of the first run keeps, or "day". Empty: none.
        report: receives a line per run.

    Raises:
        InputError: runs are absent, have no task in common, or were evaluated on other rows.
    """
    if len(workdirs) < 2:
        raise InputError(f"RUN: at least two runs must be given: found {len(workdirs)}.")
    paths = [str(Path(workdir).resolve()) for workdir in workdirs]
    if len(set(paths)) < len(paths):
        raise InputError(f"RUN: each run must be given once: found {', '.join(workdirs)}.")
    for workdir in workdirs:
        load_run(workdir)  # before the first one is scored
    scored: list[_Scored] = []
    for workdir in workdirs:
        report(f"Scoring {workdir}")
        scored.append(_score(workdir, data=data, split=split, batch_size=batch_size))
        if len(scored) > 1:
            _check_rows(scored[0], scored[-1])
    tasks = _common_tasks(scored)
    rows = np.arange(len(scored[0].scores.labels))
    metrics, differences = _compared(scored, tasks, rows)
    runs = [
        {"workdir": s.workdir, "checkpoint": s.checkpoint, "step": s.step, "metrics": m}
        for s, m in zip(scored, metrics, strict=True)
    ]
    flat = [config_files.flatten(config_files.to_plain(load_run(w).config)) for w in workdirs]
    fields = [
        {"field": field, "values": values} for field, *values in config_files.differing_fields(flat)
    ]
    sliced = _sliced(slices.groups_of(scored[0].split, by), scored, tasks) if by else None
    return Comparison(runs, differences, len(rows), sliced, fields)


def _score(workdir: str, **which: Any) -> _Scored:
    run = open_run(workdir, **which)
    scoring.check_labelled(run.split)
    step, weights = run.checkpoints.read(load_run(workdir).judged_by, run.weights)
    size = scoring.whole_groups(run.batch_size, run.predictor)
    parts = list(scoring.score(run.predictor, weights, run.split, size))
    scores = scoring.Scored(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    tasks = {task.name: task for task in run.predictor.layout.schema.tasks}
    return _Scored(workdir, step, run.checkpoints.directory(step), tasks, run.split, scores)


def _check_rows(first: _Scored, other: _Scored) -> None:
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
        for what, differ in (("labels", labels), ("weights", weights)):
            if differ.any():
                raise InputError(
                    f"{must}: found other {what} of task {task!r} in {int(differ.sum()):,} of"
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


def _common_tasks(scored: Sequence[_Scored]) -> list[Task]:
    tasks = [
        task
        for name, task in scored[0].tasks.items()
        if all(name in s.tasks and s.tasks[name].kind == task.kind for s in scored)
    ]
    if not tasks:
        names = "; ".join(", ".join(s.tasks) for s in scored)
        raise InputError(f"RUN: the runs must have a task in common: found {names}.")
    return tasks


def _compared(
    scored: Sequence[_Scored], tasks: Sequence[Task], rows: np.ndarray
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the metrics of each run, and the differences of all but the first."""
    metrics: list[dict[str, Any]] = [{} for _ in scored]
    differences: list[dict[str, Any]] = [{} for _ in scored[1:]]
    for task in tasks:
        influences = []
        for of_run, run in zip(metrics, scored, strict=True):
            column = list(run.tasks).index(task.name)
            logits, labels, weights = (array[rows, column] for array in run.scores)
            of_run[task.name] = exact.exact(logits, labels, weights, task.kind)
            influences.append(intervals.influences(logits, labels, weights, task.kind))
        for of_task, of_run, influence in zip(
            differences, metrics[1:], influences[1:], strict=True
        ):
            errors = intervals.standard_errors(influence, weights, influences[0])
            base = metrics[0][task.name]
            of_task[task.name] = {
                name: _interval(of_run[task.name][name] - base[name], error)
                for name, error in errors.items()
            }
    return metrics, differences


def _interval(difference: float, error: float) -> dict[str, float]:
    half = intervals.Z * error
    return {"difference": difference, "low": difference - half, "high": difference + half}


def _sliced(
    groups: slices.Groups, scored: Sequence[_Scored], tasks: Sequence[Task]
) -> dict[str, Any]:
    """Compares the runs on each value of a column, in descending order of rows."""
    members = groups.members()
    values = []
    for i in slices.sort_by_size(members)[:_MOST_SLICES]:
        metrics, differences = _compared(scored, tasks, members[i])
        values.append(
            {
                "value": groups.values[i],
                "examples": len(members[i]),
                "runs": [{"metrics": of_run} for of_run in metrics],
                "differences": differences,
            }
        )
    return {"column": groups.column, "values": values}
