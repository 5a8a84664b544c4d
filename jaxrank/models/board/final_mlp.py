"""FinalMLP: two towers with selected features, and a bilinear product of their outputs."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.errors import InputError
from jaxrank.models.board.base import WIDTHS, X0, BoardModel
from jaxrank.models.inputs import Inputs, Reading
from jaxrank.models.products import Dense, StackedDense, kept, param_dtype, unrounded
from jaxrank.models.registry import register
from jaxrank.models.tower import Tower
from jaxrank.validate import field

STREAMS = ("first", "second")


@register("final_mlp")
class FinalMlp(BoardModel):
    """Two streams, each a tower over x0 times a gate, joined by a bilinear product per head.

    A gate is 2 sigmoid(MLP(context)), with a hidden layer of `gate_units` over the features of its
    context. Without context features it is 2 sigmoid(g) of a trained vector g [F], initially zero.
    For outputs u and v of the streams, divided into heads h:

        logits = head(concat(u, v)) + sum_h u_h^T W_h v_h

    References:
        Mao et al., FinalMLP: An Enhanced Two-Stream MLP Model for CTR Prediction, AAAI 2023.
    """

    first_mlp_units: tuple[int, ...] = field(
        (256, 128), **WIDTHS, non_empty=True, help="widths of the first stream"
    )
    second_mlp_units: tuple[int, ...] = field(
        (256, 128), **WIDTHS, non_empty=True, help="widths of the second stream"
    )
    heads: int = field(
        1,
        at_least=1,
        unit="heads",
        help="number of heads of the fusion; must divide the last widths",
    )
    gates: bool = field(True, help="gates that select the features of each stream")
    gate_units: int = field(64, **WIDTHS, help="width of the hidden layer of a gate with a context")
    first_context: tuple[str, ...] = field(
        (), help="features that the gate of the first stream reads, such as the user's"
    )
    second_context: tuple[str, ...] = field(
        (), help="features that the gate of the second stream reads, such as the item's"
    )

    @staticmethod
    def check_fields(fields: Any, where: str) -> None:
        """Rejects heads that the streams cannot be divided into; see `models.fields`."""
        first, second = fields.first_mlp_units[-1], fields.second_mlp_units[-1]
        if first % fields.heads or second % fields.heads:
            raise InputError(
                f"{where}.heads: must divide the last of {where}.first_mlp_units and of"
                f" {where}.second_mlp_units: found {fields.heads} heads, widths {first} and"
                f" {second}."
            )

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        """Returns raw logits f[B, tasks]."""
        widths = {"first": self.first_mlp_units, "second": self.second_mlp_units}
        x0, outputs = self.x0(inputs), []
        for stream in STREAMS:
            x = kept(x0 * self._gate(stream, inputs), self.precision) if self.gates else x0
            tower = self.tower(widths[stream], name=f"{stream}_tower")
            outputs.append(tower(x, inputs.share, train=train))
        return self.head(*outputs) + self._fusion(*outputs)

    def _gate(self, stream: str, inputs: Inputs) -> jax.Array:
        context, width = self._context(stream), inputs.size
        if not context:
            dtype = param_dtype(inputs.all_dense)
            vector = self.param(f"{stream}_gate", nn.initializers.zeros, (width,), dtype)
            return 2 * nn.sigmoid(vector)[None]
        values = [
            inputs.dense[name][:, None]
            if name in inputs.dense
            else inputs.vectors[name].reshape(inputs.all_dense.shape[0], -1)
            for name in context
        ]
        hidden = Tower((self.gate_units,), precision=self.precision, name=f"{stream}_gate")
        x = hidden(jnp.concatenate(values, axis=1), inputs.share, train=False)
        return 2 * nn.sigmoid(Dense(width, self.precision, name=f"{stream}_gate_output")(x))

    def _context(self, stream: str) -> tuple[str, ...]:
        return self.first_context if stream == "first" else self.second_context

    def _fusion(self, u: jax.Array, v: jax.Array) -> jax.Array:
        """Maps outputs f[B, n] and f[B, m] to f[B, tasks]."""
        part = v.shape[1] // self.heads
        width, precision = self.tasks * part, unrounded(self.precision)
        bilinear = StackedDense(self.heads, width, precision, use_bias=False, name="bilinear")
        left = bilinear(u.reshape(-1, self.heads, u.shape[1] // self.heads))
        left = left.reshape(-1, self.heads, self.tasks, part)
        return (left * v.reshape(-1, self.heads, 1, part)).sum(axis=(1, 3))

    def input_axes(self, inputs: Inputs) -> Mapping[str, Reading]:
        """Returns how each array depends on the features; see `Model`."""
        axes: dict[str, Reading] = {}
        for stream in STREAMS:
            axes[f"{stream}_tower/layer_0/kernel"] = {0: X0}
            context = self._context(stream)
            if not self.gates:
                continue
            if not context:
                axes[f"{stream}_gate"] = {0: X0}
                continue
            axes[f"{stream}_gate/layer_0/kernel"] = {0: context}
            axes |= {f"{stream}_gate_output/kernel": {1: X0}, f"{stream}_gate_output/bias": {0: X0}}
        return axes
