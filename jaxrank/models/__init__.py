"""Models as pure functions of named features. Only this package imports Flax.

A model is a Flax module that is registered by name. Its dataclass fields are the fields of
`config.model`, except `tasks`, the number of logits, which the framework sets:

    @register("two_layers")
    class TwoLayers(nn.Module):
        tasks: int
        width: int = 64

        @nn.compact
        def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
            hidden = nn.relu(nn.Dense(self.width)(inputs.features))
            return nn.Dense(self.tasks)(hidden)

It returns raw logits f32[B, tasks]. The framework adds biases, joint probabilities and losses.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax.errors import InvalidRngError

from jaxrank.errors import InputError
from jaxrank.models import fields, flops
from jaxrank.models.board import deepfm, final_mlp, gdcn, qnn  # noqa: F401  register models
from jaxrank.models.factorization_machine import FactorizationMachine
from jaxrank.models.inputs import DENSE, SEQUENCES, VECTORS, Inputs, Parts, Reading, Share
from jaxrank.models.products import plain_layers
from jaxrank.models.ranker import Ranker
from jaxrank.models.registry import find_module, register
from jaxrank.models.tower import BATCH_MOMENTS, BatchNorm, Dropout

__all__ = [
    "DENSE",
    "SEQUENCES",
    "VECTORS",
    "BatchNorm",
    "Dropout",
    "FactorizationMachine",
    "Inputs",
    "Model",
    "Parts",
    "Ranker",
    "Reading",
    "Share",
    "build",
    "check",
    "describe",
    "from_flax",
    "find_module",
    "register",
]

Tree = Any  # a nested dict of arrays


class Model(NamedTuple):
    """Functions of a model. Arrays and keys may be traced, `train` may not.

    init: (key, inputs) -> (params, model_state).
    apply: (params, model_state, inputs, *, train, key=None) -> (logits f[B, tasks], model_state).
        model_state is {} or has collections such as "batch_stats". `apply` returns the next
        model_state, which is unchanged unless `train`. `key` is needed to train with dropout, and
        has no effect otherwise.
    moments: (params, model_state, inputs, key) -> means and variances of this batch alone, as a
        part of model_state, computed like `apply` with `train`. {} without batch normalisation.
    flops: (inputs) -> floating point operations of the matrix products of a forward pass, per
        example. A training step has three times as many, because the gradients of the inputs and of
        the kernel of each product cost the same again. Accepts arrays or their shapes.
    compiler_options: (platform of the devices) -> XLA options for programs that call `apply`.
    input_axes: (inputs) -> {array: `Reading`} of the arrays that depend on the set of features.
        Names join the names of modules and arrays by "/", such as "tower/layer_0/kernel", with the
        collection in front if it is not "params". None if the model does not say, so that every
        array may depend on the features. A warm start uses it.
    """

    init: Callable[..., tuple[Tree, Tree]]
    apply: Callable[..., tuple[jax.Array, Tree]]
    infer: Callable[[Tree, Tree, Inputs], jax.Array]
    moments: Callable[..., Tree]
    flops: Callable[[Inputs], int]
    compiler_options: Callable[[str], dict[str, str | bool]]
    input_axes: Callable[[Inputs], Mapping[str, Reading] | None]


def from_flax(module: nn.Module) -> Model:
    """Makes a model from a Flax module.

    `module(inputs, train)` returns raw logits f[B, tasks] for `Inputs`, and the field `tasks` is
    the number of logits. The module may have the methods `compiler_options(platform)` and
    `input_axes(inputs)`; see `Model`. With the class attribute `has_weights_in_rows = True` its
    vectors start with weights of the tasks, so that tables cannot start from pre-trained ones.
    `fields_by_feature` names fields that map features with ids to values: a key that is no such
    feature is rejected before a new run.
    """

    def init(key: jax.Array, inputs: Inputs) -> tuple[Tree, Tree]:
        if not inputs.size:
            raise InputError("a model needs at least one feature to read: found none.")
        variables = dict(module.init(key, inputs, train=False))
        return variables.pop("params", {}), variables

    def apply(
        params: Tree,
        model_state: Tree,
        inputs: Inputs,
        *,
        train: bool,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, Tree]:
        variables = {"params": params, **model_state}
        if not train:
            logits: Any = module.apply(variables, inputs, train=False)
            return _checked(module, logits, inputs), model_state
        rngs = None if key is None else {"dropout": key}
        try:
            logits, changed = module.apply(
                variables, inputs, train=True, rngs=rngs, mutable=list(model_state)
            )
        except InvalidRngError as error:
            raise ValueError("key must be given to train with dropout: found None.") from error
        return _checked(module, logits, inputs), {**model_state, **changed}

    def infer(params: Tree, model_state: Tree, inputs: Inputs) -> jax.Array:
        with plain_layers():
            return apply(params, model_state, inputs, train=False)[0]

    def moments(params: Tree, model_state: Tree, inputs: Inputs, key: jax.Array) -> Tree:
        variables = {"params": params, **model_state}
        mutable = [*model_state, BATCH_MOMENTS]
        rngs = {"dropout": key}
        _, changed = module.apply(variables, inputs, train=True, rngs=rngs, mutable=mutable)
        batch_moments = changed.get(BATCH_MOMENTS)
        return {"batch_stats": batch_moments} if batch_moments else {}

    def count(inputs: Inputs) -> int:
        single = inputs.shapes(1)
        params, state = jax.eval_shape(init, jax.random.key(0), single)
        forward = functools.partial(apply, train=False)
        return flops.product_flops(jax.make_jaxpr(forward)(params, state, single).jaxpr)

    optional: Any = module
    return Model(
        init,
        apply,
        infer,
        moments,
        count,
        getattr(optional, "compiler_options", lambda platform: {}),
        getattr(optional, "input_axes", lambda inputs: None),
    )


def _checked(module: Any, logits: Any, inputs: Inputs) -> jax.Array:
    """Rejects an output that is not one logit per task."""
    expected = inputs.all_dense.shape[0], module.tasks
    if getattr(logits, "shape", None) != expected:
        raise InputError(
            f"model {type(module).__name__} must return logits of shape [examples, tasks],"
            f" {list(expected)}: found {list(getattr(logits, 'shape', [])) or logits!r}."
        )
    return logits


def build(*, tasks: int, name: str = "", **config: Any) -> Model:
    """Builds the registered model of that name, with these fields. See `find_module`.

    Raises:
        InputError: see `check`.
    """
    module: Any = find_module(name)
    return from_flax(module(**fields.check(module, tasks, config)))


def check(*, tasks: int, name: str, **config: Any) -> None:
    """Checks the arguments of `build`, and builds nothing.

    Raises:
        InputError: no model has that name, or a field is unknown or invalid.
    """
    fields.check(find_module(name), tasks, config)


def describe(params: Mapping[str, Tree]) -> dict[str, int]:
    """Counts the parameters of each part: {"cross": ..., "tower": ..., "head": ...}."""
    return {name: sum(a.size for a in jax.tree.leaves(part)) for name, part in params.items()}
