"""QNN: a quadratic neural network, alone or beside DCN-V2."""

from collections.abc import Mapping

import flax.linen as nn
import jax

from jaxrank.models.board.base import WIDTHS, X0, BoardModel
from jaxrank.models.cross import MatrixCross
from jaxrank.models.inputs import Inputs, Parts, Reading
from jaxrank.models.products import kept, param_dtype
from jaxrank.models.registry import register
from jaxrank.models.tower import LEARNED_ACTIVATIONS, Dropout
from jaxrank.validate import field


@register("qnn")
class Qnn(BoardModel):
    """A quadratic network, with a cross network and a tower beside it where a config asks for them.

    Each layer multiplies its input by several dense layers of it, the Khatri-Rao product, and adds
    the products up:

        x_{l+1} = dropout(x_l * sum_r dropout(activation(norm(W_lr x_l + b_lr))) + x_l)

    The logits are a dense layer `head` over x_L, the cross network and the tower.

    This is the network of the paper with one head and without its self-ensemble loss, which needs
    two passes over each example.

    References:
        Li et al., Revisiting Feature Interactions from the Perspective of Quadratic Neural Networks
        for Click-through Rate Prediction, KDD 2025 (QNN-alpha).
        Wang et al., DCN V2: Improved Deep & Cross Network, WWW 2021.
    """

    layers: int = field(
        3, at_least=1, at_most=256, unit="layers", help="layers of the quadratic network"
    )
    products: int = field(
        2, at_least=1, at_most=256, unit="products", help="products that each layer adds up"
    )
    cross_layers: int = field(
        0,
        at_least=0,
        at_most=256,
        unit="layers",
        help="layers of a cross network of DCN-V2 beside the quadratic one; 0: none",
    )
    mlp_units: tuple[int, ...] = field(
        (), **WIDTHS, help="widths of a tower beside the quadratic network; empty: no tower"
    )

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        """Returns raw logits f[B, tasks]."""
        share, x0 = inputs.share, self.x0(inputs)
        x, width = x0, x0.shape[1]
        for layer in range(self.layers):
            dense = self.tower((self.products * width,), name=f"quadratic_{layer}")
            factors = dense(x, share, train=train).reshape(-1, self.products, width)
            # Sums are float32.
            total = factors.astype(param_dtype(factors)).sum(axis=1)
            x = kept(x * total + x, self.precision)
            x = Dropout(self.dropout, name=f"dropout_{layer}")(x, share, train=train)
        parts = [x]
        if self.cross_layers:
            parts.append(MatrixCross(self.cross_layers, self.precision, name="cross")(x0)[0])
        if self.mlp_units:
            parts.append(self.tower(self.mlp_units, name="tower")(x0, share, train=train))
        return self.head(*parts)

    def input_axes(self, inputs: Inputs) -> Mapping[str, Reading]:
        """Returns how each array depends on the features; see `Model`."""
        repeated: Parts = X0 * self.products
        axes: dict[str, Reading] = {}
        for layer in range(self.layers):
            dense = f"quadratic_{layer}"
            axes[f"{dense}/layer_0/kernel"] = {0: X0, 1: repeated}
            if self.norm != "batch":
                axes[f"{dense}/layer_0/bias"] = {0: repeated}
            if self.norm != "none":
                axes |= {f"{dense}/norm_0/{name}": {0: repeated} for name in ("scale", "bias")}
            if self.norm == "batch":
                statistics = f"batch_stats/{dense}/norm_0"
                axes |= {f"{statistics}/{name}": {0: repeated} for name in ("mean", "var")}
            if self.activation in LEARNED_ACTIVATIONS:
                axes[f"{dense}/activation_0/slope"] = {0: repeated}
            if self.activation == "dice":
                statistics = f"batch_stats/{dense}/activation_0/norm"
                axes |= {f"{statistics}/{name}": {0: repeated} for name in ("mean", "var")}
        trunk: Parts = X0
        if self.cross_layers:
            read = MatrixCross(self.cross_layers, parent=None).read_axes()
            axes |= {f"cross/{name}": dict.fromkeys(along, X0) for name, along in read.items()}
            trunk = (*trunk, *X0)
        if self.mlp_units:
            axes["tower/layer_0/kernel"] = {0: X0}
            trunk = (*trunk, self.mlp_units[-1])
        return {**axes, "head/kernel": {0: trunk}}
