"""Metrics and mean scores of a bundle on validation examples, and the cost of rounded tables."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrank.data.examples import Examples, traffic_weights
from jaxrank.export.comparison.reference import Reference, first_examples
from jaxrank.export.stack_files import restored
from jaxrank.export.statistics import METRICS
from jaxrank.export.write import Source
from jaxrank.features import Schema
from jaxrank.metrics import exact
from jaxrank.report import Report
from jaxrank.run_schedule import NEXT_DAY

_SCORED_ROWS = 100_000  # maximum of examples

ByTask = dict[str, dict[str, float]]


class Validation(NamedTuple):
    """Results of validation examples.

    rows: number of examples.
    score_means: {task: mean prediction}, of the tasks that have a label.
    metrics: {task: {metric: value}}.
    rounding: {task: {metric: change}} by rounded tables; {} for float32.
    """

    rows: int
    score_means: dict[str, float]
    metrics: ByTask
    rounding: ByTask


NOT_SCORED = Validation(0, {}, {}, {})


def validate(
    source: Source, predicted: Callable[[Examples], Reference], tables: str, report: Report
) -> Validation:
    """Scores the first validation examples by the trained program.

    Only a calibrated checkpoint and rounded tables need it: of other bundles the run has recorded
    the metrics.

    Args:
        predicted: returns the trained program for examples.
        tables: dtype of the bundle's tables.
    """
    run, valid = source.run, source.run.builder.data.valid
    is_rounded = tables != "float32"
    if not is_rounded and source.calibration is None:
        return NOT_SCORED
    if valid in ("", NEXT_DAY):
        if is_rounded:
            report(
                f"The cost of {tables} tables was not measured: data.valid is {valid!r}, and no"
                " split"
            )
        return NOT_SCORED
    split = source.store.split(valid, "data.valid")
    examples = first_examples(split.blocks(), _SCORED_ROWS)
    result = score(predicted(examples), examples, run.schema, tables, run.builder.ranked)
    for task, changes in result.rounding.items():
        shown = ", ".join(f"{name} {change:+.2g}" for name, change in changes.items())
        report(f"{tables} tables change {task} on {examples.rows:,} examples: {shown}")
    return result


def score(
    reference: Reference,
    labelled: Examples,
    schema: Schema,
    tables: str,
    ranked: Collection[str] = (),
) -> Validation:
    """Computes the results of labelled examples.

    Args:
        reference: the trained program for these examples.
        tables: see `validate`.
        ranked: tasks whose scores are no probabilities, which have the AUC alone.
    """
    exactly = reference.logits()
    rounded = None
    if tables != "float32":
        rounded = reference.logits(lambda vectors: restored(vectors, tables))
    weights = traffic_weights(labelled.labels, labelled.weights, labelled.logit_correction)
    result = Validation(labelled.rows, {}, {}, {})
    for i, task in enumerate(schema.tasks):
        known, w = np.nan_to_num(labelled.labels[:, i]), weights[:, i]
        if w.sum() > 0:
            predictions = exact.prediction(exactly[:, i], task.kind)
            result.score_means[task.name] = float(np.average(predictions, weights=w))
        is_ranked = task.name in ranked
        before = _metrics(exact.exact(exactly[:, i], known, w, task.kind), is_ranked)
        result.metrics[task.name] = before
        if rounded is not None:
            after = _metrics(exact.exact(rounded[:, i], known, w, task.kind), is_ranked)
            result.rounding[task.name] = {n: after[n] - v for n, v in before.items()}
    return result


def _metrics(all_metrics: Mapping[str, float], is_ranked: bool) -> dict[str, float]:
    names = ("auc",) if is_ranked else METRICS
    return {name: all_metrics[name] for name in names if name in all_metrics}


def with_validation(statistics: Mapping[str, Any], validation: Validation) -> dict[str, Any]:
    """Returns the statistics of a signature with the results that the run has not recorded.

    Results that are not finite are left out.
    """
    if statistics["scored_rows"] is not None or not validation.rows:
        return dict(statistics)
    tasks = []
    for task in statistics["tasks"]:
        metrics = validation.metrics[task["task"]]
        mean = validation.score_means.get(task["task"], math.nan)
        results = {
            "score_mean": mean if math.isfinite(mean) else None,
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
        }
        tasks.append(task | results)
    return {**statistics, "scored_rows": validation.rows, "tasks": tasks}
