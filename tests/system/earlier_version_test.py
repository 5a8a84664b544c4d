"""Runs of earlier versions: evaluated, scored, resumed and exported by this one.

Each archive has the raw data, the store and the run that a commit of this repository wrote, and the
metrics and predictions that it printed:

- `golden/run_1`: 28628166, with a store of format 3, other names of fields, and checkpoints without
  the biases of tasks. It had no bundles.
- `golden/run_2`: 9785d5de, with a store of format 5 and a bundle.

The run has 32 steps. Its last checkpoint and the mark that it has finished were removed.
"""

import csv
import json
import os
import tarfile

import jaxrank_serving
import numpy as np
import pyarrow.parquet as pq
import pytest
from checkout import ROOT

from jaxrank import cli

WRITTEN_IN = "/tmp/golden"


@pytest.fixture(params=["run_1", "run_2"])
def expected(request, tmp_path, monkeypatch):
    """Extracts an archive into the working directory, and returns what its version printed."""
    with tarfile.open(ROOT / "tests" / "golden" / f"{request.param}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    config = tmp_path / "run" / "config.json"
    text = config.read_text()
    assert WRITTEN_IN in text
    config.write_text(text.replace(WRITTEN_IN, str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    return json.loads((tmp_path / "expected.json").read_text())


def output(capsys, *argv):
    """Runs a command, and returns its result and what it reported."""
    capsys.readouterr()
    cli.run([*argv, "--json"])
    out, err = capsys.readouterr()
    return json.loads(out.splitlines()[-1]), err


def raw_requests():
    """Returns the raw values of the validation data by column, None where missing."""
    with open("valid.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = {name: [row[name] or None for row in rows] for name in ("user", "ad", "tags")}
    return columns | {"price": [float(row["price"]) if row["price"] else None for row in rows]}


def test_a_run_of_an_earlier_version_scores_as_it_did(expected, capsys):
    result, _ = output(capsys, "evaluate", "--workdir=run")
    assert result["step"] == expected["step"]
    for name, value in expected["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-5), name
    output(capsys, "predict", "--workdir=run", "--split=valid", "--output=new.parquet")
    scores = pq.read_table("new.parquet")["predicted_click"].to_numpy()
    np.testing.assert_allclose(scores, expected["predictions"], rtol=1e-5)


def test_bundles_of_an_earlier_run_and_of_an_earlier_version_score_as_it_did(expected, capsys):
    output(capsys, "export", "--workdir=run", "--output=new")
    for folder in filter(os.path.isdir, ("bundle", "new")):
        scores = jaxrank_serving.load(folder, verify=True).score({}, raw_requests())["click"]
        np.testing.assert_allclose(scores, expected["predictions"], rtol=1e-5, err_msg=folder)


def test_a_run_of_an_earlier_version_is_resumed(expected, capsys):
    """It ends with the metrics of the version that began it."""
    result, log = output(capsys, "train", "--config=config.py", "--workdir=run", "--no-report")
    assert f"Resuming after step {expected['step']}" in log
    assert result["step"] == expected["last_step"]
    for name, value in expected["metrics_of_the_last_step"].items():
        assert result["metrics"][name] == pytest.approx(value, rel=1e-4), name
