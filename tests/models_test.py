"""Models against the formulas of their papers in NumPy, and against themselves on more devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxrank import mesh as meshes
from jaxrank import models
from jaxrank.errors import InputError

BATCH = 6


def random_input(seed=0, batch=BATCH, dtype=np.float32):
    """floats [B, 3] and vectors [B, 2, 2], [B, 1, 4]: width 11."""
    r = np.random.default_rng(seed)
    floats = r.normal(size=(batch, 3)).astype(dtype)
    vectors = (r.normal(size=(batch, 2, 2)), r.normal(size=(batch, 1, 4)))
    return floats, tuple(v.astype(dtype) for v in vectors)


def randomised(params, seed=1):
    """Params with no zero biases, in float64, so that every one of them shows in the output."""
    r = np.random.default_rng(seed)
    return jax.tree.map(lambda p: r.normal(size=p.shape, scale=0.5), params)


def joined(floats, vectors):
    return np.concatenate([floats, *(v.reshape(len(v), -1) for v in vectors)], axis=1)


def cross_in_numpy(kind, params, x0):
    x = x0
    for layer in range(2):
        kernel = params[f"layer_{layer}"]["kernel"]
        if kind == "vector":
            dots = np.array([sum(kernel[:, 0] * row) for row in x])
            x = x0 * dots[:, None] + params[f"bias_{layer}"] + x
        else:
            rows = [kernel.T @ row + params[f"layer_{layer}"]["bias"] for row in x]
            x = x0 * np.array(rows) + x
    return x


def tower_in_numpy(params, x, norm="none", stats=None, act=lambda x: np.maximum(x, 0)):
    for layer in range(sum(name.startswith("layer") for name in params)):
        x = x @ params[f"layer_{layer}"]["kernel"] + params[f"layer_{layer}"].get("bias", 0)
        if norm != "none":
            axis = 0 if norm == "batch" else 1
            mean, var = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
            if stats is not None:
                mean, var = (stats[f"norm_{layer}"][k][None] for k in ("mean", "var"))
            x = (x - mean) / np.sqrt(var + 1e-5)
            x = x * params[f"norm_{layer}"]["scale"] + params[f"norm_{layer}"]["bias"]
        x = act(x)
    return x


def ranker_in_numpy(params, floats, vectors, *, cross, structure, norm="none"):
    x0 = joined(floats, vectors)
    crossed = x0 if cross == "none" else cross_in_numpy(cross, params["cross"], x0)
    if "tower" not in params:
        trunk = crossed
    elif structure == "stacked" or cross == "none":
        trunk = tower_in_numpy(params["tower"], crossed, norm)
    else:
        trunk = np.concatenate([crossed, tower_in_numpy(params["tower"], x0, norm)], axis=1)
    if "head" in params:
        return trunk @ params["head"]["kernel"] + params["head"]["bias"]
    heads = []
    for task in range(2):
        own = tower_in_numpy(params[f"task_{task}"], trunk, norm)
        heads.append(own @ params[f"head_{task}"]["kernel"] + params[f"head_{task}"]["bias"])
    return np.concatenate(heads, axis=1)


def built(seed=0, dtype=np.float64, **config):
    model = models.build(tasks=2, **config)
    floats, vectors = random_input(seed, dtype=dtype)
    params, state = model.init(jax.random.key(seed), floats, vectors)
    return model, params, state, floats, vectors


@pytest.mark.parametrize("cross", ["matrix", "vector", "none"])
@pytest.mark.parametrize("structure", ["stacked", "parallel"])
@pytest.mark.parametrize("hidden", [(), (5, 4)])
@pytest.mark.parametrize("head_hidden", [(), (3,)])
def test_logits_are_those_of_the_written_out_formula(cross, structure, hidden, head_hidden):
    shape = dict(cross=cross, structure=structure)
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(
            hidden=hidden, head_hidden=head_hidden, **shape
        )
        params = randomised(params)
        logits, _ = model.apply(params, state, floats, vectors, train=False)
        assert logits.dtype == np.float64
    expected = ranker_in_numpy(params, floats, vectors, **shape)
    np.testing.assert_allclose(logits, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_normalised_towers_are_those_of_the_written_out_formula(norm):
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(
            cross="none", hidden=(5, 4), norm=norm, head_hidden=(3,)
        )
        params = randomised(params)
        logits, _ = model.apply(params, state, floats, vectors, train=True)
    expected = ranker_in_numpy(
        params, floats, vectors, cross="none", structure="stacked", norm=norm
    )
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
        model, params, state, floats, vectors = built(cross="none", hidden=(5,), activation=name)
        logits, _ = model.apply(params, state, floats, vectors, train=False)
    params = jax.tree.map(np.asarray, params)
    deep = tower_in_numpy(params["tower"], joined(floats, vectors), act=formula)
    expected = deep @ params["head"]["kernel"] + params["head"]["bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-11)


@pytest.mark.parametrize(
    "config",
    [
        dict(cross="matrix", hidden=()),
        dict(cross="vector", hidden=()),
        dict(cross="matrix", structure="parallel", hidden=(4,), activation="tanh"),
        dict(cross="vector", hidden=(4,), activation="tanh", norm="batch"),
        dict(cross="none", hidden=(4,), activation="tanh", norm="layer", head_hidden=(3,)),
    ],
)
def test_gradients_are_the_slopes_of_the_numpy_formula(config):
    """Along random directions in all parameters and inputs at once."""
    shape = {k: config.get(k, "stacked") for k in ("cross", "structure")}
    activation = np.tanh if config.get("activation") == "tanh" else None
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(**config)
        at = (randomised(params), floats, vectors)
        mix = np.random.default_rng(3).normal(size=(BATCH, 2))

        def out(at):
            params, floats, vectors = at
            return (mix * model.apply(params, state, floats, vectors, train=True)[0]).sum()

        gradient = jax.tree.leaves(jax.device_get(jax.grad(out)(at)))

    def numpy_out(at):
        with pytest.MonkeyPatch.context() as patch:
            if activation is not None:
                patch.setattr(tower_in_numpy, "__defaults__", ("none", None, activation))
            return (mix * ranker_in_numpy(*at, norm=config.get("norm", "none"), **shape)).sum()

    for seed in range(3):
        r = np.random.default_rng(seed)
        way = jax.tree.map(lambda a, r=r: r.normal(size=a.shape), at)
        step = 1e-5
        up, down = (
            numpy_out(jax.tree.map(lambda a, d, s=shift: a + s * d, at, way))
            for shift in (step, -step)
        )
        slope = sum((g * d).sum() for g, d in zip(gradient, jax.tree.leaves(way), strict=True))
        np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-6)


def test_a_cross_network_without_interactions_in_its_input_returns_it_plus_bias():
    """x0 = 0 leaves only the additive bias of DCN; the bias of DCN-V2 is multiplied by x0."""
    zeros = np.zeros((2, 3), np.float32)
    for cross, expected in (("vector", 5.0), ("matrix", 0.0)):
        model = models.build(tasks=1, cross=cross, cross_layers=1, hidden=())
        params, state = model.init(jax.random.key(0), zeros, ())
        params = jax.tree.map(jnp.ones_like, params)
        params["head"]["bias"] = jnp.full(1, 2.0)
        logits, _ = model.apply(params, state, zeros, (), train=False)
        np.testing.assert_array_equal(logits, expected if expected else 2.0)


def test_batch_norm_moves_its_running_statistics_and_uses_them_when_not_training():
    with jax.enable_x64(True):
        model, params, state, floats, vectors = built(cross="none", hidden=(4,), norm="batch")
        logits, new = model.apply(params, state, floats, vectors, train=True)
        again, same = model.apply(params, new, floats, vectors, train=False)
        assert {a.dtype for a in jax.tree.leaves((state, new))} == {np.dtype(np.float64)}
    params = jax.tree.map(np.asarray, params)
    layer = params["tower"]["layer_0"]
    x = joined(floats, vectors) @ layer["kernel"] + layer.get("bias", 0)
    stats = new["batch_stats"]["tower"]["norm_0"]
    np.testing.assert_allclose(stats["mean"], 0.01 * x.mean(0), rtol=1e-9)
    np.testing.assert_allclose(stats["var"], 0.99 + 0.01 * x.var(0), rtol=1e-9)
    deep = tower_in_numpy(
        params["tower"],
        joined(floats, vectors),
        "batch",
        jax.tree.map(np.asarray, new["batch_stats"]["tower"]),
    )
    np.testing.assert_allclose(again, deep @ params["head"]["kernel"], rtol=1e-9, atol=1e-12)
    assert same is new
    assert not np.allclose(logits, again)


def test_batch_norm_keeps_a_small_spread_around_a_large_mean():
    model = models.build(tasks=1, cross="none", hidden=(1,), norm="batch", activation="tanh")
    floats = (1000 + np.arange(8) / 100)[:, None].astype(np.float32)
    params, state = model.init(jax.random.key(0), floats, ())
    params["tower"]["layer_0"]["kernel"] = jnp.ones((1, 1))
    params["head"]["kernel"] = jnp.ones((1, 1))
    logits, _ = model.apply(params, state, floats, (), train=True)
    x = floats[:, 0].astype(np.float64)
    expected = np.tanh((x - x.mean()) / np.sqrt(x.var() + 1e-5))
    np.testing.assert_allclose(logits[:, 0], expected, atol=5e-3)


def applied_on(devices, model, params, state, floats, vectors, key):
    mesh = meshes.make_mesh(devices=devices, replicas=2 if devices > 1 else 1)

    def on_device(params, state, floats, vectors, key):
        share = models.Share(
            first=meshes.device_index(mesh) * len(floats),
            mean=lambda x: meshes.total(mesh, x) / mesh.size,
        )
        return model.apply(params, state, floats, vectors, train=True, key=key, share=share)

    by_example, everywhere = PartitionSpec(meshes.EXAMPLES), PartitionSpec()
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, by_example, by_example, everywhere),
        out_specs=(by_example, everywhere),
        check_vma=False,
    )
    return jax.device_get(jax.jit(run)(params, state, floats, vectors, key))


def test_the_gradient_through_batch_norm_is_that_of_the_global_batch():
    model = models.build(tasks=1, cross="none", hidden=(6,), norm="batch", activation="tanh")
    floats, _ = random_input(batch=32)
    floats = floats + np.arange(32, dtype=np.float32)[:, None]
    params, state = model.init(jax.random.key(0), floats, ())
    mesh = meshes.make_mesh(devices=8)

    def loss(params, floats, share):
        return (model.apply(params, state, floats, (), train=True, share=share)[0] ** 3).sum()

    def on_device(params, floats):
        share = models.Share(mean=lambda x: meshes.total(mesh, x) / mesh.size)
        return meshes.total(mesh, jax.grad(loss)(params, floats, share))

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(meshes.EXAMPLES)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    expected = jax.grad(loss)(params, floats, models.Share())
    found = jax.jit(run)(params, floats)
    jax.tree.map(
        lambda f, e: np.testing.assert_allclose(f, e, rtol=1e-3, atol=1e-4), found, expected
    )


def test_a_sequence_is_pooled_by_a_softmax_over_its_filled_places():
    model = models.build(tasks=1, cross="none", hidden=())
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(4, 5, 3)).astype(np.float32)
    mask = np.arange(5)[None, :] < np.array([5, 2, 1, 0])[:, None]
    floats = np.zeros((4, 0), np.float32)
    params, state = model.init(jax.random.key(0), floats, (), ((vectors, mask),))
    assert not params["sequence_0"]["query"].any()
    query = rng.normal(size=3).astype(np.float32)
    kernel = rng.normal(size=(3, 1)).astype(np.float32)
    params["sequence_0"]["query"], params["head"]["kernel"] = query, kernel

    def logits_of(vectors):
        return model.apply(params, state, floats, (), ((vectors, mask),), train=True)[0]

    expected = np.zeros((4, 3))
    for i, length in enumerate((5, 2, 1, 0)):
        scores = np.exp(vectors[i, :length] @ query / 3**0.5)
        if length:
            expected[i] = (scores / scores.sum()) @ vectors[i, :length]
    np.testing.assert_allclose(logits_of(vectors), expected @ kernel, rtol=1e-5, atol=1e-6)
    grad = jax.grad(lambda v: logits_of(v).sum())(vectors)
    assert np.isfinite(grad).all()
    assert not np.asarray(grad)[~mask].any(), "a place that is not filled has no gradient"


def test_batch_norm_statistics_are_those_of_the_global_batch_on_any_number_of_devices():
    model = models.build(tasks=1, cross="none", hidden=(16,), norm="batch")
    floats, vectors = random_input(batch=64)
    # Unlike means on each device, so that statistics of a device would differ from the global.
    floats = floats + np.arange(64, dtype=np.float32)[:, None]
    params, state = model.init(jax.random.key(0), floats, vectors)
    args = (model, params, state, floats, vectors, jax.random.key(1))
    logits1, state1 = applied_on(1, *args)
    logits8, state8 = applied_on(8, *args)
    np.testing.assert_allclose(logits8, logits1, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state1, state8)
    kernel = np.asarray(params["tower"]["layer_0"]["kernel"], np.float64)
    mean = (joined(floats, vectors) @ kernel).mean(0)
    np.testing.assert_allclose(
        state8["batch_stats"]["tower"]["norm_0"]["mean"], 0.01 * mean, rtol=1e-4
    )


def identity_with_dropout():
    """A model whose logits are its floats after the dropout of one layer."""
    model = models.build(tasks=32, cross="none", hidden=(32,), dropout=0.25)
    floats = np.ones((64, 32), np.float32)
    params, state = model.init(jax.random.key(0), floats, ())
    params = jax.tree.map(jnp.zeros_like, params)
    params["tower"]["layer_0"]["kernel"] = params["head"]["kernel"] = jnp.eye(32)
    return model, params, state, floats


def test_dropout_masks_are_equal_on_any_number_of_devices_and_differ_between_examples():
    model, params, state, floats = identity_with_dropout()
    args = (model, params, state, floats, (), jax.random.key(7))
    one, _ = applied_on(1, *args)
    eight, _ = applied_on(8, *args)
    np.testing.assert_array_equal(one, eight)
    assert len(np.unique(eight > 0, axis=0)) > 60
    other, _ = applied_on(8, *args[:-1], jax.random.key(8))
    assert (other != eight).any()


def test_dropout_scales_what_it_keeps_and_does_nothing_when_not_training():
    model, params, state, floats = identity_with_dropout()
    logits, _ = model.apply(params, state, floats, (), train=True, key=jax.random.key(1))
    np.testing.assert_allclose(np.unique(logits), [0, 1 / 0.75], rtol=1e-6)
    assert abs(np.mean(np.asarray(logits) == 0) - 0.25) < 0.04
    logits, _ = model.apply(params, state, floats, (), train=False, key=jax.random.key(1))
    np.testing.assert_array_equal(logits, floats)


def test_dropout_without_a_key_is_refused():
    model, params, state, floats = identity_with_dropout()
    with pytest.raises(ValueError, match="key must be given"):
        model.apply(params, state, floats, (), train=True)


def test_parameters_have_stable_names_and_zero_biases():
    model, params, _, _, _ = built(structure="parallel", hidden=(4,), norm="layer")
    assert set(params) == {"cross", "tower", "head"}
    assert set(params["tower"]) == {"layer_0", "norm_0"}
    assert not params["tower"]["layer_0"]["bias"].any()
    assert params["head"]["kernel"].shape == (11 + 4, 2)
    assert models.describe(params) == {
        "cross": 2 * (11 * 11 + 11),
        "tower": 11 * 4 + 4 + 8,
        "head": 15 * 2 + 2,
    }


@pytest.mark.parametrize(("cross", "out"), [("matrix", 200), ("vector", 1)])
def test_kernels_start_with_the_variance_of_glorot(cross, out):
    model = models.build(tasks=1, cross=cross, cross_layers=20, hidden=(300,))
    params, _ = model.init(jax.random.key(0), np.zeros((1, 200), np.float32), ())
    cross_kernels = np.stack([params["cross"][f"layer_{i}"]["kernel"] for i in range(20)])
    np.testing.assert_allclose(cross_kernels.var(), 2 / (200 + out), rtol=0.1)
    deep = np.asarray(params["tower"]["layer_0"]["kernel"])
    np.testing.assert_allclose(deep.var(), 2 / (200 + 300), rtol=0.05)


@pytest.mark.parametrize("cross", ["matrix", "vector"])
def test_every_matrix_product_states_its_precision(cross):
    model = models.build(
        tasks=2, cross=cross, structure="parallel", hidden=(4,), head_hidden=(3,), norm="batch"
    )
    floats, vectors = random_input()
    params, state = model.init(jax.random.key(0), floats, vectors)

    def loss(params, floats):
        return model.apply(params, state, floats, vectors, train=True)[0].sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(params, floats)
    products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(products) > 10
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert all(e.params["precision"] == highest for e in products)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(cross="matrx"), r"model.cross .*'matrix', 'vector', 'none'.*'matrx'"),
        (dict(structure="deep"), r"model.structure .*'stacked'.*'deep'"),
        (dict(activation="relu6"), r"model.activation .*'relu'.*'relu6'"),
        (dict(norm="group"), r"model.norm .*'batch'.*'group'"),
        (dict(precision="float32"), r"model.precision .*'highest'.*'float32'"),
        (dict(cross_layers=0), r"model.cross_layers .*at least 1.*0"),
        (dict(dropout=1.0), r"model.dropout .*\[0, 1\).*1.0"),
        (dict(dropout="0.1"), r"model.dropout .*'0.1'"),
        (dict(hidden=(400, 0)), r"model.hidden .*above 0.*\(400, 0\)"),
        (dict(hidden=400), r"model.hidden .*400"),
        (dict(head_hidden=(1.5,)), r"model.head_hidden .*1.5"),
        (dict(layers=2), r"only the fields .*cross_layers.*: got layers"),
        (dict(tasks=0), r"tasks, at least 1: got 0"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(config, message):
    with pytest.raises(InputError, match=message):
        models.build(**{"tasks": 1, **config})


def test_a_model_of_nothing_is_refused():
    model = models.build(tasks=1)
    with pytest.raises(InputError, match="at least one feature"):
        model.init(jax.random.key(0), np.zeros((4, 0), np.float32), ())


def test_a_model_of_vectors_only_needs_no_floats():
    model = models.build(tasks=1, hidden=())
    vectors = random_input()[1]
    none = np.zeros((BATCH, 0), np.float32)
    params, state = model.init(jax.random.key(0), none, vectors)
    logits, _ = model.apply(params, state, none, vectors, train=False)
    params = jax.tree.map(np.asarray, params)
    expected = ranker_in_numpy(params, none, vectors, cross="matrix", structure="stacked")
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
