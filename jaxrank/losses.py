"""Losses by kind of task, weighted, one number per task.

Each loss is half of the deviance in nats: 0 for a perfect prediction and never below 0. Its
gradient is prediction - label.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import xlogy

# Log of an expected count of about 1e13. Above it the Poisson loss is a straight line, so that loss
# and gradient stay finite where exp overflows. Labels are never as large.
LOG_COUNT_LIMIT = 30.0

Elementwise = Callable[..., jax.Array]


def logistic(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log likelihood in nats of each label in [0, 1], elementwise, any one shape.

    -y log(sigmoid(x)) - (1 - y) log(1 - sigmoid(x)) for x of any finite size: nothing overflows,
    and a confident right answer keeps its small loss.
    """
    # max(x, 0) - x y + log(1 + exp(-|x|)) is cheaper, but JAX differentiates it wrongly at 0, where
    # a model with a zero head starts.
    return labels * jax.nn.softplus(-logits) + (1 - labels) * jax.nn.softplus(logits)


def squared(predictions: jax.Array, labels: jax.Array) -> jax.Array:
    """(y - x)^2 / 2, elementwise, any one shape."""
    return jnp.square(predictions - labels) / 2


def poisson(logs: jax.Array, labels: jax.Array) -> jax.Array:
    """exp(x) - y x, minus its minimum y - y log(y), for the log x of an expected count.

    Elementwise, any one shape. The minimum does not depend on x, so the gradient is exp(x) - y.
    Subtracting it keeps the loss at least 0, and precise where x is close to log(y): in float32 a
    difference of large numbers would not be. Above LOG_COUNT_LIMIT the loss is a straight line with
    the slope that the curve has there.
    """
    x = jnp.minimum(logs, LOG_COUNT_LIMIT)
    is_positive = labels > 0
    ratio = x - jnp.log(jnp.where(is_positive, labels, 1))
    curve = jnp.where(is_positive, labels * (jnp.expm1(ratio) - ratio), jnp.exp(x))
    return curve + (math.exp(LOG_COUNT_LIMIT) - labels) * jnp.maximum(logs - LOG_COUNT_LIMIT, 0)


# The loss of each kind, which metrics also use: (outputs, labels) -> losses, elementwise.
_LOSSES: Mapping[str, Elementwise] = {"binary": logistic, "real": squared, "count": poisson}
# Its name in `task_losses`.
DEFAULT_OF_KIND: Mapping[str, str] = {"binary": "bce", "real": "squared", "count": "poisson"}
_PREDICTIONS: Mapping[str, Elementwise] = {
    "binary": jax.nn.sigmoid,
    "real": lambda x: x,
    "count": lambda x: jnp.exp(jnp.minimum(x, LOG_COUNT_LIMIT)),
}
_SPREADS: Mapping[str, Elementwise] = {
    "binary": jnp.zeros_like,
    "real": lambda y: jnp.square(y) / 2,
    "count": lambda y: xlogy(y, y),
}


def elementwise(logits: jax.Array, labels: jax.Array, kinds: Sequence[str]) -> jax.Array:
    """Returns the loss f[B, T] of each label f[B, T], given the outputs f[B, T] of the model.

    Args:
        kinds: of the T tasks; see `features.Task`.
    """
    return _select_kind(_LOSSES, kinds, logits, labels)


def loss_of_kind(kind: str) -> Elementwise:
    """Returns the loss of a kind of task."""
    return _LOSSES[kind]


def predictions(logits: jax.Array, kinds: Sequence[str]) -> jax.Array:
    """Returns probabilities, numbers or counts (at most exp(LOG_COUNT_LIMIT)), f[B, T]."""
    return _select_kind(_PREDICTIONS, kinds, logits)


def spreads(labels: jax.Array, kinds: Sequence[str]) -> jax.Array:
    """Returns h(y), f[B, T]: its mean minus h of the mean label is the loss of the best constant.

    h is y^2 / 2 for a real task, y log(y) for a count, and 0 for a binary task, whose labels are 0
    and 1. The identity holds because each loss is a Bregman divergence (Banerjee et al., Clustering
    with Bregman Divergences, JMLR 2005).
    """
    return _select_kind(_SPREADS, kinds, labels)


def columns(array: jax.Array, indices: np.ndarray) -> jax.Array:
    """Selects the columns `indices` i[m], rising, of f[B, T]."""
    if len(indices) == array.shape[1]:
        return array
    return jnp.take(
        array, indices, axis=1, unique_indices=True, indices_are_sorted=True, mode="clip"
    )


def task_indices(kind: Any, kinds: Sequence[Any]) -> np.ndarray:
    """Returns the indices of the tasks of a kind, i[m], rising."""
    return np.flatnonzero([other == kind for other in kinds])


def _select_kind(
    functions: Mapping[Any, Elementwise], kinds: Sequence[Any], *arrays: jax.Array
) -> jax.Array:
    """Applies each function once, to all columns of its kind. `kinds` may be any objects."""
    if len(kinds) != arrays[0].shape[1]:
        raise ValueError(f"kinds must be of {arrays[0].shape[1]} tasks: found {kinds}.")
    columns_by_kind = {kind: task_indices(kind, kinds) for kind in dict.fromkeys(kinds)}
    parts = [functions[k](*(columns(a, i) for a in arrays)) for k, i in columns_by_kind.items()]
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate(list(columns_by_kind.values())))
    return jnp.concatenate(parts, axis=1)[:, order]


def sampled_logits(logits: jax.Array, logit_correction: jax.Array) -> jax.Array:
    """Converts logits over all traffic to logits over examples with downsampled negatives.

    A fraction r of the negatives was kept, so the odds of a positive are 1 / r times the odds over
    all traffic (King & Zeng, Logistic Regression in Rare Events Data, 2001).

    Args:
        logits: f[B, T].
        logit_correction: f[B, T], log r. Without columns if all negatives were kept.
    """
    return logits - logit_correction if logit_correction.shape[1] else logits


def known(outputs: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns outputs f[B, T] with 0 where weights f[B, T] are 0, because the label is unknown.

    Outputs of unknown labels may have any size, and 0 times infinity is NaN.
    """
    return jnp.where(weights > 0, outputs, 0)


def per_task(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    total_weight: jax.Array,
    functions: Sequence[Elementwise],
) -> jax.Array:
    """Returns the contribution of these examples to the loss of each task, f[T].

    The loss of a task is sum(w * loss) / sum(w) over the global batch, or 0 if no example has
    weight. It is the sum of the contributions of all devices.

    Args:
        logits, labels, weights: f[B, T]; weights 0 where a label is unknown.
        total_weight: f[T], sum(w) over the global batch.
        functions: losses of the T tasks.
    """
    is_positive = total_weight > 0
    by_function = {function: function for function in functions}
    each = weights * _select_kind(by_function, functions, known(logits, weights), labels)
    return jnp.where(is_positive, each.sum(0) / jnp.where(is_positive, total_weight, 1), 0)


def weighted_loss(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    task_weights: jax.Array,
    total_weight: jax.Array,
    functions: Sequence[Elementwise],
) -> jax.Array:
    """Returns the loss to minimise, f[]: the sum of `per_task`, weighted by `task_weights` f[T]."""
    return (task_weights * per_task(logits, labels, weights, total_weight, functions)).sum()


def uncertainty_weighted(
    per_task: jax.Array,
    task_weights: jax.Array,
    log_variances: jax.Array,
    total_weight: jax.Array,
    parts: int,
) -> jax.Array:
    """Returns the loss to minimise with learned task weights, f[]: one of `parts` equal parts.

    It is sum(task_weights * (exp(-s) * per_task + s / 2)) over tasks with known labels. s is the
    log of the variance of a task's noise. Once s has converged, a task has weight 1 / (2 * loss).

    Args:
        per_task: f[T]; see `per_task`.
        task_weights, log_variances, total_weight: f[T].
        parts: number of devices whose parts add up to the whole.

    References:
        Kendall, Gal and Cipolla, Multi-Task Learning Using Uncertainty to Weigh Losses, CVPR 2018.
    """
    known = (total_weight > 0).astype(per_task.dtype)
    each = jnp.exp(-log_variances) * per_task + known * log_variances / (2 * parts)
    return (task_weights * each).sum()
