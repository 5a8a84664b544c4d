"""Tests learning rates at chosen steps, and compares optimizers with float64 formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrank import optim

SCHEDULE = dict(
    batch_size=4096,
    num_steps=100,
    base_learning_rate=0.01,
    base_batch=256,
    scaling="none",
    warmup_steps=10,
    decay="constant",
    decay_steps=0,
    final_fraction=0.0,
    power=1.0,
    decay_factor=0.1,
)


def rates(steps, **changes):
    learning_rate = optim.schedule(**{**SCHEDULE, **changes})
    return [float(learning_rate(s)) for s in steps]


@pytest.mark.parametrize(
    ("scaling", "of_sixteenth", "of_16"),
    [("none", 1, 1), ("sqrt", 1 / 4, 4), ("linear", 1 / 16, 16), ("sqrt_linear", 1 / 4, 16)],
)
def test_the_rate_follows_the_batch_size(scaling, of_sixteenth, of_16):
    for batch_size, factor in [(16, of_sixteenth), (256, 1), (4096, of_16)]:
        result = rates([50], scaling=scaling, batch_size=batch_size)
        assert result == pytest.approx([0.01 * factor]), batch_size


@pytest.mark.parametrize("warmup", [1, 2, 10])
def test_warm_up_starts_above_zero_and_ends_at_the_rate(warmup):
    result = rates(range(warmup + 2), warmup_steps=warmup)
    expected = [0.01 * (s + 1) / warmup for s in range(warmup)] + [0.01, 0.01]
    assert result == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates([0, 99], warmup_steps=0) == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize(
    ("decay", "left"),
    [
        ("linear", lambda t: 1 - t),
        ("cosine", lambda t: (1 + np.cos(np.pi * t)) / 2),
        ("polynomial", lambda t: (1 - t) ** 2),
    ],
)
@pytest.mark.parametrize("decay_steps", [0, 40])
def test_decay_follows_its_formula_after_the_warm_up(decay, left, decay_steps):
    steps = [10, 11, 30, 49, 50, 70, 99, 100, 500]
    shape = dict(decay=decay, decay_steps=decay_steps, final_fraction=0.1, power=2.0)
    t = np.minimum((np.array(steps) - 10) / (decay_steps or 90), 1)
    expected = 0.01 * (0.1 + 0.9 * left(t))
    assert rates(steps, **shape) == pytest.approx(expected, rel=1e-5)
    assert rates([0], **shape) == pytest.approx([0.001])


@pytest.mark.parametrize("least", [0.0, 0.3])
def test_the_rate_falls_in_steps_to_its_least_value(least):
    steps = [10, 29, 30, 49, 50, 69, 70, 500]
    result = rates(steps, decay="step", decay_steps=20, decay_factor=0.5, final_fraction=least)
    expected = [0.01 * max(0.5 ** ((s - 10) // 20), least) for s in steps]
    assert result == pytest.approx(expected, rel=1e-5)


def test_a_run_shorter_than_its_warm_up_stays_in_it():
    assert rates([0, 4], num_steps=5, decay="linear") == pytest.approx([0.001, 0.005])


def rate_in_step(step):
    return 0.1 / (step + 1)


def reference(name, gradients, x, *, clip_norm=0.0, weight_decay=0.0, **h):
    """Computes each optimizer on one float64 vector."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    if name == "adagrad":
        v += h.get("initial_accumulator", 0.1)
    for step, g in enumerate(gradients):
        learning_rate = rate_in_step(step)
        norm = np.sqrt((g**2).sum())
        if clip_norm and norm > clip_norm:
            g = g * clip_norm / norm
        if name != "adamw":
            g = g + weight_decay * x
        if name == "sgd":
            move = g
        elif name == "momentum":
            m = h.get("momentum", 0.9) * m + g
            move = g + h.get("momentum", 0.9) * m if h.get("nesterov") else m
        elif name == "adagrad":
            v = v + g**2
            move = g / np.sqrt(v + h.get("eps", 1e-7))
        else:
            b1, b2, eps = h.get("b1", 0.9), h.get("b2", 0.999), h.get("eps", 1e-8)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            move = m / (1 - b1 ** (step + 1)) / (np.sqrt(v / (1 - b2 ** (step + 1))) + eps)
            if name == "adamw":
                move = move + weight_decay * x
        x = x - learning_rate * move
    return x


def run(name, gradients, x, *, clip_norm=0.0, weight_decay=0.0, undecayed=(), **settings):
    """Runs all steps in one `lax.scan`, with the vector in two parts of different shapes."""

    def parts(a):
        return {"kernel": a[..., :4].reshape(*a.shape[:-1], 2, 2), "bias": a[..., 4:]}

    optimizer = optim.dense_optimizer(
        optim.OPTIMIZERS[name](**settings),
        learning_rate=rate_in_step,
        clip_norm=clip_norm,
        weight_decay=weight_decay,
        undecayed=undecayed,
    )
    params = parts(jnp.asarray(x))

    def step(carry, g):
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    carry, _ = jax.lax.scan(step, (params, optimizer.init(params)), parts(jnp.asarray(gradients)))
    return np.concatenate([carry[0]["kernel"].ravel(), carry[0]["bias"]])


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam", "adamw"])
@pytest.mark.parametrize("extra", [{}, dict(clip_norm=0.5), dict(clip_norm=2.0, weight_decay=0.1)])
def test_every_optimizer_follows_its_rule_inside_a_scan(name, extra):
    r = np.random.default_rng(0)
    x, gradients = r.normal(size=6), r.normal(size=(5, 6)) * np.array([[0.1], [1], [3], [1], [2]])
    with jax.enable_x64(True):
        result = run(name, gradients, x, **extra)
    np.testing.assert_allclose(result, reference(name, gradients, x, **extra), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "hyper"),
    [
        ("momentum", dict(momentum=0.5)),
        ("momentum", dict(nesterov=True)),
        ("adagrad", dict(initial_accumulator=1.0, eps=0.1)),
        ("adam", dict(b1=0.5, b2=0.6, eps=0.1)),
        ("adamw", dict(b1=0.5, b2=0.6, eps=0.1)),
    ],
)
def test_fields_of_its_own_reach_the_optimizer(name, hyper):
    r = np.random.default_rng(1)
    x, gradients = r.normal(size=6), r.normal(size=(5, 6))
    with jax.enable_x64(True):
        result = run(name, gradients, x, **hyper)
    expected = reference(name, gradients, x, **hyper)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert not np.allclose(expected, reference(name, gradients, x))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weights_that_do_not_decay_are_those_of_no_decay(name):
    r = np.random.default_rng(2)
    x, gradients = r.normal(size=6), r.normal(size=(5, 6))
    with jax.enable_x64(True):
        result = run(name, gradients, x, weight_decay=0.1, undecayed=("bias",))
    expected = [reference(name, gradients, x, weight_decay=w) for w in (0.1, 0.0)]
    np.testing.assert_allclose(result[:4], expected[0][:4], rtol=1e-6)
    np.testing.assert_allclose(result[4:], expected[1][4:], rtol=1e-6)
    assert not np.allclose(expected[0], expected[1])
    params = {"kernel": jnp.ones(2), "bias": jnp.ones(2)}
    states = [
        optim.dense_optimizer(
            optim.OPTIMIZERS[name](),
            learning_rate=rate_in_step,
            clip_norm=0.0,
            weight_decay=0.1,
            undecayed=u,
        ).init(params)
        for u in ((), ("bias",))
    ]
    assert (
        len({jax.tree.structure(state) for state in states}) == 1
    )  # checkpoints have one structure
    assert jax.tree.structure(states[0]) == jax.tree.structure(optax_optimizer(name).init(params))


def optax_optimizer(name):
    if name == "adamw":
        return optax.chain(optax.adamw(rate_in_step, weight_decay=0.1))
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate_in_step))
