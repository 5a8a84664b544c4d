"""Converts the outputs of a model to the output of each task."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def outputs(
    raw: jax.Array, bias: jax.Array, scale: jax.Array, parents: tuple[int, ...]
) -> jax.Array:
    """Returns the output of each task, f[B, tasks]; see `features.Task`.

    Args:
        raw: f[B, tasks], of the model.
        bias, scale: f[tasks], of each task's base rate; see `base_rates.BaseRates`.
        parents: see `joint_logits`.
    """
    return joint_logits(raw * scale[None, :] + bias[None, :], parents)


def joint_logits(logits: jax.Array, parents: tuple[int, ...]) -> jax.Array:
    """Returns the logit of p(task) * p(parent) * p(its parent) ... for each task, f[B, tasks].

    p is the sigmoid of `logits` f[B, tasks]: the probability of a task if its parent is positive,
    such as conversion given click. The result is the probability of both given the impression. A
    task with a parent therefore learns from all impressions, and its label must be positive only
    if both are. `parents` has the index of each task's parent, or -1. No task may be its own
    ancestor. An empty tuple means that no task has a parent.

    1 / (p q) - 1 = e^-a + e^-b + e^-(a + b) for p = sigmoid(a) and q = sigmoid(b), so the logit
    of p q is -logsumexp(-a, -b, -a - b). No probability is rounded to 0 or 1 on the way. Even a
    logit of a thousand has a finite value and gradient.

    References:
        Ma et al., Entire Space Multi-Task Model, SIGIR 2018.
    """

    if not any(parent >= 0 for parent in parents):
        return logits

    def joint(task: int) -> jax.Array:
        logit = logits[:, task]
        if parents[task] < 0:
            return logit
        parent = joint(parents[task])
        return -jnp.logaddexp(jnp.logaddexp(-logit, -parent), -logit - parent)

    return jnp.stack([joint(task) for task in range(logits.shape[1])], axis=1)


def idle_tasks(task_weights: Sequence[float], parents: Sequence[int]) -> tuple[int, ...]:
    """Returns the tasks whose logits do not affect the loss: weight 0, and no trained descendant.

    Args:
        parents: index of each task's parent, or -1. Empty: no task has one.
    """
    trained = {i for i, weight in enumerate(task_weights) if weight > 0}
    for _ in parents:
        trained |= {parents[i] for i in trained if parents[i] >= 0}
    return tuple(i for i in range(len(task_weights)) if i not in trained)
