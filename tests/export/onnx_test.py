"""The ONNX form of functions and models against JAX, and cases that have no such form."""

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from model_variants import VARIANTS, built, inputs_of_variant

from jaxrank import models
from jaxrank.export.onnx.convert import UnsupportedError, to_onnx
from jaxrank.export.onnx.graph import Tensor

FLOAT, INT = np.dtype(np.float32), np.dtype(np.int32)


def run(function, *arrays):
    """Returns the result of the ONNX form of a function of arrays [batch, ...]."""
    inputs = [Tensor(f"x{i}", a.shape[1:], a.dtype) for i, a in enumerate(arrays)]
    model = to_onnx(lambda *xs: [function(*xs)], inputs, ["y"])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {i.name: a for i, a in zip(inputs, arrays, strict=True)})[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_every_model_gives_the_same_logits_for_any_number_of_examples(name):
    model, variables, dims = built(name)
    single = jax.tree.map(np.float32, variables)
    inputs = inputs_of_variant(np.float32, dims)
    arrays, tree = jax.tree.flatten((inputs.all_dense, inputs.all_reads))
    tensors = [Tensor(f"x{i}", a.shape[1:], a.dtype) for i, a in enumerate(arrays)]

    def infer(*arrays):
        dense, reads = jax.tree.unflatten(tree, arrays)
        return [model.infer(*single, models.Inputs(inputs.names, dense, reads))]

    session = onnxruntime.InferenceSession(to_onnx(infer, tensors, ["logits"]).SerializeToString())
    (expected,) = jax.jit(infer)(*arrays)
    for rows in (len(expected), 1):
        feed = {t.name: a[:rows] for t, a in zip(tensors, arrays, strict=True)}
        np.testing.assert_allclose(
            session.run(["logits"], feed)[0], expected[:rows], rtol=2e-5, atol=2e-5
        )


X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
TINY = np.float32([[1e-7, -1e-9, 0.3, -0.9], [0, 50, 1e30, -1e-20]])
FUNCTIONS = {
    "log1p": (jnp.log1p, TINY[:, [0, 1, 2, 3]]),
    "expm1": (jnp.expm1, np.minimum(TINY, 60)),
    "logaddexp": (lambda x: jnp.logaddexp(x, -30.0 * x), X),
    "sigmoid in the tails": (jax.nn.sigmoid, 30 * X),
    "softmax": (jax.nn.softmax, X),
    "integer powers": (lambda x: x**3 + x**-1 + x**2, X),
    "reductions": (lambda x: jnp.stack([x.max(1), x.min(1), x.prod(1), x.mean(1)], 1), X),
    "logic": (lambda x: jnp.float32((x > 0) & ~(x > 1) | (x != x)), X),
    "any and all": (lambda x: jnp.float32(jnp.stack([(x > 0).any(1), (x > 0).all(1)], 1)), X),
    "finite": (lambda x: jnp.float32(jnp.isfinite(1 / (x - x[:, :1]))), X),
    "remainder": (lambda x: jnp.fmod(x, 0.3), X),
    "clip and sign": (lambda x: jnp.clip(x, -0.5, 0.5) + jnp.sign(x) + jnp.abs(x), X),
    "rounding": (lambda x: jnp.floor(x) + 2 * jnp.ceil(x) + 4 * jnp.round(3 * x), X),
    "columns": (lambda x: x[:, jnp.array([3, 0, 0])] + x[:, ::2][:, :1] + x[:, -1:], X),
    "flip, pad and split": (
        lambda x: jnp.concatenate(
            jnp.split(jnp.pad(jnp.flip(x, 1), ((0, 0), (1, 2))), [2, 3], 1)[::2], 1
        ),
        X,
    ),
    "sums so far": (lambda x: jnp.cumsum(x, 1) + jnp.cumsum(x, 1)[:, ::-1], X),
    "largest": (lambda x: sum(jax.lax.top_k(x, 2)) + x.argmax(1)[:, None], X),
    "batched products": (lambda x: jnp.einsum("bi,bj,jk->bk", x, x, np.eye(4, 3)), X),
    "constants": (lambda x: x + jnp.sort(jnp.arange(4.0))[::-1][None], X),
    "merged examples": (lambda x: (x.reshape(-1, 1) + jnp.ones((1, 2))).reshape(-1, 8), X),
    "gelu and erf": (lambda x: jax.nn.gelu(x, approximate=False) + jax.nn.gelu(x), X),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_equal_results(name):
    function, x = FUNCTIONS[name]
    expected = np.asarray(function(x))
    np.testing.assert_allclose(
        run(function, x), expected, rtol=3e-6, atol=1e-37 if x is TINY else 1e-6
    )


def test_a_lookup_by_computed_places_is_clipped():
    x, ids = X, np.int32([[1], [9], [-2], [0], [3]])
    table = jnp.arange(12.0).reshape(4, 3)

    def read(x, ids):
        return x[:, :3] + jnp.take(table, ids[:, 0], axis=0, mode="clip")

    np.testing.assert_allclose(run(read, x, ids), read(x, ids), rtol=1e-6)


UNSUPPORTED = {
    "sort": (r"sort has no", lambda x, i: jnp.sort(x)),
    "bits": (r"and of int32 has no", lambda x, i: i & 3),
    "round": (
        r"round away from zero has no",
        lambda x, i: jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO),
    ),
    "select_n": (
        r"select_n by a number has no",
        lambda x, i: jax.lax.select_n(jnp.clip(i, 0, 1), x, 2 * x),
    ),
    "reshape": (
        r"reshape with an order of dimensions has no",
        lambda x, i: jax.lax.reshape(x, x.shape, dimensions=(1, 0)),
    ),
    "slice": (r"slice of the axis of examples has no", lambda x, i: jnp.roll(x, 1, axis=0)),
    "first examples": (
        r"of the axis of examples has no",
        lambda x, i: x[1:],
    ),
    "dynamic_slice": (
        r"dynamic_slice at a computed place has no",
        lambda x, i: jax.lax.dynamic_slice_in_dim(jnp.ones((4, 3)), i.max(), 2),
    ),
    "pad": (
        r"pad with padding_config=.*-1.* has no",
        lambda x, i: jax.lax.pad(x, 0.0, ((0, 0, 0), (-1, 1, 0))),
    ),
    "number of examples": (r"dim_as_value has no", lambda x, i: x / x.shape[0]),
    "broadcast_in_dim": (
        r"a dimension batch \+ 1, no multiple of batch has no",
        lambda x, i: jnp.ones((x.shape[0] + 1, 1)) * x[:1],
    ),
    "elements": (
        r"gather of other elements in each example has no",
        lambda x, i: jnp.take_along_axis(x, i, 1),
    ),
    "gather": (
        r"gather of other elements than whole slices along one axis has no",
        lambda x, i: jnp.ones((4, 4)).at[i[:, :1], i[:, 1:2]].get(mode="clip"),
    ),
    "constant places": (
        r"gather at indices outside 0 to 2 has no",
        lambda x, i: x.at[:, jnp.array([0, 7])].get(mode="fill"),
    ),
    "computed places": (
        r"gather at computed places without mode='clip' has no",
        lambda x, i: jnp.ones((4, 3))[i[:, 0]],
    ),
    "random key": (r"random_seed has no", lambda x, i: x * jax.random.uniform(jax.random.key(0))),
    "a dtype that ONNX lacks": (
        r"convert_element_type has no",
        lambda x, i: x.astype(jnp.float8_e3m4),
    ),
    "a dtype that ONNX's operation lacks": (
        r"cannot run the model: .* lt: ",
        lambda x, i: (x > 0) < (x > 1),
    ),
    "a dtype that ONNX Runtime lacks": (
        r"cannot run the model: .*'tanh: ",
        lambda x, i: jnp.tanh(x.astype(jnp.bfloat16)),
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_primitive_without_a_form_is_named_with_its_source_line(name):
    message, function = UNSUPPORTED[name]
    inputs = [Tensor("x", (3,), FLOAT), Tensor("i", (3,), INT)]
    with pytest.raises(UnsupportedError, match=rf"{message}.*onnx_test.py:\d+.*<lambda>\)"):
        to_onnx(lambda x, i: [jnp.float32(function(x, i))], inputs, ["y"])


def test_models_hold_no_paths():
    model = to_onnx(lambda x: [jnp.tanh(x)], [Tensor("x", (3,), FLOAT)], ["y"])
    assert b"onnx_test" not in model.SerializeToString()
