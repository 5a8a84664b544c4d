"""The loss against its definition in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrank import losses


def reference_loss(logits, labels, weights, task_weights):
    per_task = []
    for x, y, w in zip(logits.T, labels.T, weights.T, strict=True):
        p = 1 / (1 + np.exp(-x))
        each = [-np.log(a if b else 1 - a) for a, b in zip(p, y, strict=True)]
        per_task.append(sum(w * each) / sum(w) if sum(w) else 0.0)
    return sum(np.array(task_weights) * per_task), per_task


def random_case(seed=0, batch=7, tasks=3):
    r = np.random.default_rng(seed)
    logits = r.normal(size=(batch, tasks)) * 3
    labels = (r.random((batch, tasks)) < 0.4).astype(float)
    weights = r.random((batch, tasks)) * (r.random((batch, tasks)) < 0.7)
    return logits, labels, weights, np.array([1.0, 0.5, 2.0])


def test_the_loss_of_each_task_is_its_weighted_mean_and_the_total_their_weighted_sum():
    case = random_case()
    with jax.enable_x64(True):
        total = weighted_loss(*map(jnp.asarray, case))
        assert total.dtype == np.float64
    np.testing.assert_allclose(total, reference_loss(*case)[0], rtol=1e-12)


def test_the_parts_of_the_loss_add_up_to_that_of_the_global_batch():
    logits, labels, weights, task_weights = random_case(3)
    with jax.enable_x64(True):
        whole = weighted_loss(logits, labels, weights, task_weights)
        parts = [
            weighted_loss(logits[p], labels[p], weights[p], task_weights, weights.sum(0))
            for p in (slice(0, 5), slice(5, None))
        ]
        np.testing.assert_allclose(sum(parts), whole, rtol=1e-12)


def weighted_loss(logits, labels, weights, task_weights, total_weight=None):
    total_weight = weights.sum(0) if total_weight is None else total_weight
    functions = (losses.logistic,) * logits.shape[1]
    return losses.weighted_loss(logits, labels, weights, task_weights, total_weight, functions)


def test_the_gradient_is_prediction_minus_label_by_weight():
    logits, labels, weights, task_weights = random_case(1)
    with jax.enable_x64(True):
        result = jax.grad(lambda x: weighted_loss(x, labels, weights, task_weights))(
            jnp.asarray(logits)
        )
    p = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(
        result, task_weights * weights * (p - labels) / weights.sum(0), rtol=1e-11, atol=1e-15
    )


def test_a_task_without_weight_costs_nothing_and_has_a_finite_gradient():
    logits, labels, weights, task_weights = (np.float32(a) for a in random_case(2))
    weights[:, 1] = 0
    total = weighted_loss(logits, labels, weights, task_weights)
    others = weighted_loss(
        logits, labels, weights, task_weights * np.float32([1, 0, 1])[: len(task_weights)]
    )
    assert total == others > 0
    grad = jax.grad(lambda x: weighted_loss(x, labels, weights, task_weights))(logits)
    assert np.isfinite(grad).all()
    assert not np.asarray(grad)[:, 1].any()
    assert np.asarray(grad)[:, 0].any()


@pytest.mark.parametrize("output", [-1e30, np.inf, np.nan])
@pytest.mark.parametrize("kind", ["binary", "real", "count"])
def test_what_stands_beside_an_unknown_label_counts_nothing(kind, output):
    logits = jnp.array([[0.3], [output], [-0.2]])
    labels, weights = jnp.array([[1.0], [0.0], [0.0]]), jnp.array([[1.0], [0.0], [2.0]])

    def loss(logits, labels, weights):
        return losses.per_task(
            logits, labels, weights, jnp.array([3.0]), (losses.loss_of_kind(kind),)
        ).sum()

    result, grad = jax.value_and_grad(loss)(logits, labels, weights)
    keep = np.array([0, 2])
    wanted, grads = jax.value_and_grad(loss)(logits[keep], labels[keep], weights[keep])
    np.testing.assert_allclose(result, wanted, rtol=1e-6)
    np.testing.assert_allclose(grad[keep], grads, rtol=1e-6)
    assert grad[1] == 0


@pytest.mark.parametrize("logit", [0.0, 1e-6, 12.0, 60.0, 1000.0, 1e30])
def test_loss_and_gradient_are_stable_in_the_logit(logit):
    """Against float64 for both labels; a naive log(sigmoid) is infinite from 104 on."""
    grad = jax.grad(losses.logistic)
    for x in (np.float32(logit), np.float32(-logit)):
        for y in (0.0, 1.0):
            margin = np.float64(x if y else -x)
            result = losses.logistic(x, np.float32(y))
            np.testing.assert_allclose(result, np.logaddexp(0, -margin), rtol=1e-6, atol=1e-38)
            slope = (1 if x > 700 else np.exp(np.float64(x)) / (1 + np.exp(np.float64(x)))) - y
            np.testing.assert_allclose(grad(x, np.float32(y)), slope, rtol=1e-5, atol=2e-7)


@pytest.mark.parametrize(("p", "rate"), [(0.4, 1.0), (0.02, 0.3), (0.4, 0.01)])
def test_the_expected_loss_is_least_at_the_logit_of_all_traffic_under_both_corrections(p, rate):
    """Equal examples, a share p of them positive, of whose negatives a share `rate` is kept."""
    with jax.enable_x64(True):
        # The sample as it is expected: its labels, and how often each occurs.
        labels, counts = jnp.array([[1.0], [0.0]]), jnp.array([[p], [rate * (1 - p)]])
        logit_correction = jnp.full((2, 1), np.log(rate))

        def shifted(logit):
            logits = losses.sampled_logits(jnp.full((2, 1), 1.0) * logit, logit_correction)
            return weighted_loss(logits, labels, counts, jnp.ones(1))

        def weighted(logit):
            weights = counts / jnp.where(labels == 0, rate, 1)
            logits = jnp.full((2, 1), 1.0) * logit
            return weighted_loss(logits, labels, weights, jnp.ones(1))

        best = np.log(p / (1 - p))
        for loss in (shifted, weighted):
            assert jax.grad(loss)(best) == pytest.approx(0, abs=1e-15)
            assert jax.grad(jax.grad(loss))(best) > 0.005
            assert min(loss(best - 0.1), loss(best + 0.1)) > loss(best)


def test_logits_without_shifts_stay_as_they_are():
    logits = jnp.asarray(random_case()[0])
    assert losses.sampled_logits(logits, jnp.zeros((7, 0))) is logits


def test_learned_weights_add_up_over_parts_and_skip_tasks_without_labels():
    rng = np.random.default_rng(0)
    per_task, weights = rng.random(3), np.array([1.0, 2.0, 0.5])
    s, total = rng.normal(size=3), np.array([10.0, 0.0, 3.0])
    per_task[1] = 0  # what `per_task` gives where no label is known
    expected = sum(
        w * (np.exp(-v) * x + v / 2)
        for w, v, x, t in zip(weights, s, per_task, total, strict=True)
        if t > 0
    )
    shares = [0.2, 0.5, 0.3]
    parts = [
        losses.uncertainty_weighted(jnp.asarray(a * per_task), weights, s, total, 3) for a in shares
    ]
    assert sum(map(float, parts)) == pytest.approx(expected, rel=1e-6)


def test_learned_weights_settle_at_one_over_twice_the_loss():
    per_task, s = jnp.array([0.25, 4.0]), jnp.zeros(2)
    for _ in range(400):
        s -= 0.1 * jax.grad(losses.uncertainty_weighted, argnums=2)(
            per_task, jnp.ones(2), s, jnp.ones(2), 1
        )
    np.testing.assert_allclose(np.exp(-s), 1 / (2 * per_task), rtol=1e-3)
