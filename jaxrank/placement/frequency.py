"""Estimates of row frequencies from the counts of a sample."""

import math

import numpy as np


def chance(counts: np.ndarray, examples: int, share: int) -> np.ndarray:
    """Computes the probability f64[n] that `share` examples read each row.

    It is the probability of a draw of `share` examples of the sample, without replacement. The sum
    over all rows is therefore an unbiased estimate of the number of distinct rows.

    Args:
        counts: [n], number of reads of each row by the sample.
        examples: number of examples of the sample.
        share: number of examples of the draw.

    References:
        Hurlbert, The Nonconcept of Species Diversity, Ecology 1971 (rarefaction).
    """
    different, place = np.unique(counts, return_inverse=True)
    # If fewer than `share` examples are without the row, no draw misses it.
    rest = [math.lgamma(max(examples - share - c, 0) + 1) for c in different.tolist()]
    log_ways = [math.lgamma(max(examples - c, 0) + 1) for c in different.tolist()]
    whole = math.lgamma(examples + 1) - math.lgamma(max(examples - share, 0) + 1)
    missed = np.exp(np.array(log_ways) - np.array(rest) - whole)
    chances = np.where(different > examples - share, (different > 0) * 1.0, 1 - missed)
    return chances[place]


def falling(counts: np.ndarray) -> np.ndarray:
    """Computes the falling f64[n] nearest to counts[n]: noise would end a table's hot rows early.

    References:
        Grenander, On the Theory of Mortality Measurement II, 1956: the slopes of the least concave
        majorant of the sums.
    """
    from scipy.optimize import isotonic_regression  # slow to import

    return isotonic_regression(counts, increasing=False).x
