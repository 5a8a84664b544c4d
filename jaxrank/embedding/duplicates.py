"""Sums the gradients of ids that occur more than once, so that each row is updated once.

There are two implementations in XLA with one result, and a third in `cpu_rows`.

On CPU a key-value sort costs many times the gather and the scatter. A scratch array with one number
per row therefore selects one position of each id as its representative. The scratch array is never
cleared, because a step reads only the numbers that it wrote.

On other platforms the ids are sorted. On GPU this also keeps duplicates away from the float
scatter-add, which is very slow with duplicates in jaxlib 0.10.2 to 0.11.0.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends import lazy
from jaxrank.embedding.backends.base import VectorLayout
from jaxrank.embedding.backends.lazy import IndexedVectors
from jaxrank.features import PAD


def sum_by_scratch(
    vector_layout: VectorLayout, ids: jax.Array, grads: Sequence[IndexedVectors], scratch: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums duplicates like `sum_by_sort`, with a scratch array instead of a sort.

    Args:
        ids: i32[n], each below the number of rows, or PAD.
        scratch: i32[rows].

    Returns:
        The distinct ids i32[n] in no particular order, the block of their sums, and the scratch
        array.
    """
    count = ids.shape[0]
    positions = jnp.arange(count, dtype=jnp.int32)
    scratch = scratch.at[ids].set(positions, mode="drop")
    representative = scratch.at[ids].get(mode="fill", fill_value=count)
    is_representative = representative == positions
    # Representatives move to the front, so that later code reads and writes contiguous memory.
    rank = jnp.cumsum(is_representative, dtype=jnp.int32) - 1
    distinct_index = rank.at[representative].get(mode="fill", fill_value=count)
    sums = lazy.add(
        vector_layout, vector_layout.zeros(count, grads[0].source.dtype), distinct_index, grads
    )
    unique = jnp.full_like(ids, PAD)
    unique = unique.at[jnp.where(is_representative, rank, count)].set(ids, mode="drop")
    return unique, sums, scratch


def sort_ids(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts ids i32[n]. PAD is ignored.

    Returns:
        order: i32[n], the permutation that sorts them.
        rank: i32[n], rising, the distinct index of each sorted id. PAD for PAD.
        unique: i32[n], the distinct ids, rising, with PAD behind the last.
    """
    ordered, order = jax.lax.sort_key_val(ids, jnp.arange(ids.shape[0], dtype=jnp.int32))
    is_first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    rank = jnp.where(ordered == PAD, PAD, running_count(is_first) - 1)
    unique = jnp.full_like(ids, PAD)
    unique = unique.at[jnp.where(is_first, rank, PAD)].set(ordered, mode="drop")
    return order, rank, unique


def sum_by_sort(
    vector_layout: VectorLayout, ids: jax.Array, grads: Sequence[IndexedVectors]
) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of each distinct id.

    Args:
        ids: i32[n]. PAD is ignored.
        grads: the gradients of these ids.

    Returns:
        The distinct ids i32[n], rising, with PAD behind the last, and the block of their sums, with
        zeros behind the last.
    """
    order, rank, unique = sort_ids(ids)
    block = lazy.joined(vector_layout, grads)
    return unique, vector_layout.sum_sorted(rank, block, order)


def add_squares(
    vector_layout: VectorLayout,
    total: jax.Array,
    ids: jax.Array,
    grads: Sequence[IndexedVectors],
    row: jax.Array | None = None,
) -> jax.Array:
    """Adds the squares of the summed gradients of each distinct id to f[].

    Args:
        total, ids, grads: see `sum_by_sort`.
        row: is ignored; see `tables.Arrivals`.
    """
    _, sums = sum_by_sort(vector_layout, ids, grads)
    return total + jnp.sum(jnp.square(sums))


def running_count(flags: jax.Array) -> jax.Array:
    """Counts the set flags of bool[n] up to and including each position, i32[n]."""

    def plain(flags: jax.Array) -> jax.Array:
        return jnp.cumsum(flags, dtype=jnp.int32)

    return jax.lax.platform_dependent(flags, tpu=count_by_products, default=plain)


def count_by_products(flags: jax.Array) -> jax.Array:
    """Computes `running_count` for TPU, whose compiler needs half a minute for a long cumsum."""
    return _running_sum(flags.astype(jnp.float32))


def _running_sum(counts: jax.Array) -> jax.Array:
    """Computes the running sum i32[n] of whole numbers f32[n]."""
    size = counts.shape[0]
    if size <= 4096:
        return jnp.cumsum(counts.astype(jnp.int32))
    lines = jnp.pad(counts, (0, -size % 128)).reshape(-1, 128)
    triangle = jnp.triu(jnp.ones((128, 128), jnp.float32))
    # Exact below 2**24: a float32 product of whole numbers is exact at this precision.
    prefix = jnp.dot(lines, triangle, precision=jax.lax.Precision.HIGHEST)
    whole = prefix[:, -1]
    before = _running_sum(whole) - whole.astype(jnp.int32)
    return (before[:, None] + prefix.astype(jnp.int32)).reshape(-1)[:size]


def sum_of_rows(
    vector_layout: VectorLayout,
    ids: jax.Array,
    grads: Sequence[IndexedVectors],
    rows: int,
    *,
    by_scatter: bool,
) -> tuple[jax.Array, jax.Array]:
    """Sums the gradients of a small number of rows and counts their reads.

    Args:
        ids: i32[n], each below `rows`. PAD is ignored.
        grads: the gradients of these ids.
        by_scatter: scatters duplicates without sorting them first.

    Returns:
        The block of the sums, and the number of reads of each row, f[rows]. The number is only
        guaranteed to be above 0 for rows that are read.
    """
    if not by_scatter:
        return sum_once(vector_layout, *sum_by_sort(vector_layout, ids, grads), rows)
    dtype = grads[0].source.dtype
    sums = lazy.add(vector_layout, vector_layout.zeros(rows, dtype), ids, grads)
    return sums, jnp.zeros(rows, dtype).at[ids].add(1, mode="drop")


def sum_once(
    vector_layout: VectorLayout, ids: jax.Array, grads: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Computes `sum_of_rows` for distinct, rising ids i32[n] with PAD behind the last."""
    sums = vector_layout.add(vector_layout.zeros(rows, grads.dtype), ids, grads, rising=True)
    return sums, jnp.zeros(rows, grads.dtype).at[ids].set(1, mode="drop")
