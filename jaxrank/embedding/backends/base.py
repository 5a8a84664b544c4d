"""The protocol of vector layouts, which store blocks of vectors in the form of a platform.

A block is an array of vectors of one stack, one after another. Blocks are passed between tables,
buffers and the model. `xla` has the layout of CPU and GPU, `tpu` the layout of TPU.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxrank.native.fusion import fusion_barrier

SUBLANES = 8  # rows of a tile of 32-bit numbers on TPU; the same elsewhere, for equal rounds

# Computes the change of the arrays from: arrays of some rows, f[k, dim] or f[k], their summed
# gradients f[k, dim], and their local rows i32[k].
Change = Callable[[Any, jax.Array, jax.Array], Any]


class VectorLayout(Protocol):
    """The layout of blocks of one stack in memory.

    An index is i32[...]. Nothing is read or written at an index that is PAD.
    """

    @property
    def unit(self) -> int:
        """A block is padded with zeros to a multiple of this number of vectors."""
        ...

    @property
    def buffer_unit(self) -> int:
        """The capacity of an exchange buffer is a multiple of this number of ids."""
        ...

    def length(self, count: int) -> int:
        """Returns the length of the first axis of a block of `count` vectors."""
        ...

    def zeros(self, count: int, dtype: Any) -> jax.Array:
        """Makes a block of `count` zero vectors."""
        ...

    def view(self, stored: jax.Array) -> jax.Array:
        """Views the stored array of a table as a source of `take` and `add`, indexed by row."""
        ...

    def take(
        self, source: jax.Array, index: jax.Array, scale: jax.Array | None = None
    ) -> jax.Array:
        """Reads the block of vectors at i32[k] of a block or a view, times f[k]. Zero for PAD."""
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
        """Adds the vectors of `source` at `index`, times f[k], to the block at `at`.

        Args:
            source: a block or a view.
            index: i32[k], or None for all vectors of a block.
            rising: `at` rises, and everything behind a PAD is PAD too.
        """
        ...

    def sum_sorted(self, rank: jax.Array, block: jax.Array, order: jax.Array) -> jax.Array:
        """Sums the vectors of equal rank, in a block as long as `block`.

        The sum of a rank is at that rank, and zero where no vector has the rank.

        Args:
            rank: i32[k], rising, with PAD behind the last. A rank may occur very often.
            order: i32[k], the index of each vector in the block.
        """
        ...

    def from_examples(self, vectors: jax.Array) -> jax.Array:
        """Converts f[B, places, dim] to a block, padding each example to a multiple of `unit`."""
        ...

    def to_examples(self, block: jax.Array, examples: int, places: int) -> jax.Array:
        """Converts a block to f[B, places, dim]: the inverse of `from_examples`."""
        ...

    def change(self, arrays: Any, row: jax.Array, sums: jax.Array, change: Change) -> Any:
        """Changes some rows of the stored arrays of a table.

        Args:
            arrays: a tree of f[rows * width / 128, 128] and f[rows].
            row: i32[k], distinct rows with PAD behind the last. Must rise for `TpuLayout`.
            sums: the block of their gradients.
        """
        ...

    def change_all(self, arrays: Any, sums: jax.Array, change: Change) -> Any:
        """Applies `change` to all rows."""
        ...


def round_up(count: int, unit: int) -> int:
    """Computes the smallest multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit


def gathered(array: jax.Array, row: jax.Array) -> jax.Array:
    """Reads f[k, ...] at i32[k] along the first axis. Zero for PAD."""
    return fusion_barrier(
        lambda array, row: array.at[row].get(mode="fill", fill_value=0), array, row
    )


def scaled(vectors: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Multiplies vectors f[k, n] by f[k], or returns them unchanged."""
    return vectors if scale is None else vectors * scale[:, None].astype(vectors.dtype)
