"""Moments, quantiles and largest sums of the lengths of lists."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrank.data.statistics.array_json import from_text, to_text
from jaxrank.features import MAX_GROUP

# Shorter lists have one bin per length. The next bin is for 4,096 to 8,191, and each further bin is
# twice as wide.
_EXACT_BITS = 12
_EXACT = 1 << _EXACT_BITS
# Number of lengths that are processed together: 32 MB as int64.
_PIECE = 1 << 22


class ListLengths:
    """The lengths of all lists over some examples in stored order.

    rows: number of examples.
    total: i64[lists] ids.
    empty: i64[lists].
    covariance: f64[lists, lists], of the population.
    max_per_example: i64[lists].
    max_total_per_run: i64[lists], the largest sum over a run of up to MAX_GROUP examples.
    """

    def __init__(self, lists: int):
        self.rows = 0
        self.total = np.zeros(lists, np.int64)
        self.covariance = np.zeros((lists, lists))
        self.max_per_example = np.zeros(lists, np.int64)
        self.max_total_per_run = np.zeros(lists, np.int64)
        # i32[< MAX_GROUP, lists]: lengths of the examples at the borders, for runs that span two
        # parts.
        self._first = np.zeros((0, lists), np.int32)
        self._last = np.zeros((0, lists), np.int32)
        self._histogram = np.zeros((lists, 1), np.int64)  # i64[lists, bins so far]

    def add(self, lengths: np.ndarray) -> None:  # i32[n, lists]
        piece = max(1, _PIECE // max(1, lengths.shape[1]))
        for start in range(0, len(lengths), piece):
            self.merge(_count_lengths(lengths[start : start + piece]))

    def merge(self, other: "ListLengths") -> None:
        """Appends the examples of `other`.

        Covariances: Chan, Golub & LeVeque 1983, as in `Moments`.
        """
        rows = max(self.rows + other.rows, 1)
        share, theirs = self.rows / rows, other.rows / rows
        delta = other.mean - self.mean
        self.covariance = share * self.covariance + theirs * other.covariance
        self.covariance += share * theirs * np.outer(delta, delta)
        self.rows += other.rows
        self.total += other.total
        self.max_per_example = np.maximum(self.max_per_example, other.max_per_example)
        across = _largest_run(np.concatenate([self._last, other._first]))
        self.max_total_per_run = np.maximum.reduce(
            [self.max_total_per_run, other.max_total_per_run, across]
        )
        self._first = np.concatenate([self._first, other._first])[: MAX_GROUP - 1]
        self._last = np.concatenate([self._last, other._last])[1 - MAX_GROUP :]
        bins = max(self._histogram.shape[1], other._histogram.shape[1])
        self._histogram = _widened(self._histogram, bins) + _widened(other._histogram, bins)

    @property
    def mean(self) -> np.ndarray:  # f64[lists]
        return self.total / max(self.rows, 1)

    @property
    def empty(self) -> np.ndarray:
        return self._histogram[:, 0]

    def percentile(self, percent: int) -> np.ndarray:
        """Returns i64[lists], the smallest length that `percent` of the lists do not exceed.

        From 4,096 on it is rounded up to the largest length of its bin, or of all lists if that is
        less.
        """
        reached = self._histogram.cumsum(axis=1) * 100 >= self.rows * percent
        return np.minimum(_edges(reached.argmax(axis=1)), self.max_per_example)

    def summary(self) -> dict[str, Any]:
        """Returns the manifest's entry for all lists together."""
        return {
            "mean": self.mean.tolist(),
            "covariance": self.covariance.tolist(),
            "max_total_per_run": self.max_total_per_run.tolist(),
            "max_per_example": self.max_per_example.tolist(),
        }

    def to_state(self) -> dict[str, Any]:
        """Returns a JSON-able state for `from_state`."""
        return {
            "rows": self.rows,
            "total": self.total.tolist(),
            "covariance": half_covariance(self.covariance),
            "max_total_per_run": self.max_total_per_run.tolist(),
            "max_per_example": self.max_per_example.tolist(),
            "first": to_text(self._first),
            "last": to_text(self._last),
            "histogram": to_text(self._histogram),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "ListLengths":
        """Restores the object from the result of `to_state`."""
        result = cls(len(state["total"]))
        result.rows, result.total = state["rows"], np.array(state["total"], np.int64)
        above = np.triu_indices(len(result.total))
        result.covariance[above] = result.covariance.T[above] = from_text(state["covariance"])
        result.max_total_per_run = np.array(state["max_total_per_run"], np.int64)
        result.max_per_example = np.array(state["max_per_example"], np.int64)
        result._first, result._last = from_text(state["first"]), from_text(state["last"])
        result._histogram = from_text(state["histogram"])
        return result


def half_covariance(covariance: np.ndarray) -> dict[str, Any]:
    """Encodes half of a symmetric matrix f64[lists, lists]: 5 MB for 1,000 lists instead of 21."""
    return to_text(covariance[np.triu_indices(len(covariance))])


def _count_lengths(lengths: np.ndarray) -> ListLengths:  # i32[n, lists], n > 0
    result = ListLengths(lengths.shape[1])
    result.rows = len(lengths)
    result.total = lengths.sum(axis=0, dtype=np.int64)
    result.max_per_example = lengths.max(axis=0).astype(np.int64)
    from_mean = lengths - result.mean
    result.covariance = from_mean.T @ from_mean / len(lengths)
    result.max_total_per_run = _largest_run(lengths)
    result._first = lengths[: MAX_GROUP - 1].copy()
    result._last = lengths[1 - MAX_GROUP :].copy()
    bins = _bins(lengths)
    count = int(bins.max(initial=0)) + 1
    bins += np.arange(lengths.shape[1]) * count
    cells = np.bincount(bins.reshape(-1), minlength=lengths.shape[1] * count)
    result._histogram = cells.reshape(lengths.shape[1], count)
    return result


def _largest_run(lengths: np.ndarray) -> np.ndarray:
    """Returns i64[lists], the largest sum over MAX_GROUP consecutive examples, or over all."""
    sums = np.zeros((len(lengths) + 1, lengths.shape[1]), np.int64)
    np.cumsum(lengths, axis=0, out=sums[1:])
    if len(lengths) <= MAX_GROUP:
        return sums[-1]
    return (sums[MAX_GROUP:] - sums[:-MAX_GROUP]).max(axis=0)


def _bins(lengths: np.ndarray) -> np.ndarray:  # i32[..] -> i64[..]
    bins = lengths.astype(np.int64)
    long = lengths >= _EXACT
    if long.any():
        doubles = np.frexp(lengths[long].astype(np.float64))[1] - 1 - _EXACT_BITS
        bins[long] = _EXACT + doubles
    return bins


def _edges(bins: np.ndarray) -> np.ndarray:  # i64[..], the longest list of each bin
    doubles = np.maximum(bins - _EXACT + 1, 0)
    return np.where(bins < _EXACT, bins, (_EXACT << doubles) - 1)


def _widened(histogram: np.ndarray, bins: int) -> np.ndarray:
    return np.pad(histogram, ((0, 0), (0, bins - histogram.shape[1])))
