"""Statistics that `prepare` counts while it writes: of each feature, and of all lists together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrank.data.examples import traffic_weights
from jaxrank.data.spec.entries import CategoricalSpec, DenseSpec, RaggedSpec, TaskSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.hyperloglog import HyperLogLog
from jaxrank.data.statistics.label_means import LabelMeans
from jaxrank.data.statistics.list_lengths import ListLengths, half_covariance
from jaxrank.data.statistics.new_values import Counted, NewValues
from jaxrank.errors import InputError
from jaxrank.features import RESERVED_ROWS

_KINDS = ("tasks", "dense", "categorical", "ragged")
# The counts of each column: kind, name in the manifest, and attribute.
_COUNTS = (
    ("tasks", "known", "_known"),
    ("tasks", "positives", "_positives"),
    ("tasks", "pending", "pending"),
    ("categorical", "ids", "_id_places"),
    ("categorical", "missing", "id_missing"),
    ("categorical", "unknown", "id_unknown"),
    ("categorical", "out_of_range", "id_out_of_range"),
    ("ragged", "truncated_lists", "list_truncated_lists"),
    ("ragged", "truncated_ids", "list_truncated"),
    ("ragged", "unknown", "list_unknown"),
    ("ragged", "out_of_range", "list_out_of_range"),
    ("ragged", "late_lists", "list_late_lists"),
    ("ragged", "late_ids", "list_late"),
)
# Fields of `ListLengths.to_state` that the manifest stores under `mergeable`.
_LENGTHS_BESIDES = ("first", "last", "histogram")
_PERCENTS = (50, 95, 99)


class Moments:
    """Count, mean, deviation and range of each column, over the non-missing values."""

    def __init__(self, columns: int):
        self.count = np.zeros(columns, np.int64)
        self.mean = np.zeros(columns)
        self._variance = np.zeros(columns)
        self.min = np.full(columns, np.inf)
        self.max = np.full(columns, -np.inf)

    def add(self, values: np.ndarray) -> None:  # f64[n, columns], NaN where missing
        present = ~np.isnan(values)
        part = Moments(values.shape[1])
        part.count = present.sum(axis=0)
        some = np.maximum(part.count, 1)
        part.mean = np.where(present, values, 0.0).sum(axis=0) / some
        part._variance = (np.where(present, values - part.mean, 0.0) ** 2).sum(axis=0) / some
        part.min = np.fmin.reduce(values, axis=0, initial=np.inf)
        part.max = np.fmax.reduce(values, axis=0, initial=-np.inf)
        # The rounding error of the mean of large numbers, such as nanoseconds, would be a feature.
        part.mean = np.where(part.min == part.max, part.min, part.mean)
        self.merge(part)

    def merge(self, other: "Moments") -> None:
        """Adds the values of another part.

        Chan, Golub & LeVeque 1983: the moments of two parts are combined without the cancellation
        of a sum of squares.
        """
        count = np.maximum(self.count + other.count, 1)
        share, theirs = self.count / count, other.count / count
        delta = other.mean - self.mean
        self._variance = share * self._variance + theirs * other._variance
        # Left to right, so that a part without values adds 0 where the square would be infinite.
        self._variance += share * theirs * delta * delta
        self.mean = self.mean + theirs * delta
        self.count = self.count + other.count
        self.min = np.minimum(self.min, other.min)
        self.max = np.maximum(self.max, other.max)

    @property
    def std(self) -> np.ndarray:  # f64[columns], of the values as the whole population
        # For a single value only the rounding error of the mean remains, an invalid divisor.
        return np.where(self.min == self.max, 0.0, np.sqrt(self._variance))

    def to_state(self) -> list[dict[str, Any]]:
        """Returns the moments of each column. Without values, all but `count` are None."""
        fields = ("mean", "std", "min", "max")
        columns = zip(*(getattr(self, field).tolist() for field in fields), strict=True)
        return [
            {"count": count, **dict(zip(fields, values if count else [None] * 4, strict=True))}
            for count, values in zip(self.count.tolist(), columns, strict=True)
        ]

    @classmethod
    def from_state(cls, columns: Sequence[Mapping[str, Any]]) -> "Moments":
        result = cls(len(columns))
        for i, column in enumerate(columns):
            if not column["count"]:
                continue
            result.count[i], result.mean[i] = column["count"], column["mean"]
            result._variance[i] = column["std"] ** 2  # its root is `std` again, to the bit
            result.min[i], result.max[i] = column["min"], column["max"]
        return result


class Statistics:
    """The statistics of a split, or of a part of one.

    Deviations and covariances are of the whole population. Integers are independent of the division
    into chunks and parts. Means and deviations may differ in their last digits.

    The encoder increases these counts:

    pending: i64[tasks], labels that are not known yet.
    id_missing, id_unknown: i64[ids], ids of each feature.
    list_truncated_lists, list_truncated: i64[lists], truncated lists, and ids that were cut.
    list_late_lists, list_late: i64[lists], lists with events that were not before their example's
        time, and the ids of those events, which were left out.
    list_unknown: i64[lists], ids.
    id_out_of_range, list_out_of_range: see `on_bad_id`.
    new: by kind, "categorical" or "ragged", and name, for features with an earlier vocabulary.
    """

    def __init__(self, features: FeatureSpec):
        self._names = {kind: [f.name for f in getattr(features, kind)] for kind in _KINDS}
        # Rows of missing and unknown values, which are not counted as distinct.
        self._reserved = {
            kind: [RESERVED_ROWS * (f.encoding != "integer") for f in getattr(features, kind)]
            for kind in ("categorical", "ragged")
        }
        self.rows = 0
        tasks, floats, ids, lists = (len(names) for names in self._names.values())
        self._known = np.zeros(tasks, np.int64)
        self._positives = np.zeros(tasks, np.int64)
        self.pending = np.zeros(tasks, np.int64)
        self._id_places = np.zeros(ids, np.int64)
        self.id_missing = np.zeros(ids, np.int64)
        self.id_unknown = np.zeros(ids, np.int64)
        self.id_out_of_range = np.zeros(ids, np.int64)
        self.list_truncated_lists = np.zeros(lists, np.int64)
        self.list_truncated = np.zeros(lists, np.int64)
        self.list_late_lists = np.zeros(lists, np.int64)
        self.list_late = np.zeros(lists, np.int64)
        self.list_unknown = np.zeros(lists, np.int64)
        self.list_out_of_range = np.zeros(lists, np.int64)
        self._task_kinds = [t.kind for t in features.tasks]
        self._numbers = [i for i, kind in enumerate(self._task_kinds) if kind != "binary"]
        self._labels = Moments(len(self._numbers))
        # None for stores that were written without it.
        self._traffic: LabelMeans | None = LabelMeans(tasks)
        self._floats = Moments(floats)
        self._lengths = ListLengths(lists)
        self._distinct = {"categorical": HyperLogLog(ids), "ragged": HyperLogLog(lists)}
        self.new: Counted = {"categorical": {}, "ragged": {}}

    def add(
        self,
        labels: np.ndarray,
        floats: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        logit_correction: np.ndarray | None = None,
    ) -> None:
        """Counts a chunk: labels f32[n, tasks], raw floats f64[n, floats], lengths i32[n, lists].

        NaN is an unknown label and a missing float.

        Args:
            weights, logit_correction: as in `Examples`.
        """
        self.rows += len(labels)
        if self._traffic is not None:
            self._traffic.add(labels, traffic_weights(labels, weights, logit_correction))
        self._known += (~np.isnan(labels)).sum(axis=0)
        self._positives += (labels > 0).sum(axis=0)
        self._labels.add(labels[:, self._numbers].astype(np.float64))
        self._floats.add(floats)
        self._lengths.add(lengths)

    def add_rows(self, kind: str, feature: int, rows: np.ndarray) -> None:
        """Counts the rows, i32[..], of a chunk's ids. `kind` is "categorical" or "ragged".

        For "categorical", `rows` includes missing ids as PAD or MISSING_ROW.
        """
        if kind == "categorical":
            self._id_places[feature] += rows.size
        distinct = self._distinct[kind]
        distinct.add(feature, rows)
        distinct.forget(feature, self._reserved[kind][feature])

    def merge(self, other: "Statistics") -> None:
        """Appends the examples of `other`.

        Raises:
            InputError: the columns differ.
        """
        for kind, names in self._names.items():
            if names != other._names[kind]:
                raise InputError(
                    f"statistics to merge must be of the same {kind}: found {names} and"
                    f" {other._names[kind]}."
                )
        if self._task_kinds != other._task_kinds:
            raise InputError(
                "statistics to merge must be of tasks of the same kinds: found"
                f" {self._task_kinds} and {other._task_kinds}."
            )
        self.rows += other.rows
        for _, _, attribute in _COUNTS:
            getattr(self, attribute)[:] += getattr(other, attribute)
        self._labels.merge(other._labels)
        if self._traffic is None or other._traffic is None:
            self._traffic = None
        else:
            self._traffic.merge(other._traffic)
        self._floats.merge(other._floats)
        self._lengths.merge(other._lengths)
        for kind, distinct in self._distinct.items():
            distinct.merge(other._distinct[kind])
        for kind, features in other.new.items():
            for name, new in features.items():
                self.new[kind].setdefault(name, NewValues()).merge(new)

    def set_lengths(self, lengths: ListLengths) -> None:
        """Replaces the lengths of lists, for the same examples in another order."""
        self._lengths = lengths

    def summary(self) -> dict[str, Any]:
        """Returns the manifest's entry: readable numbers, and `mergeable`, which `merged` also
        needs.

        Floats without values have None for all fields but `missing`. `unknown_share` is relative to
        the non-missing ids, `truncated_share` to the lists. `distinct` (see `HyperLogLog`) excludes
        the rows of missing and unknown ids.

        `new` counts ids whose values the earlier store's vocabulary does not have. `new_share` is
        relative to the non-missing ids. Features without an earlier vocabulary have neither.

        `positives` are labels above 0. A non-binary task has its `kind`, and moments of its labels.
        `traffic` has the total weight of each task's known labels, with their weighted mean and
        deviation, corrected for downsampled negatives.
        """
        tree: dict[str, Any] = {"rows": self.rows}
        tree |= {kind: {name: {} for name in names} for kind, names in self._names.items()}
        for kind, field, attribute in _COUNTS:
            _put(tree[kind], field, getattr(self, attribute))
        for i, moments in zip(self._numbers, self._labels.to_state(), strict=True):
            moments.pop("count")
            tree["tasks"][self._names["tasks"][i]] |= {"kind": self._task_kinds[i], **moments}
        if self._traffic is not None:
            tree["traffic"] = dict(zip(self._names["tasks"], self._traffic.to_state(), strict=True))
        for column, moments in zip(tree["dense"].values(), self._floats.to_state(), strict=True):
            column["missing"] = self.rows - moments.pop("count")
            column.update(moments)
        lengths = self._lengths
        fields = {"ids": lengths.total, "mean": lengths.mean, "max": lengths.max_per_example}
        fields |= {f"p{percent}": lengths.percentile(percent) for percent in _PERCENTS}
        for field, values in (fields | {"empty": lengths.empty}).items():
            _put(tree["ragged"], field, values)
        for kind, distinct in self._distinct.items():
            _put(tree[kind], "distinct", distinct.counts())
        for column in (*tree["categorical"].values(), *tree["ragged"].values()):
            present = column["ids"] - column.get("missing", 0)
            column["unknown_share"] = column["unknown"] / max(present, 1)
            column["distinct"] = min(column["distinct"], present - column["unknown"])
        for kind, features in self.new.items():
            for name, new in features.items():
                tree[kind][name] |= {"new": new.new, "new_share": new.share}
        for column in tree["ragged"].values():
            column["truncated_share"] = column["truncated_lists"] / max(self.rows, 1)
            if not column["late_ids"]:
                del column["late_ids"], column["late_lists"]
        tree["list_lengths"] = lengths.summary()
        tree["mergeable"] = {kind: distinct.to_state() for kind, distinct in self._distinct.items()}
        state = lengths.to_state()
        tree["mergeable"]["list_lengths"] = {key: state[key] for key in _LENGTHS_BESIDES}
        return tree

    def to_state(self) -> dict[str, Any]:
        """Returns a JSON-able state for `from_state`.

        It is `summary` with a shorter form for many lists, and with the new values.
        """
        shown = {
            kind: {name: new.shown for name, new in features.items()}
            for kind, features in self.new.items()
        }
        summary = self.summary()
        half = {"covariance": half_covariance(self._lengths.covariance)}
        lengths = summary["list_lengths"] | half
        return summary | {"list_lengths": lengths, "new_values": shown}

    @classmethod
    def from_state(cls, features: FeatureSpec, state: Mapping[str, Any]) -> "Statistics":
        """Restores statistics of the same features from the result of `to_state` or `summary`."""
        result = cls(features)
        result.rows = state["rows"]
        for kind, field, attribute in _COUNTS:
            getattr(result, attribute)[:] = _column(state[kind], result._names[kind], field)
        labels = [state["tasks"][result._names["tasks"][i]] for i in result._numbers]
        result._labels = Moments.from_state([task | {"count": task["known"]} for task in labels])
        result._traffic = None
        if "traffic" in state:
            means = [state["traffic"][name] for name in result._names["tasks"]]
            result._traffic = LabelMeans.from_state(means)
        floats = [state["dense"][name] for name in result._names["dense"]]
        result._floats = Moments.from_state(
            [column | {"count": result.rows - column["missing"]} for column in floats]
        )
        total = _column(state["ragged"], result._names["ragged"], "ids")
        mergeable, lengths = state["mergeable"], dict(state["list_lengths"])
        if not isinstance(lengths["covariance"], Mapping):  # a matrix, as in `summary`
            covariance = np.array(lengths["covariance"], np.float64)
            # JSON does not preserve the shape of an empty covariance.
            covariance = covariance.reshape(len(total), len(total))
            lengths["covariance"] = half_covariance(covariance)
        result._lengths = ListLengths.from_state(
            lengths | mergeable["list_lengths"] | {"rows": result.rows, "total": total}
        )
        for kind in result._distinct:
            result._distinct[kind] = HyperLogLog.from_state(mergeable[kind])
            shown = state.get("new_values", {}).get(kind, {})
            for name, column in state[kind].items():
                if "new" in column:
                    present = column["ids"] - column.get("missing", 0)
                    new = NewValues(int(present), int(column["new"]), shown.get(name, []))
                    result.new[kind][name] = new
        return result


def _put(columns: Mapping[str, dict[str, Any]], field: str, values: np.ndarray) -> None:
    for column, value in zip(columns.values(), values.tolist(), strict=True):
        column[field] = value


def _column(columns: Mapping[str, Any], names: Iterable[str], field: str) -> list[Any]:
    # `summary` leaves out counts of late events that are 0.
    absent = {"late_lists": 0, "late_ids": 0}
    return [
        columns[name].get(field, absent[field]) if field in absent else columns[name][field]
        for name in names
    ]


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges the summaries of consecutive parts; at least one part.

    Args:
        parts: the result of `summary` for each part, with the same features.

    Raises:
        InputError: a part is invalid, or has other features.
    """
    whole: Statistics | None = None
    for i, part in enumerate(parts):
        try:
            statistics = Statistics.from_state(_features(part), part)
            if whole is None:
                whole = statistics
            else:
                whole.merge(statistics)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"statistics {i}: must be what `prepare` wrote of a split: found {error!r}."
                " Prepare the data again."
            ) from error
    assert whole is not None
    return whole.summary()


def _features(tree: Mapping[str, Any]) -> FeatureSpec:
    """Returns the names of the columns as features. Merging needs nothing else."""
    return FeatureSpec(
        tasks=tuple(
            TaskSpec(name, kind=task.get("kind", "binary")) for name, task in tree["tasks"].items()
        ),
        dense=tuple(DenseSpec((name,)) for name in tree["dense"]),
        categorical=tuple(CategoricalSpec((name,)) for name in tree["categorical"]),
        ragged=tuple(RaggedSpec((name,)) for name in tree["ragged"]),
    )
