"""Floats and embedding vectors in, one logit for each task out."""

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrank.errors import InputError
from jaxrank.models.cross import KERNEL_INIT, MatrixCross, VectorCross, param_dtype
from jaxrank.models.pool import AttentionPool
from jaxrank.models.tower import ACTIVATIONS, NORMS, Share, Tower

CROSSES = ("matrix", "vector", "none")
STRUCTURES = ("stacked", "parallel")
PRECISIONS = ("default", "high", "highest")


class Ranker(nn.Module):
    """A cross network and a tower over all features together, and a head for each task.

    x0 is the floats, all vectors and the pooled sequences (`AttentionPool`) of an example, one
    after another.
    stacked: trunk = tower(cross(x0)).
    parallel: trunk = concat(cross(x0), tower(x0)); a part that is left out adds nothing.
    With neither cross network nor tower the trunk is x0, and the model logistic regression.

    tasks: number of logits.
    cross: "matrix" (DCN-V2), "vector" (DCN) or "none".
    structure: "stacked" or "parallel".
    cross_layers: layers of the cross network.
    hidden: widths of the tower.
    activation, norm, dropout: of every tower, see `Tower`.
    head_hidden: widths of a tower of each task's own on the shared trunk ("shared bottom",
        Caruana 1997). Empty: one dense layer `head` of width `tasks` on the trunk.
    precision: of matrix products, a name of `jax.lax.Precision`; "default" is bfloat16 with
        float32 sums on TPU.

    References:
        Wang et al., Deep & Cross Network for Ad Click Predictions, ADKDD 2017.
        Wang et al., DCN V2: Improved Deep & Cross Network, WWW 2021.
    """

    tasks: int
    cross: str = "matrix"
    structure: str = "stacked"
    cross_layers: int = 2
    hidden: tuple[int, ...] = (400, 400)
    activation: str = "relu"
    norm: str = "none"
    dropout: float = 0.0
    head_hidden: tuple[int, ...] = ()
    precision: str = "highest"

    @nn.compact
    def __call__(
        self,
        floats: jax.Array,
        vectors: tuple[jax.Array, ...],
        sequences: tuple[tuple[jax.Array, jax.Array], ...],
        share: Share,
        *,
        train: bool,
    ) -> jax.Array:
        """Logits f[B, tasks] of floats f[B, n], vectors (f[B, n_i, dim_i], ...) and sequences
        ((f[B, L_i, dim_i], bool[B, L_i]), ...)."""
        pooled = [
            AttentionPool(name=f"sequence_{i}")(*sequence) for i, sequence in enumerate(sequences)
        ]
        flat = [v.reshape(v.shape[0], -1) for v in vectors]
        x0 = jnp.concatenate([floats, *flat, *pooled], axis=1)
        crossed = x0
        if self.cross != "none":
            kind = MatrixCross if self.cross == "matrix" else VectorCross
            crossed = kind(self.cross_layers, precision=self.precision, name="cross")(x0)
        if not self.hidden:
            trunk = crossed
        elif self.structure == "stacked" or self.cross == "none":
            trunk = self._tower(self.hidden, "tower")(crossed, share, train=train)
        else:
            deep = self._tower(self.hidden, "tower")(x0, share, train=train)
            trunk = jnp.concatenate([crossed, deep], axis=1)
        if not self.head_hidden:
            return self._head(self.tasks, "head", trunk)
        logits = []
        for task in range(self.tasks):
            own = self._tower(self.head_hidden, f"task_{task}")(trunk, share, train=train)
            logits.append(self._head(1, f"head_{task}", own))
        return jnp.concatenate(logits, axis=1)

    def _tower(self, hidden: tuple[int, ...], name: str) -> Tower:
        return Tower(
            hidden=hidden,
            activation=self.activation,
            norm=self.norm,
            dropout=self.dropout,
            precision=self.precision,
            name=name,
        )

    def _head(self, width: int, name: str, x: jax.Array) -> jax.Array:  # f[B, in] -> f[B, width]
        return nn.Dense(
            width,
            precision=self.precision,
            kernel_init=KERNEL_INIT,
            param_dtype=param_dtype(x),
            name=name,
        )(x)


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "cross": CROSSES,
    "structure": STRUCTURES,
    "activation": tuple(ACTIVATIONS),
    "norm": NORMS,
    "precision": PRECISIONS,
}
_FIELDS = (*_CHOICES, "cross_layers", "hidden", "dropout", "head_hidden")


def check(tasks: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Ranker`, widths as tuples; InputError names the first that is wrong."""
    for field, value in config.items():
        if field not in _FIELDS:
            raise InputError(
                f"a model has only the fields {', '.join(sorted(_FIELDS))}: got {field}."
            )
        if field in _CHOICES and value not in _CHOICES[field]:
            raise InputError(f"model.{field} must be one of {_CHOICES[field]}: got {value!r}.")
    if not _whole(tasks) or tasks < 1:
        raise InputError(f"a model needs a whole number of tasks, at least 1: got {tasks!r}.")
    layers = config.get("cross_layers", 1)
    if not _whole(layers) or layers < 1:
        raise InputError(
            f"model.cross_layers must be a whole number, at least 1: got {layers!r}."
            " For no cross network set model.cross to 'none'."
        )
    dropout = config.get("dropout", 0.0)
    if isinstance(dropout, bool) or not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise InputError(f"model.dropout must be in [0, 1): got {dropout!r}.")
    widths = {f: _widths(f, config[f]) for f in ("hidden", "head_hidden") if f in config}
    return {**config, **widths, "tasks": tasks}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _widths(field: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(_whole(v) and v > 0 for v in value):
        raise InputError(f"model.{field} must be a tuple of widths above 0: got {value!r}.")
    return tuple(value)
