"""DeepFM: a factorization machine and a tower that share their vectors."""

from collections.abc import Mapping

import flax.linen as nn
import jax

from jaxrank.models.board.base import WIDTHS, X0, BoardModel
from jaxrank.models.factorization_machine import FactorizationMachine
from jaxrank.models.inputs import DENSE, Inputs, Reading
from jaxrank.models.registry import register
from jaxrank.validate import field


@register("deepfm")
class DeepFm(BoardModel):
    """The sum of the logits of a factorization machine and of a tower over x0.

    The factorization machine `fm` is the model of that name with scales of 1: the first `tasks`
    numbers of a vector are the weights of its id, the others its factors. The tower reads all.

    References:
        Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, IJCAI
        2017.
    """

    has_weights_in_rows = True

    mlp_units: tuple[int, ...] = field(
        (256, 128), **WIDTHS, non_empty=True, help="widths of the tower"
    )

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        """Returns raw logits f[B, tasks]."""
        pairs = FactorizationMachine(self.tasks, cross_scale=1.0, name="fm")(inputs, train)
        tower = self.tower(self.mlp_units, name="tower")
        return pairs + self.head(tower(self.x0(inputs), inputs.share, train=train))

    def input_axes(self, inputs: Inputs) -> Mapping[str, Reading]:
        """Returns how each array depends on the features; see `Model`."""
        machine = {f"fm/{name}": {0: (DENSE,)} for name in ("linear", "factors")}
        return {**machine, "tower/layer_0/kernel": {0: X0}}
