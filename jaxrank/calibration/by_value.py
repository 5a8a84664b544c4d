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
_STEPS = 50
_MAX_STEP = 1.0  # of log-odds
_CONVERGED = 1e-9


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
    offset, slope = np.zeros(count), np.zeros(count)  # beyond the map of all examples
    for _ in range(_STEPS):
        p = _sigmoid(z + offset[of] + slope[of] * around)
        error, curve = w * (y - p), w * p * (1 - p)
        a, b, c = (total(curve * x) for x in (np.ones_like(z), around, around**2))
        a, c = a + 1 / variances[0], c + 1 / variances[1]
        first = total(error) - offset / variances[0]
        second = total(error * around) - slope / variances[1]
        determinant = a * c - b**2
        steps = (c * first - b * second) / determinant, (a * second - b * first) / determinant
        moved = [np.clip(step, -_MAX_STEP, _MAX_STEP) for step in steps]
        offset, slope = offset + moved[0], np.maximum(slope + moved[1], _MIN_SLOPE - 1)
        if max(np.abs(step).max(initial=0) for step in moved) < _CONVERGED:
            break
    return np.stack([1 + slope, offset - slope * center], axis=1)


def _sigmoid(x: Floats) -> Floats:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))


def _variance(scores: Floats, information: Floats) -> float:
    """Estimates the variance of the values' effects from one-step estimates of them."""
    used = information > 0
    score, weight = scores[used], information[used]
    if len(weight) < 2:
        return 0.0
    spread = (score**2 / weight).sum() - score.sum() ** 2 / weight.sum()
    scale = weight.sum() - (weight**2).sum() / weight.sum()
    return float(max(0.0, spread - (len(weight) - 1)) / scale) if scale > 0 else 0.0
