"""Tests of progressive validation: each day is scored before any of it is trained on."""

import json
import math
from types import SimpleNamespace

import examples
import jax
import numpy as np
import pytest
from daily import CALL, DAYS, ROWS, config

from jaxrank import cli
from jaxrank import config as configs
from jaxrank import mesh as meshes
from jaxrank.build import Builder
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.evaluation import days, report
from jaxrank.evaluation import score as scoring
from jaxrank.features import PAD
from jaxrank.run import build
from jaxrank.step import prediction_weights
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def store(variants):
    return open_store(variants.store("days"))


def _lines(workdir, kind):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture(scope="module")
def finished(variants):
    workdir, result, _ = variants.unbroken("days")
    return workdir, result


def _expected_steps():
    """Counts the expected steps from the rows of each day.

    A day is scored after the last whole execution before its first example.
    """
    seen, steps = 0, []
    for day in DAYS[:-1]:
        seen += ROWS[day]
        steps.append(seen // CALL * 2)
    return steps


def test_each_day_is_scored_before_any_of_it_is_trained_on(store, finished):
    _, result = finished
    assert [score["day"] for score in result.days] == DAYS[1:]
    assert [score["step"] for score in result.days] == _expected_steps()
    # A model that learned from one day is wrong on the next. Only a model that had seen the day
    # would have a high AUC.
    for score in result.days:
        assert score["metrics"]["click"]["auc"] < 0.35
        assert score["metrics"]["click"]["examples"] == ROWS[score["day"]]

    # The same from what the batches hold.
    job = build(config(store), finished[0], lambda text: None)
    day_of = np.repeat(np.arange(len(DAYS)), list(ROWS.values()))
    read = np.concatenate([np.round(b.dense[:, :, 0] * 2**20).astype(int) for b in job.batches])
    job.checkpoints.close()
    last = len(read)
    for score in result.days:
        day, step = DAYS.index(score["day"]), score["step"]
        assert (day_of[read[:step]] < day).all()
        if step < last:
            assert (day_of[read[step : step + 2]] == day).any()


def test_a_progressive_run_equals_a_loop_by_hand(store, finished, tmp_path):
    _, result = finished
    job = build(config(store), tmp_path, lambda text: None)
    state = job.first_state(lambda text: None)
    steps, metrics = _expected_steps(), []
    for execution in range(1, steps[-1] // 2 + 1):
        batch = meshes.put_batch(next(job.batches), job.program.mesh, leading=1)
        state, _ = job.program.train(state, batch, np.int32(2))
        if execution * 2 in steps:
            split = store.split(f"train/{DAYS[1 + steps.index(execution * 2)]}")
            metrics.append(
                scoring.evaluate(
                    job.program.predictor, prediction_weights(state), split, 512
                ).metrics
            )
    job.batches.close()
    job.checkpoints.close()
    for score, expected in zip(result.days, metrics, strict=True):
        assert score["metrics"]["click"] == pytest.approx(expected["click"], rel=1e-5)


def test_the_result_is_the_mean_over_days_by_examples(finished):
    _, result = finished
    weights = [ROWS[day] for day in DAYS[1:]]
    for name in ("logloss", "auc", "normalized_entropy", "calibration"):
        values = [score["metrics"]["click"][name] for score in result.days]
        assert result.metrics["click"][name] == pytest.approx(np.average(values, weights=weights))
    assert result.metrics["click"]["examples"] == sum(weights)
    # The likelier label of each example has probability 0.9.
    assert result.best_possible["click"]["logloss"] == pytest.approx(-math.log(0.9))
    assert 0.68 < result.constant["click"]["logloss"] < math.log(2)


def test_one_program_scores_all_days(store, tmp_path):
    job = build(config(store), tmp_path, lambda text: None)
    weights = jax.device_get(prediction_weights(job.program.init()))
    shapes = set()
    for day in DAYS:
        batches = scoring.EvaluationBatches(
            job.open_split(f"train/{day}"),
            job.program.step_spec.embedding.layout,
            batch_size=512,
        )
        shapes |= {tuple(x.ids.shape for x in batch.lists.values()) for batch, _ in batches}
        plain = scoring.evaluate(job.program.predictor, weights, store.split(f"train/{day}"), 512)
        roomy = scoring.evaluate(
            job.program.predictor, weights, job.open_split(f"train/{day}"), 512
        )
        assert roomy.metrics["click"] == pytest.approx(plain.metrics["click"], rel=1e-5)
    job.checkpoints.close()
    assert len(shapes) == 1


def test_lists_that_are_long_on_one_day_have_room_on_that_day(store, tmp_path):
    # A group that is shuffled over all days would not be as full.
    c = config(store, batch_size=1024, data__valid="", steps_per_execution=1, log_every_steps=1)
    job = build(c, tmp_path, lambda text: None)
    batches = list(job.batches)
    job.checkpoints.close()
    day_of = np.repeat(np.arange(len(DAYS)), list(ROWS.values()))
    for batch in batches:
        read = np.round(batch.dense[0, :, 0] * 2**20).astype(int)
        (lists,) = batch.lists.values()
        assert (lists.ids != PAD).sum() == 4 * day_of[read].sum()
        assert not batch.dropped.any()


def test_the_command_line_reports_a_table_of_days(store, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "c.py"
    config.write_text("import daily\nfrom jaxrank.data.store.reader import open_store\n")
    with config.open("a") as file:
        file.write(f"get_config = lambda: daily.config(open_store({str(store.path)!r}))\n")
    workdir = "--workdir=run"
    cli.run(["train", f"--config={config}", workdir, "--json"])
    out, err = capsys.readouterr()
    assert err.endswith(f"{tmp_path / 'run' / 'report.html'}\n")
    assert "Means over 5 days" in (tmp_path / "run" / "report.html").read_text()
    result = json.loads(out.splitlines()[-1])
    assert [set(score) for score in result["days"]] == [{"day", "step", "metrics"}] * 5
    table = err.partition("Each day, scored before")[2].splitlines()
    rows = [line.split() for line in table if line.startswith("  2024-")]
    for row, score in zip(rows, result["days"], strict=True):
        metrics = score["metrics"]
        assert row[:3] == [score["day"], str(score["step"]), str(metrics["click/examples"])]
        assert row[3:5] == [f"{metrics['click/logloss']:.5f}", f"{metrics['click/auc']:.5f}"]
    mean = next(line.split() for line in table if line.startswith("  model"))
    assert mean[1] == f"{result['metrics']['click/logloss']:.5f}"
    with pytest.raises(InputError, match="--split: must be set"):
        cli.run(["evaluate", workdir])


def _planned(rows, batch, execution, steps, train="train", later=()):
    """Calls `plan_evaluations` with the first steps of days that are read in order."""
    names = [f"2024-05-{i + 1:02d}" for i in range(len(rows) + len(later))]
    split = SimpleNamespace(rows=sum(rows), days=tuple((n, 1) for n in names[: len(rows)]))
    whole = SimpleNamespace(days=tuple((n, 1) for n in names))
    store = SimpleNamespace(split=lambda name: whole)
    first = [sum(rows[:i]) // batch for i in range(len(rows))]
    sizes = dict(batch_size=batch, steps_per_execution=execution, num_steps=steps)
    return days.plan_evaluations(store, split, first, train=train, **sizes)


def test_days_that_begin_in_one_call_are_scored_together():
    planned = _planned((40, 3, 4, 40, 10), batch=2, execution=10, steps=49)
    assert planned == {20: "train/2024-05-02:2024-05-04", 40: "train/2024-05-05"}


def test_a_run_that_ends_within_a_day_is_scored_on_the_next_one():
    rows = (40, 40, 40)
    assert _planned(rows, 2, 4, steps=28) == {20: "train/2024-05-02", 28: "train/2024-05-03"}
    assert _planned(rows, 2, 4, steps=60)[40] == "train/2024-05-03"
    assert 60 not in _planned(rows, 2, 4, steps=60)
    assert _planned(rows, 2, 4, steps=60, later=(5, 5))[60] == "train/2024-05-04"
    assert _planned((40,), 2, 4, steps=20, later=(5,)) == {20: "train/2024-05-02"}


@pytest.mark.parametrize(
    ("rows", "steps", "message"),
    [
        ((40, 40), 41, r"num_steps must be at most 40.* 80 examples.*found 41"),
        (
            (7, 40),
            8,
            r"2024-05-01, must .* = 8 examples before 2024-05-02 .*found 6",
        ),
        ((40,), 20, r"'train' has only 2024-05-01"),
    ],
)
def test_days_that_cannot_be_scored_in_time_are_rejected(rows, steps, message):
    with pytest.raises(InputError, match=message):
        _planned(rows, batch=2, execution=4, steps=steps)


def test_a_day_without_both_labels_has_no_part_in_the_mean_auc():
    def day_metrics(auc, examples):
        return {"click": {"auc": auc, "examples": examples}, "buy": {"auc": 0.5, "examples": 1}}

    mean = days.mean([day_metrics(0.6, 10), day_metrics(math.nan, 1000), day_metrics(0.9, 20)])
    assert mean["click"] == {"auc": pytest.approx(0.8), "examples": 1030}
    assert mean["buy"] == {"auc": 0.5, "examples": 3}
    assert math.isnan(days.mean([day_metrics(math.nan, 5)])["click"]["auc"])


def test_a_day_that_is_scored_again_has_its_last_score():
    scores = days.DayScores()
    scores.add(4, "2024-05-03", {"click": {"auc": 0.1}})
    scores.add(2, "2024-05-02", {"click": {"auc": 0.2}})
    scores.add(6, "2024-05-03", {"click": {"auc": 0.3}})
    kept = days.DayScores.from_state(json.loads(json.dumps(scores.to_state())))
    assert [(s["day"], s["step"]) for s in kept.to_state()] == [
        ("2024-05-02", 2),
        ("2024-05-03", 6),
    ]


def test_the_best_possible_is_of_tasks_whose_truth_every_day_has(store, monkeypatch):
    def reference(split, schema):
        constant = {task: {"logloss": 0.5, "examples": 9.0} for task in ("click", "buy")}
        lacking = {DAYS[2]: ["buy"], DAYS[3]: ["buy", "click"]}.get(split.name[-10:], [])
        known = {task: x for task, x in constant.items() if task not in lacking}
        return scoring.Reference(constant=constant, best_possible=known or None)

    def references(*chosen):
        scores = [dict(day=day, step=2, metrics={}) for day in chosen]
        return days.references(store, "train", scores)

    monkeypatch.setattr(days, "reference", reference)
    assert set(references(DAYS[0], DAYS[1]).best_possible) == {"click", "buy"}
    assert set(references(DAYS[0], DAYS[2]).best_possible) == {"click"}
    assert set(references(DAYS[2], DAYS[0]).best_possible) == {"click"}
    assert references(DAYS[0], DAYS[3]).best_possible is None
    assert set(references(DAYS[0], DAYS[3]).constant) == {"click", "buy"}


@pytest.mark.parametrize(("order", "steps"), [("shuffled", 12), ("days", 11)])
def test_an_epoch_takes_its_examples_and_days_in_turn_do_not_begin_again(store, order, steps):
    c = config(
        store, data__order=order, data__valid="valid", steps_per_execution=4, log_every_steps=4
    )
    c.batch_size = 100
    builder = Builder(c, examples.small_schema())
    assert builder.run_schedule(1199).num_steps == steps
    assert builder.run_schedule(1200).num_steps == 12
    assert builder.run_schedule(1201).num_steps == (13 if order == "shuffled" else 12)
    assert builder.run_schedule(10).num_steps == 1
    assert builder.run_schedule(1301).eval_every == 16  # whole executions
    # The number of steps follows from the decimal number, which no binary float equals.
    c.steps_per_execution = c.log_every_steps = 1
    c.batch_size = 10
    for epochs, exact in ((0.07, 7), (0.29, 29), (0.55, 55), (1.1, 110)):
        c.num_epochs = epochs
        assert builder.run_schedule(1000).num_steps == exact


@pytest.mark.parametrize("field", ["early_stopping_patience", "reduce_lr_patience"])
def test_patience_without_evaluations_is_rejected(store, field):
    c = config(store, data__order="shuffled", data__valid="")
    c.eval[field] = 2
    with pytest.raises(
        InputError, match=rf"data.valid: must name a split, because eval.{field} .* eval.{field}=2"
    ):
        configs.check(c)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__order": "shuffled"}, r"data\.valid = 'next_day' must have data\.order = 'days'"),
        ({"eval__every_steps": 4}, r"eval\.every_steps = 0.*found 'days' and 4"),
        ({"data__order": "day"}, r"data\.order: must be one of 'shuffled', 'days': found 'day'"),
        ({"num_epochs": 0.0, "num_steps": 54}, r"num_steps must be at most 51"),
        ({"num_epochs": 2.0}, r"num_steps must be at most 51.*found 100 steps"),
        ({"data__train": "train/2024-06-01"}, r"2024-06-01"),
    ],
)
def test_a_config_that_asks_for_days_and_cannot_have_them_is_rejected(
    store, tmp_path, changes, message
):
    with pytest.raises(InputError, match=message):
        train(config(store, **changes), tmp_path, report=lambda text: None)


def test_early_stopping_watches_the_scores_of_days(store, tmp_path):
    c = config(store, eval__early_stopping_patience=1, eval__metric="click/auc")
    result = train(c, tmp_path, report=lambda text: None)
    aucs = [score["metrics"]["click"]["auc"] for score in result.days]
    worse = [i for i in range(1, len(aucs)) if aucs[i] <= max(aucs[:i])]
    assert len(aucs) == worse[0] + 1 if worse else len(aucs) == 5
    assert result.checkpoint_step == result.days[int(np.argmax(aucs))]["step"]
    assert "Each day" in report.format_training(result, tmp_path)
