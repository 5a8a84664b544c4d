"""How good predictions of numbers and counts are, in float64.

Of a real task:

- squared_error: sum(w * (label - prediction)^2) / sum(w).
- normalized_squared_error: that over the one of the best constant, which is 1 - R^2. Undefined
  where all labels are equal.

Of a count:

- deviance: sum(w * d) / sum(w), d = 2 (y log(y / p) - y + p) of label y and prediction p, the
  expected count (McCullagh & Nelder, Generalized Linear Models, 1989); above
  `losses.LOG_COUNT_LIMIT`, where p stays as it is, the line on which the loss goes on.
- normalized_deviance: that over the one of the best constant. Undefined where all labels are equal.

Calibration and examples are those of `sums`. A model puts out the prediction of a real task and
the log of that of a count.
"""

import numpy as np
from numpy.typing import NDArray

from jaxrank.losses import LOG_COUNT_LIMIT
from jaxrank.metrics.registry import METRICS

Floats = NDArray[np.float64]


def of_labels(
    kind: str, y: Floats, w: Floats, *, loss: float, predicted: float
) -> dict[str, float]:
    """The metrics given labels, weights and the sums of w * loss and w * prediction."""
    return of_sums(
        kind,
        examples=len(w),
        weight=w.sum(),
        loss=loss,
        predicted=predicted,
        observed=(w * y).sum(),
        least=least_loss(kind, y, w),
    )


def of_sums(
    kind: str,
    *,
    examples: int,
    weight: float,
    loss: float,
    predicted: float,
    observed: float,
    least: float,
) -> dict[str, float]:
    """The metrics given sums; `least` is that of w * loss for the best constant."""
    error, normalized = METRICS[kind][:2]
    return {
        error.name: ratio(2 * loss, weight),
        normalized.name: ratio(loss, least),
        "calibration": ratio(predicted, observed),
        "examples": examples,
    }


def half(kind: str, x: Floats, y: Floats) -> Floats:
    """f64[n], the loss, which is half of the deviance, of labels y where a model puts out x.

    As `losses.squared` and `losses.poisson`.
    """
    with np.errstate(all="ignore"):
        if kind == "real":
            return np.square(x - y) / 2
        logs = np.minimum(x, LOG_COUNT_LIMIT)
        ratio = logs - np.log(np.where(y > 0, y, 1))
        curve = np.where(y > 0, y * (np.expm1(ratio) - ratio), np.exp(logs))
        return curve + (np.exp(LOG_COUNT_LIMIT) - y) * (x - logs)


def least_loss(kind: str, y: Floats, w: Floats) -> float:
    """The sum of w * loss for the best constant, the mean; 0 where all labels are equal."""
    if not len(y) or y.min() == y.max():
        return 0.0
    mean = (w * y).sum() / w.sum()
    return float((w * half(kind, np.log(mean) if kind == "count" else mean, y)).sum())


def spread(kind: str, y: float) -> float:
    """`losses.spreads` of one label."""
    if kind == "real":
        return y * y / 2
    return y * float(np.log(y)) if y > 0 else 0.0


def ratio(a: float, b: float) -> float:
    """a / b; NaN where b is not above 0."""
    return float(a / b) if b > 0 else float("nan")
