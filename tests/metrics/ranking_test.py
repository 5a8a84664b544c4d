"""Tests of the metrics of requests against a loop over requests, and against scikit-learn."""

import math

import numpy as np
import pytest
from monitors import new_monitor
from sklearn.metrics import ndcg_score, roc_auc_score

from jaxrank.errors import InputError
from jaxrank.features import Task
from jaxrank.metrics import intervals, ranking
from jaxrank.metrics.early_stopping import Ranked, check_metric
from jaxrank.metrics.registry import title_of


def requests(seed=0, count=200, kind="binary"):
    """Returns scores with ties, labels, weights, candidates and codes of scattered examples."""
    r = np.random.default_rng(seed)
    code = r.permutation(np.repeat(np.arange(count), r.integers(1, 12, count)))
    n = len(code)
    labels = (r.random(n) < 0.2).astype(float) if kind == "binary" else r.poisson(0.4, n) * 1.0
    candidates = np.where(labels == 0, r.choice([1.0, 4.0], n), 1.0)
    weights = r.choice([0.0, 1.0, 2.5], n, p=[0.1, 0.6, 0.3]) * candidates
    return np.round(r.normal(size=n), 1), labels, weights, candidates, code


def looped(scores, labels, weights, candidates, code, kind, k):
    """Computes the metrics request by request, as the definition says."""
    rows = []
    for request in np.unique(code):
        inside = np.flatnonzero((code == request) & (weights > 0))
        if not len(inside):
            continue
        ranks = []
        for i in inside:
            above = sum(candidates[j] for j in inside if scores[j] > scores[i])
            tied = sum(candidates[j] for j in inside if j != i and scores[j] == scores[i])
            ranks.append(1 + above + tied / 2)
        y = labels[inside]
        best = sum(v / math.log2(2 + p) for p, v in enumerate(sorted(y)[::-1][:k]))
        gain = sum(v / math.log2(1 + rank) for v, rank in zip(y, ranks, strict=True) if rank <= k)
        relevant = [rank for v, rank in zip(y, ranks, strict=True) if v > 0]
        auc = math.nan
        if kind == "binary" and 0 < y.sum() < len(y):
            auc = roc_auc_score(y, scores[inside], sample_weight=weights[inside])
        rows.append(
            dict(
                weight=np.mean(weights[inside] / candidates[inside]),
                total=weights[inside].sum(),
                ndcg=gain / best if relevant else math.nan,
                mrr=1 / min(relevant) if relevant else math.nan,
                recall=np.mean([rank <= k for rank in relevant]) if relevant else math.nan,
                auc=auc,
            )
        )

    def mean(name, weight):
        kept = [row for row in rows if row[name] == row[name]]
        return sum(row[weight] * row[name] for row in kept) / sum(row[weight] for row in kept)

    def missing(name, weight):
        return sum(r[weight] for r in rows if r[name] != r[name]) / sum(r[weight] for r in rows)

    metrics = {f"{name}@{k}": mean(name, "weight") for name in ("ndcg", "recall")}
    metrics["mrr"] = mean("mrr", "weight")
    if kind == "binary":
        metrics["gauc"] = mean("auc", "total")
    return metrics, len(rows), missing("mrr", "weight"), missing("auc", "total")


@pytest.mark.parametrize("kind", ["binary", "count"])
def test_metrics_of_requests_are_those_of_a_loop_over_requests(kind):
    arrays = requests(kind=kind)
    result = ranking.request_metrics(*arrays, kind=kind, k=3)
    metrics, count, without_positives, excluded = looped(*arrays, kind, 3)
    assert result.metrics == pytest.approx(metrics, rel=1e-12)
    assert result.requests == count
    assert result.without_positives == pytest.approx(without_positives)
    if kind == "binary":
        assert result.gauc_excluded == pytest.approx(excluded)
    order = np.random.default_rng(1).permutation(len(arrays[0]))
    shuffled = ranking.request_metrics(*(a[order] for a in arrays), kind=kind, k=3)
    assert shuffled.metrics == pytest.approx(result.metrics, rel=1e-12)


def test_ndcg_without_ties_is_that_of_sklearn():
    r = np.random.default_rng(2)
    labels, scores = r.poisson(1.0, (30, 9)) * 1.0, r.normal(size=(30, 9))
    labels[:, 0] += 1
    ones, code = np.ones(labels.size), np.repeat(np.arange(30), 9)
    result = ranking.request_metrics(
        scores.ravel(), labels.ravel(), ones, ones, code, kind="count", k=4
    )
    assert result.metrics["ndcg@4"] == pytest.approx(ndcg_score(labels, scores, k=4), rel=1e-12)


def test_a_kept_negative_stands_for_those_that_were_dropped():
    score, labels = np.array([3.0, 2.0, 1.0]), np.array([0.0, 1.0, 0.0])
    candidates = np.array([8.0, 1.0, 8.0])
    result = ranking.request_metrics(
        score, labels, candidates, candidates, np.zeros(3, int), kind="binary", k=9
    )
    assert result.metrics["mrr"] == 1 / 9
    assert result.metrics["recall@9"] == 1


def test_intervals_are_those_of_a_bootstrap_over_requests():
    scores, *rest, code = requests(seed=3, count=600)
    r = np.random.default_rng(4)
    others = scores + r.normal(size=len(scores)) / 2
    a, b = (ranking.request_values(x, *rest, code, kind="binary", k=3) for x in (scores, others))
    draws = {name: [] for name in a.values}
    for _ in range(400):
        times = np.bincount(r.integers(len(a.first), size=len(a.first)), minlength=len(a.first))
        for name, weight in a.weights.items():
            means = [np.average(v.values[name], weights=times * weight) for v in (a, b)]
            draws[name].append((means[0], means[1] - means[0]))
    alone, paired = (
        {name: sum(margin) / 2 for name, margin in margins.items()}
        for margins in (intervals.request_margins(a), intervals.request_margins(b, a))
    )
    for name, of_draws in draws.items():
        expected = 1.96 * np.std(of_draws, axis=0)
        np.testing.assert_allclose([alone[name], paired[name]], expected, rtol=0.12, err_msg=name)
        assert paired[name] < alone[name]
    users = np.zeros(len(code), int)
    of_request = np.arange(len(a.first)) // 20
    users[a.first] = of_request  # other candidates of a request do not count
    weight, value = a.weights["mrr"], a.values["mrr"]
    sums = np.bincount(of_request, weight * (value - np.average(value, weights=weight)))
    error = np.sqrt((sums**2).sum()) / weight.sum()
    clustered = intervals.request_margins(a, clusters=users)
    assert min(clustered["mrr"]) == pytest.approx(2.05 * error, rel=0.1)  # not the skewed side
    few = ranking.request_values(*(x[code < 9] for x in (scores, *rest, code)), kind="binary", k=3)
    assert np.isnan(list(intervals.request_margins(few).values())).all()


def test_metrics_without_a_request_are_undefined():
    none = np.zeros(0)
    result = ranking.request_metrics(none, none, none, none, none, kind="binary", k=5)
    assert result.requests == 0
    assert all(math.isnan(value) for value in result.metrics.values())
    zeros, ones = np.zeros(4), np.ones(4)
    result = ranking.request_metrics(zeros, zeros, ones, ones, np.arange(4), kind="binary", k=5)
    assert result.without_positives == result.gauc_excluded == 1
    assert all(math.isnan(value) for value in result.metrics.values())


def test_a_task_that_is_only_ranked_is_monitored_by_its_order():
    tasks = [Task("click"), Task("price", "real")]
    ranked = Ranked(5, ("click",))
    assert check_metric(tasks, "", ranked) == "click/ndcg@5"
    assert new_monitor(tasks, "click/ndcg@5", ranked=ranked).higher_is_better
    assert new_monitor(tasks, "mean/gauc", ranked=Ranked(5)).tasks == ("click",)
    with pytest.raises(InputError, match=r"'click/ndcg@5', .*: found 'click/logloss'"):
        check_metric(tasks, "click/logloss", ranked)
    with pytest.raises(InputError, match="found 'click/ndcg@5'"):
        check_metric(tasks, "click/ndcg@5")
    assert [title_of(n) for n in ("ndcg@5", "gauc", "auc")] == ["NDCG@5", "GAUC", "AUC"]
