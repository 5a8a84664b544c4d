"""Metrics of requests: how well the examples of each request are ordered. float64, on the host.

The candidates of a request are its examples with a known label and a weight above 0. A negative
that was kept at rate r when negatives were sampled stands for 1 / r candidates. The rank of an
example is 1 plus the number of candidates with a higher score, plus half of those with an equal
one. It depends neither on the order of examples nor on the number of devices.

- ndcg@k: sum of label / log2(1 + rank) over ranks up to k, divided by that of the best order
  (Jarvelin & Kekalainen, Cumulated Gain-Based Evaluation of IR Techniques, TOIS 2002).
- mrr: 1 / the best rank of an example with a label above 0.
- recall@k: fraction of the examples with a label above 0 that have a rank up to k.
- gauc: AUC within a request (Zhou et al., Deep Interest Network, KDD 2018). Binary tasks only.

The first three are means over the requests that have a label above 0. A request counts with the
mean weight of its examples. The GAUC is a mean over requests with both labels, and a request counts
with the sum of its weights.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jaxrank.metrics.regression import Floats, ratio


class RequestMetrics(NamedTuple):
    """Metrics of the requests of one task.

    metrics: by name. NaN where no request counts.
    requests: number of requests with a candidate.
    without_positives: fraction of the requests, by weight, that only the GAUC may count.
    gauc_excluded: fraction of the weight in requests without both labels. NaN without a GAUC.
    """

    metrics: dict[str, float]
    requests: int
    without_positives: float
    gauc_excluded: float


class RequestValues(NamedTuple):
    """Metrics of each request of one task, ascending by its number.

    first: i64[requests], the index of the first candidate of each request.
    weight: f64[requests], of all requests with a candidate.
    values: {metric: f64[requests]}, 0 where a request does not count.
    weights: {metric: f64[requests]}, the weights of the mean, 0 where a request does not count.
    """

    first: np.ndarray
    weight: Floats
    values: dict[str, Floats]
    weights: dict[str, Floats]

    def metrics(self) -> dict[str, float]:
        """Returns the mean of each metric, NaN where no request counts."""
        return {
            name: ratio((weight * self.values[name]).sum(), weight.sum())
            for name, weight in self.weights.items()
        }


def request_metrics(
    scores: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike,
    multiplicity: ArrayLike,
    code: np.ndarray,
    *,
    kind: str,
    k: int,
) -> RequestMetrics:
    """Computes the metrics of the requests of one task. See `request_values` for arguments."""
    values = request_values(scores, labels, weights, multiplicity, code, kind=kind, k=k)
    return summary(values, weights)


def summary(values: RequestValues, weights: ArrayLike) -> RequestMetrics:
    """Summarises the metrics of each request.

    Args:
        weights: of all examples, as for `request_values`.
    """
    excluded = float("nan")
    if "gauc" in values.weights:
        w = np.asarray(weights, np.float64)
        excluded = 1 - ratio(values.weights["gauc"].sum(), w[w > 0].sum())
    ranked = values.weights["mrr"].sum()
    without = 1 - ratio(ranked, values.weight.sum())
    return RequestMetrics(values.metrics(), len(values.first), without, excluded)


def request_values(
    scores: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike,
    multiplicity: ArrayLike,
    code: np.ndarray,
    *,
    kind: str,
    k: int,
) -> RequestValues:
    """Computes the metrics of each request of one task.

    Args:
        scores, labels: of all examples, each [n].
        weights: [n], corrected for the sampling of negatives, 0 where a label is unknown.
        multiplicity: [n], number of candidates that an example stands for. It is part of `weights`.
        code: i64[n], number of each example's request.
        kind: of the task, "binary" or "count".
        k: number of first ranks.
    """
    arrays = [np.asarray(a, np.float64) for a in (scores, labels, weights, multiplicity)]
    known = arrays[2] > 0
    score, y, w, m = (a[known] for a in arrays)
    _, first, request = np.unique(code[known], return_index=True, return_inverse=True)
    count = len(first)
    weight = _sums(request, w / m, count) / np.maximum(np.bincount(request, minlength=count), 1)
    positives = _sums(request, y > 0, count)
    rank = _ranks(score, m, request)
    is_top = rank <= k
    gains = _sums(request, is_top * y / np.log2(1 + rank), count)
    recalled = _sums(request, is_top & (y > 0), count)
    best_rank = np.full(count, np.inf)
    np.minimum.at(best_rank, request[y > 0], rank[y > 0])
    counts = positives > 0
    best = _best_gains(y, request, count, k)
    values = {
        f"ndcg@{k}": gains / np.where(counts, best, 1),
        "mrr": 1 / best_rank,
        f"recall@{k}": recalled / np.maximum(positives, 1),
    }
    ranked = np.where(counts, weight, 0.0)
    of_metric = dict.fromkeys(values, ranked)
    if kind == "binary":
        values["gauc"], of_metric["gauc"] = _group_aucs(score, y, w, request, count)
    return RequestValues(np.flatnonzero(known)[first], weight, values, of_metric)


def gauc(
    scores: ArrayLike, labels: ArrayLike, weights: ArrayLike, code: np.ndarray
) -> tuple[float, float]:
    """Computes the mean AUC over groups with both labels, weighted by the weights of examples.

    Args:
        scores, labels, weights: of all examples, each [n]. Labels are in [0, 1].
        code: i64[n], number of each example's group.

    Returns:
        The mean, and the fraction of the weight in groups without both labels, which it leaves out.
    """
    arrays = [np.asarray(a, np.float64) for a in (scores, labels, weights)]
    known = arrays[2] > 0
    score, y, w = (a[known] for a in arrays)
    _, group = np.unique(code[known], return_inverse=True)
    aucs, weight = _group_aucs(score, y, w, group, int(group.max(initial=-1)) + 1)
    total = weight.sum()
    return ratio((weight * aucs).sum(), total), 1 - ratio(total, w.sum())


def _group_aucs(
    score: Floats, y: Floats, w: Floats, group: np.ndarray, count: int
) -> tuple[Floats, Floats]:
    """Computes the AUC and the weight of each group, both 0 for a group without both labels."""
    order = np.lexsort((score, group))
    score, y, w, group = score[order], y[order], w[order], group[order]
    starts = _starts(group, score)
    owner = group[starts]
    positives, negatives = (np.add.reduceat(a, starts) for a in (w * y, w * (1 - y)))
    positives_of, negatives_of = (_sums(owner, a, count) for a in (positives, negatives))
    below = _within(negatives, _starts(owner))
    won = _sums(owner, positives * (below + negatives / 2), count)
    pairs = positives_of * negatives_of
    counts = pairs > 0
    aucs = np.where(counts, won / np.where(counts, pairs, 1), 0.0)
    return aucs, np.where(counts, _sums(group, w, count), 0.0)


def _sums(code: np.ndarray, values: np.ndarray, count: int) -> Floats:
    return np.bincount(code, values, count).astype(np.float64)


def _starts(*columns: np.ndarray) -> np.ndarray:
    """Returns the index of the first of each run of equal rows."""
    if not len(columns[0]):
        return np.zeros(0, np.intp)
    changes = np.any([c[1:] != c[:-1] for c in columns], axis=0)
    return np.flatnonzero(np.append(True, changes))


def _within(values: Floats, starts: np.ndarray) -> Floats:
    """Returns the sum of the earlier values of each value's run."""
    before = np.cumsum(values) - values
    return before - np.repeat(before[starts], np.diff(np.append(starts, len(values))))


def _ranks(score: Floats, multiplicity: Floats, request: np.ndarray) -> Floats:
    order = np.lexsort((-score, request))
    ordered, owner, m = score[order], request[order], multiplicity[order]
    starts = _starts(owner, ordered)
    tied = np.add.reduceat(m, starts) if len(starts) else np.zeros(0)
    above = _within(tied, _starts(owner[starts]))
    sizes = np.diff(np.append(starts, len(m)))
    ranks = np.empty(len(m))
    ranks[order] = 1 + np.repeat(above, sizes) + (np.repeat(tied, sizes) - m) / 2
    return ranks


def _best_gains(y: Floats, request: np.ndarray, count: int, k: int) -> Floats:
    """Returns the largest sum of label / log2(1 + rank) over ranks up to k, of each request."""
    order = np.lexsort((-y, request))
    owner = request[order]
    rank = 1 + _within(np.ones(len(owner)), _starts(owner))
    return _sums(owner, (rank <= k) * y[order] / np.log2(1 + rank), count)
