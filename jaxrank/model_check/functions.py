"""Properties of the pure functions of a model, on one device and without training."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.model_check.case import Case
from jaxrank.models import Inputs
from jaxrank.selftest.check import Verdict, passes

_EXAMPLES = 64
_TOLERANCE = 1e-5  # of outputs, relative to the largest


def tracing(case: Case) -> Verdict:
    """Two traces of a program must compute the same."""
    params, state = case.variables()
    inputs, key = case.inputs(_EXAMPLES), jax.random.key(3)

    def outputs(train: bool) -> Any:
        # A new function is traced again.
        apply = functools.partial(case.builder.model().apply, train=train, key=key)
        return jax.device_get(jax.jit(lambda *arrays: apply(*arrays))(params, state, inputs))

    for train in (False, True):
        first, second = jax.tree.leaves(outputs(train)), jax.tree.leaves(outputs(train))
        equal = all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(first, second, strict=True)
        )
        if not equal:
            return passes(
                False,
                f"two traces with train={train} give other outputs for the same arguments",
                "Draw random numbers with self.make_rng, not with NumPy or `random`, and keep no"
                " state outside the module.",
            )
    return passes(True, "two traces give the same outputs", "")


def shapes(case: Case) -> Verdict:
    """Outputs must be f32[examples, tasks] for any number of examples; `Model` checks the shape."""
    sizes = (1, 7, _EXAMPLES)
    for examples in sizes:
        for train in (False, True):
            _output(case, case.inputs(examples), train)
    counts = ", ".join(map(str, sizes))
    return passes(True, f"[examples, {case.tasks}] for {counts} examples", "")


def dtypes(case: Case) -> Verdict:
    """Parameters and outputs must be float32, and nothing may ask for 64 bits."""
    inputs = case.inputs(_EXAMPLES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = case.builder.model()
        variables = jax.eval_shape(model.init, jax.random.key(0), inputs)
        outputs = [_output(case, inputs, train) for train in (False, True)]
    wide = [str(w.message) for w in caught if "Explicitly requested dtype" in str(w.message)]
    if wide:
        return passes(False, wide[0].partition(",")[0], "Use float32 or int32 in the model.")
    named = jax.tree_util.tree_leaves_with_path(variables)
    for path, leaf in [*named, *((("output",), output) for output in outputs)]:
        if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != jnp.float32:
            name = jax.tree_util.keystr(path) if path != ("output",) else "the output"
            return passes(
                False,
                f"{name} is {leaf.dtype}",
                "Keep parameters in float32, and convert the output: x.astype(jnp.float32).",
            )
    return passes(True, f"{len(named)} arrays and the output are float32", "")


def train(case: Case) -> Verdict:
    """`train` must switch random numbers and the updates of statistics."""
    params, state = case.variables()
    inputs = case.inputs(_EXAMPLES)
    apply = jax.jit(functools.partial(case.model.apply, train=True))
    (first, changed), (second, _) = (
        apply(params, state, inputs, key=jax.random.key(seed)) for seed in (0, 1)
    )
    advice = "Pass `train` on to each layer that differs between training and prediction."
    is_random = not np.array_equal(first, second, equal_nan=True)
    dropout = case.builder.model_fields.get("dropout", 0.0)
    # A model of the user's own may give the name to a field of another meaning.
    is_rate = isinstance(dropout, float) and 0 < dropout < 1
    if is_rate and not is_random:
        return passes(False, f"dropout is {dropout}, but training draws no random numbers", advice)
    is_updated = any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(changed), strict=True)
    )
    if state and not is_updated:
        return passes(False, f"training does not update the state {', '.join(state)}", advice)
    changes = ["random numbers"] * is_random + ["updates of statistics"] * is_updated
    return passes(True, f"{' and '.join(changes) or 'nothing random'} in training only", "")


def order(case: Case) -> Verdict:
    """The output of an example must not depend on the others, or on its place among them."""
    params, state = case.variables()
    apply = jax.jit(lambda inputs: case.model.apply(params, state, inputs, train=False)[0])
    inputs = case.inputs(_EXAMPLES)
    whole = np.asarray(apply(inputs))
    permutation = np.random.default_rng(0).permutation(_EXAMPLES)
    half = np.arange(_EXAMPLES // 2)
    scale = max(np.abs(whole).max(), 1.0)
    for text, chosen in (("in another order", permutation), ("without the other half", half)):
        difference = np.abs(np.asarray(apply(_selected(inputs, chosen))) - whole[chosen]).max()
        if not difference <= _TOLERANCE * scale:
            return passes(
                False,
                f"{_EXAMPLES} examples {text} have outputs that differ by {difference:.1e}",
                "Compute each output from its own example. Statistics of the batch belong to"
                " training, by inputs.share.",
            )
    return passes(True, f"{_EXAMPLES} examples permuted and halved have the same outputs", "")


def _output(case: Case, inputs: Inputs, train: bool) -> Any:
    """Returns the shape of the outputs, from a new trace."""
    variables = jax.eval_shape(case.model.init, jax.random.key(0), inputs)
    apply = functools.partial(case.builder.model().apply, train=train, key=jax.random.key(0))
    return jax.eval_shape(lambda *arrays: apply(*arrays), *variables, inputs)[0]


def _selected(inputs: Inputs, chosen: np.ndarray) -> Inputs:
    arrays = inputs.all_dense, inputs.all_reads
    return Inputs(inputs.names, *jax.tree.map(lambda x: x[chosen], arrays))
