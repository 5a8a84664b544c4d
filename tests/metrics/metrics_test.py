"""Tests of metrics against scikit-learn, and of sums over batches against exact metrics."""

import math
import operator

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registries import restored
from sklearn.metrics import log_loss, roc_auc_score

from jaxrank.errors import InputError
from jaxrank.metrics import exact as exact_metrics
from jaxrank.metrics import registry
from jaxrank.metrics import sums as metrics
from jaxrank.metrics.registry import METRICS, Metric

FIELDS = {metric.name for metric in METRICS["binary"]} | {"calibration", "examples"}


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def clicks(n=20_000, tasks=1, seed=0, spread=1.5):
    """Returns logits, labels drawn from similar logits, and weights, some of them 0."""
    r = np.random.default_rng(seed)
    truth = r.normal(size=(n, tasks)) * spread - 2
    logits = (truth + r.normal(size=(n, tasks)) * spread / 3).astype(np.float32)
    labels = (r.random((n, tasks)) < sigmoid(truth)).astype(np.float32)
    weights = (r.random((n, tasks)) * (r.random((n, tasks)) < 0.9)).astype(np.float32)
    return logits, labels, weights


def batch_sums(logits, labels, weights):
    return metrics.batch_sums(logits, labels, weights, ("binary",) * logits.shape[1])


def from_sums(sums):
    return metrics.from_sums(sums, ("binary",) * len(sums.weight))


def select(result, expected):
    """Returns the subset of metrics that the test expects."""
    return {name: result[name] for name in expected}


def sklearn_metrics(p, score, y, w):
    p, score, y, w = (np.asarray(a, np.float64) for a in (p, score, y, w))
    loss = log_loss(y, p, sample_weight=w, labels=[0, 1])
    base = np.full(len(y), np.average(y, weights=w))
    return {
        "logloss": loss,
        "auc": roc_auc_score(y, score, sample_weight=w),
        "normalized_entropy": loss / log_loss(y, base, sample_weight=w, labels=[0, 1]),
        "calibration": (w * p).sum() / (w * y).sum(),
        "examples": (w > 0).sum(),
    }


def test_exact_metrics_are_those_of_sklearn():
    x, y, w = (a[:, 0] for a in clicks())
    result = exact_metrics.exact(x, y, w)
    assert set(result) == FIELDS
    assert all(type(v) in (int, float) for v in result.values())
    expected = sklearn_metrics(sigmoid(x), x, y, w)
    assert select(result, expected) == pytest.approx(expected, rel=1e-9)
    result = exact_metrics.exact_from_probabilities(sigmoid(x), y, w)
    assert select(result, expected) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-3, 3), st.booleans(), st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        min_size=1,
        max_size=30,
    )
)
def test_exact_metrics_are_those_of_sklearn_with_many_ties(rows):
    x, y, w = (np.array(c, np.float32) for c in zip(*rows, strict=True))
    result = exact_metrics.exact(x, y, w)
    kept = w > 0
    if len(set(y[kept])) == 2:
        expected = sklearn_metrics(sigmoid(x[kept]), x[kept], y[kept], w[kept])
        assert select(result, expected) == pytest.approx(expected, rel=1e-9)
    else:
        assert math.isnan(result["auc"])
        assert math.isnan(result["normalized_entropy"])
        assert result["examples"] == kept.sum()
        assert math.isnan(result["logloss"]) == (not kept.any())
        assert math.isnan(result["calibration"]) == (not y[kept].any())


def test_examples_of_weight_zero_do_not_count_whatever_they_hold():
    x, y, w = (a[:, 0] for a in clicks(500))
    more = (np.append(x, [np.nan, 50]), np.append(y, [1, 0]), np.append(w, [0, 0]))
    assert exact_metrics.exact(*more) == exact_metrics.exact(x, y, w)


def test_logloss_is_exact_for_logits_far_beyond_the_range_of_probabilities():
    result = exact_metrics.exact([800.0, -800.0, 40.0], [0, 1, 1], [1, 1, 2])
    assert result["logloss"] == pytest.approx((1600 + 2 * math.exp(-40)) / 4, rel=1e-12)
    right = exact_metrics.exact([40.0, -40.0], [1, 0], [1, 1])
    assert right["logloss"] == pytest.approx(math.exp(-40), rel=1e-9)
    assert right["auc"] == 1.0


def test_the_order_of_saturated_logits_still_counts():
    result = exact_metrics.exact([100.0, 101.0, 102.0], [0, 1, 1], [1, 1, 1])
    assert result["auc"] == 1.0


def test_infinite_and_missing_logits_give_values_not_exceptions():
    right = exact_metrics.exact([np.inf, -np.inf], [1, 0], [1, 1])
    assert (right["logloss"], right["auc"]) == (0.0, 1.0)
    assert exact_metrics.exact([np.inf, 0.0], [0, 1], [1, 1])["logloss"] == math.inf
    lost = exact_metrics.exact([np.nan, 0.0], [0, 1], [1, 1])
    assert math.isnan(lost["logloss"])
    assert math.isnan(lost["auc"])


def test_certain_probabilities_cost_nothing_where_right_and_a_finite_amount_where_wrong():
    right = exact_metrics.exact_from_probabilities([0.0, 1.0, 0.25], [0, 1, 0], [1, 1, 1])
    assert right["logloss"] == pytest.approx(-math.log(0.75) / 3, rel=1e-9)
    wrong = exact_metrics.exact_from_probabilities([0.0, 1.0], [1, 0], [1, 1])
    assert 30 < wrong["logloss"] < 1000


def test_the_constant_prediction_is_the_mean_label():
    _, y, w = (a[:, 0] for a in clicks())
    mean = np.average(y.astype(np.float64), weights=w)
    expected = exact_metrics.exact_from_probabilities(np.full(len(y), mean), y, w)
    result = exact_metrics.constant(y, w)
    assert result == pytest.approx(expected, rel=1e-9)
    assert (result["auc"], result["calibration"]) == (0.5, 1.0)
    assert result["normalized_entropy"] == pytest.approx(1.0)


@pytest.mark.parametrize(("y", "calibration"), [([0.0, 0.0], math.nan), ([1.0, 1.0], 1.0)])
def test_the_constant_prediction_of_one_class_is_undefined_where_it_must_be(y, calibration):
    result = exact_metrics.constant(y, [1.0, 2.0])
    assert result["logloss"] == 0.0
    assert result["calibration"] == pytest.approx(calibration, nan_ok=True)
    assert math.isnan(result["auc"])
    assert math.isnan(result["normalized_entropy"])


def test_no_examples_give_nan_everywhere():
    empty = np.zeros((0, 2), np.float32)
    column = empty[:, 0]
    results = [
        exact_metrics.exact(column, column, column),
        exact_metrics.exact_from_probabilities(column, column, column),
        exact_metrics.constant(column, column),
        *from_sums(batch_sums(empty, empty, empty)),
    ]
    for result in results:
        assert result.pop("examples") == 0
        assert all(math.isnan(v) for v in result.values())
    assert exact_metrics.calibration_buckets(column, column, column) == []


def merged(a, b):
    """Adds the sums of two sets of examples, on the device or on the host."""
    return jax.tree.map(operator.add, a, b)


def compute_sums(logits, labels, weights, batch=1000):
    """Computes sums that are merged over batches on the device."""
    total = None
    for start in range(0, len(logits), batch):
        part = slice(start, start + batch)
        sums = jax.jit(batch_sums)(logits[part], labels[part], weights[part])
        total = sums if total is None else merged(total, sums)
    return total


@pytest.mark.parametrize(("spread", "error"), [(0.3, 1e-3), (1.5, 2e-4), (4.0, 5e-5)])
def test_sums_over_batches_give_nearly_the_exact_metrics_of_each_task(spread, error):
    logits, labels, weights = clicks(tasks=3, spread=spread)
    weights[:, 2] = 1
    result = from_sums(compute_sums(logits, labels, weights))
    for task in range(3):
        exact = exact_metrics.exact(logits[:, task], labels[:, task], weights[:, task])
        assert result[task]["auc"] == pytest.approx(exact["auc"], abs=error)
        for field in FIELDS - {"auc"}:
            assert result[task][field] == pytest.approx(exact[field], rel=2e-5)
        assert type(result[task]["examples"]) is int


def test_the_histogram_holds_each_weight_once_by_task_label_and_bin():
    logits, labels, weights = clicks(3000, tasks=2, spread=12)
    logits[:4, 0] = [np.inf, -np.inf, 1e9, -1e9]
    h = np.asarray(batch_sums(logits, labels, weights).histogram)
    edges = np.linspace(-16, 16, metrics.BINS + 1)
    edges[0], edges[-1] = -np.inf, np.inf
    for task in range(2):
        for label in (0, 1):
            local = labels[:, task] == label
            bins = np.clip(np.searchsorted(edges, logits[local, task], side="right") - 1, 0, 1023)
            expected = np.bincount(bins, weights[local, task], minlength=metrics.BINS)
            np.testing.assert_allclose(h[task, label], expected, rtol=1e-5, atol=1e-6)


def test_host_sums_count_beyond_float32_and_int32():
    ten = metrics.to_host(batch_sums(*clicks(10)))
    many = jax.tree.map(lambda a: a * 10**9, ten)
    total = merged(many, ten)
    assert total.examples[0] == ten.examples[0] * (10**9 + 1)
    assert total.weight[0] - many.weight[0] == pytest.approx(ten.weight[0], rel=1e-3)


def test_a_metric_that_is_a_mean_is_the_same_from_sums_and_from_all_examples(monkeypatch):
    metric = Metric("error", "error", mean=lambda p, y: abs(p - y))
    monkeypatch.setitem(METRICS, "binary", (*METRICS["binary"], metric))
    logits, labels, weights = clicks(500)
    (summed,) = from_sums(batch_sums(logits, labels, weights))
    x, y, w = (a[:, 0].astype(np.float64) for a in (logits, labels, weights))
    expected = np.average(abs(sigmoid(x) - y), weights=w)
    assert summed["error"] == pytest.approx(expected, rel=1e-5)
    assert exact_metrics.exact(x, y, w)["error"] == pytest.approx(expected, rel=1e-12)
    result = exact_metrics.exact_from_probabilities(sigmoid(x), y, w)
    assert result["error"] == pytest.approx(expected, rel=1e-12)
    rate = np.average(y, weights=w)
    constant = np.average(abs(rate - y), weights=w)
    assert exact_metrics.constant(y, w)["error"] == pytest.approx(constant, rel=1e-12)


def test_batch_sums_keep_float64():
    with jax.enable_x64(True):
        case = [a.astype(np.float64) for a in clicks(100)]
        sums = batch_sums(*case)
        assert {a.dtype for a in jax.tree.leaves(sums[1:])} == {np.dtype(np.float64)}
        assert sums.examples.dtype == np.int32
        loss = from_sums(sums)[0]["logloss"]
    assert loss == pytest.approx(
        exact_metrics.exact(*(a[:, 0] for a in case))["logloss"], rel=1e-12
    )


def test_the_calibration_error_is_the_mean_distance_over_buckets_by_weight():
    logits = np.log([0.2 / 0.8, 0.2 / 0.8, 0.5 / 0.5, 0.5 / 0.5])
    buckets = exact_metrics.calibration_buckets(logits, [0, 1, 1, 1], [3, 1, 2, 10])
    error = exact_metrics.calibration_error(buckets)
    assert error == pytest.approx((4 * abs(0.2 - 1 / 4) + 12 * abs(0.5 - 1)) / 16)
    assert np.isnan(exact_metrics.calibration_error([]))


def test_calibration_buckets_hold_equally_many_examples_by_prediction():
    x, y, w = (a[:, 0] for a in clicks(1003))
    x = np.arange(1003, dtype=np.float32)[np.random.default_rng(0).permutation(1003)] / 500
    w[:] = np.random.default_rng(1).random(1003) + 0.1
    result = exact_metrics.calibration_buckets(x, y, w)
    assert len(result) == 10
    order = np.argsort(x)
    start = 0
    for bucket in result:
        assert bucket["examples"] in (100, 101)
        part = order[start : start + bucket["examples"]]
        start += bucket["examples"]
        p = sigmoid(x[part])
        assert bucket["lower"] == pytest.approx(p.min())
        assert bucket["upper"] == pytest.approx(p.max())
        assert bucket["predicted"] == pytest.approx(np.average(p, weights=w[part]))
        observed = np.average(y[part], weights=w[part])
        assert bucket["observed"] == pytest.approx(observed)
        assert bucket["weight"] == pytest.approx(w[part].sum())
        error = np.sqrt(((w[part] * (y[part] - observed)) ** 2).sum()) / w[part].sum()
        assert bucket["error"] == pytest.approx(error)
    assert start == 1003


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.booleans(), st.sampled_from([0.0, 1.0, 3.0])), max_size=40
    ),
    st.randoms(use_true_random=False),
)
def test_calibration_buckets_do_not_depend_on_order_and_never_split_ties(rows, random):
    shuffled = random.sample(rows, len(rows))
    a, b = (
        exact_metrics.calibration_buckets(*(np.array(r, np.float32).reshape(-1, 3).T), buckets=4)
        for r in (rows, shuffled)
    )
    assert [tuple(x.values()) for x in a] == [pytest.approx(tuple(x.values())) for x in b]
    assert sum(x["examples"] for x in a) == sum(w > 0 for _, _, w in rows)
    assert all(low["upper"] < high["lower"] for low, high in zip(a, a[1:], strict=False))


def test_probabilities_keep_their_relative_precision():
    np.testing.assert_allclose(
        exact_metrics.probability([-700.0, -40.0, 0.0, 40.0]),
        [math.exp(-700), math.exp(-40), 0.5, 1.0],
        rtol=1e-14,
    )


def test_metrics_of_a_sample_are_those_of_sklearn_with_negatives_weighted_by_their_rate():
    """Devices use logit corrections batch by batch, and the host uses weights."""
    logits, labels, weights = clicks(20_000, tasks=2, spread=1.0)
    rates = np.float32([0.1, 0.5])[np.random.default_rng(5).integers(0, 2, logits.shape)]
    sample_weight = np.where(labels == 0, 1 / rates.astype(np.float64), 1) * weights
    logit_correction = np.log(rates)
    total = None
    for start in range(0, len(logits), 1000):
        part = [a[start : start + 1000] for a in (logits, labels, weights, logit_correction)]

        @jax.jit
        def compute_sums(logits, labels, weights, logit_correction):
            traffic = metrics.traffic_weights(weights, labels, logit_correction)
            return traffic, batch_sums(logits, labels, traffic)

        traffic, sums = compute_sums(*part)
        np.testing.assert_allclose(traffic, sample_weight[start : start + 1000], rtol=1e-5)
        total = sums if total is None else merged(metrics.to_host(total), sums)
    for task, result in enumerate(from_sums(total)):
        x, y, w = logits[:, task], labels[:, task], sample_weight[:, task]
        expected = sklearn_metrics(sigmoid(x), x, y, w)
        exact = exact_metrics.exact(x, y, w)
        assert select(exact, expected) == pytest.approx(expected, rel=1e-9)
        auc = expected.pop("auc")
        assert result.pop("auc") == pytest.approx(auc, abs=1e-3)
        assert select(result, expected) == pytest.approx(expected, rel=1e-4)
        plain = sklearn_metrics(sigmoid(x), x, y, weights[:, task])
        assert abs(plain["calibration"] / expected["calibration"] - 1) > 0.5


def test_weights_without_shifts_stay_as_they_are():
    weights = jax.numpy.ones((3, 2))
    assert metrics.traffic_weights(weights, weights, np.zeros((3, 0), np.float32)) is weights


@pytest.mark.parametrize(
    ("mean", "message"),
    [
        (
            lambda p, y: ((p - y) ** 2).mean(),
            r"'own' must return one number per label.*\[2\]: found",
        ),
        (lambda p, y: (p - y).sum(-1), r"of shape \[2\]: found np.float64"),
        (lambda p, y: p if p.ndim == 1 else p[:, 0], r"of shape \[2, 3\]: found \[2\]"),
        (lambda p, y: np.log(np.maximum(p, 1e-7)), "operators and methods that NumPy and JAX"),
    ],
)
def test_a_metric_that_is_not_elementwise_is_rejected(mean, message):
    with restored():
        registry.register("own", higher_is_better=False)(mean)
        with pytest.raises(InputError, match=message):
            registry.check_means()
