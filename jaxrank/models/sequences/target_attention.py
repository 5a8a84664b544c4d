"""Target attention: weights of events by their similarity to the candidate."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.models.inputs import flat_events
from jaxrank.models.products import Dense, param_dtype, unrounded


class TargetAttention(nn.Module):
    """sum_l a_l v_l with weights a_l = tower(v_l, c, k_l * c) of events v_l and the candidate c.

    k_l are the parts of v_l that are compared with the candidate. The weights are not normalised,
    so that the number of similar events has an effect. The first layer is linear in v_l and c, so
    their difference, which the paper also reads, would add nothing. Empty places have weight 0.

    References:
        Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018.
    """

    mlp_units: tuple[int, ...]
    precision: str

    @nn.compact
    def __call__(
        self, vectors: jax.Array, mask: jax.Array, keys: jax.Array, candidate: jax.Array
    ) -> jax.Array:
        """Maps vectors f[B, L, dim], mask bool[B, L], keys f[B, L, n] and a candidate f[B, n] to
        f[B, dim].
        """
        length, (first, *others) = vectors.shape[1], self.mlp_units
        products = keys * candidate[:, None, :]
        hidden = Dense(first, self.precision, name="event")(
            flat_events(vectors), flat_events(products)
        )
        shared = Dense(first, self.precision, use_bias=False, name="candidate")(candidate)
        hidden = nn.relu(hidden.reshape(-1, length, first) + shared[:, None, :])
        hidden = flat_events(hidden.astype(param_dtype(hidden)))
        for i, width in enumerate(others):
            hidden = Dense(width, self.precision, form="relu", name=f"layer_{i + 1}")(hidden)
        scores = Dense(1, unrounded(self.precision), name="score")(hidden)
        weights = jnp.where(mask, scores.reshape(-1, length), 0)
        return (vectors * weights[:, :, None].astype(vectors.dtype)).sum(axis=1)
