"""Reads columns of ids: checks the ids and weights of each cell and truncates lists on request."""

import re
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.brackets import lists
from jaxrank.data.encode.columns import Column, elements, is_text, numbers, read_column
from jaxrank.data.encode.labels import not_negative
from jaxrank.data.ragged import positions
from jaxrank.data.rejects import BadRows
from jaxrank.data.spec.entries import CategoricalSpec, DenseSpec, RaggedSpec

# Has at most the digits of 64 bits. A column of floats prints a fraction.
_WHOLE = re.compile(r"(-?[0-9]{1,20})(?:\.0*)?")


def id_elements(entry: CategoricalSpec, chunk: Chunk) -> Column:
    """Returns the ids of a column. Where `length` is more than 1, the ids of each non-missing row.

    Such a row has exactly `length` ids. An empty id is missing.
    """
    column = read_column(chunk, entry.name)
    if entry.length == 1:
        if is_text(column.values.type) and entry.brackets != "keep":
            listed = lists(column.values)
            if listed.any():
                column.reject(
                    np.flatnonzero(listed),
                    "one id, not a list in brackets",
                    " Name a column of lists in `ragged`. Set brackets='keep' where brackets are"
                    " parts of ids.",
                )
        return column
    result = elements(column, entry.separator, f"{entry.length} ids", entry.brackets)
    assert result.lengths is not None
    bad = (result.lengths != entry.length) & (result.lengths != 0)
    if bad.any():
        rows = np.flatnonzero(bad)
        actual = f"{result.lengths[rows[0]]} in {column.values[int(rows[0])].as_py()!r}"
        raise BadRows(chunk, rows, entry.name, f"have length={entry.length} ids", actual)
    return result


class ListElements(NamedTuple):
    """The ids of a column of lists, optional weights f64[ids], and counts of truncation.

    truncated: number of ids that were cut, from truncated_lists lists.
    late: number of ids that were left out of late_lists lists, because their events were not before
        the example's time. See `SequenceSpec`.
    """

    ids: Column
    weights: np.ndarray | None
    truncated: int = 0
    truncated_lists: int = 0
    late: int = 0
    late_lists: int = 0


def list_elements(entry: RaggedSpec, chunk: Chunk) -> ListElements:
    """Returns the ids of a column of lists and their weights, without padding.

    Lists are truncated to `max_length` where the entry asks for it.
    """
    column = read_column(chunk, entry.name)
    ids = elements(column, entry.separator, brackets=entry.brackets)
    weighing: Column | None = None
    if entry.weights:
        weighing = _parallel_weights(entry, chunk, ids)
    elif entry.weight_separator:
        ids, weighing = _divided(ids, entry.weight_separator, entry.padding)
    if entry.padding:
        keep = ~is_padding(ids.values, entry.padding)
        if not keep.all():
            ids = _chosen(ids, keep)
            weighing = None if weighing is None else _chosen(weighing, keep)
    assert ids.lengths is not None
    if ids.values.null_count:
        empty = ids.values.is_null().to_numpy(zero_copy_only=False)
        hint = " Set padding=[''] to leave empty ids out."
        ids.reject(np.flatnonzero(empty), "a list without empty ids", hint)
    weights = None
    if weighing is not None:
        must = "0 or a finite number of at least 1e-38"
        weights = numbers(weighing, must, _list_weight, missing=False)
    overlong = ids.lengths > entry.max_length if entry.max_length else np.zeros(0, bool)
    if not overlong.any():
        return ListElements(ids, weights)
    if entry.on_overlong == "error":
        rows = np.flatnonzero(overlong)
        raise BadRows(
            chunk,
            rows,
            entry.name,
            f"have at most max_length={entry.max_length} ids",
            str(ids.lengths[rows[0]]),
            " Raise max_length, or set on_overlong='truncate'.",
        )
    place = positions(ids.lengths)
    if entry.keep == "last":
        place = np.repeat(ids.lengths, ids.lengths) - 1 - place
    keep = place < entry.max_length
    cut = _chosen(ids, keep)
    kept_weights = None if weights is None else weights[keep]
    return ListElements(cut, kept_weights, int((~keep).sum()), int(overlong.sum()))


def _chosen(column: Column, keep: np.ndarray) -> Column:
    """Selects the values of lists where bool[values] `keep` is True."""
    assert column.lengths is not None
    ends = np.cumsum(column.lengths)
    kept = np.concatenate([[0], np.cumsum(keep)])
    return column._replace(
        values=column.values.filter(pa.array(keep)),
        lengths=kept[ends] - kept[ends - column.lengths],
    )


def is_padding(values: pa.Array, padding: tuple[str, ...]) -> np.ndarray:
    """Returns bool[n]: True where an id equals a text in `padding`.

    "" stands for a missing id, and "nan" in a column of floats for NaN. A text that is not a whole
    number matches no other number.
    """
    result = np.zeros(len(values), bool)
    if "" in padding:
        result |= values.is_null().to_numpy(zero_copy_only=False)
    kind = values.type
    if is_text(kind):
        known = pa.array([p for p in padding if p]).cast(kind)
    else:
        matches = map(_WHOLE.fullmatch, padding)
        numbers_left_out = [int(match[1]) for match in matches if match]
        if pa.types.is_floating(kind):
            values = values.cast(pa.float64(), safe=False)
            known = pa.array(map(float, numbers_left_out), pa.float64())
            if "nan" in map(str.lower, padding):
                result |= pc.fill_null(pc.is_nan(values), False).to_numpy(zero_copy_only=False)
        elif pa.types.is_integer(kind):
            low = -(1 << kind.bit_width - 1) if pa.types.is_signed_integer(kind) else 0
            high = low + (1 << kind.bit_width)
            known = pa.array([n for n in numbers_left_out if low <= n < high], kind)
        else:
            return result
    matches = pc.is_in(values, value_set=known, skip_nulls=True)
    return result | matches.to_numpy(zero_copy_only=False)


def _divided(ids: Column, separator: str, padding: tuple[str, ...]) -> tuple[Column, Column]:
    """Splits texts "id:weight" into ids and weights. Padding needs no weight."""
    if not is_text(ids.values.type):
        ids.reject_type(f"a list of texts, with {separator!r} between id and weight")
    parts = pc.split_pattern(ids.values, separator, max_splits=1, reverse=True)
    count = pc.fill_null(pc.list_value_length(parts), 0).to_numpy(zero_copy_only=False)
    bad = (count != 2) & ids.values.is_valid().to_numpy(zero_copy_only=False)
    if padding:
        bad &= ~is_padding(ids.values, padding)
    if bad.any():
        must = f"a list of ids and weights with {separator!r} between them (weight_separator)"
        ids.reject(np.flatnonzero(bad), must)
    nothing = pa.scalar(None, pa.string())
    is_whole = pa.array(count == 2)
    # Among incomplete pairs, padding remains and is valid.
    doubled = pc.if_else(is_whole, ids.values, f"x{separator}1")
    parts = pc.split_pattern(doubled, separator, max_splits=1, reverse=True)
    names = pc.if_else(is_whole, pc.list_element(parts, 0), ids.values)
    weights = pc.if_else(is_whole, pc.list_element(parts, 1), nothing)
    names = pc.if_else(pc.equal(names, ""), nothing, names)
    return ids._replace(values=names), ids._replace(values=weights)


def vector(entry: DenseSpec, chunk: Chunk) -> np.ndarray:
    """Returns f64[n, length] of a column of vectors, NaN where a number or a whole vector is
    missing.
    """
    column = elements(
        read_column(chunk, entry.column), entry.separator, f"{entry.length} numbers", "read"
    )
    assert column.lengths is not None
    bad = (column.lengths != entry.length) & (column.lengths != 0)
    if bad.any():
        rows = np.flatnonzero(bad)
        actual = f"{column.lengths[rows[0]]}"
        raise BadRows(chunk, rows, entry.column, f"have length={entry.length} numbers", actual)
    result = np.full((chunk.batch.num_rows, entry.length), np.nan)
    values = numbers(column, "a finite number or empty")
    result[column.lengths > 0] = values.reshape(-1, entry.length)
    return result


def _parallel_weights(entry: RaggedSpec, chunk: Chunk, ids: Column) -> Column:
    weights = elements(read_column(chunk, entry.weights), entry.separator, brackets=entry.brackets)
    assert weights.lengths is not None
    assert ids.lengths is not None
    differ = weights.lengths != ids.lengths
    if differ.any():
        rows = np.flatnonzero(differ)
        actual = f"{weights.lengths[rows[0]]} weights and {ids.lengths[rows[0]]} ids"
        must = f"have as many weights as {entry.name} has ids"
        raise BadRows(chunk, rows, entry.weights, must, actual)
    return weights


def _list_weight(values: np.ndarray) -> np.ndarray:
    """Maps f64[n] to bool[n]: True where a list with only this weight can be divided by the sum."""
    return not_negative(values) & ((values == 0) | (values >= 1e-38))
