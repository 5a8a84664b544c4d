"""Layers that read vectors: the interactions of DLRM, and the pool of a sequence."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.errors import InputError
from jaxrank.models.inputs import Share
from jaxrank.models.products import kept, param_dtype, product
from jaxrank.models.tower import Tower


class DotInteraction(nn.Module):
    """concat(bottom(dense), all v_i . v_j with i > j), where v are the vectors and bottom(dense).

    The bottom is a `Tower` of widths `bottom_mlp_units` and then the dimension of the vectors,
    which must all be equal. Without dense features there is no bottom. For m vectors v it returns
    m (m - 1) / 2 dot products, (1,0), (2,0), (2,1), (3,0) ..., computed as one product of all m * m
    pairs.

    tower: makes a `Tower` of (widths, name=).

    References:
        Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation
        Systems, 2019.
    """

    bottom_mlp_units: tuple[int, ...]
    tower: Callable[..., Tower]
    precision: str = "highest"

    @nn.compact
    def __call__(
        self, dense: jax.Array, vectors: tuple[jax.Array, ...], share: Share, *, train: bool
    ) -> jax.Array:
        """Maps dense f[B, n], vectors (f[B, n_i, dim], ...) to f[B, dim + m (m - 1) / 2]."""
        dims = sorted({v.shape[2] for v in vectors})
        if len(dims) != 1:
            raise InputError(
                "model.cross: 'dlrm' must have vectors of one dimension for all tables: found"
                f" {dims or 'no vectors'}. Set embedding.dim for all, or another model.cross."
            )
        parts = list(vectors)
        bottom = []
        if dense.shape[1]:
            widths = (*self.bottom_mlp_units, *dims)
            bottom.append(self.tower(widths, name="bottom")(dense, share, train=train))
            parts.insert(0, bottom[0][:, None, :])
        every = kept(jnp.concatenate(parts, axis=1), self.precision)
        count = every.shape[1]
        if count < 2:
            raise InputError(
                "model.cross: 'dlrm' must have two vectors, or one and dense features, to multiply:"
                " found 1."
            )
        dots = product(every, every.swapaxes(1, 2), self.precision)
        later, earlier = np.tril_indices(count, -1)
        # Declared sorted and unique, or XLA on GPU adds up their gradients number by number.
        pairs = (
            dots.reshape(-1, count * count)
            .at[:, later * count + earlier]
            .get(unique_indices=True, indices_are_sorted=True)
        )
        return jnp.concatenate([*bottom, pairs], axis=1)


class AttentionPool(nn.Module):
    """sum_l a_l v_l with a = softmax(v q / sqrt(dim)) over the places of a list that are filled.

    The pool of an empty list is zero. Parameter: `query` q [dim], initially zero, so that the pool
    starts as a mean.

    References:
        Yang et al., Hierarchical Attention Networks, NAACL 2016 (a learned query).
    """

    @nn.compact
    def __call__(self, vectors: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps vectors f[B, L, dim] and mask bool[B, L] to f[B, dim]."""
        dim = vectors.shape[-1]
        query = self.param("query", nn.initializers.zeros, (dim,), param_dtype(vectors))
        scores = (vectors * query[None, None, :]).sum(axis=-1) / dim**0.5
        # Not -inf: the softmax of an empty list and its gradient would be NaN.
        scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0)
        return (vectors * weights[:, :, None]).sum(axis=1)
