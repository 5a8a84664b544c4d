"""Runs that are judged by the moving average of their weights."""

import jax
import numpy as np
import pytest
from runs import final_state, nothing, store_config

from jaxrank import mesh as meshes
from jaxrank.evaluation.evaluate import evaluate
from jaxrank.run import build
from jaxrank.step import prediction_weights, trained

pytestmark = pytest.mark.usefixtures("shared_programs")

DECAY = 0.9


@pytest.fixture(scope="module")
def averaged(variants):
    workdir, result, _ = variants.unbroken("average")
    return workdir, result


def to_host(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(tree))


def test_the_average_follows_its_formula_call_by_call(store, averaged):
    workdir, _ = averaged
    c = store_config(store, ema_decay=DECAY)
    job = build(c, workdir, nothing)
    state = job.program.init()
    expected = to_host(trained(state))
    for execution in range(1, 9):
        batch = meshes.put_batch(next(job.batches), job.program.mesh, leading=1)
        state, _ = job.program.train(state, batch, np.int32(2))
        keep = min(DECAY, (1 + 2 * execution) / (10 + 2 * execution)) ** 2  # two steps an execution
        new = to_host(trained(state))
        expected = jax.tree.map(lambda a, w, k=keep: k * a + (1 - k) * w, expected, new)
    job.batches.close()
    assert int(state.step) == 16
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        to_host(prediction_weights(state)),
        expected,
    )
    distance = jax.tree.map(lambda a, b: np.abs(a - b).max(), expected, to_host(trained(state)))
    assert max(jax.tree.leaves(distance)) > 1e-3


def test_training_itself_is_that_of_a_run_without_average(store, averaged, variants):
    plain = final_state(store, variants.unbroken("plain")[0])
    state = final_state(store, averaged[0], ema_decay=DECAY)
    jax.tree.map(np.testing.assert_array_equal, trained(state), trained(plain))
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, plain.opt_state)


def test_the_average_is_what_is_scored(averaged):
    workdir, result = averaged
    scored = evaluate(str(workdir))
    for task, metrics in result.metrics.items():
        # By another program, whose sums may be in another order.
        assert scored.metrics[task]["logloss"] == pytest.approx(metrics["logloss"], rel=1e-5)
