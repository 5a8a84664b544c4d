"""Metrics per value of a column or of several, for example per country or per day."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrank.data.store.reader import Store
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.evaluation.columns import UNKNOWN, Column, column_names, read_columns
from jaxrank.evaluation.requests import NO_REQUESTS, Requests, RequestSpec, request_intervals
from jaxrank.features import Task
from jaxrank.metrics import exact, intervals
from jaxrank.metrics.ranking import gauc
from jaxrank.metrics.registry import NORMALIZED

MAX_VALUES = 100_000  # maximum number of distinct values
_MAX_SLICES_WITH_INTERVALS = 1_000  # slices, the largest ones, whose metrics have intervals


class Slices(NamedTuple):
    """Metrics per value of a column.

    column: name of the column, or names with commas between.
    values: [{"value": the value, "metrics": by task, "intervals": by task}]. Days, hours and
        buckets of numbers are in their order. Of other values the worst of the first task that has
        probabilities are first, see `surely_lost`. Those without an interval are last, by falling
        rows, and so are all values if no task has probabilities. A missing
        value is None, and of several columns the value is a list. Floats that are not finite are
        text: "nan", "inf", "-inf". The intervals are [low, high] of each metric. Only the largest
        slices have them, and metrics of requests, whose candidates are those of the slice.
    gauc: of each binary task, the mean AUC over values with both labels, weighted by the weights of
        their examples. NaN if there are no such values. Zhou et al., Deep Interest Network for
        Click-Through Rate Prediction, KDD 2018.
    gauc_excluded: of each binary task, the fraction of the weight in values without both labels.
    is_ordered: see `Groups`.
    """

    column: str
    values: list[dict[str, Any]]
    gauc: dict[str, float]
    gauc_excluded: dict[str, float]
    is_ordered: bool = False


class Groups(NamedTuple):
    """The examples of a split, grouped by the value of a column.

    code: i64[n], the index in `values` of each example, in stored order.
    is_ordered: the values have an order, such as days, which results keep.
    """

    column: str
    values: list[Any]
    code: np.ndarray
    is_ordered: bool = False

    def members(self) -> list[np.ndarray]:
        """Returns the indices of the examples of each value, ascending."""
        order = np.argsort(self.code, kind="stable")
        counts = np.bincount(self.code, minlength=len(self.values))
        return np.split(order, np.cumsum(counts)[:-1])


class Clusters(NamedTuple):
    """The examples of a split by a column whose values are independent, such as the user.

    size: number of clusters.
    code: i64[n], the number of each example's cluster.
    """

    column: str
    size: int
    code: np.ndarray

    def to_json(self) -> dict[str, Any]:
        """Returns the entry of a result."""
        return {"column": self.column, "clusters": self.size}


def sort_by_size(members: Sequence[np.ndarray]) -> list[int]:
    """Returns the indices of groups in descending order of examples, without empty groups.

    Groups of equal size keep their order.
    """
    order = sorted(range(len(members)), key=lambda i: -len(members[i]))
    return [i for i in order if len(members[i])]


def read_groups(store: Store, split: Split, by: str, *, is_limited: bool = True) -> Groups:
    """Reads the columns to slice by.

    Args:
        store: as it is stored, not as a model reads it.
        split: of that store.
        by: a column, or several with commas between. See `columns.read_columns`.
        is_limited: whether more than MAX_VALUES distinct values are rejected.

    Raises:
        InputError: a column is absent or holds lists, or has too many distinct values.
    """
    columns = read_columns(store, split, column_names(store, split, by, "--by"), "--by")
    groups = Groups(*columns[0]) if len(columns) == 1 else _joined(columns, by)
    present = np.count_nonzero(np.bincount(groups.code, minlength=1))
    if is_limited and present > MAX_VALUES:
        raise InputError(
            f"--by: column {by!r} must have at most {MAX_VALUES:,} different values: found"
            f" {present:,}. Numbers can be divided into buckets: --by=NAME/20."
        )
    return groups


def read_clusters(store: Store, split: Split, column: str) -> Clusters | None:
    """Reads the column `eval.cluster`. Returns None if it is empty.

    Examples whose value is missing or outside the vocabulary are independent. They may belong to
    very many clusters, so one for all of them would make intervals far too wide.

    Raises:
        InputError: as in `read_groups`.
    """
    if not column:
        return None
    (read,) = read_columns(store, split, [column], "eval.cluster")
    unknown = (None, "nan", UNKNOWN)  # NaN of a float column is the text "nan"
    is_alone = np.array([value in unknown for value in read.values], bool)[read.code]
    code = np.where(is_alone, len(read.values) + np.arange(len(is_alone)), read.code)
    return Clusters(column, len(np.unique(code)), code)


def _joined(columns: Sequence[Column], by: str) -> Groups:
    """Groups by the values of several columns together. Values are lists, in order of columns."""
    code = np.zeros(len(columns[0].code), np.int64)
    for column in columns:
        code = code * len(column.values) + column.code
        # Renumbered after each column, so that the product of many numbers does not overflow.
        _, code = np.unique(code, return_inverse=True)
    _, first = np.unique(code, return_index=True)
    values = [[c.values[int(c.code[i])] for c in columns] for i in first]
    return Groups(by, values, code, all(c.is_ordered for c in columns))


def group_metrics(
    groups: Groups,
    tasks: Sequence[Task],
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    clusters: Clusters | None = None,
    spec: RequestSpec = NO_REQUESTS,
    requests: Requests | None = None,
) -> Slices:
    """Computes the metrics of each group of a split.

    Args:
        groups: of the examples.
        tasks: of the run.
        logits, labels, weights: f32[n, tasks], of all examples in stored order.
        clusters: of the examples, for the intervals.
        spec: how requests are scored, and which scores are no probabilities.
        requests: of the examples. None: there are no metrics of requests.
    """
    members = groups.members()
    values: list[dict[str, Any]] = [
        {
            "value": value,
            "metrics": {
                task.name: exact.exact(
                    logits[rows, i], labels[rows, i], weights[rows, i], task.kind
                )
                for i, task in enumerate(tasks)
            },
        }
        for value, rows in zip(groups.values, members, strict=True)
    ]
    order = sort_by_size(members)
    for i in order[:_MAX_SLICES_WITH_INTERVALS]:
        rows = members[i]
        code = clusters.code[rows] if clusters else None
        values[i]["intervals"] = {}
        for t, task in enumerate(tasks):
            scored = (logits[rows, t], labels[rows, t], weights[rows, t])
            metrics = values[i]["metrics"][task.name]
            spans = metric_intervals(metrics, *scored, task.kind, code)
            of_requests = requests.score(t, task.kind, *scored, rows) if requests else None
            ranked = of_requests.metrics() if of_requests else {}
            ranked_spans = request_intervals(of_requests, code) if of_requests else {}
            values[i]["metrics"][task.name] = spec.joined(task, metrics, ranked)
            values[i]["intervals"][task.name] = spec.joined(task, spans, ranked_spans)
    for i in order[_MAX_SLICES_WITH_INTERVALS:]:
        for task in tasks:
            metrics = values[i]["metrics"][task.name]
            values[i]["metrics"][task.name] = spec.without_probabilities(task, metrics)
    gaucs = {
        task.name: gauc(logits[:, i], labels[:, i], weights[:, i], groups.code)
        for i, task in enumerate(tasks)
        if task.kind == "binary"
    }
    shown = sorted(order)
    if not groups.is_ordered:
        first = next((task.name for task in tasks if task.name not in spec.ranked), "")
        shown = sorted(order, key=lambda i: -surely_lost(values[i], first))
    return Slices(
        groups.column,
        [values[i] for i in shown],
        {name: mean for name, (mean, _) in gaucs.items()},
        {name: excluded for name, (_, excluded) in gaucs.items()},
        groups.is_ordered,
    )


def surely_lost(entry: Mapping[str, Any], task: str) -> float:
    """Returns the lower end of the interval of the normalised loss of a slice, by which the worst
    is first. It is the lowest number where it is undefined.
    """
    spans = entry.get("intervals", {}).get(task, {})
    low = next((span[0] for name, span in spans.items() if name in NORMALIZED and span), None)
    return -math.inf if low is None or math.isnan(low) else low


def metric_intervals(
    metrics: Mapping[str, float],
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    kind: str,
    clusters: np.ndarray | None,
    confidence: float = intervals.CONFIDENCE,
) -> dict[str, list[float]]:
    """Computes {metric: [low, high]} of the metrics of one task, NaN where undefined.

    Args:
        metrics: of these examples.
        logits, labels, weights: of the examples, each [n].
        clusters: i64[n]. None: examples are independent.
    """
    influence = intervals.influences(logits, labels, weights, kind, clusters)
    margins = intervals.margins(influence, weights, clusters=clusters, confidence=confidence)
    return interval_ends(metrics, margins)


def interval_ends(
    metrics: Mapping[str, float], margins: Mapping[str, intervals.Margins]
) -> dict[str, list[float]]:
    """Returns {metric: [low, high]}."""
    return {name: list(margin.ends(metrics[name])) for name, margin in margins.items()}
