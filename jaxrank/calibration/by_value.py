"""Corrections of calibrated log-odds per value of a feature, shrunk to no correction.

The log-odds z that a map of all examples returns become slope * z + offset for the examples of a
value. Slope and offset maximise the likelihood with a normal prior around 1 and 0. The variances of
the priors are those of the values beyond their sampling errors, by the method of moments
(DerSimonian & Laird, Meta-Analysis in Clinical Trials, Controlled Clinical Trials 1986). So a value
with few labels stays near the map of all examples, and all do where values do not differ.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_EXAMPLES = 50  # of a value, with a known label. Others keep the map of all examples
MAX_VALUES = 10_000  # values with a correction, the ones with the most examples
_MIN_SLOPE = 0.1
_LEAST_VARIANCE = 1e-12
_STEPS = 100
_HALVINGS = 10
_CONVERGED = 1e-9  # of the change of slopes and offsets
_ROUNDING = 1e-12  # of an objective


class ByValue(NamedTuple):
    """Corrections of the log-odds of all tasks.

    feature: one id per example.
    rows: of the feature's table, ascending, one per value. Other rows have no correction.
    slopes, offsets: of each row, one number per task.
    """

    feature: str
    rows: tuple[int, ...]
    slopes: tuple[tuple[float, ...], ...]
    offsets: tuple[tuple[float, ...], ...]

    def coefficients(self, rows: np.ndarray) -> tuple[Floats, Floats]:
        """Returns slopes and offsets f64[n, tasks] of examples by their table rows i[n]."""
        known = np.array(self.rows, np.int64)
        place = np.minimum(np.searchsorted(known, rows), len(known) - 1)
        is_known = (known[place] == rows)[:, None]
        slopes, offsets = (np.array(a, np.float64)[place] for a in (self.slopes, self.offsets))
        return np.where(is_known, slopes, 1.0), np.where(is_known, offsets, 0.0)

    def to_state(self) -> dict[str, Any]:
        """Converts the corrections to JSON."""
        return self._asdict()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ByValue":
        pairs = (tuple(map(tuple, state[name])) for name in ("slopes", "offsets"))
        return cls(state["feature"], tuple(state["rows"]), *pairs)


def frequent_rows(rows: np.ndarray, is_known: np.ndarray, reserved: Sequence[int]) -> np.ndarray:
    """Returns the table rows that have enough examples for a correction, ascending.

    Args:
        rows: i[n], of all examples.
        is_known: bool[n], examples whose labels count.
        reserved: rows of no value.
    """
    distinct, counts = np.unique(rows[is_known], return_counts=True)
    enough = (counts >= MIN_EXAMPLES) & ~np.isin(distinct, reserved)
    distinct, counts = distinct[enough], counts[enough]
    return np.sort(distinct[np.argsort(-counts, kind="stable")[:MAX_VALUES]])


def fit(logits: Floats, labels: Floats, weights: Floats, value: np.ndarray, count: int) -> Floats:
    """Fits slope and offset of each value, f64[count, 2].

    Newton's method with halved steps. A value takes a step to the minimum of a quadratic upper
    bound of its objective where that is better, so the method converges for all data.

    Args:
        logits: f64[n], after the map of all examples.
        labels, weights: f64[n]. Weights are above 0.
        value: i64[n], the number of each example's value below `count`. Others have -1.
    """
    inside = value >= 0
    z, y, w, of = logits[inside], labels[inside], weights[inside], value[inside]

    def total(numbers: Floats) -> Floats:
        return np.bincount(of, numbers, count).astype(np.float64)

    p = _sigmoid(z)
    curve = w * p * (1 - p)
    with np.errstate(all="ignore"):
        # Weights above their mean carry less information than as many examples.
        design = np.nan_to_num(total(curve) / total(w * curve))
        center = np.nan_to_num(total(curve * z) / total(curve))
    w = w * design[of]
    curve, around = curve * design[of], z - center[of]
    variances = [
        max(_variance(total(w * (y - p) * x), total(curve * x**2)), _LEAST_VARIANCE)
        for x in (np.ones_like(z), around)
    ]
    objective = _Objective(z, around, y, w, of, count, (variances[0], variances[1]))
    at = np.zeros((2, count))  # offsets and slopes beyond the map of all examples
    for _ in range(_STEPS):
        moved = objective.best_step(at)
        change = np.abs(moved - at).max()
        at = moved
        if change < _CONVERGED:
            break
    return np.stack([1 + at[1], at[0] - at[1] * center], axis=1)


class _Objective(NamedTuple):
    """The negative log-likelihood of each value with its priors, as a function of `at`.

    `at` is f64[2, num_values]: the log-odds of an example are z + at[0] + at[1] * around.

    z, around, y, w: f64[n]: log-odds, their distance from a centre of the value, labels, weights.
    of: i64[n], the number of each example's value, below `num_values`.
    variances: of the priors of both rows of `at`.
    """

    z: Floats
    around: Floats
    y: Floats
    w: Floats
    of: np.ndarray
    num_values: int
    variances: tuple[float, float]

    def logits(self, at: Floats) -> Floats:
        return self.z + at[0][self.of] + at[1][self.of] * self.around

    def total(self, numbers: Floats) -> Floats:
        return np.bincount(self.of, numbers, self.num_values).astype(np.float64)

    def values(self, at: Floats) -> Floats:
        """Returns f64[num_values]."""
        f = self.logits(at)
        priors = at[0] ** 2 / self.variances[0] + at[1] ** 2 / self.variances[1]
        return self.total(self.w * (np.logaddexp(0, f) - self.y * f)) + priors / 2

    def best_step(self, at: Floats) -> Floats:
        """Returns `at` after a step of Newton's method, or of an upper bound if that is better.

        A step of Newton's method is halved until it is better.
        """
        f = self.logits(at)
        p = _sigmoid(f)
        with np.errstate(all="ignore"):  # of Newton's method, where all labels are improbable
            newton, bound = (
                self._minimum(at, p, curve) for curve in (p * (1 - p), _upper_curve(f))
            )
            limit = self.values(bound) * (1 + _ROUNDING)
            for _ in range(_HALVINGS):
                is_best = self.values(newton) <= limit
                if is_best.all():
                    break
                newton = np.where(is_best, newton, (at + newton) / 2)
        return np.where(is_best, newton, bound)

    def _minimum(self, at: Floats, p: Floats, curve: Floats) -> Floats:
        """Returns the minimum of a quadratic function, with a slope of at least `_MIN_SLOPE`.

        Args:
            p: f64[n], probabilities at `at`.
            curve: f64[n], the second derivative with respect to log-odds.
        """
        error, curve = self.w * (self.y - p), self.w * curve
        to_offset = self.total(error) - at[0] / self.variances[0]
        to_slope = self.total(error * self.around) - at[1] / self.variances[1]
        a = self.total(curve) + 1 / self.variances[0]
        b = self.total(curve * self.around)
        c = self.total(curve * self.around**2) + 1 / self.variances[1]
        slope = at[1] + (a * to_slope - b * to_offset) / (a * c - b**2)
        slope = np.maximum(slope, _MIN_SLOPE - 1)
        return np.stack([at[0] + (to_offset - b * (slope - at[1])) / a, slope])


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))


def _upper_curve(f: Floats) -> Floats:
    """Returns the second derivative of the quadratic upper bound of log(1 + e^x) that touches it at
    f.

    Jaakkola and Jordan, Bayesian Parameter Estimation via Variational Methods, 2000.
    """
    size = np.maximum(np.abs(f), 1e-6)
    return np.tanh(size / 2) / (2 * size)


def _variance(scores: Floats, information: Floats) -> float:
    """Estimates the variance of the values' effects from one-step estimates of them."""
    used = information > 0
    score, weight = scores[used], information[used]
    if len(weight) < 2:
        return 0.0
    spread = (score**2 / weight).sum() - score.sum() ** 2 / weight.sum()
    scale = weight.sum() - (weight**2).sum() / weight.sum()
    return float(max(0.0, spread - (len(weight) - 1)) / scale) if scale > 0 else 0.0
