"""The board of models chooses by the validation split alone, and reuses finished runs."""

import argparse

import pytest

from benchmarks.quality import board
from jaxrank.config import check
from jaxrank.config_files import load, override_flags
from jaxrank.errors import InputError


def runner(folder, tunings=4, seeds=3):
    return board.Runner(argparse.Namespace(workdir=folder, tunings=tunings, seeds=seeds))


@pytest.fixture
def calls(monkeypatch):
    """Runs of jaxrank. The validation AUC falls with the dropout, the test AUC rises with it."""
    executed = []

    def execute(self, workdir, model, settings, split):
        executed.append((model, settings, split))
        dropout, is_valid = settings.get("model.dropout", 0.2), split == "valid"
        auc = (1 - dropout if is_valid else dropout) + settings["seed"] / 100
        return {"auc": auc, "logloss": 1 - auc}

    monkeypatch.setattr(board.Runner, "_jaxrank", execute)
    return executed


def test_the_best_of_the_validation_split_is_tested_once_per_seed(tmp_path, calls):
    entry = runner(tmp_path).entry("gdcn")
    tuned = [settings for _, settings, split in calls if split == "valid"]
    tested = [settings for _, settings, split in calls if split == "test"]
    best = min(settings.get("model.dropout", 0.2) for settings in tuned)
    assert len(tuned) == entry.tunings == 4
    assert {settings["seed"] for settings in tuned} == {0}
    assert [settings["seed"] for settings in tested] == [1, 2, 3]
    assert {settings.get("model.dropout", 0.2) for settings in tested} == {best}
    assert entry.tests[2]["auc"] == pytest.approx(best + 0.02)

    calls.clear()
    more = runner(tmp_path, seeds=5).entry("gdcn")
    assert [settings["seed"] for _, settings, _ in calls] == [4, 5]
    assert more.chosen == entry.chosen
    lines = board.rows({"gdcn": more, "qnn": runner(tmp_path, seeds=5).entry("qnn")})
    assert lines[1][:3] == ["gdcn", "4", "5"]
    difference = runner(tmp_path).entry("qnn").tests[1]["auc"] - more.tests[1]["auc"]
    assert lines[2][6].startswith(f"{difference:+.5f}")
    assert "another split" in lines[3][0]


def test_results_of_other_settings_are_rejected(tmp_path, calls):
    runner(tmp_path).run("gdcn", "point-1", {"model.dropout": 0.1}, 0, "valid")
    with pytest.raises(InputError, match=r"dropout': 0\.3.*dropout': 0\.1"):
        runner(tmp_path).run("gdcn", "point-1", {"model.dropout": 0.3}, 0, "valid")


def test_points_of_every_model_are_valid_configs(tmp_path):
    for model in board.RANGES:
        points = runner(tmp_path, tunings=12).points(model)
        assert len(points) == (1 if model == "defaults" else 12)
        assert points[0] == {}
        name = "dcn_v2" if model == board.PEER else model
        check(load(f"{board.CONFIG}:{name}", override_flags(points[-1])))
    assert runner(tmp_path, tunings=5).points("qnn") == runner(tmp_path, 12).points("qnn")[:5]
