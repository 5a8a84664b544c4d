"""Tests of losses of requests against a loop over requests, and of what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from request_batches import GROUP, batch

from jaxrank import request_losses, task_losses
from jaxrank.errors import InputError
from jaxrank.features import PAD, Task


def looped(name, scores, batch):
    """Computes the loss request by request, in float64, as the definition says."""
    losses, weights = [], []
    scores, labels = scores.astype(np.float64), batch.labels[:, 0].astype(np.float64)
    for start in range(0, len(scores), GROUP):
        inside = np.arange(start, start + GROUP)
        for request in set(batch.requests[inside].tolist()) - {int(PAD)}:
            rows = [i for i in inside if batch.requests[i] == request and batch.weights[i, 0] > 0]
            count = {
                i: np.exp(-batch.logit_correction[i, 0])
                if batch.logit_correction.shape[1] and labels[i] == 0
                else 1.0
                for i in rows
            }
            if name == "listwise_softmax":
                total = sum(labels[i] for i in rows)
                if not total:
                    continue
                log_sum = np.log(sum(count[i] * np.exp(scores[i]) for i in rows))
                loss = sum(labels[i] * (log_sum - scores[i]) for i in rows) / total
            else:
                pairs = [(i, j) for i in rows for j in rows if labels[i] > labels[j]]
                if not pairs:
                    continue
                each = [count[i] * count[j] for i, j in pairs]
                terms = [np.logaddexp(0, scores[j] - scores[i]) for i, j in pairs]
                loss = np.dot(each, terms) / sum(each)
            losses.append(loss)
            weights.append(np.mean([batch.weights[i, 0] for i in rows]))
    return np.average(losses, weights=weights)


def computed(name, scores, batch):
    (loss,) = task_losses.select_losses({"click": name}, [Task("click", "count")])
    requests = request_losses.requests_of(jax.tree.map(jnp.asarray, batch), 0)
    labels = jnp.asarray(batch.labels[:, 0])
    weights = loss.loss.weights(labels, requests)
    each = loss.loss.each(jnp.asarray(scores), labels, requests)
    return (weights * each).sum() / weights.sum()


@pytest.mark.parametrize("kind", ["binary", "count"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["listwise_softmax", "pairwise"])
def test_a_loss_of_requests_is_that_of_a_loop_over_requests(name, sampled, kind):
    scores, case = batch(sampled=sampled, kind=kind)
    value, gradient = jax.value_and_grad(computed, argnums=1)(name, scores, case)
    assert float(value) == pytest.approx(looped(name, scores, case), rel=1e-5)
    assert np.isfinite(gradient).all()
    for i in [0, 5, 20]:
        moved = [scores + step * (np.arange(len(scores)) == i) for step in (1e-3, -1e-3)]
        slope = (looped(name, moved[0], case) - looped(name, moved[1], case)) / 2e-3
        assert float(gradient[i]) == pytest.approx(slope, abs=1e-5)
    # Scores of fillers, and of examples with an unknown label, change nothing.
    without = case.weights[:, 0] == 0
    assert (gradient[without] == 0).all()
    other = np.where(without, np.float32(50), scores)
    assert float(computed(name, other, case)) == pytest.approx(float(value), rel=1e-6)


@pytest.mark.parametrize("name", ["listwise_softmax", "pairwise"])
def test_a_constant_moves_no_loss_of_requests(name):
    scores, case = batch()
    moved = computed(name, scores + 30, case)
    assert float(moved) == pytest.approx(float(computed(name, scores, case)), rel=1e-5)


def test_examples_without_requests_are_rejected():
    _, case = batch()
    with pytest.raises(InputError, match=r"features.group: found batches without requests"):
        request_losses.requests_of(case._replace(requests=()), 0)
    with pytest.raises(InputError, match="'pairwise'.*kind 'real'"):
        task_losses.select_losses({"price": "pairwise"}, [Task("price", "real")])


def test_a_score_is_ranked_alone_unless_a_pointwise_loss_is_added():
    chosen = {"a": "pairwise", "b": dict(name="listwise_softmax", pointwise=0.5), "c": "bce"}
    assert task_losses.request_tasks(chosen) == ("a", "b")
    assert task_losses.request_tasks(chosen, alone=True) == ("a",)
