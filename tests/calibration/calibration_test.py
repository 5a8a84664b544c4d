"""Maps of log-odds against scikit-learn, on both kinds of arrays, and as stored."""

import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from jaxrank.calibration import by_value, files
from jaxrank.calibration.by_value import ByValue
from jaxrank.calibration.fit import METHODS, isotonic, platt
from jaxrank.calibration.maps import Calibration, LogitMap, conditional
from jaxrank.errors import InputError

CURVE = LogitMap((-2.0, -1.0, 3.0), (-3.0, 0.5, 1.0), 2.0, 0.25)
LINE = LogitMap((0.0,), (-1.5,), 0.7, 0.7)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def sample(rows=4000, seed=0):
    """Draws logits that are twice as large as the true ones, labels and weights."""
    r = np.random.default_rng(seed)
    x = r.normal(size=rows, scale=2.0)
    y = (r.random(rows) < sigmoid(0.5 * x - 1)).astype(np.float64)
    return x, y, r.choice([1.0, 3.0], rows)


def test_platt_is_the_logistic_regression_of_smoothed_labels():
    x, y, w = sample()
    result = platt(x, y, w, "")
    w = w / w.mean()
    high, low = ((w * side).sum() for side in (y, 1 - y))
    target = np.where(y > 0, (high + 1) / (high + 2), 1 / (low + 2))
    twice = np.repeat([1, 0], len(x)), np.concatenate([w * target, w * (1 - target)])
    model = LogisticRegression(C=np.inf, tol=1e-10).fit(np.tile(x, 2)[:, None], *twice)
    expected = model.coef_[0, 0], model.intercept_[0]
    np.testing.assert_allclose((result.left, result.y[0]), expected, rtol=1e-5)
    assert result.left == pytest.approx(0.5, abs=0.05)


def test_isotonic_has_the_steps_of_scikit_learn():
    """The sample has a few values with many examples each, so every value is a bin."""
    x, y, w = sample()
    x = np.round(np.clip(x, -3, 3) * 2) / 2
    values, at = np.unique(x, return_inverse=True)
    assert np.bincount(at).min() > 50
    unit = w / w.mean()
    weight, labels = (np.bincount(at, a) for a in (unit, unit * y))
    smooth = (labels + labels.sum() / weight.sum()) / (weight + 1)
    expected = IsotonicRegression().fit(values, smooth, sample_weight=weight + 1)
    steps = np.unique(expected.predict(values))
    result = isotonic(x, y, w, "")
    np.testing.assert_allclose(sigmoid(np.array(result.y)), steps, rtol=1e-10)
    assert 3 < len(steps) < len(values)


@pytest.mark.parametrize("method", METHODS)
def test_calibration_removes_most_of_the_error_of_new_examples(method):
    mapped = METHODS[method](*sample(40_000), "")
    x, _, _ = sample(40_000, seed=1)
    truth = sigmoid(0.5 * x - 1)
    before, after = (np.abs(sigmoid(z) - truth).mean() for z in (x, mapped(x)))
    assert after < before / 10


@pytest.mark.parametrize("method", METHODS)
def test_labels_that_fall_are_rejected(method):
    x, y, w = sample()
    with pytest.raises(InputError, match="d: task t: labels must rise with the predictions: found"):
        METHODS[method](-x, y, w, "d: task t")


def test_separable_labels_have_a_finite_fit():
    x = np.linspace(-1, 1, 100)
    result = platt(x, (x > 0).astype(float), np.ones(100), "")
    assert np.isfinite([result.left, result.y[0]]).all()


def test_a_map_needs_no_memory_for_each_pair_of_an_example_and_a_knot():
    knots = tuple(np.linspace(-5.0, 5.0, 1000).tolist())
    logits = np.linspace(-9, 9, 20_000, dtype=np.float32)
    tracemalloc.start()
    result = LogitMap(knots, knots, 1.0, 1.0)(logits)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 * len(logits)  # bytes. Pairs would need 4,000 per example
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, logits, atol=1e-5)


@pytest.mark.parametrize("mapped", [CURVE, LINE])
def test_maps_increase_and_are_equal_for_jax(mapped):
    x = np.linspace(-6, 6, 200)
    expected = mapped(x)
    assert (np.diff(expected) > 0).all()
    np.testing.assert_allclose(mapped(np.array(mapped.x)), mapped.y, rtol=1e-15)
    single = jax.jit(lambda z: mapped(z, jnp))(x.astype(np.float32))
    np.testing.assert_allclose(single, expected, rtol=1e-5, atol=1e-5)


def test_joint_probabilities_stay_below_those_of_their_parents():
    """Task 0 occurs given task 2, which occurs given task 1."""
    logits = np.random.default_rng(0).normal(size=(50, 3), scale=3)
    calibration = Calibration({0: CURVE, 1: LINE}, (2, -1, 1), {})
    result = calibration(logits)
    np.testing.assert_array_equal(result[:, 1], LINE(logits[:, 1]))
    np.testing.assert_array_equal(result[:, 2], np.minimum(logits[:, 2], result[:, 1]))
    np.testing.assert_array_equal(result[:, 0], np.minimum(CURVE(logits[:, 0]), result[:, 2]))
    assert 5 < (result[:, 0] == result[:, 2]).sum() < 45
    conditional_rate = sigmoid(conditional(result[:, 0], result[:, 2]))
    exact = sigmoid(result[:, 0]) / sigmoid(result[:, 2])
    np.testing.assert_allclose(conditional_rate, exact, atol=2e-6)


def values(offset, slope, sizes, seed=0):
    """Draws calibrated log-odds, labels, weights and values with true corrections."""
    r = np.random.default_rng(seed)
    value = np.repeat(np.arange(-1, len(sizes) - 1), sizes)
    z = r.normal(-1, 1.5, len(value))
    truth = (1 + slope[value]) * z + offset[value]
    y = (r.random(len(z)) < sigmoid(np.where(value < 0, z, truth))).astype(np.float64)
    return z, y, r.choice([0.8, 1.2], len(z)), value


def test_values_with_enough_examples_get_their_own_map_and_others_almost_none():
    r = np.random.default_rng(7)
    offset, slope = r.normal(0, 0.6, 40), r.normal(0, 0.3, 40)
    sizes = [50, *[6000] * 15, *[60] * 25]
    z, y, w, value = values(offset, slope, sizes)
    slopes, offsets = by_value.fit(z, y, w, value, 40).T
    np.testing.assert_allclose(offsets[:15], offset[:15], atol=0.2)
    np.testing.assert_allclose(slopes[:15], 1 + slope[:15], atol=0.15)
    alone = np.array(
        [
            LogisticRegression(C=np.inf).fit(z[value == v][:, None], y[value == v]).intercept_[0]
            for v in range(15, 40)
            if len(set(y[value == v])) == 2
        ]
    )
    assert np.square(offsets[15:] - offset[15:]).mean() < np.square(alone).mean() / 4
    assert np.square(offsets[15:] - offset[15:]).mean() < np.square(offset[15:]).mean()
    # Values that do not differ keep the map of all examples, whatever their number.
    z, y, w, value = values(0 * offset, 0 * slope, [50, *[60] * 40], seed=1)
    slopes, offsets = by_value.fit(z, y, w, value, 40).T
    assert np.abs(offsets).max() < 0.15
    assert np.abs(slopes - 1).max() < 0.15
    rows = by_value.frequent_rows(np.repeat([0, 1, 5, 9], 60), np.arange(240) != 239, [0, 1])
    assert rows.tolist() == [5, 9]
    assert not len(by_value.frequent_rows(np.arange(90), np.ones(90, bool), []))


@pytest.mark.parametrize("scale", [5.0, 100.0])
def test_corrections_of_extreme_log_odds_are_logistic_regressions(scale):
    """Steps of Newton's method alone leave the range in which labels are probable."""
    r = np.random.default_rng(3)
    slope, center = np.array([0.15, 0.15, 0.3]), np.array([0, -scale, -300])
    value = np.repeat(np.arange(3), 4000)
    z = r.normal(0, scale, len(value)) - 300 * (value == 2)
    y = (r.random(len(z)) < sigmoid(slope[value] * (z - center[value]))).astype(np.float64)
    fitted = by_value.fit(z, y, np.ones(len(z)), value, 3)
    for v, result in enumerate(fitted):
        of = value == v
        model = LogisticRegression(C=np.inf, tol=1e-9).fit((z[of] - center[v])[:, None], y[of])
        expected = model.coef_[0, 0], model.intercept_[0] - model.coef_[0, 0] * center[v]
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)
    reversed_fit = by_value.fit(z, 1 - y, np.ones(len(z)), value, 3)
    np.testing.assert_allclose(reversed_fit[:, 0], 0.1)
    rate = [sigmoid(0.1 * z[value == v] + reversed_fit[v, 1]).mean() for v in range(3)]
    np.testing.assert_allclose(rate, [1 - y[value == v].mean() for v in range(3)], atol=1e-3)


def test_corrections_by_value_leave_other_values_and_the_bound_of_parents():
    by = ByValue("c", (3, 7), ((2.0, 1.0), (0.5, 1.0)), ((1.0, 5.0), (0.0, -1.0)))
    slopes, offsets = by.coefficients(np.array([7, 4, 3, 2**31 - 1], np.int32))
    assert slopes.tolist() == [[0.5, 1], [1, 1], [2, 1], [1, 1]]
    assert offsets.tolist() == [[0, -1], [0, 0], [1, 5], [0, 0]]
    calibration = Calibration({0: LINE, 1: CURVE}, (-1, 0), {}, by)
    logits = np.random.default_rng(0).normal(size=(4, 2))
    result = calibration(logits, np, (slopes, offsets))
    np.testing.assert_allclose(result[:, 0], slopes[:, 0] * LINE(logits[:, 0]) + offsets[:, 0])
    assert (result[:, 1] <= result[:, 0]).all()
    assert result[2, 1] == result[2, 0]


def test_a_calibration_is_stored_for_the_weights_of_its_checkpoint(tmp_path):
    by = ByValue("c1", (2, 5), ((1.0, 1.5), (1.0, 0.25)), ((0.0, -1.0), (0.0, 2.0)))
    origin = {"method": "isotonic", "split": "valid"}
    calibration = Calibration({1: CURVE}, (-1, 0), origin, by)
    sums = {"params.kernel": 7, "rows.item": 8}
    path = files.save(tmp_path, 16, calibration, ["click", "buy"], sums)
    assert files.load(tmp_path, 16, sums) == calibration
    assert files.load(tmp_path, 8, sums) is None
    with pytest.raises(InputError, match=f"{re.escape(str(path))}: must be of the weights"):
        files.load(tmp_path, 16, sums | {"rows.item": 9})
    path.write_text(path.read_text().replace("0.25", "0.24"))
    with pytest.raises(InputError, match=re.escape(str(path))):
        files.load(tmp_path, 16, sums)
