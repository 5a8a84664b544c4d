"""How good predictions are.

On the devices a batch becomes `Sums`, which add up over batches; on the host `from_sums` turns
them into metrics. `exact` works from all predictions instead, in float64.

The metrics of a task, in a dict (NaN where one is undefined, never an exception):

- logloss: sum(w * loss) / sum(w), in nats.
- auc: the probability that a random positive has the higher prediction than a random negative,
  ties counted half, examples drawn by weight. Undefined with one class only.
- normalized_entropy: logloss over that of the best constant prediction, 1 for a model that knows
  only the base rate (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook,
  ADKDD 2014). Undefined with one class only.
- calibration: sum(w * prediction) / sum(w * label). Undefined without positives.
- examples: how many have weight above 0.
"""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxrank import losses

# Bins of 1/32 in the logit over [-16, 16); what lies outside counts in the first or last bin.
# Within a bin all pairs count half. Error of the AUC, measured: with 1,000,000 examples 1e-4 where
# the logits have standard deviation 0.1 or 0.3, 6e-6 at 1.6; with 20,000 examples 7e-4, 3e-4, 4e-5.
# A model whose predictions all lie in one bin has AUC 0.5.
BINS = 1024
LOGIT_LIMIT = 16.0


class Sums(NamedTuple):
    """Sums over examples, for each of T tasks.

    examples: i32[T] how many have weight above 0.
    weight, loss, predicted, positives: f[T] sums of w, w * loss, w * sigmoid(logit), w * label.
    histogram: f[T, 2, BINS] weight by label (label above 1/2 last) and bin of the logit.
    """

    examples: Any
    weight: Any
    loss: Any
    predicted: Any
    positives: Any
    histogram: Any


def of_all_traffic(weights: jax.Array, labels: jax.Array, shifts: jax.Array) -> jax.Array:
    """f[B, T]: the weights with which examples stand for all traffic, of which negatives were left
    out: one that was kept with probability r counts 1 / r times.

    Args:
        weights, labels: f[B, T].
        shifts: f[B, T], log r; or without columns, where nothing was left out.
    """
    if not shifts.shape[1]:
        return weights
    return weights * jnp.where(labels == 0, jnp.exp(-shifts), 1)


def batch_sums(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Sums:
    """The sums of a batch f[B, T], of which labels are 0 or 1. One scatter-add for all tasks."""
    tasks = logits.shape[1]
    scaled = jnp.floor((logits + LOGIT_LIMIT) * (BINS / (2 * LOGIT_LIMIT)))
    bins = jnp.clip(scaled, 0, BINS - 1).astype(jnp.int32)
    rows = 2 * jnp.arange(tasks, dtype=jnp.int32)[None, :] + (labels > 0.5)
    histogram = jnp.zeros(tasks * 2 * BINS, weights.dtype).at[rows * BINS + bins].add(weights)
    return Sums(
        examples=(weights > 0).sum(0, dtype=jnp.int32),
        weight=weights.sum(0),
        loss=(weights * losses.logistic(logits, labels)).sum(0),
        predicted=(weights * jax.nn.sigmoid(logits)).sum(0),
        positives=(weights * labels).sum(0),
        histogram=histogram.reshape(tasks, 2, BINS),
    )


def merge(a: Sums, b: Sums) -> Sums:
    """The sums of two disjoint sets of examples, on the devices or (see `to_host`) on the host."""
    return Sums(*map(operator.add, a, b))


def to_host(sums: Sums) -> Sums:
    """The same sums in NumPy, 64 bits wide: float32 sums of a few batches lose nothing worth
    counting, those of a whole data set would."""
    host = jax.device_get(sums)
    wide = Sums(*(np.asarray(a, np.float64) for a in host))
    return wide._replace(examples=np.asarray(host.examples, np.int64))


def from_sums(sums: Sums) -> list[dict[str, float]]:
    """The metrics of each task, in order; the AUC is that of the histogram (see BINS)."""
    s = to_host(sums)
    found = []
    for task in range(len(s.weight)):
        negatives, positives = s.histogram[task]
        found.append(
            _summary(
                examples=int(s.examples[task]),
                weight=s.weight[task],
                loss=s.loss[task],
                predicted=s.predicted[task],
                positives=s.positives[task],
                auc=_auc_of_groups(positives, negatives),
            )
        )
    return found


def probability(logits: ArrayLike) -> NDArray[np.float64]:
    """sigmoid(logits) in float64, of any shape; small ones keep their relative precision."""
    x = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1 + e)


def exact(logits: ArrayLike, labels: ArrayLike, weights: ArrayLike) -> dict[str, float]:
    """The metrics of one task from all its logits, labels in [0, 1] and weights, each [n]."""
    x, y, w = _weighted(logits, labels, weights)
    with np.errstate(over="ignore", invalid="ignore"):
        loss = _where_any(y, np.logaddexp(0, -x)) + _where_any(1 - y, np.logaddexp(0, x))
    return _exact(x, probability(x), loss, y, w)


def exact_from_probabilities(
    probabilities: ArrayLike, labels: ArrayLike, weights: ArrayLike
) -> dict[str, float]:
    """As `exact` for predictions in [0, 1]. In the logloss, 0 and 1 count as the nearest float64
    within, so that a certain prediction that is wrong costs much but not infinitely much."""
    p, y, w = _weighted(probabilities, labels, weights)
    low = np.maximum(p, np.finfo(np.float64).tiny)
    high = np.minimum(p, 1 - np.finfo(np.float64).epsneg)
    loss = _where_any(y, -np.log(low)) + _where_any(1 - y, -np.log1p(-high))
    return _exact(p, p, loss, y, w)


def constant(labels: ArrayLike, weights: ArrayLike) -> dict[str, float]:
    """The metrics of the best constant prediction, the weighted mean label."""
    _, y, w = _weighted(labels, labels, weights)
    weight, positives = w.sum(), (w * y).sum()
    return _summary(
        examples=len(w),
        weight=weight,
        loss=weight * _entropy(_ratio(positives, weight)),
        predicted=positives,
        positives=positives,
        auc=_auc_of_groups(np.array([positives]), np.array([weight - positives])),
    )


def calibration_buckets(
    logits: ArrayLike, labels: ArrayLike, weights: ArrayLike, buckets: int = 10
) -> list[dict[str, float]]:
    """Mean prediction and mean label over examples of like prediction, lowest first.

    Buckets have equally many examples of weight above 0, except that equal predictions share one,
    so that the result does not depend on the order of examples; there are fewer than `buckets`
    where that or the number of examples asks for it.

    Returns:
        [{lower, upper: the least and greatest probability; examples; predicted, observed: the
        weighted means of probability and label}].
    """
    x, y, w = _weighted(logits, labels, weights)
    order = np.argsort(x, kind="stable")
    x, y, w = x[order], y[order], w[order]
    p = probability(x)
    starts = np.arange(buckets) * len(x) // buckets
    if len(x):
        starts = np.searchsorted(x, x[starts], side="left")
    edges = np.unique(np.append(starts, len(x)))
    return [
        {
            "lower": float(p[a]),
            "upper": float(p[b - 1]),
            "examples": int(b - a),
            "predicted": float((w * p)[a:b].sum() / w[a:b].sum()),
            "observed": float((w * y)[a:b].sum() / w[a:b].sum()),
        }
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]


Floats = NDArray[np.float64]


def _weighted(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike) -> list[Floats]:
    """All three in float64, without the examples of weight 0."""
    arrays = [np.asarray(a, np.float64) for a in (scores, labels, weights)]
    keep = arrays[2] > 0
    return [a[keep] for a in arrays]


def _exact(score: Floats, p: Floats, loss: Floats, y: Floats, w: Floats) -> dict[str, float]:
    return _summary(
        examples=len(w),
        weight=w.sum(),
        loss=(w * loss).sum(),
        predicted=(w * p).sum(),
        positives=(w * y).sum(),
        auc=_auc(score, y, w),
    )


def _summary(
    *, examples: int, weight: float, loss: float, predicted: float, positives: float, auc: float
) -> dict[str, float]:
    logloss = _ratio(loss, weight)
    return {
        "logloss": logloss,
        "auc": auc,
        "normalized_entropy": _ratio(logloss, _entropy(_ratio(positives, weight))),
        "calibration": _ratio(predicted, positives),
        "examples": examples,
    }


def _auc(score: Floats, y: Floats, w: Floats) -> float:
    if np.isnan(score).any():
        return float("nan")
    order = np.argsort(score)
    score = score[order]
    if not len(score):
        return float("nan")
    starts = np.flatnonzero(np.append(True, score[1:] != score[:-1]))
    positives = np.add.reduceat((w * y)[order], starts)
    negatives = np.add.reduceat((w * (1 - y))[order], starts)
    return _auc_of_groups(positives, negatives)


def _auc_of_groups(positives: Floats, negatives: Floats) -> float:
    """AUC of examples tied within groups, by weight in each, groups in order of prediction."""
    below = np.cumsum(negatives) - negatives
    won = (positives * (below + negatives / 2)).sum()
    return _ratio(won, positives.sum() * negatives.sum())


def _entropy(p: float) -> float:
    """Of a coin, in nats; 0 for a certain one."""
    return float(sum(-q * np.log(q) for q in (p, 1 - p) if q > 0)) if p == p else p


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b > 0 else float("nan")


def _where_any(share: Floats, loss: Floats) -> Floats:
    """share * loss, 0 where the share is, whatever the loss: an infinite one costs nobody."""
    with np.errstate(invalid="ignore"):
        return np.where(share > 0, share * loss, 0.0)
