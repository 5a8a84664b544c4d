"""Cells of columns of ids: the ids and weights that they hold, checked, and cut where asked."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.columns import Column, column_of, elements, numbers
from jaxrank.data.encode.labels import not_negative
from jaxrank.data.ragged import positions
from jaxrank.data.rejects import BadRows
from jaxrank.data.spec.entries import CategoricalSpec, RaggedSpec


def id_elements(entry: CategoricalSpec, chunk: Chunk) -> Column:
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
    """The ids of a column of lists, weights f64[ids] if it has any, how many ids were cut, and from
    how many lists."""

    ids: Column
    weights: np.ndarray | None
    truncated: int = 0
    truncated_lists: int = 0


def list_elements(entry: RaggedSpec, chunk: Chunk) -> ListElements:
    """The ids of a column of lists and their weights, cut to `max_length` where that is asked."""
    column = column_of(chunk, entry.name)
    ids = elements(column, entry.separator)
    assert ids.lengths is not None
    if ids.values.null_count:
        empty = ids.values.is_null().to_numpy(zero_copy_only=False)
        ids.reject(np.flatnonzero(empty), "a list without empty ids")
    weights = _list_weights(entry, chunk, ids) if entry.weights else None
    over = ids.lengths > entry.max_length if entry.max_length else np.zeros(0, bool)
    if not over.any():
        return ListElements(ids, weights)
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
    keep = positions(ids.lengths) < entry.max_length
    cut = ids._replace(
        values=ids.values.filter(pa.array(keep)),
        lengths=np.minimum(ids.lengths, entry.max_length),
    )
    kept_weights = None if weights is None else weights[keep]
    return ListElements(cut, kept_weights, int((~keep).sum()), int(over.sum()))


def _list_weights(entry: RaggedSpec, chunk: Chunk, ids: Column) -> np.ndarray:
    weights = elements(column_of(chunk, entry.weights), entry.separator)
    assert weights.lengths is not None
    assert ids.lengths is not None
    differ = weights.lengths != ids.lengths
    if differ.any():
        rows = np.flatnonzero(differ)
        found = f"{weights.lengths[rows[0]]} weights and {ids.lengths[rows[0]]} ids"
        must = f"have as many weights as {entry.name} has ids"
        raise BadRows(chunk, rows, entry.weights, must, found)
    must = "0 or a finite number of at least 1e-38"
    return numbers(weights, must, _list_weight, missing=False)


def _list_weight(values: np.ndarray) -> np.ndarray:
    """f64[n] -> bool[n]: whether a list that has such weights alone can be divided by their sum."""
    return not_negative(values) & ((values == 0) | (values >= 1e-38))
