"""Tiny tables, read and summed by products with one-hot rows.

On TPU a vector of a narrow table is taken from its line by a product with 128 rows of zeros and
ones after the line was gathered. A product with the whole of a table of up to 128 rows takes no
more cycles (docs/benchmarks/log/2026-11.md), and there is nothing to gather, sort or scatter.

The places of an example that read such tables are filled in lines of `unit` vectors: for each line
one product of the one-hot rows of its places, side by side, with their tables, each in the part of
the line where its vector goes. Exact: a sum has one number, and zeros.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.embedding.backends.base import VectorLayout
from jaxrank.embedding.storage import LANES
from jaxrank.features import PAD
from jaxrank.layout import Stack

MAX_ROWS = 128  # of a table that is read this way


@dataclasses.dataclass(frozen=True)
class _Line:
    """Some of an example's places, as many as vectors lie in a line; the last may have fewer.

    places: i64[k] which columns of the stack's ids.
    first: i32[k] where the table of each begins.
    index: i32[rows, unit] the stack's row of each row of the table of each part of the line; PAD
        where there is none.
    """

    places: np.ndarray
    first: np.ndarray
    index: np.ndarray


class OneHot:
    """The places of a stack's ids that are read by products.

    Those of columns whose table every device keeps whole and that has up to MAX_ROWS rows, where
    there are enough to fill lines.

    Args:
        rows_of: of each table.
        vector_layout: of the stack's blocks.
    """

    def __init__(self, stack: Stack, rows_of: Mapping[str, int], vector_layout: VectorLayout):
        self._vector_layout = vector_layout
        tiny = {}
        for place, table in enumerate(stack.column_tables):
            first, rows = stack.offsets[table], rows_of[stack.tables[table]]
            if vector_layout.unit > 1 and rows <= MAX_ROWS and first + rows <= stack.hot_start:
                tiny[place] = first, rows
        # Alike in rows, so that few parts of a line's tables are empty.
        order = sorted(tiny, key=lambda place: tiny[place][1])
        lines = [
            _line(
                {place: tiny[place] for place in order[i : i + vector_layout.unit]},
                vector_layout.unit,
            )
            for i in range(0, len(order), vector_layout.unit)
        ]
        # A part without a place costs as much as one with, so a line is at least half full, or its
        # tables are smaller in the same measure.
        self._lines = [line for line in lines if line.index.size <= 2 * MAX_ROWS * len(line.places)]
        self._places = [place for line in self._lines for place in line.places.tolist()]
        self._others = [place for place in range(stack.places) if place not in self._places]

    @property
    def num_others(self) -> int:
        return len(self._others)

    def others(self, array: jax.Array) -> jax.Array:
        """Of ids [B, places] or their vectors [B, places, dim] those that are not read here."""
        return _columns(array, self._others) if self._places else array

    def together(self, tables: jax.Array | None, ids: jax.Array, others: jax.Array) -> jax.Array:
        """The vectors of all places, f[B, places, dim].

        Args:
            tables: f[rows * width / 128, 128], the rows that every device keeps, if any.
            ids: i32[B, places].
            others: f[B, other places, dim].
        """
        if not self._places:
            return others
        assert tables is not None
        lines = [self._read(tables, line, ids) for line in self._lines]
        block = jnp.stack(lines, axis=1).reshape(-1, LANES)
        found = self._vector_layout.to_examples(block, ids.shape[0], len(self._places))
        number = {place: i for i, place in enumerate([*self._places, *self._others])}
        both = jnp.concatenate([found, others], axis=1)
        return _columns(both, [number[place] for place in range(len(number))])

    def add_sums(
        self, sums: jax.Array, reads: jax.Array, ids: jax.Array, grads: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The block of the sums of the gradients of each row, and how often each is read, with
        those of the places read here added.

        Args:
            sums: a block of the rows that every device keeps.
            reads: f[those rows].
            ids: i32[B, places].
            grads: f[B, places, dim].
        """
        if not self._places:
            return sums, reads
        block = self._vector_layout.of_examples(_columns(grads, self._places))
        block = block.reshape(ids.shape[0], -1, LANES)
        for i, line in enumerate(self._lines):
            is_row = _is_row(line, ids, sums.dtype)
            # [parts, rows, 128], of which each part's lanes are its own sums.
            found = _product(is_row, block[:, i], (0,), (0,))
            found = jnp.sum(jnp.where(_own_part(self._vector_layout), found, 0), axis=0)
            at = jnp.asarray(line.index).reshape(-1)
            sums = self._vector_layout.add(sums, at, found)
            count = jnp.sum(is_row, axis=0).T.reshape(-1)
            reads = reads.at[at].add(count.astype(reads.dtype), mode="drop")
        return sums, reads

    def _read(self, tables: jax.Array, line: _Line, ids: jax.Array) -> jax.Array:
        """f[B, 128]: the line of each example."""
        rows = self._vector_layout.take(tables, jnp.asarray(line.index).reshape(-1))  # f[rows, 128]
        own = jnp.where(_own_part(self._vector_layout), rows[None], 0)
        return _product(_is_row(line, ids, rows.dtype), own, (1, 2), (0, 1))


def _line(tables: Mapping[int, tuple[int, int]], unit: int) -> _Line:
    """Of {place: (first row of its table, rows of it)}."""
    first, rows = np.array(list(tables.values()), np.int32).T
    index = np.full((rows.max(), unit), PAD, np.int32)
    number = np.arange(rows.max(), dtype=np.int32)[:, None]
    index[:, : len(rows)] = np.where(number < rows, number + first, PAD)
    return _Line(np.array(list(tables)), first, index)


def _is_row(line: _Line, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """f[B, unit, rows], 1 at the row of its table that a place has, if it is not PAD."""
    rows, unit = line.index.shape
    row = _columns(ids, line.places.tolist()) - line.first[None, :]
    row = jnp.pad(row, ((0, 0), (0, unit - len(line.places))), constant_values=PAD)
    return (row[:, :, None] == jnp.arange(rows, dtype=jnp.int32)[None, None, :]).astype(dtype)


def _own_part(vector_layout: VectorLayout) -> np.ndarray:
    """bool[unit, 1, 128]: the lanes of each part of a line."""
    part = np.arange(LANES) // (LANES // vector_layout.unit)
    return (part == np.arange(vector_layout.unit)[:, None])[:, None, :]


def _product(
    a: jax.Array, b: jax.Array, axes: tuple[int, ...], other_axes: tuple[int, ...]
) -> jax.Array:
    exact = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(a, b, ((axes, other_axes), ((), ())), precision=exact)


def _columns(array: jax.Array, which: Sequence[int]) -> jax.Array:
    """Some columns [B, ...] of an array, in this order, as slices: XLA:TPU would gather them one
    number at a time."""
    slices = [array[:, start:stop] for start, stop in _runs(which)]
    return jnp.concatenate(slices, axis=1) if slices else array[:, :0]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The runs [start, stop) of consecutive numbers."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[begin], numbers[i - 1] + 1
            begin = i
