"""Intervals of metrics, and of the difference between two models on the same examples.

A metric is written as a weighted mean of one number per example, its influence. The deviation of
these numbers gives the standard error of the metric, and that of their difference between two
models gives the paired one. For the AUC these are the structural components of DeLong, DeLong &
Clarke-Pearson, Comparing the Areas under Two or More Correlated ROC Curves, Biometrics 1988.

Examples of one cluster, such as a user, are not independent. The influences of each cluster are
summed first, and clusters count as independent (Liang & Zeger, Longitudinal Data Analysis using
Generalized Linear Models, Biometrika 1986). Three corrections make the intervals of few clusters
hold:

- The error is the jackknife's over clusters: each sum is divided by the share of the other clusters
  in the weight, because a cluster moves the mean towards itself (the estimator CR3; MacKinnon,
  Nielsen & Webb, Fast and Reliable Jackknife and Bootstrap Methods for Cluster-Robust Inference,
  Journal of Applied Econometrics 2023). The AUC is no mean. Its linear influences underestimate the
  error and the jackknife overestimates it (Efron, The Jackknife, the Bootstrap and Other Resampling
  Plans 1982), so the mean of both changes by a cluster is taken.
- Student's quantile has Satterthwaite's degrees of freedom, by which the squared error varies as
  much as a variance of so many normal numbers: 2 / free = 2 / (clusters - 1) + kurtosis / clusters
  (O'Neill, Some Useful Moment Results in Sampling Problems, The American Statistician 2014). In
  the first term, clusters of different weights count as the effective number of equal ones (Carter,
  Schnepel & Steigerwald, Asymptotic Behavior of a t-Test Robust to Cluster Heterogeneity, Review of
  Economics and Statistics 2017). The excess kurtosis is the unbiased one, but at least 0, because
  that of a few sums is too small (Joanes & Gill, Comparing Measures of Sample Skewness and
  Kurtosis, The Statistician 1998). Unequal weights also raise it, so intervals are rather wide.
- Skewed sums miss the expectation on one side, on which the interval is extended by the inverse
  of Hall's transformation (On the Removal of Skewness by Transformation, Journal of the Royal
  Statistical Society B 1992). That of few sums is too small, and its bias of first order is removed
  (by the expansion of functions of moments in Cramér, Mathematical Methods of Statistics 1946).

Labels of examples with weight 0 do not count. Everything is float64.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from jaxrank.metrics import regression
from jaxrank.metrics.exact import prediction
from jaxrank.metrics.ranking import RequestValues
from jaxrank.metrics.registry import METRICS, NORMALIZED, means
from jaxrank.metrics.regression import Floats

Z = 1.959963984540054  # of a 95% interval of the normal distribution
CONFIDENCE = 0.95
MIN_EXAMPLES = 10  # examples of weight above 0, below which errors are undefined
MIN_CLUSTERS = 10  # clusters with such an example, likewise
_MIN_FREE = 1.0  # degrees of freedom
_MIN_SHARE = 1e-3  # in the weight, of all clusters but one
_MAX_STRETCH = 3.0  # of a margin on the skewed side


def influences(
    outputs: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike,
    kind: str = "binary",
    clusters: np.ndarray | None = None,
) -> dict[str, Floats]:
    """Computes the influence of each example on each metric of one task, f64[n] by name.

    Their weighted mean is 0, except that of the AUC with clusters. A metric that is undefined has
    NaN everywhere.

    Args:
        outputs, labels, weights: of all examples, each [n]; see `exact.exact`.
        kind: of the task.
        clusters: i64[n], the number of each example's cluster. The weighted sum over a cluster,
            divided by the weight of the others, is then the mean of the linear change of the AUC by
            the cluster and its change without the cluster. None: examples are independent.
    """
    x, y, w = (np.asarray(a, np.float64) for a in (outputs, labels, weights))
    y = np.where(w > 0, y, 0.0)
    p = prediction(x, kind)
    names = [metric.name for metric in METRICS[kind]]
    loss, normalized = names[0], next(name for name in names if name in NORMALIZED)
    with np.errstate(all="ignore"):
        mean = _mean(y, w)
        losses, least = _losses(kind, x, y), _least_losses(kind, y, mean)
        of_loss, of_least = losses - _mean(losses, w), least - _mean(least, w)
        ratio = _mean(losses, w) / _mean(least, w)
        by_metric = {loss: of_loss}
        if kind == "binary":
            by_metric["auc"] = _auc(x, y, w, clusters)
        by_metric[normalized] = (of_loss - ratio * of_least) / _mean(least, w)
        positive = mean if mean > 0 else np.float64("nan")  # or calibration is undefined
        by_metric["calibration"] = (p - _mean(p, w) / positive * y) / positive
        for name, value in means([kind]).items():
            values = value(p, y)
            by_metric[name] = values - _mean(values, w)
    return {name: np.where(np.isfinite(f), f, np.nan) for name, f in by_metric.items()}


def standard_errors(
    influence: Mapping[str, Floats],
    weights: ArrayLike,
    other: Mapping[str, Floats] | None = None,
    clusters: np.ndarray | None = None,
) -> dict[str, float]:
    """Computes the standard error of each metric, NaN where it is undefined.

    It is undefined for fewer than `MIN_EXAMPLES` examples or `MIN_CLUSTERS` clusters, whose
    deviation says little.

    Args:
        influence: of one model; see `influences`, which takes the same clusters.
        weights: of the examples, [n].
        other: influence of another model on the same examples, for the error of the difference.
        clusters: i64[n], the number of each example's cluster. None: examples are independent.
    """
    return {
        name: result.error for name, result in _errors(influence, weights, other, clusters).items()
    }


class Margins(NamedTuple):
    """Distances of the ends of an interval from the metric. NaN where undefined."""

    below: float
    above: float

    def ends(self, metric: float) -> tuple[float, float]:
        """Returns the interval of a metric."""
        return metric - self.below, metric + self.above


def margins(
    influence: Mapping[str, Floats],
    weights: ArrayLike,
    other: Mapping[str, Floats] | None = None,
    clusters: np.ndarray | None = None,
    confidence: float = CONFIDENCE,
) -> dict[str, Margins]:
    """Computes the margins of the interval of each metric.

    Args:
        influence, weights, other, clusters: see `standard_errors`.
        confidence: the share of data sets whose interval contains the expected metric.
    """
    tail = (1 + confidence) / 2
    errors = _errors(influence, weights, other, clusters)
    return {name: result.at(tail) for name, result in errors.items()}


def request_margins(
    values: RequestValues,
    other: RequestValues | None = None,
    clusters: np.ndarray | None = None,
    confidence: float = CONFIDENCE,
) -> dict[str, Margins]:
    """Computes the margins of the interval of each metric of requests.

    The influence of a request is the difference of its value and the mean. Requests are
    independent, or those of different clusters are. The interval is NaN where fewer than
    `MIN_EXAMPLES` requests count.

    Args:
        values: of the requests of one task.
        other: of another model on the same examples, for the interval of the difference.
        clusters: i64[n], the number of each example's cluster. A request belongs to the cluster of
            its first candidate. None: requests are independent.
        confidence: see `margins`.
    """
    codes = np.arange(len(values.first)) if clusters is None else clusters[values.first]
    result: dict[str, Margins] = {}
    for name, weights in values.weights.items():
        influence = [
            {name: v.values[name] - _mean(v.values[name], weights)} for v in (values, other) if v
        ]
        paired = influence[1] if other else None
        result |= margins(influence[0], weights, paired, codes, confidence)
    return result


class _Error(NamedTuple):
    """A standard error.

    free: degrees of freedom, None if infinite.
    skewness: of the mean over clusters, 0 if it is normal.
    """

    error: float
    free: float | None = None
    skewness: float = 0.0

    def at(self, tail: float) -> Margins:
        """Returns the margins beyond which there is 1 - `tail` on each side."""
        if self.free is None:
            return Margins(*2 * [self.error * float(special.ndtri(tail))])
        quantile = float(special.stdtrit(self.free, tail))
        stretched = (_stretch(quantile, side * self.skewness) for side in (1, -1))
        return Margins(*(self.error * factor * quantile for factor in stretched))


def _stretch(quantile: float, skewness: float) -> float:
    """Returns the factor of the margin below a mean of this skewness, from 1 to `_MAX_STRETCH`."""
    if abs(skewness) < 1e-6:
        return 1.0
    cube = 1 + skewness * (quantile - skewness / 6)
    end = 3 / skewness * (float(np.cbrt(cube)) - 1)
    return min(max(end / quantile, 1.0), _MAX_STRETCH)


def _errors(
    influence: Mapping[str, Floats],
    weights: ArrayLike,
    other: Mapping[str, Floats] | None,
    clusters: np.ndarray | None,
) -> dict[str, _Error]:
    """Returns the standard error of each metric."""
    w = np.asarray(weights, np.float64)
    used = w > 0
    w = w[used]
    is_defined, effective = len(w) >= MIN_EXAMPLES, 0.0
    codes: np.ndarray | None = None
    others = np.ones(0)
    if clusters is not None and len(w):
        names, inverse = np.unique(clusters[used], return_inverse=True)
        codes = np.asarray(inverse, np.intp)
        is_defined &= len(names) >= MIN_CLUSTERS
        shares = np.bincount(codes, w) / w.sum()
        others = np.maximum(1 - shares, _MIN_SHARE)
        effective = float(1 / (shares**2).sum())  # their number if all have the same weight
    errors = {}
    for name, values in influence.items():
        part = w * (values[used] - (other[name][used] if other is not None else 0.0))
        if codes is not None:
            part = np.bincount(codes, part) / others
        square = (part**2).sum()
        jackknife = 1.0 if codes is None else (len(part) - 1) / max(len(part), 1)
        error = float(np.sqrt(jackknife * square) / w.sum()) if is_defined else float("nan")
        errors[name] = _Error(error)
        if codes is not None:
            kurtosis = skewness = 0.0
            if square > 0 and is_defined:
                unit = part / np.sqrt(square)  # high powers of small sums are 0
                skewness, kurtosis = _skewness(unit), _excess_kurtosis(unit)
            spread = 2 / max(effective - 1, _MIN_FREE) + kurtosis / len(part)
            errors[name] = _Error(error, max(2 / spread, _MIN_FREE), skewness)
    return errors


def _skewness(unit: Floats) -> float:
    """Returns the skewness of the mean of n numbers of mean 0, whose squares sum to 1.

    A sample of numbers with a small skewness g has on average g * (1 - 6.75 / n), to first order in
    1 / n and g. The third moment loses 3 / n, and 9 / n by its correlation with the variance, whose
    power of -1.5 adds 5.25 / n.
    """
    return (1 + 6.75 / len(unit)) * float((unit**3).sum())


def _excess_kurtosis(unit: Floats) -> float:
    """Returns the unbiased excess kurtosis of the same numbers, at least 0."""
    n = len(unit)
    biased = float((unit**4).sum()) * n - 3
    return max((n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * biased + 6), 0.0)


def _mean(values: Floats, weights: Floats) -> np.float64:
    """Returns the weighted mean. NumPy divides by 0 without an exception, unlike Python."""
    return np.where(weights > 0, weights * values, 0.0).sum() / np.float64(weights.sum())


def _losses(kind: str, x: Floats, y: Floats) -> Floats:
    if kind == "binary":
        return y * np.logaddexp(0, -x) + (1 - y) * np.logaddexp(0, x)
    return 2 * regression.half(kind, x, y)


def _least_losses(kind: str, y: Floats, mean: np.float64) -> Floats:
    """Returns the losses of the best constant. Its own error has no effect of first order."""
    if kind == "binary":
        return -(y * np.log(mean) + (1 - y) * np.log1p(-mean))
    constant = np.log(mean) if kind == "count" else mean
    return 2 * regression.half(kind, np.full_like(y, constant), y)


def _auc(x: Floats, y: Floats, w: Floats, clusters: np.ndarray | None) -> Floats:
    """Returns the influence on the AUC: how often each example is ordered rightly, centred."""
    scores, targets, sizes = x, y, w
    order = np.argsort(x, kind="stable")
    x, y, w = x[order], y[order], w[order]
    positives, negatives = w * y, w * (1 - y)
    starts = np.flatnonzero(np.append(True, x[1:] != x[:-1])) if len(x) else np.zeros(0, np.intp)
    group = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(x))))
    of_positives, of_negatives = (_lower_share(part, starts) for part in (positives, negatives))
    auc = _mean(of_negatives[group], positives)
    total = w.sum()
    # A label between 0 and 1 is a positive and a negative.
    shown = y * (of_negatives[group] - auc) * (total / positives.sum())
    shown += (1 - y) * (1 - of_positives[group] - auc) * (total / negatives.sum())
    in_order = np.empty_like(shown)
    in_order[order] = shown
    if clusters is None or not len(x):
        return in_order
    return _jackknifed_auc(in_order, float(auc), scores, targets, sizes, clusters)


def _jackknifed_auc(
    influence: Floats, auc: float, x: Floats, y: Floats, w: Floats, clusters: np.ndarray
) -> Floats:
    """Adds to each influence on the AUC half of what its cluster changes in second order.

    Pairs of examples of one cluster count twice in the sum of its influences, and the numbers of
    the other positives and negatives are those without the cluster.
    """
    codes = np.unique(clusters, return_inverse=True)[1].astype(np.intp)
    weight, positives, negatives = (np.bincount(codes, part) for part in (w, w * y, w * (1 - y)))
    total, pairs = w.sum(), positives.sum() * negatives.sum()
    shares = positives / positives.sum() + negatives / negatives.sum()
    linear = np.bincount(codes, w * influence)
    taken = pairs * (linear / total + auc * shares) - _pairs_within(x, y, w, codes)
    left = (auc * pairs - taken) / ((positives.sum() - positives) * (negatives.sum() - negatives))
    change = ((auc - left) * (total - weight) - linear) / weight
    return influence + np.where(np.isfinite(change), change, 0.0)[codes] / 2


def _pairs_within(x: Floats, y: Floats, w: Floats, codes: np.ndarray) -> Floats:
    """Returns the weight of the rightly ordered pairs of each cluster, f64[clusters]."""
    order = np.lexsort((x, codes))
    x, y, w, codes = x[order], y[order], w[order], codes[order]
    is_first = np.append(True, (x[1:] != x[:-1]) | (codes[1:] != codes[:-1]))
    starts = np.flatnonzero(is_first)
    cluster = codes[starts]
    positives, negatives = (np.add.reduceat(part, starts) for part in (w * y, w * (1 - y)))
    of_cluster = np.bincount(cluster, negatives)
    lower = np.cumsum(negatives) - negatives - (np.cumsum(of_cluster) - of_cluster)[cluster]
    ordered: Floats = positives * (lower + negatives / 2)
    return np.asarray(np.bincount(cluster, ordered), np.float64)


def _lower_share(weights: Floats, starts: np.ndarray) -> Floats:
    """Returns the share of the weights with a lower score than each group, ties by half."""
    if not len(starts):
        return weights
    in_group = np.add.reduceat(weights, starts)
    return (np.cumsum(in_group) - in_group / 2) / weights.sum()
