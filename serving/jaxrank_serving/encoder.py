"""Encodes the raw values of a request as rows of tables and numbers, by the rules of training.

All vocabularies are looked up by one call, because a call costs more than a value.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import xxhash

from jaxrank_serving.derived.columns import DerivedColumns
from jaxrank_serving.errors import BundleError, RequestError
from jaxrank_serving.index import Index
from jaxrank_serving.lists import Lists, combiner_factors, lists
from jaxrank_serving.rows import MISSING, integer_rows
from jaxrank_serving.signature import Categorical, Dense, Ragged, Signature
from jaxrank_serving.values import Cells, elements, numbers, texts

MISSING_ROW, UNKNOWN_ROW, RESERVED_ROWS = 0, 1, 2
_LARGEST = 1e150  # of a number, as in training


class Features(NamedTuple):
    """The encoded features of n candidates. Those of the context have one entry in place of n.

    dense: f32[n, dense inputs].
    ids: {feature: stack rows i64[n or 1, length]}.
    lists: {feature: (stack rows i64[ids], lengths i64[n or 1], factors f32[ids])}.
    counts: {feature: counts i64[6]}, see `scorer.Counts`.
    """

    dense: np.ndarray
    ids: dict[str, np.ndarray]
    lists: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    counts: dict[str, np.ndarray]


class _Ids(NamedTuple):
    """Ids of one feature whose rows are being looked up, i64[ids]."""

    entry: Categorical | Ragged
    rows: np.ndarray
    lengths: np.ndarray | None
    lists: Lists | None = None


class Encoder:
    """Encodes columns of raw values. It has no state, so threads may share it.

    Args:
        signature: of the bundle.
        index: of its vocabularies.
        hash_key: key of a store with keyed hashes.

    Raises:
        BundleError: the key is missing or another one, or a time zone is unknown.
    """

    def __init__(self, signature: Signature, index: Index, hash_key: bytes | None = None):
        self._signature, self._index = signature, index
        self._tables = {table.name: table for table in signature.tables}
        self._stacks = {stack.name: stack for stack in signature.stacks}
        self._columns = {column.name: column for column in signature.columns}
        self._derived = DerivedColumns(signature.derived, signature.time_format)
        self._missing_texts = frozenset(signature.missing_texts)
        self._pseudonymise = _pseudonymise(signature, hash_key)
        dense = signature.dense
        self._log = np.array([f.log for f in dense], bool)
        self._mean = np.array([f.mean for f in dense])
        self._std = np.array([f.std for f in dense])
        self._indicator = np.array([f.missing_indicator for f in dense], bool)
        self._place = np.arange(len(dense)) + np.cumsum(self._indicator) - self._indicator
        self._edges = {f.name: np.array(f.boundaries, np.float32) for f in signature.categorical}

    def encode(self, columns: Mapping[str, Cells], rows: int) -> Features:
        """Encodes n = `rows` candidates.

        Raises:
            RequestError: a value is one that training rejects.
        """
        columns = {name: self._without_missing(cells) for name, cells in columns.items()}
        if self._signature.derived:
            columns = self._derived.add(columns, rows)
        counts: dict[str, np.ndarray] = {}
        dense = self._dense(columns, rows, counts)
        parts = [self._categorical(f, columns[f.name], counts) for f in self._signature.categorical]
        parts += [self._ragged(f, columns, counts) for f in self._signature.ragged]
        self._look_up(parts, counts)
        ids, ragged = {}, {}
        for part, _ in parts:
            entry, table = part.entry, self._tables[part.entry.table]
            zeros = self._stacks[table.stack].rows
            stacked = np.where(part.rows == MISSING, zeros, part.rows + table.offset)
            if isinstance(entry, Ragged):
                assert part.lists is not None
                factors = combiner_factors(entry.combiner, part.lists.lengths, part.lists.weights)
                ragged[entry.name] = stacked, part.lists.lengths, factors
            elif part.lengths is None:
                ids[entry.name] = stacked[:, None]
            else:
                missing = zeros if table.encoding == "integer" else table.offset + MISSING_ROW
                matrix = np.full((len(part.lengths), entry.length), missing, np.int64)
                matrix[part.lengths > 0] = stacked.reshape(-1, entry.length)
                ids[entry.name] = matrix
        return Features(dense, ids, ragged, counts)

    def _without_missing(self, cells: Cells) -> Cells:
        """Replaces texts that stand for a missing value."""
        if not self._missing_texts or cells.column.type != "text" or cells.column.is_list:
            return cells
        none = self._missing_texts
        is_missing = [isinstance(v, str) and v in none for v in cells.values]
        if not any(is_missing):
            return cells
        pairs = zip(cells.values, is_missing, strict=True)
        return cells._replace(values=[None if missing else v for v, missing in pairs])

    def _dense(
        self, columns: Mapping[str, Cells], rows: int, counts: dict[str, np.ndarray]
    ) -> np.ndarray:
        """Returns f32[n, dense inputs]."""
        entries = self._signature.dense
        raw = np.empty((rows, len(entries)), order="F")
        vectors: dict[str, np.ndarray] = {}
        for i, entry in enumerate(entries):
            cells = columns[entry.column]
            if entry.length == 1:
                values = numbers(cells)
            else:
                if entry.column not in vectors:
                    vectors[entry.column] = _vector(entry, cells)
                values = vectors[entry.column][:, entry.index]
            large = np.abs(values) > _LARGEST
            if large.any():
                must = f"a number of at most {_LARGEST:g} in size, or empty"
                cells.reject(int(np.flatnonzero(large)[0]), must)
            absent = int(np.count_nonzero(np.isnan(values)))
            counts[entry.name] = _counted(len(values), absent)
            raw[:, i] = values
        missing = np.isnan(raw)
        if self._log.any():
            part = raw[:, self._log]
            raw[:, self._log] = np.copysign(np.log1p(np.abs(part)), part)
        scaled = (raw - self._mean) / self._std
        scaled[missing] = 0
        result = np.empty((rows, len(entries) + int(self._indicator.sum())), np.float32)
        with np.errstate(over="ignore"):
            result[:, self._place] = scaled
            bad = np.isinf(result[:, self._place]) | np.isinf(raw.astype(np.float32))
        if bad.any():
            row, i = (int(axis[0]) for axis in np.nonzero(bad))
            cells = columns[entries[i].column]
            cells.reject(0 if cells.is_context else row, "in the range of float32")
        result[:, self._place[self._indicator] + 1] = missing[:, self._indicator]
        return result

    def _categorical(
        self, entry: Categorical, cells: Cells, counts: dict[str, np.ndarray]
    ) -> tuple[_Ids, list[Any] | None]:
        """Returns the rows of a feature, and the texts to look up, if any."""
        if entry.encoding == "bucket":
            values = numbers(cells)
            with np.errstate(over="ignore"):
                single = values.astype(np.float32)
            rows = RESERVED_ROWS + np.searchsorted(self._edges[entry.name], single, side="right")
            missing = np.isnan(values)
            rows[missing] = MISSING_ROW
            counts[entry.name] = _counted(len(rows), int(missing.sum()))
            return _Ids(entry, rows, None), None
        lengths = None
        if entry.length > 1:
            must = f"{entry.length} ids"
            ids, lengths = elements(cells, entry.separator, entry.brackets, must)
            for i in np.flatnonzero((lengths != entry.length) & (lengths != 0)).tolist():
                cells.reject(i, f"a list of {must}")
            cells = ids
        rows, names, missing, out_of_range = self._rows(entry, cells)
        total = len(rows)
        if lengths is not None:
            absent = int(np.count_nonzero(lengths == 0)) * entry.length
            total, missing = total + absent, missing + absent
        counts[entry.name] = _counted(total, missing, out_of_range=out_of_range)
        return _Ids(entry, rows, lengths), names

    def _ragged(
        self, entry: Ragged, columns: Mapping[str, Cells], counts: dict[str, np.ndarray]
    ) -> tuple[_Ids, list[Any] | None]:
        weights = columns[entry.weights] if entry.weights else None
        cells = columns[entry.name]
        if weights is not None and weights.is_context != cells.is_context:
            must = f"given where {entry.name} is, in the context or with each candidate"
            raise RequestError(entry.weights, None, must, "in the other place")
        part = lists(entry, cells, weights)
        rows, names, missing, out_of_range = self._rows(entry, part.ids)
        counts[entry.name] = _counted(
            len(rows),
            missing,
            out_of_range=out_of_range,
            truncated=part.truncated,
            truncated_lists=part.truncated_lists,
        )
        return _Ids(entry, rows, part.lengths, part), names

    def _rows(
        self, entry: Categorical | Ragged, cells: Cells
    ) -> tuple[np.ndarray, list[Any] | None, int, int]:
        """Returns table rows i64[ids], texts to look up, and counts: missing and out of range."""
        table = self._tables[entry.table]
        if table.encoding == "integer":
            rows, bad = integer_rows(cells, table)
            return rows, None, int(np.count_nonzero(rows == MISSING)), bad
        names = texts(cells)
        rows = np.full(len(names), MISSING_ROW, np.int64)
        missing = names.count(None)
        if table.encoding == "vocabulary":
            return rows, names, missing, 0
        present = np.array([name is not None for name in names], bool)
        spread, salt = table.rows - RESERVED_ROWS, entry.salt.encode()
        digest = xxhash.xxh64_intdigest
        encoded = _encoded([name for name in names if name is not None], cells)
        hashed = (RESERVED_ROWS + digest(salt + value) % spread for value in encoded)
        rows[present] = np.fromiter(hashed, np.int64, len(encoded))
        return rows, None, missing, 0

    def _look_up(
        self,
        parts: list[tuple[_Ids, list[Any] | None]],
        counts: dict[str, np.ndarray],
    ) -> None:
        """Fills in the rows of all features with vocabularies, from the texts beside them."""
        hashes, places = [], []
        for part, names in parts:
            if names is None:
                continue
            present: Any = slice(None)
            if None in names:
                present = np.array([name is not None for name in names], bool)
                names = [name for name in names if name is not None]
            if self._pseudonymise is not None:
                names = list(map(self._pseudonymise, names))
            seed = self._tables[part.entry.table].seed
            encoded = _encoded(names, part.entry.name)
            digests = map(xxhash.xxh3_64_intdigest, encoded, itertools.repeat(seed))
            hashes.append(np.fromiter(digests, np.uint64, len(names)))
            places.append((part, present))
        if not hashes:
            return
        rows = self._index.rows(np.concatenate(hashes), UNKNOWN_ROW)
        start = 0
        for (part, present), part_hashes in zip(places, hashes, strict=True):
            result = rows[start : start + len(part_hashes)]
            start += len(part_hashes)
            part.rows[present] = result
            counts[part.entry.name][2] += np.count_nonzero(result == UNKNOWN_ROW)


def _counted(
    values: int,
    missing: int,
    out_of_range: int = 0,
    truncated: int = 0,
    truncated_lists: int = 0,
) -> np.ndarray:
    return np.array([values, missing, 0, out_of_range, truncated, truncated_lists], np.int64)


def _encoded(names: list[Any], where: Any) -> list[bytes]:
    try:
        return list(map(str.encode, names))
    except UnicodeEncodeError as error:
        column = where.column.name if isinstance(where, Cells) else where
        raise RequestError(column, None, "text in UTF-8", f"{error.object!r:.80}") from error


def _pseudonymise(signature: Signature, key: bytes | None) -> Callable[[str], str] | None:
    if not signature.hash_key:
        return None

    def hashed(value: str) -> str:
        try:
            return hashlib.blake2b(value.encode(), digest_size=16, key=key or b"").hexdigest()
        except UnicodeEncodeError as error:
            raise RequestError("ids", None, "text in UTF-8", f"{value!r:.80}") from error

    if not key or hashed("jaxrank") != signature.hash_key:
        raise BundleError(
            "hash_key: must be the key that the run's data was prepared with:"
            f" found {'another' if key else 'none'}."
        )
    return hashed


def _vector(entry: Dense, cells: Cells) -> np.ndarray:
    """Returns f64[n, length], NaN where a number or a whole vector is missing."""
    must = f"{entry.length} numbers"
    flat, lengths = elements(cells, entry.separator, "read", must)
    for i in np.flatnonzero((lengths != entry.length) & (lengths != 0)).tolist():
        cells.reject(i, f"a list of {must}")
    result = np.full((len(lengths), entry.length), np.nan)
    result[lengths > 0] = numbers(flat).reshape(-1, entry.length)
    return result
