"""Runs whose weights of tasks are learned."""

import numpy as np
import pytest
from runs import final_state, records, run

from jaxrank.evaluation.evaluate import evaluate
from jaxrank.step import LOG_VARIANCES

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def learned(variants):
    workdir, result, _ = variants.unbroken("learned weights")
    return workdir, result


def test_weights_are_learned_recorded_and_saved(store, learned):
    workdir, _ = learned
    lines = records(workdir)
    assert (lines[0]["click/weight"], lines[0]["conversion/weight"]) == (1.0, 3.0)
    state = final_state(store, workdir, task_weighting="uncertainty", task_weights=(1.0, 3.0))
    variances = np.asarray(state.params[LOG_VARIANCES])
    # Losses are above 1/2, so both variances rise, by about the rate of Adam a step.
    assert (variances > 0.0025).all()
    before_last = lines[-1]["click/weight"], lines[-1]["conversion/weight"] / 3
    assert (np.log(before_last) > -variances).all()
    assert (np.log(before_last) < -0.0023).all()


def test_a_run_with_learned_weights_is_scored_like_any_other(learned):
    workdir, result = learned
    scored = evaluate(str(workdir))
    for task, metrics in result.metrics.items():
        assert scored.metrics[task]["logloss"] == pytest.approx(metrics["logloss"], rel=1e-5)


def test_without_learning_nothing_is_added(store, tmp_path):
    run(store, tmp_path, num_steps=2)
    assert LOG_VARIANCES not in final_state(store, tmp_path, num_steps=2).params
    assert "click/weight" not in records(tmp_path)[0]
