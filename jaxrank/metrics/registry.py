"""The metrics of each kind of task: names, titles and directions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Metric(NamedTuple):
    """One metric.

    name: in `metrics.jsonl`, TensorBoard, JSON and `eval.metric`.
    title: in printed tables.
    higher_is_better: direction of the metric.
    mean: maps (predictions, labels), arrays of NumPy or JAX, to an array of their shape. The metric
        is its weighted mean over examples. None: `exact` and `sums` compute the metric themselves.
    """

    name: str
    title: str
    higher_is_better: bool = False
    mean: Callable[[Any, Any], Any] | None = None


# By kind of task. The first metric is the loss of the task.
METRICS: dict[str, tuple[Metric, ...]] = {
    "binary": (
        Metric("logloss", "logloss"),
        Metric("auc", "AUC", higher_is_better=True),
        Metric("normalized_entropy", "norm. entropy"),
    ),
    "real": (
        Metric("squared_error", "squared error"),
        Metric("normalized_squared_error", "normalized"),
    ),
    "count": (
        Metric("deviance", "deviance"),
        Metric("normalized_deviance", "normalized"),
    ),
}


def means(kinds: Sequence[str]) -> Mapping[str, Callable[[Any, Any], Any]]:
    """Returns `Metric.mean` by name, for the metrics of these kinds of tasks that have one."""
    return {m.name: m.mean for kind in set(kinds) for m in METRICS[kind] if m.mean is not None}


# Every task has this metric. The best value is 1, so it has no direction.
CALIBRATION = "calibration"

# Losses over that of the best constant: above 1 a task is worse than a constant.
NORMALIZED = ("normalized_entropy", "normalized_squared_error", "normalized_deviance")

BY_NAME = {metric.name: metric for metrics in METRICS.values() for metric in metrics}
TITLES = {name: metric.title for name, metric in BY_NAME.items()} | {CALIBRATION: CALIBRATION}
