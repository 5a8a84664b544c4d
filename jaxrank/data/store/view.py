"""A split as a model reads it: some of the features of its store, with rows of the model's tables.

A run may leave out features of its store (`features.skip`). A model may also read a store whose
vocabularies have other values, or the same ones in other rows.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrank.data.examples import Examples
from jaxrank.data.ragged import select_lists
from jaxrank.data.store.split import Split, WrappedSplit
from jaxrank.errors import InputError
from jaxrank.features import PAD, Schema

_SECTIONS = ("dense", "categorical", "ragged")


class View:
    """Selects the features of a schema from stored examples, and maps rows of their tables.

    Args:
        stored: the schema of the store.
        wanted: the schema of the result. Its features are among those of `stored`, in any order of
            dense and categorical ones. Ragged ones keep the order of `stored`.
        rows: {table: i32[rows of the stored table], rows of the wanted table}. Rows of other tables
            stay as they are.
    """

    def __init__(
        self, stored: Schema, wanted: Schema, rows: Mapping[str, np.ndarray] | None = None
    ):
        self._names = {section: [f.name for f in getattr(wanted, section)] for section in _SECTIONS}
        places = {f.name: i for i, f in enumerate(stored.dense)}
        self._dense = [places[f.name] for f in wanted.dense]
        columns: dict[str, list[int]] = {f.name: [] for f in stored.categorical}
        for i, feature in enumerate(stored.id_columns):
            columns[feature.name].append(i)
        self._ids = [i for f in wanted.categorical for i in columns[f.name]]
        places = {f.name: i for i, f in enumerate(stored.ragged)}
        self._lists = [places[f.name] for f in wanted.ragged]
        self._is_weighted = any(f.weighted for f in wanted.ragged)
        rows = rows or {}
        self._id_rows = [rows.get(f.table) for f in wanted.id_columns]
        self._list_rows = [rows.get(f.table) for f in wanted.ragged]

    def examples(self, stored: Examples) -> Examples:
        """Returns the examples of a block of the store.

        Raises:
            InputError: a row is not one of its table.
        """
        ids = _columns(stored.ids, self._ids)
        if any(rows is not None for rows in self._id_rows):
            ids = np.array(ids, order="C")
            for column, rows in enumerate(self._id_rows):
                if rows is not None:
                    ids[:, column] = _mapped(ids[:, column], rows)
        lengths, values, weights = select_lists(
            self._lists, stored.list_lengths, stored.list_values, stored.list_weights
        )
        if any(rows is not None for rows in self._list_rows):
            values = values.copy()
            owner = np.repeat(
                np.tile(np.arange(len(self._lists)), len(lengths)), lengths.reshape(-1)
            )
            for i, rows in enumerate(self._list_rows):
                if rows is not None:
                    values[owner == i] = _mapped(values[owner == i], rows)
        return dataclasses.replace(
            stored,
            dense=_columns(stored.dense, self._dense),
            ids=ids,
            list_lengths=lengths,
            list_values=values,
            list_weights=weights if self._is_weighted else None,
        )

    def list_lengths(self, stored: np.ndarray) -> np.ndarray:
        """Returns the lengths of the selected lists."""
        return _columns(stored, self._lists)

    def statistics(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the statistics of the selected features. They cannot be merged any more."""
        tree = {key: value for key, value in stored.items() if key != "mergeable"}
        for section, names in self._names.items():
            columns = tree.get(section, {})  # without indicators of missing values
            tree[section] = {name: columns[name] for name in names if name in columns}
        lengths, lists = stored["list_lengths"], self._lists
        tree["list_lengths"] = {
            key: np.asarray(values)[lists].tolist()
            for key, values in lengths.items()
            if key != "covariance"
        }
        count = len(lengths["mean"])
        covariance = np.reshape(lengths["covariance"], (count, count))  # JSON drops an empty shape
        tree["list_lengths"]["covariance"] = covariance[np.ix_(lists, lists)].tolist()
        return tree


def _columns(matrix: np.ndarray, columns: list[int]) -> np.ndarray:
    """Returns the columns of a matrix, without a copy if they are all of them in order."""
    if columns == list(range(matrix.shape[1])):
        return matrix
    return matrix.take(np.asarray(columns, np.intp), axis=1)


def _mapped(stored: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the new row of each stored row, i32[n]. PAD stays PAD."""
    is_pad = stored == PAD
    outside = ~is_pad & ((stored < 0) | (stored >= len(rows)))
    if outside.any():
        raise InputError(
            f"ids of a store must be rows of their table, 0 to {len(rows) - 1}: found"
            f" {int(stored[outside][0])}. Prepare the data again."
        )
    return np.where(is_pad, PAD, rows.take(stored, mode="clip"))


class ViewedSplit(WrappedSplit):
    """A split through a `View`.

    Args:
        split: as it is stored.
        statistics: see `Store.split`.
    """

    def __init__(self, split: Split, view: View, statistics: dict[str, Any] | None = None):
        super().__init__(split)
        self._view, self._wider = view, statistics

    @property
    def statistics(self) -> dict[str, Any]:
        if self._wider is not None:
            return self._wider
        return self._view.statistics(self._split.statistics)

    @property
    def day_statistics(self) -> list[dict[str, Any]]:
        return [self._view.statistics(day) for day in self._split.day_statistics]

    def read_block(self, index: int) -> Examples:
        return self._view.examples(self._split.read_block(index))

    def list_lengths(self, index: int) -> np.ndarray:
        return self._view.list_lengths(self._split.list_lengths(index))
