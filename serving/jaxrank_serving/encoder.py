"""Encodes the raw values of a request as rows of tables and numbers, by the rules of training.

All vocabularies are looked up by one call, because a call costs more than a value.
"""

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from jaxrank_serving.brackets import find_list, may_have_list
from jaxrank_serving.derived.columns import DerivedColumns
from jaxrank_serving.errors import BundleError, RequestError
from jaxrank_serving.index import Index
from jaxrank_serving.lists import Lists, combiner_factors, lists
from jaxrank_serving.rows import MISSING, integer_rows
from jaxrank_serving.sequences import sequence_lists
from jaxrank_serving.signature import Categorical, Dense, Ragged, Signature
from jaxrank_serving.values import Cells, as_text, elements, numbers, numbers_of_columns, texts

MISSING_ROW, UNKNOWN_ROW, RESERVED_ROWS = 0, 1, 2
_MAX_NUMBER = 1e150  # of a number, as in training
_SINGLE = 3e38  # smaller numbers are finite as float32


class Features(NamedTuple):
    """The encoded features of n candidates. Those of the context have one entry in place of n.

    dense: f32[n, dense inputs].
    ids: {feature: stack rows i64[n or 1, length]}.
    lists: {feature: (stack rows i64[ids], lengths i64[n or 1], factors f32[ids])}.
    counts: i64[features, 6], see `scorer.Counts`, in the order of `Encoder.names`.
    """

    dense: np.ndarray
    ids: dict[str, np.ndarray]
    lists: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
    counts: np.ndarray


class _Ids(NamedTuple):
    """Ids of one feature.

    rows: table rows i64[ids], or None if `names` are to be looked up.
    names: texts, "" where missing.
    counts: see `Features`.
    """

    rows: np.ndarray | None
    names: Sequence[str]
    counts: list[int]
    lengths: np.ndarray | None = None
    lists: Lists | None = None


class Encoder:
    """Encodes columns of raw values. It has no state, so threads may share it.

    Args:
        signature: of the bundle.
        index: of its vocabularies.
        hash_key: key of a store with keyed hashes.

    Attributes:
        names: of all features, in the order of their counts.

    Raises:
        BundleError: the key is missing or another one, or a time zone is unknown.
    """

    def __init__(self, signature: Signature, index: Index, hash_key: bytes | None = None):
        self._signature, self._index = signature, index
        self._tables = {table.name: table for table in signature.tables}
        self._stacks = {stack.name: stack for stack in signature.stacks}
        self._columns = {column.name: column for column in signature.columns}
        self._has_bytes = any(column.type == "binary" for column in signature.columns)
        self._derived = DerivedColumns(signature.derived, signature.time_format)
        self._missing_texts = frozenset(signature.missing_texts)
        self._pseudonymise = _pseudonymise(signature, hash_key)
        dense = signature.dense
        self._log = np.array([f.log for f in dense], bool)
        self._mean = np.array([f.mean for f in dense])
        self._std = np.array([f.std for f in dense])
        self._indicator = np.array([f.missing_indicator for f in dense], bool)
        self._place = np.arange(len(dense)) + np.cumsum(self._indicator) - self._indicator
        self._entries = self._ordered(signature)
        self.names = (*(f.name for f in dense), *(f.name for f in self._entries))
        self._offsets = np.array([self._tables[f.table].offset for f in self._entries], np.int64)
        self._edges = {f.name: np.array(f.boundaries, np.float32) for f in signature.categorical}
        # Bundles of the first releases have no empty text in their index.
        seeds = [table.seed for table in signature.tables if table.encoding == "vocabulary"]
        empty = np.array([xxhash.xxh3_64_intdigest(b"", seed) for seed in seeds], np.uint64)
        self._lacks_empty = bool((index.rows(empty, UNKNOWN_ROW) != MISSING_ROW).any())

    def encode(self, columns: Mapping[str, Cells], rows: int) -> Features:
        """Encodes n = `rows` candidates.

        Raises:
            RequestError: a value is one that training rejects.
        """
        if self._missing_texts:
            columns = {name: self._without_missing(cells) for name, cells in columns.items()}
        if self._has_bytes:
            columns = {name: as_text(cells) for name, cells in columns.items()}
        if self._signature.derived:
            columns = self._derived.add(columns, rows)
        counts = np.zeros((len(self.names), 6), np.int64)
        dense = self._dense(columns, rows, counts)
        aligned = self._sequences(columns)
        parts = [*self._shared_lookups(columns)]
        parts += [self._categorical(f, columns[f.name]) for f in self._other_categorical]
        parts += [self._ragged(f, columns, aligned) for f in self._signature.ragged]
        of_ids = counts[len(self._log) :]
        for i, part in enumerate(parts):
            of_ids[i] = part.counts
        stacked = self._stack_rows(parts, of_ids, columns)
        ids, ragged = {}, {}
        for entry, part, rows_of_part in zip(self._entries, parts, stacked, strict=True):
            if isinstance(entry, Ragged):
                assert part.lists is not None
                lengths, weights = part.lists.lengths, part.lists.weights
                factors = combiner_factors(entry.combiner, lengths, weights)
                ragged[entry.name] = rows_of_part, lengths, factors
            elif part.lengths is None:
                ids[entry.name] = rows_of_part[:, None]
            else:
                table = self._tables[entry.table]
                zeros = self._stacks[table.stack].rows
                missing = zeros if table.encoding == "integer" else table.offset + MISSING_ROW
                matrix = np.full((len(part.lengths), entry.length), missing, np.int64)
                matrix[part.lengths > 0] = rows_of_part.reshape(-1, entry.length)
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

    def _ordered(self, signature: Signature) -> list[Categorical | Ragged]:
        """Returns the features with ids: first plain text features that are looked up."""
        columns = {column.name: column for column in signature.columns}
        plain: list[Categorical] = []
        others: list[Categorical] = []
        for entry in signature.categorical:
            column = columns.get(entry.name)
            is_text = column is not None and column.type == "text" and not column.is_list
            is_looked_up = entry.encoding == "vocabulary" and entry.length == 1
            (plain if is_text and is_looked_up else others).append(entry)
        self._plain, self._other_categorical = plain, others
        return [*plain, *others, *signature.ragged]

    def _dense(self, columns: Mapping[str, Cells], rows: int, counts: np.ndarray) -> np.ndarray:
        """Returns f32[n, dense inputs]."""
        entries = self._signature.dense
        parts = self._numbers(columns)
        raw = np.empty((rows, len(entries)), order="F")
        for i, values in enumerate(parts):
            raw[:, i] = values
        missing = np.isnan(raw)
        sizes_of_numbers = np.abs(raw)
        largest = np.fmax.reduce(sizes_of_numbers, axis=None, initial=0.0)
        if largest > _MAX_NUMBER:
            i = int(np.flatnonzero((np.abs(raw) > _MAX_NUMBER).any(axis=0))[0])
            must = f"a number of at most {_MAX_NUMBER:g} in size, or empty"
            index = int(np.flatnonzero(np.abs(parts[i]) > _MAX_NUMBER)[0])
            columns[entries[i].column].reject(index, must)
        sizes = np.fromiter(map(len, parts), np.int64, len(parts))
        counts[: len(entries), 0] = sizes
        counts[: len(entries), 1] = missing.sum(axis=0) * sizes // max(rows, 1)
        if self._log.any():
            np.copysign(np.log1p(sizes_of_numbers), raw, out=raw, where=self._log)
        scaled = raw - self._mean
        scaled /= self._std
        scaled[missing] = 0
        result = np.empty((rows, len(entries) + int(self._indicator.sum())), np.float32)
        with np.errstate(over="ignore"):
            result[:, self._place] = scaled
        if max(largest, np.abs(scaled).max(initial=0)) > _SINGLE:
            self._check_single(columns, raw, scaled)
        result[:, self._place[self._indicator] + 1] = missing[:, self._indicator]
        return result

    def _check_single(
        self, columns: Mapping[str, Cells], raw: np.ndarray, scaled: np.ndarray
    ) -> None:
        """Rejects numbers f64[n, features] that are infinite as float32."""
        with np.errstate(over="ignore"):
            bad = np.isinf(scaled.astype(np.float32)) | np.isinf(raw.astype(np.float32))
        if bad.any():
            row, i = (int(axis[0]) for axis in np.nonzero(bad))
            cells = columns[self._signature.dense[i].column]
            cells.reject(0 if cells.is_context else row, "in the range of float32")

    def _numbers(self, columns: Mapping[str, Cells]) -> list[np.ndarray]:
        """Returns f64[n or 1] of each dense feature, NaN where missing."""
        entries = self._signature.dense
        single = [columns[e.column] for e in entries if e.length == 1]
        joined = numbers_of_columns(single)
        vectors: dict[str, np.ndarray] = {}
        result = []
        for entry in entries:
            if entry.length == 1:
                result.append(joined.pop(0))
                continue
            if entry.column not in vectors:
                vectors[entry.column] = _vector(entry, columns[entry.column])
            result.append(vectors[entry.column][:, entry.index])
        return result

    def _shared_lookups(self, columns: Mapping[str, Cells]) -> list[_Ids]:
        """Returns the texts of all plain features. Their types are checked together."""
        cells = [columns[entry.name] for entry in self._plain]
        types = set(map(type, itertools.chain.from_iterable(c.values for c in cells)))
        if not types <= {str, type(None)}:  # others are checked in `_look_up`
            self._check_plain(columns)
        if types <= {str}:
            names: list[Sequence[str]] = [c.values for c in cells]
        elif types <= {str, type(None)}:
            names = [
                [value or "" for value in c.values] if None in c.values else c.values for c in cells
            ]
        else:
            names = [[value or "" for value in texts(c)] for c in cells]
        return [_Ids(None, part, [len(part), 0, 0, 0, 0, 0]) for part in names]

    def _check_plain(self, columns: Mapping[str, Cells]) -> None:
        for entry in self._plain:
            _check_single_ids(entry, columns[entry.name])

    def _categorical(self, entry: Categorical, cells: Cells) -> _Ids:
        if entry.encoding == "bucket":
            values = numbers(cells)
            with np.errstate(over="ignore"):
                single = values.astype(np.float32)
            rows = RESERVED_ROWS + np.searchsorted(self._edges[entry.name], single, side="right")
            missing = np.isnan(values)
            rows[missing] = MISSING_ROW
            return _Ids(rows, [], [len(rows), int(missing.sum()), 0, 0, 0, 0])
        if entry.length == 1:
            _check_single_ids(entry, cells)
            return self._rows(entry, cells)
        must = f"{entry.length} ids"
        ids, lengths = elements(cells, entry.separator, entry.brackets, must)
        for i in np.flatnonzero((lengths != entry.length) & (lengths != 0)).tolist():
            cells.reject(i, f"a list of {must}")
        part = self._rows(entry, ids)
        absent = int(np.count_nonzero(lengths == 0)) * entry.length
        part.counts[0] += absent
        part.counts[1] += absent
        return part._replace(lengths=lengths)

    def _sequences(self, columns: Mapping[str, Cells]) -> dict[str, Lists]:
        """Returns the lists of all features of sequences."""
        aligned: dict[str, Lists] = {}
        for sequence in self._signature.sequences:
            entries = [f for f in self._signature.ragged if f.name in sequence.features]
            time_format = self._signature.time_format
            aligned |= sequence_lists(sequence, entries, columns, time_format)
        return aligned

    def _ragged(
        self, entry: Ragged, columns: Mapping[str, Cells], aligned: Mapping[str, Lists]
    ) -> _Ids:
        if entry.name in aligned:
            cut = aligned[entry.name]
        else:
            weights = columns[entry.weights] if entry.weights else None
            cells = columns[entry.name]
            if weights is not None and weights.is_context != cells.is_context:
                must = f"given where {entry.name} is, in the context or with each candidate"
                raise RequestError(entry.weights, None, must, "in the other place")
            cut = lists(entry, cells, weights)
        part = self._rows(entry, cut.ids)
        part.counts[4:] = cut.truncated, cut.truncated_lists
        return part._replace(lists=cut)

    def _rows(self, entry: Categorical | Ragged, cells: Cells) -> _Ids:
        """Returns the rows of ids, or their texts if they are looked up."""
        table = self._tables[entry.table]
        if table.encoding == "integer":
            rows, bad = integer_rows(cells, table)
            missing = int(np.count_nonzero(rows == MISSING))
            return _Ids(rows, [], [len(rows), missing, 0, bad, 0, 0])
        names = texts(cells)
        if table.encoding == "vocabulary":
            return _Ids(None, [name or "" for name in names], [len(names), 0, 0, 0, 0, 0])
        rows = np.full(len(names), MISSING_ROW, np.int64)
        present = np.array([name is not None for name in names], bool)
        spread, salt = table.rows - RESERVED_ROWS, entry.salt.encode()
        digest = xxhash.xxh64_intdigest
        encoded = _encoded([name for name in names if name is not None], cells.column.name)
        hashed = (RESERVED_ROWS + digest(salt + value) % spread for value in encoded)
        rows[present] = np.fromiter(hashed, np.int64, len(encoded))
        return _Ids(rows, [], [len(rows), len(names) - len(encoded), 0, 0, 0, 0])

    def _stack_rows(
        self, parts: Sequence[_Ids], counts: np.ndarray, columns: Mapping[str, Cells]
    ) -> list[np.ndarray]:
        """Returns the stack rows of each feature, i64[ids]. Texts are looked up by one call.

        Args:
            parts: of the features.
            counts: of the features, i64[features, 6]. Missing and unknown ones are added.
        """
        places = [i for i, part in enumerate(parts) if part.rows is None]
        sizes = np.fromiter((len(parts[i].names) for i in places), np.int64, len(places))
        owner = np.repeat(np.array(places, np.int64), sizes)
        entries, names = [self._entries[i] for i in places], [parts[i].names for i in places]
        rows = self._look_up(entries, names, columns)
        reserved = np.flatnonzero(rows < RESERVED_ROWS)
        kinds = owner[reserved] * RESERVED_ROWS + rows[reserved]
        counted = np.bincount(kinds, minlength=len(parts) * RESERVED_ROWS)
        counts[:, 1:3] += counted.reshape(-1, RESERVED_ROWS)  # missing, unknown
        rows += self._offsets[owner]
        ends = np.cumsum(sizes).tolist()
        looked_up = (
            rows[end - len(parts[i].names) : end] for i, end in zip(places, ends, strict=True)
        )
        result = []
        for entry, part in zip(self._entries, parts, strict=True):
            if part.rows is None:
                result.append(next(looked_up))
                continue
            table = self._tables[entry.table]
            zeros = self._stacks[table.stack].rows
            result.append(np.where(part.rows == MISSING, zeros, part.rows + table.offset))
        return result

    def _look_up(
        self,
        entries: Sequence[Categorical | Ragged],
        names: Sequence[Sequence[str]],
        columns: Mapping[str, Cells],
    ) -> np.ndarray:
        """Returns the table rows i64[ids] of the texts of several features. "" is missing."""
        joined: list[str] = list(itertools.chain.from_iterable(names))
        text = "\0".join(joined)
        if may_have_list(text):
            self._check_plain(columns)
        if self._pseudonymise is not None:
            hashed = self._pseudonymise
            joined = [hashed(name) if name else "" for name in joined]
            text = "\0".join(joined)
        seeds = [self._tables[entry.table].seed for entry in entries]
        repeated = map(itertools.repeat, seeds, map(len, names))
        seed_of_each = itertools.chain.from_iterable(repeated)
        try:
            # Half the time of a call of encode for each.
            encoded = text.encode().split(b"\0")
            if len(encoded) != len(joined):  # a text has a NUL, or there is none
                encoded = list(map(str.encode, joined))
        except UnicodeEncodeError:
            for entry, part in zip(entries, names, strict=True):
                _encoded(part, entry.name)
            raise
        # A fifth less time than the digests as whole numbers of Python.
        digests = b"".join(map(xxhash.xxh3_64_digest, encoded, seed_of_each))
        hashes = np.frombuffer(digests, ">u8").astype(np.uint64)
        rows = self._index.rows(hashes, UNKNOWN_ROW)
        if self._lacks_empty:
            rows[np.array([not name for name in joined], bool)] = MISSING_ROW
        return rows


def _encoded(names: Sequence[str], column: str) -> list[bytes]:
    try:
        return list(map(str.encode, names))
    except UnicodeEncodeError as error:
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


def _check_single_ids(entry: Categorical, cells: Cells) -> None:
    """Rejects a list in a text column of single ids, as the preparation does."""
    is_text = cells.column.type == "text" and not cells.column.is_list
    if is_text and entry.brackets != "keep":
        index = find_list(cells.values)
        if index is not None:
            cells.reject(index, "one id, not a list in brackets")


def _vector(entry: Dense, cells: Cells) -> np.ndarray:
    """Returns f64[n, length], NaN where a number or a whole vector is missing."""
    must = f"{entry.length} numbers"
    flat, lengths = elements(cells, entry.separator, "read", must)
    for i in np.flatnonzero((lengths != entry.length) & (lengths != 0)).tolist():
        cells.reject(i, f"a list of {must}")
    result = np.full((len(lengths), entry.length), np.nan)
    result[lengths > 0] = numbers(flat).reshape(-1, entry.length)
    return result
