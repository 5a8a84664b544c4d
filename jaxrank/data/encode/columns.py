"""Converts one column of a chunk to NumPy from text or any Arrow type.

Whole columns are converted at once. If that fails, the values are searched for the first invalid
one, so that the message can name its file and row.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.chunk import Chunk
from jaxrank.data.encode import brackets as bracketed_cells
from jaxrank.data.rejects import BadRows, missing_text
from jaxrank.errors import InputError

# From this value on, integers share a float: an id may have been another number before.
_EXACT_BELOW = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}
_LIST_HINTS = {
    kind: f" In records of tf.Example, set source.columns[{{!r}}]='list<{name}>'."
    for kind, name in {pa.int64(): "int64", pa.float32(): "float32"}.items()
}
MISSING_WORDS = frozenset(
    ("nan", "null", "none", "na", "n/a", "nil", "nat", "missing", "undefined", "unknown", "\\n")
    + ("-", "?", "<na>", "<null>", "(null)", "#n/a", "-nan", "1.#qnan")
)


class Column(NamedTuple):
    """A column with the data that a message needs to name a place in it.

    lengths: the length of each row's list, or None if the column has no lists.
    """

    values: pa.Array
    name: str
    chunk: Chunk
    lengths: np.ndarray | None = None

    def reject(self, indices: np.ndarray, must: str, hint: str = "") -> NoReturn:
        """Raises BadRows for the rows of the values at i64[m] `indices`."""
        value = python_value(self.values, int(indices[0]))
        actual = "an empty value" if value is None else repr(value)
        if not hint and isinstance(value, str) and value.strip().lower() in MISSING_WORDS:
            is_cell = self.lengths is None
            field = "source.null_values" if is_cell else "`padding` of the feature"
            hint = f" If it stands for a missing value, list it in {field}."
            if is_cell:
                hint += " Formats with types have no such field: write null."
        if not hint and value != value:  # NaN
            hint = " If NaN stands for a missing value, write null."
            if self.lengths is not None:
                hint += " A feature in `ragged` may list 'nan' in `padding`."
        rows = indices
        if self.lengths is not None:
            rows = np.searchsorted(np.cumsum(self.lengths), indices, side="right")
        elif value is None:
            actual = missing_text(self.chunk, int(rows[0]), self.name)
        raise BadRows(self.chunk, rows, self.name, must, actual, hint)

    def reject_type(self, must: str, hint: str = "") -> NoReturn:
        raise InputError(
            f"{self.chunk.file}, column {self.name}: must be {must}: found a column of type"
            f" {self.values.type}.{hint}"
        )


def python_value(values: pa.Array, index: int) -> Any:
    """Returns a value as Python's, and a time that Python does not have as its number."""
    try:
        return values[index].as_py()
    except (OverflowError, ValueError):
        return values.slice(index, 1).cast(pa.int64())[0].as_py()


def read_column(chunk: Chunk, name: str) -> Column:
    """Returns the chunk's column of that name with decoded dictionaries and null for empty text.

    Bytes are text.

    Raises:
        BadRows: bytes are not UTF-8.
    """
    index = chunk.batch.schema.get_field_index(name)
    if index < 0:
        raise InputError(f"{chunk.file}: must have a column {name!r}: found none of that name.")
    return _simplified(Column(chunk.batch.column(index), name, chunk))


def is_text(kind: pa.DataType) -> bool:
    """Returns True if values of this type are strings."""
    return (
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Returns True if values of this type are lists."""
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _simplified(column: Column) -> Column:
    """Decodes dictionaries and casts text and bytes to `string` with null for the empty text."""
    values = column.values
    if pa.types.is_dictionary(values.type):
        return _simplified(column._replace(values=values.dictionary_decode()))
    if pa.types.is_null(values.type):
        return column._replace(values=values.cast(pa.string()))
    if is_text(values.type) or pa.types.is_binary(values.type):
        try:
            values = values.cast(pa.string())
        except pa.ArrowInvalid:
            column.reject(uncastable(values, pa.string()), "text in UTF-8")
        empty = pc.equal(values, "")
        # A CSV reader returns empty text as null already, so this check is the only cost.
        if pc.any(empty).as_py():
            values = pc.if_else(empty, pa.scalar(None, pa.string()), values)
    return column._replace(values=values)


def numbers(
    column: Column,
    must: str,
    valid: Callable[[np.ndarray], np.ndarray] = np.isfinite,
    missing: bool = True,
    booleans: bool = False,
) -> np.ndarray:
    """Returns f64[n], NaN where the value is missing.

    Args:
        must: requirement on a value, for the message.
        valid: maps f64[n] to bool[n], True where a non-missing value is allowed.
        missing: True if a value may be missing.
        booleans: True if the texts "true" and "false", in any case, stand for 1 and 0.
    """
    values = column.values
    kind = values.type
    simple = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if not (simple or is_text(kind) or pa.types.is_decimal(kind)):
        hint = ""
        if is_list(kind):
            hint = " Set `length` of the feature in `dense` to read vectors of that length."
        column.reject_type(must, hint)
    try:
        converted = values.cast(pa.float64(), safe=False)
    except pa.ArrowInvalid:
        spelled = _without_booleans(values) if booleans and is_text(kind) else values
        try:
            converted = spelled.cast(pa.float64(), safe=False)
        except pa.ArrowInvalid:
            column.reject(uncastable(spelled, pa.float64()), must)
    absent = np.zeros(len(values), bool)
    if values.null_count:
        absent = values.is_null().to_numpy(zero_copy_only=False)
        if not missing:
            column.reject(np.flatnonzero(absent), must)
    result = converted.to_numpy(zero_copy_only=False)  # NaN for null
    bad = ~(valid(result) | absent)
    if bad.any():
        column.reject(np.flatnonzero(bad), must)
    return result


def _without_booleans(texts: pa.Array) -> pa.Array:
    """Replaces "true" and "false" by "1" and "0" in texts."""
    lower = pc.ascii_lower(texts)
    rest = pc.if_else(pc.equal(lower, "false"), "0", texts)
    return pc.if_else(pc.equal(lower, "true"), "1", rest)


def uncastable(values: pa.Array, kind: pa.DataType) -> np.ndarray:
    """Returns i64[m], the indices of the values that cannot be cast, of an array that cannot be
    cast.
    """
    positions: list[int] = []
    pending = [(0, len(values))]
    while pending:  # bisection, because invalid values are few
        start, stop = pending.pop()
        try:
            values[start:stop].cast(kind)
        except pa.ArrowInvalid:
            middle = (start + stop) // 2
            if stop - start == 1:
                positions.append(start)
            else:
                pending += [(middle, stop), (start, middle)]
    return np.asarray(positions, np.int64)


ID_TYPES = "text or whole numbers"


def _whole_numbers(column: Column, must: str) -> pa.Array:
    """Returns the ids as int64, for a column of numbers or of decimal text."""
    try:
        return column.values.cast(pa.int64())
    except pa.ArrowInvalid:
        column.reject(uncastable(column.values, pa.int64()), must)


def check_id_type(column: Column) -> None:
    """Rejects a column of a type that ids cannot have."""
    kind = column.values.type
    if not (
        is_text(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
    ):
        hint = " Write it as text or as whole numbers."
        if pa.types.is_struct(kind) or pa.types.is_map(kind):
            hint = " Write its fields as columns: ids and weights as two lists of equal length."
        elif is_list(kind):
            hint = " Name it in `ragged`, or set `length` of the feature in `categorical`."
        column.reject_type(ID_TYPES, hint)


def check_exact(column: Column) -> None:
    """Rejects ids in a float column that were rounded when they were written."""
    kind = column.values.type
    if not pa.types.is_floating(kind):
        return
    limit = _EXACT_BELOW[kind]
    sizes = np.abs(column.values.to_numpy(zero_copy_only=False).astype(np.float64))
    rounded = inexact(sizes, kind)
    if rounded.any():
        column.reject(
            np.flatnonzero(rounded),
            f"a whole number below {limit:,}, as {kind} rounds others, so that ids share one value",
            " Write the column as int64 or as text.",
        )


def inexact(sizes: np.ndarray, kind: pa.DataType) -> np.ndarray:
    """Returns bool[n]: True where the absolute value of a float stands for several integers."""
    # Other checks reject values that overflow int64, infinity and NaN.
    return (sizes >= _EXACT_BELOW[kind]) & (sizes < 2.0**63)


def texts(column: Column) -> pa.Array:
    """Returns the ids as text: decimal digits for an integer, null where missing."""
    check_id_type(column)
    kind = column.values.type
    if is_text(kind):
        return column.values
    if pa.types.is_uint64(kind):
        return column.values.cast(pa.string())
    check_exact(column)
    return _whole_numbers(column, ID_TYPES).cast(pa.string())


def elements(
    column: Column, separator: str, must: str = "a list", brackets: str = "error"
) -> Column:
    """Returns the concatenated values of a column of lists, with the lengths i64[n].

    A missing list or empty text has length 0. An empty element of a text is null.

    Args:
        brackets: as in `RaggedSpec`.
    """
    values = column.values
    if is_text(values.type):
        cells = _has_brackets(column, brackets) if brackets != "keep" else np.zeros(0, bool)
        if cells.any():
            return _strip_brackets(column, separator, must, cells)
        if not separator:
            raise InputError(
                f"{column.chunk.file}, column {column.name}: {must} in a text column must have a"
                " separator: found separator=''."
            )
        values = pc.split_pattern(values, separator)
    elif not is_list(values.type):
        hint = _LIST_HINTS.get(values.type, "").format(column.name)
        if pa.types.is_struct(values.type) or pa.types.is_map(values.type):
            hint = " Write its keys and its values as two columns of lists."
        column.reject_type(f"{must}, as text or of a list type", hint)
    lengths = pc.list_value_length(values).fill_null(0)
    counts = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    result = _simplified(column._replace(values=values.flatten(), lengths=counts))
    if brackets != "keep":
        _check_parts(result, must)
    return result


def _check_parts(column: Column, must: str) -> None:
    """Rejects lists of which a part is a list, or the end of one that was split."""
    assert column.lengths is not None
    if is_text(column.values.type):
        cells = bracketed_cells.in_lists(column.values, column.lengths)
        if cells.any():
            column.reject(
                np.flatnonzero(cells),
                f"{must} whose parts have no brackets of a list",
                " Write the ids themselves as the parts. Set brackets='keep' where brackets are"
                " parts of ids.",
            )


def _has_brackets(column: Column, brackets: str) -> np.ndarray:
    """Returns bool[n]: True where a cell is a bracketed list. Raises if `brackets` forbids them."""
    cells = bracketed_cells.bracketed(column.values)
    if cells.any() and brackets == "error":
        column.reject(
            np.flatnonzero(cells),
            "a list with only separators between its ids, not in brackets or quotes",
            " Set brackets='read' to read the ids within, or 'keep' where brackets are parts of"
            " ids.",
        )
    return cells


def _strip_brackets(column: Column, separator: str, must: str, cells: np.ndarray) -> Column:
    """Returns `elements` of a column with bracketed lists in the cells bool[n] `cells`."""
    values = column.values
    # Many cells are equal. Each different one is parsed once.
    encoded = values.filter(pa.array(cells)).dictionary_encode()
    parsed = [bracketed_cells.read(cell, separator) for cell in encoded.dictionary.to_pylist()]
    indices = encoded.indices.to_numpy()
    unread = np.array([p is None for p in parsed])[indices]
    if unread.any():
        rows = np.flatnonzero(cells)[unread]
        between = f"commas or {separator!r}" if separator.strip(", ") else "commas"
        column.reject(rows, f"{must} of ids or numbers in brackets, between {between}")
    others = column._replace(
        values=pc.if_else(pa.array(cells), pa.scalar(None, pa.string()), values)
    )
    plain = elements(others, separator, must, "keep") if separator else None
    if plain is None and (~cells & values.is_valid().to_numpy(zero_copy_only=False)).any():
        elements(column, separator, must, "keep")  # rejects text without a separator
    result: list[list[str | None]] = []
    lengths, flat = [0] * len(values), []
    if plain is not None and plain.lengths is not None:
        lengths, flat = plain.lengths.tolist(), plain.values.to_pylist()
    at = place = 0
    for is_list, length in zip(cells.tolist(), lengths, strict=True):
        if is_list:
            result.append(parsed[indices[place]] or [])
            place += 1
        else:
            result.append(flat[at : at + length])
            at += length
    array = pa.array(result, pa.list_(pa.string()))
    counts = np.fromiter(map(len, result), np.int64, len(result))
    read = column._replace(values=array.flatten(), lengths=counts)
    _check_parts(read, must)
    return read
