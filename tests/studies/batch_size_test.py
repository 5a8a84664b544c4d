"""The study of batch sizes: which runs it asks for, and what it concludes."""

import dataclasses
import math

import pytest
import tiny
from driving import drive, resolved, rows_when_stopped

from jaxrank import config
from jaxrank.config_files import flatten, overridden
from jaxrank.errors import InputError
from jaxrank.studies import batch_size, batch_size_cases
from jaxrank.studies.study import Context, RunResult
from jaxrank.validate import parse

LOSS = "click/logloss"


def answer(spec):
    """A loss that grows with the batch, least with rule sqrt, a warm-up and averaged weights."""
    if spec.kind == "resolve":
        return RunResult(spec, "done", values=resolved(tiny.config()))
    o = spec.overrides
    loss = 0.4 + 1e-3 * o["seed"] if "seed" in o else 0.4
    loss *= 1 + 1e-3 * math.log2(o["batch_size"] / 128) * (
        1
        + (o["optim.dense.scaling"] != "sqrt" or o["optim.tables.scaling"] != "sqrt")
        - 0.5 * (o["optim.dense.warmup_steps"] > 0)
        - 0.25 * (o["ema_decay"] > 0)
        + 3 * (spec.kind == "asynchronous")
    )
    metrics = {"click/logloss": loss, "click/auc": 1 - loss}
    return RunResult(spec, "done", metrics, 1.0, 1e6 * min(1, o["batch_size"] / 512))


def test_the_best_and_the_rule_of_the_config_run_with_all_seeds_at_equal_examples():
    options = batch_size.Options(
        batch_sizes=(64, 128, 512, 1024), base=128, rules=("none", "sqrt"), workers=4, runs=3
    )
    outcome, batches = drive(
        batch_size.runs(Context(tiny.config(), options, lambda text: None)), answer
    )
    for overrides in (spec.overrides for batch in batches[1:] for spec in batch):
        assert overrides["num_steps"] * overrides["batch_size"] == 12_288  # of 12,800
        assert overrides["steps_per_execution"] == (2 if overrides["batch_size"] <= 128 else 1)
        assert overrides["optim.tables.base_batch"] == 128
    for batch in batches[1:]:
        config.check(overridden(tiny.config(), batch[-1].overrides))
    first, others, parallel = batches[-3:]
    assert len(first) == 4 + 3 * 3 * 4  # the rules of 64, 512 and 1,024; one of 128
    assert {spec.overrides["seed"] for spec in others} == {1, 2}
    # The best, the best without averages and the config's, of which some are the same.
    assert len(others) == 2 * (2 + 1 + 3 + 3)
    assert [spec.kind for spec in parallel] == ["asynchronous"] * 12
    assert {spec.settings["workers"] for spec in parallel} == {4}
    rows = {row[:6]: row for row in outcome.table.rows}
    rule = "sqrt+sqrt_linear"
    row = dict(zip(outcome.table.columns, rows["synchronous", 1024, 12, rule, 0, 0], strict=True))
    assert row["seeds"] == 3
    assert row["click/logloss against base, %"] == pytest.approx(0.1 * 3 * 2)
    assert row["click/logloss"] == pytest.approx(0.401 * 1.006)
    assert rows["synchronous", 1024, 12, "none", 0, 0][6] == 1
    first, second = outcome.conclusion
    assert "click/logloss at batch size 1,024 changes against 128 by +0.600% (" in first
    assert f"with the config's rule {rule}, by +0.075% (" in first
    assert "and by +1.5" in first
    assert "with 4 asynchronous workers." in first
    assert "learning rates that were searched at 128 only" in second
    best, single, saturation = outcome.notes
    assert "The best values at 1,024 are sqrt, warm-up 0.1, ema_decay 0.99." in best
    assert "without averaged weights, which need a second copy of the tables, are" in single
    assert "sqrt, warm-up 0.1: +0.150% (" in single
    assert "95% of its largest value at batch size 512" in saturation
    assert "--config.optim.dense.scaling=sqrt" in outcome.best_overrides
    assert "--config.batch_size=1024" in outcome.best_overrides


def test_the_highest_metric_is_best_where_higher_is_better():
    def ranked(spec):
        result = answer(spec)
        if spec.kind == "resolve":
            return result
        return dataclasses.replace(result, metrics={"click/ndcg@10": 1 - result.metrics[LOSS]})

    options = batch_size.Options(
        batch_sizes=(1024,), base=128, rules=("none", "sqrt"), workers=0, runs=2, tune_rounds=0
    )
    context = Context(tiny.config(), options, lambda text: None)
    outcome, batches = drive(batch_size.runs(context), ranked)
    assert "The best values at 1,024 are sqrt, warm-up 0.1, ema_decay 0.99." in outcome.notes[0]
    assert "--config.optim.dense.scaling=sqrt" in outcome.best_overrides
    finalists = {spec.name for spec in batches[-1] if "-1024-" in spec.name}
    assert "sync-1024-sqrt-warmup0.1-ema0.99-seed1" in finalists
    assert not any("-none-" in name for name in finalists)
    rows = [dict(zip(outcome.table.columns, row, strict=True)) for row in outcome.table.rows]
    rule = next(r for r in rows if r["rule"] == "none" and not r["warm-up"] and not r["ema"])
    change = rule["click/ndcg@10"] / 0.6 - 1  # the metric falls, which is worse
    assert rule["click/ndcg@10 against base, %"] == pytest.approx(100 * change)
    assert change < 0
    assert "click/ndcg@10 at batch size 1,024 changes against 128 by -" in outcome.conclusion[0]


def test_a_batch_that_the_shards_do_not_divide_is_rejected():
    options = batch_size.Options(batch_sizes=(128,), base=77)
    context = Context(tiny.config(), options, lambda text: None)
    with pytest.raises(InputError, match=r"multiples of data.shards=8: found 77"):
        next(batch_size.runs(context))  # before any run


def test_a_stopped_study_has_a_table_of_the_runs_that_have_finished():
    options = batch_size.Options(
        batch_sizes=(128, 256), base=128, rules=("sqrt",), workers=4, runs=2, tune_rounds=1
    )
    context = Context(tiny.config(), options, lambda text: None)
    counts = rows_when_stopped(lambda: batch_size.runs(context), answer)
    assert counts[0] == 0
    assert 0 < counts[-3] <= counts[-1]


def test_other_rules_and_batch_sizes_reuse_the_search_and_the_runs_at_the_base_batch():
    specs = []
    for sizes, rules in (((128, 512), ("none",)), ((128, 256, 512), ("linear", "sqrt"))):
        options = batch_size.Options(
            batch_sizes=sizes, base=128, rules=rules, workers=0, runs=1, averages=(0.0,)
        )
        context = Context(tiny.config(), options, lambda text: None)
        _, batches = drive(batch_size.runs(context), answer)
        specs.append({spec.name: spec for batch in batches for spec in batch})
    first, second = specs
    shared = first.keys() & second.keys()
    assert {"tune-sync-dense+0-tables+0", "sync-128-sqrt+sqrt_linear-warmup0-ema0-seed0"} <= shared
    assert all(first[name] == second[name] for name in shared)


def test_rates_of_the_config_are_those_at_the_base_batch():
    fields = flatten(resolved(tiny.config())["config"])  # base_batch 4,096
    actual = batch_size_cases.set_base_rates(fields, 1024)
    assert actual["optim.dense.base_learning_rate"] == pytest.approx(0.001 * 0.5)
    assert actual["optim.tables.base_learning_rate"] == pytest.approx(0.05 * 0.5)
    larger = batch_size_cases.set_base_rates(fields, 16384)
    assert larger["optim.tables.base_learning_rate"] == 0.2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"rules": ("sqrt", "linaer")},
            r"rules: must be one of .*'linaer'\. Did you mean 'linear'",
        ),
        ({"rules": ("sqrt+sqrt+none",)}, r"rules: must be RULE or DENSE\+TABLES"),
        ({"batch_sizes": ()}, r"batch_sizes: must be a list with an entry: found \(\)"),
        ({"batch_sizes": (128, 20_000)}, r"found 20,000, and runs of 12,800 examples"),
    ],
)
def test_options_that_make_no_study_are_rejected(options, message):
    def study():
        parsed = parse(batch_size.Options, options, "")
        drive(batch_size.runs(Context(tiny.config(), parsed, lambda text: None)), answer)

    with pytest.raises(InputError, match=message):
        study()
