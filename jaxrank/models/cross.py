"""Cross networks: explicit products of features, one degree higher with every layer.

All keep the width F of their input x_0 and, with zero layers, return it. They also return x_0, and
later layers should read that x_0: see `products.layer`.

References:
    Wang et al., Deep & Cross Network for Ad Click Predictions, ADKDD 2017 (DCN).
    Wang et al., DCN V2: Improved Deep & Cross Network, WWW 2021 (DCN-V2 and DCN-Mix).
"""

import functools
from collections.abc import Mapping
from typing import TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.models.products import (
    STACKED_KERNEL_INIT,
    Dense,
    StackedDense,
    param_dtype,
    unrounded,
)

Crossed: TypeAlias = tuple[jax.Array, jax.Array]  # x_L and x_0, f[B, F]


class VectorCross(nn.Module):
    """x_{l+1} = x_0 * (x_l . w_l) + b_l + x_l: DCN.

    Parameters per layer: `layer_l` kernel [F, 1] (Glorot normal) and `bias_l` [F] (zero).
    """

    layers: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, x0: jax.Array) -> Crossed:  # f[B, F]
        dtype = param_dtype(x0)
        # The gradient is a sum over all features.
        precision = unrounded(self.precision)
        x = x0
        for layer in range(self.layers):
            projection = Dense(1, precision, use_bias=False, name=f"layer_{layer}")(x)
            bias = self.param(f"bias_{layer}", nn.initializers.zeros, (x0.shape[-1],), dtype)
            x = (x0 * projection + bias[None, :] + x).astype(x0.dtype)
        return x, x0

    def read_axes(self) -> dict[str, tuple[int, ...]]:
        """Returns {array: axes along x0}."""
        return _each(self.layers, {"layer_{}/kernel": (0,), "bias_{}": (0,)})


class MatrixCross(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l: DCN-V2.

    Parameters per layer: `layer_l` kernel [F, F] (Glorot normal) and bias [F] (zero).
    """

    layers: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, x0: jax.Array) -> Crossed:  # f[B, F]
        x = x0
        for layer in range(self.layers):
            dense = Dense(x0.shape[-1], self.precision, form="cross", name=f"layer_{layer}")
            x, x0 = dense(x, x0=x0)
        return x, x0

    def read_axes(self) -> dict[str, tuple[int, ...]]:
        """Returns {array: axes along x0}."""
        return _each(self.layers, {"layer_{}/kernel": (0, 1), "layer_{}/bias": (0,)})


class LowRankCross(nn.Module):
    """x_{l+1} = x_0 * (U_l (V_l^T x_l) + b_l) + x_l: DCN-V2 with a matrix of low rank.

    Parameters per layer: `down_l` kernel V_l [F, rank], `up_l` kernel U_l^T [rank, F] (both Glorot
    normal) and its bias b_l [F] (zero).
    """

    layers: int
    rank: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, x0: jax.Array) -> Crossed:  # f[B, F]
        x = x0
        for layer in range(self.layers):
            low = Dense(self.rank, self.precision, use_bias=False, name=f"down_{layer}")(x)
            up = Dense(x0.shape[-1], self.precision, form="cross", name=f"up_{layer}")
            x, x0 = up(low, x0=x0, past=x)
        return x, x0

    def read_axes(self) -> dict[str, tuple[int, ...]]:
        """Returns {array: axes along x0}."""
        axes = {"down_{}/kernel": (0,), "up_{}/kernel": (1,), "up_{}/bias": (0,)}
        return _each(self.layers, axes)


class MixCross(nn.Module):
    """x_{l+1} = sum_i G_i(x_l) E_i(x_l) + x_l, a mixture of K experts of low rank: DCN-Mix.

    E_i(x_l) = x_0 * (U_i tanh(C_i tanh(V_i^T x_l)) + b_l) and G = softmax(W_l x_l) over the
    experts. The paper does not fix the activation, allows softmax and sigmoid gates, and has one
    bias per layer. Gates that add up to one reduce the sum to one product:
    x_0 * (sum_i U_i (G_i tanh(...)) + b_l).

    Parameters per layer: `gate_l` kernel W_l^T [F, K]; `down_l` kernel [K, F, rank], the V_i;
    `core_l` kernel [K, rank, rank], the C_i^T; `up_l` kernel [K * rank, F], the U_i^T stacked, and
    its bias b_l [F]. Kernels start Glorot normal with the fan of one expert, the bias at zero.
    """

    layers: int
    rank: int
    experts: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, x0: jax.Array) -> Crossed:  # f[B, F]
        stacked = functools.partial(
            StackedDense, self.experts, self.rank, self.precision, use_bias=False
        )
        precision = unrounded(self.precision)
        x = x0
        for layer in range(self.layers):
            gate = Dense(self.experts, precision, use_bias=False, name=f"gate_{layer}")(x)
            low = jnp.tanh(stacked(name=f"down_{layer}")(x))
            low = jnp.tanh(stacked(name=f"core_{layer}")(low))
            low = low * jax.nn.softmax(gate, axis=-1)[:, :, None]
            init = functools.partial(_init_of_each, self.experts)
            up = Dense(
                x0.shape[-1], self.precision, kernel_init=init, form="cross", name=f"up_{layer}"
            )
            x, x0 = up(low.reshape(low.shape[0], -1), x0=x0, past=x)
        return x, x0

    def read_axes(self) -> dict[str, tuple[int, ...]]:
        """Returns {array: axes along x0}."""
        axes = {"down_{}/kernel": (1,), "up_{}/kernel": (1,), "up_{}/bias": (0,)}
        return _each(self.layers, {"gate_{}/kernel": (0,), **axes})


def _each(layers: int, axes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name.format(i): array_axes for i in range(layers) for name, array_axes in axes.items()}


def _init_of_each(
    experts: int, key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype
) -> jax.Array:
    each = (experts, shape[0] // experts, shape[1])
    return STACKED_KERNEL_INIT(key, each, dtype).reshape(shape)
