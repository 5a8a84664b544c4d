"""Precision of matrix products, their bits, and what they cost."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rankers
from checkout import ROOT
from rankers import built, gradient_program, init_model, make_inputs

from jaxrank import models
from jaxrank.models import products
from jaxrank.models.products import compiler_options, layer, product

PARTS = slice(0, 3), slice(3, 6)
# One of each kind of layer.
CONFIGS = [
    dict(cross="dcn_v2", structure="parallel", task_mlp_units=(3,), norm="batch"),
    dict(cross="dcn", structure="parallel", norm="layer"),
    dict(cross="dcn_v2_low_rank", cross_rank=3, multitask="mmoe", expert_mlp_units=(5, 4)),
    dict(
        cross="dcn_mix", cross_rank=3, multitask="ple", expert_mlp_units=(5, 4), task_mlp_units=(3,)
    ),
    dict(cross="dlrm", bottom_mlp_units=(4,), structure="parallel"),
]
NAMES = [config["cross"] for config in CONFIGS]


def build_model(config, dtype=np.float32, **more):
    dims = (4, 4) if config["cross"] == "dlrm" else (2, 4)
    return built(mlp_units=(6,), dims=dims, dtype=dtype, **config, **more)


def find_products(config, **more):
    return [e for e in gradient_program(*build_model(config, **more)) if _is_product(e)]


def _is_product(equation):
    return equation.primitive.name == "dot_general"


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_every_matrix_product_states_its_precision(config):
    products = find_products(config)
    assert len(products) > 10
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert all(e.params["precision"] == highest for e in products)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_bfloat16_products_multiply_bfloat16_and_give_float32(config):
    """Products of the gradient are included."""
    products = find_products(config, precision="bfloat16")
    assert len(products) > 10
    for equation in products:
        assert [v.aval.dtype for v in equation.invars] == [jnp.bfloat16] * 2, equation
        assert equation.params["preferred_element_type"] == np.float32
        assert equation.outvars[0].aval.dtype == np.float32


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_a_bfloat16_model_begins_near_the_float32_one_and_gives_float32(config):
    """Uses silu, because the slope of relu jumps where rounding moves a unit over its corner."""
    floats, vectors = rankers.random_input(batch=64, dims=(4, 4))
    mix = np.random.default_rng(3).normal(size=(64, 2)).astype(np.float32)
    result = {}
    limits = {"bfloat16": (1e-2, 2e-2), "mixed_bfloat16": (2e-2, 3e-2)}
    for precision in ("highest", *limits):
        model = models.build(
            tasks=2, mlp_units=(32,), activation="silu", precision=precision, **config
        )
        if precision == "highest":
            params, state = init_model(model, make_inputs(floats, vectors))

        def loss(params, state, model=model):
            logits, new = model.apply(params, state, make_inputs(floats, vectors), train=True)
            return (mix * logits).sum(), (logits, new)

        grads, (logits, new) = jax.jit(jax.grad(loss, has_aux=True))(params, state)
        assert {a.dtype for a in jax.tree.leaves((grads, logits, new))} == {np.dtype("float32")}
        result[precision] = logits, jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)])
    for rounding in limits:
        pairs = zip(result["highest"], result[rounding], limits[rounding], strict=True)
        for exact, rounded, most in pairs:
            distance = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
            assert 1e-5 < distance < most


def test_bfloat16_products_are_added_up_in_float32():
    """1,001 has no bfloat16, and a bfloat16 sum of ones stays at 256."""
    ones = jnp.ones((1001, 1))
    of_x, of_kernel = jax.grad(lambda x, k: product(x, k, "bfloat16").sum(), argnums=(0, 1))(
        jnp.ones((1001, 3)), jnp.ones((3, 1001))
    )
    run = jax.jit(lambda x, k: product(x, k, "bfloat16"))
    np.testing.assert_array_equal(run(ones.T, ones), 1001)
    np.testing.assert_array_equal(of_x, 1001)
    np.testing.assert_array_equal(of_kernel, 1001)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_a_mixed_model_adds_up_no_axis_in_bfloat16(config):
    """XLA may, to the last bit of bfloat16, where a program says so; products state their sums."""
    equations = gradient_program(*build_model(config, precision="mixed_bfloat16"))
    sums = [e for e in equations if e.primitive.name in ("reduce_sum", "cumsum", "reduce_prod")]
    assert len(sums) > 5
    for equation in sums:
        (x,) = equation.invars
        added = [x.aval.shape[axis] for axis in equation.params["axes"]]
        assert x.aval.dtype == np.float32 or set(added) <= {1}, equation


@pytest.mark.parametrize("form", ["plain", "relu", "cross"])
@pytest.mark.parametrize("by_native", [True, False])
def test_a_mixed_layer_adds_up_in_float32_and_rounds_what_it_gives_to_others(form, by_native):
    """1,001 has no bfloat16."""
    examples = 1001 if by_native else 64 - 1  # too few multiplications for code in C++
    x, kernel, bias = jnp.ones((examples, 1001)), jnp.ones((1001, 1001)), jnp.full(1001, 3.0)
    if not by_native:
        kernel, bias = kernel[:, :1], bias[:1]
    x0 = jnp.ones((examples, len(bias)))

    def run_layer(x, kernel, bias, x0):
        more = dict(x0=x0, past=x0) if form == "cross" else {}
        result = layer(x, kernel, bias, "mixed_bfloat16", form, **more)
        return result[0] if form == "cross" else result

    y, back = jax.vjp(run_layer, x, kernel, bias, x0)
    of_x, of_kernel, of_bias, of_x0 = back(jnp.ones_like(y))
    assert y.dtype == jnp.bfloat16
    assert {a.dtype for a in (of_x, of_kernel, of_bias, of_x0)} == {np.dtype("float32")}
    np.testing.assert_array_equal(y.astype(np.float32), 1004)  # also where 1 is added
    np.testing.assert_array_equal(of_x, float(jnp.bfloat16(len(bias))))
    np.testing.assert_array_equal(of_kernel, examples)
    np.testing.assert_array_equal(of_bias, examples)
    np.testing.assert_array_equal(of_x0, 1004 + 1 if form == "cross" else 0)


@pytest.mark.parametrize(("shape", "width"), [((5, 7, 4), 3), ((97, 4), 40)], ids=str)
def test_a_bfloat16_product_rounds_its_factors_and_the_gradient_that_comes_in(shape, width):
    """Examples are turned over for the gradient of the wide kernel."""
    r, leading = np.random.default_rng(0), shape[:-2]
    shapes = shape, (*leading, 4, width), (*shape[:-1], width)
    x, kernel, g = (r.normal(size=s).astype(np.float32) for s in shapes)

    def rounded(a):
        return np.asarray(jnp.asarray(a).astype(jnp.bfloat16), np.float64)

    y, back = jax.vjp(lambda x, k: product(x, k, "bfloat16"), x, kernel)
    a, b, c = rounded(x), rounded(kernel), rounded(g)
    expected = a @ b, c @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ c
    for result, wanted in zip((y, *back(g)), expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", ["highest", "bfloat16"])
@pytest.mark.parametrize(
    ("leading", "examples", "size", "width"),
    [((), 700, 150, 3), ((2,), 300, 10, 40), ((), 1030, 300, 120), ((), 64, 200, 20)],
)
def test_sums_in_parts_are_those_of_the_whole(leading, examples, size, width, precision):
    r = np.random.default_rng(0)
    shapes = (*leading, examples, size), (*leading, size, width), (*leading, examples, width)
    x, kernel, g = (r.integers(-8, 8, shape).astype(np.float32) for shape in shapes)

    def all_products(x, kernel, g):
        y, back = jax.vjp(lambda x, k: product(x, k, precision), x, kernel)
        return y, *back(g)

    compiled = jax.jit(all_products, compiler_options=compiler_options(precision, "cpu"))
    expected = x @ kernel, g @ kernel.swapaxes(-1, -2), x.swapaxes(-1, -2) @ g
    for result, wanted in zip(compiled(x, kernel, g), expected, strict=True):
        np.testing.assert_array_equal(result, wanted)  # whole numbers, so whatever the order


# y, the gradient of x, and that of the kernel.
@pytest.mark.parametrize(
    ("leading", "axis_a", "axis_b"), [((), -1, -2), ((3,), -1, -1), ((), -2, -2)], ids=str
)
def test_products_of_sides_filled_up_are_those_of_the_sides_as_they_are(leading, axis_a, axis_b):
    r = np.random.default_rng(0)
    for m, n, summed in ((33, 47, 61), (40, 50, 64), (100, 3, 7)):
        sides = ((m, summed), axis_a), ((n, summed), axis_b)
        shapes = [(*leading, *(s if axis == -1 else s[::-1])) for s, axis in sides]
        a, b = (jnp.asarray(r.integers(-8, 8, shape), jnp.bfloat16) for shape in shapes)
        filled, whole = (
            f(a, b, axis_a, axis_b, "default") for f in (products._filled, products._whole)
        )
        assert filled.shape == (*leading, m, n)
        assert filled.dtype == whole.dtype == jnp.float32
        np.testing.assert_array_equal(filled, whole)


def test_on_gpu_alone_wide_bfloat16_products_have_sides_filled_up():
    """Matrix units require aligned sides. Float32 products and narrow ones are left unpadded."""

    def pads(platform, precision, size, width):
        def loss(x, kernel):
            return product(x, kernel, precision).sum()

        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(
            jnp.ones((64, size)), jnp.ones((size, width))
        )
        return "stablehlo.pad" in traced.lower(lowering_platforms=(platform,)).as_text()

    assert pads("cuda", "bfloat16", 47, 40)
    assert pads("cuda", "bfloat16", 40, 47)
    for others in ((40, 48), (7, 40)):
        assert not pads("cuda", "bfloat16", *others)
    assert not pads("cuda", "highest", 47, 40)
    assert not pads("cpu", "bfloat16", 47, 40)
    assert not pads("tpu", "bfloat16", 47, 40)


@pytest.mark.parametrize(
    ("by_native", "precisions"),
    [(True, ["highest", "bfloat16"]), (False, ["bfloat16", "mixed_bfloat16"])],
)
def test_bits_of_products_do_not_depend_on_the_number_of_threads(by_native, precisions):
    """The bits of a single product of XLA do depend on it."""
    code = """
import functools, sys
import jax, numpy as np
from jaxrank.models import products
r = np.random.default_rng(0)
def bits(function, precision, *arrays):
    options = products.compiler_options(precision, "cpu")
    result = jax.jit(function, compiler_options=options)(*arrays)
    return [np.asarray(x, np.float32).view(np.uint32).sum(dtype=np.uint64) for x in result]
def ours(precision, x, kernel, g):
    y, back = jax.vjp(lambda x, k: products.product(x, k, precision), x, kernel)
    return y, *back(g.astype(y.dtype))
def plain(x, kernel, g):
    return x @ kernel, g @ kernel.T, x.T @ g
shapes = (256, 400, 32), (8192, 128, 64), (512, 1000, 2)
for n, size, width in shapes:
    arrays = [r.normal(size=s).astype(np.float32) for s in [(n, size), (size, width), (n, width)]]
    for precision in sys.argv[1:]:
        of = functools.partial(ours, precision)
        print(*bits(of, precision, *arrays), *bits(plain, "highest", *arrays))
"""
    result = []
    for threads in (3, 32):
        settings = {"PJRT_NPROC": str(threads), "JAXRANK_NATIVE": str(int(by_native))}
        env = os.environ | settings | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", code, *precisions]
        lines = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
        result.append([line.split() for line in lines.stdout.splitlines()])
    ours, plain = ([[line[part] for line in lines] for lines in result] for part in PARTS)
    assert ours[0] == ours[1]
    assert plain[0] != plain[1]


@pytest.mark.parametrize("precision", ["highest", "bfloat16"])
def test_on_cpu_float32_products_are_of_the_one_library_and_bfloat16_ones_of_the_other(precision):
    """All of the gradient, too: a bfloat16 product outside of the library is a float32 one."""
    x, kernel = jnp.ones((64, 48)), jnp.ones((48, 40))
    step = jax.jit(
        lambda x, k, g: jax.vjp(lambda x, k: product(x, k, precision), x, k)[1](g),
        compiler_options=compiler_options(precision, "cpu"),
    )
    hlo = step.lower(x, kernel, jnp.ones((64, 40))).compile().as_text()
    assert hlo.count("__ynn_fusion") == {"highest": 0, "bfloat16": 2}[precision]
    assert not compiler_options(precision, "tpu")


def test_the_options_for_gpu_are_such_that_xla_has():
    options = compiler_options("bfloat16", "gpu")
    assert options
    assert jax.jit(lambda x: x + 1, compiler_options=options)(1.0) == 2.0


@pytest.mark.parametrize(
    ("config", "precision"),
    zip(CONFIGS, ["highest", "bfloat16"] * 3, strict=False),
    ids=NAMES,
)
def test_operations_of_an_example_are_two_for_each_weight_and_those_of_mixing(config, precision):
    model, params, _, floats, vectors = build_model(config, precision=precision)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    weights = sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")
    # Gates times experts, of two tasks: width 4, defaults of 4 experts, 2 of each task, 2 levels.
    mixing = {"mmoe": 2 * 4 * 4, "ple": 2 * (2 * (2 + 4) * 4) + (2 * 2 + 4) * 4}
    pairs = (1 + 3) ** 2 * 4 if config["cross"] == "dlrm" else 0
    expected = 2 * (weights + mixing.get(config.get("multitask"), 0) + pairs)
    assert model.flops(make_inputs(floats, vectors)) == expected
    shapes = jax.eval_shape(lambda: (floats, vectors))
    assert model.flops(make_inputs(*shapes)) == expected


@pytest.mark.parametrize("width", [429, 430])
def test_zeros_that_sides_are_filled_up_with_are_no_operations(width):
    counts = [
        models.build(tasks=1, cross="dcn_v2_low_rank", precision=precision).flops(
            make_inputs(np.zeros((1, width), np.float32), ())
        )
        for precision in ("highest", "bfloat16")
    ]
    assert counts[0] == counts[1] > 0


def test_operations_of_a_sequence_are_those_of_what_reads_its_pool():
    model = models.build(tasks=1, cross="none", mlp_units=())
    sequence = (np.zeros((9, 5, 3), np.float32), np.zeros((9, 5), bool))
    assert model.flops(make_inputs(np.zeros((9, 2), np.float32), (), (sequence,))) == 2 * (2 + 3)


def test_a_training_step_takes_three_times_the_operations_of_a_forward_pass():
    config = dict(cross="dcn_v2", task_mlp_units=(3,))
    model, params, state, floats, vectors = build_model(config)
    step = 0
    for equation in filter(_is_product, gradient_program(model, params, state, floats, vectors)):
        (contracted, _), _ = equation.params["dimension_numbers"]
        length = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
        step += 2 * np.prod(equation.outvars[0].aval.shape) * length
    assert step == 3 * len(floats) * model.flops(make_inputs(floats, vectors))
