"""Blocks: how vectors lie in memory on their way between tables, buffers and the model.

A block is an array of vectors of one stack, one after another, in the form that suits the platform.

`ByRow`, of CPU and GPU: f[k, dim]. Tables are viewed as f[rows, width] for nothing. A row is
written by a scatter that sets what was read plus the change: with a scatter that adds, nothing in
the program says that an array is read before it is written, and XLA:CPU copies the whole of it in
every step.

`ByLine`, of TPU: f[k * width / 128, 128], as tables are stored, for a TPU keeps f[k, 8] in lines of
128, sixteen times the bytes, and any view of a table of another width is a copy of it in every
step. Vectors are moved a chunk at a time: their lines are gathered, and the part of each that a
vector is gets taken by a product with zeros and ones, which is exact: to its place, or where places
do not follow one another to all parts, of which the one where it belongs is kept.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxrank.apart import apart
from jaxrank.embedding.storage import LANES
from jaxrank.features import PAD

# Vectors that `ByLine` moves at a time, 4 MiB of lines, and rows that `ByRow` changes on CPU.
CHUNK = 8192
_SUBLANES = 8  # rows of a tile of 32-bit numbers on TPU; the same elsewhere, for equal rounds

# (arrays of some rows, f[k, dim] or f[k]; their summed gradients f[k, dim]; their places i32[k])
# -> the change of the arrays.
Change = Callable[[Any, jax.Array, jax.Array], Any]


class Form(Protocol):
    """How blocks of one stack lie in memory. An index is i32[...]; where it is PAD, nothing is read
    or written."""

    @property
    def unit(self) -> int:
        """A block is filled up with zeros to a multiple of so many vectors."""
        ...

    @property
    def buffer_unit(self) -> int:
        """A buffer of the exchange holds a multiple of so many ids."""
        ...

    def length(self, count: int) -> int:
        """Of the first axis of a block of so many vectors."""
        ...

    def zeros(self, count: int, dtype: Any) -> jax.Array:
        """A block of so many zeros."""
        ...

    def view(self, stored: jax.Array) -> jax.Array:
        """The stored array of a table as what `take` and `add` find vectors in, by their rows."""
        ...

    def take(
        self, source: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """The block of the vectors at i32[k] of a block or a view, times f[k]; zero for PAD."""
        ...

    def add(
        self,
        block: jax.Array,
        at: jax.Array,
        source: jax.Array,
        index: jax.Array | None = None,
        *,
        scale: jax.Array | None = None,
        rising: bool = False,
    ) -> jax.Array:
        """The block with the vectors of `source` at `index` (of a block all, if None), times f[k],
        added at `at`.

        Args:
            source: a block or a view.
            rising: `at` is so, and where it is PAD, all behind is PAD too.
        """
        ...

    def of_examples(self, vectors: jax.Array) -> jax.Array:
        """The block of f[B, places, dim], each example's vectors filled up to a multiple of `unit`
        places."""
        ...

    def to_examples(self, block: jax.Array, examples: int, places: int) -> jax.Array:
        """The inverse of `of_examples`: f[B, places, dim]."""
        ...

    def change(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        """The stored arrays of a table with some of its rows changed.

        Args:
            arrays: a tree of f[rows * width / 128, 128] and f[rows].
            row: i32[k], different, PAD behind the last; for `ByLine` rising.
            sums: the block of their gradients.
        """
        ...

    def change_all(self, arrays: Any, sums: jax.Array, change: Change) -> Any:
        """`change` of all rows."""
        ...


def up_to(count: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit


def _of_numbers(array: jax.Array, row: jax.Array) -> jax.Array:
    return apart(_gathered, array, row)


def _gathered(array: jax.Array, row: jax.Array) -> jax.Array:
    return array.at[row].get(mode="fill", fill_value=0)


def _scaled(vectors: jax.Array, scale: jax.Array | None) -> jax.Array:
    return vectors if scale is None else vectors * scale[:, None].astype(vectors.dtype)


@dataclasses.dataclass(frozen=True)
class ByRow:
    """See the module. width: of a stored row, at least `dim`."""

    dim: int
    width: int

    @property
    def unit(self) -> int:
        return 1

    @property
    def buffer_unit(self) -> int:
        return _SUBLANES

    def length(self, count: int) -> int:
        return count

    def zeros(self, count: int, dtype: Any) -> jax.Array:
        return jnp.zeros((count, self.dim), dtype)

    def view(self, stored: jax.Array) -> jax.Array:
        return stored.reshape(-1, self.width)

    def take(
        self, source: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        return _scaled(_of_numbers(source, index)[:, : self.dim], scale)

    def add(
        self,
        block: jax.Array,
        at: jax.Array,
        source: jax.Array,
        index: jax.Array | None = None,
        *,
        scale: jax.Array | None = None,
        rising: bool = False,
    ) -> jax.Array:
        if index is None:
            added = _scaled(source, scale)
            return block.at[at].add(added, mode="drop", indices_are_sorted=rising)

        def add(is_sorted: bool, block: Any, at: Any, index: Any, scale: Any) -> jax.Array:
            added = self.take(source, index, scale)
            return block.at[at].add(added, mode="drop", indices_are_sorted=is_sorted)

        # On CPU a chunk at a time, whose vectors stay in the cache until they are added.
        by_chunk = functools.partial(
            _over_overlapping_chunks,
            functools.partial(add, False),
            size=4 * CHUNK,
            count=at.shape[0],
        )
        return jax.lax.platform_dependent(
            block, at, index, scale, cpu=by_chunk, default=functools.partial(add, rising)
        )

    def of_examples(self, vectors: jax.Array) -> jax.Array:
        return vectors.reshape(-1, self.dim)

    def to_examples(self, block: jax.Array, examples: int, places: int) -> jax.Array:
        return block.reshape(examples, places, self.dim)

    def change(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        def at_once(arrays: Any, row: jax.Array, sums: jax.Array) -> Any:
            return self._change_rows(arrays, row, sums, change)

        def by_chunk(arrays: Any, row: jax.Array, sums: jax.Array) -> Any:
            count = jnp.sum(row != PAD, dtype=jnp.int32)
            return _over_overlapping_chunks(at_once, arrays, row, sums, size=CHUNK, count=count)

        # On CPU what PAD fills up would cost as much as rows do.
        return jax.lax.platform_dependent(arrays, row, sums, cpu=by_chunk, default=at_once)

    def _change_rows(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        found = jax.tree.map(lambda a: _of_numbers(self._rows(a), row), arrays)
        changes = change(jax.tree.map(self._short, found), sums, row)

        def write(array: jax.Array, found: jax.Array, change: jax.Array) -> jax.Array:
            new = found + self._padded(change)
            return self._rows(array).at[row].set(new, mode="drop").reshape(array.shape)

        return jax.tree.map(write, arrays, found, changes)

    def change_all(self, arrays: Any, sums: jax.Array, change: Change) -> Any:
        seen = jax.tree.map(lambda a: self._short(self._rows(a)), arrays)
        changes = change(seen, sums, jnp.arange(len(sums), dtype=jnp.int32))
        return jax.tree.map(lambda a, c: a + self._padded(c).reshape(a.shape), arrays, changes)

    def _rows(self, array: jax.Array) -> jax.Array:
        return self.view(array) if array.ndim == 2 else array

    def _short(self, rows: jax.Array) -> jax.Array:
        return rows[:, : self.dim] if rows.ndim == 2 else rows

    def _padded(self, change: jax.Array) -> jax.Array:
        if change.ndim == 1 or self.width == self.dim:
            return change
        return jnp.pad(change, ((0, 0), (0, self.width - self.dim)))


@dataclasses.dataclass(frozen=True)
class ByLine:
    """See the module. width: of a stored row, at least `dim`; a divisor or a multiple of 128."""

    dim: int
    width: int

    @property
    def unit(self) -> int:
        return max(1, LANES // self.width)

    @property
    def buffer_unit(self) -> int:
        return max(_SUBLANES, self.unit)

    @property
    def lines(self) -> int:
        """That one vector takes, where it takes whole ones."""
        return max(1, self.width // LANES)

    def length(self, count: int) -> int:
        return up_to(count, self.unit) * self.width // LANES

    def zeros(self, count: int, dtype: Any) -> jax.Array:
        return jnp.zeros((self.length(count), LANES), dtype)

    def view(self, stored: jax.Array) -> jax.Array:
        return stored

    def take(
        self, source: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        def of_chunk(chunk: tuple[jax.Array, jax.Array | None]) -> jax.Array:
            index, scale = chunk
            lines = self._lines(source, index, scale)
            return lines if self.unit == 1 else self._side_by_side(lines, index)

        scales = None if scale is None else _chunks(scale, 0, self.unit)
        found = jax.lax.map(of_chunk, (_chunks(index, PAD, self.unit), scales))
        return found.reshape(-1, LANES)[: self.length(index.shape[0])]

    def add(
        self,
        block: jax.Array,
        at: jax.Array,
        source: jax.Array,
        index: jax.Array | None = None,
        *,
        scale: jax.Array | None = None,
        rising: bool = False,
    ) -> jax.Array:
        if index is None:
            index = jnp.arange(at.shape[0], dtype=jnp.int32)

        def of_chunk(block: Any, at: Any, index: Any, scale: Any = None) -> jax.Array:
            return self._put(block, at, self._everywhere(source, index, scale), rising=rising)

        count = jnp.sum(at != PAD, dtype=jnp.int32) if rising else at.shape[0]
        return _over_chunks(of_chunk, block, at, index, scale, count=count)

    def of_examples(self, vectors: jax.Array) -> jax.Array:
        examples, places, _ = vectors.shape
        if self.width > self.dim:
            vectors = jnp.pad(vectors, ((0, 0), (0, 0), (0, self.width - self.dim)))
        flat = vectors.reshape(examples, -1)
        filling = (up_to(places, self.unit) - places) * self.width
        return jnp.pad(flat, ((0, 0), (0, filling))).reshape(-1, LANES)

    def to_examples(self, block: jax.Array, examples: int, places: int) -> jax.Array:
        flat = block.reshape(examples, -1)[:, : places * self.width]
        return flat.reshape(examples, places, self.width)[:, :, : self.dim]

    def change(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        def of_chunk(arrays: Any, row: jax.Array, here: jax.Array) -> Any:
            found = jax.tree.map(lambda a: self._rows(a, row), arrays)
            changes = change(found, self._rows(sums, jnp.where(row == PAD, PAD, here)), row)
            return jax.tree.map(lambda a, c: self._add_rows(a, row, c), arrays, changes)

        here = jnp.arange(row.shape[0], dtype=jnp.int32)
        count = jnp.sum(row != PAD, dtype=jnp.int32)
        return _over_chunks(of_chunk, arrays, row, here, count=count)

    def change_all(self, arrays: Any, sums: jax.Array, change: Change) -> Any:
        every = jnp.arange(sums.shape[0] * LANES // self.width, dtype=jnp.int32)
        return self.change(arrays, every, sums, change)

    def _rows(self, array: jax.Array, row: jax.Array) -> jax.Array:
        """f[k, dim] or f[k], of a few rows."""
        if array.ndim == 1:
            return _of_numbers(array, row)
        return self._everywhere(array, row).reshape(row.shape[0], -1)[:, : self.dim]

    def _add_rows(self, array: jax.Array, row: jax.Array, change: jax.Array) -> jax.Array:
        if array.ndim == 1:
            return array.at[row].add(change, mode="drop", indices_are_sorted=True)
        if self.unit == 1:
            padded = jnp.pad(change, ((0, 0), (0, self.width - self.dim)))
            return self._put(array, row, padded.reshape(-1, LANES), rising=True)
        # Side by side by a product: XLA:TPU's own way is a copy that takes longer.
        column = jnp.arange(LANES, dtype=jnp.int32) % self.width
        same = jnp.arange(self.dim, dtype=jnp.int32)[:, None] == column[None, :]
        return self._put(array, row, _exact_product(change, same), rising=True)

    def _lines(
        self, block: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """f[k * lines, 128]: the lines of the vectors at i32[k], times f[k]."""
        lines = block.at[self._line(index)].get(mode="fill", fill_value=0)
        return _scaled(lines, None if scale is None else jnp.repeat(scale, self.lines))

    def _side_by_side(self, lines: jax.Array, index: jax.Array) -> jax.Array:
        """The block of the vectors at i32[k], k a multiple of `unit`, from the line of each.

        By one product that takes each vector from its part of its line to its place, and sums the
        lines of a line's vectors: two masks and a sum take 1.5 times the cycles, by the compiler.
        """
        part = jnp.arange(LANES, dtype=jnp.int32) // self.width
        column = jnp.arange(LANES, dtype=jnp.int32) % self.width
        place = jnp.arange(self.unit, dtype=jnp.int32)
        is_own = part[None, None, :] == (index % self.unit).reshape(-1, self.unit, 1)
        own = jnp.where(is_own, lines.reshape(-1, self.unit, LANES), 0)
        to = (column[:, None] == column[None, :])[None] & (part[None, :] == place[:, None])[:, None]
        return _exact_product(own, to)

    def _everywhere(
        self, block: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """f[k * lines, 128]: the vectors at i32[k] times f[k], each in all parts of its line."""
        lines = self._lines(block, index, scale)
        if self.unit == 1:
            return lines
        column = jnp.arange(LANES, dtype=jnp.int32) % self.width
        return _exact_product(self._part(lines, index), column[:, None] == column[None, :])

    def _put(self, block: jax.Array, at: jax.Array, lines: jax.Array, *, rising: bool) -> jax.Array:
        kept = lines if self.unit == 1 else self._part(lines, at)
        return block.at[self._line(at)].add(kept, mode="drop", indices_are_sorted=rising)

    def _part(self, lines: jax.Array, index: jax.Array) -> jax.Array:
        """f[k, 128]: lines, zero but in the part that belongs to a vector's index."""
        of_lane = jnp.arange(LANES, dtype=jnp.int32) // self.width
        return jnp.where(of_lane[None, :] == (index % self.unit)[:, None], lines, 0)

    def _line(self, index: jax.Array) -> jax.Array:
        """i32[k * lines]: where the line, or each of the lines, of a vector is."""
        if self.lines == 1:
            return jnp.where(index == PAD, PAD, index // self.unit)
        every = index[:, None] * self.lines + jnp.arange(self.lines, dtype=jnp.int32)[None, :]
        return jnp.where(index[:, None] == PAD, PAD, every).reshape(-1)


def _exact_product(numbers: jax.Array, where: jax.Array) -> jax.Array:
    """f[k, ...] times bool[..., n], summed over all of `...`: exact, where no sum has more than one
    number but zeros."""
    axes = tuple(range(1, numbers.ndim)), tuple(range(where.ndim - 1))
    exact = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        numbers, where.astype(numbers.dtype), (axes, ((), ())), precision=exact
    )


def _chunks(array: jax.Array, filling: Any, unit: int = 1) -> jax.Array:
    """[m] -> [chunks, k], k at most `CHUNK` and a multiple of `unit`."""
    size = min(CHUNK, up_to(max(1, array.shape[0]), unit))
    padding = (0, -array.shape[0] % size)
    return jnp.pad(array, padding, constant_values=filling).reshape(-1, size)


def _over_chunks(
    body: Callable[..., Any], carry: Any, *arrays: jax.Array | None, count: jax.Array | int
) -> Any:
    """carry = body(carry, *chunks of the arrays i32[m] or f[m]) up to the chunk of the last of
    `count`; behind it i32 are filled up with PAD. None is left out."""
    chunked = [_chunks(a, PAD if a.dtype == jnp.int32 else 0) for a in arrays if a is not None]
    size = chunked[0].shape[1]

    def of_chunk(i: jax.Array, carry: Any) -> Any:
        return body(carry, *(chunks[i] for chunks in chunked))

    return jax.lax.fori_loop(0, (count + size - 1) // size, of_chunk, carry)


def _over_overlapping_chunks(
    body: Callable[..., Any], carry: Any, at: jax.Array, *arrays: Any, size: int, count: Any
) -> Any:
    """As `_over_chunks`, of arrays [m, ...] that are too large to be filled up: the last chunk
    reaches back into the one before it, with PAD for `at` i32[m] there."""
    if not at.shape[0]:
        return carry
    size = min(size, at.shape[0])

    def of_chunk(i: jax.Array, carry: Any) -> Any:
        first = jnp.minimum(i * size, at.shape[0] - size)
        here, *given = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, first, size), (at, *arrays)
        )
        is_done = first + jnp.arange(size, dtype=jnp.int32) < i * size
        return body(carry, jnp.where(is_done, PAD, here), *given)

    return jax.lax.fori_loop(0, (count + size - 1) // size, of_chunk, carry)
