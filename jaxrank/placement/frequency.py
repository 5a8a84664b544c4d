"""What the counts of a sample say of steps to come."""

import math

import numpy as np


def chance(counts: np.ndarray, examples: int, share: int) -> np.ndarray:
    """f64[n]: the chance that `share` examples read a row that `examples` examples read counts[n]
    times.

    That of a draw of `share` of these examples, without putting back, so that the sum over all rows
    is the expected number of different rows without bias.

    References:
        Hurlbert, The Nonconcept of Species Diversity, Ecology 1971 (rarefaction).
    """
    different, place = np.unique(counts, return_inverse=True)
    # Of so few examples without the row no `share` can be drawn.
    rest = [math.lgamma(max(examples - share - c, 0) + 1) for c in different.tolist()]
    without = [math.lgamma(max(examples - c, 0) + 1) for c in different.tolist()]
    whole = math.lgamma(examples + 1) - math.lgamma(max(examples - share, 0) + 1)
    missed = np.exp(np.array(without) - np.array(rest) - whole)
    found = np.where(different > examples - share, (different > 0) * 1.0, 1 - missed)
    return found[place]


def falling(counts: np.ndarray) -> np.ndarray:
    """The falling f64[n] nearest to counts[n]: their noise would cut a table's hot rows short.

    References:
        Grenander, On the Theory of Mortality Measurement II, 1956: the slopes of the least concave
        majorant of the sums.
    """
    from scipy.optimize import isotonic_regression  # slow to import

    return isotonic_regression(counts, increasing=False).x
