"""Sums the gradients of ids that occur more than once, so that each row is updated once.

Two ways by XLA, one result; `cpu_rows` is a third. On CPU a key-value sort costs many times the
gather and the scatter, so one position of each id is made its representative through a scratch
array with a number for each row; the scratch array need not be cleared, because only what this step
wrote is read. Elsewhere the ids are sorted; on GPU this also keeps duplicates away from the float
scatter-add, which is very slow with them in jaxlib 0.10.2 to 0.11.0.
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
    """As `sum_by_sort`, but not rising, through `scratch` i32[rows]; returns it too. All ids are
    < rows or PAD."""
    count = ids.shape[0]
    here = jnp.arange(count, dtype=jnp.int32)
    scratch = scratch.at[ids].set(here, mode="drop")
    representative = scratch.at[ids].get(mode="fill", fill_value=count)
    is_representative = representative == here
    # Representatives move to the front, so that what follows reads and writes memory in one run.
    rank = jnp.cumsum(is_representative, dtype=jnp.int32) - 1
    slot = rank.at[representative].get(mode="fill", fill_value=count)
    sums = lazy.add(vector_layout, vector_layout.zeros(count, grads[0].source.dtype), slot, grads)
    unique = jnp.full_like(ids, PAD)
    unique = unique.at[jnp.where(is_representative, rank, count)].set(ids, mode="drop")
    return unique, sums, scratch


def in_order(ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sorts ids i32[n], of which PAD takes no part.

    Returns:
        order: i32[n], the permutation that sorts them.
        rank: i32[n], rising: which of the different ids each of the sorted ones is; PAD for PAD.
        unique: i32[n] the different ids, rising, PAD behind the last.
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
    """Each id once, and the sum of its gradients.

    Args:
        ids: i32[n]; PAD takes no part.
        grads: of these ids.

    Returns:
        unique i32[n], rising, PAD behind the last; the block of their sums, zero behind.
    """
    order, rank, unique = in_order(ids)
    block = lazy.joined(vector_layout, grads)
    return unique, vector_layout.sum_sorted(rank, block, order)


def running_count(flags: jax.Array) -> jax.Array:
    """i32[n]: how many of the flags bool[n] are set up to each place, its own included."""

    def plain(flags: jax.Array) -> jax.Array:
        return jnp.cumsum(flags, dtype=jnp.int32)

    return jax.lax.platform_dependent(flags, tpu=count_by_products, default=plain)


def count_by_products(flags: jax.Array) -> jax.Array:
    """As `running_count`, for TPU, whose compiler takes half a minute over long cumsums."""
    return _running_sum(flags.astype(jnp.float32))


def _running_sum(counts: jax.Array) -> jax.Array:
    """f32[n], whole numbers -> i32[n]."""
    size = counts.shape[0]
    if size <= 4096:
        return jnp.cumsum(counts.astype(jnp.int32))
    lines = jnp.pad(counts, (0, -size % 128)).reshape(-1, 128)
    triangle = jnp.triu(jnp.ones((128, 128), jnp.float32))
    # Exact below 2**24, which a product of whole numbers in float32 is at this precision.
    within = jnp.dot(lines, triangle, precision=jax.lax.Precision.HIGHEST)
    whole = within[:, -1]
    before = _running_sum(whole) - whole.astype(jnp.int32)
    return (before[:, None] + within.astype(jnp.int32)).reshape(-1)[:size]


def sum_of_rows(
    vector_layout: VectorLayout,
    ids: jax.Array,
    grads: Sequence[IndexedVectors],
    rows: int,
    *,
    by_scatter: bool,
) -> tuple[jax.Array, jax.Array]:
    """The block of the sums of the gradients of each of a few rows, and how often each is read,
    f[rows] (above 0 for each row that is read).

    Args:
        ids: i32[n] below `rows`; PAD takes no part.
        grads: of these ids.
        by_scatter: duplicates may be scattered as they are.
    """
    if not by_scatter:
        return sum_once(vector_layout, *sum_by_sort(vector_layout, ids, grads), rows)
    dtype = grads[0].source.dtype
    sums = lazy.add(vector_layout, vector_layout.zeros(rows, dtype), ids, grads)
    return sums, jnp.zeros(rows, dtype).at[ids].add(1, mode="drop")


def sum_once(
    vector_layout: VectorLayout, ids: jax.Array, grads: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """As `sum_of_rows`, of ids i32[n] that are different and rise, PAD behind the last."""
    sums = vector_layout.add(vector_layout.zeros(rows, grads.dtype), ids, grads, rising=True)
    return sums, jnp.zeros(rows, grads.dtype).at[ids].set(1, mode="drop")
