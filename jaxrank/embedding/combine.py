"""Combines the vectors of packed lists to one vector per list, and spreads gradients back."""

import jax
import jax.numpy as jnp

from jaxrank.embedding.backends.base import VectorLayout, round_up
from jaxrank.embedding.backends.lazy import IndexedVectors
from jaxrank.features import PAD, Lists


def _segments(lists: Lists, examples: int, per_example: int, unit: int) -> jax.Array:
    """Computes the index of each id's list in the combined block, i32[groups * capacity].

    The indices must rise, so PAD entries get the last list of their group, to which they add zeros.
    """
    groups = lists.segments.shape[0]
    of_group = examples // groups
    segments = jnp.where(lists.segments == PAD, of_group * per_example - 1, lists.segments)
    places = round_up(per_example, unit)
    if places != per_example:
        example, index = jnp.divmod(segments, per_example)
        segments = example * places + index
    begin = jnp.arange(groups, dtype=jnp.int32)[:, None] * (of_group * places)
    return (segments + begin).reshape(-1)


def combine(
    vector_layout: VectorLayout,
    vectors: IndexedVectors,
    lists: Lists,
    examples: int,
    per_example: int,
    *,
    is_plain: bool,
) -> jax.Array:
    """Computes the weighted sum of each list's vectors, f[examples, per_example, dim].

    is_plain: the weights of all ids are 1, so weights are not read.
    """
    combined = vector_layout.add(
        vector_layout.zeros(
            examples * round_up(per_example, vector_layout.unit), vectors.source.dtype
        ),
        _segments(lists, examples, per_example, vector_layout.unit),
        vectors.source,
        vectors.index,
        scale=None if is_plain else lists.weights.reshape(-1),
        rising=True,
    )
    return vector_layout.to_examples(combined, examples, per_example)


def spread(
    vector_layout: VectorLayout, grads: jax.Array, lists: Lists, *, is_plain: bool
) -> IndexedVectors:
    """Computes the transpose of `combine`: the gradient of each id's vector.

    grads: f[examples, lists, dim].
    """
    examples, per_example, _ = grads.shape
    segments = _segments(lists, examples, per_example, vector_layout.unit)
    weights = None if is_plain else lists.weights.reshape(-1)
    return IndexedVectors(segments.shape[0], vector_layout.from_examples(grads), segments, weights)
