"""Confidence intervals of metrics over runs: mean, standard deviation and paired differences.

See `intervals` for intervals over the examples of one run. The intervals of this module assume that
runs are independent and that their metrics have a normal distribution.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """An estimate and the ends of its interval. The ends are NaN if there are too few values."""

    value: float
    low: float
    high: float

    def text(self, form: str = "+.2g", unit: str = "") -> str:
        """Formats the estimate with its interval if it has one: "+0.01 (+0.005 to +0.02)"."""
        value, low, high = (f"{number:{form}}{unit}" for number in self)
        return value if math.isnan(self.low) else f"{value} ({low} to {high})"


def mean(values: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Returns the mean with Student's interval, which needs two values."""
    x = np.asarray(values, np.float64)
    center = float(x.mean()) if x.size else math.nan
    if x.size < 2:
        return Interval(center, math.nan, math.nan)
    width = stats.t.ppf((1 + confidence) / 2, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size)
    return Interval(center, center - float(width), center + float(width))


def standard_deviation(values: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Returns the sample's standard deviation with its interval by chi-square.

    (n - 1) s^2 / sigma^2 has a chi-square distribution of n - 1 degrees of freedom.
    """
    x = np.asarray(values, np.float64)
    if x.size < 2:
        return Interval(math.nan, math.nan, math.nan)
    degrees_of_freedom = x.size - 1
    sample = float((x - x[0]).std(ddof=1))  # of equal values exactly 0
    low, high = (
        sample * math.sqrt(degrees_of_freedom / float(stats.chi2.ppf(p, degrees_of_freedom)))
        for p in ((1 + confidence) / 2, (1 - confidence) / 2)
    )
    return Interval(sample, low, high)


def paired(values: ArrayLike, others: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Returns the mean difference `values` - `others` of pairs, such as of runs with equal seeds.

    The interval is Student's of the differences. Variation that both runs of a pair share cancels
    out.
    """
    return mean(np.subtract(values, others), confidence)
