"""The loss of a batch: logistic, weighted, one number for each task."""

import jax
import jax.numpy as jnp


def logistic(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Negative log likelihood in nats of each label in [0, 1], elementwise, any one shape.

    -y log(sigmoid(x)) - (1 - y) log(1 - sigmoid(x)) for x of any finite size: nothing overflows,
    and a confident right answer keeps its small loss.
    """
    # Not max(x, 0) - x y + log(1 + exp(-|x|)), though it is cheaper: JAX differentiates it wrongly
    # at 0, where a model begins whose head is zero.
    return labels * jax.nn.softplus(-logits) + (1 - labels) * jax.nn.softplus(logits)


def of_sample(logits: jax.Array, shifts: jax.Array) -> jax.Array:
    """The logits of examples from which negatives were left out, given those of all traffic.

    Of the negatives the share r was kept, so the odds of a positive are 1 / r times those of all
    traffic (King & Zeng, Logistic Regression in Rare Events Data, 2001).

    Args:
        logits: f[B, T].
        shifts: f[B, T], log r; or without columns, where nothing was left out.
    """
    return logits - shifts if shifts.shape[1] else logits


def weighted_loss(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    task_weights: jax.Array,
    total_weight: jax.Array,
) -> jax.Array:
    """The loss to minimise, f[]: the part of it that these examples make.

    The loss of the global batch is sum(task_weights * per task), a task's loss being
    sum(w * loss) / sum(w), 0 where no example has weight; the parts of all devices add up to it.

    Args:
        logits, labels, weights: f[B, T]; labels in [0, 1], weights 0 where a label is unknown.
        task_weights: f[T].
        total_weight: f[T], sum(w) over the global batch.
    """
    some = total_weight > 0
    per_task = (weights * logistic(logits, labels)).sum(0) / jnp.where(some, total_weight, 1)
    return (task_weights * jnp.where(some, per_task, 0)).sum()
