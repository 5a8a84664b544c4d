"""Fields and layers that the models of the boards share."""

from typing import Any

import flax.linen as nn
import jax

from jaxrank.models.inputs import DENSE, SEQUENCES, VECTORS, Inputs, Parts
from jaxrank.models.products import PRECISIONS, Dense, compiler_options, kept, unrounded
from jaxrank.models.tower import ALL_ACTIVATIONS, BATCH_NORM_MOMENTUM, NORMS, Tower
from jaxrank.validate import field

WIDTHS: dict[str, Any] = dict(at_least=1, at_most=1 << 20, unit="units")
# The features that x0 concatenates, in its order.
X0: Parts = (DENSE, VECTORS, SEQUENCES)


class BoardModel(nn.Module):
    """A model of x0, the concatenation of all dense features, vectors and means of sequences."""

    tasks: int
    activation: str = field(
        "relu",
        choices=ALL_ACTIVATIONS,
        help="activation of layers; gelu by tanh; prelu and dice have trained slopes",
    )
    norm: str = field(
        "none", choices=NORMS, help="normalisation of layers; batch: over the global batch"
    )
    batch_norm_momentum: float = field(
        BATCH_NORM_MOMENTUM,
        at_least=0,
        below=1,
        read_when=("norm", ("batch",)),
        or_when=("activation", ("dice",)),
        help="fraction that running statistics of batch norm and of dice keep at each step",
    )
    dropout: float = field(
        0.0, at_least=0, below=1, help="fraction of the units of layers dropped in training"
    )
    precision: str = field(
        "highest",
        choices=PRECISIONS,
        help="precision of matrix products. highest: float32 on every device; bfloat16: with"
        " float32 sums; mixed_bfloat16: also bfloat16 between layers, for accelerators",
    )

    def compiler_options(self, platform: str) -> dict[str, str | bool]:
        """Returns XLA options; see `products.compiler_options`."""
        return compiler_options(self.precision, platform)

    def x0(self, inputs: Inputs) -> jax.Array:
        return kept(inputs.features, self.precision)

    def tower(self, mlp_units: tuple[int, ...], **scope: Any) -> Tower:
        """Makes a tower with the fields of the model."""
        return Tower(
            mlp_units,
            activation=self.activation,
            norm=self.norm,
            dropout=self.dropout,
            batch_norm_momentum=self.batch_norm_momentum,
            precision=self.precision,
            **scope,
        )

    def head(self, *parts: jax.Array) -> jax.Array:
        """Returns the logits f[B, tasks] of a dense layer `head` over concatenated parts."""
        return Dense(self.tasks, unrounded(self.precision), name="head")(*parts)
