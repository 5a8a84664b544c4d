"""A user-defined model: products of one id's vector with the others, and a small tower."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.models import DENSE, Dropout, Inputs, Reading, register
from jaxrank.validate import field


@register("own")
class Own(nn.Module):
    tasks: int
    ids: tuple[str, ...] = ("c0",)
    width: int = 8
    dropout: float = 0.1
    factors: Mapping[str, float] = field({}, help="id -> factor of its vectors")
    precision: str = field("coarse", choices=("fine", "coarse"), help="not that of products")

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        floats = jnp.stack([inputs.dense[name] for name in inputs.dense], axis=1)
        vectors = [self.factors.get(name, 1.0) * inputs.vectors[name] for name in self.ids]
        x = jnp.concatenate([*vectors, floats], axis=1)
        x = nn.relu(nn.Dense(self.width, name="tower")(x))
        x = Dropout(self.dropout)(x, inputs.share, train=train)
        return nn.Dense(self.tasks, name="head")(x)

    def input_axes(self, inputs: Inputs) -> dict[str, Reading]:
        return {"tower/kernel": {0: (*self.ids, DENSE)}}
