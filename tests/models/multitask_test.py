"""Experts, gates and conversions against the formulas of their papers in NumPy."""

import contextlib
import decimal
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rankers
from rankers import apply_model, built, gradient_program, init_model, make_inputs

from jaxrank import models
from jaxrank.build import _check_ancestors
from jaxrank.errors import InputError
from jaxrank.models.products import StackedDense
from jaxrank.outputs import joint_logits, outputs

MMOE = dict(multitask="mmoe", experts=3, expert_mlp_units=(5, 4))
PLE = dict(multitask="ple", levels=3, experts=3, task_experts=2, expert_mlp_units=(5, 4))
CGC = {**PLE, "levels": 1}


ALONE = dict(cross="none", mlp_units=())
PARALLEL = dict(
    cross="dcn_v2", structure="parallel", mlp_units=(6,), task_mlp_units=(3,), norm="layer"
)
STACKED = dict(cross="dcn", structure="stacked", mlp_units=(6,), task_mlp_units=(3,), norm="batch")


@pytest.mark.parametrize(
    ("multitask", "around"),
    [
        (MMOE, PARALLEL),
        (MMOE, STACKED),
        (PLE, ALONE),
        (PLE, STACKED),
        (CGC, PARALLEL),
        ({**PLE, "task_experts": 1, "experts": 1}, ALONE),
    ],
)
def test_logits_are_those_of_experts_and_gates_one_by_one(multitask, around):
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(**multitask, **around)
        logits, _ = apply_model(model, params, state, make_inputs(floats, vectors), train=True)
        assert logits.dtype == np.float64
    fields = ("cross", "structure", "norm")
    shape = {k: around[k] for k in fields if k in around}
    expected = rankers.ranker(params, floats, vectors, multitask=multitask["multitask"], **shape)
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    "config",
    [
        dict(cross="none", mlp_units=(), **MMOE),
        dict(cross="dcn_v2", mlp_units=(4,), task_mlp_units=(3,), norm="batch", **MMOE),
        dict(cross="none", mlp_units=(), **PLE),
        dict(cross="none", mlp_units=(4,), task_mlp_units=(3,), norm="layer", **CGC),
        dict(cross="none", mlp_units=(4,), norm="batch", **{**PLE, "levels": 2}),
    ],
)
def test_gradients_are_the_slopes_of_the_numpy_formula(config):
    rankers.slopes_agree(config)


def test_each_task_of_ple_reads_its_own_experts_and_the_shared_ones_only():
    """Holds for one level. With two, shared experts pass on outputs of all experts before them."""
    for levels, reaches in ((1, False), (2, True)):
        model, params, state, floats, vectors = built(dtype=np.float32, **{**PLE, "levels": levels})

        def first_task(params, model=model, state=state, floats=floats, vectors=vectors):
            return model.apply(params, state, make_inputs(floats, vectors), train=True)[0][
                :, 0
            ].sum()

        kernels = jax.jit(jax.grad(first_task))(params)["ple"]["level_0"]["task_experts"]["layer_0"]
        moved = np.abs(kernels["kernel"]).sum(axis=(1, 2)) > 0
        np.testing.assert_array_equal(moved, [True, True, reaches, reaches])


@pytest.mark.parametrize("shape", [(7, 4), (7, 1, 4), (7, 3, 4), (7, 6, 4)])
def test_stacked_layers_are_the_layers_one_by_one(shape):
    r = np.random.default_rng(0)
    x, kernel, bias = r.normal(size=shape), r.normal(size=(6, 4, 5)), r.normal(size=(6, 5))
    layer = StackedDense(6, 5, "highest")
    with jax.enable_x64(True):
        assert jax.eval_shape(layer.init, jax.random.key(0), x)["params"]["kernel"].shape == (
            6,
            4,
            5,
        )
        result = layer.apply({"params": {"kernel": kernel, "bias": bias}}, x)
    groups = 1 if x.ndim == 2 else shape[1]
    for number in range(6):
        read = x if x.ndim == 2 else x[:, number // (6 // groups)]
        expected = read @ kernel[number] + bias[number]
        np.testing.assert_allclose(result[:, number], expected, rtol=1e-10)


@pytest.mark.parametrize("multitask", ["mmoe", "ple"])
def test_the_program_of_many_experts_is_as_long_as_that_of_few(multitask):
    """Compares programs for 2,000 features, gradients included. Sums over many experts are split
    into parts on CPU, which adds a constant number of instructions."""
    floats, none = np.zeros((64, 2000), np.float32), ()
    lengths = []
    for experts in (2, 80, 120):
        several = {"task_experts": experts} if multitask == "ple" else {}
        model = models.build(
            tasks=2,
            cross="none",
            mlp_units=(),
            norm="batch",
            multitask=multitask,
            experts=experts,
            expert_mlp_units=(3, 2),
            **several,
        )
        shapes = jax.eval_shape(model.init, jax.random.key(0), make_inputs(floats, none))
        params, state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        assert len(jax.tree.leaves(params)) < 60
        lengths.append(len(gradient_program(model, params, state, floats, none)))
    assert lengths[0] <= lengths[1] < lengths[0] + 10
    assert lengths[1] == lengths[2] < 1000


def test_kernels_of_experts_and_gates_start_with_the_variance_of_glorot_for_each():
    model = models.build(tasks=2, cross="none", mlp_units=(), **{**PLE, "expert_mlp_units": (50,)})
    params, _ = init_model(model, make_inputs(np.zeros((1, 400), np.float32), ()))
    level = params["ple"]["level_0"]
    for name, layers in (("task_experts", 4), ("shared_experts", 3)):
        dense = level[name]["layer_0"]
        assert dense["kernel"].shape == (layers, 400, 50)
        for kernel in dense["kernel"]:
            np.testing.assert_allclose(np.var(kernel), 2 / 450, rtol=0.1)
        assert not dense["bias"].any()
    assert set(level["task_gate"]["logits"]) == {"kernel"}
    for kernel in level["task_gate"]["logits"]["kernel"]:
        np.testing.assert_allclose(np.var(kernel), 2 / (400 + 5), rtol=0.15)


def test_parameters_of_experts_have_stable_names():
    model, params, _, _, _ = built(cross="none", mlp_units=(), **{**PLE, "levels": 2})
    assert set(params) == {"ple", "head_0", "head_1"}
    shared, last = {"task_experts", "shared_experts", "task_gate"}, params["ple"]["level_1"]
    assert set(params["ple"]["level_0"]) == shared | {"shared_gate"}
    assert set(last) == shared
    assert last["task_gate"]["logits"]["kernel"].shape == (2, 4, 2 + 3)
    expert = {11: 11 * 5 + 5 + 5 * 4 + 4, 4: 4 * 5 + 5 + 5 * 4 + 4}
    gates = 2 * 11 * 5 + 11 * 7 + 2 * 4 * 5
    count = 7 * expert[11] + 7 * expert[4] + gates
    assert models.describe(params) == {"ple": count, "head_0": 5, "head_1": 5}
    _, params, _, _, _ = built(cross="none", mlp_units=(), task_mlp_units=(3,), **MMOE)
    assert set(params) == {"mmoe", "task_0", "task_1", "head_0", "head_1"}
    assert set(params["mmoe"]) == {"experts", "gate"}


def test_units_of_experts_are_dropped_each_for_itself():
    """One unit in each of 40 experts, of which all tasks take the mean."""
    model = models.build(
        tasks=2, cross="none", mlp_units=(), dropout=0.25, multitask="mmoe", experts=40,
        expert_mlp_units=(1,),
    )  # fmt: skip
    floats = np.ones((256, 1), np.float32)
    params, state = init_model(model, make_inputs(floats, ()))
    params = jax.tree.map(jnp.zeros_like, params)
    params["mmoe"]["experts"]["layer_0"]["bias"] = jnp.ones((40, 1))
    params["head_0"]["kernel"] = params["head_1"]["kernel"] = jnp.ones((1, 1))
    logits, _ = apply_model(
        model, params, state, make_inputs(floats, ()), train=True, key=jax.random.key(1)
    )
    logits = np.asarray(logits)
    np.testing.assert_array_equal(logits[:, 0], logits[:, 1])
    kept = logits[:, 0] * 40 * 0.75
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-3)
    np.testing.assert_allclose(kept.mean(), 30, atol=1)
    np.testing.assert_allclose(kept.std(), math.sqrt(40 * 0.25 * 0.75), rtol=0.2)
    logits, _ = apply_model(model, params, state, make_inputs(floats, ()), train=False)
    np.testing.assert_allclose(logits, 1, rtol=1e-6)


GRID = (-80.0, -17.3, -2.0, -0.125, 0.0, 0.7, 5.0, 16.6, 80.0)


def exactly(*logits):
    """The logit of the product of the sigmoids, and its slope by each: 200 digits."""
    with decimal.localcontext(prec=200):
        each = [1 / (1 + (-decimal.Decimal(logit)).exp()) for logit in logits]
        p = math.prod(each)
        return float((p / (1 - p)).ln()), [float((1 - q) / (1 - p)) for q in each]


def test_the_logit_of_a_conversion_is_that_of_click_times_conversion():
    pairs = np.array([(a, b) for a in GRID for b in GRID], np.float32)
    result = joint_logits(jnp.asarray(pairs), (-1, 0))
    np.testing.assert_array_equal(result[:, 0], pairs[:, 0])
    exact = [exactly(*pair) for pair in pairs.tolist()]
    np.testing.assert_allclose(result[:, 1], [value for value, _ in exact], rtol=1e-6, atol=2e-7)
    slopes = jax.grad(lambda x: joint_logits(x, (-1, 0))[:, 1].sum())(jnp.asarray(pairs))
    np.testing.assert_allclose(slopes, [slope for _, slope in exact], rtol=2e-5, atol=1e-30)


def test_chains_of_parents_are_multiplied_to_the_end_in_any_order_of_tasks():
    r = np.random.default_rng(0)
    rows = r.normal(size=(20, 4), scale=20).astype(np.float32)
    parents = (2, 0, -1, 2)
    chains = [(0, 2), (1, 0, 2), (2,), (3, 2)]
    result = joint_logits(jnp.asarray(rows), parents)
    jacobian = jax.vmap(jax.jacrev(lambda x: joint_logits(x[None], parents)[0]))(rows)
    for example, row in enumerate(rows.tolist()):
        for task, chain in enumerate(chains):
            value, slopes = exactly(*(row[i] for i in chain))
            np.testing.assert_allclose(result[example, task], value, rtol=1e-5, atol=1e-6)
            expected = np.zeros(4)
            expected[list(chain)] = slopes
            np.testing.assert_allclose(jacobian[example, task], expected, rtol=1e-4, atol=1e-30)


def test_logits_far_out_have_finite_joint_logits_and_slopes():
    rows = jnp.array([(a, b) for a in (-3e4, -1e3, 1e3, 3e4) for b in (-3e4, 0, 3e4)], jnp.float32)
    slopes = jax.grad(lambda x: joint_logits(x, (-1, 0))[:, 1].sum())(rows)
    assert np.isfinite(joint_logits(rows, (-1, 0))).all()
    assert np.isfinite(slopes).all()


def test_outputs_are_the_joint_logits_of_what_the_model_puts_out_and_the_biases():
    alone = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    bias, scale = np.array([1.5, -0.5], np.float32), np.array([1.0, 2.0], np.float32)
    joint = outputs(*map(jnp.asarray, (alone, bias, scale)), (1, -1))
    np.testing.assert_array_equal(joint[:, 1], alone[:, 1] * 2 + bias[1])
    expected = [exactly(*row)[0] for row in (alone * scale + bias).tolist()]
    np.testing.assert_allclose(joint[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("parents", "task"), [((-1, 1), "b"), ((1, 2, 1, -1), "a"), ((-1, 0, 1, 2, 3), "")]
)
def test_a_task_that_is_its_own_ancestor_is_rejected(parents, task):
    message = f"model.parents: must not form a cycle.*task '{task}' never end"
    with pytest.raises(InputError, match=message) if task else contextlib.nullcontext():
        _check_ancestors(parents, "abcde"[: len(parents)])
