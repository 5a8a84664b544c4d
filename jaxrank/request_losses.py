"""Losses of requests, which compare the candidates of each request with one another.

The loss of a task is a mean over the requests of the global batch that have a positive (and for
pairs a negative too). Others contribute nothing. A request counts with the mean weight of its
candidates. A negative that was kept at rate r when negatives were sampled counts 1 / r times.
Requests never span two groups, and so the loss does not depend on the number of devices.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrank.errors import InputError
from jaxrank.features import PAD, Batch


class Requests(NamedTuple):
    """The requests of one task on one device.

    segments: i32[B], the number of each example's request, ascending.
    candidates: f[B], number of candidates that each example stands for. 0 for fillers and examples
        with an unknown label.
    weights: f[B], of examples.
    group: number of examples of a group.
    """

    segments: jax.Array
    candidates: jax.Array
    weights: jax.Array
    group: int

    def sums(self, values: jax.Array) -> jax.Array:
        """Returns f[B], for each example the sum of values f[B] over its request."""
        total = jax.ops.segment_sum(
            values, self.segments, len(self.segments), indices_are_sorted=True
        )
        return total[self.segments]

    @property
    def request_weights(self) -> jax.Array:
        """The mean weight of the candidates of each example's request, f[B]."""
        known = (self.candidates > 0).astype(self.weights.dtype)
        count = self.sums(known)
        return jnp.where(count > 0, self.sums(known * self.weights) / jnp.maximum(count, 1), 0)


def requests_of(batch: Batch, task: int) -> Requests:
    """Returns the requests of a task, of this device's share of a batch.

    Raises:
        InputError: the examples of the batch have no requests.
    """
    if isinstance(batch.requests, tuple):
        raise InputError(
            "task_losses: a loss that compares the examples of a request must have data that was"
            " prepared with features.group: found batches without requests."
        )
    examples, groups = batch.labels.shape[0], batch.dropped.shape[0]
    group = examples // groups
    # Fillers are the last examples of a group. A group without fillers may have as many requests as
    # examples.
    within = jnp.where(batch.requests == PAD, group - 1, batch.requests)
    first = jnp.arange(examples, dtype=jnp.int32) // group * group
    labels, weights = batch.labels[:, task], batch.weights[:, task]
    candidates = (weights > 0).astype(weights.dtype)
    if batch.logit_correction.shape[1]:
        rate = jnp.exp(-batch.logit_correction[:, task])
        candidates = candidates * jnp.where(labels == 0, rate, 1)
    return Requests(first + within, candidates, weights, group)


def listwise_weights(labels: jax.Array, requests: Requests) -> jax.Array:
    """Returns the weight of each example's loss, f[B]: its share of the labels of its request."""
    known = labels * (requests.candidates > 0)
    total = requests.sums(known)
    share = known / jnp.where(total > 0, total, 1)
    return requests.request_weights * share


def listwise_softmax(scores: jax.Array, requests: Requests) -> jax.Array:
    """Returns -log(softmax) of each example among the candidates of its request, f[B].

    References:
        Cao et al., Learning to Rank: From Pairwise Approach to Listwise Approach, ICML 2007.
    """
    known = requests.candidates > 0
    count = len(scores)
    largest = jax.ops.segment_max(
        jnp.where(known, jax.lax.stop_gradient(scores), -jnp.inf),
        requests.segments,
        count,
        indices_are_sorted=True,
    )[requests.segments]
    largest = jnp.where(jnp.isfinite(largest), largest, 0)
    # The inner `where` keeps the gradient of examples that do not count finite.
    shifted = jnp.where(known, scores - largest, 0)
    total = requests.sums(requests.candidates * jnp.exp(shifted))
    return jnp.where(known, jnp.log(jnp.where(total > 0, total, 1)) - shifted, 0)


def pair_weights(labels: jax.Array, requests: Requests) -> jax.Array:
    """Returns the weight of each example's loss, f[B]: its share of the pairs of its request."""
    pairs = _pairs(labels, requests).sum(-1).reshape(-1)
    total = requests.sums(pairs)
    return requests.request_weights * pairs / jnp.where(total > 0, total, 1)


def pairwise(scores: jax.Array, labels: jax.Array, requests: Requests) -> jax.Array:
    """Returns the mean of log(1 + exp(other - score)) over candidates with a lower label, f[B].

    Needs `group` numbers per example.

    References:
        Burges et al., Learning to Rank using Gradient Descent, ICML 2005 (RankNet).
    """
    pairs = _pairs(labels, requests)
    by_group = scores.reshape(-1, requests.group)
    each = jax.nn.softplus(by_group[:, None, :] - by_group[:, :, None])
    total = pairs.sum(-1)
    return ((pairs * each).sum(-1) / jnp.where(total > 0, total, 1)).reshape(-1)


def _pairs(labels: jax.Array, requests: Requests) -> jax.Array:
    """Returns f[groups, group, group], the number of pairs of each example with each lower one."""

    def columns(array: Any) -> tuple[jax.Array, jax.Array]:
        by_group = array.reshape(-1, requests.group)
        return by_group[:, :, None], by_group[:, None, :]

    segment, other_segment = columns(requests.segments)
    label, other_label = columns(labels)
    count, other_count = columns(requests.candidates)
    is_pair = (segment == other_segment) & (label > other_label)
    return jnp.where(is_pair, count * other_count, 0)
