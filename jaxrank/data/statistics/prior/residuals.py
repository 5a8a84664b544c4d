"""Residuals of labels of any kind, in the units of their loss."""

from typing import NamedTuple

import numpy as np

_MAX_LOG_ODDS = 15.0
_MAX_LOG_COUNT = 30.0
_MIN_DEVIATION = 1e-7  # over the size of the mean: less is rounding of float32
# Labels that features determine exactly have no noise. Less than this would make a model trust its
# few examples without any prior.
_MIN_DISPERSION = 0.1
_MIN_RATIO = -0.95  # of the change of an expected count


class Labels(NamedTuple):
    """Labels of a task.

    kind: see `features.Task`.
    values: f64[n], 0 where unknown. Those of a real task have mean 0 and deviation 1.
    known: bool[n].
    """

    kind: str
    values: np.ndarray
    known: np.ndarray

    def varies(self) -> bool:
        """Returns True if known labels differ by more than rounding."""
        known = self.values[self.known]
        if not len(known):
            return False
        mean = known.mean()
        if self.kind == "binary":
            return bool(0 < mean < 1)
        return bool(known.std() > _MIN_DEVIATION * abs(mean))


class Residuals(NamedTuple):
    """Labels minus their expectation, and the variances of these by chance, both f64[n].

    Both are divided by the dispersion, and 0 where the label is unknown.

    dispersion: variance of the labels relative to that of the kind of task, which is p (1 - p) for
        binary tasks, the mean for counts and 1 for real tasks. 1 for binary tasks.
    tail: fourth cumulant of a residual relative to its variance, 1 for clicks that are rare.
    is_log: True if outputs are logs of expectations.
    """

    score: np.ndarray
    variance: np.ndarray
    dispersion: float
    tail: float
    is_log: bool

    def effects(self, score: np.ndarray, variance: np.ndarray, prior: float) -> np.ndarray:
        """Returns the effects of ids on outputs, f64[ids], by a prior of this variance.

        Args:
            score, variance: f64[ids], sums over the examples of an id.
        """
        ratio = score / (variance + 1 / prior)
        # The posterior mean of a rate under a gamma prior. A step by the ratio itself would be far
        # too long, as exp grows faster than a straight line.
        return np.log1p(np.maximum(ratio, _MIN_RATIO)) if self.is_log else ratio


def prepare_labels(labels: np.ndarray, kind: str) -> Labels | None:
    """Returns the labels f64[n], NaN if unknown, of a task. None: they have no information."""
    known = ~np.isnan(labels)
    result = Labels(kind, np.where(known, labels, 0), known)
    if not result.varies():
        return None
    if kind == "real":
        mean, deviation = labels[known].mean(), labels[known].std()
        result = result._replace(values=np.where(known, (labels - mean) / deviation, 0))
    return result


def constant_outputs(labels: Labels) -> np.ndarray:
    """Returns the outputs f64[n] of the best constant; see `features.Task`."""
    mean = labels.values[labels.known].mean()
    if labels.kind == "real":
        output = mean
    else:
        output = np.log(mean) if labels.kind == "count" else np.log(mean / (1 - mean))
    return np.full(len(labels.values), output)


def residuals(outputs: np.ndarray, labels: Labels) -> Residuals:
    """Returns the residuals by outputs f64[n], whose intercept is refitted in place.

    Dividing by the dispersion makes scores of all kinds alike: their variance by chance equals
    their curvature, as in a likelihood.

    References:
        McCullagh and Nelder, Generalized Linear Models, 1989 (quasi-likelihood).
    """
    mean = _means(outputs, labels)
    if labels.kind == "real":
        outputs += (labels.values - mean)[labels.known].mean()
    else:
        outputs += np.log(labels.values.sum() / mean[labels.known].sum())
    mean = np.where(labels.known, _means(outputs, labels), 0)
    score = labels.values - mean
    if labels.kind == "binary":
        return Residuals(score, mean * (1 - mean), 1.0, 1.0, False)
    variance = mean if labels.kind == "count" else labels.known.astype(np.float64)
    score = np.where(labels.known, score, 0)
    dispersion = max(float((score**2).sum() / variance.sum()), _MIN_DISPERSION)
    score, variance = score / dispersion, variance / dispersion
    cumulant = float((score**4).sum() - 3 * (variance**2).sum())
    tail = max(cumulant / float(variance.sum()), 0.0)
    return Residuals(score, variance, dispersion, tail, labels.kind == "count")


def _means(outputs: np.ndarray, labels: Labels) -> np.ndarray:
    """Returns the expected labels f64[n]."""
    if labels.kind == "real":
        return outputs
    if labels.kind == "count":
        return np.exp(np.clip(outputs, -_MAX_LOG_COUNT, _MAX_LOG_COUNT))
    return 1 / (1 + np.exp(-np.clip(outputs, -_MAX_LOG_ODDS, _MAX_LOG_ODDS)))
