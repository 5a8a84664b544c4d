"""Tests of the comparison of runs against scikit-learn and a bootstrap over examples."""

import copy
import json
import math
import shutil

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny
from scipy import stats
from sklearn import metrics as sk

from jaxrank import cli
from jaxrank.data.prepare.passes import prepare
from jaxrank.errors import InputError
from jaxrank.evaluation import evaluate
from jaxrank.evaluation.comparison.compare import compare
from jaxrank.evaluation.comparison.text import describe
from jaxrank.evaluation.gate import text as gate_text
from jaxrank.evaluation.gate.judge import judge

pytestmark = pytest.mark.usefixtures("shared_programs")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs(variants):
    return [str(variants.unbroken(name)[0]) for name in ("plain", "average")]


@pytest.fixture(scope="module")
def scored(runs, tmp_path_factory):
    """Labels and predictions of clicks of both runs, and the column c1, by numbers of rows."""
    folder = tmp_path_factory.mktemp("predictions")
    tables = []
    for i, run in enumerate(runs):
        evaluate.predict(run, output=str(folder / f"{i}.parquet"))
        tables.append(pq.read_table(folder / f"{i}.parquet"))
    labels = tables[0]["label_click"].to_numpy().astype(float)
    predicted = [table["predicted_click"].to_numpy() for table in tables]
    return labels, predicted, np.array(tables[0]["c1"].to_pylist(), object)


def losses(labels, predicted):
    return -np.where(labels > 0, np.log(predicted), np.log1p(-predicted))


def test_differences_have_the_intervals_of_paired_examples(runs, scored):
    labels, predicted, _ = scored
    result = compare(runs, report=lambda _: None)
    (differences,) = result.differences
    for run, p in zip(result.runs, predicted, strict=True):
        assert run["metrics"]["click"]["logloss"] == pytest.approx(sk.log_loss(labels, p), rel=1e-5)
    paired = losses(labels, predicted[1]) - losses(labels, predicted[0])
    entry = differences["click"]["logloss"]
    assert entry["difference"] == pytest.approx(paired.mean(), rel=1e-3)
    half = (entry["high"] - entry["low"]) / 2
    assert half == pytest.approx(1.96 * paired.std() / np.sqrt(len(paired)), rel=1e-3)
    r = np.random.default_rng(0)
    draws = []
    for _ in range(200):
        rows = r.integers(len(labels), size=len(labels))
        a, b = (sk.roc_auc_score(labels[rows], p[rows]) for p in predicted)
        draws.append(b - a)
    entry = differences["click"]["auc"]
    assert (entry["high"] - entry["low"]) / 2 == pytest.approx(1.96 * np.std(draws), rel=0.2)
    assert [entry["field"] for entry in result.config] == ["ema_decay"]
    assert result.config[0]["values"] == ["0.0", "0.9"]


def test_each_value_of_a_column_is_compared(runs, scored):
    labels, predicted, column = scored
    result = compare(runs, by="c1", report=lambda _: None)
    assert "click, logloss by c1" in describe(result)
    ranked = copy.deepcopy(result)
    ranked.runs[0]["metrics"]["click"]["logloss"] = math.nan
    assert "click, AUC by c1" in describe(ranked)
    assert result.by["column"] == "c1"
    values = result.by["values"]
    assert sum(entry["examples"] for entry in values) == len(labels)
    lows = [entry["differences"][0]["click"]["logloss"]["low"] for entry in values]
    defined = [low for low in lows if not math.isnan(low)]
    assert defined == sorted(defined, reverse=True)  # the surely worst first
    assert len(defined) > 1
    assert np.isnan(lows[len(defined) :]).all()
    small = [entry["examples"] for entry in values[len(defined) :]]
    assert small == sorted(small, reverse=True)
    rows = column == values[0]["value"]
    a, b = (losses(labels[rows], p[rows]) for p in predicted)
    entry = values[0]["differences"][0]["click"]["logloss"]
    assert entry["difference"] == pytest.approx((b - a).mean(), rel=1e-3)
    means = [run["metrics"]["click"]["logloss"] for run in values[0]["runs"]]
    assert means == pytest.approx([a.mean(), b.mean()], rel=1e-5)


def test_the_command_prints_and_draws(runs, capsys, tmp_path):
    picture = tmp_path / "curves.png"
    cli.run(["compare", *runs, "--by=c1", f"--picture={picture}", "--json"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["runs"][1]["metrics"]["click/auc"] > 0
    assert result["differences"][0]["click"]["auc"].keys() == {"difference", "low", "high"}
    assert picture.read_bytes().startswith(PNG)
    assert "  B - A" in err
    assert "click, logloss by c1" in err
    assert "  ema_decay: A 0.0  B 0.9" in err


def test_a_gate_counts_the_slices_that_it_does_not_judge(runs, monkeypatch):
    monkeypatch.setattr("jaxrank.evaluation.comparison.compare._MAX_SLICES", 3)
    gate = judge(runs[1], fail_if=["click/logloss > 9"], by="c1")
    (verdict,) = gate.verdicts
    assert verdict.slices["judged"] + verdict.slices["undefined"] == 3
    assert verdict.slices["others"] > 0
    assert (
        f"and {verdict.slices['others']:,} smaller ones were not looked at"
        in gate_text.describe(gate)
    )


def test_a_gate_judges_the_paired_difference_by_its_interval(runs, scored):
    labels, predicted, _ = scored
    first, second = (losses(labels, p) for p in predicted)
    relative = (second - first).mean() / first.mean()
    half = 1.96 * (second - first).std() / np.sqrt(len(labels)) / first.mean()
    cases = [
        (-1.5, "surely", True), (-0.5, "surely", False), (-0.5, "likely", True),
        (0.5, "likely", False), (0.5, "possibly", True), (1.5, "possibly", False),
    ]  # fmt: skip
    conditions = [
        f"click/logloss > {100 * (relative + shift * half):+.9f}% {how}" for shift, how, _ in cases
    ]
    gate = judge(runs[1], against=runs[0], fail_if=conditions, by="c1")
    assert [verdict.holds for verdict in gate.verdicts] == [holds for *_, holds in cases]
    assert gate.verdicts[0].value == pytest.approx(relative, rel=1e-3)
    assert not gate.passes
    assert gate.evaluation.metrics["click"]["logloss"] == pytest.approx(second.mean(), rel=1e-5)
    # All intervals of slices hold together with 95% confidence.
    alone = compare(runs, by="c1", report=lambda _: None).by["values"]
    wider = stats.norm.ppf(1 - 0.025 / len(alone)) / stats.norm.ppf(0.975)
    failed = {str(entry["value"]) for entry in gate.verdicts[3].slices["failed"]}
    wide = {str(entry["value"]): entry for entry in gate.comparison.by["values"]}
    assert len(wide) == len(alone)
    for entry in alone:
        gated = wide[str(entry["value"])]
        a, b = (e["differences"][0]["click"]["logloss"] for e in (entry, gated))
        if entry["examples"] >= 10:
            assert b["high"] - b["low"] == pytest.approx(wider * (a["high"] - a["low"]))
        base = gated["runs"][0]["metrics"]["click"]["logloss"]
        worse = b["difference"] / base > relative + 0.5 * half
        assert (str(entry["value"]) in failed) == worse


def test_a_gate_that_fails_ends_with_status_1_and_the_reason(runs, capsys):
    command = ["evaluate", f"--workdir={runs[1]}", "--json", "--fail-if=click/auc > 0.99"]
    cli.run(command)
    out, err = capsys.readouterr()
    assert json.loads(out)["gate"]["passed"]
    assert "gate passes  click/auc > 0.99: 0." in err
    with pytest.raises(cli.FailedCheckError, match="gate failed: click/auc < 0.99: 0.*fulfils it"):
        cli.run([*command, "--fail-if=click/auc < 0.99", f"--against={runs[0]}"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["error"].startswith("the gate failed: click/auc < 0.99")
    assert [c["passed"] for c in result["gate"]["conditions"]] == [True, False]
    assert result["comparison"]["runs"][0]["metrics"]["click/auc"] > 0
    assert "gate FAILS   click/auc < 0.99" in err
    for flag, message in (
        (f"--against={runs[1]}/.", "must name another run"),
        ("--follow", "--fail-if: must be used without --follow"),
    ):
        with pytest.raises(InputError, match=message):
            cli.run([*command, flag])


def test_other_rows_are_rejected(runs, tmp_path, tiny_store):
    workdir = tmp_path / "run"
    for name in ("config.json", "schema.json", "placement.json", "checkpoints"):
        copy = shutil.copytree if name == "checkpoints" else shutil.copyfile
        workdir.mkdir(exist_ok=True)
        copy(f"{runs[0]}/{name}", workdir / name)
    config = json.loads((workdir / "config.json").read_text())
    for seed, rows, message in (
        (3, 999, r"same examples in the same order: found 1,000 and 999\."),
        (4, 1000, r"found other labels of task 'click' in \d+ of 1,000 rows, first in row \d+\."),
    ):
        c = tiny.config()
        c.source.rows.valid = rows
        c.source.seed = seed
        store = tmp_path / f"store {seed}"
        prepare(
            c.features.to_dict(), c.source.to_dict(), store, vocabularies=str(tiny_store),
            report=lambda _: None,
        )  # fmt: skip
        config["data"]["store"] = str(store)
        (workdir / "config.json").write_text(json.dumps(config))
        with pytest.raises(InputError, match=message):
            _compared_without_check(runs[0], str(workdir))


def _compared_without_check(first, second):
    """Compares runs, the second of which reads other data than it was trained on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.SavedRun, "check_training_data", lambda *_: None)
        return compare([first, second], report=lambda _: None)


def test_runs_are_needed(runs, tmp_path):
    with pytest.raises(InputError, match="at least two runs must be given: found 1"):
        compare(runs[:1])
    with pytest.raises(InputError, match="each run must be given once: found"):
        compare([runs[0], f"{runs[0]}/."])
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        compare([runs[0], str(tmp_path)])
