"""Metrics from sums over batches.

The devices reduce a batch to `Sums`, and `from_sums` computes metrics from these on the host.
`exact` computes metrics from all predictions instead, in float64.

The metrics of a task are a dict. Undefined metrics are NaN and never raise an exception.

Binary tasks:

- logloss: sum(w * loss) / sum(w), in nats.
- auc: probability that a random positive has a higher prediction than a random negative, where
  ties count half and examples are drawn by weight. Undefined with one class.
- normalized_entropy: logloss / logloss of the best constant prediction. It is 1 for a model that
  knows only the base rate (He et al., Practical Lessons from Predicting Clicks on Ads at Facebook,
  ADKDD 2014). Undefined with one class.

For real and count tasks see `regression`. All tasks:

- calibration: sum(w * prediction) / sum(w * label). Undefined unless the sum of labels is above 0.
- examples: number of examples with weight above 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxrank import losses
from jaxrank.metrics import regression
from jaxrank.metrics.exact import auc_of_groups, binary_metrics
from jaxrank.metrics.registry import means
from jaxrank.metrics.regression import ratio

# Bins of width 1/32 in the logit over [-16, 16). Logits outside are in the first or last bin.
# Pairs within a bin count half. Measured error of the AUC with 1,000,000 examples: 1e-4 for logits
# of standard deviation 0.1 or 0.3, 6e-6 for 1.6. With 20,000 examples: 7e-4, 3e-4, 4e-5.
# A model with all predictions in one bin has AUC 0.5.
BINS = 1024


LOGIT_LIMIT = 16.0


# The spread of labels is a difference of two sums, whose relative error in float32 is 4e-7
# (measured for 4,096 examples). If the difference is a smaller fraction of the sums than this, its
# error is above 0.4%.
_MIN_SPREAD = 1e-4


class Sums(NamedTuple):
    """Sums over examples, for each of T tasks.

    examples: i32[T], number of examples with weight above 0.
    weight, loss, predicted, observed: f[T], sums of w, w * loss, w * prediction, w * label.
    spread: f[T], sum of w * losses.spreads.
    histogram: f[T, 2, BINS], weight by label (label above 1/2 last) and bin of the logit. Zero for
        tasks that are not binary.
    means: f[T] each, sums of w * `Metric.mean`, by name of the metric.
    """

    examples: Any
    weight: Any
    loss: Any
    predicted: Any
    observed: Any
    spread: Any
    histogram: Any
    means: Mapping[str, Any]


def traffic_weights(
    weights: jax.Array, labels: jax.Array, logit_correction: jax.Array
) -> jax.Array:
    """Returns weights f[B, T] that correct for the sampling of negatives.

    A negative that was kept with probability r counts 1 / r times, so that the metrics describe all
    traffic.

    Args:
        weights, labels: f[B, T].
        logit_correction: f[B, T], log r. It has no columns if negatives were not sampled.
    """
    if not logit_correction.shape[1]:
        return weights
    return weights * jnp.where(labels == 0, jnp.exp(-logit_correction), 1)


def batch_sums(
    outputs: jax.Array, labels: jax.Array, weights: jax.Array, kinds: Sequence[str]
) -> Sums:
    """Computes the sums of a batch.

    Args:
        outputs, labels, weights: f[B, T].
        kinds: of the T tasks, see `features.Task`.
    """
    outputs = losses.known(outputs, weights)
    predictions = losses.predictions(outputs, kinds)
    return Sums(
        examples=(weights > 0).sum(0, dtype=jnp.int32),
        weight=weights.sum(0),
        loss=(weights * losses.elementwise(outputs, labels, kinds)).sum(0),
        predicted=(weights * predictions).sum(0),
        observed=(weights * labels).sum(0),
        spread=(weights * losses.spreads(labels, kinds)).sum(0),
        histogram=_histogram(outputs, labels, weights, losses.task_indices("binary", kinds)),
        means={
            name: (weights * mean(predictions, labels)).sum(0)
            for name, mean in means(kinds).items()
        },
    )


def _histogram(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, binary: NDArray[np.intp]
) -> jax.Array:
    """Computes f[T, 2, BINS] with one scatter-add. `binary`: i[m], indices of binary tasks."""
    tasks = logits.shape[1]
    logits, labels, weights = (losses.columns(a, binary) for a in (logits, labels, weights))
    scaled = jnp.floor((logits + LOGIT_LIMIT) * (BINS / (2 * LOGIT_LIMIT)))
    bins = jnp.clip(scaled, 0, BINS - 1).astype(jnp.int32)
    rows = 2 * binary.astype(np.int32)[None, :] + (labels > 0.5)
    histogram = jnp.zeros(tasks * 2 * BINS, weights.dtype).at[rows * BINS + bins].add(weights)
    return histogram.reshape(tasks, 2, BINS)


def to_host(sums: Sums) -> Sums:
    """Converts sums to 64-bit NumPy arrays.

    The rounding error of float32 sums is negligible over a few batches, but not over a data set.
    """
    host = jax.device_get(sums)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), host)
    return wide._replace(examples=np.asarray(host.examples, np.int64))


def from_sums(sums: Sums, kinds: Sequence[str]) -> list[dict[str, float]]:
    """Computes the metrics of each task, in order.

    The AUC comes from the histogram (see BINS). Normalised metrics are NaN if the spread of labels
    is below the precision of the sums (see _MIN_SPREAD).
    """
    s = to_host(sums)
    by_task = []
    for task, kind in enumerate(kinds):
        values: dict[str, Any] = {"examples": int(s.examples[task])}
        values |= {f: getattr(s, f)[task] for f in ("weight", "loss", "predicted", "observed")}
        if kind == "binary":
            negatives, positives = s.histogram[task]
            metrics = binary_metrics(**values, auc=auc_of_groups(positives, negatives))
        else:
            spread = s.spread[task]
            mean = ratio(s.observed[task], s.weight[task])
            of_mean = s.weight[task] * regression.spread(kind, mean)
            # For a count, m log(m) is near 0 for m near 1, but its error is proportional to m.
            parts = (spread, abs(of_mean), 2 * s.observed[task] if kind == "count" else 0.0)
            least = spread - of_mean
            least = least if least > _MIN_SPREAD * max(parts) else 0.0
            metrics = regression.summed_metrics(kind, **values, least=least)
        others = {n: ratio(s.means[n][task], s.weight[task]) for n in means([kind])}
        by_task.append(metrics | others)
    return by_task
