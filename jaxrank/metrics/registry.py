"""The metrics of each kind of task: names, titles, and which direction is better."""

from typing import NamedTuple


class Metric(NamedTuple):
    """One metric.

    name: in `metrics.jsonl`, TensorBoard, JSON and `eval.metric`.
    title: in tables for people.
    """

    name: str
    title: str
    higher_is_better: bool = False


# By kind of task. The first is the task's own loss, the last its ratio to the best constant's.
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
# Every task has it. Neither direction is better: 1 is best.
CALIBRATION = "calibration"

BY_NAME = {metric.name: metric for metrics in METRICS.values() for metric in metrics}
TITLES = {name: metric.title for name, metric in BY_NAME.items()} | {CALIBRATION: CALIBRATION}
