"""The outputs that tasks start from: the base rates of their training labels."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrank.features import Task

_PRIOR = 0.5  # examples added to positives, and to negatives, as Jeffreys' prior does
_MIN_DEVIATION = 1e-7  # over the size of the mean: less is rounding of float32


class BaseRates(NamedTuple):
    """Initial output of each task, and the unit of what the model adds to it.

    bias: f32[T], the output of a model whose raw logits are 0, before joint probabilities.
    scale: f32[T], the factor of raw logits.
    """

    bias: np.ndarray
    scale: np.ndarray


def neutral(tasks: int) -> BaseRates:
    """Returns base rates that leave raw logits as they are."""
    return BaseRates(np.zeros(tasks, np.float32), np.ones(tasks, np.float32))


def base_rates(
    tasks: Sequence[Task], parents: Sequence[int], statistics: Mapping[str, Any]
) -> BaseRates:
    """Returns the base rates of labels, of all traffic where negatives were downsampled.

    Binary tasks start at the log-odds of their mean label. Counts start at the log of their mean,
    real tasks at the mean, with the standard deviation as scale. Counts of labels are smoothed by
    half an example, so all base rates are finite. A task with a parent starts at its rate divided
    by the rate of the parent, because its output is the product of both. A task without known
    labels starts at 0.

    Args:
        parents: see `outputs.joint_logits`.
        statistics: what `Statistics.summary` gives, with `traffic`.
    """
    bias, scale = neutral(len(tasks))
    rates = [_rate(task, statistics) for task in tasks]
    for i, (task, rate) in enumerate(zip(tasks, rates, strict=True)):
        parent = parents[i] if parents else -1
        if rate is None or (parent >= 0 and rates[parent] is None):
            continue
        if parent >= 0:
            positives = statistics["tasks"][tasks[parent].name]["positives"]
            # As many positives of the parent, all of them positive here too.
            most = (positives + _PRIOR) / (positives + 2 * _PRIOR)
            rate = min(rate / rates[parent], most)
        bias[i] = _output(task.kind, rate)
        if task.kind == "real":
            deviation = statistics["traffic"][task.name]["std"]
            least = max(_MIN_DEVIATION * abs(rate), float(np.finfo(np.float32).tiny))
            scale[i] = deviation if deviation > least else 1
    return BaseRates(bias, scale)


def _rate(task: Task, statistics: Mapping[str, Any]) -> Any:
    """Returns the smoothed mean label of a task, None where no label has weight."""
    counts, traffic = statistics["tasks"][task.name], statistics["traffic"][task.name]
    weight, mean = traffic["weight"], traffic["mean"]
    if not weight > 0:
        return None
    if task.kind == "real":
        return mean
    total = weight * mean
    # The weight of one example: of a positive, which is never left out, or of any if there is none.
    unit = weight / counts["known"]
    if task.kind == "count":
        return (total + _PRIOR * unit) / (weight + _PRIOR * unit)
    if total > 0:
        unit = total / counts["positives"]
    return (total + _PRIOR * unit) / (weight + 2 * _PRIOR * unit)


def _output(kind: str, rate: float) -> float:
    if kind == "real":
        return rate
    return math.log(rate) if kind == "count" else math.log(rate) - math.log1p(-rate)


def short_summary(tasks: Sequence[Task], rates: BaseRates) -> str:
    """Returns the biases as text: "click -5.2933, price 12 (scale 3.4)"."""
    return ", ".join(
        f"{task.name} {bias:.5g}" + (f" (scale {scale:.5g})" if scale != 1 else "")
        for task, bias, scale in zip(tasks, *rates, strict=True)
    )
