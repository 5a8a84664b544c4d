"""Exact metrics from all predictions, in float64 on the host."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxrank import losses
from jaxrank.metrics import regression
from jaxrank.metrics.registry import means
from jaxrank.metrics.regression import Floats, ratio


def auc_of_examples(score: Floats, y: Floats, w: Floats) -> float:
    """Computes the AUC of scores, labels in [0, 1] and weights, each f64[n]. NaN with one class."""
    if np.isnan(score).any():
        return float("nan")
    order = np.argsort(score)
    score = score[order]
    if not len(score):
        return float("nan")
    starts = np.flatnonzero(np.append(True, score[1:] != score[:-1]))
    positives = np.add.reduceat((w * y)[order], starts)
    negatives = np.add.reduceat((w * (1 - y))[order], starts)
    return auc_of_groups(positives, negatives)


def auc_of_groups(positives: Floats, negatives: Floats) -> float:
    """Computes the AUC from weights per group of tied examples, in order of prediction."""
    below = np.cumsum(negatives) - negatives
    won = (positives * (below + negatives / 2)).sum()
    pairs = positives.sum() * negatives.sum()
    return float(won / pairs) if pairs > 0 else float("nan")


def probability(logits: ArrayLike) -> NDArray[np.float64]:
    """sigmoid(logits) in float64, of any shape. Small values keep their relative precision."""
    x = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1 + e)


def prediction(outputs: ArrayLike, kind: str) -> NDArray[np.float64]:
    """Converts a model's outputs of any shape to predictions.

    A prediction is a probability, a real number or an expected count, as in `losses.predictions`.
    """
    if kind == "binary":
        return probability(outputs)
    x = np.asarray(outputs, np.float64)
    return np.exp(np.minimum(x, losses.LOG_COUNT_LIMIT)) if kind == "count" else x


def exact(
    outputs: ArrayLike, labels: ArrayLike, weights: ArrayLike, kind: str = "binary"
) -> dict[str, float]:
    """Computes the metrics of one task from outputs, labels and weights of all examples, each [n].

    Labels of a binary task are in [0, 1].
    """
    x, y, w = _weighted(outputs, labels, weights)
    if kind != "binary":
        p = prediction(x, kind)
        loss, predicted = (w * regression.half(kind, x, y)).sum(), (w * p).sum()
        metrics = regression.label_metrics(kind, y, w, loss=loss, predicted=predicted)
        return metrics | _means(kind, p, y, w)
    with np.errstate(over="ignore", invalid="ignore"):
        loss = _where_any(y, np.logaddexp(0, -x)) + _where_any(1 - y, np.logaddexp(0, x))
    return _exact(x, probability(x), loss, y, w)


def exact_from_probabilities(
    probabilities: ArrayLike, labels: ArrayLike, weights: ArrayLike
) -> dict[str, float]:
    """Computes the metrics of `exact` from probabilities in [0, 1].

    For the logloss, 0 and 1 are replaced by the nearest float64 inside the interval. So the loss of
    a wrong prediction is finite even if it has probability 0 or 1.
    """
    p, y, w = _weighted(probabilities, labels, weights)
    low = np.maximum(p, np.finfo(np.float64).tiny)
    high = np.minimum(p, 1 - np.finfo(np.float64).epsneg)
    loss = _where_any(y, -np.log(low)) + _where_any(1 - y, -np.log1p(-high))
    return _exact(p, p, loss, y, w)


def constant(labels: ArrayLike, weights: ArrayLike, kind: str = "binary") -> dict[str, float]:
    """Computes the metrics of the best constant prediction, the weighted mean label."""
    _, y, w = _weighted(labels, labels, weights)
    weight, positives = w.sum(), (w * y).sum()
    others = _means(kind, np.full_like(y, ratio(positives, weight)), y, w)
    if kind != "binary":
        metrics = regression.label_metrics(
            kind, y, w, loss=regression.least_loss(kind, y, w), predicted=positives
        )
        return metrics | others
    metrics = binary_metrics(
        examples=len(w),
        weight=weight,
        loss=weight * _entropy(ratio(positives, weight)),
        predicted=positives,
        observed=positives,
        auc=auc_of_groups(np.array([positives]), np.array([weight - positives])),
    )
    return metrics | others


def calibration_buckets(
    outputs: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike,
    kind: str = "binary",
    buckets: int = 10,
) -> list[dict[str, float]]:
    """Computes mean prediction and mean label in equal-count buckets of the prediction, ascending.

    Only examples of weight above 0 are counted. Equal predictions share one bucket, so that the
    result does not depend on the order of examples. This, or a small number of examples, can give
    fewer than `buckets` buckets.

    Returns:
        A list of {lower, upper: minimum and maximum prediction; examples: their number; weight:
        their total weight; predicted, observed: weighted means of prediction and label; error:
        standard error of `observed`}.
    """
    x, y, w = _weighted(outputs, labels, weights)
    order = np.argsort(x, kind="stable")
    x, y, w = x[order], y[order], w[order]
    p = prediction(x, kind)
    starts = np.arange(buckets) * len(x) // buckets
    if len(x):
        starts = np.searchsorted(x, x[starts], side="left")
    edges = np.unique(np.append(starts, len(x)))
    return [_bucket(p[a:b], y[a:b], w[a:b]) for a, b in zip(edges[:-1], edges[1:], strict=True)]


def calibration_error(buckets: Sequence[Mapping[str, float]]) -> float:
    """Computes the mean distance of prediction and label over buckets, by weight. NaN without any.

    For a binary task this is the expected calibration error (ECE). With few examples it is above 0
    even for true probabilities.

    Args:
        buckets: see `calibration_buckets`.

    References:
        Naeini et al., Obtaining Well Calibrated Probabilities Using Bayesian Binning, AAAI 2015.
    """
    weight = sum(b["weight"] for b in buckets)
    return ratio(sum(b["weight"] * abs(b["predicted"] - b["observed"]) for b in buckets), weight)


def _bucket(p: Floats, y: Floats, w: Floats) -> dict[str, float]:
    weight, observed = w.sum(), (w * y).sum() / w.sum()
    return {
        "lower": float(p[0]),
        "upper": float(p[-1]),
        "examples": len(p),
        "weight": float(weight),
        "predicted": float((w * p).sum() / weight),
        "observed": float(observed),
        "error": float(np.sqrt(np.square(w * (y - observed)).sum()) / weight),
    }


def _weighted(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike) -> list[Floats]:
    """Returns the three arrays in float64, without examples of weight 0."""
    arrays = [np.asarray(a, np.float64) for a in (scores, labels, weights)]
    keep = arrays[2] > 0
    return [a[keep] for a in arrays]


def _exact(score: Floats, p: Floats, loss: Floats, y: Floats, w: Floats) -> dict[str, float]:
    metrics = binary_metrics(
        examples=len(w),
        weight=w.sum(),
        loss=(w * loss).sum(),
        predicted=(w * p).sum(),
        observed=(w * y).sum(),
        auc=auc_of_examples(score, y, w),
    )
    return metrics | _means("binary", p, y, w)


def _means(kind: str, p: Floats, y: Floats, w: Floats) -> dict[str, float]:
    """Computes the metrics that are weighted means over examples."""
    return {
        name: ratio((w * function(p, y)).sum(), w.sum()) for name, function in means([kind]).items()
    }


def binary_metrics(
    *, examples: int, weight: float, loss: float, predicted: float, observed: float, auc: float
) -> dict[str, float]:
    logloss = ratio(loss, weight)
    return {
        "logloss": logloss,
        "auc": auc,
        "normalized_entropy": ratio(logloss, _entropy(ratio(observed, weight))),
        "calibration": ratio(predicted, observed),
        "examples": examples,
    }


def _entropy(p: float) -> float:
    """Entropy of a Bernoulli variable, in nats. 0 for p = 0 and p = 1."""
    return float(sum(-q * np.log(q) for q in (p, 1 - p) if q > 0)) if p == p else p


def _where_any(share: Floats, loss: Floats) -> Floats:
    """Returns share * loss, and 0 where the share is 0, even for an infinite loss."""
    with np.errstate(invalid="ignore"):
        return np.where(share > 0, share * loss, 0.0)
