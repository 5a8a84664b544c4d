"""What `prepare` counts while it writes: of each feature, and of the lists together."""

from typing import Any

import numpy as np

from jaxrank.data.spec import FeatureSpec
from jaxrank.features import MAX_GROUP


class Moments:
    """Count, mean, deviation and range of each column, over the values that are not missing."""

    def __init__(self, columns: int):
        self.count = np.zeros(columns, np.int64)
        self.mean = np.zeros(columns)
        self._squares = np.zeros(columns)  # sum of (x - mean)^2
        self.min = np.full(columns, np.inf)
        self.max = np.full(columns, -np.inf)

    def add(self, values: np.ndarray) -> None:  # f64[n, columns], NaN where missing
        present = ~np.isnan(values)
        count = present.sum(axis=0)
        filled = np.where(present, values, 0.0)
        mean = filled.sum(axis=0) / np.maximum(count, 1)
        squares = (np.where(present, values - mean, 0.0) ** 2).sum(axis=0)
        # Chan, Golub & LeVeque 1983: two parts' moments give those of the whole without the
        # cancellation of a sum of squares.
        total = np.maximum(self.count + count, 1)
        delta = mean - self.mean
        self._squares += squares + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count += count
        self.min = np.minimum(
            self.min, np.where(present, values, np.inf).min(axis=0, initial=np.inf)
        )
        self.max = np.maximum(
            self.max, np.where(present, values, -np.inf).max(axis=0, initial=-np.inf)
        )

    @property
    def std(self) -> np.ndarray:  # f64[columns], of the values as the whole population
        return np.sqrt(self._squares / np.maximum(self.count, 1))


class _ListLengths:
    """Moments and largest sums of the lengths of all lists."""

    def __init__(self, lists: int):
        self._rows = 0
        self._sum = np.zeros(lists)
        self._products = np.zeros((lists, lists))
        self._open = np.zeros(lists, np.int64)  # ids in the group that has begun
        self.max_per_group = np.zeros(lists, np.int64)
        self.max_per_example = np.zeros(lists, np.int64)
        self.empty = np.zeros(lists, np.int64)

    def add(self, lengths: np.ndarray) -> None:  # i32[n, lists]
        if not lengths.size:
            return
        exact = lengths.astype(np.float64)
        self._sum += exact.sum(axis=0)
        self._products += exact.T @ exact
        self.max_per_example = np.maximum(self.max_per_example, lengths.max(axis=0))
        self.empty += (lengths == 0).sum(axis=0)
        starts = np.arange(-(self._rows % MAX_GROUP), len(lengths), MAX_GROUP)
        totals = np.add.reduceat(lengths, np.maximum(starts, 0), axis=0, dtype=np.int64)
        totals[0] += self._open
        # A group that is not full yet has no more than it will have, so it may take part.
        self.max_per_group = np.maximum(self.max_per_group, totals.max(axis=0))
        self._rows += len(lengths)
        self._open = totals[-1] if self._rows % MAX_GROUP else np.zeros_like(self._open)

    @property
    def mean(self) -> np.ndarray:
        return self._sum / max(self._rows, 1)

    def to_json(self) -> dict[str, Any]:
        covariance = self._products / max(self._rows, 1) - np.outer(self.mean, self.mean)
        return {
            "mean": self.mean.tolist(),
            "covariance": covariance.tolist(),
            "max_total_per_group": self.max_per_group.tolist(),
            "max_per_example": self.max_per_example.tolist(),
        }


class Statistics:
    """The statistics of one split. Deviations and covariances are those of the population."""

    def __init__(self, features: FeatureSpec):
        self._features = features
        self.rows = 0
        self._known = np.zeros(len(features.tasks), np.int64)
        self._positives = np.zeros(len(features.tasks), np.int64)
        self._floats = Moments(len(features.floats))
        self._lengths = _ListLengths(len(features.lists))
        self.id_missing = np.zeros(len(features.ids), np.int64)
        self.id_unknown = np.zeros(len(features.ids), np.int64)
        self.id_out_of_range = np.zeros(len(features.ids), np.int64)  # see `on_bad_id`
        self.list_truncated = np.zeros(len(features.lists), np.int64)  # ids that were cut
        self.list_unknown = np.zeros(len(features.lists), np.int64)
        self.list_out_of_range = np.zeros(len(features.lists), np.int64)

    def add(self, labels: np.ndarray, floats: np.ndarray, lengths: np.ndarray) -> None:
        """Counts a chunk: labels f32[n, tasks], raw floats f64[n, floats], lengths i32[n, lists].

        NaN is an unknown label and a missing float. What the encoder counts is added by it.
        """
        self.rows += len(labels)
        self._known += (~np.isnan(labels)).sum(axis=0)
        self._positives += (labels == 1).sum(axis=0)
        self._floats.add(floats)
        self._lengths.add(lengths)

    def to_json(self) -> dict[str, Any]:
        """What the manifest holds. Of a float without values all but `missing` is None."""
        features = self._features
        floats, lengths = self._floats, self._lengths
        return {
            "rows": self.rows,
            "tasks": {
                t.name: {"known": int(self._known[i]), "positives": int(self._positives[i])}
                for i, t in enumerate(features.tasks)
            },
            "floats": {
                f.name: {
                    "missing": self.rows - int(floats.count[i]),
                    **{
                        name: float(getattr(floats, name)[i]) if floats.count[i] else None
                        for name in ("mean", "std", "min", "max")
                    },
                }
                for i, f in enumerate(features.floats)
            },
            "ids": {
                f.name: {
                    "missing": int(self.id_missing[i]),
                    "unknown": int(self.id_unknown[i]),
                    "out_of_range": int(self.id_out_of_range[i]),
                }
                for i, f in enumerate(features.ids)
            },
            "lists": {
                f.name: {
                    "mean": float(lengths.mean[i]),
                    "max": int(lengths.max_per_example[i]),
                    "empty": int(lengths.empty[i]),
                    "truncated_ids": int(self.list_truncated[i]),
                    "unknown": int(self.list_unknown[i]),
                    "out_of_range": int(self.list_out_of_range[i]),
                }
                for i, f in enumerate(features.lists)
            },
            "list_lengths": lengths.to_json(),
        }
