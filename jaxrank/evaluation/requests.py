"""Scores the requests of a split: the examples that share a value of `features.group`."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from ml_collections import ConfigDict

from jaxrank.build import ranked_tasks
from jaxrank.data.examples import candidates, request_starts
from jaxrank.data.store.reader import Store
from jaxrank.data.store.split import Split
from jaxrank.evaluation.columns import coded
from jaxrank.features import RANKED_KINDS, Task
from jaxrank.metrics import ranking
from jaxrank.metrics.registry import probability_names

WEIGHTING = "the weights of examples"  # of a GAUC


class RequestSpec(NamedTuple):
    """Settings by which the requests of a run are scored.

    column: the column `features.group` of the data. Empty: none.
    k: number of first ranks.
    ranked: tasks that are trained by ranking alone. Their scores are no probabilities.
    """

    column: str = ""
    k: int = 10
    ranked: tuple[str, ...] = ()

    def without_probabilities(self, task: Task, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Returns metrics by name, except metrics of probabilities if a task is only ranked."""
        dropped = probability_names(task.kind) if task.name in self.ranked else ()
        return {name: value for name, value in metrics.items() if name not in dropped}


NO_REQUESTS = RequestSpec()


class Requests(NamedTuple):
    """The requests of a split.

    code: i64[n], the number of each example's request, in stored order.
    candidates: f64[n, tasks], number of candidates that each example stands for.
    """

    code: np.ndarray
    candidates: np.ndarray


def request_spec(config: ConfigDict, store: Store) -> RequestSpec:
    """Returns how the requests of a run are scored on a store."""
    column = str(store.spec.features.get("group", ""))
    return RequestSpec(column, config.eval.top_k, ranked_tasks(config))


def read_requests(split: Split, column: str) -> Requests:
    """Reads the requests of a split. An example without a value is a request of its own.

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
        return Requests(np.concatenate(numbers), np.concatenate(standing))
    codes = coded(values, column, "features.group")
    code = codes.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    missing = np.array([value in (None, "") for value in codes.dictionary.to_pylist()], bool)
    alone = len(missing) + np.arange(len(code))
    return Requests(np.where(missing[code], alone, code), np.concatenate(standing))


def score_requests(
    spec: RequestSpec,
    requests: Requests,
    tasks: Sequence[Task],
    logits: np.ndarray,
    labels: np.ndarray,
    weights: np.ndarray,
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Computes the metrics of the requests of each task.

    Args:
        logits, labels, weights: f32[n, tasks]; see `score.Scored`.

    Returns:
        {task: metrics}, and {"column", "k", "weighting", "tasks": {task: counts and fractions}}.
    """
    metrics, counts = {}, {}
    for i, task in enumerate(tasks):
        if task.kind not in RANKED_KINDS:
            continue
        result = ranking.request_metrics(
            logits[:, i],
            labels[:, i],
            weights[:, i],
            requests.candidates[:, i],
            requests.code,
            kind=task.kind,
            k=spec.k,
        )
        metrics[task.name] = result.metrics
        counts[task.name] = {k: v for k, v in result._asdict().items() if k != "metrics"}
    described = {"column": spec.column, "k": spec.k, "weighting": WEIGHTING, "tasks": counts}
    return metrics, described


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
