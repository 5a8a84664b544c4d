"""The study of stability: its groups and its search for rates."""

import dataclasses
import math

import pytest
import tiny
from driving import drive, resolved, rows_when_stopped

from jaxrank.config_files import flatten
from jaxrank.errors import InputError
from jaxrank.studies import stability, tuning
from jaxrank.studies.study import Context, RunResult, RunSpec


def answer(spec):
    """A loss that depends on what the runs vary, smallest for rates times 2 and divided by 4."""
    if spec.kind == "resolve":
        return RunResult(spec, "done", values=resolved(tiny.config()))
    base, settings = tiny.config(), spec.settings
    powers = [
        math.log2(
            spec.overrides[f"optim.{name}.base_learning_rate"] / base.optim[name].base_learning_rate
        )
        for name in ("dense", "tables")
    ]
    loss = 0.4 + 0.01 * (abs(powers[0] - 1) + abs(powers[1] + 2))
    workers = settings.get("workers", 1)
    loss += 1e-4 * spec.overrides.get("seed", 0) + 1e-5 * (workers - 1) * settings.get(
        "schedule_seed", 0
    )
    stale = {"mean": workers - 1.0, "max": 2, "histogram": [1, 2, 3]}
    values = {"staleness": stale} if settings else {}
    metrics = {"click/logloss": loss, "click/auc": 1 - loss, "click/calibration": 1.0}
    return RunResult(spec, "done", metrics, 1.0, 1000.0, values=values)


def test_groups_differ_in_one_thing_and_sides_have_rates_of_their_own():
    options = stability.Options(runs=3, workers=(1, 5))
    context = Context(tiny.config(), options, lambda text: None)
    outcome, batches = drive(stability.runs(context), answer)
    assert [spec.kind for spec in batches[0]] == ["resolve"]
    tuning_runs = [spec.name for batch in batches[1:-1] for spec in batch]
    assert len(set(tuning_runs)) == len(tuning_runs)
    assert {"tune-sync-dense+1-tables-2", "tune-async5-dense+1-tables-2"} < set(tuning_runs)
    last = batches[-1]
    assert [spec.name for spec in last[-3:]] == [f"async5-both-{i}" for i in range(3)]
    assert sum(spec.name.startswith("async1-") for spec in last) == 1
    for spec in last:
        assert spec.overrides["optim.dense.base_learning_rate"] == 0.002
        assert spec.overrides["optim.tables.base_learning_rate"] == 0.0125
    columns = outcome.table.columns
    rows = {
        (row[0], row[1], row[2]): dict(zip(columns, row, strict=True))
        for row in outcome.table.rows
        if row[3] == "click/logloss"
    }
    assert rows["synchronous", None, "nothing"]["deviation"] == 0
    assert rows["synchronous", None, "seed"]["deviation"] == pytest.approx(1e-4)
    assert rows["asynchronous", 5, "schedule"]["deviation"] == pytest.approx(4e-5)
    assert rows["asynchronous", 5, "both"]["deviation"] == pytest.approx(1.4e-4)
    assert rows["asynchronous", 1, "schedule"]["deviation"] is None
    assert rows["asynchronous", 5, "both"]["mean staleness"] == 4
    both = rows["asynchronous", 5, "both"]
    assert both["low"] < both["deviation"] < both["high"]
    assert "between schedules alone and 0.00014 (" in outcome.conclusion[0]
    assert "runs are equal, which is determinism of the program" in outcome.conclusion[1]
    assert "does not reproduce another system" in outcome.conclusion[1]
    assert "One asynchronous worker is equal to the synchronous runs" in outcome.notes[-1]
    assert [p.title for p in outcome.panels][-1] == "staleness"


def test_identical_runs_that_are_not_equal_are_not_called_determinism():
    def rounded(spec):
        result = answer(spec)
        metrics = {
            name: value + 1e-6 * ("-1" in spec.name) for name, value in result.metrics.items()
        }
        return dataclasses.replace(result, metrics=metrics)

    options = stability.Options(runs=2, workers=(), tune_rounds=0)
    context = Context(tiny.config(), options, lambda text: None)
    outcome, _ = drive(stability.runs(context), rounded)
    assert "Identical synchronous runs are not equal on this device" in outcome.conclusion[1]
    assert "determinism" not in outcome.conclusion[1]
    assert "simulation" not in " ".join([*outcome.conclusion, *outcome.notes])
    outcome, _ = drive(stability.runs(context), answer)
    assert "which is determinism" in outcome.conclusion[1]


def test_runs_of_one_execution_have_no_throughput():
    def without_rate(spec):
        return dataclasses.replace(answer(spec), examples_per_second=0.0)

    options = stability.Options(runs=2, workers=(5,), tune_rounds=0)
    context = Context(tiny.config(), options, lambda text: None)
    outcome, _ = drive(stability.runs(context), without_rate)
    place = outcome.table.columns.index("examples/s")
    assert {row[place] for row in outcome.table.rows} == {None}


def test_a_stopped_study_has_a_table_of_the_runs_that_have_finished():
    options = stability.Options(runs=2, workers=(1, 5), tune_rounds=0)
    context = Context(tiny.config(), options, lambda text: None)
    counts = rows_when_stopped(lambda: stability.runs(context), answer)
    assert counts[0] == 0
    assert 0 < counts[-3] <= counts[-1]


def test_a_search_ends_where_no_neighbour_is_better_and_failed_rates_are_worst():
    def failing(spec):
        result = answer(spec)
        is_high = spec.overrides["optim.dense.base_learning_rate"] > 0.0015
        return RunResult(spec, "failed", error="nan") if is_high else result

    sides = {"sync": RunSpec("sync")}
    fields = flatten(resolved(tiny.config())["config"])
    search = tuning.tuned(sides, fields, factor=2.0, rounds=9)
    points, batches = drive(search, failing)
    assert points == {"sync": (0, -2)}
    assert len(batches) == 3
    points, batches = drive(tuning.tuned(sides, fields, factor=2.0, rounds=0), failing)
    assert (points, batches) == ({"sync": (0, 0)}, [])


def test_a_search_finds_the_highest_metric_where_higher_is_better():
    def ranked(spec):
        result = answer(spec)
        return dataclasses.replace(
            result, metrics={"click/ndcg@10": 1 - result.metrics["click/logloss"]}
        )

    fields = flatten(resolved(tiny.config())["config"])
    search = tuning.tuned({"sync": RunSpec("sync")}, fields, factor=2.0, rounds=9)
    assert drive(search, ranked)[0] == {"sync": (1, -2)}


@pytest.mark.parametrize(("steps", "expected"), [(0, None), (40, 40), (100, None), (200, None)])
def test_runs_are_no_longer_than_those_of_the_config(steps, expected):
    options = stability.Options(runs=2, workers=(5,), steps=steps, tune_rounds=0)
    _, batches = drive(stability.runs(Context(tiny.config(), options, lambda text: None)), answer)
    assert {spec.overrides.get("num_steps") for spec in batches[-1]} == {expected}


def test_more_workers_than_steps_are_rejected():
    context = Context(tiny.config(), stability.Options(workers=(101,)), lambda text: None)
    with pytest.raises(InputError, match=r"--workers: must be at most .* which is 100: found 101"):
        drive(stability.runs(context), answer)
