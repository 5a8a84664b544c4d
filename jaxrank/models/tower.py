"""Tower: a stack of dense layers, the deep part of a model.

A model sees the examples of one device. `Share` describes the global batch. Batch normalisation
averages its statistics over all devices, and dropout is keyed by the index of an example in the
global batch. Neither depends on the number of devices.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.models.inputs import Share
from jaxrank.models.products import Dense, StackedDense, kept, param_dtype

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {"relu": nn.relu, "gelu": nn.gelu, "silu": nn.silu, "tanh": nn.tanh}
)
LEARNED_ACTIVATIONS = ("prelu", "dice")  # with parameters; see `LearnedActivation`
ALL_ACTIVATIONS = (*ACTIVATIONS, *LEARNED_ACTIVATIONS)
NORMS = ("none", "batch", "layer")

# With this momentum a running statistic forgets half of its past in about 7 steps. With 0.99, about
# 70 steps, an epoch of 50 steps ended with statistics of layers that had changed long since.
BATCH_NORM_MOMENTUM = 0.9
EPSILON = 1e-5
# Collection in which `BatchNorm` stores the statistics of one batch, if it is mutable.
BATCH_MOMENTS = "batch_moments"
_PRELU_SLOPE = 0.25  # initial slope of the paper


class BatchNorm(nn.Module):
    """Batch normalisation over the global batch, with the parameters and statistics of Flax.

    Each place of an example f[...] has its own mean, variance, scale and bias.

    The layer of Flax averages by a `psum`, whose bits depend on the number of processes on CPU.
    Variance takes two passes over the data, because E[x^2] - E[x]^2 cancels if |mean| >> std.

    Statistics ignore examples that count for no task. A batch of only such examples does not change
    the running statistics.

    momentum: fraction of the running statistics that is kept at each step.
    affine: scales and shifts the result by trained parameters.

    References:
        Ioffe and Szegedy, Batch Normalization, ICML 2015.
    """

    momentum: float = BATCH_NORM_MOMENTUM
    affine: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, share: Share, *, train: bool) -> jax.Array:  # f[B, ...]
        dtype, features = param_dtype(x), x.shape[1:]
        if self.affine:
            scale = self.param("scale", nn.initializers.ones, features, dtype)
            bias = self.param("bias", nn.initializers.zeros, features, dtype)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, features, dtype)
        running_var = self.variable("batch_stats", "var", jnp.ones, features, dtype)
        mean, var = running_mean.value, running_var.value
        if train:
            mean = share.batch_mean(x)
            var = share.batch_mean(jnp.square(x - mean[None]))
            if self.is_mutable_collection(BATCH_MOMENTS):
                self.put_variable(BATCH_MOMENTS, "mean", mean)
                self.put_variable(BATCH_MOMENTS, "var", var)
            keep: Any = self.momentum
            if share.counted is not None:
                keep = jnp.where(share.counted > 0, keep, 1).astype(dtype)
            running_mean.value = keep * running_mean.value + (1 - keep) * mean
            running_var.value = keep * running_var.value + (1 - keep) * var
        factor = jax.lax.rsqrt(var + EPSILON)
        if not self.affine:
            return (x - mean[None]) * factor[None]
        return (x - mean[None]) * (scale * factor)[None] + bias[None]


def random_bits(key: jax.Array, examples: jax.Array, units: int) -> jax.Array:
    """Returns u32[B, units], a pure function of the key and the indices of example and unit.

    It replaces `jax.random.bits` with a key per example, which took most of the step of a small
    model on CPU.

    Args:
        examples: i32[B], indices of the examples.

    References:
        Jarzynski and Olano, Hash Functions for GPU Rendering, JCGT 2020: pcg3d.
    """
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    x = (examples.astype(jnp.uint32) + first)[:, None]
    y = jnp.arange(units, dtype=jnp.uint32)[None, :]
    x, y, z = (v * jnp.uint32(1664525) + jnp.uint32(1013904223) for v in (x, y, second))
    x, y, z = (v ^ (v >> jnp.uint32(16)) for v in _mixed(x, y, z))
    return _mixed(x, y, z)[2]


def _mixed(x: jax.Array, y: jax.Array, z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = x + y * z
    y = y + z * x
    return x, y, z + x * y


class Dropout(nn.Module):
    """Sets units to 0 with probability `rate` in training, and scales up the others.

    References:
        Srivastava et al., Dropout, JMLR 2014.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, share: Share, *, train: bool) -> jax.Array:  # f[B, ...]
        if not train or not self.rate:
            return x
        keep = 1 - self.rate
        examples = share.first + jnp.arange(x.shape[0], dtype=jnp.int32)
        bits = random_bits(self.make_rng("dropout"), examples, math.prod(x.shape[1:]))
        mask = bits.reshape(x.shape) < jnp.uint32(min(int(keep * 2**32), 2**32 - 1))
        return jnp.where(mask, x / keep, jnp.zeros_like(x))


class LearnedActivation(nn.Module):
    """PReLU or Dice: x where a gate is open, and a * x where it is closed, with a trained slope a.

    prelu: the gate is open for x > 0. Slopes start at 0.25.
    dice: the gate is sigmoid(batch norm of x), without scale and bias. Slopes start at 0.

    Parameter: `slope` f[...], one for each place of an example.

    kind: one of LEARNED_ACTIVATIONS.
    momentum: see `BatchNorm`.

    References:
        He et al., Delving Deep into Rectifiers, ICCV 2015 (PReLU).
        Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018 (Dice).
    """

    kind: str
    momentum: float = BATCH_NORM_MOMENTUM

    @nn.compact
    def __call__(self, x: jax.Array, share: Share, *, train: bool) -> jax.Array:  # f[B, ...]
        is_prelu = self.kind == "prelu"
        init = nn.initializers.constant(_PRELU_SLOPE if is_prelu else 0.0)
        slope = self.param("slope", init, x.shape[1:], param_dtype(x))[None]
        if is_prelu:
            return jnp.maximum(x, 0) + slope * jnp.minimum(x, 0)
        norm = BatchNorm(self.momentum, affine=False, name="norm")
        gate = nn.sigmoid(norm(x, share, train=train))
        return x * (gate + slope * (1 - gate))


class Tower(nn.Module):
    """A dense layer, normalisation, activation and dropout for each width of `mlp_units`.

    Kernels start Glorot normal, the choice of DLRM (Naumov et al. 2019), biases at zero.

    Batch normalisation computes mean and variance over the global batch. In training the layer uses
    them and updates its running statistics (collection `batch_stats`). Otherwise it uses the
    running statistics. Examples of weight 0 do not count.

    mlp_units: widths of the layers. Without layers the tower returns its input.
    activation: one of ALL_ACTIVATIONS.
    norm: "none", "batch" (Ioffe and Szegedy 2015) or "layer" (Ba et al. 2016).
    dropout: fraction of units set to 0 in training, of all layers or of each. The others are scaled
        up to compensate.
    precision: see `products.product`.
    batch_norm_momentum: see `BatchNorm`.
    copies: number of towers side by side, each with its own parameters, stacked and computed as
        one; see `StackedDense` for their inputs. 0: one tower, with parameters that are not
        stacked.
    """

    mlp_units: tuple[int, ...] = (256, 128)
    activation: str = "relu"
    norm: str = "none"
    dropout: float | tuple[float, ...] = 0.0
    precision: str = "highest"
    batch_norm_momentum: float = BATCH_NORM_MOMENTUM
    copies: int = 0

    @nn.compact
    def __call__(self, x: jax.Array, share: Share, *, train: bool) -> jax.Array:
        """Maps x f[B, in] to f[B, mlp_units[-1]], or with copies to f[B, copies, mlp_units[-1]]."""
        dropout = self.dropout
        rates = dropout if isinstance(dropout, tuple) else (dropout,) * len(self.mlp_units)
        is_relu_layer = self.norm == "none" and self.activation == "relu"
        for layer, (width, rate) in enumerate(zip(self.mlp_units, rates, strict=True)):
            # Batch norm subtracts a constant bias: its gradient would be rounding error only, which
            # Adam would scale up to full steps.
            settings: dict[str, Any] = dict(
                width=width,
                precision=self.precision,
                use_bias=self.norm != "batch",
                form="relu" if is_relu_layer else "plain",
                name=f"layer_{layer}",
            )
            x = StackedDense(self.copies, **settings)(x) if self.copies else Dense(**settings)(x)
            x = x.astype(param_dtype(x))
            if self.norm == "batch":
                norm = BatchNorm(self.batch_norm_momentum, name=f"norm_{layer}")
                x = norm(x, share, train=train)
            elif self.norm == "layer":
                x = nn.LayerNorm(
                    epsilon=EPSILON,
                    param_dtype=param_dtype(x),
                    use_fast_variance=False,
                    feature_axes=tuple(range(1, x.ndim)),
                    name=f"norm_{layer}",
                )(x)
            if self.activation in LEARNED_ACTIVATIONS:
                act = LearnedActivation(
                    self.activation, self.batch_norm_momentum, name=f"activation_{layer}"
                )
                x = act(x, share, train=train)
            elif not is_relu_layer:
                x = ACTIVATIONS[self.activation](x)
            x = Dropout(rate, name=f"dropout_{layer}")(x, share, train=train)
            x = kept(x, self.precision)
        return x
