"""Weighted means and deviations of labels, from which base rates are computed."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

FIELDS = ("weight", "mean", "std")


class LabelMeans:
    """Total weight, mean and deviation of the labels of each task, over the full traffic.

    Attributes:
        weight: f64[tasks], total weight of the known labels.
        mean: f64[tasks], weighted. 0 where the weight is 0.
    """

    def __init__(self, tasks: int):
        self.weight = np.zeros(tasks)
        self.mean = np.zeros(tasks)
        self._variance = np.zeros(tasks)

    def add(self, labels: np.ndarray, weights: np.ndarray) -> None:
        """Adds labels f32[n, tasks], NaN where unknown, and their weights f64[n, tasks]."""
        known = np.where(np.isnan(labels), 0.0, labels)
        weights = np.where(np.isnan(labels), 0.0, weights)
        part = LabelMeans(labels.shape[1])
        part.weight = weights.sum(axis=0)
        shares = weights / np.where(part.weight > 0, part.weight, 1)
        part.mean = (shares * known).sum(axis=0)
        part._variance = (shares * (known - part.mean) ** 2).sum(axis=0)
        self.merge(part)

    def merge(self, other: "LabelMeans") -> None:
        """Adds the labels of another part; see `Moments.merge`."""
        weight = self.weight + other.weight
        fraction = other.weight / np.where(weight > 0, weight, 1)
        delta = other.mean - self.mean
        self._variance = (1 - fraction) * self._variance + fraction * other._variance
        self._variance += (1 - fraction) * fraction * delta**2
        self.mean = self.mean + fraction * delta
        self.weight = weight

    def to_state(self) -> list[dict[str, float]]:
        """Returns `FIELDS` of each task."""
        columns = zip(self.weight, self.mean, np.sqrt(self._variance), strict=True)
        return [dict(zip(FIELDS, map(float, values), strict=True)) for values in columns]

    @classmethod
    def from_state(cls, columns: Sequence[Mapping[str, Any]]) -> "LabelMeans":
        """Restores the means from the result of `to_state`."""
        result = cls(len(columns))
        result.weight, result.mean, std = (
            np.array([column[field] for column in columns], np.float64) for field in FIELDS
        )
        result._variance = std**2  # its root is `std` again, to the bit
        return result
