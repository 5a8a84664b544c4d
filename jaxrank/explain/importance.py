"""Permutation importance: how much worse a model is without the values of a feature.

References:
    Breiman, Random Forests, Machine Learning 2001.
    Fisher et al., All Models are Wrong, but Many are Useful, JMLR 2019.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrank.data.examples import Examples, cut, join
from jaxrank.data.store.memory import InMemorySplit
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.evaluate import open_run
from jaxrank.evaluation.report import margins_text, value_name
from jaxrank.evaluation.score import Scored
from jaxrank.evaluation.slices import Groups
from jaxrank.explain.permute import groups, permuted
from jaxrank.features import Task
from jaxrank.metrics import exact, intervals
from jaxrank.metrics.registry import BY_NAME, METRICS, TITLES
from jaxrank.report import Report

ROWS = 100_000
_SLICES = 20  # of most examples
_UNMEASURED = "a count that is trained by ranking alone has neither a loss nor an AUC"


class Importance(NamedTuple):
    """Result of `explain`.

    base: {task: {metric: value}} of the model as it is.
    changes: {group: {task: {metric: [change, low, high]}}}, the change by permuting the features of
        the group, with its 95% interval. Of the loss, and of the AUC of a binary task. A task that
        is trained by ranking alone has no loss as a probability, so it has only its AUC.
    by: {column, values: [{value, examples, changes}]}, if requested.
    groups: {group: its features}.
    """

    step: int
    checkpoint: str
    data: str
    rows: int
    base: dict[str, dict[str, float]]
    changes: dict[str, Any]
    by: dict[str, Any] | None
    groups: dict[str, tuple[str, ...]]
    seconds: float


def explain(
    workdir: str,
    *,
    checkpoint: str = "newest",
    data: str = "",
    split: str = "",
    batch_size: int | None = None,
    by: str = "",
    group: Sequence[str] = (),
    rows: int = ROWS,
    seed: int = 0,
    report: Report = print,
) -> Importance:
    """Measures how the metrics of a checkpoint change if a feature belongs to other examples.

    Each group of features is permuted at random among the examples, with everything else unchanged.
    Intervals are paired: both models are scored on the same examples.

    Args:
        workdir, checkpoint, data, split, batch_size, by: see `evaluate.evaluate`.
        group: see `permute.groups`.
        rows: maximum number of examples, the first ones of the split.
        seed: of the permutations.

    Raises:
        InputError: see `evaluate.evaluate`, or a group or `rows` is invalid, or no task has a
            metric.
    """
    started = time.perf_counter()
    if rows < 2:
        raise InputError(f"--rows: must be at least 2: found {rows}.")
    run = open_run(workdir, data=data, split=split, batch_size=batch_size)
    scoring.check_labelled(run.split)
    schema = run.predictor.layout.schema
    named = groups(schema, group)
    metrics = _names(schema.tasks, run.requests.ranked)
    _check_measured(workdir, schema.tasks, metrics, report)
    slices, clusters = run.groups(by), run.clusters()
    step, (weights, calibration) = run.checkpoints.read(
        checkpoint, lambda step: (run.weights(step), run.calibration(step))
    )
    examples = _first(run.split, rows)

    def score(split: Split) -> Scored:
        return scoring.score_all(run.predictor, weights, split, run.batch_size, calibration)

    passes = _Passes(score, len(named), report)
    base = passes.score(examples)
    code = clusters.code[: examples.rows] if clusters else None
    every = np.arange(examples.rows)
    members = _members(slices, examples.rows)
    subsets = [every, *(inside for _, inside in members)]
    changes: list[dict[str, Any]] = [{} for _ in subsets]
    for number, (name, features) in enumerate(named.items()):
        order = np.random.default_rng([seed, number]).permutation(examples.rows)
        after = passes.score(permuted(examples, schema, features, order))
        for subset, entry in zip(subsets, changes, strict=True):
            entry[name] = _changes(base, after, schema.tasks, metrics, subset, code)
    sliced = None
    if slices is not None:
        values = [
            {"value": value, "examples": len(inside), "changes": entry}
            for (value, inside), entry in zip(members, changes[1:], strict=True)
        ]
        sliced = {"column": by, "values": values}
    return Importance(
        step=step,
        checkpoint=run.checkpoints.directory(step),
        data=str(run.split.path),
        rows=examples.rows,
        base=_metrics(base, schema.tasks, metrics, every),
        changes=changes[0],
        by=sliced,
        groups=named,
        seconds=time.perf_counter() - started,
    )


def _check_measured(
    workdir: str, tasks: Sequence[Task], metrics: Mapping[str, list[str]], report: Report
) -> None:
    """Reports tasks without a metric. Raises InputError if none has one."""
    for task in tasks:
        if task.name not in metrics:
            report(f"{task.name} is left out: {_UNMEASURED}")
    if not metrics:
        names = ", ".join(task.name for task in tasks)
        raise InputError(
            f"{workdir}: must have a task with a loss or an AUC to measure importance by: found"
            f" {names}: {_UNMEASURED}."
        )


class _Passes:
    """Scores the examples as they are and with each group permuted, and reports the cost first.

    Args:
        score: scores a split.
        groups: number of groups of features.
    """

    def __init__(self, score: Callable[[Split], Scored], groups: int, report: Report):
        self._score, self._groups, self._report = score, groups, report
        self._seconds: list[float] = []

    def score(self, examples: Examples) -> Scored:
        groups = self._groups
        if not self._seconds:
            self._report(
                f"{groups + 1} passes over {examples.rows:,} examples, for {groups} features or"
                " groups"
            )
        start = time.perf_counter()
        result = self._score(InMemorySplit(examples, "permuted", any_order=True))
        self._seconds.append(time.perf_counter() - start)
        if len(self._seconds) == 2:  # the first one compiles
            remaining = self._seconds[1] * (groups - 1)
            self._report(f"About {remaining:,.1f} s for the remaining passes")
        return result


def _first(split: Split, rows: int) -> Any:
    """Returns the first examples of a split, at most this number."""
    parts, count = [], 0
    for block in split.blocks():
        parts.append(block)
        count += block.rows
        if count >= rows:
            break
    return cut(join(parts), 0, min(rows, count))


def _members(groups: Groups | None, rows: int) -> list[tuple[Any, np.ndarray]]:
    """Returns the values of most examples, with the examples of each."""
    if groups is None:
        return []
    members = groups._replace(code=groups.code[:rows]).members()
    largest = sorted(range(len(members)), key=lambda i: -len(members[i]))[:_SLICES]
    return [(groups.values[i], members[i]) for i in largest if len(members[i])]


def _names(tasks: Sequence[Task], ranked: Collection[str]) -> dict[str, list[str]]:
    """Returns the loss of each task, and AUC if it is binary. Tasks without a metric are absent.

    Args:
        ranked: tasks whose scores are no probabilities, so that their loss has no meaning.
    """
    result = {}
    for task in tasks:
        names = [metric.name for metric in METRICS[task.kind]][: 2 if task.kind == "binary" else 1]
        names = names[1:] if task.name in ranked else names
        if names:
            result[task.name] = names
    return result


def _metrics(
    scored: Scored, tasks: Sequence[Task], names: Mapping[str, list[str]], rows: np.ndarray
) -> dict[str, Any]:
    result = {}
    for i, task in enumerate(tasks):
        if task.name in names:
            x, y, w = (a[rows, i] for a in scored)
            metrics = exact.exact(x, y, w, task.kind)
            result[task.name] = {name: metrics[name] for name in names[task.name]}
    return result


def _changes(
    base: Scored,
    after: Scored,
    tasks: Sequence[Task],
    names: Mapping[str, list[str]],
    rows: np.ndarray,
    clusters: np.ndarray | None,
) -> dict[str, Any]:
    """Returns {task: {metric: [change, low, high]}} on some of the examples."""
    before, now = (_metrics(scored, tasks, names, rows) for scored in (base, after))
    inside = None if clusters is None else clusters[rows]
    result = {}
    for i, task in enumerate(tasks):
        if task.name not in names:
            continue
        weights = base.weights[rows, i]
        influences = [
            intervals.influences(s.logits[rows, i], s.labels[rows, i], weights, task.kind, inside)
            for s in (after, base)
        ]
        margins = intervals.margins(influences[0], weights, influences[1], inside)
        changes = {
            name: now[task.name][name] - before[task.name][name] for name in names[task.name]
        }
        result[task.name] = {
            name: [change, *margins[name].ends(change)] for name, change in changes.items()
        }
    return result


def describe(result: Importance) -> str:
    """Formats the table: the most important features first."""
    lines = [f"{result.checkpoint} on {result.rows:,} examples of {result.data}"]
    lines += _table(result.base, result.changes, "")
    for entry in result.by["values"] if result.by else ():
        where = f", {result.by['column'] if result.by else ''} {value_name(entry['value'])}"
        lines += _table(result.base, entry["changes"], f"{where}: {entry['examples']:,} examples")
    return "\n".join(lines)


def _table(base: dict[str, dict[str, float]], changes: dict[str, Any], where: str) -> list[str]:
    lines = []
    for task, metrics in base.items():
        rows = {
            group: [
                (changes[group][task][n][0], margins_text(*changes[group][task][n]))
                for n in metrics
            ]
            for group in _sorted(changes, task)
        }
        width = max([10, *(len(text) for cells in rows.values() for _, text in cells)])
        titles = "".join(f"{'change of ' + TITLES[name]:>{18 + width}}" for name in metrics)
        lines.append(f"{task + where:<28}{titles}")
        for group, cells in rows.items():
            shown = "".join(f" {change:>+16.5f} {text:<{width}}" for change, text in cells)
            lines.append(f"  {group:<26}{shown}".rstrip())
    return lines


def _sorted(changes: dict[str, Any], task: str) -> list[str]:
    """Returns the groups by the change of the first metric, the one that loses most first."""
    name = next(iter(next(iter(changes.values()))[task]))
    sign = 1 if BY_NAME[name].higher_is_better else -1
    return sorted(changes, key=lambda group: sign * changes[group][task][name][0])


def panels(result: Importance) -> list[dict[str, Any]]:
    """Returns the picture of each task, for `plots.draw_panels`."""
    drawn = []
    for task, metrics in result.base.items():
        loss = next(iter(metrics))
        names = _sorted(result.changes, task)
        change, low, high = (
            [result.changes[name][task][loss][i] for name in names] for i in range(3)
        )
        points: dict[str, Any] = {"label": "", "x": names, "y": change, "low": low, "high": high}
        drawn.append(
            {
                "title": f"{task}: importance of features",
                "series": [points | {"color": "C0", "style": "points"}],
                "x_label": "permuted",
                "y_label": f"change of {TITLES[loss]}, 95% interval",
                "x_scale": "linear",
                "y_scale": "linear",
            }
        )
    return drawn
