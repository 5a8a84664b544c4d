"""Tests of histograms of scores by label."""

import numpy as np
import pytest

from jaxrank.metrics.histograms import score_histogram


def test_each_weight_is_counted_once_by_logit_and_label():
    r = np.random.default_rng(0)
    x = np.concatenate([r.normal(size=500), [-40.0, 40.0]])
    y, w = r.choice([0.0, 1.0, 0.25], 502), r.choice([0.0, 2.0, 3.0], 502)
    w[-2:] = 1.0  # the first and the last bin hold all scores beyond the ends
    result = score_histogram(x, y, w)
    edges = np.array(result["edges"])
    np.testing.assert_allclose(np.diff(edges), 0.25)
    assert (edges[0], edges[-1]) == (-16, 16)
    for name, part in (("positive", w * y), ("negative", w * (1 - y))):
        expected, _ = np.histogram(np.clip(x, -16, 15.999), edges, weights=part)
        np.testing.assert_allclose(result[name], expected)


@pytest.mark.parametrize(("kind", "of"), [("real", lambda x: x), ("count", np.exp)])
def test_predictions_and_labels_of_other_kinds_share_their_bins(kind, of):
    x, y, w = np.array([0.0, 1.0, 2.0]), np.array([5.0, 0.0, 9.0]), np.array([1.0, 2.0, 0.0])
    result = score_histogram(x, y, w, kind)
    edges = np.array(result["edges"])
    for name, values in (("predicted", of(x)), ("labels", y)):
        expected, _ = np.histogram(values, edges, weights=w)
        np.testing.assert_allclose(result[name], expected)
        assert sum(result[name]) == 3
    assert edges[-1] == 5


@pytest.mark.parametrize("kind", ["binary", "real"])
def test_no_examples_have_no_bins(kind):
    result = score_histogram(np.ones(2), np.ones(2), np.zeros(2), kind)
    assert all(values == [] for values in result.values())
