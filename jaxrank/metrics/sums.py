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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxrank import losses
from jaxrank.metrics import regression
from jaxrank.metrics.exact import auc_of_groups, of_binary
from jaxrank.metrics.registry import means
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


def of_all_traffic(weights: jax.Array, labels: jax.Array, logit_correction: jax.Array) -> jax.Array:
    """f[B, T]: the weights with which examples stand for all traffic, of which negatives were left
    out: one that was kept with probability r counts 1 / r times.

    Args:
        weights, labels: f[B, T].
        logit_correction: f[B, T], log r; or without columns, where nothing was left out.
    """
    if not logit_correction.shape[1]:
        return weights
    return weights * jnp.where(labels == 0, jnp.exp(-logit_correction), 1)


def batch_sums(
    outputs: jax.Array, labels: jax.Array, weights: jax.Array, kinds: Sequence[str]
) -> Sums:
    """The sums of a batch: what the model puts out, labels and weights f[B, T].

    Args:
        kinds: of the T tasks; see `features.Task`.
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
        histogram=_histogram(outputs, labels, weights, losses.columns_of("binary", kinds)),
        means={
            name: (weights * mean(predictions, labels)).sum(0)
            for name, mean in means(kinds).items()
        },
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
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), host)
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
            metrics = of_binary(**told, auc=auc_of_groups(positives, negatives))
        else:
            spread = s.spread[task]
            mean = ratio(s.observed[task], s.weight[task])
            of_mean = s.weight[task] * regression.spread(kind, mean)
            # The m log(m) of a count is near 0 where m is near 1, but moves with m.
            parts = (spread, abs(of_mean), 2 * s.observed[task] if kind == "count" else 0.0)
            least = spread - of_mean
            least = least if least > _LEAST_SPREAD * max(parts) else 0.0
            metrics = regression.of_sums(kind, **told, least=least)
        others = {n: ratio(s.means[n][task], s.weight[task]) for n in means([kind])}
        found.append(metrics | others)
    return found
