"""The study of left-out features: its groups and pairs, and what it concludes."""

import dataclasses

import pytest
import tiny
from driving import drive, resolved, rows_when_stopped

from jaxrank.config_files import to_plain
from jaxrank.errors import InputError
from jaxrank.studies import ablation
from jaxrank.studies.execution.directories import Directories
from jaxrank.studies.execution.kinds import KINDS, RunInput
from jaxrank.studies.study import Context, RunResult, RunSpec
from jaxrank.validate import parse

FEATURES = ["f0", "f1", "f2", "c0", "c1", "l0", "l1"]


def answer(spec):
    """A loss that grows by 0.01 without c0 and falls by 0.001 without l1, and varies by seed."""
    if spec.kind == "resolve":
        values = resolved(tiny.config())
        values["config"]["embedding"]["dim"] = 16
        return RunResult(spec, "done", values={**values, "features": FEATURES})
    skip, seed = spec.overrides.get("features.skip", ()), spec.overrides["seed"]
    if "f2" in skip and seed == 1:
        return RunResult(spec, "failed", error="too hot")
    loss = 0.4 + 0.1 * seed + 0.01 * ("c0" in skip) - 0.001 * ("l1" in skip)
    loss += 1e-4 * seed * ("c0" in skip)
    metrics = {"click/logloss": loss, "click/auc": 1 - loss, "click/calibration": 1.0}
    return RunResult(spec, "done", metrics, 1.0, 1000.0)


def driven(config=None, **options):
    parsed = parse(ablation.Options, options, "")
    context = Context(config or tiny.config(), parsed, lambda text: None)
    return drive(ablation.runs(context), answer)


def test_groups_are_compared_with_the_full_model_seed_by_seed():
    config = tiny.config(seed=0)
    config.features.skip = ("other",)
    outcome, (_, specs) = driven(config, group=["ids=c*, l0", "l1", "f*"], runs=3)
    assert len(specs) == 3 * (1 + 1 + 1 + 3)
    assert {spec.overrides["seed"] for spec in specs} == {0, 1, 2}
    assert {spec.overrides["embedding.dim"] for spec in specs} == {16}  # open in the config
    skips = {spec.name: spec.overrides.get("features.skip") for spec in specs}
    assert skips["full-seed2"] is None
    assert skips["without-ids-seed0"] == ("other", "c0", "c1", "l0")
    assert skips["without-f1-seed0"] == ("other", "f1")
    rows = [dict(zip(outcome.table.columns, row, strict=True)) for row in outcome.table.rows]
    assert [row["metric"] for row in rows] == ["click/logloss"] * 5 + ["click/auc"] * 5
    assert [row["left out"] for row in rows[:5]] == ["ids", "f0", "f1", "f2", "l1"]
    ids, failed = rows[0], rows[3]
    assert ids["features"] == 3
    assert ids["difference"] == pytest.approx(0.0101)
    # Student's interval of 0.0100, 0.0101 and 0.0102; between the seeds it would be 0.25.
    assert ids["high"] - ids["difference"] == pytest.approx(4.302653 * 1e-4 / 3**0.5)
    assert rows[5]["difference"] == pytest.approx(-0.0101)
    assert (failed["runs"], failed["full"]) == (2, pytest.approx(0.5))  # of seeds 0 and 2
    assert "Leaving out ids changes click/logloss by +0.01 (" in outcome.conclusion[0]
    assert "the worst change of 5 groups, and leaving out l1 by -0.001" in outcome.conclusion[0]
    assert "leave them out as a group" in outcome.conclusion[1]
    assert outcome.notes[0] == "3 of 5 intervals of click/logloss contain 0."
    assert [panel.y_label for panel in outcome.panels] == [
        "change of click/logloss",
        "change of click/auc",
    ]


def test_each_feature_is_left_out_by_default():
    _, (_, specs) = driven(runs=2)
    assert {s.overrides.get("features.skip") for s in specs} == {None, *((f,) for f in FEATURES)}


def test_a_stopped_study_has_the_groups_that_have_finished():
    context = Context(tiny.config(), ablation.Options(runs=2), lambda text: None)
    counts = rows_when_stopped(lambda: ablation.runs(context), answer)
    # 1 run of the choice of fields, 2 with all features, and 2 for each feature.
    assert counts[:5] == [0, 0, 0, 0, 2]
    assert counts[-1] == 2 * len(FEATURES)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (["user=u*"], r"'u\*' must match a feature of the data: found none among c0, c1, f0"),
        (["all=f*,c*,l*"], r"leave a feature to train on: found all, which is all 7 features"),
        (["a=f0", "a=f1"], r"a name of its own: found 'a' again"),
        (["=f0"], r"NAME=PATTERN,PATTERN or a pattern of features: found '=f0'"),
        (["a="], r"NAME=PATTERN,PATTERN or a pattern of features: found 'a='"),
    ],
)
def test_groups_that_make_no_study_are_rejected(groups, message):
    with pytest.raises(InputError, match=message):
        driven(group=groups)


def test_a_group_of_another_form_is_rejected_before_any_run():
    context = Context(tiny.config(), ablation.Options(group=("a=",)), lambda text: None)
    with pytest.raises(InputError, match="found 'a='"):
        next(ablation.runs(context))


def test_runs_share_the_data_of_the_study(tmp_path):
    _, (_, specs) = driven(group=["a=c*"], runs=2)
    directories = Directories(tiny.config(), tmp_path, [])
    assert specs[-1].overrides["features.skip"] == ("c0", "c1")
    assert directories.reads_shared_data(specs[-1])
    more = RunSpec("more", {"features.keep": ("c0",)})
    assert not directories.reads_shared_data(more)
    for fields in ({"data.store": "prepared"}, {"data.direct": True}):  # data of their own
        assert not directories.reads_shared_data(RunSpec("named", fields))


def test_the_features_of_a_study_are_those_that_its_model_reads(store, tmp_path):
    config = tiny.config()
    config.features.skip = ("c1", "l*")
    run = RunInput(to_plain(config), str(store), {}, tmp_path)
    assert KINDS["resolve"](run)["values"]["features"] == ["f0", "f1", "f2", "c0"]


def test_the_group_that_the_model_needs_most_is_first_where_higher_is_better():
    def ranked(spec):
        result = answer(spec)
        metrics = {"click/ndcg@10": 1 - result.metrics.get("click/logloss", 0), "click/mrr": 0.5}
        return dataclasses.replace(result, metrics=metrics if result.is_done else {})

    options = ablation.Options(group=("c0", "l1", "f0"), runs=2)
    context = Context(tiny.config(), options, lambda text: None)
    outcome, _ = drive(ablation.runs(context), ranked)
    assert [row[0] for row in outcome.table.rows[:3]] == ["c0", "f0", "l1"]
    assert "Leaving out c0 changes click/ndcg@10 by -0.01" in outcome.conclusion[0]
    assert "worst change of 3 groups, and leaving out l1 by +0.001" in outcome.conclusion[0]
