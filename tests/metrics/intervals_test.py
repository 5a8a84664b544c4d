"""Tests of standard errors against derivatives and repeated draws."""

import numpy as np
import pytest

from benchmarks.quality import interval_coverage
from jaxrank.metrics import exact, intervals

KINDS = ("binary", "real", "count")


def examples(kind, rows, seed=0):
    """Returns outputs with ties, labels and weights, some of them 0."""
    r = np.random.default_rng(seed)
    x = r.normal(size=rows).round(1)
    if kind == "binary":
        y = (r.random(rows) < 1 / (1 + np.exp(-x))) * r.choice([1.0, 0.75], rows)
    else:
        y = r.poisson(np.exp(x)) if kind == "count" else x + 2 + r.normal(size=rows)
    return x, np.float64(y), r.choice([0.0, 0.5, 1.0, 3.0], rows)


@pytest.mark.parametrize("kind", KINDS)
def test_the_influence_of_an_example_is_the_slope_of_the_metric_by_its_weight(kind):
    x, y, w = examples(kind, 60)
    result = intervals.influences(x, y, w, kind)
    metrics = exact.exact(x, y, w, kind)
    assert result.keys() == metrics.keys() - {"examples"}
    for i in np.flatnonzero(w)[:8]:
        step = 1e-6 * w[i]
        more, less = w.copy(), w.copy()
        more[i], less[i] = w[i] + step, w[i] - step
        above, below = exact.exact(x, y, more, kind), exact.exact(x, y, less, kind)
        for name, values in result.items():
            slope = (above[name] - below[name]) / (2 * step) * w.sum()
            assert values[i] == pytest.approx(slope, abs=1e-5), name
    for values in result.values():
        assert (w * values).sum() == pytest.approx(0, abs=1e-9)


def test_the_standard_error_is_the_deviation_over_repeated_draws():
    metrics, errors, paired, differences = [], [], [], []
    for seed in range(200):
        x, y, w = examples("binary", 400, seed)
        other = x + np.random.default_rng(1000 + seed).normal(size=400) / 2
        first, second = (exact.exact(s, y, w) for s in (x, other))
        a, b = (intervals.influences(s, y, w) for s in (x, other))
        metrics.append(list(first[name] for name in a))
        errors.append(list(intervals.standard_errors(a, w).values()))
        paired.append(list(intervals.standard_errors(a, w, b).values()))
        differences.append([second[name] - first[name] for name in a])
    np.testing.assert_allclose(np.mean(errors, axis=0), np.std(metrics, axis=0), rtol=0.15)
    np.testing.assert_allclose(np.mean(paired, axis=0), np.std(differences, axis=0), rtol=0.15)
    assert (np.mean(paired, axis=0) < np.mean(errors, axis=0)).all()


def test_undefined_metrics_have_undefined_errors():
    ones = np.ones(intervals.MIN_EXAMPLES)
    result = intervals.influences(ones, ones, ones)
    errors = intervals.standard_errors(result, ones)
    assert np.isnan(errors["auc"])
    assert errors["logloss"] == pytest.approx(0, abs=1e-12)
    few = np.append(ones[1:], 0.0)
    assert all(np.isnan(e) for e in intervals.standard_errors(result, few).values())
    result = intervals.influences(np.arange(intervals.MIN_EXAMPLES), 0 * ones, ones)
    errors = intervals.standard_errors(result, ones)
    assert {name for name, error in errors.items() if np.isnan(error)} == {
        "auc", "normalized_entropy", "calibration"
    }  # fmt: skip
    nothing = intervals.influences(*3 * [np.zeros(0)], clusters=np.zeros(0, np.int64))
    assert all(np.isnan(e) for e in intervals.standard_errors(nothing, np.zeros(0)).values())


def test_the_error_of_clusters_is_that_of_the_metric_with_less_of_each():
    """Without each cluster for a mean. For the AUC, the mean of that and of the slope by weight."""
    x, y, w = examples("binary", 300)
    other = x + np.random.default_rng(1).normal(size=300)
    clusters = np.random.default_rng(2).geometric(0.1, 300)
    used = np.unique(clusters[w > 0])
    both = [intervals.influences(s, y, w, clusters=clusters) for s in (x, other)]
    errors = intervals.standard_errors(both[1], w, both[0], clusters)

    def difference(name, weights):
        first, second = (exact.exact(s, y, weights)[name] for s in (x, other))
        return second - first

    for name in ("auc", "logloss"):
        changes = []
        for cluster in used:
            inside = clusters == cluster
            whole = difference(name, w)
            change = whole - difference(name, np.where(inside, 0, w))
            if name == "auc":
                slope = (difference(name, np.where(inside, 1.0001 * w, w)) - whole) / 0.0001
                change = (change + slope * w.sum() / w[~inside].sum()) / 2
            changes.append(change)
        error = np.sqrt((len(used) - 1) / len(used) * np.square(changes).sum())
        assert errors[name] == pytest.approx(error, rel=1e-4), name


@pytest.mark.parametrize(("users", "sizes"), [(30, "equal"), (100, "unequal")])
def test_intervals_of_clustered_examples_contain_the_expected_metric(users, sizes):
    """95% of them must. Of 400 data sets the share has a standard error of 1.1%."""
    case = interval_coverage.Case(users, sizes, bias=1.2)
    clustered = interval_coverage.coverage(case, repetitions=400, examples=200_000)
    assert len(clustered) == 6
    assert all(0.93 <= share <= 0.97 for share in clustered.values()), clustered


def test_intervals_that_take_clustered_examples_as_independent_are_too_narrow():
    case = interval_coverage.Case(100)
    independent = interval_coverage.coverage(
        case, repetitions=100, is_clustered=False, examples=200_000
    )
    assert independent["logloss"] < 0.9
    assert independent["difference of calibration"] < 0.6


def test_clusters_of_one_example_are_independent_examples():
    x, y, w = examples("binary", 400)
    w[w == 0] = 1
    result = intervals.influences(x, y, w)
    singles = intervals.standard_errors(result, w, clusters=np.arange(400)[::-1])
    for name, error in singles.items():
        # The mean without each example: the jackknife.
        left = -w * result[name] / (w.sum() - w)
        assert error == pytest.approx(np.sqrt(399 / 400 * (left**2).sum()))
    # Every example twice: the clusters have no more information than one of each.
    twice = {name: np.tile(values, 2) for name, values in result.items()}
    again = intervals.standard_errors(twice, np.tile(w, 2), clusters=np.tile(np.arange(400), 2))
    assert again == pytest.approx(singles)
    few = intervals.margins(result, w, clusters=np.arange(400) % intervals.MIN_CLUSTERS)
    assert np.isfinite(few["auc"]).all()
    fewer = np.arange(400) % (intervals.MIN_CLUSTERS - 1)
    assert np.isnan(intervals.margins(result, w, clusters=fewer)["auc"]).all()


def test_intervals_of_skewed_clusters_are_wider_on_one_side():
    """Means of 30 squared normal numbers: 1,000 data sets have a standard error of 0.7%."""
    r, hits, plain = np.random.default_rng(0), 0, 0
    ones, clusters = np.ones(30), np.arange(30)
    for _ in range(1000):
        values = r.normal(size=30) ** 2
        influence = {"loss": values - values.mean()}
        margins = intervals.margins(influence, ones, clusters=clusters)["loss"]
        (opposite,) = intervals.margins(
            {"loss": -influence["loss"]}, ones, clusters=clusters
        ).values()
        assert opposite == pytest.approx(margins[::-1])
        error = intervals.standard_errors(influence, ones, clusters=clusters)["loss"]
        low, high = margins.ends(values.mean())
        hits += low <= 1 <= high
        plain += abs(values.mean() - 1) <= 2.0452 * error  # Student's quantile of 29 degrees
        assert margins.above >= margins.below > 2.0452 * error
    assert plain < 920 < hits < 980


def test_the_skewness_of_few_clusters_has_little_bias():
    """Of numbers with a skewness of 1, mean over 4,000 samples with a standard error of 0.8%."""
    r, clusters, total = np.random.default_rng(0), 30, 0.0
    for values in r.gamma(4, size=(4000, clusters)):
        unit = values - values.mean()
        total += intervals._skewness(unit / np.sqrt((unit**2).sum())) * np.sqrt(clusters)
    assert 0.92 < total / 4000 < 1.02


def test_intervals_follow_the_unit_of_the_metric_however_small():
    """A model that is right everywhere has losses of 1e-120, whose cubes are 0."""
    values = np.random.default_rng(0).normal(size=30) ** 2
    influence, ones, clusters = values - values.mean(), np.ones(30), np.arange(30)
    with np.errstate(divide="raise", invalid="raise"):
        small, usual = (
            intervals.margins({"loss": unit * influence}, ones, clusters=clusters)["loss"]
            for unit in (1e-120, 1.0)
        )
    np.testing.assert_allclose(1e120 * np.array(small), usual)
