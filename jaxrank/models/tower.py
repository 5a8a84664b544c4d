"""The deep part: a stack of dense layers."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import flax.linen as nn
import jax

from jaxrank.models.cross import KERNEL_INIT, param_dtype

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {"relu": nn.relu, "gelu": nn.gelu, "silu": nn.silu, "tanh": nn.tanh}
)
NORMS = ("none", "batch", "layer")

# A running statistic forgets half of its past in about 70 steps.
BATCH_NORM_MOMENTUM = 0.99
EPSILON = 1e-5


class Tower(nn.Module):
    """For each width of `hidden`: dense layer, normalisation, activation, dropout.

    Kernels start Glorot normal, the choice of DLRM (Naumov et al. 2019), biases at zero.

    Batch normalisation takes mean and variance over the global batch: under `jax.jit` with a
    batch that is split over devices, a mean over the batch axis is a mean over all of it. While
    training the layer uses them and moves its running statistics (collection `batch_stats`);
    otherwise it uses the running statistics. Examples of weight 0 count like all others.

    Dropout draws one mask over the global batch from the key of collection `dropout`, so it is
    the same on any number of devices.

    hidden: widths of the layers; none returns the input.
    activation: one of ACTIVATIONS.
    norm: "none", "batch" (Ioffe and Szegedy 2015) or "layer" (Ba et al. 2016).
    dropout: fraction of units set to 0 while training, the others scaled up to make up for it.
    """

    hidden: tuple[int, ...] = (400, 400)
    activation: str = "relu"
    norm: str = "none"
    dropout: float = 0.0
    precision: str = "highest"

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:  # f[B, in] -> f[B, hidden[-1]]
        dtype = param_dtype(x)
        for layer, width in enumerate(self.hidden):
            x = nn.Dense(
                width,
                # Batch norm takes a constant away again: the gradient of a bias before it is only
                # rounding, which Adam would scale up to full steps.
                use_bias=self.norm != "batch",
                precision=self.precision,
                kernel_init=KERNEL_INIT,
                param_dtype=dtype,
                name=f"layer_{layer}",
            )(x)
            # Two passes over the data: E[x^2] - E[x]^2 cancels in float32 where |mean| >> std.
            if self.norm == "batch":
                x = nn.BatchNorm(
                    use_running_average=not train,
                    momentum=BATCH_NORM_MOMENTUM,
                    epsilon=EPSILON,
                    param_dtype=dtype,
                    use_fast_variance=False,
                    name=f"norm_{layer}",
                )(x)
            elif self.norm == "layer":
                x = nn.LayerNorm(
                    epsilon=EPSILON,
                    param_dtype=dtype,
                    use_fast_variance=False,
                    name=f"norm_{layer}",
                )(x)
            x = ACTIVATIONS[self.activation](x)
            x = nn.Dropout(self.dropout, deterministic=not train, name=f"dropout_{layer}")(x)
        return x
