"""Compares layers of C++ code and their gradients with float64.

    python -m native_layers avx512f

Checks the code that is compiled for a processor without this instruction set.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank import native
from jaxrank.models.products import layer

LAYERS = [
    ((), 97, 300, 33),  # a panel of one column, a strip of one row
    ((2, 3), 257, 45, 64),
    ((), 24, 2100, 600),  # a sum longer than a block
    ((3,), 1_030, 130, 1),  # each row or column once
    ((2,), 2_049, 16, 16),
    ((), 1_100, 900, 130),  # groups of columns in several blocks
    ((), 5_000, 20, 70),  # a sum over examples in parts
]
# The form of a layer, and the inputs of a cross layer in addition to x.
FORMS = [("plain", ()), ("relu", ()), ("cross", ()), ("cross", ("x0",)), ("cross", ("x0", "past"))]
PRECISIONS = ["highest", "bfloat16"]
# Each form with each precision, and each shape.
CASES = [
    *((LAYERS[1], *form, precision) for form in FORMS for precision in PRECISIONS),
    *(
        (shape, *FORMS[2 * i % len(FORMS)], PRECISIONS[i // 2 % 2])
        for i, shape in enumerate(LAYERS)
        if i != 1
    ),
]
# Each form, both precisions, and three shapes.
FEW = CASES[::3]


def floats(*shape, seed=0):
    """Draws floats with negative zeros, which a sum of two numbers never gives."""
    result = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return np.where(np.abs(result) < 0.05, np.float32(-0.0), result)


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


def check(shape, form, beside, precision):
    leading, examples, size, width = shape
    if form == "cross" and "past" not in beside:
        width = size  # x is added
    inputs, grad = layer_input(leading, examples, size, width, form, beside)
    program = jax.jit(functools.partial(with_gradients, form=form, precision=precision))
    assert program.lower(inputs, grad).as_text().count("@JaxrankLayer") == 2
    y, grads = program(inputs, grad)
    if form == "cross":
        y, x0 = y
        assert_same_bits(x0, inputs.get("x0", inputs["x"]))
    expected, expected_grads = expected_gradients(inputs, grad, np.asarray(y), form, precision)
    assert grads.keys() == expected_grads.keys()
    for name in inputs:
        assert_near(grads[name], expected_grads[name])
    assert_near(y, expected)


def assert_near(actual, expected):
    assert (actual.dtype, actual.shape) == (np.float32, expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def layer_input(leading, examples, size, width, form, beside):
    """Draws the inputs of a layer by name, and the gradient of its output."""
    shapes = dict(x=(examples, size), kernel=(size, width), bias=(width,))
    shapes |= dict.fromkeys(beside, (examples, width))
    inputs = {
        name: floats(*leading, *shape, seed=seed)
        for seed, (name, shape) in enumerate(shapes.items())
    }
    grad, of_x0 = (floats(*leading, examples, width, seed=seed) for seed in (8, 9))
    return inputs, (grad, of_x0) if form == "cross" else grad


def with_gradients(inputs, grad, form, precision):
    def run_layer(inputs):
        inputs = dict(inputs)
        first = x, *_ = [inputs.pop(name) for name in ("x", "kernel", "bias")]
        if form == "cross":
            inputs.setdefault("x0", x)
        return layer(*first, precision, form, **inputs)

    y, back = jax.vjp(run_layer, inputs)
    return y, back(grad)[0]


def expected_gradients(inputs, grad, y, form, precision):
    """Computes a layer and its gradients in float64. A relu passes gradients where `y` > 0."""

    def as_multiplied(array):
        array = np.asarray(array, np.float32)
        return (array.astype(jnp.bfloat16) if precision == "bfloat16" else array).astype(np.float64)

    x, kernel = as_multiplied(inputs["x"]), as_multiplied(inputs["kernel"])
    product = x @ kernel + inputs["bias"][..., None, :].astype(np.float64)
    grads = {}
    if form == "cross":
        grad, of_x0 = grad
    if form == "relu":
        expected, inner = np.maximum(product, 0), np.where(y > 0, grad, 0)
    elif form == "cross":
        x0, past = (inputs.get(name, inputs["x"]) for name in ("x0", "past"))
        expected, inner = x0 * product + past, grad * x0
        grads["x0"] = of_x0 + grad * product
    else:
        expected, inner = product, grad
    rounded = as_multiplied(inner)
    grads["x"] = rounded @ kernel.swapaxes(-1, -2)
    grads["kernel"] = x.swapaxes(-1, -2) @ rounded
    grads["bias"] = inner.astype(np.float64).sum(axis=-2)
    if "past" in inputs:
        grads["past"] = grad
    elif form == "cross":
        grads["x"] = grads["x"] + grad
    if form == "cross" and "x0" not in inputs:
        grads["x"] = grads["x"] + grads.pop("x0")
    return expected, grads


def main(without):
    native._FLAGS += (f"-mno-{without}",)
    assert native.has_layers()
    for case in FEW:
        check(*case)


if __name__ == "__main__":
    main(*sys.argv[1:])
