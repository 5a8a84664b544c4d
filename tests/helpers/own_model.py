"""A user-defined model: products of one id's vector with the others, and a small tower."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.models import DENSE, Dropout, Inputs, Reading, register


@register("own")
class Own(nn.Module):
    tasks: int
    ids: tuple[str, ...] = ("c0",)
    width: int = 8
    dropout: float = 0.1

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        floats = jnp.stack([inputs.dense[name] for name in inputs.dense], axis=1)
        x = jnp.concatenate([*(inputs.vectors[name] for name in self.ids), floats], axis=1)
        x = nn.relu(nn.Dense(self.width, name="tower")(x))
        x = Dropout(self.dropout)(x, inputs.share, train=train)
        return nn.Dense(self.tasks, name="head")(x)

    def input_axes(self, inputs: Inputs) -> dict[str, Reading]:
        return {"tower/kernel": {0: (*self.ids, DENSE)}}
