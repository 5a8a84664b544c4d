"""Tasks that can only be positive where another is, such as a conversion after a click."""

import jax
import jax.numpy as jnp


def joint_logits(logits: jax.Array, parents: tuple[int, ...]) -> jax.Array:
    """The logit of p(task) * p(parent) * p(its parent) ... for each task, f[B, tasks].

    p is the sigmoid of `logits` f[B, tasks]: of a task given that its parent is positive, such as
    conversion given click. The result is over the full space, conversion and click given the
    impression, so a task with a parent learns from all impressions, and its label must be that of
    both. `parents` has for each task that of its parent, -1 for none; no task may be among its own
    ancestors. Empty: no task has one.

    1 / (p q) - 1 = e^-a + e^-b + e^-(a + b) for p = sigmoid(a) and q = sigmoid(b), so the logit
    of p q is -logsumexp(-a, -b, -a - b): no probability is rounded to 0 or 1 on the way, and a
    logit of a thousand has a finite value and gradient like any other.

    References:
        Ma et al., Entire Space Multi-Task Model, SIGIR 2018.
    """

    if not any(parent >= 0 for parent in parents):
        return logits

    def joint(task: int) -> jax.Array:
        own = logits[:, task]
        if parents[task] < 0:
            return own
        parent = joint(parents[task])
        return -jnp.logaddexp(jnp.logaddexp(-own, -parent), -own - parent)

    return jnp.stack([joint(task) for task in range(logits.shape[1])], axis=1)
