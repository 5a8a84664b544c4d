"""The whole program on public data; see CONTRIBUTING.md for where it must lie."""

import pyarrow.parquet as pq
import pytest
from checkout import ROOT
from verbs import run

from jaxrank.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("shared_programs")
CONFIGS = ROOT / "configs"


def find_files(folder, names, suffix):
    splits = {"train": "train", "valid": "valid", "test": "test"}
    return [f"--config.source.files.{s}={folder / f'{names}{s}{suffix}'}" for s in splits]


def test_the_criteo_sample_goes_through_all_verbs(shared_data, tmp_path):
    store, workdir = tmp_path / "store", tmp_path / "run"
    config = f"--config={CONFIGS / 'criteo.py'}"
    files = find_files(shared_data / "criteo_sample", "", ".tsv.gz")
    prepared = run("prepare", config, f"--output={store}", *files)
    rows = {name: split["rows"] for name, split in prepared["splits"].items()}
    assert rows == {"train": 27993, "valid": 3499, "test": 3500}

    data = f"--config.data.store={store}"
    trained = run("train", config, f"--workdir={workdir}", data, *files, devices=2)
    result, constant = trained["metrics"], trained["constant"]
    assert result["click/logloss"] < 0.9 * constant["click/logloss"]
    assert result["click/auc"] > 0.74

    # In this process, which has imported what the verbs need.
    tested = evaluate.evaluate(str(workdir), split="test")
    assert tested.metrics["click"]["examples"] == rows["test"]
    assert tested.metrics["click"]["auc"] > 0.72

    output = tmp_path / "p.parquet"
    which = dict(checkpoint="newest", data="", split="test")
    evaluate.predict(str(workdir), output=str(output), **which)
    predictions = pq.read_table(output)
    assert predictions.num_rows == rows["test"]
    mean = predictions["predicted_click"].to_numpy().mean()
    assert 0.2 < mean < 0.3


@pytest.mark.slow
def test_dcnv2_on_movielens_is_as_good_as_it_was_after_one_epoch(shared_data, tmp_path):
    """One seed, with the L2 that is best early; docs/benchmarks/quality.md has whole runs.

    After ten epochs it passes the published AUC of 0.8960.
    """
    args = [f"--config={CONFIGS / 'ml1m_dcnv2.py'}", f"--workdir={tmp_path}"]
    files = find_files(shared_data / "ml1m", "ctr_", ".csv.gz")
    trained = run("train", *args, "--config.num_epochs=1", "--config.embedding.l2=0.0012", *files)
    assert trained["metrics"]["like/auc"] > 0.8675  # of the validation split
    assert trained["metrics"]["like/logloss"] < 0.3520
