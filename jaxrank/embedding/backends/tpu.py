"""Vector layout of TPU: f[k * width / 128, 128], as tables are stored.

A TPU keeps f[k, 8] in lines of 128, which takes sixteen times the bytes. Any view of a table with
another width is a copy of it in every step.

Vectors are moved a chunk at a time. Their lines are gathered, and the part of each vector is
selected by a product with zeros and ones, which is exact. The product moves the part to its place.
If places are not consecutive, it copies the part to all parts of a line, and a mask keeps one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends.base import SUBLANES, Change, gathered, round_up, scaled
from jaxrank.embedding.storage import LANES
from jaxrank.features import PAD

CHUNK = 8192  # vectors moved at a time, 4 MiB of lines


@dataclasses.dataclass(frozen=True)
class TpuLayout:
    """A `VectorLayout`. width: of a stored row, at least `dim`, a divisor or a multiple of 128."""

    dim: int
    width: int

    @property
    def unit(self) -> int:
        return max(1, LANES // self.width)

    @property
    def buffer_unit(self) -> int:
        return max(SUBLANES, self.unit)

    @property
    def lines(self) -> int:
        """Number of lines per vector, if vectors have whole lines."""
        return max(1, self.width // LANES)

    def length(self, count: int) -> int:
        return round_up(count, self.unit) * self.width // LANES

    def zeros(self, count: int, dtype: Any) -> jax.Array:
        return jnp.zeros((self.length(count), LANES), dtype)

    def view(self, stored: jax.Array) -> jax.Array:
        return stored

    def take(
        self, source: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        def run_chunk(chunk: tuple[jax.Array, jax.Array | None]) -> jax.Array:
            index, scale = chunk
            lines = self._lines(source, index, scale)
            return lines if self.unit == 1 else self._side_by_side(lines, index)

        scales = None if scale is None else _chunks(scale, 0, self.unit)
        taken = jax.lax.map(run_chunk, (_chunks(index, PAD, self.unit), scales))
        return taken.reshape(-1, LANES)[: self.length(index.shape[0])]

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

        def run_chunk(block: Any, at: Any, index: Any, scale: Any = None) -> jax.Array:
            return self._put(block, at, self._everywhere(source, index, scale), rising=rising)

        count = jnp.sum(at != PAD, dtype=jnp.int32) if rising else at.shape[0]
        return _fold_chunks(run_chunk, block, at, index, scale, count=count)

    def sum_sorted(self, rank: jax.Array, block: jax.Array, order: jax.Array) -> jax.Array:
        return self.add(jnp.zeros_like(block), rank, block, order, rising=True)

    def from_examples(self, vectors: jax.Array) -> jax.Array:
        examples, places, _ = vectors.shape
        if self.width > self.dim:
            vectors = jnp.pad(vectors, ((0, 0), (0, 0), (0, self.width - self.dim)))
        flat = vectors.reshape(examples, -1)
        filling = (round_up(places, self.unit) - places) * self.width
        return jnp.pad(flat, ((0, 0), (0, filling))).reshape(-1, LANES)

    def to_examples(self, block: jax.Array, examples: int, places: int) -> jax.Array:
        flat = block.reshape(examples, -1)[:, : places * self.width]
        return flat.reshape(examples, places, self.width)[:, :, : self.dim]

    def change(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        def run_chunk(arrays: Any, row: jax.Array, positions: jax.Array) -> Any:
            stored = jax.tree.map(lambda a: self._rows(a, row), arrays)
            changes = change(stored, self._rows(sums, jnp.where(row == PAD, PAD, positions)), row)
            return jax.tree.map(lambda a, c: self._add_rows(a, row, c), arrays, changes)

        positions = jnp.arange(row.shape[0], dtype=jnp.int32)
        count = jnp.sum(row != PAD, dtype=jnp.int32)
        return _fold_chunks(run_chunk, arrays, row, positions, count=count)

    def change_all(self, arrays: Any, sums: jax.Array, change: Change) -> Any:
        every = jnp.arange(sums.shape[0] * LANES // self.width, dtype=jnp.int32)
        return self.change(arrays, every, sums, change)

    def _rows(self, array: jax.Array, row: jax.Array) -> jax.Array:
        """Reads a small number of rows, f[k, dim] or f[k]."""
        if array.ndim == 1:
            return gathered(array, row)
        return self._everywhere(array, row).reshape(row.shape[0], -1)[:, : self.dim]

    def _add_rows(self, array: jax.Array, row: jax.Array, change: jax.Array) -> jax.Array:
        if array.ndim == 1:
            return array.at[row].add(change, mode="drop", indices_are_sorted=True)
        if self.unit == 1:
            padded = jnp.pad(change, ((0, 0), (0, self.width - self.dim)))
            return self._put(array, row, padded.reshape(-1, LANES), rising=True)
        # Side by side by a product: XLA:TPU would make a copy, which takes longer.
        column = jnp.arange(LANES, dtype=jnp.int32) % self.width
        same = jnp.arange(self.dim, dtype=jnp.int32)[:, None] == column[None, :]
        return self._put(array, row, _exact_product(change, same), rising=True)

    def _lines(
        self, block: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """Gathers the lines of the vectors at i32[k], times f[k]: f[k * lines, 128]."""
        lines = block.at[self._line(index)].get(mode="fill", fill_value=0)
        return scaled(lines, None if scale is None else jnp.repeat(scale, self.lines))

    def _side_by_side(self, lines: jax.Array, index: jax.Array) -> jax.Array:
        """Makes the block of the vectors at i32[k] from their lines. k is a multiple of `unit`.

        One product moves each vector from its part of its line to its place, and sums the lines of
        a line's vectors. Two masks and a sum take 1.5 times the cycles, according to the compiler.
        """
        part = jnp.arange(LANES, dtype=jnp.int32) // self.width
        column = jnp.arange(LANES, dtype=jnp.int32) % self.width
        place = jnp.arange(self.unit, dtype=jnp.int32)
        is_own = part[None, None, :] == (index % self.unit).reshape(-1, self.unit, 1)
        masked = jnp.where(is_own, lines.reshape(-1, self.unit, LANES), 0)
        matches = (column[:, None] == column[None, :])[None] & (part[None, :] == place[:, None])[
            :, None
        ]
        return _exact_product(masked, matches)

    def _everywhere(
        self, block: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """Copies each vector at i32[k], times f[k], to all parts of its line: f[k * lines, 128]."""
        lines = self._lines(block, index, scale)
        if self.unit == 1:
            return lines
        column = jnp.arange(LANES, dtype=jnp.int32) % self.width
        return _exact_product(self._part(lines, index), column[:, None] == column[None, :])

    def _put(self, block: jax.Array, at: jax.Array, lines: jax.Array, *, rising: bool) -> jax.Array:
        kept = lines if self.unit == 1 else self._part(lines, at)
        return block.at[self._line(at)].add(kept, mode="drop", indices_are_sorted=rising)

    def _part(self, lines: jax.Array, index: jax.Array) -> jax.Array:
        """Zeroes lines f[k, 128] outside the part that belongs to each index."""
        of_lane = jnp.arange(LANES, dtype=jnp.int32) // self.width
        return jnp.where(of_lane[None, :] == (index % self.unit)[:, None], lines, 0)

    def _line(self, index: jax.Array) -> jax.Array:
        """Computes the index of each line of the vectors, i32[k * lines]."""
        if self.lines == 1:
            return jnp.where(index == PAD, PAD, index // self.unit)
        every = index[:, None] * self.lines + jnp.arange(self.lines, dtype=jnp.int32)[None, :]
        return jnp.where(index[:, None] == PAD, PAD, every).reshape(-1)


def _exact_product(numbers: jax.Array, where: jax.Array) -> jax.Array:
    """Multiplies f[k, ...] by bool[..., n] and sums over `...`.

    Exact if each sum has at most one number that is not zero.
    """
    axes = tuple(range(1, numbers.ndim)), tuple(range(where.ndim - 1))
    exact = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        numbers, where.astype(numbers.dtype), (axes, ((), ())), precision=exact
    )


def _chunks(array: jax.Array, filling: Any, unit: int = 1) -> jax.Array:
    """Splits [m] into [chunks, k], k at most `CHUNK` and a multiple of `unit`."""
    size = min(CHUNK, round_up(max(1, array.shape[0]), unit))
    padding = (0, -array.shape[0] % size)
    return jnp.pad(array, padding, constant_values=filling).reshape(-1, size)


def _fold_chunks(
    body: Callable[..., Any], carry: Any, *arrays: jax.Array | None, count: jax.Array | int
) -> Any:
    """Repeats carry = body(carry, *chunks of the arrays i32[m] or f[m]) for the first `count`.

    The last chunk is padded, i32 with PAD. Arrays that are None are skipped.
    """
    chunked = [_chunks(a, PAD if a.dtype == jnp.int32 else 0) for a in arrays if a is not None]
    size = chunked[0].shape[1]

    def run_chunk(i: jax.Array, carry: Any) -> Any:
        return body(carry, *(chunks[i] for chunks in chunked))

    return jax.lax.fori_loop(0, (count + size - 1) // size, run_chunk, carry)
