"""Vector layout of CPU and GPU: f[k, dim]. Viewing tables as f[rows, width] is free."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends.base import SUBLANES, Change, gathered, scaled
from jaxrank.features import PAD

CHUNK = 8192  # rows that are changed at a time on CPU. Four times as many vectors are added.


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """A `VectorLayout`. width: of a stored row, at least `dim`."""

    dim: int
    width: int

    @property
    def unit(self) -> int:
        return 1

    @property
    def buffer_unit(self) -> int:
        return SUBLANES

    def length(self, count: int) -> int:
        return count

    def zeros(self, count: int, dtype: Any) -> jax.Array:
        return jnp.zeros((count, self.dim), dtype)

    def view(self, stored: jax.Array) -> jax.Array:
        return stored.reshape(-1, self.width)

    def take(
        self, source: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        return self._taken(source, index, scale)

    def _taken(self, source: jax.Array, index: jax.Array, scale: jax.Array | None) -> jax.Array:
        """Reads vectors like `take`, in XLA, which fuses the reads into the additions."""
        return scaled(self._gather(source, index)[:, : self.dim], scale)

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
            added = scaled(source, scale)
            return block.at[at].add(added, mode="drop", indices_are_sorted=rising)

        def add(is_sorted: bool, block: Any, at: Any, index: Any, scale: Any) -> jax.Array:
            added = self._taken(source, index, scale)
            return block.at[at].add(added, mode="drop", indices_are_sorted=is_sorted)

        # On CPU one chunk at a time, so that its vectors stay in the cache until they are added.
        add_by_chunk = functools.partial(
            _fold_overlapping_chunks,
            functools.partial(add, False),
            size=4 * CHUNK,
            count=at.shape[0],
        )
        return jax.lax.platform_dependent(
            block, at, index, scale, cpu=add_by_chunk, default=functools.partial(add, rising)
        )

    def sum_sorted(self, rank: jax.Array, block: jax.Array, order: jax.Array) -> jax.Array:
        return self.add(jnp.zeros_like(block), rank, block, order, rising=True)

    def from_examples(self, vectors: jax.Array) -> jax.Array:
        return vectors.reshape(-1, self.dim)

    def to_examples(self, block: jax.Array, examples: int, places: int) -> jax.Array:
        return block.reshape(examples, places, self.dim)

    def change(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        def add_by_chunk(arrays: Any, row: jax.Array, sums: jax.Array) -> Any:
            def set_rows(arrays: Any, row: jax.Array, sums: jax.Array) -> Any:
                return self._set_rows(arrays, row, sums, change)

            count = jnp.sum(row != PAD, dtype=jnp.int32)
            return _fold_overlapping_chunks(set_rows, arrays, row, sums, size=CHUNK, count=count)

        def add_at_once(arrays: Any, row: jax.Array, sums: jax.Array) -> Any:
            return self._add_to_rows(arrays, row, sums, change)

        # On CPU, rows of PAD would cost as much as real rows.
        return jax.lax.platform_dependent(arrays, row, sums, cpu=add_by_chunk, default=add_at_once)

    def _set_rows(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        """Sets rows, because with a scatter-add XLA on CPU would copy the array in every step.

        Nothing in such a program says that the array is read before it is written.
        """
        stored = jax.tree.map(lambda a: self._gather(self._rows(a), row), arrays)
        changes = change(jax.tree.map(self._short, stored), sums, row)

        def write(array: jax.Array, before: jax.Array, change: jax.Array) -> jax.Array:
            new = before + self._padded(change)
            return self._rows(array).at[row].set(new, mode="drop").reshape(array.shape)

        return jax.tree.map(write, arrays, stored, changes)

    def _add_to_rows(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        """Adds to rows, behind a barrier.

        Without it, XLA on GPU fuses the read of an array into the scatter that changes it. The
        scatter then needs a copy of the whole array.
        """
        stored = jax.tree.map(
            lambda a: jax.lax.optimization_barrier(self._gather(self._rows(a), row)), arrays
        )
        changes = change(jax.tree.map(self._short, stored), sums, row)

        def write(array: jax.Array, change: jax.Array) -> jax.Array:
            target = self._rows(array).at[row]  # PAD occurs often, but is never written
            new = target.add(self._padded(change), mode="drop", unique_indices=True)
            return new.reshape(array.shape)

        return jax.tree.map(write, arrays, changes)

    def change_all(self, arrays: Any, sums: jax.Array, change: Change) -> Any:
        seen = jax.tree.map(lambda a: self._short(self._rows(a)), arrays)
        changes = change(seen, sums, jnp.arange(len(sums), dtype=jnp.int32))
        return jax.tree.map(lambda a, c: a + self._padded(c).reshape(a.shape), arrays, changes)

    def _gather(self, array: jax.Array, row: jax.Array) -> jax.Array:
        """Reads rows. The layout of CPU overrides it with native code."""
        return gathered(array, row)

    def _rows(self, array: jax.Array) -> jax.Array:
        return self.view(array) if array.ndim == 2 else array

    def _short(self, rows: jax.Array) -> jax.Array:
        return rows[:, : self.dim] if rows.ndim == 2 else rows

    def _padded(self, change: jax.Array) -> jax.Array:
        if change.ndim == 1 or self.width == self.dim:
            return change
        return jnp.pad(change, ((0, 0), (0, self.width - self.dim)))


def _fold_overlapping_chunks(
    body: Callable[..., Any], carry: Any, at: jax.Array, *arrays: Any, size: int, count: Any
) -> Any:
    """Repeats carry = body(carry, *chunks of `at` i32[m] and of the arrays [m, ...]) up to `count`.

    The arrays are too large to be padded. Instead the last chunk overlaps the one before it, with
    PAD for `at` in the overlap.
    """
    if not at.shape[0]:
        return carry
    size = min(size, at.shape[0])

    def run_chunk(i: jax.Array, carry: Any) -> Any:
        first = jnp.minimum(i * size, at.shape[0] - size)
        positions, *chunk = jax.tree.map(
            lambda a: jax.lax.dynamic_slice_in_dim(a, first, size), (at, *arrays)
        )
        is_done = first + jnp.arange(size, dtype=jnp.int32) < i * size
        return body(carry, jnp.where(is_done, PAD, positions), *chunk)

    return jax.lax.fori_loop(0, (count + size - 1) // size, run_chunk, carry)
