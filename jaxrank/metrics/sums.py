"""How good predictions are.

On the devices a batch becomes `Sums`; on the host `from_sums` turns them into metrics. `exact`
works from all predictions instead, in float64.

The metrics of a task, in a dict (NaN where one is undefined, never an exception):

Of a binary task:

- logloss: sum(w * loss) / sum(w), in nats.
- auc: the probability that a random positive has the higher prediction than a random negative,
  ties counted half, examples drawn by weight. Undefined with one class only.
- normalized_entropy: logloss over that of the best constant prediction, 1 for a model that knows
  only the base rate (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook,
  ADKDD 2014). Undefined with one class only.

Of real and count tasks: see `regression`. Of each:

- calibration: sum(w * prediction) / sum(w * label). Undefined where the labels' sum is not above 0.
- examples: how many have weight above 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxrank import losses
from jaxrank.metrics import regression
from jaxrank.metrics.auc import Floats, auc_of_examples, auc_of_groups
from jaxrank.metrics.regression import ratio

# Bins of 1/32 in the logit over [-16, 16); what lies outside counts in the first or last bin.
# Within a bin all pairs count half. Error of the AUC, measured: with 1,000,000 examples 1e-4 where
# the logits have standard deviation 0.1 or 0.3, 6e-6 at 1.6; with 20,000 examples 7e-4, 3e-4, 4e-5.
# A model whose predictions all lie in one bin has AUC 0.5.
BINS = 1024
LOGIT_LIMIT = 16.0

# How labels spread is a difference of two numbers from sums, which float32 has to 4e-7 (measured,
# of 4,096 examples): where it is a smaller share of what these make of the numbers than this, it is
# wrong by over 0.4%.
_LEAST_SPREAD = 1e-4


class Sums(NamedTuple):
    """Sums over examples, for each of T tasks.

    examples: i32[T] how many have weight above 0.
    weight, loss, predicted, observed: f[T] sums of w, w * loss, w * prediction, w * label.
    spread: f[T] sum of w * losses.spreads.
    histogram: f[T, 2, BINS] weight by label (label above 1/2 last) and bin of the logit; zero
        where a task is not binary.
    """

    examples: Any
    weight: Any
    loss: Any
    predicted: Any
    observed: Any
    spread: Any
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


def batch_sums(
    outputs: jax.Array, labels: jax.Array, weights: jax.Array, kinds: Sequence[str]
) -> Sums:
    """The sums of a batch: what the model puts out, labels and weights f[B, T].

    Args:
        kinds: of the T tasks; see `features.Task`.
    """
    outputs = losses.known(outputs, weights)
    return Sums(
        examples=(weights > 0).sum(0, dtype=jnp.int32),
        weight=weights.sum(0),
        loss=(weights * losses.elementwise(outputs, labels, kinds)).sum(0),
        predicted=(weights * losses.predictions(outputs, kinds)).sum(0),
        observed=(weights * labels).sum(0),
        spread=(weights * losses.spreads(labels, kinds)).sum(0),
        histogram=_histogram(outputs, labels, weights, losses.columns_of("binary", kinds)),
    )


def _histogram(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, binary: NDArray[np.intp]
) -> jax.Array:
    """f[T, 2, BINS] by one scatter-add for all the tasks i[m] `binary`."""
    tasks = logits.shape[1]
    logits, labels, weights = (losses.columns(a, binary) for a in (logits, labels, weights))
    scaled = jnp.floor((logits + LOGIT_LIMIT) * (BINS / (2 * LOGIT_LIMIT)))
    bins = jnp.clip(scaled, 0, BINS - 1).astype(jnp.int32)
    rows = 2 * binary.astype(np.int32)[None, :] + (labels > 0.5)
    histogram = jnp.zeros(tasks * 2 * BINS, weights.dtype).at[rows * BINS + bins].add(weights)
    return histogram.reshape(tasks, 2, BINS)


def to_host(sums: Sums) -> Sums:
    """The same sums in NumPy, 64 bits wide: float32 sums of a few batches lose nothing worth
    counting, those of a whole data set would."""
    host = jax.device_get(sums)
    wide = Sums(*(np.asarray(a, np.float64) for a in host))
    return wide._replace(examples=np.asarray(host.examples, np.int64))


def from_sums(sums: Sums, kinds: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of each task, in order; the AUC is that of the histogram (see BINS), and what is
    normalised is NaN where labels spread too little for sums to tell (see _LEAST_SPREAD)."""
    s = to_host(sums)
    found = []
    for task, kind in enumerate(kinds):
        told: dict[str, Any] = {"examples": int(s.examples[task])}
        told |= {f: getattr(s, f)[task] for f in ("weight", "loss", "predicted", "observed")}
        if kind == "binary":
            negatives, positives = s.histogram[task]
            found.append(_of_binary(**told, auc=auc_of_groups(positives, negatives)))
        else:
            spread = s.spread[task]
            mean = ratio(s.observed[task], s.weight[task])
            of_mean = s.weight[task] * regression.spread(kind, mean)
            # The m log(m) of a count is near 0 where m is near 1, but moves with m.
            parts = (spread, abs(of_mean), 2 * s.observed[task] if kind == "count" else 0.0)
            least = spread - of_mean
            least = least if least > _LEAST_SPREAD * max(parts) else 0.0
            found.append(regression.of_sums(kind, **told, least=least))
    return found


def probability(logits: ArrayLike) -> NDArray[np.float64]:
    """sigmoid(logits) in float64, of any shape; small ones keep their relative precision."""
    x = np.asarray(logits, np.float64)
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1 + e)


def prediction(outputs: ArrayLike, kind: str) -> NDArray[np.float64]:
    """What a model that puts out `outputs` predicts, of any shape: a probability, a number or an
    expected count, as `losses.predictions`."""
    if kind == "binary":
        return probability(outputs)
    x = np.asarray(outputs, np.float64)
    return np.exp(np.minimum(x, losses.LOG_COUNT_LIMIT)) if kind == "count" else x


def exact(
    outputs: ArrayLike, labels: ArrayLike, weights: ArrayLike, kind: str = "binary"
) -> dict[str, float]:
    """The metrics of one task from all that the model puts out, labels and weights, each [n].

    Labels of a binary task are in [0, 1].
    """
    x, y, w = _weighted(outputs, labels, weights)
    if kind != "binary":
        loss, predicted = (w * regression.half(kind, x, y)).sum(), (w * prediction(x, kind)).sum()
        return regression.of_labels(kind, y, w, loss=loss, predicted=predicted)
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


def constant(labels: ArrayLike, weights: ArrayLike, kind: str = "binary") -> dict[str, float]:
    """The metrics of the best constant prediction, the weighted mean label."""
    _, y, w = _weighted(labels, labels, weights)
    if kind != "binary":
        return regression.of_labels(
            kind, y, w, loss=regression.least_loss(kind, y, w), predicted=(w * y).sum()
        )
    weight, positives = w.sum(), (w * y).sum()
    return _of_binary(
        examples=len(w),
        weight=weight,
        loss=weight * _entropy(ratio(positives, weight)),
        predicted=positives,
        observed=positives,
        auc=auc_of_groups(np.array([positives]), np.array([weight - positives])),
    )


def calibration_buckets(
    outputs: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike,
    kind: str = "binary",
    buckets: int = 10,
) -> list[dict[str, float]]:
    """Mean prediction and mean label over examples of like prediction, lowest first.

    Buckets have equally many examples of weight above 0, except that equal predictions share one,
    so that the result does not depend on the order of examples; there are fewer than `buckets`
    where that or the number of examples asks for it.

    Returns:
        [{lower, upper: the least and greatest prediction; examples; predicted, observed: the
        weighted means of prediction and label}].
    """
    x, y, w = _weighted(outputs, labels, weights)
    order = np.argsort(x, kind="stable")
    x, y, w = x[order], y[order], w[order]
    p = prediction(x, kind)
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


def _weighted(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike) -> list[Floats]:
    """All three in float64, without the examples of weight 0."""
    arrays = [np.asarray(a, np.float64) for a in (scores, labels, weights)]
    keep = arrays[2] > 0
    return [a[keep] for a in arrays]


def _exact(score: Floats, p: Floats, loss: Floats, y: Floats, w: Floats) -> dict[str, float]:
    return _of_binary(
        examples=len(w),
        weight=w.sum(),
        loss=(w * loss).sum(),
        predicted=(w * p).sum(),
        observed=(w * y).sum(),
        auc=auc_of_examples(score, y, w),
    )


def _of_binary(
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
    """Of a coin, in nats; 0 for a certain one."""
    return float(sum(-q * np.log(q) for q in (p, 1 - p) if q > 0)) if p == p else p


def _where_any(share: Floats, loss: Floats) -> Floats:
    """share * loss, 0 where the share is, whatever the loss: an infinite one costs nobody."""
    with np.errstate(invalid="ignore"):
        return np.where(share > 0, share * loss, 0.0)
