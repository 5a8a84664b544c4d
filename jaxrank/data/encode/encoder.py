"""Encodes chunks of raw columns as `Examples`."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.cells import ListElements, id_elements, vector
from jaxrank.data.encode.columns import (
    Column,
    check_exact,
    numbers,
    read_column,
    texts,
    uncastable,
)
from jaxrank.data.encode.labels import Labels, encode_labels, horizon
from jaxrank.data.encode.row_numbers import row_numbers
from jaxrank.data.encode.sequences import all_lists
from jaxrank.data.examples import Examples
from jaxrank.data.keyed_hash import Pseudonymise, pseudonymised
from jaxrank.data.ragged import places_of_lists
from jaxrank.data.spec.entries import CategoricalSpec, DenseSpec, RaggedSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.new_values import NewValues, first, is_new
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.statistics.vocabulary import Vocabulary, hash_rows
from jaxrank.features import MISSING_ROW, PAD, RESERVED_ROWS, UNKNOWN_ROW

_NUMBER = "a finite number or empty"
_MAX_NUMBER = 1e150  # its square is finite, as the deviation requires


def raw_floats(entries: Sequence[DenseSpec], chunk: Chunk) -> np.ndarray:
    """Returns f64[n, entries] as in the data, NaN where missing. The entries are resolved."""
    result = np.empty((chunk.batch.num_rows, len(entries)), order="F")
    vectors: dict[str, np.ndarray] = {}
    for i, entry in enumerate(entries):
        column = read_column(chunk, entry.column)
        if entry.length == 1:
            result[:, i] = numbers(column, _NUMBER)
        else:
            if entry.column not in vectors:
                vectors[entry.column] = vector(entry, chunk)
            result[:, i] = vectors[entry.column][:, entry.index]
        large = np.flatnonzero(np.abs(result[:, i]) > _MAX_NUMBER)
        if len(large):
            column.reject(large, f"a number of at most {_MAX_NUMBER:g} in size, or empty")
    return result


def log_transform(values: np.ndarray, log: np.ndarray) -> np.ndarray:
    """Applies sign(x) log(1 + |x|) to the columns where bool[columns] `log` is True."""
    if not log.any():
        return values
    result = values.copy()
    part = values[:, log]
    result[:, log] = np.copysign(np.log1p(np.abs(part)), part)
    return result


class Encoder:
    """Encodes the chunks of a split and updates the split's statistics.

    Args:
        features: a resolved spec.
        vocabularies: of every table with vocabulary encoding.
        transforms: mean and deviation, after `log`, of every standardised float.
        as_of: the latest event of the split, in seconds since 1970, for tasks with a `time` if the
            spec has no `as_of`.
        boundaries: f64[buckets - 1] of every feature with fitted buckets, by name.
        pseudonymise: maps a raw value to its entry in the vocabulary. None: the value itself.
        earlier_rows: number of rows of each vocabulary in the earlier store. Later rows are new.
        types: of columns that have several types in the files, by name, as in `Source.types`.
        counts: whether examples are counted in `statistics`.
    """

    def __init__(
        self,
        features: FeatureSpec,
        vocabularies: Mapping[str, Vocabulary],
        transforms: Mapping[str, tuple[float, float]],
        statistics: Statistics,
        *,
        as_of: float | None = None,
        boundaries: Mapping[str, np.ndarray] | None = None,
        pseudonymise: Pseudonymise | None = None,
        earlier_rows: Mapping[str, int] | None = None,
        types: Mapping[str, str] | None = None,
        counts: bool = True,
    ):
        self.statistics = statistics
        self._counts = counts
        self._pseudonymise = pseudonymise
        self._earlier_rows = earlier_rows or {}
        self._types = types or {}
        self._features = features
        self._tables = {table.name: table for table in features.tables}
        self._vocabularies = vocabularies
        floats = features.dense
        self._floats = floats
        self._log = np.array([f.log for f in floats], bool)
        scales = [f.scale(transforms) for f in floats]
        self._mean = np.array([mean for mean, _ in scales])
        self._std = np.array([std for _, std in scales])
        self._indicator = np.array([f.missing_indicator for f in floats], bool)
        # An indicator follows its own value and so moves all later columns.
        self._position = np.arange(len(floats)) + np.cumsum(self._indicator) - self._indicator
        self._as_of, self._boundaries = as_of, boundaries or {}
        self._id_columns = sum(f.length for f in features.categorical)

    def encode(self, chunk: Chunk) -> Examples:
        """Returns the chunk's examples. Counts them only if all of them are valid.

        Raises:
            InputError: a value is invalid for its column. Names file, row and column.
        """
        features = self._features
        raw = raw_floats(self._floats, chunk)
        labels = encode_labels(
            chunk, features.tasks, features.time, self._horizon, features.time_format
        )
        lists = self._encode_lists(chunk)
        ids, noted = self._encode_ids(chunk)
        examples = Examples(
            dense=self._encode_floats(raw, chunk),
            ids=ids,
            list_lengths=lists.lengths,
            list_values=lists.values,
            list_weights=lists.weights,
            labels=labels.labels,
            weights=labels.weights,
            truth=labels.truth,
            logit_correction=labels.logit_correction,
            kept=self._kept(chunk),
        )
        if self._counts:
            self._count(raw, labels, lists)
            self._count_ids(ids, noted)
        return examples

    @functools.cached_property
    def _horizon(self) -> float | None:
        return horizon(self._features, self._as_of)

    def _count(self, raw: np.ndarray, labels: Labels, lists: "_Lists") -> None:
        statistics = self.statistics
        statistics.add(labels.labels, raw, lists.lengths, labels.weights, labels.logit_correction)
        statistics.pending += labels.pending
        for i, entry in enumerate(self._features.ragged):
            rows, elements = lists.rows[i], lists.elements[i]
            statistics.add_rows("ragged", i, rows)
            statistics.list_out_of_range[i] += lists.noted[i].out_of_range
            statistics.list_truncated[i] += elements.truncated
            statistics.list_truncated_lists[i] += elements.truncated_lists
            statistics.list_late[i] += elements.late
            statistics.list_late_lists[i] += elements.late_lists
            if entry.encoding == "vocabulary":
                statistics.list_unknown[i] += np.count_nonzero(rows == UNKNOWN_ROW)
                self._count_new("ragged", entry, rows, rows.size, lists.noted[i])

    def _count_ids(self, ids: np.ndarray, noted: "list[_Noted]") -> None:
        statistics = self.statistics
        start = 0
        for i, entry in enumerate(self._features.categorical):
            part = ids[:, start : start + entry.length]
            start += entry.length
            statistics.add_rows("categorical", i, part)
            statistics.id_out_of_range[i] += noted[i].out_of_range
            missing = int(np.count_nonzero(part == _missing(entry.encoding)))
            statistics.id_missing[i] += missing
            if entry.encoding == "vocabulary":
                statistics.id_unknown[i] += np.count_nonzero(part == UNKNOWN_ROW)
                self._count_new("categorical", entry, part, part.size - missing, noted[i])

    def _count_new(
        self,
        kind: str,
        entry: CategoricalSpec | RaggedSpec,
        rows: np.ndarray,
        num_ids: int,
        noted: "_Noted",
    ) -> None:
        if entry.table in self._earlier_rows:
            new = int(np.count_nonzero(is_new(rows, self._earlier_rows[entry.table])))
            counted = self.statistics.new[kind].setdefault(entry.name, NewValues())
            counted.merge(NewValues(num_ids, new, noted.new))

    def check(self, chunk: Chunk) -> None:
        """Raises BadRows where `encode` would, before anything is fitted."""
        raw = raw_floats(self._floats, chunk)
        self._check_floats(log_transform(raw, self._log), chunk)
        features = self._features
        encode_labels(chunk, features.tasks, features.time, -math.inf, features.time_format)
        for entry in self._features.categorical:
            if entry.encoding == "bucket":
                numbers(read_column(chunk, entry.name), _NUMBER)
            else:
                self._check_ids(id_elements(entry, chunk), entry.table)
        for list_entry, cells in zip(features.ragged, all_lists(features, chunk), strict=True):
            self._check_ids(cells.ids, list_entry.table)

    def _check_ids(self, column: Column, table: str) -> None:
        if self._tables[table].encoding == "integer":
            row_numbers(column, self._tables[table])
        else:
            texts(column)

    def _check_floats(self, values: np.ndarray, chunk: Chunk) -> np.ndarray:
        """Converts f64[n, floats], NaN where missing, to f32."""
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        if np.isinf(single).any():
            i = int(np.flatnonzero(np.isinf(single).any(axis=0))[0])
            bad = np.flatnonzero(np.isinf(single[:, i]))
            read_column(chunk, self._floats[i].column).reject(bad, "in the range of float32")
        return single

    def _encode_floats(self, raw: np.ndarray, chunk: Chunk) -> np.ndarray:
        missing = np.isnan(raw)
        values = log_transform(raw, self._log)
        self._check_floats(values, chunk)
        values = (values - self._mean) / self._std
        values[missing] = 0
        single = self._check_floats(values, chunk)
        result = np.empty((len(raw), raw.shape[1] + int(self._indicator.sum())), np.float32)
        result[:, self._position] = single
        result[:, self._position[self._indicator] + 1] = missing[:, self._indicator]
        return result

    def _encode_ids(self, chunk: Chunk) -> "tuple[np.ndarray, list[_Noted]]":
        """Returns i32[n, id columns] and the counts of each feature."""
        result = np.empty((chunk.batch.num_rows, self._id_columns), np.int32)
        noted = []
        start = 0
        for entry in self._features.categorical:
            part = result[:, start : start + entry.length]
            start += entry.length
            column = id_elements(entry, chunk)
            if entry.encoding == "bucket":
                part[:, 0] = _bucket_rows(column, entry.edges(self._boundaries))
                noted.append(_Noted())
                continue
            rows, note = self._map_rows(column, entry)
            noted.append(note)
            if column.lengths is None:
                part[:, 0] = rows
            else:
                part[:] = _missing(entry.encoding)
                part[column.lengths > 0] = rows.reshape(-1, entry.length)
        return result, noted

    def _map_rows(
        self, column: Column, entry: CategoricalSpec | RaggedSpec
    ) -> "tuple[np.ndarray, _Noted]":
        """Returns the row of each id, i32[values], and the counts of the column.

        A missing id has the row MISSING_ROW or PAD.
        """
        table = self._tables[entry.table]
        if table.encoding == "integer":
            rows, bad = row_numbers(column, table)
            return rows, _Noted(bad)
        # Each different value is looked up once. The rest is arithmetic on indices.
        encoded = texts(column).dictionary_encode()
        values = encoded.dictionary
        count = len(values)
        new: list[str] = []
        if table.encoding == "hash":
            data = values.cast(pa.binary()).to_numpy(zero_copy_only=False)
            rows = hash_rows(data, count, table.rows, entry.salt)
        else:
            names = pseudonymised(values, self._pseudonymise) if self._pseudonymise else values
            vocabulary = self._vocabularies[table.name]
            rows = vocabulary.lookup(names.to_numpy(zero_copy_only=False), count)
            if table.name in self._earlier_rows and not self._pseudonymise:
                places = np.flatnonzero(is_new(rows, self._earlier_rows[table.name]))
                new = first(values[int(i)].as_py() for i in places)
        rows = np.append(rows, np.int32(MISSING_ROW))
        return rows[pc.fill_null(encoded.indices, count).to_numpy()], _Noted(0, new)

    def _encode_lists(self, chunk: Chunk) -> "_Lists":
        entries = self._features.ragged
        lengths = np.zeros((chunk.batch.num_rows, len(entries)), np.int32)
        elements = all_lists(self._features, chunk)
        parts: list[np.ndarray] = []
        noted: list[_Noted] = []
        for i, (entry, cells) in enumerate(zip(entries, elements, strict=True)):
            rows, note = self._map_rows(cells.ids, entry)
            lengths[:, i] = cells.ids.lengths
            parts.append(rows)
            noted.append(note)
        values = np.empty(sum(len(part) for part in parts), np.int32)
        weights = np.ones(len(values), np.float32)
        for part, cells, places in zip(parts, elements, places_of_lists(lengths), strict=True):
            values[places] = part
            if cells.weights is not None:
                weights[places] = cells.weights
        weighted = any(entry.is_weighted for entry in entries)
        return _Lists(lengths, values, weights if weighted else None, elements, parts, noted)

    def _kept(self, chunk: Chunk) -> pa.RecordBatch | None:
        batch = chunk.batch
        columns = {}
        for name in self._features.kept_columns:
            column = batch.column(batch.schema.get_field_index(name))
            # An Arrow file holds one dictionary per column, but each chunk has its own.
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if self._types.get(name) == "double" and not pa.types.is_float64(column.type):
                column = _as_double(column, name, chunk)
            if name == self._features.group:
                check_exact(Column(column, name, chunk))
            columns[name] = column
        return pa.RecordBatch.from_pydict(columns) if columns else None


def _as_double(column: pa.Array, name: str, chunk: Chunk) -> pa.Array:
    """Casts a kept integer column to float64, for a column that has fractions in other files."""
    try:
        return column.cast(pa.float64())
    except pa.ArrowInvalid:
        must = "a number that a double has exactly, as other files have doubles in this column"
        Column(column, name, chunk).reject(uncastable(column, pa.float64()), must)


class _Noted(NamedTuple):
    """Counts of a column of ids: ids out of range, and some values new to the vocabulary."""

    out_of_range: int = 0
    new: list[str] = []


class _Lists(NamedTuple):
    """The encoded lists of a chunk, by example and within an example by list, as in `Examples`.

    lengths: i32[n, lists].
    elements: the cells of each column.
    rows: i32[ids] of each column.
    noted: the counts of each column.
    """

    lengths: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None
    elements: list[ListElements]
    rows: list[np.ndarray]
    noted: list[_Noted]


def _missing(encoding: str) -> np.int32:
    return PAD if encoding == "integer" else np.int32(MISSING_ROW)


def _bucket_rows(column: Column, edges: np.ndarray) -> np.ndarray:
    """Returns the row of each number, i32[n]: how many edges f32[buckets - 1] are at most it."""
    values = numbers(column, _NUMBER)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    rows = RESERVED_ROWS + np.searchsorted(edges, single, side="right").astype(np.int32)
    rows[np.isnan(values)] = MISSING_ROW
    return rows
