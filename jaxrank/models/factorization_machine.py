"""Factorization machine: a linear model and the products of all pairs of features."""

from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.errors import InputError
from jaxrank.models.inputs import DENSE, Inputs, Reading
from jaxrank.models.products import param_dtype, product
from jaxrank.models.registry import FACTORIZATION_MACHINE, register
from jaxrank.validate import field


@register(FACTORIZATION_MACHINE)
class FactorizationMachine(nn.Module):
    """Logits from the weights of ids and numbers, and from the products of all pairs of features.

    The first `tasks` numbers of a vector are the weights w of its id, the others are its factors u.
    Each feature has a scale s (1 for a number) and a value x (1 for an id):

        logit = bias + sum_i s_i w_i x_i + cross_scale * sum_{i<j} <s_i u_i x_i, s_j u_j x_j>

    Each task has its own weights 1 + `mix` of the coordinates of the products, and a factor of all
    that is added to its bias, because outputs of other kinds have other units. A sequence counts as
    the mean of its vectors. With `optim.tables.settings.l2` of "proximal_adagrad" at 1 / examples,
    rows have a standard normal prior, and s is the prior standard deviation of a feature's effects.
    Weights and factors of numbers have one by `optim.dense.weight_decay`, 1 / (variance *
    examples). Without it the products of numbers and rare ids overfit.

    References:
        Rendle, Factorization Machines, ICDM 2010.
    """

    has_weights_in_rows = True
    fields_by_feature = ("scales",)

    tasks: int
    scales: Mapping[str, float] = field(
        {},
        at_least=0,
        help="categorical or ragged feature -> factor of its vectors, 1 without an entry; empty:"
        " the standard deviation of the effects of each feature, estimated from the training"
        " labels",
    )
    cross_scale: float = field(
        0.0, at_least=0, help="factor of the products of pairs; 0: computed from the scales"
    )
    task_scales: tuple[float, ...] = field(
        (),
        above=0,
        help="factor of the effects on each task; empty: 1 for binary tasks, estimated from the"
        " training labels for others",
    )

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        """Returns raw logits f[B, tasks]."""
        numbers, vectors = inputs.all_dense, self._scaled(inputs)
        dtype = param_dtype(numbers)
        in_units = self._in_units
        logits = self.param("bias", nn.initializers.zeros, (self.tasks,), dtype)[None]
        if numbers.shape[1]:
            shape = numbers.shape[1], self.tasks
            linear = self.param("linear", nn.initializers.zeros, shape, dtype)
            logits = logits + in_units(product(numbers, linear, "highest"))
        if not vectors.shape[1]:
            return logits
        logits = logits + in_units(vectors[..., : self.tasks].sum(axis=1))
        factors = vectors[..., self.tasks :]
        if not factors.shape[2]:
            return logits
        total, squares = factors.sum(axis=1), jnp.square(factors).sum(axis=1)
        if numbers.shape[1]:
            shape = numbers.shape[1], factors.shape[2]
            kernel = self.param("factors", nn.initializers.zeros, shape, dtype)
            total = total + product(numbers, kernel, "highest")
            squares = squares + product(jnp.square(numbers), jnp.square(kernel), "highest")
        shape = factors.shape[2], self.tasks
        mix = self.param("mix", nn.initializers.zeros, shape, dtype)
        pairs = (jnp.square(total) - squares) / 2
        return logits + in_units(self.cross_scale * product(pairs, 1 + mix, "highest"))

    def input_axes(self, inputs: Inputs) -> Mapping[str, Reading]:
        """Returns how each array depends on the features; see `Model`."""
        return {name: {0: (DENSE,)} for name in ("linear", "factors")}

    def _in_units(self, effects: jax.Array) -> jax.Array:
        """Returns effects f[B, tasks] times the factor of each task."""
        if not self.task_scales:
            return effects
        if len(self.task_scales) != self.tasks:
            raise InputError(
                f"model.task_scales: must be empty or have one number per task: found"
                f" {self.task_scales!r}, {self.tasks} task(s)."
            )
        return effects * jnp.array(self.task_scales, effects.dtype)[None]

    def _scaled(self, inputs: Inputs) -> jax.Array:
        """Returns every vector times the scale of its feature, f[B, n, dim]."""
        names = inputs.names
        parts = [
            vectors * jnp.array([self.scales.get(f, 1.0) for f in columns.features])[None, :, None]
            for columns, vectors in zip(names.vectors, inputs.all_vectors, strict=True)
        ]
        for span, (vectors, mask) in zip(names.sequences, inputs.all_sequences, strict=True):
            count = jnp.maximum(mask.sum(axis=1), 1)[:, None]
            mean = jnp.where(mask[:, :, None], vectors, 0).sum(axis=1) / count
            parts.append(mean[:, None] * self.scales.get(span.feature, 1.0))
        dims = {part.shape[2] for part in parts}
        if len(dims) > 1 or min(dims, default=self.tasks) < self.tasks:
            raise InputError(
                "embedding.dim: a factorization machine must have tables of one dimension, at least"
                f" the number of tasks: found dimensions {sorted(dims)}, {self.tasks} tasks. Set"
                " embedding.dim and leave out embedding.dims."
            )
        return (
            jnp.concatenate(parts, axis=1)
            if parts
            else jnp.zeros((*inputs.all_dense.shape, 0))[:, :0]
        )
