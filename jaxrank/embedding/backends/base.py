"""Blocks: how vectors lie in memory on their way between tables, buffers and the model.

A block is an array of vectors of one stack, one after another, in the form that suits the platform.

`xla` is that of CPU and GPU, `tpu` that of TPU.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax

from jaxrank.native.fusion import fusion_barrier

SUBLANES = 8  # rows of a tile of 32-bit numbers on TPU; the same elsewhere, for equal rounds

# (arrays of some rows, f[k, dim] or f[k]; their summed gradients f[k, dim]; their places i32[k])
# -> the change of the arrays.
Change = Callable[[Any, jax.Array, jax.Array], Any]


class VectorLayout(Protocol):
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

    def sum_sorted(self, rank: jax.Array, block: jax.Array, order: jax.Array) -> jax.Array:
        """The sums of the vectors of equal rank, each at its rank, zero where there is none, in a
        block as long as that which is given.

        Args:
            rank: i32[k], rising, PAD behind the last; the same may occur very often.
            order: i32[k], where in the block the vector of each is.
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
            row: i32[k], different, PAD behind the last; for `TpuLayout` rising.
            sums: the block of their gradients.
        """
        ...

    def change_all(self, arrays: Any, sums: jax.Array, change: Change) -> Any:
        """`change` of all rows."""
        ...


def round_up(count: int, unit: int) -> int:
    """The least multiple of `unit` that is at least `count`."""
    return -(-count // unit) * unit


def gathered(array: jax.Array, row: jax.Array) -> jax.Array:
    """f[k, ...]: what is at i32[k] along the first axis; zero for PAD."""
    return fusion_barrier(
        lambda array, row: array.at[row].get(mode="fill", fill_value=0), array, row
    )


def scaled(vectors: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Vectors f[k, n] times f[k], or as they are."""
    return vectors if scale is None else vectors * scale[:, None].astype(vectors.dtype)
