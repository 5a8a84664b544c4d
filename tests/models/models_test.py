"""Models against the formulas of their papers in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rankers
from rankers import (
    BATCH,
    apply_model,
    apply_sharded,
    built,
    init_model,
    joined,
    make_inputs,
    random_input,
)

from jaxrank import models
from jaxrank.errors import InputError
from jaxrank.models.tower import random_bits


@pytest.mark.parametrize(  # each pair of values once
    ("cross", "structure", "mlp_units", "task_mlp_units"),
    [
        ("dcn_v2", "stacked", (), ()),
        ("dcn_v2", "parallel", (5, 4), (3,)),
        ("dcn", "stacked", (5, 4), ()),
        ("dcn", "parallel", (), (3,)),
        ("none", "stacked", (5, 4), (3,)),
        ("none", "parallel", (), ()),
    ],
)
def test_logits_are_those_of_the_written_out_formula(cross, structure, mlp_units, task_mlp_units):
    shape = dict(cross=cross, structure=structure)
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(
            mlp_units=mlp_units, task_mlp_units=task_mlp_units, **shape
        )
        logits, _ = apply_model(model, params, state, make_inputs(floats, vectors), train=False)
        assert logits.dtype == np.float64
    expected = rankers.ranker(params, floats, vectors, **shape)
    np.testing.assert_allclose(logits, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("structure", "config"),
    [
        ("stacked", dict(cross="dcn_v2_low_rank", cross_rank=3)),
        ("parallel", dict(cross="dcn_mix", cross_rank=3, cross_experts=2)),
        ("stacked", dict(cross="dlrm", bottom_mlp_units=(3,))),
        ("parallel", dict(cross="dlrm", bottom_mlp_units=(), norm="batch")),
        ("parallel", dict(cross="dcn_v2", dense_mlp_units=(7, 4))),
        ("stacked", dict(cross="none", dense_mlp_units=(3,), norm="batch")),
    ],
)
def test_other_interactions_are_those_of_the_written_out_formula(config, structure):
    dims = (2, 2) if config["cross"] == "dlrm" else (2, 4)
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(
            mlp_units=(5,), structure=structure, dims=dims, **config
        )
        logits, _ = apply_model(model, params, state, make_inputs(floats, vectors), train=True)
        assert logits.dtype == np.float64
    expected = rankers.ranker(
        params,
        floats,
        vectors,
        cross=config["cross"],
        structure=structure,
        norm=config.get("norm", "none"),
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-11)


def test_dot_products_reach_pooled_sequences_and_need_no_floats():
    """An empty query pools by the mean: here (1, 1) and, of one filled place, (2, 0)."""
    model = models.build(tasks=1, cross="dlrm", mlp_units=())
    vectors = (np.array([[[3.0, 5.0]], [[7.0, 11.0]]], np.float32),)
    sequence = np.array([[[0, 2], [2, 0]], [[2, 0], [9, 9]]], np.float32)
    filled = np.array([[True, True], [True, False]])
    none = np.zeros((2, 0), np.float32)
    params, state = init_model(model, make_inputs(none, vectors, ((sequence, filled),)))
    assert set(params) == {"head", "sequence_0"}
    params["head"]["kernel"] = jnp.ones((1, 1))
    logits, _ = apply_model(
        model, params, state, make_inputs(none, vectors, ((sequence, filled),)), train=False
    )
    np.testing.assert_allclose(logits[:, 0], [3 + 5, 2 * 7], rtol=1e-6)


def test_dot_products_have_a_gradient_that_xla_knows_to_be_without_duplicates():
    model = models.build(tasks=1, cross="dlrm", mlp_units=())
    floats, vectors = jnp.ones((3, 0)), (jnp.ones((3, 4, 2)),)
    params, _ = init_model(model, make_inputs(floats, vectors))

    def total_logits(vectors):
        return model.apply(params, {}, make_inputs(floats, vectors), train=False)[0].sum()

    scatters = [
        line
        for line in jax.jit(jax.grad(total_logits)).lower(vectors).as_text().splitlines()
        if "stablehlo.scatter" in line
    ]
    assert scatters
    assert all("unique_indices = true" in line for line in scatters)


def test_dot_products_of_vectors_that_do_not_fit_are_rejected():
    model = models.build(tasks=1, cross="dlrm")
    key, (floats, vectors) = jax.random.key(0), random_input()
    with pytest.raises(InputError, match=r"'dlrm' must have vectors of one dimension.*\[2, 4\]"):
        model.init(key, make_inputs(floats, vectors))
    with pytest.raises(InputError, match=r"'dlrm' must have vectors of one dimension.*no vectors"):
        model.init(key, make_inputs(floats, ()))
    with pytest.raises(InputError, match=r"'dlrm' must have two vectors.*found 1"):
        model.init(key, make_inputs(floats[:, :0], vectors[1:]))


def test_floats_pass_their_layers_before_they_meet_the_vectors():
    _, params, _, _, _ = built(mlp_units=(5,), dense_mlp_units=(7, 4))
    assert models.describe(params) == {
        "bottom": 3 * 7 + 7 + 7 * 4 + 4,
        "cross": 2 * (12 * 12 + 12),  # of 4 and, of the vectors, 8 numbers
        "tower": 12 * 5 + 5,
        "head": 5 * 2 + 2,
    }
    assert params["bottom"]["layer_1"]["kernel"].shape == (7, 4)


def test_without_layers_of_their_own_floats_are_crossed_as_they_are():
    _, params, _, _, _ = built(mlp_units=(5,))
    _, same, _, _, _ = built(mlp_units=(5,), dense_mlp_units=())
    assert set(params) == {"cross", "tower", "head"}
    assert params["cross"]["layer_0"]["kernel"].shape == (11, 11)
    jax.tree.map(np.testing.assert_array_equal, params, same)


def test_layers_of_floats_that_are_not_there_are_rejected():
    model = models.build(tasks=1, dense_mlp_units=(7, 4))
    floats, vectors = random_input()
    with pytest.raises(InputError, match=r"model.dense_mlp_units.*\(7, 4\)"):
        model.init(jax.random.key(0), make_inputs(floats[:, :0], vectors))


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_normalised_towers_are_those_of_the_written_out_formula(norm):
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(
            cross="none", mlp_units=(5, 4), norm=norm, task_mlp_units=(3,)
        )
        logits, _ = apply_model(model, params, state, make_inputs(floats, vectors), train=True)
    expected = rankers.ranker(params, floats, vectors, cross="none", structure="stacked", norm=norm)
    np.testing.assert_allclose(logits, expected, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("tanh", np.tanh),
        ("silu", lambda x: x / (1 + np.exp(-x))),
        ("gelu", lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_activations_are_those_of_their_names(name, formula):
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(cross="none", mlp_units=(5,), activation=name)
        logits, _ = apply_model(model, params, state, make_inputs(floats, vectors), train=False)
    params = jax.tree.map(np.asarray, params)
    deep = rankers.tower(params["tower"], joined(floats, vectors), act=formula)
    expected = deep @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-11)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["prelu", "dice"])
def test_learned_activations_have_a_slope_where_their_gate_is_closed(name, train):
    settings = dict(cross="none", mlp_units=(5, 4), activation=name)
    if name == "dice":
        settings["batch_norm_momentum"] = 0.75
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(**settings)
        logits, changed = model.apply(params, state, make_inputs(floats, vectors), train=train)
    x = joined(floats, vectors)
    for layer in range(2):
        dense, slope = (params["tower"][f"{part}_{layer}"] for part in ("layer", "activation"))
        x = x @ dense["kernel"] + dense["bias"]
        gate = (x > 0).astype(float)
        if name == "dice":
            moments = state["batch_stats"]["tower"][f"activation_{layer}"]["norm"]
            mean, var = (x.mean(0), x.var(0)) if train else (moments["mean"], moments["var"])
            gate = 1 / (1 + np.exp(-(x - mean) / np.sqrt(var + 1e-5)))
            kept = changed["batch_stats"]["tower"][f"activation_{layer}"]["norm"]["mean"]
            np.testing.assert_allclose(kept, 0.25 * mean if train else 0, rtol=1e-9)
        x = gate * x + (1 - gate) * slope["slope"] * x
    expected = x @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-9, atol=1e-10)


def test_dropouts_are_one_per_layer():
    with pytest.raises(InputError, match=r"one number per layer .*\(0.1,\), mlp_units=\(5, 4\)"):
        built(mlp_units=(5, 4), dropouts=(0.1,))


def test_each_layer_has_its_own_dropout():
    settings = dict(cross="none", mlp_units=(200, 300), activation="silu", dropout=0.9)
    model, params, state, floats, vectors = built(dtype=np.float32, dropouts=(0.0, 0.5), **settings)
    params["head"]["kernel"] = np.ones((300, 2), np.float32)
    hidden = rankers.tower(
        params["tower"], joined(floats, vectors), act=lambda x: x / (1 + np.exp(-x))
    )
    batch = make_inputs(floats, vectors)
    outputs = [
        model.apply(params, state, batch, train=True, key=jax.random.key(i))[0][:, 0]
        for i in range(40)
    ]
    # With independent masks of rate 1/2 of the last layer alone, the variance is the sum of x^2.
    spread = np.var(outputs, axis=0).mean() / np.square(hidden).sum(axis=1).mean()
    assert spread == pytest.approx(1, abs=0.3)


@pytest.mark.parametrize(
    "config",
    [
        dict(cross="dcn_v2", mlp_units=()),
        dict(cross="dcn", mlp_units=()),
        dict(cross="dcn_v2_low_rank", cross_rank=3, mlp_units=()),
        dict(cross="dcn_mix", cross_rank=3, cross_experts=2, mlp_units=()),
        dict(cross="dlrm", bottom_mlp_units=(3,), mlp_units=()),
        dict(cross="dcn_v2_low_rank", cross_rank=3, dense_mlp_units=(5, 4), mlp_units=(4,)),
        dict(cross="dlrm", structure="parallel", mlp_units=(4,), norm="layer"),
        dict(cross="dcn_v2", structure="parallel", mlp_units=(4,)),
        dict(cross="dcn", mlp_units=(4,), norm="batch"),
        dict(cross="none", mlp_units=(4,), norm="layer", task_mlp_units=(3,)),
    ],
)
def test_gradients_are_the_slopes_of_the_numpy_formula(config):
    rankers.slopes_agree(config, dims=(2, 2) if config["cross"] == "dlrm" else (2, 4))


def test_a_cross_network_without_interactions_in_its_input_returns_it_plus_bias():
    """x0 = 0 leaves only the additive bias of DCN; the bias of DCN-V2 is multiplied by x0."""
    zeros = np.zeros((2, 3), np.float32)
    for cross, expected in (("dcn", 5.0), ("dcn_v2", 0.0)):
        model = models.build(tasks=1, cross=cross, cross_layers=1, mlp_units=())
        params, state = init_model(model, make_inputs(zeros, ()))
        params = jax.tree.map(jnp.ones_like, params)
        params["head"]["bias"] = jnp.full(1, 2.0)
        logits, _ = apply_model(model, params, state, make_inputs(zeros, ()), train=False)
        np.testing.assert_array_equal(logits, expected if expected else 2.0)


def test_batch_norm_moves_its_running_statistics_and_uses_them_when_not_training():
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(cross="none", mlp_units=(4,), norm="batch")
        logits, new = apply_model(model, params, state, make_inputs(floats, vectors), train=True)
        again, same = model.apply(params, new, make_inputs(floats, vectors), train=False)
        assert {a.dtype for a in jax.tree.leaves((state, new))} == {np.dtype(np.float64)}
    params = jax.tree.map(np.asarray, params)
    layer = params["tower"]["layer_0"]
    x = joined(floats, vectors) @ layer["kernel"] + layer.get("bias", 0)
    stats = new["batch_stats"]["tower"]["norm_0"]
    np.testing.assert_allclose(stats["mean"], 0.1 * x.mean(0), rtol=1e-9)
    np.testing.assert_allclose(stats["var"], 0.9 + 0.1 * x.var(0), rtol=1e-9)
    deep = rankers.tower(
        params["tower"],
        joined(floats, vectors),
        "batch",
        jax.tree.map(np.asarray, new["batch_stats"]["tower"]),
    )
    expected = deep @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(again, expected, rtol=1e-9, atol=1e-12)
    assert same is new
    assert not np.allclose(logits, again)


@pytest.mark.parametrize("counted", [[0, 2, 3], []])
def test_examples_of_weight_0_do_not_count_in_batch_norm(counted):
    """Statistics ignore them, and do not change if no other example exists."""
    model, params, state, floats, vectors = built(
        dtype=np.float32, cross="none", mlp_units=(4,), norm="batch", batch_norm_momentum=0.75
    )
    weights = np.zeros(len(floats), np.float32)
    weights[counted] = len(floats) / max(len(counted), 1)
    share = models.Share(weights=weights, counted=np.float32(len(counted)))
    _, result = model.apply(params, state, make_inputs(floats, vectors, share=share), train=True)
    expected = state
    if counted:
        others = make_inputs(floats[counted], [v[counted] for v in vectors])
        _, expected = model.apply(params, state, others, train=True)
        moments = model.moments(params, state, others, jax.random.key(0))
        norm = expected["batch_stats"]["tower"]["norm_0"]
        alone = moments["batch_stats"]["tower"]["norm_0"]
        np.testing.assert_allclose(norm["var"], 0.75 + 0.25 * alone["var"], rtol=1e-5)
    jax.tree.map(lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-5), result, expected)


def test_batch_norm_keeps_a_small_spread_around_a_large_mean():
    model = models.build(tasks=1, cross="none", mlp_units=(1,), norm="batch", activation="tanh")
    floats = (1000 + np.arange(8) / 100)[:, None].astype(np.float32)
    params, state = init_model(model, make_inputs(floats, ()))
    params["tower"]["layer_0"]["kernel"] = jnp.ones((1, 1))
    params["head"]["kernel"] = jnp.ones((1, 1))
    logits, _ = apply_model(model, params, state, make_inputs(floats, ()), train=True)
    x = floats[:, 0].astype(np.float64)
    expected = np.tanh((x - x.mean()) / np.sqrt(x.var() + 1e-5))
    np.testing.assert_allclose(logits[:, 0], expected, atol=5e-3)


def test_a_sequence_is_pooled_by_a_softmax_over_its_filled_places():
    model = models.build(tasks=1, cross="none", mlp_units=())
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(4, 5, 3)).astype(np.float32)
    mask = np.arange(5)[None, :] < np.array([5, 2, 1, 0])[:, None]
    floats = np.zeros((4, 0), np.float32)
    params, state = init_model(model, make_inputs(floats, (), ((vectors, mask),)))
    assert not params["sequence_0"]["query"].any()
    query = rng.normal(size=3).astype(np.float32)
    kernel = rng.normal(size=(3, 1)).astype(np.float32)
    params["sequence_0"]["query"], params["head"]["kernel"] = query, kernel

    def compute_logits(vectors):
        return model.apply(params, state, make_inputs(floats, (), ((vectors, mask),)), train=True)[
            0
        ]

    expected = np.zeros((4, 3))
    for i, length in enumerate((5, 2, 1, 0)):
        scores = np.exp(vectors[i, :length] @ query / 3**0.5)
        if length:
            expected[i] = (scores / scores.sum()) @ vectors[i, :length]
    np.testing.assert_allclose(compute_logits(vectors), expected @ kernel, rtol=1e-5, atol=1e-6)
    grad = jax.grad(lambda v: compute_logits(v).sum())(vectors)
    assert np.isfinite(grad).all()
    assert not np.asarray(grad)[~mask].any(), "a place that is not filled has no gradient"


def test_batch_norm_statistics_of_eight_devices_are_those_of_the_global_batch():
    model = models.build(tasks=1, cross="none", mlp_units=(16,), norm="batch")
    floats, vectors = random_input(batch=64)
    # Unlike means on each device, so that statistics of a device would differ from the global.
    floats = floats + np.arange(64, dtype=np.float32)[:, None]
    params, state = init_model(model, make_inputs(floats, vectors))
    logits, state = apply_sharded(8, model, params, state, floats, vectors, jax.random.key(1))
    params = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    expected = rankers.ranker(params, floats, vectors, cross="none", norm="batch")
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    mean = (joined(floats, vectors) @ params["tower"]["layer_0"]["kernel"]).mean(0)
    np.testing.assert_allclose(
        state["batch_stats"]["tower"]["norm_0"]["mean"], 0.1 * mean, rtol=1e-4
    )


def identity_with_dropout():
    """A model whose logits are its floats after the dropout of one layer."""
    model = models.build(tasks=32, cross="none", mlp_units=(32,), dropout=0.25)
    floats = np.ones((64, 32), np.float32)
    params, state = init_model(model, make_inputs(floats, ()))
    params = jax.tree.map(jnp.zeros_like, params)
    params["tower"]["layer_0"]["kernel"] = params["head"]["kernel"] = jnp.eye(32)
    return model, params, state, floats


def test_dropout_masks_differ_between_examples_of_all_devices_and_between_steps():
    model, params, state, floats = identity_with_dropout()
    args = (model, params, state, floats, ())
    first, other = (apply_sharded(8, *args, jax.random.key(seed))[0] for seed in (7, 8))
    assert len(np.unique(first > 0, axis=0)) > 60
    assert (other != first).any()


def pcg3d(x, y, z):
    """The last number of the published hash, in Python's own integers."""
    full = 2**32
    x, y, z = ((v * 1664525 + 1013904223) % full for v in (x, y, z))
    for last in (False, True):
        x = (x + y * z) % full
        y = (y + z * x) % full
        z = (z + x * y) % full
        if not last:
            x, y, z = (v ^ v >> 16 for v in (x, y, z))
    return z


def test_random_bits_are_those_of_the_published_hash():
    key = jax.random.key(5)
    first, second = (int(w) for w in jax.random.bits(key, (2,), jnp.uint32))
    result = np.asarray(random_bits(key, jnp.array([0, 3, 2**31 - 1], jnp.int32), 4))
    expected = [
        [pcg3d((n + first) % 2**32, unit, second) for unit in range(4)] for n in (0, 3, 2**31 - 1)
    ]
    assert result.tolist() == expected


def test_random_bits_look_independent_over_keys_examples_and_units():
    examples = jnp.arange(256, dtype=jnp.int32)
    bits = np.stack(
        [random_bits(jax.random.fold_in(jax.random.key(0), k), examples, 64) for k in range(64)]
    )
    kept = (bits < np.uint32(0.8 * 2**32)) - 0.8  # [keys, examples, units]
    deviation, n = 0.4, kept.size
    assert abs(kept.mean()) < 4 * deviation / n**0.5
    for axis in range(3):
        others = tuple(a for a in range(3) if a != axis)
        means = kept.mean(axis=others) / (deviation / (n / kept.shape[axis]) ** 0.5)
        assert np.abs(means).max() < 5
        assert 0.6 < means.std() < 1.4
        for distance in (1, 2, 16):
            ahead = np.roll(kept, distance, axis)
            assert abs((kept * ahead).mean()) < 5 * deviation**2 / n**0.5
    for bit in range(32):
        assert abs((bits >> np.uint32(bit) & 1).mean() - 0.5) < 5 * 0.5 / n**0.5


def test_dropout_scales_what_it_keeps_and_does_nothing_when_not_training():
    model, params, state, floats = identity_with_dropout()
    logits, _ = apply_model(
        model, params, state, make_inputs(floats, ()), train=True, key=jax.random.key(1)
    )
    np.testing.assert_allclose(np.unique(logits), [0, 1 / 0.75], rtol=1e-6)
    assert abs(np.mean(np.asarray(logits) == 0) - 0.25) < 0.04
    logits, _ = apply_model(
        model, params, state, make_inputs(floats, ()), train=False, key=jax.random.key(1)
    )
    np.testing.assert_array_equal(logits, floats)


def test_dropout_without_a_key_is_rejected():
    model, params, state, floats = identity_with_dropout()
    with pytest.raises(ValueError, match="key must be given"):
        model.apply(params, state, make_inputs(floats, ()), train=True)


def test_parameters_have_stable_names_and_zero_biases():
    model = models.build(tasks=2, structure="parallel", mlp_units=(4,), norm="layer")
    params, _ = jax.jit(model.init)(jax.random.key(0), make_inputs(*random_input()))
    assert set(params) == {"cross", "tower", "head"}
    assert set(params["tower"]) == {"layer_0", "norm_0"}
    assert not params["tower"]["layer_0"]["bias"].any()
    assert params["head"]["kernel"].shape == (11 + 4, 2)
    assert models.describe(params) == {
        "cross": 2 * (11 * 11 + 11),
        "tower": 11 * 4 + 4 + 8,
        "head": 15 * 2 + 2,
    }


@pytest.mark.parametrize(("cross", "out"), [("dcn_v2", 200), ("dcn", 1)])
def test_kernels_start_with_the_variance_of_glorot(cross, out):
    model = models.build(tasks=1, cross=cross, cross_layers=20, mlp_units=(300,))
    params, _ = model.init(jax.random.key(0), make_inputs(np.zeros((1, 200), np.float32), ()))
    cross_kernels = np.stack([params["cross"][f"layer_{i}"]["kernel"] for i in range(20)])
    np.testing.assert_allclose(cross_kernels.var(), 2 / (200 + out), rtol=0.1)
    deep = np.asarray(params["tower"]["layer_0"]["kernel"])
    np.testing.assert_allclose(deep.var(), 2 / (200 + 300), rtol=0.05)


def test_kernels_of_low_rank_start_with_the_variance_of_glorot_for_each_expert():
    for cross, experts in (("dcn_v2_low_rank", {}), ("dcn_mix", {"cross_experts": 3})):
        model = models.build(tasks=1, cross=cross, cross_rank=60, mlp_units=(), **experts)
        params, _ = model.init(jax.random.key(0), make_inputs(np.zeros((1, 200), np.float32), ()))
        kernels = {name: layer["kernel"] for name, layer in params["cross"].items()}
        count = experts.get("cross_experts", 1)
        for name, fan, size in (
            ("down_1", 200 + 60, 200 * 60),
            ("up_1", 60 + 200, 60 * 200),
            *([("core_1", 60 + 60, 60 * 60), ("gate_1", 200 + 3, 200)] if count > 1 else ()),
        ):
            assert kernels[name].size == count * size, name
            np.testing.assert_allclose(np.var(kernels[name]), 2 / fan, rtol=0.15, err_msg=name)
        assert not params["cross"]["up_1"]["bias"].any()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(cross="matrx"), r"model.cross.*'dcn_v2', 'dcn',.* 'none'.*'matrx'"),
        (dict(structure="deep"), r"model.structure.*'stacked'.*'deep'"),
        (dict(activation="relu6"), r"model.activation.*'relu'.*'relu6'"),
        (dict(norm="group"), r"model.norm.*'batch'.*'group'"),
        (dict(precision="float32"), r"model.precision.*'highest'.*'float32'"),
        (dict(multitask="moe"), r"model.multitask.*'shared_bottom', 'mmoe', 'ple'.*'moe'"),
        (dict(cross_layers=0), r"model.cross_layers.*at least 1.*0"),
        (dict(dropout=1.0), r"model.dropout.*at least 0 and below 1.*1.0"),
        (dict(dropout="0.1"), r"model.dropout.*'0.1'"),
        (
            dict(mlp_units=(400, 0)),
            r"model.mlp_units\[1\].*at least 1 and at most 1048576: found 0",
        ),
        (dict(mlp_units=400), r"model.mlp_units.*400"),
        (dict(task_mlp_units=(1.5,)), r"model.task_mlp_units\[0\].*1.5"),
        (dict(cross="dcn_mix", cross_rank=0), r"model.cross_rank.*at least 1: found 0"),
        (dict(cross="dcn_mix", cross_experts=2.0), r"model.cross_experts.*whole number.*2.0"),
        (
            dict(cross="dlrm", bottom_mlp_units=(0,)),
            r"model.bottom_mlp_units\[0\].*at least 1 and at most 1048576: found 0",
        ),
        (dict(multitask="ple", levels=0), r"model.levels.*at least 1: found 0"),
        (dict(multitask="mmoe", experts=True), r"model.experts.*whole number.*True"),
        (
            dict(multitask="ple", task_experts=-1),
            r"model.task_experts.*at least 1 and at most 256: found -1",
        ),
        (
            dict(multitask="mmoe", expert_mlp_units=()),
            r"model.expert_mlp_units.*with an entry.*\(\)",
        ),
        (dict(cross="none", cross_layers=3), r"cross_layers is read only where model.cross.*3.*2"),
        (dict(cross="dlrm", cross_layers=3), r"cross_layers is read only where .*3.*'dlrm'"),
        (
            dict(cross_rank=8),
            r"cross_rank is read only where .*'dcn_v2_low_rank', 'dcn_mix'.*8.*'dcn_v2'.*64",
        ),
        (
            dict(cross="dcn_v2_low_rank", cross_experts=8),
            r"cross_experts is read only where .*'dcn_mix'.*8",
        ),
        (
            dict(bottom_mlp_units=(8,)),
            r"bottom_mlp_units is read only where .*'dlrm'.*\(8,\).*\(128,\)",
        ),
        (
            dict(dense_mlp_units=(8, 0)),
            r"model.dense_mlp_units\[1\].*at least 1 and at most 1048576: found 0",
        ),
        (
            dict(cross="dlrm", dense_mlp_units=(8,)),
            r"dense_mlp_units is .*\(8,\).*'dlrm'.*bottom_mlp_units",
        ),
        (
            dict(bottom_mlp_units=(8,)),
            r"bottom_mlp_units is read only where .*model.dense_mlp_units\.",
        ),
        (
            dict(batch_norm_momentum=0.5, activation="prelu"),
            r"only where model.norm .*'batch'.* or model.activation .*'dice'.*'none', .*'prelu'",
        ),
        (dict(experts=8), r"experts is read only where .*'mmoe', 'ple'.*8.*'shared_bottom'"),
        (
            dict(expert_mlp_units=(8,)),
            r"expert_mlp_units is read only where model.multitask.*\(8,\)",
        ),
        (dict(multitask="mmoe", task_experts=8), r"task_experts is read only where .*'ple'.*8"),
        (dict(multitask="mmoe", levels=8), r"levels is read only where .*'ple'.*8.*'mmoe'"),
        (dict(layers=2), r"model.layers: must be a field .*Did you mean model.cross_layers"),
        (dict(tasks=0), r"tasks, at least 1: found 0"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(config, message):
    with pytest.raises(InputError, match=message):
        models.build(**{"tasks": 1, **config})


def test_a_field_that_is_not_read_may_be_given_with_its_default():
    fields = dict(cross_layers=2, cross_rank=64, experts=4, bottom_mlp_units=[128], levels=2)
    models.build(tasks=1, cross="none", **fields)


def test_a_model_of_nothing_is_rejected():
    model = models.build(tasks=1)
    with pytest.raises(InputError, match="at least one feature"):
        model.init(jax.random.key(0), make_inputs(np.zeros((4, 0), np.float32), ()))


def test_a_model_of_vectors_only_needs_no_floats():
    model = models.build(tasks=1, mlp_units=())
    vectors = random_input()[1]
    none = np.zeros((BATCH, 0), np.float32)
    params, state = init_model(model, make_inputs(none, vectors))
    logits, _ = apply_model(model, params, state, make_inputs(none, vectors), train=False)
    params = jax.tree.map(np.asarray, params)
    expected = rankers.ranker(params, none, vectors, cross="dcn_v2", structure="stacked")
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
