"""Runs on whole requests: what they report, and that fillers change nothing."""

import json
import shutil

import jax
import numpy as np
import pytest
from runs import nothing, records, store_config
from variants import changed

from jaxrank import cli
from jaxrank import mesh as meshes
from jaxrank.errors import InputError
from jaxrank.evaluation import calibrate, calibrate_by_value, evaluate
from jaxrank.evaluation import requests as requests_of_split
from jaxrank.evaluation.comparison import compare
from jaxrank.evaluation.gate import judge
from jaxrank.explain import importance
from jaxrank.features import PAD, Task
from jaxrank.metrics import ranking
from jaxrank.run import build
from jaxrank.train import train

ROWS = np.arange(1000)  # of the validation split


def test_fillers_change_nothing(variants, tmp_path):
    job = build(variants.config("requests"), tmp_path, nothing)
    batch = next(job.batches)
    job.batches.close()
    fillers = batch.requests == PAD
    assert fillers.any()
    assert (batch.weights[fillers] == 0).all()
    assert all((ids[fillers] == PAD).all() for ids in batch.ids.values())
    noise = np.where(fillers[..., None], np.float32(100), batch.dense)
    labels = np.where(fillers[..., None], np.float32(1), batch.labels)
    results = []
    for each in (batch, batch._replace(dense=noise, labels=labels)):
        state = job.first_state(nothing)
        put = meshes.put_batch(each, job.program.mesh, leading=1)
        results.append(job.program.train(state, put, np.int32(2)))
    for x, y in zip(*map(jax.tree.leaves, jax.device_get(results)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_score_that_is_only_ranked_reports_no_calibration(variants, capsys, tmp_path):
    workdir, result, lines = variants.unbroken("requests")
    text = "\n".join(lines)
    assert "Requests are packed whole, 16 examples at a time" in text
    probabilities = {"logloss", "normalized_entropy", "calibration"}
    ranked = {"ndcg@10", "mrr", "recall@10", "gauc", "auc"}
    assert result.metrics["click"].keys() == ranked | {"examples"}
    assert result.metrics["conversion"].keys() == ranked | probabilities | {"examples"}
    assert result.buckets.keys() == {"conversion"}
    for kind in ("train", "valid"):
        names = {name for record in records(workdir, kind) for name in record}
        assert not names & {f"click/{name}" for name in probabilities}
        assert "conversion/calibration" in names
    cli.run(["evaluate", f"--workdir={workdir}"])
    out = capsys.readouterr().out
    assert "NDCG@10" in out
    assert "GAUC by request, weighted by the weights of examples, without" in out
    assert "calibration of click" not in out
    cli.run(["predict", f"--workdir={workdir}", f"--output={tmp_path / 'p.parquet'}"])
    assert "scores without calibration, by ranking alone: click" in capsys.readouterr().out
    cli.run(["evaluate", f"--workdir={workdir}", "--json"])
    tree = json.loads(capsys.readouterr().out)
    assert tree["metrics"]["click/ndcg@10"] == result.metrics["click"]["ndcg@10"]
    assert tree["requests"]["column"] == "request"
    for task in ("click", "conversion"):
        low, high = tree["intervals"][f"{task}/ndcg@10"]
        assert low < result.metrics[task]["ndcg@10"] < high


def test_a_loss_of_requests_needs_a_store_with_requests(store, tmp_path):
    c = changed(store_config(store), {"task_losses.click": "listwise_softmax"})
    with pytest.raises(InputError, match=r"task_losses.click: 'listwise_softmax' must have requ"):
        train(c, tmp_path, report=nothing)


def test_a_ranked_score_is_neither_calibrated_nor_explained_by_its_loss(variants):
    workdir = str(variants.unbroken("requests")[0])
    run = evaluate.open_run(workdir)
    scored = compare.score(workdir, run).scores
    schema, ranked = run.predictor.layout.schema, run.requests.ranked
    _, skipped = calibrate._fit(scored, schema, "isotonic", "", ranked)
    assert "ranking alone" in skipped["click"]
    assert "conversion" not in skipped
    assert calibrate_by_value.measure_tasks(scored, schema, ranked).keys() == {"conversion"}
    result = importance.explain(workdir, group=["all=*"], rows=200, report=nothing)
    assert result.base["click"].keys() == {"auc"}
    assert result.base["conversion"].keys() == {"logloss", "auc"}
    assert "change of AUC" in importance.describe(result)


def test_a_comparison_of_ranked_scores_has_no_calibration(variants):
    workdir, result, _ = variants.unbroken("requests")
    run = evaluate.open_run(str(workdir))
    scored = compare.score(str(workdir), run)
    rows, tasks = compare.Rows.read(run, ""), list(scored.tasks.values())
    compared, differences = compare._compared([scored, scored], tasks, ROWS, rows, 0.95)
    for metrics in (compared[0]["metrics"], differences[0]):
        assert np.isnan(_number(metrics["click"]["calibration"]))
        assert np.isfinite(_number(metrics["conversion"]["calibration"]))
    for name in ("auc", "ndcg@10", "gauc"):
        assert compared[0]["metrics"]["click"][name] == result.metrics["click"][name]


def test_a_gate_judges_metrics_of_requests_by_slices(variants, tmp_path, capsys):
    workdir = variants.unbroken("requests")[0]
    other = shutil.copytree(workdir, tmp_path / "other")
    conditions = ["click/ndcg@10 < -0.1%", "click/ndcg@10 < 0.99 likely"]
    gate = judge.judge(str(workdir), against=str(other), fail_if=conditions, by="c1")
    assert [verdict.holds for verdict in gate.verdicts] == [False, True]
    run = evaluate.open_run(str(workdir))
    groups, requests = run.groups("c1"), run.requests.read(run.split)
    scores = compare.score(str(workdir), run).scores
    by_slice = {
        str(entry["value"]): entry["runs"][1]["metrics"]["click"]["mrr"]
        for entry in gate.comparison.by["values"]
    }
    for value, members in zip(groups.values, groups.members(), strict=True):
        arrays = [a[members, 0] for a in (*scores, requests.candidates)]
        code = requests.code[members]
        expected = ranking.request_metrics(*arrays, code, kind="binary", k=10).metrics["mrr"]
        if len(members):
            assert by_slice[str(value)] == pytest.approx(expected, nan_ok=True)
    cli.run(["compare", str(workdir), str(other), "--by=c1"])
    out = capsys.readouterr().out
    assert "of independent requests by request" in out
    assert "NDCG@10" in out


@pytest.mark.parametrize("names", [("conversion", "click"), ("like", "conversion", "click")])
def test_a_gate_counts_candidates_by_the_tasks_of_the_new_run(
    names, variants, tmp_path, monkeypatch
):
    workdir = variants.unbroken("requests")[0]
    other = shutil.copytree(workdir, tmp_path / "other")
    run = evaluate.open_run(str(workdir))
    new = compare.score(str(workdir), run)
    read = run.requests.read(run.split)
    # Tasks with other sampling of negatives: their examples stand for other numbers of candidates.
    standing = np.random.default_rng(0).choice([1.0, 20.0], read.candidates.shape)
    read = read._replace(candidates=standing)
    monkeypatch.setattr(requests_of_split, "read_requests", lambda *_: read)
    columns = [{"click": 0, "conversion": 1, "like": 1}[name] for name in names]
    scores = new.scores._make(a[:, columns] for a in new.scores)
    noise = np.random.default_rng(1).normal(size=scores.logits.shape).astype(np.float32)
    scores = scores._replace(logits=scores.logits + noise)
    old = new._replace(tasks={name: Task(name) for name in names}, scores=scores)
    monkeypatch.setattr(compare, "score", lambda *_: old)
    gate = judge.judge(str(workdir), against=str(other), fail_if=["click/ndcg@10 < -0.1%"])
    (differences,) = gate.comparison.differences
    assert list(new.tasks) == ["click", "conversion"]
    for i, task in enumerate(new.tasks):
        base, value = (
            ranking.request_metrics(
                *(a[:, j] for a in s), standing[:, i], read.code, kind="binary", k=10
            ).metrics
            for s, j in ((old.scores, names.index(task)), (new.scores, i))
        )
        for name in ("ndcg@10", "mrr", "recall@10"):
            expected = value[name] - base[name]
            assert abs(expected) > 1e-4
            assert differences[task][name]["difference"] == pytest.approx(expected, rel=1e-9)


def _number(entry):
    return entry["difference"] if isinstance(entry, dict) else entry
