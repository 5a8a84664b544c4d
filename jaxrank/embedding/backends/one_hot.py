"""Tiny tables, read and summed by products with one-hot rows.

On TPU a vector of a narrow table is gathered with its line, then selected by a product with 128
rows of zeros and ones. A product with a whole table of up to 128 rows takes no more cycles
(docs/benchmarks/log/tpu.md), and needs no gather, sort or scatter.

The places of an example that read such tables are arranged in lines of `unit` vectors. Each line is
one product. One factor is the one-hot rows of its places, side by side. The other is their tables,
each in the part of the line of its vector. The product is exact: a sum has one number, and zeros.
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

MAX_ROWS = 128  # of a table that is read by products


@dataclasses.dataclass(frozen=True)
class _Line:
    """A line of an example's places, as many as vectors fit in a line. The last may have fewer.

    places: i64[k], the columns of the stack's ids.
    first: i32[k], the first row of the table of each place.
    index: i32[rows, unit], the stack row of each row of the table of each part of the line, or PAD.
    """

    places: np.ndarray
    first: np.ndarray
    index: np.ndarray


class OneHot:
    """The places of a stack's ids that are read by products.

    These are columns whose table is replicated whole and has up to MAX_ROWS rows, if there are
    enough of them to fill lines.

    Args:
        rows_of: {table: number of rows}.
        vector_layout: the layout of the stack's blocks.
    """

    def __init__(self, stack: Stack, rows_of: Mapping[str, int], vector_layout: VectorLayout):
        self._vector_layout = vector_layout
        tiny = {}
        for place, table in enumerate(stack.column_tables):
            first, rows = stack.offsets[table], rows_of[stack.tables[table]]
            if vector_layout.unit > 1 and rows <= MAX_ROWS and first + rows <= stack.hot_start:
                tiny[place] = first, rows
        # Sorted by rows, so that tables of a line have similar sizes and few parts are empty.
        order = sorted(tiny, key=lambda place: tiny[place][1])
        lines = [
            _line(
                {place: tiny[place] for place in order[i : i + vector_layout.unit]},
                vector_layout.unit,
            )
            for i in range(0, len(order), vector_layout.unit)
        ]
        # A part without a place costs as much as a part with one. A line is therefore at least half
        # full, or its tables are smaller by the same factor.
        self._lines = [line for line in lines if line.index.size <= 2 * MAX_ROWS * len(line.places)]
        self._places = [place for line in self._lines for place in line.places.tolist()]
        self._others = [place for place in range(stack.places) if place not in self._places]

    @property
    def num_others(self) -> int:
        return len(self._others)

    def others(self, array: jax.Array) -> jax.Array:
        """Selects the places that are not read by products, of [B, places] or [B, places, dim]."""
        return _columns(array, self._others) if self._places else array

    def together(self, tables: jax.Array | None, ids: jax.Array, others: jax.Array) -> jax.Array:
        """Reads the places of products and merges them with the others, f[B, places, dim].

        Args:
            tables: f[rows * width / 128, 128], the replicated rows, if any.
            ids: i32[B, places].
            others: f[B, other places, dim].
        """
        if not self._places:
            return others
        assert tables is not None
        lines = [self._read(tables, line, ids) for line in self._lines]
        block = jnp.stack(lines, axis=1).reshape(-1, LANES)
        vectors = self._vector_layout.to_examples(block, ids.shape[0], len(self._places))
        number = {place: i for i, place in enumerate([*self._places, *self._others])}
        both = jnp.concatenate([vectors, others], axis=1)
        return _columns(both, [number[place] for place in range(len(number))])

    def add_sums(
        self, sums: jax.Array, reads: jax.Array, ids: jax.Array, grads: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the gradients and the reads of the places that are read by products.

        Args:
            sums: the block of the gradient sums of the replicated rows.
            reads: f[rows], number of reads of each of these rows.
            ids: i32[B, places].
            grads: f[B, places, dim].
        """
        if not self._places:
            return sums, reads
        block = self._vector_layout.from_examples(_columns(grads, self._places))
        block = block.reshape(ids.shape[0], -1, LANES)
        for i, line in enumerate(self._lines):
            is_row = _is_row(line, ids, sums.dtype)
            # [parts, rows, 128]. Only each part's own lanes are its sums.
            product = _product(is_row, block[:, i], (0,), (0,))
            product = jnp.sum(jnp.where(_own_part(self._vector_layout), product, 0), axis=0)
            at = jnp.asarray(line.index).reshape(-1)
            sums = self._vector_layout.add(sums, at, product)
            count = jnp.sum(is_row, axis=0).T.reshape(-1)
            reads = reads.at[at].add(count.astype(reads.dtype), mode="drop")
        return sums, reads

    def _read(self, tables: jax.Array, line: _Line, ids: jax.Array) -> jax.Array:
        """Reads the line of each example, f[B, 128]."""
        rows = self._vector_layout.take(tables, jnp.asarray(line.index).reshape(-1))  # f[rows, 128]
        masked = jnp.where(_own_part(self._vector_layout), rows[None], 0)
        return _product(_is_row(line, ids, rows.dtype), masked, (1, 2), (0, 1))


def _line(tables: Mapping[int, tuple[int, int]], unit: int) -> _Line:
    """Makes a line from {place: (first row of its table, number of rows)}."""
    first, rows = np.array(list(tables.values()), np.int32).T
    index = np.full((rows.max(), unit), PAD, np.int32)
    number = np.arange(rows.max(), dtype=np.int32)[:, None]
    index[:, : len(rows)] = np.where(number < rows, number + first, PAD)
    return _Line(np.array(list(tables)), first, index)


def _is_row(line: _Line, ids: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Computes f[B, unit, rows], 1 at the table row of each place, 0 for PAD."""
    rows, unit = line.index.shape
    row = _columns(ids, line.places.tolist()) - line.first[None, :]
    row = jnp.pad(row, ((0, 0), (0, unit - len(line.places))), constant_values=PAD)
    return (row[:, :, None] == jnp.arange(rows, dtype=jnp.int32)[None, None, :]).astype(dtype)


def _own_part(vector_layout: VectorLayout) -> np.ndarray:
    """Returns bool[unit, 1, 128], the lanes of each part of a line."""
    part = np.arange(LANES) // (LANES // vector_layout.unit)
    return (part == np.arange(vector_layout.unit)[:, None])[:, None, :]


def _product(
    a: jax.Array, b: jax.Array, axes: tuple[int, ...], other_axes: tuple[int, ...]
) -> jax.Array:
    exact = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(a, b, ((axes, other_axes), ((), ())), precision=exact)


def _columns(array: jax.Array, indices: Sequence[int]) -> jax.Array:
    """Selects columns [B, ...] of an array, in this order, by slices.

    XLA:TPU would gather them one number at a time.
    """
    slices = [array[:, start:stop] for start, stop in _runs(indices)]
    return jnp.concatenate(slices, axis=1) if slices else array[:, :0]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the runs [start, stop) of consecutive numbers."""
    begin = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[begin], numbers[i - 1] + 1
            begin = i
