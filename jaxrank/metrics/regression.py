"""Metrics of real and count tasks, in float64.

Real tasks:

- squared_error: sum(w * (label - prediction)^2) / sum(w).
- normalized_squared_error: squared_error / squared_error of the best constant, which is 1 - R^2.
  Undefined if all labels are equal.

Count tasks:

- deviance: sum(w * d) / sum(w), d = 2 (y log(y / p) - y + p) for label y and expected count p
  (McCullagh & Nelder, Generalized Linear Models, 1989). If the log of the count is above
  `losses.LOG_COUNT_LIMIT`, p is constant and the loss continues as a straight line.
- normalized_deviance: deviance / deviance of the best constant. Undefined if all labels are equal.

`sums` defines calibration and examples. The output of a model is the prediction for a real task and
the log of the expected count for a count task.
"""

import numpy as np
from numpy.typing import NDArray

from jaxrank.losses import LOG_COUNT_LIMIT
from jaxrank.metrics.registry import METRICS

Floats = NDArray[np.float64]


def label_metrics(
    kind: str, y: Floats, w: Floats, *, loss: float, predicted: float
) -> dict[str, float]:
    """Computes the metrics from labels, weights and the sums of w * loss and w * prediction."""
    return summed_metrics(
        kind,
        examples=len(w),
        weight=w.sum(),
        loss=loss,
        predicted=predicted,
        observed=(w * y).sum(),
        least=least_loss(kind, y, w),
    )


def summed_metrics(
    kind: str,
    *,
    examples: int,
    weight: float,
    loss: float,
    predicted: float,
    observed: float,
    least: float,
) -> dict[str, float]:
    """Computes the metrics from sums. `least` is the sum of w * loss of the best constant."""
    error, normalized = METRICS[kind][:2]
    return {
        error.name: ratio(2 * loss, weight),
        normalized.name: ratio(loss, least),
        "calibration": ratio(predicted, observed),
        "examples": examples,
    }


def half(kind: str, x: Floats, y: Floats) -> Floats:
    """Computes the loss f64[n], half of the deviance, of outputs x and labels y.

    Equals `losses.squared` and `losses.poisson`.
    """
    with np.errstate(all="ignore"):
        if kind == "real":
            return np.square(x - y) / 2
        logs = np.minimum(x, LOG_COUNT_LIMIT)
        ratio = logs - np.log(np.where(y > 0, y, 1))
        curve = np.where(y > 0, y * (np.expm1(ratio) - ratio), np.exp(logs))
        return curve + (np.exp(LOG_COUNT_LIMIT) - y) * (x - logs)


def least_loss(kind: str, y: Floats, w: Floats) -> float:
    """Computes the sum of w * loss of the best constant, the mean. 0 if all labels are equal."""
    if not len(y) or y.min() == y.max():
        return 0.0
    mean = (w * y).sum() / w.sum()
    return float((w * half(kind, np.log(mean) if kind == "count" else mean, y)).sum())


def spread(kind: str, y: float) -> float:
    """Computes `losses.spreads` of one label."""
    if kind == "real":
        return y * y / 2
    return y * float(np.log(y)) if y > 0 else 0.0


def ratio(a: float, b: float) -> float:
    """Returns a / b, and NaN unless b > 0."""
    return float(a / b) if b > 0 else float("nan")
