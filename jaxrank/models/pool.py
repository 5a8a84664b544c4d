"""A sequence of vectors -> one vector."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.models.products import param_dtype


class AttentionPool(nn.Module):
    """sum_l a_l v_l with a = softmax(v q / sqrt(dim)) over the places of a list that are filled.

    An empty list gives zeros. Parameter: `query` q [dim], zero at first, so that the pool begins as
    a mean.

    References:
        Yang et al., Hierarchical Attention Networks, NAACL 2016 (a learned query).
    """

    @nn.compact
    def __call__(self, vectors: jax.Array, mask: jax.Array) -> jax.Array:
        """f[B, dim] of vectors f[B, L, dim] and mask bool[B, L]."""
        dim = vectors.shape[-1]
        query = self.param("query", nn.initializers.zeros, (dim,), param_dtype(vectors))
        scores = (vectors * query[None, None, :]).sum(axis=-1) / dim**0.5
        # Not -inf: the softmax of an empty list would be NaN, and so its gradient.
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0)
        return (vectors * weights[:, :, None]).sum(axis=1)
