"""Models, as pure functions of named features. Only this package imports Flax.

A model is a Flax module that is registered by name. Its dataclass fields are the fields of
`config.model`, beside `tasks`, the number of logits, which the framework gives:

    @register("two_layers")
    class TwoLayers(nn.Module):
        tasks: int
        width: int = 64

        @nn.compact
        def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
            hidden = nn.relu(nn.Dense(self.width)(inputs.features))
            return nn.Dense(self.tasks)(hidden)

It puts out raw logits f32[B, tasks]; biases, joint probabilities and losses are the framework's.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax.errors import InvalidRngError

from jaxrank.errors import InputError
from jaxrank.models import fields, flops
from jaxrank.models.factorization_machine import FactorizationMachine
from jaxrank.models.inputs import DENSE, SEQUENCES, VECTORS, Inputs, Parts, Reading, Share
from jaxrank.models.ranker import Ranker
from jaxrank.models.registry import RANKER, module_of, register
from jaxrank.models.tower import BATCH_MOMENTS

__all__ = [
    "DENSE",
    "SEQUENCES",
    "VECTORS",
    "FactorizationMachine",
    "Inputs",
    "Model",
    "Parts",
    "Ranker",
    "Reading",
    "Share",
    "build",
    "describe",
    "from_flax",
    "module_of",
    "register",
]

Tree = Any  # a nested dict of arrays


class Model(NamedTuple):
    """A model's functions; arrays and keys may be traced, `train` may not.

    init: (key, inputs) -> (params, model_state).
    apply: (params, model_state, inputs, *, train, key=None) -> (logits f[B, tasks], model_state).
        model_state is {} or has collections such as "batch_stats", and apply returns the one to use
        next: the same unless `train`. `key` is for dropout: needed when training with it, else
        without effect.
    moments: (params, model_state, inputs, key) -> means and variances of this batch alone, as a
        part of model_state; {} where no layer normalises by batches. As `apply` with `train`.
    flops: (inputs) -> floating point operations of the matrix products of a forward pass, for one
        example. A training step makes three times as many: the same again for the gradient of each
        product's inputs and of its kernel. Arrays or their shapes.
    compiler_options: (platform of the devices) -> XLA's options for programs that call `apply`.
    input_axes: (inputs) -> {array: `Reading`} of the arrays that depend on which features there
        are; others do not. Names are those of modules and arrays joined by "/", as
        "tower/layer_0/kernel", with the collection in front of those that are not parameters. None
        where the model does not tell: all arrays may depend on them. A warm start goes by it.
    """

    init: Callable[..., tuple[Tree, Tree]]
    apply: Callable[..., tuple[jax.Array, Tree]]
    moments: Callable[..., Tree]
    flops: Callable[[Inputs], int]
    compiler_options: Callable[[str], dict[str, str | bool]]
    input_axes: Callable[[Inputs], Mapping[str, Reading] | None]


def from_flax(module: nn.Module) -> Model:
    """The model that a Flax module is.

    `module(inputs, train)` gives raw logits f[B, tasks] of `Inputs`, and the module has the number
    of logits as its field `tasks`. It may have the methods `compiler_options(platform)` and
    `input_axes(inputs)`; see `Model`.
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
        return flops.of_products(jax.make_jaxpr(forward)(params, state, single).jaxpr)

    optional: Any = module
    return Model(
        init,
        apply,
        moments,
        count,
        getattr(optional, "compiler_options", lambda platform: {}),
        getattr(optional, "input_axes", lambda inputs: None),
    )


def _checked(module: Any, logits: Any, inputs: Inputs) -> jax.Array:
    """Refuses what is no logit for each task."""
    expected = inputs.all_dense.shape[0], module.tasks
    if getattr(logits, "shape", None) != expected:
        raise InputError(
            f"model {type(module).__name__} must give logits of shape [examples, tasks],"
            f" {list(expected)}: found {list(getattr(logits, 'shape', [])) or logits!r}."
        )
    return logits


def build(*, tasks: int, name: str = RANKER, **config: Any) -> Model:
    """The registered model of that name, with these fields.

    Raises:
        InputError: there is no such model, or a field has a wrong name or value.
    """
    module: Any = module_of(name)
    return from_flax(module(**fields.check(module, tasks, config)))


def describe(params: Mapping[str, Tree]) -> dict[str, int]:
    """How many parameters each part of the model has: {"cross": ..., "tower": ..., "head": ...}."""
    return {name: sum(a.size for a in jax.tree.leaves(part)) for name, part in params.items()}
