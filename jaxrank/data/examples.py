"""Examples between the store and a batch: the matrices of a block, cut, joined and permuted."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data.block import Block
from jaxrank.features import PAD, UNKNOWN_ROW, Schema


class Examples(NamedTuple):
    """n examples; as in `Block`, and where the ids of each example's lists end.

    floats f32[n, floats]; ids i32[n, id columns]; lengths i32[n, lists]; ends i64[n + 1], from 0;
    values i32[total]; value_weights f32[total] or None; labels f32[n, tasks], NaN where unknown;
    weights and shifts f32[n, tasks] or None.
    """

    floats: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray
    values: np.ndarray
    value_weights: np.ndarray | None
    labels: np.ndarray
    weights: np.ndarray | None
    shifts: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.labels)


_MATRICES = ("floats", "ids", "lengths", "labels", "weights", "shifts")
_RAGGED = ("values", "value_weights")


def of_block(block: Block) -> Examples:
    """The examples of a block, without a copy."""
    ends = np.zeros(block.rows + 1, np.int64)
    if block.list_lengths.shape[1]:
        np.cumsum(np.einsum("ij->i", block.list_lengths), out=ends[1:])
    return Examples(
        floats=block.floats,
        ids=block.ids,
        lengths=block.list_lengths,
        ends=ends,
        values=block.list_values,
        value_weights=block.list_weights,
        labels=block.labels,
        weights=block.weights,
        shifts=block.shifts,
    )


def cut(examples: Examples, start: int, stop: int) -> Examples:
    """The examples [start, stop), without a copy (but of `ends`)."""
    lo, hi = int(examples.ends[start]), int(examples.ends[stop])
    weights = examples.value_weights
    return Examples(
        floats=examples.floats[start:stop],
        ids=examples.ids[start:stop],
        lengths=examples.lengths[start:stop],
        ends=examples.ends[start : stop + 1] - lo,
        values=examples.values[lo:hi],
        value_weights=None if weights is None else weights[lo:hi],
        labels=examples.labels[start:stop],
        weights=None if examples.weights is None else examples.weights[start:stop],
        shifts=None if examples.shifts is None else examples.shifts[start:stop],
    )


def join(parts: Sequence[Examples]) -> Examples:
    """All examples of the parts, in order."""
    if len(parts) == 1:
        return parts[0]
    arrays = {name: joined(parts, name) for name in (*_MATRICES, *_RAGGED)}
    return Examples(**arrays, ends=_joined_ends(parts))


def joined(parts: Sequence[Examples], name: str) -> Any:
    """One array of all parts; without a copy where there is one part."""
    first = getattr(parts[0], name)
    if first is None or len(parts) == 1:
        return first
    return np.concatenate([getattr(p, name) for p in parts])


def _joined_ends(parts: Sequence[Examples]) -> np.ndarray:
    if len(parts) == 1:
        return parts[0].ends
    starts = np.cumsum([0] + [p.ends[-1] for p in parts])
    moved = [p.ends[1:] + start for p, start in zip(parts, starts.tolist(), strict=False)]
    return np.concatenate([np.zeros(1, np.int64), *moved])


def permute(examples: Examples, order: np.ndarray) -> Examples:
    """The examples order[0], order[1], ...; `order` i64[m]."""
    return gather([examples], order)


def gather(parts: Sequence[Examples], order: np.ndarray) -> Examples:
    """The examples order[0], order[1], ... of all parts laid end to end; `order` i64[m].

    One array after another is joined and permuted while it is in the cache: 1.6 times as fast as to
    join all of them first.
    """
    arrays: dict[str, Any] = {}
    for name in _MATRICES:
        matrix = joined(parts, name)
        arrays[name] = None if matrix is None else matrix.take(order, axis=0, mode="clip")
    stored = _joined_ends(parts)
    ends = np.zeros(len(order) + 1, np.int64)
    np.cumsum(np.diff(stored).take(order), out=ends[1:])
    for name in _RAGGED:
        values = joined(parts, name)
        taken = None if values is None else _take_ragged(values, stored, order)
        arrays[name] = None if taken is None else taken[: int(ends[-1])]
    return Examples(**arrays, ends=ends)


def _take_ragged(values: np.ndarray, ends: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The values of the examples in another order, and perhaps more behind them.

    As byte strings, which Arrow copies whole: 8 times as fast as NumPy with an index for each value
    (64 values an example).
    """
    if not len(values):
        return values
    data = pa.py_buffer(np.ascontiguousarray(values))
    strings = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(ends) - 1, [None, pa.py_buffer(ends * values.itemsize), data]
    )
    return np.frombuffer(strings.take(pa.array(order)).buffers()[2], values.dtype)


class Known:
    """Reads the rows that a model's tables do not have as UNKNOWN_ROW.

    Such are the values that a later store appended to the vocabularies of the model's; a store has
    them in its own rows, and the model knows nothing of them.

    Args:
        schema: the model's.
    """

    def __init__(self, schema: Schema):
        # PAD is no row of any table, so nothing of other encodings is at or beyond it.
        rows = {t.name: t.rows if t.encoding == "vocabulary" else PAD for t in schema.tables}
        self._columns = np.array([rows[f.table] for f in schema.id_columns], int)
        self._lists = np.array([rows[f.table] for f in schema.lists], int)

    def __call__(self, examples: Examples) -> Examples:
        """The same examples; without a copy where all rows are known."""
        if examples.ids.size and (examples.ids.max(axis=0) >= self._columns).any():
            examples = examples._replace(ids=_known(examples.ids, self._columns))
        if examples.values.size and examples.values.max() >= self._lists.min():
            limits = np.repeat(np.tile(self._lists, examples.rows), examples.lengths.reshape(-1))
            examples = examples._replace(values=_known(examples.values, limits))
        return examples


def _known(rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
    return np.where((rows >= limits) & (rows != PAD), UNKNOWN_ROW, rows).astype(np.int32)


def blank(like: Examples, rows: int) -> Examples:
    """Examples that only fill a batch: floats 0, ids PAD, lists empty, labels unknown."""
    shape = {name: (rows, getattr(like, name).shape[1]) for name in ("floats", "ids", "lengths")}
    tasks = (rows, like.labels.shape[1])
    return Examples(
        floats=np.zeros(shape["floats"], np.float32),
        ids=np.full(shape["ids"], PAD, np.int32),
        lengths=np.zeros(shape["lengths"], np.int32),
        ends=np.zeros(rows + 1, np.int64),
        values=np.zeros(0, np.int32),
        value_weights=None if like.value_weights is None else np.zeros(0, np.float32),
        labels=np.full(tasks, np.nan, np.float32),
        weights=None if like.weights is None else np.zeros(tasks, np.float32),
        shifts=None if like.shifts is None else np.zeros(tasks, np.float32),
    )
