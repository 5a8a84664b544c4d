"""Tests of losses and metrics of every kind of task against scikit-learn and plain formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, mean_poisson_deviance, mean_squared_error, r2_score

from jaxrank import losses
from jaxrank.metrics import exact as exact_metrics
from jaxrank.metrics import sums as metrics
from jaxrank.metrics.registry import METRICS

# Kinds in mixed order, so that the tests detect swapped columns.
KINDS = ("count", "binary", "real", "binary", "count", "real", "real")
LOSSES = tuple(map(losses.loss_of_kind, KINDS))
FIELDS = {kind: {metric.name for metric in METRICS[kind]} for kind in METRICS}


def draw_labels(kind, outputs, r):
    if kind == "binary":
        return r.random(len(outputs)) < 1 / (1 + np.exp(-outputs))
    if kind == "count":
        return r.poisson(np.exp(outputs))
    return outputs + 3 + r.normal(size=len(outputs))


def case(n=2000, kinds=KINDS, seed=0):
    """Returns outputs, correlated labels and weights, some of them 0: f32[n, tasks] each."""
    r = np.random.default_rng(seed)
    truth = r.normal(size=(n, len(kinds))) + 0.3
    labels = np.stack([draw_labels(k, truth[:, i], r) for i, k in enumerate(kinds)], axis=1)
    outputs = truth + r.normal(size=truth.shape) / 2
    weights = r.random(truth.shape) * (r.random(truth.shape) < 0.8)
    return tuple(a.astype(np.float32) for a in (outputs, labels, weights))


def loss_by_hand(kind, x, y):
    """Computes the loss of one label in Python floats from the log of the density."""
    if kind == "real":
        return (y - x) ** 2 / 2
    if kind == "count":
        least = y - y * math.log(y) if y else 0.0
        return math.exp(x) - y * x - least
    p = 1 / (1 + math.exp(-x))
    return -math.log(p if y else 1 - p)


# Losses.


def test_each_column_has_the_loss_of_its_kind_wherever_it_stands():
    outputs, labels, _ = (a.astype(np.float64) for a in case(50))
    with jax.enable_x64(True):
        result = losses.elementwise(jnp.asarray(outputs), jnp.asarray(labels), KINDS)
    for i, kind in enumerate(KINDS):
        expected = [loss_by_hand(kind, *pair) for pair in zip(outputs[:, i], labels[:, i])]  # noqa: B905
        np.testing.assert_allclose(result[:, i], expected, rtol=1e-9, atol=1e-12)


def test_the_loss_of_a_task_is_its_weighted_mean_and_the_parts_add_up_to_it():
    outputs, labels, weights = (a.astype(np.float64) for a in case(60))
    weights[:, 2] = 0
    with jax.enable_x64(True):
        total = weights.sum(0)
        parts = [
            losses.per_task(outputs[p], labels[p], weights[p], total, LOSSES)
            for p in (slice(0, 13), slice(13, None))
        ]
        factors = np.arange(1.0, 8.0)
        whole = losses.weighted_loss(outputs, labels, weights, factors, total, LOSSES)
    expected = []
    for i, kind in enumerate(KINDS):
        rows = zip(outputs[:, i], labels[:, i], weights[:, i], strict=True)
        each = math.fsum(w * loss_by_hand(kind, x, y) for x, y, w in rows)
        expected.append(each / total[i] if total[i] else 0.0)
    np.testing.assert_allclose(parts[0] + parts[1], expected, rtol=1e-9)
    assert whole == pytest.approx(float(factors @ expected), rel=1e-9)


def test_gradients_are_the_slopes_of_the_loss_in_float64():
    outputs, labels, weights = (a.astype(np.float64) for a in case(9))
    step = 1e-5

    def loss(x):
        return losses.weighted_loss(x, labels, weights, np.ones(7), weights.sum(0), LOSSES)

    with jax.enable_x64(True):
        result = np.asarray(jax.grad(loss)(jnp.asarray(outputs)))
        loss = jax.jit(loss)
        for i, j in np.ndindex(*outputs.shape):
            moved = np.zeros_like(outputs)
            moved[i, j] = step
            slope = (loss(outputs + moved) - loss(outputs - moved)) / (2 * step)
            assert result[i, j] == pytest.approx(float(slope), rel=1e-6, abs=1e-8)


def test_binary_tasks_alone_take_the_path_they_took_before_there_were_kinds():
    outputs, labels, weights = case(200, ("binary",) * 3)
    result = losses.elementwise(outputs, labels, ("binary",) * 3)
    np.testing.assert_array_equal(result, losses.logistic(outputs, labels))
    program = jax.make_jaxpr(losses.elementwise, static_argnums=2)
    alone = jax.make_jaxpr(losses.logistic)(outputs, labels)
    assert str(program(outputs, labels, ("binary",) * 3)) == str(alone)
    mixed = losses.elementwise(*(np.repeat(a, 2, 1) for a in (outputs, labels)), KINDS[1:])
    np.testing.assert_array_equal(mixed[:, 0], result[:, 0])
    assert batch_sums(outputs, labels, weights, ("binary",) * 3).spread.tolist() == [0] * 3


LIMIT = losses.LOG_COUNT_LIMIT
poisson_with_slope = jax.jit(jax.value_and_grad(losses.poisson))


@pytest.mark.parametrize("y", [0, 1, 7, 1000, 16_777_216, 1e12])
@pytest.mark.parametrize(
    "x", [0.0, 1e-6, 5.0, -5.0, 20.0, 29.99, 30.0, 30.01, 88.0, 1e4, -200.0, -1e4]
)
def test_the_poisson_loss_and_its_gradient_are_finite_and_right_in_float32(x, y):
    """The reference is float64, with an explicit straight line above the limit."""
    x, y = np.float32(x), np.float32(y)
    wide, label = float(x), float(y)
    low = min(wide, LIMIT)
    expected = loss_by_hand("count", low, label) + (math.exp(LIMIT) - label) * (wide - low)
    result, slope = poisson_with_slope(x, y)
    assert result.dtype == slope.dtype == np.float32
    # Rounding x to float32 changes the expected count by this much.
    error = 4e-7 * max(1, abs(low)) * max(math.exp(low), label)
    assert float(result) == pytest.approx(expected, rel=2e-6, abs=error * 1e-3 + 1e-30)
    assert float(slope) == pytest.approx(math.exp(low) - label, rel=2e-6, abs=error + 1e-30)
    assert result >= 0


@pytest.mark.parametrize("y", [1, 100, 10_000, 1_000_000])
def test_the_poisson_loss_keeps_its_digits_where_the_prediction_is_nearly_right(y):
    """exp(x) - y x is then a difference below the precision of float32."""
    x = np.float32(math.log(y) + 0.01)
    result = losses.poisson(x, np.float32(y))
    exact = float(y) * (math.expm1(float(x) - math.log(y)) - (float(x) - math.log(y)))
    assert float(result) == pytest.approx(exact, rel=1e-3)


def test_kinds_of_another_number_of_tasks_are_rejected():
    outputs, labels, _ = case(5)
    with pytest.raises(ValueError, match=r"kinds must be of 7 tasks: found \('real',\)"):
        losses.elementwise(outputs, labels, ("real",))


# Metrics.

batch_sums = jax.jit(metrics.batch_sums, static_argnums=3)


def sklearn_metrics(kind, outputs, labels, weights):
    x, y, w = (np.asarray(a, np.float64)[weights > 0] for a in (outputs, labels, weights))
    mean = np.full(len(y), np.average(y, weights=w))
    if kind == "real":
        return {
            "squared_error": mean_squared_error(y, x, sample_weight=w),
            "normalized_squared_error": 1 - r2_score(y, x, sample_weight=w),
            "calibration": (w * x).sum() / (w * y).sum() if (w * y).sum() > 0 else math.nan,
            "examples": len(y),
        }
    if kind == "count":
        p = np.exp(x)
        deviance = mean_poisson_deviance(y, p, sample_weight=w)
        return {
            "deviance": deviance,
            "normalized_deviance": deviance / mean_poisson_deviance(y, mean, sample_weight=w),
            "calibration": (w * p).sum() / (w * y).sum(),
            "examples": len(y),
        }
    return exact_metrics.exact(x, y, w)  # metrics_test.py tests it


def test_exact_metrics_are_those_of_sklearn():
    outputs, labels, weights = case()
    for i, kind in enumerate(KINDS):
        columns = outputs[:, i], labels[:, i], weights[:, i]
        result = exact_metrics.exact(*columns, kind)
        assert set(result) == FIELDS[kind] | {"calibration", "examples"}
        assert all(type(v) in (int, float) for v in result.values())
        assert result == pytest.approx(sklearn_metrics(kind, *columns), rel=1e-9)


def test_sums_over_batches_give_the_metrics_of_all_examples():
    outputs, labels, weights = case(3000)
    parts = [
        batch_sums(outputs[p], labels[p], weights[p], KINDS)
        for p in (slice(0, 700), slice(700, 2900), slice(2900, None))
    ]
    on_devices = jax.tree.map(lambda *sums: sum(sums), *parts)
    on_host = jax.tree.map(lambda *sums: sum(sums), *map(metrics.to_host, parts))
    for sums in (on_devices, on_host, batch_sums(outputs, labels, weights, KINDS)):
        result = metrics.from_sums(sums, KINDS)
        for i, kind in enumerate(KINDS):
            expected = sklearn_metrics(kind, outputs[:, i], labels[:, i], weights[:, i])
            auc = result[i].pop("auc", None)
            assert auc == pytest.approx(expected.pop("auc", None), abs=2e-3)
            assert result[i] == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("mean", [10, 60, 300, 600, 2000])
@pytest.mark.parametrize("kind", ["real", "count"])
def test_what_sums_cannot_show_of_labels_far_from_0_is_nan(mean, kind):
    r = np.random.default_rng(mean)
    labels = (r.poisson(mean, 4096) if kind == "count" else r.normal(mean, 1, 4096)).astype("f4")
    outputs = np.log(labels + 1) if kind == "count" else labels + r.normal(0, 0.7, 4096)
    outputs, weights = outputs.astype("f4"), np.ones(4096, "f4")
    sums = metrics.batch_sums(*(a[:, None] for a in (outputs, labels, weights)), [kind])
    (result,) = metrics.from_sums(sums, [kind])
    name = {"real": "normalized_squared_error", "count": "normalized_deviance"}[kind]
    expected = exact_metrics.exact(outputs, labels, weights, kind)[name]
    assert np.isnan(result[name]) == (mean >= {"real": 300, "count": 2000}[kind])
    assert np.isnan(result[name]) or result[name] == pytest.approx(expected, rel=0.01)


def test_counts_above_the_limit_are_predicted_and_judged_as_they_are_trained():
    outputs, labels = np.float32([40, 800, 29, LIMIT, 60]), np.float32([1, 0, 5, 1e12, 1e12])
    np.testing.assert_allclose(
        exact_metrics.prediction(outputs, "count"),
        losses.predictions(outputs[:, None], ["count"])[:, 0],
        rtol=1e-6,
    )
    result = exact_metrics.exact(outputs, labels, np.ones(5), "count")
    sums = batch_sums(outputs[:, None], labels[:, None], np.ones((5, 1), "f4"), ("count",))
    (expected,) = metrics.from_sums(sums, ["count"])
    for name in ("deviance", "calibration"):
        assert result[name] == pytest.approx(expected[name], rel=1e-5)


def test_only_binary_tasks_have_a_histogram():
    outputs, labels, weights = case(500)
    histogram = np.asarray(batch_sums(outputs, labels, weights, KINDS).histogram)
    for i, kind in enumerate(KINDS):
        alone = batch_sums(outputs[:, [i]], labels[:, [i]], weights[:, [i]], ("binary",)).histogram
        expected = alone[0] if kind == "binary" else np.zeros_like(alone[0])
        np.testing.assert_array_equal(histogram[i], expected)
    assert histogram.sum() > 0


def test_sums_keep_float64():
    arrays = [a.astype(np.float64) for a in case(300)]
    with jax.enable_x64(True):
        sums = batch_sums(*map(jnp.asarray, arrays), KINDS)
        assert {a.dtype for a in jax.tree.leaves(sums[1:])} == {np.dtype(np.float64)}
        result = metrics.from_sums(sums, KINDS)
    for i, kind in enumerate(KINDS):
        expected = exact_metrics.exact(*(a[:, i] for a in arrays), kind)
        for field in FIELDS[kind] - {"auc"}:
            assert result[i][field] == pytest.approx(expected[field], rel=1e-10)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-2, 2), st.integers(0, 4), st.sampled_from([0.0, 0.5, 3.0])),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(["real", "count"]),
)
def test_few_examples_have_the_metrics_of_sklearn_or_none(rows, kind):
    x, y, w = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    exact = exact_metrics.exact(x, y, w, kind)
    # Padded to one size, so that all cases use one compiled program.
    filled = [np.pad(a, (0, 12 - len(a)))[:, None].astype(np.float32) for a in (x, y, w)]
    summed = metrics.from_sums(batch_sums(*filled, (kind,)), (kind,))
    main, normalized = (metric.name for metric in METRICS[kind][:2])
    kept = y[w > 0]
    if not len(kept):
        assert all(math.isnan(v) for f, v in exact.items() if f != "examples")
        assert exact["examples"] == 0
        return
    if len(set(kept.tolist())) > 1:
        expected = sklearn_metrics(kind, x, y, w)
    else:
        assert math.isnan(exact[normalized])
        predicted = x[w > 0] if kind == "real" else np.exp(x[w > 0])
        error = mean_squared_error if kind == "real" else mean_poisson_deviance
        expected = {main: error(kept, predicted, sample_weight=w[w > 0])}
        assert math.isnan(exact["calibration"]) == (not kept.any())
    for field, value in expected.items():
        assert exact[field] == pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True)
        assert summed[0][field] == pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True)


def test_the_constant_prediction_is_the_mean_label():
    for kind in ("real", "count"):
        _, y, w = (a[:, 0] for a in case(800, (kind,)))
        mean = np.average(y.astype(np.float64), weights=w)
        output = np.full(len(y), np.log(mean) if kind == "count" else mean)
        expected = exact_metrics.exact(output, y, w, kind)
        result = exact_metrics.constant(y, w, kind)
        assert result == pytest.approx(expected, rel=1e-9)
        assert result["calibration"] == 1.0
        assert result[f"normalized_{METRICS[kind][0].name}"] == 1.0
        # It is the minimum over all constants.
        for other in (output - 0.01, output + 0.01):
            name = METRICS[kind][0].name
            assert exact_metrics.exact(other, y, w, kind)[name] > result[name]


def test_what_is_undefined_is_nan():
    same = exact_metrics.exact([1.0, 2.0], [0.1, 0.1], [1, 2], "real")
    assert same["squared_error"] == pytest.approx((0.81 + 2 * 3.61) / 3)
    assert math.isnan(same["normalized_squared_error"])
    negative = exact_metrics.exact([1.0, 2.0], [-4.0, 3.0], [1, 1], "real")
    assert math.isnan(negative["calibration"])
    assert negative["normalized_squared_error"] == pytest.approx(26 / 24.5)
    nothing = exact_metrics.exact([0.0, 1.0], [0, 0], [1, 1], "count")
    assert nothing["deviance"] == pytest.approx(1 + math.e)
    assert math.isnan(nothing["normalized_deviance"])
    assert math.isnan(nothing["calibration"])
    assert exact_metrics.constant([0, 0], [1, 1], "count")["deviance"] == 0
    for kind in ("real", "count"):
        empty = np.zeros(0)
        rows = np.zeros((0, 1), np.float32)
        sums = batch_sums(rows, rows, rows, (kind,))
        for result in (
            exact_metrics.exact(empty, empty, empty, kind),
            exact_metrics.constant(empty, empty, kind),
            *metrics.from_sums(sums, [kind]),
        ):
            assert result.pop("examples") == 0
            assert all(math.isnan(v) for v in result.values())


def test_sums_in_float32_do_not_show_a_spread_that_they_have_lost():
    r = np.random.default_rng(0)
    ones = np.ones((1000, 1), np.float32)
    for _ in range(8):  # the remaining difference is sometimes above 0
        labels = (r.uniform(1e6, 2e6) + r.normal(size=(1000, 1))).astype(np.float32)
        sums = batch_sums(labels + 1, labels, ones, ("real",))
        (result,) = metrics.from_sums(sums, ("real",))
        assert math.isnan(result["normalized_squared_error"])
        assert result["squared_error"] == pytest.approx(1, rel=1e-3)
    labels = (10 + r.normal(size=(1000, 1))).astype(np.float32)
    (result,) = metrics.from_sums(batch_sums(labels + 1, labels, ones, ("real",)), ("real",))
    expected = exact_metrics.exact(labels[:, 0] + 1, labels[:, 0], ones[:, 0], "real")
    assert result == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("labels", "weights", "is_shown"),
    [
        ([1] * 4095 + [0], [1] * 4096, True),
        ([1] * 4095 + [0], [1] * 4095 + [0.01], False),
        ([1, 0], [1000, 0.001], False),
        ([0] * 100, [1] * 100, False),
        ([0] * 99 + [1], [1] * 100, True),
    ],
)
def test_of_counts_near_one_sums_show_a_spread_only_where_they_have_it(labels, weights, is_shown):
    y, w = (np.array(a, np.float32)[:, None] for a in (labels, weights))
    (result,) = metrics.from_sums(batch_sums(np.zeros_like(y), y, w, ("count",)), ("count",))
    expected = exact_metrics.exact(0 * y[:, 0], y[:, 0], w[:, 0], "count")["normalized_deviance"]
    lines = result["normalized_deviance"]
    assert lines == pytest.approx(expected, rel=4e-3) if is_shown else math.isnan(lines)


def test_examples_of_weight_zero_do_not_count_whatever_they_hold():
    for kind, wild in (("real", 1e10), ("count", 500.0), ("count", -500.0)):
        x, y, w = case(100, (kind,))
        more = [
            np.append(a, [[b]], axis=0).astype(np.float32) for a, b in ((x, wild), (y, 3), (w, 0))
        ]
        result = metrics.from_sums(batch_sums(*more, (kind,)), [kind])
        alone = metrics.from_sums(batch_sums(x, y, w, (kind,)), [kind])
        assert result[0] == pytest.approx(alone[0], rel=1e-6)
        more[0][-1] = np.nan
        exact = exact_metrics.exact(*(a[:, 0] for a in more), kind)
        assert exact == exact_metrics.exact(x[:, 0], y[:, 0], w[:, 0], kind)


@pytest.mark.parametrize("kind", ["real", "count"])
def test_calibration_buckets_hold_predictions_and_labels_of_their_kind(kind):
    x, y, w = (a[:, 0] for a in case(500, (kind,)))
    kept = w > 0
    result = exact_metrics.calibration_buckets(x, y, w, kind, buckets=4)
    order = np.argsort(x[kept], kind="stable")
    start = 0
    for bucket in result:
        part = order[start : start + bucket["examples"]]
        start += bucket["examples"]
        predicted = x[kept][part].astype(np.float64)
        predicted = np.exp(predicted) if kind == "count" else predicted
        weight = w[kept][part].astype(np.float64)
        assert bucket["lower"] == pytest.approx(predicted.min())
        assert bucket["upper"] == pytest.approx(predicted.max())
        assert bucket["predicted"] == pytest.approx(np.average(predicted, weights=weight))
        assert bucket["observed"] == pytest.approx(np.average(y[kept][part], weights=weight))
    assert start == kept.sum()
    assert len(result) == 4


def test_predictions_are_probabilities_numbers_and_expected_counts():
    x = np.float32([-2, 0, 3])
    np.testing.assert_allclose(
        exact_metrics.prediction(x, "binary"), 1 / (1 + np.exp(-x)), rtol=1e-6
    )
    np.testing.assert_array_equal(exact_metrics.prediction(x, "real"), x)
    np.testing.assert_allclose(exact_metrics.prediction(x, "count"), np.exp(x.astype(np.float64)))
    y = np.float64([0, 1, 1])
    p = exact_metrics.prediction(x, "binary")
    assert exact_metrics.exact(x, y, np.ones(3))["logloss"] == pytest.approx(log_loss(y, p))
