"""GDCN: a cross network whose layers have gates."""

from collections.abc import Mapping

import flax.linen as nn
import jax

from jaxrank.models.board.base import WIDTHS, X0, BoardModel
from jaxrank.models.inputs import Inputs, Parts, Reading
from jaxrank.models.products import Dense, kept
from jaxrank.models.registry import register
from jaxrank.validate import field

STRUCTURES = ("stacked", "parallel")


class GatedCross(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) * sigmoid(G_l x_l) + x_l.

    Parameters per layer: `layer_l` kernel [F, F] (Glorot normal) and bias [F] (zero); `gate_l`
    kernel [F, F] (Glorot normal).
    """

    layers: int
    precision: str = "highest"

    @nn.compact
    def __call__(self, x0: jax.Array) -> jax.Array:  # f[B, F]
        x, width = x0, x0.shape[1]
        for layer in range(self.layers):
            crossed = Dense(width, self.precision, name=f"layer_{layer}")(x)
            gate = Dense(width, self.precision, use_bias=False, name=f"gate_{layer}")(x)
            x = kept(x0 * crossed * nn.sigmoid(gate) + x, self.precision)
        return x


@register("gdcn")
class Gdcn(BoardModel):
    """A gated cross network, with a tower after it or beside it.

    Without a tower, the logits are a dense layer of the cross network. Biases of the cross layers
    start at zero.

    References:
        Wang et al., Towards Deeper, Lighter and Interpretable Cross Network for CTR Prediction,
        CIKM 2023 (GDCN-S is stacked, GDCN-P parallel).
    """

    structure: str = field(
        "parallel", choices=STRUCTURES, help="tower after the cross layers, or parallel to them"
    )
    cross_layers: int = field(
        3, at_least=1, at_most=256, unit="layers", help="layers of the gated cross network"
    )
    mlp_units: tuple[int, ...] = field(
        (256, 128), **WIDTHS, help="widths of the tower; empty: no tower"
    )

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        """Returns raw logits f[B, tasks]."""
        x0 = self.x0(inputs)
        crossed = GatedCross(self.cross_layers, self.precision, name="cross")(x0)
        if not self.mlp_units:
            return self.head(crossed)
        is_parallel = self.structure == "parallel"
        tower = self.tower(self.mlp_units, name="tower")
        deep = tower(x0 if is_parallel else crossed, inputs.share, train=train)
        return self.head(crossed, deep) if is_parallel else self.head(deep)

    def input_axes(self, inputs: Inputs) -> Mapping[str, Reading]:
        """Returns how each array depends on the features; see `Model`."""
        axes: dict[str, Reading] = {}
        for layer in range(self.cross_layers):
            axes[f"cross/layer_{layer}/kernel"] = {0: X0, 1: X0}
            axes[f"cross/layer_{layer}/bias"] = {0: X0}
            axes[f"cross/gate_{layer}/kernel"] = {0: X0, 1: X0}
        trunk: Parts = X0
        if self.mlp_units:
            axes["tower/layer_0/kernel"] = {0: X0}
            if self.structure == "stacked":
                return axes
            trunk = (*X0, self.mlp_units[-1])
        return {**axes, "head/kernel": {0: trunk}}
