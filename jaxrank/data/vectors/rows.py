"""Maps the raw values of pre-trained vectors to the rows of a table."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import xxhash

from jaxrank.data.encode.columns import Column, texts, uncastable
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import num_numbered, shared_salt
from jaxrank.data.statistics.vocabulary import hash_rows
from jaxrank.data.store.reader import Store
from jaxrank.data.vectors.read import VectorFiles
from jaxrank.errors import InputError
from jaxrank.features import PAD, RESERVED_ROWS, Table

ENCODINGS = ("vocabulary", "hash", "integer")  # of tables that can start from vectors
_SHOWN = 3  # values in a message
_SLICE = 1 << 16  # values that are Python texts at once
_MAX_SEEDS = 8  # of hashes; a collision of 64 bits is rare


class TableVectors:
    """The vectors of a file whose values are in a table.

    Several values of a hashed table may have one row. The first one in the file is used.

    Args:
        files: the file.
        table: of the store.
        store: has the vocabulary of the table.

    Attributes:
        has_vector: bool[table.rows], True for the rows that `batches` has yielded so far.
        shared: number of vectors that were not used, because a value before them has the same row.

    Raises:
        InputError: the values of the table are unknown, because they were hashed with a key or
            with several salts.
    """

    def __init__(self, files: VectorFiles, table: Table, store: Store):
        self.files, self.table = files, table
        self.has_vector = np.zeros(table.rows, bool)
        self.shared = 0
        self._store = store
        self._rows = self._lookup()

    @property
    def num_values(self) -> int:
        """Number of rows that stand for a value."""
        if self.table.encoding == "integer":
            return num_numbered(self.table)
        return self.table.rows - RESERVED_ROWS

    def batches(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields rows i32[n] of values that the table has, all different, and their vectors.

        Vectors are f32[n, width].

        Raises:
            InputError: the file is invalid, has a value twice, or has no value of the table.
        """
        examples: list[str] = []
        for batch in self.files.batches():
            values = self._texts(batch.values)
            examples = examples or values[:_SHOWN].to_pylist()
            rows = self._rows(batch.values._replace(values=values))
            known = np.flatnonzero(rows != PAD)
            _, first = np.unique(rows[known], return_index=True)
            first = first[~self.has_vector[rows[known[first]]]]
            if len(first) < len(known) and self.table.encoding != "hash":
                others = np.delete(known, first)
                batch.values.reject(others, "a value that is in the file once")
            self.shared += len(known) - len(first)
            used = known[np.sort(first)]
            self.has_vector[rows[used]] = True
            if len(used):
                yield rows[used], batch.vectors[used]
        if not self.has_vector.any():
            raise InputError(
                f"{self.files.path}: must have values of the table {self.table.name!r}:"
                f" found none of its {self.num_values:,} values{self._compared(examples)}. Write"
                " the values as the training data has them."
            )

    def _compared(self, examples: list[str]) -> str:
        """Returns the first values of the table and of the file, for a message."""
        if self.table.encoding != "vocabulary":
            return f": the file begins with {examples}"
        of_table = self._store.values(self.table.name).slice(0, _SHOWN).to_pylist()
        return f", which begin with {of_table}, and the file begins with {examples}"

    def _texts(self, column: Column) -> pa.Array:
        values = texts(column)
        if values.null_count:
            column.reject(np.flatnonzero(values.is_null()), "a value")
        return values

    def _lookup(self) -> Callable[[Column], np.ndarray]:
        """Returns the function from texts to rows, i32[n], PAD for values without a row."""
        table, store = self.table, self._store
        if table.encoding == "vocabulary":
            if store.spec.hash_key:
                raise InputError(
                    f"{store.path}: must have been prepared without --hash-key-file, so that the"
                    f" table {table.name!r} and {self.files.path} have comparable values: found a"
                    " key."
                )
            return _vocabulary_rows(store.values(table.name))
        if table.encoding == "integer":
            return self._numbered_rows
        salt = shared_salt(FeatureSpec.from_state(store.spec.features), table)
        if salt is None:
            raise InputError(
                f"embedding.init_from: the features of the table {table.name!r} must have one"
                " `salt`, so that a value has one row: found several."
            )
        known_salt = salt

        def hashed_rows(column: Column) -> np.ndarray:
            data = column.values.cast(pa.binary()).to_numpy(zero_copy_only=False)
            return hash_rows(data, len(data), table.rows, known_salt)

        return hashed_rows

    def _numbered_rows(self, column: Column) -> np.ndarray:
        try:
            numbers = column.values.cast(pa.int64()).to_numpy()
        except pa.ArrowInvalid:
            bad = uncastable(column.values, pa.int64())
            column.reject(bad, f"a row number of the table {self.table.name!r}")
        outside = (numbers < 0) | (numbers >= self.num_values)
        return np.where(outside, PAD, numbers).astype(np.int32)


def _vocabulary_rows(values: pa.ChunkedArray) -> Callable[[Column], np.ndarray]:
    """Returns the function from texts to rows of a vocabulary, PAD for texts that are not in it.

    It is built once for all batches, because `pyarrow.compute.index_in` hashes all values for each.
    Values are compared by 64-bit hashes: another text has a row with probability n / 2^64.
    """
    # Other seeds resolve a collision, but not a value that a damaged vocabulary has twice.
    for seed in range(_MAX_SEEDS):
        hashes = _hashes(values, seed)
        if len(np.unique(hashes)) == len(hashes):
            break
    order = np.argsort(hashes)
    hashes, rows = hashes[order], (order + RESERVED_ROWS).astype(np.int32)

    def lookup(column: Column) -> np.ndarray:
        wanted = _hashes(column.values, seed)
        if not len(hashes):
            return np.full(len(wanted), PAD)
        place = np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)
        return np.where(hashes[place] == wanted, rows[place], PAD)

    return lookup


def _hashes(values: pa.Array | pa.ChunkedArray, seed: int) -> np.ndarray:
    """Returns u64[n], the hash of each text."""
    result = np.empty(len(values), np.uint64)
    for start in range(0, len(values), _SLICE):
        texts = values.slice(start, _SLICE).to_pylist()
        digests = (xxhash.xxh3_64_intdigest(text.encode(), seed) for text in texts)
        result[start : start + len(texts)] = np.fromiter(digests, np.uint64, len(texts))
    return result
