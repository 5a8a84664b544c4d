"""The study of searches: its ranges, rounds and finalists."""

import argparse
import dataclasses
import math

import pytest
import tiny
from driving import drive, resolved, rows_when_stopped

from jaxrank.config_files import overridden
from jaxrank.errors import InputError
from jaxrank.studies import registry, sweep
from jaxrank.studies.ranges import parse_ranges
from jaxrank.studies.study import Context, RunResult
from jaxrank.validate import parse

RATE = "optim.dense.base_learning_rate"
RANGES = [f"{RATE}=log:1e-4..1e-1", "batch_size=64|128|256", "model.mlp_units=(16,)|(32,16)"]


def answer(spec):
    """A loss that is least for a rate of 0.01, and falls with the examples."""
    if spec.kind == "resolve":
        return RunResult(spec, "done", values=resolved(tiny.config()))
    o = spec.overrides
    rate = o.get(RATE, 0.0003)
    if rate > 0.03:
        return RunResult(spec, "failed", error="loss is nan")
    loss = 0.4 + 0.01 * abs(math.log10(rate / 0.01)) + 0.001 * o["seed"] * (1 + rate)
    loss += 1 / (o["num_steps"] * o.get("batch_size", 128))
    return RunResult(spec, "done", {"click/logloss": loss, "click/auc": 1 - loss}, 1.0, 1.0)


def driven(answer=answer, **options):
    parsed = parse(sweep.Options, options, "")
    context = Context(tiny.config(seed=0), parsed, lambda text: None)
    return drive(sweep.runs(context), answer)


def test_points_fall_as_examples_rise_and_finalists_run_with_equal_new_seeds():
    outcome, batches = driven(range=RANGES, points=32, halving=4, finalists=2, runs=3)
    _, first, second, last = batches
    for batch, share in ((first, 16), (second, 4), (last, 1)):
        for overrides in (spec.overrides for spec in batch):
            batch_size = overrides.get("batch_size", 128)
            examples = overrides["num_steps"] * batch_size
            assert abs(examples - 12_800 / share) <= batch_size / 2
    assert [len(batch) for batch in (first, second, last)] == [32, 8, 3 * 3]
    assert {spec.overrides["seed"] for spec in (*first, *second)} == {0}
    config = overridden(tiny.config(), first[0].overrides)
    assert config.optim.dense.base_learning_rate == first[0].overrides[RATE]
    assert config.model.mlp_units == first[0].overrides["model.mlp_units"]
    by_seed = {}
    for spec in last:
        by_seed.setdefault(spec.overrides["seed"], []).append(spec.name.partition("-of")[0])
    assert list(by_seed) == [1, 2, 3]
    assert len({tuple(names) for names in by_seed.values()}) == 1
    assert by_seed[1][0] == "config"

    rows = [dict(zip(outcome.table.columns, row, strict=True)) for row in outcome.table.rows]
    assert len(rows) == 1 + 32
    best = rows[0]
    distance = {r["point"]: abs(math.log10(r[RATE] / 0.01)) for r in rows}
    assert distance[best["point"]] == min(distance.values())
    config = next(row for row in rows if row["point"] == "config")
    assert (best["runs"], config["runs"], rows[-1]["runs"]) == (3, 3, 0)
    assert best["click/logloss against config"] == pytest.approx(
        best["click/logloss"] - config["click/logloss"]
    )
    assert best["low"] < best["click/logloss against config"] < best["high"] < 0
    assert f"--config.{RATE}={best[RATE]!r}" in outcome.best_overrides
    assert any(flag.startswith("--config.model.mlp_units=(") for flag in outcome.best_overrides)
    assert f"Of 2 finalists, {best['point']} has the lowest mean" in outcome.conclusion[0]
    assert "check it on other data" in outcome.conclusion[1]
    assert config["model.mlp_units"] == "(16,)"
    assert list(dict.fromkeys(outcome.panels[1].series[0].x)) == ["64", "128", "256"]
    assert [panel.x_scale for panel in outcome.panels] == ["log", "linear", "linear"]


def test_a_stopped_study_has_the_points_that_have_finished():
    options = sweep.Options(range=tuple(RANGES[1:]), points=4, finalists=2, runs=2)
    context = Context(tiny.config(seed=0), options, lambda text: None)
    counts = rows_when_stopped(lambda: sweep.runs(context), answer)
    assert counts[0] == 0
    assert counts[-2:] == [4, 4]


def test_points_are_within_their_ranges_distinct_and_first_of_a_larger_search():
    config = tiny.config()
    ranges = parse_ranges([*RANGES[:2], "model.cross_layers=int:1..3"], config, fixed=())
    points = sweep.drawn(ranges, 64, 5)
    rates = [point[RATE] for point in points.values()]
    assert 1e-4 <= min(rates) < 2e-4
    assert 0.05 < max(rates) <= 0.1
    assert sum(rate < 0.00316 for rate in rates) == pytest.approx(32, abs=2)  # log-uniform
    for path, values in (("batch_size", {64, 128, 256}), ("model.cross_layers", {1, 2, 3})):
        drawn = [point[path] for point in points.values()]
        assert set(drawn) == values
        assert min(map(drawn.count, values)) >= 18
    assert list(sweep.drawn(ranges, 8, 5).items()) == list(points.items())[:8]
    assert len(sweep.drawn(ranges[1:], 64, 5)) == 9
    assert sweep.fractions(64, 3, 4) == [1 / 16, 1 / 4]
    assert sweep.fractions(16, 3, 1) == [1]
    assert sweep.fractions(3, 3, 4) == []


def test_the_config_wins_where_no_point_is_better():
    outcome, _ = driven(range=[f"{RATE}=linear:1e-4..2e-4"], points=2)
    assert (
        "None of 2 finalists has a lower mean click/logloss than the config"
        in outcome.conclusion[0]
    )
    assert outcome.best_overrides == []


def test_the_highest_metric_wins_where_higher_is_better():
    def ranked(spec):
        result = answer(spec)
        loss = result.metrics.get("click/logloss", 0)
        metrics = {"click/ndcg@10": 1 - loss, "click/mrr": 1 - loss} if result.is_done else {}
        return dataclasses.replace(result, metrics=metrics)

    outcome, batches = driven(ranked, range=[f"{RATE}=1e-4|1e-3|1e-2"], points=9, finalists=1)
    best, config = (
        dict(zip(outcome.table.columns, r, strict=True)) for r in outcome.table.rows[:2]
    )
    assert outcome.best_overrides == [f"--config.{RATE}=0.01"]
    assert {spec.overrides.get(RATE) for spec in batches[-1]} == {None, 0.01}  # of the search
    change = best["click/ndcg@10"] - config["click/ndcg@10"]
    assert best["click/ndcg@10 against config"] == pytest.approx(change)
    assert change > 0
    assert f"{best['point']} has the highest mean click/ndcg@10, +0.0" in outcome.conclusion[0]
    assert outcome.panels[0].series[-1].y == pytest.approx([best["click/ndcg@10"]])
    outcome, _ = driven(ranked, range=[f"{RATE}=linear:1e-4..2e-4"], points=2)
    assert "has a higher mean click/ndcg@10 than the config" in outcome.conclusion[0]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([], "--range: must be given: found none"),
        (["optim.dense.learning=log:1..2"], r"optim.dense.learning: must be a field"),
        (["optim.dnse.learning=log:1..2"], r"optim.dnse: must be a field"),
        ([f"{RATE}=log:1e-1..1e-1"], r"low end below .* the empty range 1e-1\.\.1e-1"),
        ([f"{RATE}=log:0..1"], r"a log range must be above 0: found 0"),
        ([f"{RATE}=log:a..1"], r"ends must be numbers: found a, 1"),
        (["batch_size=int:1.5..3"], r"ends must be whole numbers: found 1.5, 3"),
        ([f"{RATE}=0.1"], r"must be log:LOW\.\.HIGH.*: found '0.1'"),
        ([RATE], r"FIELD=RANGE: found"),
        ([f"{RATE}=1|2", f"{RATE}=3|4"], "one range: found two"),
        (["num_steps=1|2"], "another field than num_steps"),
        ([f"{RATE}=linear:1..2"], r"valid point: found 16 points, .* The first: loss is nan"),
    ],
)
def test_ranges_that_make_no_study_are_rejected(ranges, message):
    with pytest.raises(InputError, match=message):
        driven(range=ranges)


def test_a_flag_of_single_entries_is_repeated():
    parser = argparse.ArgumentParser()
    registry.add_flags(parser, ["sweep"])
    for ranges in ([], RANGES):
        arguments = parser.parse_args([f"--range={text}" for text in ranges])
        assert registry.make_options(sweep.STUDY, vars(arguments)).range == tuple(ranges)
