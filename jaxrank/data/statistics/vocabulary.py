"""Vocabularies: counts and orders values, looks up their rows, and reads and writes files."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from upath import UPath

from jaxrank.data import files
from jaxrank.errors import InputError
from jaxrank.features import RESERVED_ROWS, UNKNOWN_ROW

_MERGE_AFTER = 1 << 16
_MAX_COMPARED = 1_000_000  # values whose forms are compared, the most frequent ones
_THOUSANDS = r"^[-+]?[0-9]{1,3}(,[0-9]{3})+(\.0*)?$"
_QUOTED = r"""(?s)^(?:'(.+)'|"(.+)")$"""
_WHOLE_NUMBER = r"^\+?(-?)0*([0-9]+)(?:\.0*)?$"
_SLICE = 1 << 16
_SCHEMA = pa.schema([("value", pa.string()), ("count", pa.int64())])
WITH_DAYS = _SCHEMA.append(pa.field("last_day", pa.int32()))


def checksum(values: pa.Array | pa.ChunkedArray) -> str:
    """Returns a checksum of strings in row order. Equal checksums mean equal rows."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(values), _SLICE):
        part = values.slice(start, _SLICE)
        # The lengths distinguish ["ab", "c"] from ["a", "bc"].
        digest.update(pc.binary_length(part).to_numpy().astype("<i4").tobytes())
        digest.update("".join(part.to_pylist()).encode())
    return digest.hexdigest()


def find_two_forms(values: pa.Array | pa.ChunkedArray) -> tuple[int, list[str]] | None:
    """Finds different values that mean the same in different forms.

    They are whole numbers with a fraction of zero, leading zeros, a plus or commas between
    thousands, and texts with spaces or quotes around them or with accents as separate letters.

    Args:
        values: different strings, the most frequent first.

    Returns:
        The number of such values, and the forms of the first one. None if there are none.
    """
    values = values.slice(0, _MAX_COMPARED)
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    forms = pc.utf8_trim(values, " \t\n\r\v\f\u00a0\u200b\u202f\u3000\ufeff")
    if not pc.all(pc.string_is_ascii(forms)).as_py():
        forms = pc.utf8_normalize(forms, form="NFC")
    forms = pc.replace_substring_regex(forms, _QUOTED, r"\1\2")
    grouped = pc.match_substring_regex(forms, _THOUSANDS)
    forms = pc.if_else(grouped, pc.replace_substring(forms, ",", ""), forms)
    forms = pc.replace_substring_regex(forms, _WHOLE_NUMBER, r"\1\2")
    codes = forms.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    several = np.bincount(codes, minlength=1)[codes] > 1
    if not several.any():
        return None
    first = np.flatnonzero(codes == codes[several][0])
    return int(several.sum()), values.take(pa.array(first)).to_pylist()


def counts_checksum(counts: Sequence[int] | np.ndarray) -> str:
    return xxhash.xxh3_64(np.asarray(counts, "<i8").tobytes()).hexdigest()


def write_file(
    path: UPath,
    values: Sequence[str] | pa.Array | pa.ChunkedArray,
    counts: Sequence[int] | np.ndarray,
    last_days: np.ndarray | None = None,
) -> None:
    """Writes values in row order with their counts, and the day of their last event if it is
    known, as an Arrow file.
    """
    if not isinstance(values, pa.Array | pa.ChunkedArray):
        values = pa.array(values, pa.string())
    columns, schema = [values, pa.array(counts, pa.int64())], _SCHEMA
    if last_days is not None:
        columns, schema = [*columns, pa.array(last_days, pa.int32())], WITH_DAYS
    with path.open("wb") as file, pa.ipc.new_file(file, schema) as sink:
        sink.write_table(pa.table(columns, schema=schema))


def read_file(path: UPath) -> pa.Table:
    """Reads columns value (string), count (int64) and perhaps last_day (int32), without nulls.

    Raises:
        InputError: the file does not exist, or is corrupt.
    """
    if not path.is_file():
        raise InputError(f"{path}: this file of the store is missing. Prepare the data again.")
    try:
        # A local file is mapped, so that the system can drop a vocabulary of many values again.
        local = files.is_local(str(path))
        with pa.memory_map(str(path)) if local else files.open_input(str(path)) as source:
            content = pa.ipc.open_file(source).read_all()
        content.validate(full=True)  # invalid offsets would crash the process
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # in a column's name
        raise InputError(
            f"{path}: must be a readable Arrow file: found {error}. Prepare the data again."
        ) from error
    nulls = sum(column.null_count for column in content.columns)
    is_known = any(content.schema.equals(schema) for schema in (_SCHEMA, WITH_DAYS))
    if not is_known or nulls:
        raise InputError(
            f"{path}: must have the columns value (string) and count (int64) without nulls: found"
            f" {content.schema.names} of {content.schema.types} with {nulls} nulls. Prepare the"
            " data again."
        )
    return content


class Vocabulary:
    """The values of a table in row order, after the reserved rows.

    Args:
        values: string[n], all different.
        counts: i64[n], the number of occurrences in the training data.
    """

    def __init__(self, values: pa.Array, counts: np.ndarray):
        self.values = values
        self.counts = counts
        self._rows: dict[str, int] = {}

    @property
    def rows(self) -> int:
        return RESERVED_ROWS + len(self.values)

    @property
    def checksum(self) -> str:
        """The checksum of the values in row order."""
        return checksum(self.values)

    def lookup(self, values: Iterable[str], count: int) -> np.ndarray:
        """Returns i32[count], the row of each value, or UNKNOWN_ROW for values not included."""
        if not self._rows and len(self.values):
            self._rows = dict(
                zip(self.values.to_pylist(), range(RESERVED_ROWS, self.rows), strict=True)
            )
        rows = map(self._rows.get, values, itertools.repeat(UNKNOWN_ROW))
        return np.fromiter(rows, np.int32, count)


def hash_rows(values: Iterable[bytes], count: int, rows: int, salt: str) -> np.ndarray:
    """Returns i32[count], RESERVED_ROWS + xxhash64(salt + value) mod the rows that are not
    reserved.
    """
    spread = rows - RESERVED_ROWS
    digest = xxhash.xxh64_intdigest
    if salt:
        prefix = salt.encode()
        values = (prefix + value for value in values)
    return np.fromiter((RESERVED_ROWS + digest(v) % spread for v in values), np.int32, count)


class Counter:
    """Counts values in memory proportional to the number of distinct values, not to the data."""

    def __init__(self) -> None:
        self._merged = pa.table({"value": pa.array([], pa.string()), "count": np.zeros(0, int)})
        self._pending: list[pa.Table] = []
        self._pending_rows = 0

    def add(self, values: pa.Array) -> None:
        """Counts the strings of an array. Nulls are ignored."""
        counted = pc.value_counts(values.drop_null())
        if len(counted):
            columns = {"value": counted.field("values"), "count": counted.field("counts")}
            self.add_counts(pa.table(columns))

    def add_counts(self, table: pa.Table) -> None:
        """Adds the counts of another counter. See `counts`."""
        self._pending.append(table)
        self._pending_rows += len(table)
        # Merging only at a fraction of the total keeps the cost per value constant.
        if self._pending_rows > max(_MERGE_AFTER, len(self._merged)):
            self._merge()

    def _merge(self) -> None:
        joined = pa.concat_tables([self._merged, *self._pending])
        merged = joined.group_by("value", use_threads=False).aggregate([("count", "sum")])
        self._merged = merged.rename_columns({"count_sum": "count"}).select(["value", "count"])
        self._pending, self._pending_rows = [], 0

    def counts(self) -> pa.Table:
        """Returns columns value and count, each value once, in arbitrary order."""
        self._merge()
        return self._merged
