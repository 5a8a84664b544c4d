import json

import cores
import numpy as np
import pytest
from checkout import ROOT
from verbs import run

from jaxrank.data.store.reader import open_store

CONFIG = ROOT / "configs" / "quickstart.py"


def logloss(p, y):
    return float(-(y * np.log(p) + (1 - y) * np.log1p(-p)).mean())


@pytest.mark.slow
def test_the_main_job_gains_most_of_what_can_be_gained(tmp_path):
    """One pass over half of its data is enough."""
    args = [f"--config={CONFIG}", f"--workdir={tmp_path}", "--config.num_epochs=1"]
    args += ["--config.source.rows.train=1000000", "--config.source.rows.valid=100000"]
    result = run("train", *args)

    blocks = list(open_store(tmp_path / "data").split("valid").blocks())
    labels = np.concatenate([b.labels for b in blocks]).astype(np.float64)
    truth = np.concatenate([b.truth for b in blocks]).astype(np.float64)
    for i, task in enumerate(("click", "conversion")):
        known = ~np.isnan(labels[:, i])
        y, p = labels[known, i], truth[known, i]
        best, constant = logloss(p, y), logloss(np.full(len(y), y.mean()), y)
        assert result["best_possible"][f"{task}/logloss"] == pytest.approx(best, abs=1e-6)
        assert result["constant"][f"{task}/logloss"] == pytest.approx(constant, abs=1e-6)
        assert best <= 0.9 * constant
        gained = (constant - result["metrics"][f"{task}/logloss"]) / (constant - best)
        assert gained >= 0.85


@pytest.mark.slow
def test_a_run_is_the_same_to_the_bit_on_any_number_of_cores(tmp_path, monkeypatch):
    """Mixed experts in the layers, whose gates are the narrowest products that there are."""
    args = [f"--config={CONFIG}", f"--config.data.store={tmp_path / 'data'}"]
    args += ["--config.num_epochs=0.0", "--config.num_steps=4", "--config.data.valid="]
    args += [
        "--config.source.rows.valid=100",
        "--config.source.rows.train=20000",
        "--config.model.precision=bfloat16",
    ]
    args += ["--config.model.cross=dcn_mix", "--config.model.cross_rank=32"]
    args += ["--config.model.cross_layers=1"]
    args += ["--config.model.multitask=ple", "--config.model.levels=1"]
    args += ["--config.model.experts=2", "--config.model.task_experts=1"]
    sums = []
    for name, several in (("one", cores.ALL[:1]), ("all", cores.ALL)):
        if name == "all":  # on one, as many threads as a run takes by itself
            monkeypatch.setenv("PJRT_NPROC", "7")
        run("train", *args, f"--workdir={tmp_path / name}", cores=several)
        lines = json.loads((tmp_path / name / "checkpoints/4/run/metadata").read_text())
        sums.append(lines["checksums"])
    assert len(sums[0]["training"]) > 10
    assert sums[0] == sums[1]
