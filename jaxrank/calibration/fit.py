"""Fits increasing maps of log-odds to labels, in float64."""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from jaxrank.calibration.maps import LogitMap
from jaxrank.errors import InputError

Floats = NDArray[np.float64]

_MAX_STEPS = 100
_CONVERGED = 1e-10  # of the change of slope and intercept
_BINS = 1000
_MIN_IN_BIN = 50  # examples


def platt(logits: Floats, labels: Floats, weights: Floats, where: str) -> LogitMap:
    """Fits sigmoid(a x + b) by maximum likelihood: Platt scaling.

    Labels are moved towards 1/2 by a positive and a negative example, as Platt does, so that the
    fit is finite for separable data. Newton's method with halved steps.

    Args:
        logits, labels, weights: f64[n], of examples with a weight above 0.
        where: names the task and the data in errors.

    Raises:
        InputError: the labels do not rise with the logits.

    References:
        Platt, Probabilistic Outputs for Support Vector Machines, 1999.
        Lin et al., A Note on Platt's Probabilistic Outputs, Machine Learning 2007.
    """
    w = weights / weights.mean()
    positives, negatives = (w * labels).sum(), (w * (1 - labels)).sum()
    high, low = (positives + 1) / (positives + 2), 1 / (negatives + 2)
    target = labels * high + (1 - labels) * low
    center, spread = float(np.average(logits, weights=w)), float(logits.std()) or 1.0
    z = (logits - center) / spread

    def loss(at: Floats) -> float:
        f = at[0] * z + at[1]
        return float((w * (np.logaddexp(0, f) - target * f)).sum())

    at = np.array([spread, center])  # the identity
    for _ in range(_MAX_STEPS):
        p = 1 / (1 + np.exp(-np.clip(at[0] * z + at[1], -500, 500)))
        error, curve = w * (p - target), w * p * (1 - p)
        gradient = np.array([(error * z).sum(), error.sum()])
        a, b, c = (curve * z * z).sum(), (curve * z).sum(), curve.sum()
        ridge = 1e-12 * (a + c) + 1e-300
        step = np.linalg.solve(np.array([[a + ridge, b], [b, c + ridge]]), gradient)
        size, before = 1.0, loss(at)
        while loss(at - size * step) > before and size > 1e-10:
            size /= 2
        at = at - size * step
        if np.abs(size * step).max() < _CONVERGED:
            break
    slope, intercept = at[0] / spread, at[1] - at[0] * center / spread
    if not slope > 0:
        raise InputError(
            f"{where}: labels must rise with the predictions: found a slope of {slope:.3g}. Train"
            " the model further, or calibrate on data that it describes."
        )
    return LogitMap((0.0,), (float(intercept),), float(slope), float(slope))


def isotonic(logits: Floats, labels: Floats, weights: Floats, where: str) -> LogitMap:
    """Fits the increasing step function of least squares, and interpolates between its steps.

    Examples are binned by logit, at least 50 in a bin. Each bin gets one more example with the mean
    label, so that no step is 0 or 1. Beyond the first and the last step the slope is 1.

    Args, Raises: see `platt`.

    References:
        Zadrozny and Elkan, Transforming Classifier Scores into Accurate Multiclass Probability
        Estimates, KDD 2002.
    """
    order = np.argsort(logits, kind="stable")
    x, y, w = logits[order], labels[order], weights[order] / weights.mean()
    bins = int(np.clip(len(x) // _MIN_IN_BIN, 1, _BINS))
    # Equal logits share a bin.
    starts = np.unique(np.searchsorted(x, x[np.arange(bins) * len(x) // bins], side="left"))
    weight, of_x, of_y = (np.add.reduceat(a, starts) for a in (w, w * x, w * y))
    mean = (w * y).sum() / w.sum()
    blocks: list[Floats] = []  # weight and sum of logits, weight and sum of labels
    for total, position, label in zip(weight, of_x, of_y, strict=True):
        block = np.array([total, position, total + 1, label + mean])
        while blocks and blocks[-1][3] * block[2] >= block[3] * blocks[-1][2]:
            block = block + blocks.pop()
        blocks.append(block)
    if len(blocks) == 1:
        raise InputError(
            f"{where}: labels must rise with the predictions: found no step of the isotonic"
            f" regression in {len(x):,} examples. Use --method=platt, or more data."
        )
    totals, positions, counts, sums = np.array(blocks).T
    rates = sums / counts
    knots, values = positions / totals, np.log(rates) - np.log1p(-rates)
    return LogitMap(tuple(knots.tolist()), tuple(values.tolist()), 1.0, 1.0)


METHODS: Mapping[str, Callable[[Floats, Floats, Floats, str], LogitMap]] = {
    "platt": platt,
    "isotonic": isotonic,
}
