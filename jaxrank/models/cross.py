"""Cross networks: explicit products of features, one degree higher with every layer.

Both keep the width of their input and, with zero layers, return it. The precision of the matrix
products is always stated, because float32 products on TPU are bfloat16 ones by default.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

KERNEL_INIT = nn.initializers.glorot_normal()


def param_dtype(x: ArrayLike) -> jnp.dtype:
    """The dtype of parameters for this input: its own, but never less than float32."""
    return jnp.promote_types(jnp.float32, jnp.result_type(x))


class VectorCross(nn.Module):
    """x_{l+1} = x_0 * (x_l . w_l) + b_l + x_l, with x_0 the input.

    Parameters a layer: `layer_l` kernel [F, 1] (Glorot normal) and `bias_l` [F] (zero).

    References:
        Wang et al., Deep & Cross Network for Ad Click Predictions, ADKDD 2017.
    """

    layers: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, x0: jax.Array) -> jax.Array:  # f[B, F] -> f[B, F]
        dtype = param_dtype(x0)
        x = x0
        for layer in range(self.layers):
            projection = nn.Dense(
                1,
                use_bias=False,
                precision=self.precision,
                kernel_init=KERNEL_INIT,
                param_dtype=dtype,
                name=f"layer_{layer}",
            )(x)
            bias = self.param(f"bias_{layer}", nn.initializers.zeros, (x0.shape[-1],), dtype)
            x = x0 * projection + bias[None, :] + x
        return x


class MatrixCross(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l, with x_0 the input.

    Parameters a layer: `layer_l` kernel [F, F] (Glorot normal) and bias [F] (zero).

    References:
        Wang et al., DCN V2: Improved Deep & Cross Network, WWW 2021.
    """

    layers: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, x0: jax.Array) -> jax.Array:  # f[B, F] -> f[B, F]
        x = x0
        for layer in range(self.layers):
            product = nn.Dense(
                x0.shape[-1],
                precision=self.precision,
                kernel_init=KERNEL_INIT,
                param_dtype=param_dtype(x0),
                name=f"layer_{layer}",
            )(x)
            x = x0 * product + x
        return x
