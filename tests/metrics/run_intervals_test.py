"""Intervals against simulation: how often they hold the true value."""

import numpy as np
import pytest

from jaxrank.metrics import run_intervals


def test_intervals_of_mean_and_deviation_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    samples = rng.normal(3, 2, (4000, 8))
    for function, truth in ((run_intervals.mean, 3), (run_intervals.standard_deviation, 2)):
        ends = np.array([function(sample)[1:] for sample in samples])
        held = ((ends[:, 0] <= truth) & (truth <= ends[:, 1])).mean()
        assert held == pytest.approx(0.95, abs=0.015)


def test_pairs_cancel_what_they_have_in_common():
    shared = np.array([1.0, 5.0, 2.0, 8.0])
    actual = run_intervals.paired(shared + 0.5, shared)
    np.testing.assert_allclose(actual, 0.5, atol=1e-12)


def test_one_value_has_no_interval():
    assert run_intervals.mean([2.0])[0] == 2
    assert np.isnan(run_intervals.mean([2.0])[1:]).all()
    assert np.isnan(run_intervals.standard_deviation([2.0])).all()
    assert run_intervals.mean([2.0]).text(".2f", "%") == "2.00%"
    assert run_intervals.Interval(0.5, -0.1, 1.1).text() == "+0.5 (-0.1 to +1.1)"
