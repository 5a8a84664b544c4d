"""Transforms of dense features that a config leaves open, beside NumPy on all numbers at once."""

import numpy as np
import pytest

from jaxrank.data.encode.scales import OpenScales, line

RANDOM = np.random.default_rng(0)
YEARS = RANDOM.integers(1980, 2025, 3000).astype(float)
PRICES = np.exp(RANDOM.normal(3, 1.5, 3000))
LOSSES = -PRICES
RARE = (np.arange(3000) == 17).astype(float)
FLAGS = (np.arange(3000) % 50 == 0).astype(float)


def chosen(*columns, parts=1):
    names = [f"x{i}" for i in range(len(columns))]
    merged = OpenScales(names)
    for part in np.array_split(np.stack(columns, axis=1), parts):
        scales = OpenScales(names)
        scales.add(part)
        merged.merge(OpenScales.from_state(names, scales.to_state()))
    return list(merged.choose().values())


@pytest.mark.parametrize("parts", [1, 7])
@pytest.mark.parametrize(
    ("numbers", "log"),
    [(YEARS, False), (PRICES, True), (LOSSES, True), (FLAGS, False), (YEARS / 1e6, False)],
    ids=["years", "prices", "losses", "flags", "small"],
)
def test_numbers_have_mean_0_and_deviation_1_and_no_long_tail(numbers, log, parts):
    (scale,) = chosen(numbers, parts=parts)
    values = np.sign(numbers) * np.log1p(np.abs(numbers)) if log else numbers
    assert scale.log == log
    assert (scale.mean, scale.std) == pytest.approx((values.mean(), values.std()))
    assert np.abs((values - scale.mean) / scale.std).max() < 10


def test_a_rare_number_is_at_most_30_deviations_away():
    (scale,) = chosen(RARE)
    assert not scale.log
    assert (1 - scale.mean) / scale.std == pytest.approx(30)


def test_columns_without_a_range_or_numbers_keep_a_valid_scale():
    nothing = np.full(3000, np.nan)
    constant, empty, gaps = chosen(np.full(3000, 7.0), nothing, np.where(FLAGS, nothing, YEARS))
    assert constant == (False, 7.0, 0.0)
    assert empty == (False, 0.0, 0.0)
    assert gaps.mean == pytest.approx(YEARS[FLAGS == 0].mean())


def test_the_line_names_each_transform_up_to_ten():
    scales = dict(zip("abcdefghijkl", chosen(*[YEARS] * 11, PRICES), strict=True))
    mean, std = YEARS.mean(), YEARS.std()
    assert f"open: a (mean {mean:.4g}, std {std:.4g}), b (" in line(scales)
    assert "j (mean" in line(scales)
    assert ", and 2 more. Set standardize=False" in line(scales)
    assert "l (log, mean 3." in line({"l": scales["l"]})
