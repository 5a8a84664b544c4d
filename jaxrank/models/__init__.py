"""Models, as two pure functions. Only this package imports Flax.

model = models.build(tasks=1, cross="matrix", hidden=(400, 400))
params, model_state = model.init(jax.random.key(0), floats, vectors)
logits, model_state = model.apply(params, model_state, floats, vectors, train=True, key=key)
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxrank.errors import InputError
from jaxrank.models import flops, products
from jaxrank.models.fields import check
from jaxrank.models.ranker import Ranker
from jaxrank.models.tower import Share

__all__ = ["Model", "Share", "build", "describe"]

Tree = Any  # a nested dict of arrays
Sequences = tuple[tuple[jax.Array, jax.Array], ...]


class Model(NamedTuple):
    """A model's functions; arrays and keys may be traced, `train` may not.

    init: (key, floats, vectors, sequences=()) -> (params, model_state).
    apply: (params, model_state, floats, vectors, sequences=(), *, train, key=None, share=Share())
        -> (logits, model_state).
    flops: (floats, vectors, sequences=()) -> floating point operations of the matrix products of a
        forward pass, for one example. A training step makes three times as many: the same again
        for the gradient of each product's inputs and of its kernel. Arrays or their shapes.
    compiler_options: (platform of the devices) -> XLA's options for programs that call `apply`.

    floats f[B, n]; vectors a tuple of f[B, n_i, dim_i]; sequences a tuple of (f[B, L_i, dim_i],
    bool[B, L_i] which places are filled); logits f[B, tasks]. model_state is {} or
    {"batch_stats": ...}, and apply returns the one to use next: the same unless `train`. `key` is
    for dropout: needed when training with it, else without effect. `share` says which part of the
    global batch the examples are.
    """

    init: Callable[..., tuple[Tree, Tree]]
    apply: Callable[..., tuple[jax.Array, Tree]]
    flops: Callable[..., int]
    compiler_options: Callable[[str], dict[str, str | bool]]


def build(*, tasks: int, **config: Any) -> Model:
    """The model of these fields of `Ranker`; InputError for a wrong name or value."""
    module = Ranker(**check(Ranker, tasks, config))

    def init(
        key: jax.Array,
        floats: jax.Array,
        vectors: tuple[jax.Array, ...],
        sequences: Sequences = (),
    ) -> tuple[Tree, Tree]:
        if floats.shape[1] + sum(v.shape[1] * v.shape[2] for v in vectors) + len(sequences) == 0:
            raise InputError("a model needs at least one feature to read: found none.")
        variables = dict(module.init(key, floats, vectors, sequences, Share(), train=False))
        return variables.pop("params"), variables

    def apply(
        params: Tree,
        model_state: Tree,
        floats: jax.Array,
        vectors: tuple[jax.Array, ...],
        sequences: Sequences = (),
        *,
        train: bool,
        key: jax.Array | None = None,
        share: Share = Share(),  # noqa: B008  a NamedTuple of constants
    ) -> tuple[jax.Array, Tree]:
        if train and module.dropout > 0 and key is None:
            raise ValueError("key must be given to train with dropout: found None.")
        variables = {"params": params, **model_state}
        rngs = None if key is None else {"dropout": key}
        inputs = floats, vectors, sequences, share
        if not train:
            logits: Any = module.apply(variables, *inputs, train=False)
            return logits, model_state
        logits, changed = module.apply(
            variables, *inputs, train=True, rngs=rngs, mutable=list(model_state)
        )
        return logits, {**model_state, **changed}

    def count(floats: Any, vectors: tuple[Any, ...], sequences: Any = ()) -> int:
        one = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), (floats, vectors, sequences)
        )
        params, state = jax.eval_shape(init, jax.random.key(0), *one)
        forward = functools.partial(apply, train=False)
        return flops.of_products(jax.make_jaxpr(forward)(params, state, *one).jaxpr)

    options = functools.partial(products.compiler_options, module.precision)
    return Model(init, apply, count, options)


def describe(params: Mapping[str, Tree]) -> dict[str, int]:
    """How many parameters each part of the model has: {"cross": ..., "tower": ..., "head": ...}."""
    return {name: sum(a.size for a in jax.tree.leaves(part)) for name, part in params.items()}
