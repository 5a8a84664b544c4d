"""Packed lists: the vectors of their ids combined to one vector a list, and back for gradients."""

import jax
import jax.numpy as jnp

from jaxrank.features import PAD, Lists


def _segments(lists: Lists, total: int) -> jax.Array:
    """Which of the `total` lists (example by example) each id belongs to, i32[groups * capacity].

    Rising, so PAD stands for the last list of its group, to which it adds zeros.
    """
    groups = lists.segments.shape[0]
    per_group = total // groups
    begin = jnp.arange(groups, dtype=jnp.int32)[:, None] * per_group
    segments = jnp.where(lists.segments == PAD, per_group - 1, lists.segments)
    return (segments + begin).reshape(-1)


def combine(vectors: jax.Array, lists: Lists, total: int) -> jax.Array:
    """f[groups * capacity, dim] -> f[total, dim]: the weighted sum of each list's vectors."""
    weights = lists.weights.reshape(-1, 1).astype(vectors.dtype)
    return jax.ops.segment_sum(
        vectors * weights,
        _segments(lists, total),
        num_segments=total,
        indices_are_sorted=True,
    )


def spread(grads: jax.Array, lists: Lists) -> jax.Array:
    """The transpose of `combine`: f[total, dim] -> the gradient of each id's vector."""
    segments = _segments(lists, grads.shape[0])
    weights = lists.weights.reshape(-1, 1).astype(grads.dtype)
    return grads[segments] * weights
