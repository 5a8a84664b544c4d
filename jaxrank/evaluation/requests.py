"""Scores the requests of a split: the examples that share a value of `features.group`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data.examples import candidates, request_starts
from jaxrank.data.store.reader import Store
from jaxrank.data.store.split import Split
from jaxrank.evaluation.columns import coded
from jaxrank.features import RANKED_KINDS, Task
from jaxrank.metrics import intervals, ranking
from jaxrank.metrics.registry import probability_names

WEIGHTING = "the weights of examples"  # of a GAUC


class RequestSpec(NamedTuple):
    """Settings by which the requests of a run are scored.

    column: the column `features.group` of the data. Empty: none.
    k: number of first ranks.
    ranked: tasks that are trained by ranking alone. Their scores are no probabilities.
    """

    column: str
    k: int
    ranked: tuple[str, ...]

    def read(self, split: Split) -> "Requests | None":
        """Reads the requests of a split, None if the data has none."""
        return read_requests(split, self.column, self.k) if self.column else None

    def without_probabilities(self, task: Task, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns metrics by name, except metrics of probabilities if a task is only ranked."""
        dropped = probability_names(task.kind) if task.name in self.ranked else ()
        return {name: value for name, value in metrics.items() if name not in dropped}

    def joined(
        self, task: Task, metrics: Mapping[str, Any], of_requests: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Joins a task's metrics. Metrics of requests come first if it is only ranked."""
        kept = self.without_probabilities(task, metrics)
        first, last = (of_requests, kept) if task.name in self.ranked else (kept, of_requests)
        return {**first, **last}


NO_REQUESTS = RequestSpec("", 0, ())


class Requests(NamedTuple):
    """The requests of a split.

    code: i64[n], the number of each example's request, in stored order.
    candidates: f64[n, tasks], number of candidates that each example stands for.
    k: number of first ranks.
    """

    code: np.ndarray
    candidates: np.ndarray
    k: int

    def score(
        self,
        task: int,
        kind: str,
        logits: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray,
        rows: np.ndarray | None = None,
    ) -> ranking.RequestValues | None:
        """Computes the metrics of each request of a task, None if its kind has none.

        Args:
            task: index of the task.
            kind: of the task.
            logits, labels, weights: of the examples in `rows`, each [len(rows)].
            rows: indices of examples, the only candidates of their requests. None: all.
        """
        if kind not in RANKED_KINDS:
            return None
        at = slice(None) if rows is None else rows
        candidates, code = self.candidates[at, task], self.code[at]
        return ranking.request_values(
            logits, labels, weights, candidates, code, kind=kind, k=self.k
        )


def request_spec(store: Store, k: int, ranked: tuple[str, ...]) -> RequestSpec:
    """Returns how the requests of a store are scored. See `RequestSpec` for arguments."""
    return RequestSpec(str(store.spec.features.get("group", "")), k, ranked)


def read_requests(split: Split, column: str, k: int) -> Requests:
    """Reads the requests of a split. An example without a value is a request of its own.

    Args:
        column: as in `RequestSpec`, not empty.
        k: number of first ranks of their metrics.

    Raises:
        InputError: the column holds lists.
    """
    values: list[pa.Array] = []
    numbers: list[np.ndarray] = []
    count = 0
    standing: list[np.ndarray] = []
    for block in split.blocks():
        standing.append(candidates(block.labels, block.logit_correction))
        if block.requests is not None:
            # Per block, which a request never leaves: days may share hashes.
            is_start = np.zeros(block.rows, np.int64)
            is_start[request_starts(block.requests[:, 0])] = 1
            numbers.append(count - 1 + np.cumsum(is_start))
            count += int(is_start.sum())
        else:  # read directly, or prepared by an earlier version
            assert block.kept is not None
            values.append(block.kept.column(column))
    if numbers:
        return Requests(np.concatenate(numbers), np.concatenate(standing), k)
    codes = coded(values, column, "features.group")
    code = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    missing = np.array([value in (None, "") for value in codes.dictionary.to_pylist()], bool)
    alone = len(missing) + np.arange(len(code))
    return Requests(np.where(missing[code], alone, code), np.concatenate(standing), k)


class RequestScores(NamedTuple):
    """Metrics of the requests of a split.

    metrics, intervals: of each task that has them, by metric.
    described: {"column", "k", "weighting", "tasks": {task: counts and fractions}}. None: there are
        no requests.
    """

    metrics: dict[str, dict[str, float]]
    intervals: dict[str, dict[str, list[float]]]
    described: dict[str, Any] | None


NO_SCORES = RequestScores({}, {}, None)


def score_requests(
    spec: RequestSpec,
    requests: Requests,
    tasks: Sequence[Task],
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
    clusters: np.ndarray | None = None,
) -> RequestScores:
    """Computes the metrics of the requests of each task.

    Args:
        logits, labels, weights: f32[n, tasks]; see `score.Scored`.
        clusters: as in `intervals.request_margins`.
    """
    metrics, spans, counts = {}, {}, {}
    for i, task in enumerate(tasks):
        values = requests.score(i, task.kind, logits[:, i], labels[:, i], weights[:, i])
        if values is None:
            continue
        result = ranking.summary(values, weights[:, i])
        metrics[task.name] = result.metrics
        spans[task.name] = request_intervals(values, clusters)
        counts[task.name] = {k: v for k, v in result._asdict().items() if k != "metrics"}
    described = {"column": spec.column, "k": spec.k, "weighting": WEIGHTING, "tasks": counts}
    return RequestScores(metrics, spans, described)


def request_intervals(
    values: ranking.RequestValues, clusters: np.ndarray | None
) -> dict[str, list[float]]:
    """Computes {metric: [low, high]} of the metrics of requests of one task, NaN where undefined.

    Args:
        clusters: as in `intervals.request_margins`.
    """
    metrics, margins = values.metrics(), intervals.request_margins(values, clusters=clusters)
    return {name: list(margin.ends(metrics[name])) for name, margin in margins.items()}


def request_lines(requests: Mapping[str, Any] | None) -> list[str]:
    """Describes the requests behind the metrics of each task, one line per task."""
    lines = []
    for task, counts in (requests or {"tasks": {}})["tasks"].items():
        assert requests is not None
        line = f"{task} by {requests['column']}: {counts['requests']:,} requests"
        line += f", {counts['without_positives']:.1%} of them without a positive"
        excluded = counts["gauc_excluded"]
        if excluded == excluded:
            line += (
                f"; GAUC by {requests['column']}, weighted by {requests['weighting']}, without"
                f" {excluded:.1%} of the weight in requests of one label"
            )
        lines.append(line)
    return lines
