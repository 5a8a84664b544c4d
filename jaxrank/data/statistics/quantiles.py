"""Estimates boundaries of buckets with about equally many values, in one pass."""

from typing import Any

import numpy as np

_MAX_EXACT_VALUES = 4096  # maximum number of distinct values that are counted exactly
_SHIFT = 16  # dropped bits of a float32. The remaining 2**16 bins are exact to 1 part in 2**7
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class QuantileSketch:
    """Counts values as float32: exactly if few are distinct, otherwise in bins of relative width
    1/128.

    The result depends only on the frequency of each value, not on the order or the number of parts.
    """

    def __init__(self) -> None:
        # Bins are always counted, so that the result does not depend on whether exact counts
        # remain.
        self._bins = np.zeros(1 << (32 - _SHIFT), np.int64)
        self._exact: tuple[np.ndarray, np.ndarray] | None = (
            np.zeros(0, np.float32),
            np.zeros(0, np.int64),
        )

    def add(self, values: np.ndarray) -> None:
        """Counts f64[n] finite values, NaN where missing. Clips values out of range of float32."""
        present = np.clip(values[~np.isnan(values)], -_MAX_FLOAT32, _MAX_FLOAT32).astype(np.float32)
        present += np.float32(0)  # converts -0 to 0
        distinct, counts = np.unique(present, return_counts=True)
        np.add.at(self._bins, _value_bins(distinct), counts)
        self._add_exact((distinct, counts))

    def merge(self, other: "QuantileSketch") -> None:
        self._bins += other._bins
        self._add_exact(other._exact)

    def _add_exact(self, more: tuple[np.ndarray, np.ndarray] | None) -> None:
        if self._exact is None or more is None:
            self._exact = None
            return
        values = np.concatenate([self._exact[0], more[0]])
        distinct, where = np.unique(values, return_inverse=True)
        if len(distinct) > _MAX_EXACT_VALUES:
            self._exact = None
            return
        counts = np.zeros(len(distinct), np.int64)
        np.add.at(counts, where, np.concatenate([self._exact[1], more[1]]))
        self._exact = distinct, counts

    def boundaries(self, buckets: int) -> np.ndarray:
        """Returns increasing boundaries, f64[at most buckets - 1]. Value v is in bucket
        sum(boundaries <= v).

        Each boundary is the value with the number of smaller values nearest to k / buckets of the
        total. There are fewer boundaries if frequent values would make some of them equal.
        """
        starts, counts = self._cells()
        below = (np.cumsum(counts) - counts)[1:]  # for every value except the smallest
        if not len(below):
            return np.zeros(0)
        # Integers throughout, so that nothing is rounded.
        wanted = int(counts.sum()) * np.arange(1, buckets, dtype=np.int64)
        reached = below * buckets
        right = np.minimum(np.searchsorted(reached, wanted), len(reached) - 1)
        left = np.maximum(right - 1, 0)
        nearest = np.where(wanted - reached[left] <= reached[right] - wanted, left, right)
        return starts[1:][np.unique(nearest)].astype(np.float64)

    @property
    def is_exact(self) -> bool:
        """Returns True if all different values are counted exactly."""
        return self._exact is not None

    @property
    def range(self) -> tuple[float, ...]:
        """Returns the smallest and the largest value, or () without values."""
        starts, _ = self._cells()
        return (float(starts[0]), float(starts[-1])) if len(starts) else ()

    def rounded(self) -> "QuantileSketch":
        """Returns the sketch with bins only, to be compared with one that is not exact."""
        sketch = QuantileSketch()
        sketch._bins, sketch._exact = self._bins, None
        return sketch

    def bucket_counts(self, boundaries: np.ndarray) -> np.ndarray:
        """Returns i64[boundaries + 1], the number of values in each bucket; see `boundaries`."""
        starts, counts = self._cells()
        buckets = np.searchsorted(boundaries, starts.astype(np.float64), side="right")
        result = np.zeros(len(boundaries) + 1, np.int64)
        np.add.at(result, buckets, counts)
        return result

    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the values that occur, or the starts of their bins, and the count of each."""
        if self._exact is not None:
            return self._exact
        bins = np.flatnonzero(self._bins)
        return _bin_starts(bins), self._bins[bins]

    def to_state(self) -> dict[str, Any]:
        """Returns a JSON-able state for `from_state`."""
        bins = np.flatnonzero(self._bins)
        state: dict[str, Any] = {"bins": bins.tolist(), "counts": self._bins[bins].tolist()}
        if self._exact is not None:
            values, counts = self._exact
            state["exact"] = [values.astype(np.float64).tolist(), counts.tolist()]
        return state

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "QuantileSketch":
        sketch = cls()
        sketch._bins[state["bins"]] = state["counts"]
        sketch._exact = None
        if "exact" in state:
            values, counts = state["exact"]
            sketch._exact = np.array(values, np.float32), np.array(counts, np.int64)
        return sketch


def _value_bins(values: np.ndarray) -> np.ndarray:  # f32[n] -> i64[n], increasing with the value
    bits = values.view(np.uint32)
    # The bits of negative floats decrease as the value increases.
    ordered = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    return (ordered >> np.uint32(_SHIFT)).astype(np.int64)


def _bin_starts(bins: np.ndarray) -> np.ndarray:  # i64[n] -> f32[n], the smallest value of each bin
    ordered = bins.astype(np.uint32) << np.uint32(_SHIFT)
    bits = np.where(ordered >> 31, ordered & np.uint32((1 << 31) - 1), ~ordered)
    return bits.astype(np.uint32).view(np.float32)
