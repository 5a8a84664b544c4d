import dataclasses
import json
import os
import threading

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from ml_collections import ConfigDict
from runs import nothing
from sklearn import metrics as sk

from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import evaluate
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.model_view import check_features
from jaxrank.features import PAD
from jaxrank.mesh import put_batch
from jaxrank.run import build
from jaxrank.step import prediction_weights
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_predictions_are_in_stored_order_with_kept_columns_and_labels(run, predictions):
    workdir, _ = run
    blocks = list(open_store(workdir / "data").split("valid").blocks())
    labels = np.concatenate([b.labels for b in blocks])
    assert predictions.column_names[:2] == ["c1", "p_click"]
    ids = np.concatenate([b.ids[:, 1] for b in blocks])
    np.testing.assert_array_equal(predictions["c1"].fill_null(int(PAD)).to_numpy(), ids)
    np.testing.assert_array_equal(predictions["label_click"].to_numpy(), labels[:, 0])
    assert predictions["label_conversion"].null_count == np.isnan(labels[:, 1]).sum() > 0


def test_evaluation_agrees_with_scikit_learn_on_the_predictions(run, predictions):
    workdir, result = run
    results = evaluate.evaluate(str(workdir))
    for task, metrics in result.metrics.items():  # computed on another number of devices
        assert results.metrics[task] == pytest.approx(metrics, abs=1e-6)
        assert results.histograms[task] == result.histograms[task]
        for bucket, expected in zip(results.buckets[task], result.buckets[task], strict=True):
            assert bucket == pytest.approx(expected, abs=1e-6)
    assert results.step == result.step
    for task in ("click", "conversion"):
        known = predictions.filter(predictions[f"label_{task}"].is_valid())
        y, p = known[f"label_{task}"].to_numpy(), known[f"predicted_{task}"].to_numpy()
        rate = y.mean()
        expected = {
            "logloss": sk.log_loss(y, p),
            "auc": sk.roc_auc_score(y, p),
            "normalized_entropy": sk.log_loss(y, p) / sk.log_loss(y, np.full(len(y), rate)),
            "calibration": p.sum() / y.sum(),
            "examples": len(y),
        }
        named = {name: results.metrics[task][name] for name in expected}
        assert named == pytest.approx(expected, abs=1e-6)
        buckets = results.buckets[task]
        assert sum(b["examples"] for b in buckets) == len(y)
        observed = sum(b["observed"] * b["examples"] for b in buckets) / len(y)
        assert observed == pytest.approx(rate)


def test_best_possible_is_that_of_the_planted_probabilities(run, predictions):
    workdir, result = run
    y = predictions["label_click"].to_numpy().astype(np.float64)
    p = predictions["p_click"].to_numpy()
    assert result.best_possible["click"]["logloss"] == pytest.approx(sk.log_loss(y, p), abs=1e-6)
    assert result.best_possible["click"]["auc"] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-5)
    constant = sk.log_loss(y, np.full(len(y), y.mean()))
    assert result.constant["click"]["logloss"] == pytest.approx(constant, abs=1e-9)


# Prefetched batches.


@pytest.fixture
def untrained(run, tmp_path):
    """The predictor, weights and split of a run before its first step, with two batches of 512."""
    c = tiny.config()
    c.data.store = str(run[0] / "data")
    job = build(c, tmp_path, nothing)
    yield job.program.predictor, prediction_weights(job.program.init()), job.open_split("valid")
    job.checkpoints.close()


def feeding():
    return [t.name for t in threading.enumerate() if t.name.startswith("feed")]


def test_scores_are_those_of_a_plain_loop_to_the_bit(untrained):
    predictor, weights, split = untrained
    batches = scoring.EvaluationBatches(split, predictor.layout, batch_size=512)
    expected = [
        [np.asarray(x)[:rows] for x in predictor.predict(weights, put_batch(batch, predictor.mesh))]
        for batch, rows in batches
    ]
    result = list(scoring.score(predictor, weights, split, 512))
    assert [len(scored.logits) for scored in result] == [512, 488]
    jax.tree.map(np.testing.assert_array_equal, [list(scored) for scored in result], expected)
    assert feeding() == []


def test_the_next_batch_is_put_while_the_program_runs(untrained, monkeypatch):
    predictor, weights, split = untrained
    put, both = [], threading.Event()

    def counted(batch, mesh):
        put.append(threading.current_thread().name)
        if len(put) == 2:
            both.set()
        return put_batch(batch, mesh)

    class Waiting:
        mesh, layout = predictor.mesh, predictor.layout

        @staticmethod
        def predict(weights, batch):
            assert both.wait(60)
            return predictor.predict(weights, batch)

    monkeypatch.setattr(scoring, "put_batch", counted)
    assert len(list(scoring.score(Waiting, weights, split, 512))) == 2
    assert {name.startswith("feed") for name in put} == {True}


@pytest.mark.parametrize("part", ["predict", "put_batch", "_predictions"])
def test_the_thread_ends_with_an_exception(untrained, monkeypatch, tmp_path, part):
    predictor, weights, split = untrained

    def fail(*args, **kwargs):
        raise OSError("device 3 is gone")

    class Failing:
        mesh, layout = predictor.mesh, predictor.layout
        predict = staticmethod(fail if part == "predict" else predictor.predict)

    if part != "predict":
        monkeypatch.setattr(scoring, part, fail)
    with pytest.raises((OSError, RunError), match="device 3 is gone") as held:
        scoring.write_predictions(Failing, weights, split, 512, tmp_path / "a.parquet")
    assert held
    assert feeding() == []


@pytest.mark.parametrize("batch_size", [64, 1000 // 8 * 8, 4096])
def test_the_last_batch_is_padded_without_effect(run, batch_size):
    workdir, result = run
    results = evaluate.evaluate(str(workdir), batch_size=batch_size)
    for task, expected in result.metrics.items():
        named = {name: results.metrics[task][name] for name in expected}
        assert named == pytest.approx(expected, abs=1e-6)


def test_a_named_checkpoint_is_evaluated(run):
    workdir, _ = run
    result = evaluate.evaluate(str(workdir), checkpoint="8")
    assert result.step == 8
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    (valid,) = [r for r in map(json.loads, lines) if r["kind"] == "valid" and r["step"] == 8]
    assert result.metrics["click"]["auc"] == pytest.approx(valid["click/auc"], abs=1e-6)


def test_a_checkpoint_that_is_not_there_is_named_with_those_that_are(run):
    workdir, _ = run
    with pytest.raises(InputError, match=r"newest, best .*\[8, 16\]: found '12'"):
        evaluate.evaluate(str(workdir), checkpoint="12")


def test_a_workdir_without_a_run_is_rejected(tmp_path):
    with pytest.raises(InputError, match="config.json: no such file"):
        evaluate.evaluate(str(tmp_path))


def test_data_with_another_vocabulary_is_rejected_naming_the_table(run, tmp_path):
    workdir, _ = run
    c = tiny.config()
    c.features.categorical[1]["rows"] = 41
    prepare(c.features.to_dict(), c.source.to_dict(), tmp_path / "other", report=nothing)
    with pytest.raises(InputError, match=r"tables must be those .*'c1'.*rows=40.*rows=41"):
        evaluate.evaluate(str(workdir), data=str(tmp_path / "other"))


def test_features_in_another_order_are_rejected(run):
    store = open_store(run[0] / "data")
    swapped = dataclasses.replace(store.schema, categorical=store.schema.categorical[::-1])
    with pytest.raises(InputError, match=r"categorical must be in the order \['c1', 'c0'\]"):
        check_features(swapped, store)


def test_data_with_other_float_transforms_is_rejected(run, tmp_path):
    c = tiny.config()
    c.features.dense = [dict(columns="f*", log=True, missing_indicator=True)]
    prepare(c.features.to_dict(), c.source.to_dict(), tmp_path / "other", report=nothing)
    with pytest.raises(InputError, match="dense must be those .*'f0' was .*log=False.*log=True"):
        evaluate.evaluate(str(run[0]), data=str(tmp_path / "other"))


def test_rows_follow_raw_values_whatever_vocabulary_a_store_has(tmp_path):
    """New values are unknown. A vocabulary that is not an extension may be in any order."""

    def day(name, users):
        lines = ["label,user", *(f"{i % 2},{user}" for i, user in enumerate(users))]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
        return str(tmp_path / f"{name}.csv")

    c = tiny.config(num_steps=4, log_every_steps=2, batch_size=32)
    c.features.tasks = [dict(name="click", label="label")]
    c.features.dense, c.features.ragged, c.features.keep = [], [], ["user"]
    c.features.categorical = [dict(columns="user")]
    first = day("first", "abcdabca" * 20)
    c.source = ConfigDict(dict(kind="csv", files=dict(train=first, valid=first)))
    c.eval.every_steps = 4
    train(c, tmp_path / "run", report=nothing)
    later = dict(kind="csv", files=dict(train=day("later", "abxyzd" * 5)))
    result = {}
    for name, earlier in (("grown", tmp_path / "run" / "data"), ("again", "")):
        store, output = tmp_path / name, tmp_path / f"{name}.parquet"
        prepare(c.features.to_dict(), later, store, vocabularies=str(earlier), report=nothing)
        which = dict(checkpoint="newest", data=str(store), split="train")
        evaluate.predict(str(tmp_path / "run"), output=str(output), **which)
        table = pq.read_table(output)
        result[name] = dict(
            zip(table["user"].to_pylist(), table["predicted_click"].to_pylist(), strict=True)
        )
    by_user = result["grown"]
    assert by_user["x"] == by_user["y"] == by_user["z"]
    assert len({by_user[u] for u in "abdx"}) == 4
    assert result["again"] == by_user
    (tmp_path / "run" / "data").rename(tmp_path / "moved")
    with pytest.raises(InputError, match="the run's own data must exist.*no such store"):
        evaluate.evaluate(str(tmp_path / "run"), data=str(tmp_path / "again"), split="train")


def test_rows_without_labels_are_scored_as_with_them(tmp_path):
    """Other columns of a task may be absent too, and a wildcard does not read labels."""
    draw = np.random.default_rng(0)
    rows = [
        f"{i % 2},{draw.random():.3f},{draw.normal():.3f},{draw.normal():.3f},u{i % 7}"
        for i in range(160)
    ]
    names = "label,weight,x,y,user"

    def write(name, columns):
        lines = [",".join(np.asarray(r.split(","))[columns]) for r in (names, *rows)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    c = tiny.config(num_steps=4, log_every_steps=2, batch_size=32)
    c.features.tasks = [dict(name="click", label="label", weight="weight", negative_rate=0.5)]
    c.features.dense = [dict(columns="*", standardize=True)]
    c.features.categorical, c.features.ragged = [dict(columns="user")], []
    c.features.keep = ["user"]
    whole = write("whole.csv", [0, 1, 2, 3, 4])
    c.source = ConfigDict(dict(kind="csv", files=dict(train=whole, valid=whole)))
    c.eval.every_steps = 4
    train(c, tmp_path / "run", report=nothing)
    expected = _predicted(tmp_path, "expected", split="valid")
    assert "weight_click" in expected.column_names
    features = c.features.to_dict()
    for name, columns in (("without", [4, 3, 2]), ("some", [0, 2, 3, 4]), ("all", [0, 1, 2, 3, 4])):
        source = dict(kind="csv", files=dict(new=write(f"{name}.csv", columns)))
        options = dict(vocabularies=str(tmp_path / "run" / "data"), report=nothing)
        if name != "all":
            with pytest.raises(InputError, match=r"features.tasks\[0\].*the data has no column"):
                prepare(features, source, tmp_path / name, **options)
        store = prepare(features, source, tmp_path / name, unlabelled=True, **options)
        result = _predicted(tmp_path, name, data=str(store.path), split="new")
        assert result["predicted_click"] == expected["predicted_click"]
        assert result["label_click"].null_count == len(rows)
        must = r"/new: must have labels: .* of click, in \d+ examples"
        with pytest.raises(InputError, match=must):
            evaluate.evaluate(str(tmp_path / "run"), data=str(store.path), split="new")
    c.data.store = str(store.path)
    with pytest.raises(InputError, match="/all: must hold labels.*--unlabelled"):
        train(c, tmp_path / "again", report=nothing)


def _predicted(folder, name, **which):
    output = folder / f"{name}.parquet"
    evaluate.predict(str(folder / "run"), output=str(output), **which)
    return pq.read_table(output)


def test_a_corrupt_block_stops_the_evaluation_naming_file_and_block(run, tmp_path):
    workdir, _ = run
    c = tiny.config()
    prepare(c.features.to_dict(), c.source.to_dict(), tmp_path / "s", report=nothing)
    path = tmp_path / "s" / "valid" / "00000-00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"valid/00000-00000.arrow: block 0 is corrupt"):
        evaluate.evaluate(str(workdir), data=str(tmp_path / "s"))


def test_predictions_that_cannot_be_written_leave_nothing(run, tmp_path):
    workdir, _ = run
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "out.parquet"
    with pytest.raises(InputError, match=r"--output: .*/file must be a writable directory"):
        evaluate.predict(str(workdir), output=str(target), checkpoint="best", data="", split="")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_predictions_that_are_not_finite_are_named_and_not_written(run, tmp_path, monkeypatch):
    device_get = jax.device_get

    def fetched(outputs):
        if not isinstance(outputs, tuple):  # no scores
            return device_get(outputs)
        logits, labels, weights = map(np.array, outputs)
        logits[[7, 9], 1] = np.nan
        return logits, labels, weights

    workdir, _ = run
    monkeypatch.setattr(jax, "device_get", fetched)
    message = (
        r"task conversion must be finite: found 2 .* 1000 in rows 1 to 1000 of split valid; .* 8\.$"
    )
    with pytest.raises(RunError, match=message):
        evaluate.evaluate(str(workdir))
    with pytest.raises(RunError, match=message):
        evaluate.predict(str(workdir), output=str(tmp_path / "out.parquet"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["url", "directory", "slash", "pipe", "csv", ""])
def test_predictions_are_written_to_files_only(run, tmp_path, monkeypatch, kind):
    workdir, _ = run
    monkeypatch.chdir(tmp_path)
    if kind == "pipe":
        os.mkfifo("out")
    elif kind == "directory":
        (tmp_path / "out").mkdir()
    before = list(tmp_path.iterdir())
    target = {"url": "gs://bucket/out.parquet", "csv": "out.csv", "slash": "new/", "": ""}.get(
        kind, "out"
    )
    result = {
        "url": "found the URL gs://bucket/out.parquet",
        "pipe": "found a device, pipe",
        "csv": r"not end in \.csv.*Parquet",
        "slash": "must name a file: found new/",
        "": "must name a file: found nothing",
    }.get(kind, kind)
    with pytest.raises(InputError, match=rf"^--output: .*{result}"):
        evaluate.predict(str(workdir), output=target, checkpoint="best", data="", split="")
    assert list(tmp_path.iterdir()) == before


def test_predictions_replace_predictions_only_and_are_rejected_before_anything_is_read(
    run, tmp_path
):
    output = tmp_path / "day_2.parquet"
    raw = pa.table({"raw": [1, 2]})
    pq.write_table(raw, output)
    for workdir in (run[0], tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"day_2.parquet must be a new file or one that"):
            evaluate.predict(str(workdir), output=str(output))
    assert pq.read_table(output).equals(raw)
    output.unlink()
    first = evaluate.predict(str(run[0]), output=str(output))
    assert evaluate.predict(str(run[0]), output=str(output)).rows == first.rows
    # pyarrow keeps the metadata of a table to which a column is added.
    table = pq.read_table(output)
    pq.write_table(table.append_column("note", pa.array(range(len(table)))), output)
    with pytest.raises(InputError, match=r"day_2.parquet must be a new file or one that"):
        evaluate.predict(str(run[0]), output=str(output))
    assert pq.read_table(output).column_names[-1] == "note"


def test_checkpoints_of_a_workdir_without_any_are_rejected(tmp_path):
    with pytest.raises(InputError, match="found no checkpoints"):
        Checkpoints(tmp_path, read_only=True)


@pytest.mark.parametrize("correction", ["weight", "shift"])
def test_metrics_are_of_all_traffic_where_negatives_were_left_out(tmp_path, correction):
    rate = 0.2
    c = tiny.config(num_steps=64)
    c.optim.dense.base_learning_rate = 0.03
    with c.source.unlocked():
        c.source.negative_rate = rate
    click, conversion = c.features.tasks
    sampled = click | dict(negative_rate=rate, negative_correction=correction)
    c.features.tasks = [sampled, conversion]
    result = train(c, tmp_path / "run", report=nothing)
    output = tmp_path / "p.parquet"
    which = dict(checkpoint="newest", data="", split="")
    evaluate.predict(str(tmp_path / "run"), output=str(output), **which)
    results = pq.read_table(output)
    y, p = (results[name].to_numpy() for name in ("label_click", "predicted_click"))
    w = np.where(y == 0, 1 / rate, 1)
    np.testing.assert_allclose(results["weight_click"].to_numpy(), w, rtol=1e-6)
    assert set(results["weight_conversion"].to_pylist()) == {0, 1}
    base = sk.log_loss(y, np.full(len(y), np.average(y, weights=w)), sample_weight=w)
    expected = {
        "logloss": sk.log_loss(y, p, sample_weight=w),
        "auc": sk.roc_auc_score(y, p, sample_weight=w),
        "normalized_entropy": sk.log_loss(y, p, sample_weight=w) / base,
        "calibration": (w * p).sum() / y.sum(),
        "examples": len(y),
    }
    named = {name: result.metrics["click"][name] for name in expected}
    assert named == pytest.approx(expected, rel=1e-5)
    assert result.metrics["click"]["calibration"] == pytest.approx(1, abs=0.25)  # 3 without
    assert result.constant["click"]["logloss"] == pytest.approx(base, rel=1e-6)
    truth = results["p_click"].to_numpy()
    best = sk.log_loss(y, truth, sample_weight=w)
    assert result.best_possible["click"]["logloss"] == pytest.approx(best, rel=1e-5)
    assert result.best_possible["click"]["calibration"] == pytest.approx(1, abs=0.1)
    # A model predicts all traffic, also on data with sampled negatives.
    other = tiny.config()
    prepare(
        other.features.to_dict(), other.source.to_dict(), tmp_path / "all", report=nothing,
        vocabularies=str(tmp_path / "run" / "data"),
    )  # fmt: skip
    whole = evaluate.evaluate(str(tmp_path / "run"), data=str(tmp_path / "all"))
    assert whole.metrics["click"]["calibration"] == pytest.approx(expected["calibration"], rel=0.15)
