"""Each study on real runs, small, and one that is killed at a random moment."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import quick_compile
from checkout import HELPERS, ROOT
from driving import check_texts

from jaxrank import cli
from jaxrank.studies.registry import STUDIES

pytestmark = pytest.mark.slow
CONFIG = f"--config={HELPERS / 'study_config.py'}"
SECONDS = "--seconds=0.05"
FLAGS = {
    "stability": ["--runs=2", "--workers=3", "--steps=4", "--tune-rounds=0"],
    "batch-size": [
        *("--batch-sizes=32,64", "--base=64", "--rules=linear", "--warmups=0", "--averages=0"),
        *("--runs=1", "--workers=2", "--tune-rounds=0", "--examples=256"),
    ],
    "scaling": [SECONDS, "--devices=2", "--topologies=v3-8", "--measured-batch-size=16"],
    "input": [
        *(SECONDS, "--compressions=none,lz4", "--block-sizes=256", "--workers=0"),
        *("--prefetch=0,4", "--repeats=1"),
    ],
    "cost": [SECONDS, "--topologies=v3-8", "--measured-rows=256"],
    "ablation": ["--group=ids=c*", "--runs=2", "--steps=4"],
    "sweep": [
        *("--range=optim.dense.base_learning_rate=log:1e-4..1e-2", "--points=2"),
        *("--halving=2", "--finalists=1", "--runs=2"),
    ],
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Lets workers compile quickly."""
    monkeypatch.setenv("XLA_FLAGS", quick_compile.XLA_FLAGS)


def executed(name, workdir):
    """Runs a study and returns the content of its JSON and its rows as dictionaries."""
    cli.run(["study", name, CONFIG, f"--workdir={workdir}", *FLAGS[name]])
    outcome = json.loads((workdir / f"{name}.json").read_text())
    assert not outcome["failed"]
    check_texts(outcome["conclusion"], outcome["notes"])
    for kind in ("csv", "png", "svg"):
        assert (workdir / f"{name}.{kind}").stat().st_size
    table = outcome["table"]
    return outcome, [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_stability_repeats_identical_runs_and_shares_their_data(tmp_path):
    outcome, rows = executed("stability", tmp_path)
    losses = [row for row in rows if row["metric"] == "click/logloss"]
    assert [(row["workers"], row["varies"], row["runs"]) for row in losses] == [
        (None, "nothing", 2),
        (None, "seed", 2),
        (3, "schedule", 2),
        (3, "both", 2),
    ]
    assert losses[0]["deviation"] == 0
    assert min(row["deviation"] for row in losses[1:]) > 0
    assert losses[2]["mean staleness"] >= 1
    assert "Identical synchronous runs are equal" in outcome["conclusion"][1]
    assert "reproduce another system" in outcome["conclusion"][1]
    assert (tmp_path / "data").is_dir()  # of all runs
    folders = list((tmp_path / "runs").glob("sync-*"))
    assert folders
    for folder in folders:
        assert not (folder / "train" / "data").exists()
        assert not (folder / "train" / "checkpoints").exists()
        assert (folder / "train" / "metrics.jsonl").exists()
        command = (folder / "command.txt").read_text()
        assert f"--config.data.store={tmp_path / 'data'}" in command


def measures_batch_sizes(rows):
    assert {row["batch size"]: row["steps"] for row in rows} == {32: 8, 64: 4}
    assert {row["training"] for row in rows} == {"synchronous", "asynchronous, 2 workers"}


def measures_devices(rows):
    measured = [row["devices"] for row in rows if row["how"] == "measured"]
    assert measured == [2, 2]  # strong and weak, which are one run for the fewest
    assert {row["machine"] for row in rows if row["how"] == "estimated"} == {"v3-8"}


def measures_settings(rows):
    assert {row["setting"] for row in rows} >= {"compression", "block size", "workers", "prefetch"}


def compares_costs(rows):
    ways = [row["how"] for row in rows if row["table"] == "throughput and cost"]
    assert sorted(ways) == ["estimated", "extrapolated", "measured"]


def searches(rows):
    assert {row["point"] for row in rows} >= {"config"}


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("batch-size", measures_batch_sizes),
        ("scaling", measures_devices),
        ("input", measures_settings),
        ("cost", compares_costs),
        ("sweep", searches),
    ],
)
def test_a_small_study_has_the_table_of_its_real_runs(name, holds, tmp_path):
    _, rows = executed(name, tmp_path)
    holds(rows)


def test_a_study_killed_at_a_random_moment_ends_with_the_same_table(tmp_path):
    began = time.monotonic()
    whole, rows = executed("ablation", tmp_path / "whole")
    assert {row["left out"] for row in rows} == {"ids"}
    moment = random.uniform(0, time.monotonic() - began)
    print(f"killed after {moment:.2f} s")
    workdir = tmp_path / "killed"
    command = [sys.executable, "-m", "jaxrank", "study", "ablation", CONFIG, *FLAGS["ablation"]]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}"}
    process = subprocess.Popen([*command, f"--workdir={workdir}"], env=env)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed, _ = executed("ablation", workdir)
    assert killed["table"] == whole["table"]


def test_every_study_has_a_small_version():
    assert FLAGS.keys() == STUDIES.keys()
