"""Bucket boundaries: their definition, and their independence of order and parts."""

import bisect
import collections
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank.data.statistics import quantiles
from jaxrank.data.statistics.quantiles import QuantileSketch


def sketch(*parts):
    result = QuantileSketch()
    for part in parts:
        result.add(np.asarray(part, np.float64))
    return result


def expected_boundaries(values, buckets):
    """Returns, for each k, the value with the number of smaller values nearest to k / n of all.

    The smaller one of two equally near values.
    """
    ordered = sorted(values)
    candidates = sorted(set(ordered))[1:]
    result = []
    for k in range(1, buckets):
        if candidates:
            errors = [
                (abs(buckets * bisect.bisect_left(ordered, c) - k * len(ordered)), c)
                for c in candidates
            ]
            result.append(min(errors)[1])
    return sorted(set(result))


NUMBERS = st.lists(st.sampled_from([-2.5, -1.0, 0.0, 0.5, 1.0, 3.0, 2.0**100]), max_size=40)


@settings(max_examples=200, deadline=None)
@given(NUMBERS, st.integers(2, 9))
def test_boundaries_of_few_values_are_those_of_a_search_by_hand(values, buckets):
    assert sketch(values).boundaries(buckets).tolist() == expected_boundaries(values, buckets)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=60),
    st.randoms(use_true_random=False),
    st.integers(0, 12),
    st.sampled_from([4, 4096]),
)
def test_boundaries_depend_on_neither_order_nor_parts(values, random, cut, most_exact):
    quantiles._MAX_EXACT_VALUES, before = most_exact, quantiles._MAX_EXACT_VALUES
    try:
        whole = sketch(values)
        shuffled = random.sample(values, len(values))
        parts = sketch(shuffled[:cut]), sketch(shuffled[cut:], [])
        read = QuantileSketch.from_state(json.loads(json.dumps(parts[0].to_state())))
        read.merge(parts[1])
        for buckets in (2, 7, 50):
            expected = whole.boundaries(buckets)
            np.testing.assert_array_equal(read.boundaries(buckets), expected)
            assert (np.diff(expected) > 0).all()
            assert np.isfinite(expected).all()
    finally:
        quantiles._MAX_EXACT_VALUES = before


def test_buckets_of_many_values_hold_nearly_equally_many():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(size=60_000), rng.lognormal(3, 2, 40_000)])
    result = sketch(values).boundaries(20)
    assert len(result) == 19
    counts = np.bincount(np.searchsorted(result, np.float32(values), side="right"), minlength=20)
    # A boundary is off by at most one bin, which has a relative width of 1/128.
    np.testing.assert_allclose(counts / len(values), 0.05, atol=0.005)


def test_a_value_that_is_most_of_all_has_a_bucket_of_its_own():
    zeros, others = [0.0] * 900, np.linspace(1, 2, 100)
    result = sketch(zeros, others, -others[:50])
    edges = result.boundaries(10)
    number = collections.Counter(np.searchsorted(edges, zeros, side="right").tolist())
    assert len(number) == 1
    assert edges[0] == 0  # the negative ones are below it
    assert 1 <= edges[1] <= 1.1
    assert sketch(zeros).boundaries(10).tolist() == []
    assert sketch().boundaries(10).tolist() == []


def test_missing_values_and_the_sign_of_zero_count_for_nothing_and_huge_ones_are_clipped():
    assert sketch([np.nan, 1.0, np.nan, 2.0]).boundaries(2).tolist() == [2.0]
    assert sketch([-0.0, 0.0, 0.0]).boundaries(2).tolist() == []
    assert sketch([-1e300, 1e300]).boundaries(2).tolist() == [pytest.approx(3.4028235e38)]


def test_bins_rise_with_the_value_and_begin_at_their_least():
    rng = np.random.default_rng(1)
    values = np.float32(rng.normal(size=2000) * 10.0 ** rng.integers(-40, 38, 2000))
    values = np.sort(np.concatenate([values, -values, [0]])).astype(np.float32)
    bins = quantiles._value_bins(values)
    assert (np.diff(bins) >= 0).all()
    starts = quantiles._bin_starts(bins).astype(np.float64)
    assert (starts <= values).all()
    big = np.abs(values) > 1e-37
    assert (np.abs(values[big] - starts[big]) <= np.abs(values[big]) / 127).all()
