"""Chunks of raw columns -> Blocks of matrices."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.block import Block
from jaxrank.data.chunk import Chunk
from jaxrank.data.columns import Column, column_of, elements, numbers, texts
from jaxrank.data.rejects import BadRows
from jaxrank.data.row_numbers import row_numbers
from jaxrank.data.spec import FeatureSpec, IdSpec, ListSpec, TableSpec
from jaxrank.data.statistics import Statistics
from jaxrank.data.vocabulary import Vocabulary, hash_rows
from jaxrank.features import MISSING_ROW, PAD, UNKNOWN_ROW


def raw_floats(names: list[str], chunk: Chunk) -> np.ndarray:
    """f64[n, names] as the data has them, NaN where missing."""
    result = np.empty((chunk.batch.num_rows, len(names)), order="F")
    for i, name in enumerate(names):
        result[:, i] = numbers(column_of(chunk, name), "a finite number or empty")
    return result


def log_transform(values: np.ndarray, log: np.ndarray) -> np.ndarray:
    """sign(x) log(1 + |x|) in the columns where bool[columns] `log` is set."""
    if not log.any():
        return values
    result = values.copy()
    part = values[:, log]
    result[:, log] = np.copysign(np.log1p(np.abs(part)), part)
    return result


def id_elements(entry: IdSpec, chunk: Chunk) -> Column:
    """The ids of a column; where `length` is more than 1, those of each row that is not missing.

    Such a row has exactly `length` of them, of which one that is empty is missing.
    """
    column = column_of(chunk, entry.name)
    if entry.length == 1:
        return column
    result = elements(column, entry.separator, f"{entry.length} ids")
    assert result.lengths is not None
    bad = (result.lengths != entry.length) & (result.lengths != 0)
    if bad.any():
        rows = np.flatnonzero(bad)
        found = f"{result.lengths[rows[0]]} in {column.values[int(rows[0])].as_py()!r}"
        raise BadRows(chunk, rows, entry.name, f"have length={entry.length} ids", found)
    return result


class ListElements(NamedTuple):
    """The ids of a column of lists, weights f64[ids] if it has any, and how many ids were cut."""

    ids: Column
    weights: np.ndarray | None
    truncated: int


def list_elements(entry: ListSpec, chunk: Chunk) -> ListElements:
    """The ids of a column of lists and their weights, cut to `max_length` where that is asked."""
    column = column_of(chunk, entry.name)
    ids = elements(column, entry.separator)
    assert ids.lengths is not None
    if ids.values.null_count:
        empty = ids.values.is_null().to_numpy(zero_copy_only=False)
        ids.refuse(np.flatnonzero(empty), "a list without empty ids")
    weights = _list_weights(entry, chunk, ids) if entry.weights else None
    over = ids.lengths > entry.max_length if entry.max_length else np.zeros(0, bool)
    if not over.any():
        return ListElements(ids, weights, 0)
    if entry.on_overlong == "error":
        rows = np.flatnonzero(over)
        raise BadRows(
            chunk,
            rows,
            entry.name,
            f"have at most max_length={entry.max_length} ids",
            str(ids.lengths[rows[0]]),
            " Raise max_length, or set on_overlong='truncate'.",
        )
    keep = _position_in_list(ids.lengths) < entry.max_length
    cut = ids._replace(
        values=ids.values.filter(pa.array(keep)),
        lengths=np.minimum(ids.lengths, entry.max_length),
    )
    return ListElements(cut, None if weights is None else weights[keep], int((~keep).sum()))


def _position_in_list(lengths: np.ndarray) -> np.ndarray:  # i64[n] -> i64[sum of lengths]
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)


def _list_weights(entry: ListSpec, chunk: Chunk, ids: Column) -> np.ndarray:
    weights = elements(column_of(chunk, entry.weights), entry.separator)
    assert weights.lengths is not None
    assert ids.lengths is not None
    differ = weights.lengths != ids.lengths
    if differ.any():
        rows = np.flatnonzero(differ)
        found = f"{weights.lengths[rows[0]]} weights and {ids.lengths[rows[0]]} ids"
        must = f"have as many weights as {entry.name} has ids"
        raise BadRows(chunk, rows, entry.weights, must, found)
    return numbers(weights, "a finite number, 0 or more", _not_negative, missing=False)


def _not_negative(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & np.isfinite(values.astype(np.float32))


def _zero_or_one(values: np.ndarray) -> np.ndarray:
    return (values == 0) | (values == 1)


def _probability(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & (values <= 1)


class Encoder:
    """Encodes the chunks of a split, and counts what it meets in the split's statistics.

    Args:
        features: a resolved spec.
        vocabularies: of every table with vocabulary encoding.
        transforms: mean and deviation, after `log`, of every float that is standardised.
    """

    def __init__(
        self,
        features: FeatureSpec,
        vocabularies: Mapping[str, Vocabulary],
        transforms: Mapping[str, tuple[float, float]],
        statistics: Statistics,
    ):
        self.statistics = statistics
        self._features = features
        self._tables = {table.name: table for table in features.tables}
        self._vocabularies = vocabularies
        floats = features.floats
        self._float_names = [f.name for f in floats]
        self._log = np.array([f.log for f in floats], bool)
        scales = [f.scale(transforms) for f in floats]
        self._mean = np.array([mean for mean, _ in scales])
        self._std = np.array([std for _, std in scales])
        self._indicator = np.array([f.missing_indicator for f in floats], bool)
        # An indicator stands behind its own value and so moves all later columns.
        self._position = np.arange(len(floats)) + np.cumsum(self._indicator) - self._indicator
        self._id_columns = sum(f.length for f in features.ids)

    def encode(self, chunk: Chunk) -> Block:
        """The chunk's examples.

        Raises:
            InputError: a value is not what its column may hold; names file, row and column.
        """
        raw = raw_floats(self._float_names, chunk)
        labels, weights, truth = self._encode_tasks(chunk)
        lengths, values, list_weights = self._encode_lists(chunk)
        self.statistics.add(labels, raw, lengths)
        return Block(
            floats=self._encode_floats(raw, chunk),
            ids=self._encode_ids(chunk),
            list_lengths=lengths,
            list_values=values,
            list_weights=list_weights,
            labels=labels,
            weights=weights,
            truth=truth,
            kept=self._kept(chunk),
        )

    def _encode_tasks(
        self, chunk: Chunk
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        tasks = self._features.tasks
        shape = (chunk.batch.num_rows, len(tasks))
        labels = np.empty(shape, np.float32)
        weights = np.ones(shape, np.float32)
        truth = np.full(shape, np.nan, np.float32)
        for i, task in enumerate(tasks):
            labels[:, i] = numbers(column_of(chunk, task.label), "0, 1 or empty", _zero_or_one)
            if task.mask:
                known = numbers(column_of(chunk, task.mask), "0 or 1", _zero_or_one, missing=False)
                labels[known == 0, i] = np.nan
            if task.weight:
                weights[:, i] = numbers(
                    column_of(chunk, task.weight),
                    "a finite number, 0 or more",
                    _not_negative,
                    missing=False,
                )
            if task.truth:
                must = "a number from 0 to 1, or empty"
                truth[:, i] = numbers(column_of(chunk, task.truth), must, _probability)
        return (
            labels,
            weights if any(t.weight for t in tasks) else None,
            truth if any(t.truth for t in tasks) else None,
        )

    def _encode_floats(self, raw: np.ndarray, chunk: Chunk) -> np.ndarray:
        missing = np.isnan(raw)
        values = (log_transform(raw, self._log) - self._mean) / self._std
        values[missing] = 0
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        if not np.isfinite(single).all():
            i = int(np.flatnonzero(~np.isfinite(single).all(axis=0))[0])
            bad = np.flatnonzero(~np.isfinite(single[:, i]))
            column_of(chunk, self._float_names[i]).refuse(bad, "in the range of float32")
        result = np.empty((len(raw), raw.shape[1] + int(self._indicator.sum())), np.float32)
        result[:, self._position] = single
        result[:, self._position[self._indicator] + 1] = missing[:, self._indicator]
        return result

    def _encode_ids(self, chunk: Chunk) -> np.ndarray:
        result = np.empty((chunk.batch.num_rows, self._id_columns), np.int32)
        start = 0
        for i, entry in enumerate(self._features.ids):
            table = self._tables[entry.table]
            column = id_elements(entry, chunk)
            rows, bad = self._rows_of(column, table)
            missing = PAD if table.encoding == "integer" else MISSING_ROW
            part = result[:, start : start + entry.length]
            if column.lengths is None:
                part[:, 0] = rows
            else:
                part[:] = missing
                part[column.lengths > 0] = rows.reshape(-1, entry.length)
            start += entry.length
            self.statistics.id_out_of_range[i] += bad
            self.statistics.id_missing[i] += np.count_nonzero(part == missing)
            if table.encoding == "vocabulary":
                self.statistics.id_unknown[i] += np.count_nonzero(part == UNKNOWN_ROW)
        return result

    def _rows_of(self, column: Column, table: TableSpec) -> tuple[np.ndarray, int]:
        """i32[values], the row of each id, MISSING_ROW or PAD where it is missing; and how many ids
        were no rows of their table."""
        if table.encoding == "integer":
            return row_numbers(column, table)
        # Each different value is looked up once; the rest is arithmetic on indices.
        encoded = texts(column).dictionary_encode()
        values = encoded.dictionary
        count = len(values)
        if table.encoding == "hash":
            data = values.cast(pa.binary()).to_numpy(zero_copy_only=False)
            rows = hash_rows(data, count, table.rows, table.salt)
        else:
            vocabulary = self._vocabularies[table.name]
            rows = vocabulary.lookup(values.to_numpy(zero_copy_only=False), count)
        rows = np.append(rows, np.int32(MISSING_ROW))
        return rows[pc.fill_null(encoded.indices, count).to_numpy()], 0

    def _encode_lists(self, chunk: Chunk) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Lengths i32[n, lists], and the rows and weights example by example, list by list."""
        entries = self._features.lists
        lengths = np.zeros((chunk.batch.num_rows, len(entries)), np.int32)
        parts: list[np.ndarray] = []
        weights: list[np.ndarray | None] = []
        for i, entry in enumerate(entries):
            found = list_elements(entry, chunk)
            table = self._tables[entry.table]
            rows, bad = self._rows_of(found.ids, table)
            lengths[:, i] = found.ids.lengths
            parts.append(rows)
            weights.append(found.weights)
            self.statistics.list_out_of_range[i] += bad
            self.statistics.list_truncated[i] += found.truncated
            if table.encoding == "vocabulary":
                self.statistics.list_unknown[i] += np.count_nonzero(rows == UNKNOWN_ROW)
        weighted = any(entry.weights for entry in entries)
        starts = np.cumsum(lengths.reshape(-1), dtype=np.int64).reshape(lengths.shape) - lengths
        values = np.empty(sum(len(part) for part in parts), np.int32)
        list_weights = np.ones(len(values), np.float32)
        for i, part in enumerate(parts):
            n = lengths[:, i].astype(np.int64)
            target = np.repeat(starts[:, i], n) + _position_in_list(n)
            values[target] = part
            if weights[i] is not None:
                list_weights[target] = weights[i]
        return lengths, values, list_weights if weighted else None

    def _kept(self, chunk: Chunk) -> pa.RecordBatch:
        batch = chunk.batch
        columns = {}
        for name in self._features.kept_columns:
            column = batch.column(batch.schema.get_field_index(name))
            # An Arrow file holds one dictionary a column, and each chunk has its own.
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            columns[name] = column
        return pa.RecordBatch.from_pydict(columns)
