import math

import jax.numpy as jnp
import numpy as np
import pytest
from monitors import new_monitor

from jaxrank.errors import InputError
from jaxrank.features import Task
from jaxrank.metrics.early_stopping import Monitor

CLICK, BUY = Task("click"), Task("buy")


def fed(values, metric="click/auc", **settings):
    """Returns the steps at which learning rates were reduced, and the monitor after all values."""
    monitor = new_monitor([CLICK, BUY], metric, **settings)
    lowered = [i for i, value in enumerate(values) if monitor.update(i, value)]
    return lowered, monitor


@pytest.mark.parametrize(("metric", "best"), [("click/auc", 2), ("click/logloss", 1)])
def test_the_best_step_is_the_highest_auc_and_the_lowest_logloss(metric, best):
    _, monitor = fed([0.5, 0.4, 0.7, 0.6], metric)
    assert monitor.best_step == best


def test_the_mean_over_tasks_is_monitored():
    tasks = [CLICK, Task("price", "real"), BUY]
    monitor = new_monitor(tasks, "mean/auc", evaluated_on="valid")
    metrics = {"click": {"auc": 0.5}, "buy": {"auc": 0.75}, "price": {}}
    assert (monitor.value(metrics), monitor.higher_is_better) == (0.625, True)
    assert monitor.measures == "mean/auc (click, buy) of valid"
    assert math.isnan(monitor.value(metrics | {"buy": {"auc": math.nan}}))
    by_name = new_monitor([CLICK, Task("mean")], "mean/auc")
    assert by_name.value({"click": {"auc": 0.5}, "mean": {"auc": 0.75}}) == 0.75
    with pytest.raises(InputError, match="'mean/normalized_squared_error': found 'mean/deviance'"):
        new_monitor([Task("price", "real")], "mean/deviance")


def test_training_stops_after_patience_evaluations_without_improvement():
    assert not fed([0.5, 0.6, 0.5, 0.5], early_stopping_patience=3)[1].should_stop
    assert fed([0.5, 0.6, 0.5, 0.5, 0.6], early_stopping_patience=3)[1].should_stop
    assert not fed([0.5] * 50)[1].should_stop


def test_rates_are_lowered_after_each_patience_without_improvement():
    lowered, _ = fed([0.5, 0.4, 0.4, 0.6, 0.5, 0.5, 0.5, 0.5], reduce_lr_patience=2)
    assert lowered == [2, 5, 7]


@pytest.mark.parametrize("array", [np.float32, jnp.float32])
def test_reductions_end_at_the_least_rate(array):
    monitor = new_monitor([CLICK], "", reduce_lr_factor=0.5, reduce_lr_least=0.3)
    once = monitor.reduced(array(1))
    assert (once, monitor.reduced(once)) == (0.5, array(0.3))
    assert once.dtype == np.float32


def test_a_change_below_min_delta_and_an_undefined_value_are_no_improvement():
    _, monitor = fed([0.5, 0.509, math.nan], min_delta=0.01)
    assert (monitor.best, monitor.since_best) == (0.5, 2)


def test_a_restored_monitor_continues_as_the_first_would():
    values = [0.5, 0.4, 0.4, 0.45]
    _, first = fed(values[:2], early_stopping_patience=3, reduce_lr_patience=2)
    new = new_monitor([CLICK], "click/auc", early_stopping_patience=3, reduce_lr_patience=2)
    second = Monitor.from_state(first.to_state(), new)
    for i, value in enumerate(values[2:]):
        assert second.update(i, value) == first.update(i, value)
    assert second == first
    assert second.should_stop


def test_a_monitor_of_other_data_starts_over():
    def new(day):
        return new_monitor([CLICK], "", evaluated_on=day)

    first = new("day 1")
    assert first.measures == "click/logloss of day 1"
    first.update(3, 0.5)
    again, other = new("day 1"), new("day 2")
    assert Monitor.from_state(first.to_state(), again) == first
    assert Monitor.from_state(first.to_state(), other) is other


def test_an_unknown_metric_is_named_with_the_nearest():
    with pytest.raises(InputError, match=r"eval.metric: must be one of .*'buy/au'.*'buy/auc'"):
        new_monitor([CLICK, BUY], "buy/au")
    assert new_monitor([CLICK, BUY], "").metric == "logloss"


def test_each_kind_of_task_has_metrics_of_its_own_of_which_the_lowest_is_best():
    price, visits = Task("price", "real"), Task("visits", "count")
    assert new_monitor([price, CLICK], "").metric == "squared_error"
    monitor = new_monitor([visits, CLICK], "")
    assert (monitor.task, monitor.metric) == ("visits", "deviance")
    for i, value in enumerate((0.5, 0.4, 0.7)):
        monitor.update(i, value)
    assert monitor.best_step == 1
    assert new_monitor([price, CLICK], "click/auc").higher_is_better
    for wrong in ("price/auc", "price/deviance", "click/squared_error", "visits/logloss"):
        with pytest.raises(InputError, match=f"eval.metric: must be one of .*{wrong!r}"):
            new_monitor([price, CLICK, visits], wrong)
