"""Tests of the conditions of a gate: what they mean, and what is rejected before any work."""

import math

import pytest

from jaxrank.errors import InputError
from jaxrank.evaluation.gate import judge
from jaxrank.evaluation.gate.conditions import Span, check_metrics, parse
from jaxrank.features import Task

TASKS = {"click": Task("click"), "spend a/b": Task("spend a/b", "real")}


@pytest.mark.parametrize(
    ("text", "span", "expected"),
    [
        # (value, low, high): the interval crosses 0.001.
        ("click/logloss > +0.1%", (0.002, 0.0005, 0.0035), False),
        ("click/logloss > +0.1% surely", (0.002, 0.0011, 0.0035), True),
        ("click/logloss > +0.1% likely", (0.002, 0.0005, 0.0035), True),
        ("click/logloss > +0.1% possibly", (0.0005, -0.001, 0.0011), True),
        ("click/logloss > +0.1% possibly", (0.0, -0.001, 0.0009), False),
        ("click/auc < -.001", (-0.004, -0.006, -0.002), True),
        ("click/auc < -1e-3", (-0.002, -0.004, 0.0), False),
        ("click/auc < 0.7 possibly", (0.72, 0.69, 0.75), True),
        ("click/calibration outside 0.9..1.1", (1.2, 1.11, 1.29), True),
        ("click/calibration outside 0.9..1.1", (1.2, 1.05, 1.35), False),
        ("click/calibration outside 0.9..1.1", (0.8, 0.75, 0.85), True),
        ("click/calibration outside 0.9..1.1 possibly", (1.0, 0.89, 1.05), True),
        ("spend a/b/squared_error outside -2%..+1% likely", (0.02, 0.0, 0.04), True),
        ("click/logloss>0.5", (math.nan, math.nan, math.nan), None),
        ("click/logloss > 0.5", (0.7, math.nan, math.nan), None),
        ("click/logloss > 0.5 likely", (0.7, math.nan, math.nan), True),
        ("click/ndcg@10 < -0.1%", (-0.02, -0.03, -0.002), True),
        ("click/gauc<-0.1%", (-0.02, -0.03, 0.002), False),
    ],
)
def test_a_condition_uses_the_interval_as_it_says(text, span, expected):
    condition = parse(text)
    check_metrics([condition], TASKS, k=10)
    assert condition.holds(Span(*span)) is expected
    assert condition.is_relative == ("%" in text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("click/logloss", r"'TASK/METRIC > BOUND'.*found 'click/logloss'\."),
        ("click/logloss >= 0.1", "must be .*found 'click/logloss >= 0.1'"),
        ("logloss > 0.1", "must be .*found 'logloss > 0.1'"),
        ("click/logloss > +0.1% maybe", "surely, likely or possibly.*found"),
        ("click/logloss > 0.1%", "where a percentage must have a sign"),
        ("click/logloss > nan", "must be .*found 'click/logloss > nan'"),
        ("click/logloss > 1e999", "where a bound must be a finite number"),
        ("click/calibration outside 1.1..0.9", "where LOW must be below HIGH"),
        ("click/calibration outside -0.1..0.1", "where LOW and HIGH must both have a sign"),
        ("click/calibration outside 0.9", "LOW..HIGH.*found 'click/calibration outside 0.9'"),
        ("click/logloss > +0.1%", r"'click/logloss > \+0.1%' compares .*--against .*found none"),
    ],
)
def test_a_wrong_condition_is_rejected_before_the_run_is_read(text, message):
    with pytest.raises(InputError, match=f"--fail-if: .*{message}") as error:
        judge.judge("no such run", fail_if=["click/auc < 0.5", text])
    assert error.value.exit_status == 2


@pytest.mark.parametrize("name", ["click/loglos", "clock/auc", "spend a/b/auc"])
def test_a_metric_that_no_task_has_is_rejected(name):
    with pytest.raises(
        InputError,
        match=rf"must be one of click/logloss, .*/calibration: found '{name}'; the nearest .*LOW..",
    ):
        check_metrics([parse(f"{name} > 0.5")], TASKS)


@pytest.mark.parametrize(
    ("name", "k", "message"),
    [
        ("click/mrr", 0, "data with features.group"),
        ("click/ndcg@5", 10, "'click/ndcg@5'.* eval.top_k of the run, 10"),
        ("spend a/b/mrr", 10, "found 'spend a/b/mrr'"),
    ],
)
def test_a_metric_of_requests_needs_requests_and_its_first_ranks(name, k, message):
    with pytest.raises(InputError, match=message):
        check_metrics([parse(f"{name} < 0.5")], TASKS, k=k)


@pytest.mark.parametrize("metric", ["logloss", "calibration", "normalized_entropy"])
def test_a_metric_of_probabilities_of_a_ranked_task_is_rejected(metric):
    conditions = [parse(f"click/{name}") for name in ("auc < -0.1", "mrr < -1%", f"{metric} > 1")]
    check_metrics(conditions, TASKS, k=10)
    with pytest.raises(InputError, match=f"'{metric}' of 'click', which is trained by ranking al"):
        check_metrics(conditions, TASKS, {"click"}, 10)
