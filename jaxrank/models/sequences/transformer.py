"""Causal self-attention over the events of a sequence."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.errors import InputError
from jaxrank.models.inputs import flat_events
from jaxrank.models.products import Dense, param_dtype, product, unrounded
from jaxrank.models.tower import EPSILON


class Transformer(nn.Module):
    """The state of the newest event, the first place, after causal self-attention.

    An event attends to itself and to older events, at later places. Blocks normalise their inputs.
    The last block is computed for the newest event only. The result of an empty list is 0.

    References:
        Kang and McAuley, Self-Attentive Sequential Recommendation, ICDM 2018.
        Xiong et al., On Layer Normalization in the Transformer Architecture, ICML 2020.
    """

    layers: int
    heads: int
    positions: bool
    precision: str

    @nn.compact
    def __call__(self, vectors: jax.Array, mask: jax.Array) -> jax.Array:
        """Maps vectors f[B, L, dim] and mask bool[B, L] to f[B, dim]."""
        length, dim = vectors.shape[1:]
        if dim % self.heads:
            raise InputError(
                "model.sequences: heads must divide the sum of the dimensions of the sequence's"
                f" features, {dim}: found {self.heads}."
            )
        x = vectors.astype(param_dtype(vectors))
        if self.positions:
            normal = nn.initializers.normal(0.02)
            x = x + self.param("position", normal, (length, dim), x.dtype)[None]
        place = jnp.arange(length)
        # bool[B, events that read, events that are read]
        visible = mask[:, None, :] & (place[:, None] <= place[None, :])[None]
        for i in range(self.layers):
            readers = 1 if i == self.layers - 1 else length
            block = _Block(self.heads, self.precision, name=f"block_{i}")
            x = block(x, visible[:, :readers])
        newest = _norm(x, "norm")[:, 0]
        return jnp.where(mask[:, :1], newest, 0)


class _Block(nn.Module):
    """Attention and a layer of twice the width, each added to its input."""

    heads: int
    precision: str

    @nn.compact
    def __call__(self, x: jax.Array, visible: jax.Array) -> jax.Array:
        """Maps x f[B, L, dim] and visible bool[B, n, L] to f[B, n, dim], of the first n events."""
        dim, readers = x.shape[2], visible.shape[1]
        size = dim // self.heads
        read = _norm(x, "norm_attention")

        def heads(name: str, events: jax.Array) -> jax.Array:  # f[B, heads, events, size]
            y = Dense(dim, unrounded(self.precision), name=name)(flat_events(events))
            return jnp.swapaxes(y.reshape(-1, events.shape[1], self.heads, size), 1, 2)

        queries = heads("query", read[:, :readers])
        keys, values = heads("key", read), heads("value", read)
        scores = product(queries, jnp.swapaxes(keys, 2, 3), unrounded(self.precision)) / size**0.5
        # Not -inf: the softmax of an empty list and its gradient would be NaN.
        scores = jnp.where(visible[:, None], scores, jnp.finfo(scores.dtype).min)
        mixed = product(nn.softmax(scores, axis=-1), values, unrounded(self.precision))
        mixed = flat_events(jnp.swapaxes(mixed, 1, 2).reshape(-1, readers, dim))
        x = x[:, :readers] + Dense(dim, unrounded(self.precision), name="out")(mixed).reshape(
            -1, readers, dim
        )
        hidden = Dense(2 * dim, unrounded(self.precision), form="relu", name="wide")(
            flat_events(_norm(x, "norm_wide"))
        )
        narrow = Dense(dim, unrounded(self.precision), name="narrow")(hidden)
        return x + narrow.reshape(-1, readers, dim)


def _norm(x: jax.Array, name: str) -> jax.Array:
    return nn.LayerNorm(
        epsilon=EPSILON, param_dtype=param_dtype(x), use_fast_variance=False, name=name
    )(x)
