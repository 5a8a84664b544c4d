import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import quick_compile
import tiny
from checkout import HELPERS, ROOT
from ml_collections import ConfigDict
from runs import final_state, nothing, records, run, store_config

from jaxrank import cli
from jaxrank import mesh as meshes
from jaxrank import run as jobs
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.config import default
from jaxrank.data.prepare.passes import prepare
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation.report import constant_warning, format_training
from jaxrank.metrics.registry import TITLES
from jaxrank.opening import locate
from jaxrank.run import build
from jaxrank.step import prediction_weights
from jaxrank.telemetry import recorder
from jaxrank.train import train
from jaxrank.workdir.files import is_finished
from jaxrank.workdir.lock import locked

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def finished(variants):
    workdir, result, _ = variants.unbroken("plain")
    return workdir, result


def test_every_step_of_a_call_is_recorded_with_every_metric(finished):
    workdir, _ = finished
    result = records(workdir)
    assert [r["step"] for r in result] == list(range(1, 17))
    names = {f"{t}/{m}" for t in ("click", "conversion") for m in ("logloss", "auc", "calibration")}
    assert names | {"loss", "learning_rate", "table_learning_rate", "dropped/l0"} <= set(result[0])
    assert [r["step"] for r in records(workdir, "valid")] == [8, 16]


def test_tensorboard_holds_the_numbers_of_metrics_jsonl(finished):
    from tensorboardX.proto.event_pb2 import Event

    workdir, _ = finished
    (path,) = (workdir / "tensorboard" / "train").iterdir()
    content, at, result = path.read_bytes(), 0, {}
    while at < len(content):
        size = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + size])
        for value in event.summary.value:
            result[value.tag, event.step] = value.simple_value
        at += size + 16
    for record in records(workdir):
        for name in ("loss", "click/logloss", "conversion/auc"):
            assert result[name, record["step"]] == pytest.approx(record[name], rel=1e-6)


def test_the_result_holds_model_best_possible_and_constant(finished):
    _, result = finished
    assert result.step == result.checkpoint_step == 16
    for task in ("click", "conversion"):
        best, constant = result.best_possible[task], result.constant[task]
        assert best["logloss"] < constant["logloss"]
        assert set(result.metrics[task]) == set(best) == set(constant)
    assert result.metrics["click"]["examples"] == 1000
    assert 0 < result.metrics["conversion"]["examples"] < 500


def test_the_summary_reports_where_the_time_went(finished):
    workdir, result = finished
    timed = {"preparation": 61.234, "training": 1234.5, "saving": 0.04}
    result = result._replace(phase_seconds=timed, examples_per_second=98765.4, seconds=1296.0)
    lines = format_training(result, os.path.relpath(workdir)).splitlines()
    assert lines[1:5] == [
        "Trained to step 16 in 1296 s:",
        "  preparation         61.2 s",
        "  training         1,234.5 s  98,765 examples/s",
        "Validation at step 16:",
    ]
    assert lines[-2:] == [
        f"every step   {workdir}/metrics.jsonl",
        f"report       {workdir}/report.html",
    ]


def test_a_repeated_run_is_equal_to_the_bit(store, finished, tmp_path):
    workdir, _ = finished
    run(store, tmp_path)
    expected = final_state(store, workdir)
    jax.tree.map(np.testing.assert_array_equal, final_state(store, tmp_path), expected)


def test_the_title_of_a_metric_may_be_long(finished, monkeypatch):
    monkeypatch.setitem(TITLES, "auc", "accuracy at a threshold")
    lines = format_training(finished[1], "run").splitlines()
    header, model = lines[(start := lines.index("Validation at step 16:") + 1) : start + 2]
    assert re.search("logloss  ?accuracy at a threshold +norm. entropy", header)
    assert len(header) == len(model)


def test_a_finished_run_only_reports_its_result_again(store, finished, tmp_path):
    workdir, result = finished
    shutil.copytree(workdir, tmp_path / "copy")
    again = run(store, tmp_path / "copy")
    assert again.metrics == result.metrics
    assert (again.step, again.trained_steps, result.trained_steps) == (16, 0, 16)
    assert "already finished at step 16." in format_training(again, str(tmp_path)).splitlines()[1]


def test_a_checkpoint_holds_the_state_of_its_own_step(store, finished):
    # The state is donated to the next step while the checkpoint is being written.
    workdir, _ = finished
    c = store_config(store)
    job = build(c, workdir, nothing)
    state = job.first_state(nothing)
    for _ in range(4):
        batch = meshes.put_batch(next(job.batches), job.program.mesh, leading=1)
        state, _ = job.program.train(state, batch, np.int32(2))
    job.batches.close()
    saved = job.checkpoints.restore_weights(
        8, job.program.predictor.weights_shape, job.program.predictor.weights_sharding
    )
    jax.tree.map(np.testing.assert_array_equal, prediction_weights(state), saved)


def device_config(store, workdir, devices, **changes):
    c = store_config(store, **changes)
    c.mesh.devices = devices
    return c


def test_a_run_keeps_its_placement_when_it_resumes_with_other_devices(store, finished, tmp_path):
    lines = []
    train(device_config(store, tmp_path, 8, num_steps=8), tmp_path, report=lines.append)
    assert any(line.startswith("Placement:") for line in lines)
    placed = json.loads((tmp_path / "placement.json").read_text())
    assert any(hot["replicated"] or hot["replicated_tables"] for hot in placed.values())
    for record in records(tmp_path):
        reported = {k.split("/")[-1]: v for k, v in record.items() if k.startswith("exchange/")}
        assert set(reported) == {"rounds", "unique_ids", "buffer_use", "fullest_device"}
        assert reported["rounds"] == 1
        assert 0 < reported["unique_ids"] < 128 * 10
        assert 0 < reported["buffer_use"] <= 1
        assert 1 <= reported["fullest_device"] <= 8

    c = device_config(store, tmp_path, 2, num_steps=16)
    result = train(c, tmp_path, report=nothing, allow_config_change=True)
    assert json.loads((tmp_path / "placement.json").read_text()) == placed
    assert result.step == 16

    # The same sixteen steps on one device, where nothing is replicated.
    for task, results in result.metrics.items():
        assert results["logloss"] == pytest.approx(finished[1].metrics[task]["logloss"], rel=1e-4)


def test_a_run_that_never_saved_is_placed_again(store, tmp_path):
    train(device_config(store, tmp_path, 1, num_steps=8), tmp_path, report=nothing)
    assert json.loads((tmp_path / "placement.json").read_text()) == {}
    shutil.rmtree(tmp_path / "checkpoints")
    c = device_config(store, tmp_path, 8, num_steps=8)
    train(c, tmp_path, report=nothing, allow_config_change=True)
    assert json.loads((tmp_path / "placement.json").read_text()) != {}


def test_small_buffers_of_the_exchange_are_reported(store, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(recorder, "_ROUNDS_WATCHED", 8)
    c = device_config(store, tmp_path, 4)
    c.embedding.exchange_capacity = 8
    c.embedding.placement = "rows"
    c.num_steps = 16
    train(c, tmp_path / "small", report=lines.append)
    (advice,) = [line for line in lines if "took more than one round" in line][:1]
    assert "embedding.exchange_capacity" in advice
    small = records(tmp_path / "small")
    rounds = [r[k] for r in small for k in r if k.startswith("exchange/") and k.endswith("/rounds")]
    assert max(rounds) > 1


def test_a_placement_that_does_not_fit_the_tables_is_rejected(store, tmp_path):
    train(device_config(store, tmp_path, 8, num_steps=8), tmp_path, report=nothing)
    c = device_config(store, tmp_path, 8, num_steps=16)
    c.embedding.dim = 4
    with pytest.raises(InputError, match="must be in dim.*: found dimension 4"):
        train(c, tmp_path, report=nothing, allow_config_change=True)


def test_checkpoints_of_every_n_steps_are_kept(store, tmp_path):
    c = store_config(store, num_steps=20)
    c.checkpoint.every_steps, c.checkpoint.keep, c.checkpoint.keep_every_steps = 4, 1, 6
    c.data.valid = ""
    train(c, tmp_path, report=nothing)
    result = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert result == [8, 12, 20]


def test_early_stopping_ends_at_the_best_checkpoint(store, tmp_path):
    c = store_config(store, num_steps=400)
    c.optim.dense.base_learning_rate = 0.3  # overfits and diverges soon
    c.eval.early_stopping_patience = 3
    c.eval.metric = "click/auc"
    result = train(c, tmp_path, report=nothing)
    assert result.step < 400
    scores = {r["step"]: r["click/auc"] for r in records(tmp_path, "valid")}
    assert result.checkpoint_step == max(scores, key=lambda s: (scores[s], -s))
    assert result.checkpoint_step == result.step - 3 * 8
    assert result.metrics["click"]["auc"] == scores[result.checkpoint_step]
    kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert kept == [result.checkpoint_step, result.step - 8, result.step]


def test_a_model_that_is_worse_than_a_constant_is_reported(store, tmp_path, capsys):
    c = store_config(store, num_steps=8)
    with c.unlocked():
        c.model.initial_bias = {"click": 4.0}
    c.optim.dense.base_learning_rate = c.optim.tables.base_learning_rate = 1e-9
    lines = []
    result = train(c, tmp_path / "run", report=lines.append)
    entropy = result.metrics["click"]["normalized_entropy"]
    assert entropy > 1 > result.metrics["conversion"]["normalized_entropy"] - 0.1
    causes = r"not scaled.*too few steps.*learning rate.*batch norm.*shift between the splits"
    reported = rf"Worse than the best constant: click \(norm. entropy {entropy:.5f}, .*{causes}"
    (line,) = (line for line in lines if line.startswith("step 8: "))
    assert re.search(reported, line.splitlines()[1])
    assert "calibrate" not in line + format_training(result, "")  # the loss is that of the metric
    assert "Worse than" not in format_training(
        result._replace(untrained=("click", "conversion")), ""
    )
    own = constant_warning(result.metrics, {"click": "expected_cost"})
    assert "features.dense); a loss other than bce, squared and poisson" in own
    large = constant_warning(result.metrics, {}, unscaled=["age", "price"])
    assert "in this order: age, price not scaled (standardize or log in features.dense);" in large
    assert large.count("not scaled") == 1
    later = constant_warning(result.metrics, {}, is_first=False)
    assert later.endswith("which should be below 1). Likely causes: see the first evaluation.")
    summary = format_training(result, str(tmp_path))
    assert re.search(reported, summary)
    model, constant, best = (
        values["click"]["logloss"]
        for values in (result.metrics, result.constant, result.best_possible)
    )
    share = (model - constant) / (constant - best)
    assert f"the model is {share:.1%}\n  of the gap worse than the best constant" in summary
    assert any(
        "best checkpoint so far, of step 8, is worse than a constant for click" in x for x in lines
    )
    # What `best` names says so whatever reads it.
    for verb in ("predict", "export"):
        output = f"--output={tmp_path / verb}.parquet"
        cli.run([verb, f"--workdir={tmp_path / 'run'}", output, "--checkpoint=best"])
        assert "checkpoints/8 is worse than a constant for click" in capsys.readouterr().out


def test_metrics_of_two_kinds_or_data_are_not_compared(store, tmp_path):
    """The metric of the first part of the run is always lower than that of the second."""
    c = store_config(store, num_steps=16)
    c.checkpoint.keep = 1
    train(c, tmp_path, report=nothing)
    c = store_config(store, num_steps=40)
    c.checkpoint.keep = 1
    c.eval.metric, c.eval.early_stopping_patience = "click/auc", 30
    lines = []
    train(c, tmp_path, report=lines.append, allow_config_change=True)
    reported = next(line for line in lines if line.startswith("Evaluations so far were by"))
    assert re.search("by click/logloss of valid, .*, from now on by click/auc of valid, ", reported)
    scores = {r["step"]: r["click/auc"] for r in records(tmp_path, "valid") if r["step"] > 16}
    best = max(scores, key=lambda s: (scores[s], -s))
    checkpoints = Checkpoints(tmp_path, read_only=True)
    assert checkpoints.step("best") == best
    monitor = json.loads((tmp_path / "checkpoints" / "40" / "run" / "metadata").read_text())
    assert (monitor["monitor"]["best_step"], monitor["monitor"]["best"]) == (best, scores[best])

    # What nothing was evaluated since is judged by what it was then, in its own direction.
    c.data.valid, c.eval.early_stopping_patience, c.eval.metric, c.num_steps = "", 0, "", 44
    c.eval.every_steps, c.checkpoint.every_steps, lines = 44, 2, []
    train(c, tmp_path, report=lines.append, allow_config_change=True)
    assert not any(line.startswith("Evaluations so far") for line in lines)
    assert Checkpoints(tmp_path, read_only=True).step("best") == best
    run_of = json.loads((tmp_path / "checkpoints" / "44" / "run" / "metadata").read_text())
    assert run_of["monitor"] == monitor["monitor"]

    c.data.valid, c.eval.every_steps, c.checkpoint.every_steps = "train", 8, 8
    c.eval.metric, c.num_steps = "click/auc", 48
    train(c, tmp_path, report=lines.append, allow_config_change=True)
    assert any("click/auc of train, " in line for line in lines)
    assert Checkpoints(tmp_path, read_only=True).step("best") == 48


def test_a_command_that_is_rejected_leaves_a_finished_run_finished(store, finished):
    workdir, _ = finished
    c = store_config(store)
    c.mesh.devices = 1000
    with pytest.raises(InputError, match=r"mesh.devices: must be at most"):
        train(c, workdir, report=nothing, allow_config_change=True)
    assert is_finished(workdir)


def test_rates_fall_after_evaluations_without_improvement(store, tmp_path):
    c = store_config(store, num_steps=32)
    c.eval.min_delta = 10.0  # nothing but the first evaluation is an improvement
    c.eval.reduce_lr_patience = 1
    c.eval.reduce_lr_factor = 0.5
    train(c, tmp_path, report=nothing)
    rates = {r["step"]: (r["learning_rate"], r["table_learning_rate"]) for r in records(tmp_path)}
    base = rates[1]
    for step, factor in [(16, 1.0), (17, 0.5), (24, 0.5), (25, 0.25)]:
        assert rates[step] == pytest.approx((base[0] * factor, base[1] * factor))


def test_a_loss_that_is_not_finite_stops_with_the_step_and_the_last_good_checkpoint(
    store, tmp_path
):
    run(store, tmp_path, num_steps=8)
    c = store_config(store, num_steps=32)
    c.optim.dense.base_learning_rate = 1e30
    message = r"step (1\d): loss .* must be finite.*checkpoints/8"
    with pytest.raises(RunError, match=message) as result:
        train(c, tmp_path, report=nothing, allow_config_change=True)
    assert Checkpoints(tmp_path, read_only=True).step() == 8
    last = int(re.match(message, str(result.value))[1])
    assert [r["loss"] is None for r in records(tmp_path)] == [False] * (last - 1) + [True]


def test_a_workdir_of_another_config_is_rejected_naming_what_differs(finished, store):
    workdir, _ = finished
    before = (workdir / "config.json").read_text()
    with pytest.raises(InputError, match="same config.*\n  num_steps: 16, now 24\nUse"):
        run(store, workdir, num_steps=24)
    assert (workdir / "config.json").read_text() == before


def test_a_store_of_other_features_is_rejected_naming_what_differs(store, tmp_path):
    c = store_config(store)
    c.features.keep = ["c0"]
    with pytest.raises(InputError, match=r'(?s)features of the config.*features.keep: \["c1"'):
        train(c, tmp_path, report=nothing)


def test_data_of_a_workdir_that_was_prepared_from_another_source_is_rejected(tmp_path):
    c = tiny.config()
    c.num_steps = 2
    prepare(c.features.to_dict(), c.source.to_dict(), tmp_path / "data", report=nothing)
    c.source.rows.train += 500
    with pytest.raises(
        InputError, match=r"(?s)from the source .*\n  source.rows.train: .*data.store="
    ):
        train(c, tmp_path, report=nothing)
    c.data.store = str(tmp_path / "data")
    train(c, tmp_path, report=nothing)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(valid="test"),
            r"data.valid: .* of .*run/data, one of \['train', 'valid'\]: found 'test'. Set",
        ),
        (dict(train="trian"), r"data.train: must be a split .*: found 'trian'\.$"),
        (dict(train=""), "data.train: must be a split .*: found ''"),
        (dict(valid="valid/2024-01-02"), "data.valid: must be .*: found 'valid/2024-01-02'"),
        (dict(order="days"), "'days' must have data that is stored by day: .*by_day = False"),
    ],
)
@pytest.mark.parametrize("kind", ["synthetic", "csv"])
def test_splits_that_the_source_will_not_have_are_rejected_before_it_is_prepared(
    tmp_path, kind, changes, message
):
    c = tiny.config()
    if kind == "csv":
        with c.unlocked():
            c.source = dict(kind="csv", files=dict(train="not_read.csv", valid="not_read.csv"))
    c.data.update(changes)
    lines = []
    with pytest.raises(InputError, match=message):
        train(c, tmp_path / "run", report=lines.append)
    assert lines == []  # no line says that data is prepared
    assert not (tmp_path / "run").exists()


def test_splits_that_may_be_there_are_looked_for_in_the_data(tmp_path):
    c = tiny.config()
    c.features.time, c.features.by_day = "time", True
    with c.unlocked():
        c.source.days = 2
    c.data.train, c.data.valid = "train/2024-01-01", "valid/2024-01-03"
    with pytest.raises(InputError, match="must name days of 'valid' .*: found '2024-01-03'"):
        train(c, tmp_path / "a", report=nothing)
    c.data.valid, c.data.order, c.data.train = "next_day", "days", "train"
    locate(c, tmp_path / "b").prepare(nothing)
    with c.unlocked():
        c.source = dict(kind="csv", files="not a mapping")
    with pytest.raises(InputError, match="source.files: must be a dict"):
        locate(c, tmp_path / "c").prepare(nothing)


def test_what_stands_for_missing_values_is_part_of_the_source_of_a_workdirs_data(tmp_path):
    c = default()
    (tmp_path / "a.csv").write_text("label,x\n1,NULL\n0,2\n")
    source = dict(kind="csv", files=dict(train=str(tmp_path / "a.csv")))
    c.features.tasks = [dict(name="click", label="label")]
    c.features.dense = [dict(columns="x")]
    c.source, c.data.valid = ConfigDict(source | dict(null_values=["NULL"])), ""
    for _ in range(2):
        assert locate(c, tmp_path).prepare(nothing).split("train").rows == 2
    c.source.null_values = ["NULL", "NaN"]
    differ = r'source.null_values: \["NULL"\], now \["NULL", "NaN"\]'
    with pytest.raises(InputError, match=rf"(?s)from the source .*\n  {differ}\n"):
        locate(c, tmp_path).prepare(nothing)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("eval.every_steps", 5, r"eval.every_steps: must be a positive multiple .*=5"),
        ("batch_size", 100, r"batch_size: must .*100.*8"),
        (
            "optim.tables.base_learning_rate",
            -1.0,
            "optim.tables.base_learning_rate: must be at least 0: found -1.0",
        ),
        (
            "optim.dense.settings",
            ConfigDict({"b1": "x"}),
            "optim.dense.settings.b1: must be a number: found 'x'",
        ),
        (
            "num_epochs",
            2.0,
            "num_steps, num_epochs: one of them must be 0.* Set --config.num_epochs=0",
        ),
        ("mesh.devices", 9, "mesh.devices: must be at most 8.*found 9"),
        (
            "mesh.devices",
            3,
            r"mesh: |batch_size: must be a multiple of .*\b3 devices|divides 1024",
        ),
        ("task_weights", (1.0,), r"task_weights: must have one number per task: found \(1.0,\), 2"),
        ("eval.metric", "click/auk", r"eval.metric: must be one of .*'click/auk'.*'click/auc'"),
        (
            "embedding.l2_scope",
            "all",
            "embedding.l2_scope: must be one of 'read', 'table': found 'all'",
        ),
        ("embedding.dims", ConfigDict({"zz*": 4}), "embedding.dims: 'zz\\*' must match a table"),
        ("model.cross", "dcn_v3", "cross.*dcn_v2.*'dcn_v3'"),
        ("optim.dense.name", "adamm", "adamm"),
        (
            "optim.tables.lr_multipliers",
            ConfigDict({"zz": 0.5}),
            "optim.tables.lr_multipliers: 'zz' must match a table: they are",
        ),
        (
            "optim.tables.lr_multipliers",
            ConfigDict({"c*": -1.0}),
            r"optim.tables.lr_multipliers.c\*: must be at least 0: found -1.0",
        ),
        (
            "optim.dense.lr_multipliers",
            ConfigDict({"crss/*": 0.5}),
            r"lr_multipliers: 'crss/\*' must match a parameter: .*cross",
        ),
        (
            "model.parents",
            ConfigDict({"conversion": "clicks"}),
            r"model.parents: 'conversion' and 'clicks' must be tasks: .*\['click', 'conversion'\]",
        ),
        ("ema_decay", 1.0, "ema_decay: must be at least 0 and at most 0.9999: found 1.0"),
        ("task_weighting", "learn", "task_weighting: must be one of 'fixed', 'uncertainty'"),
        ("data.store", "/nowhere/store", "no store at /nowhere/store"),
        ("data.valid", "test", r"data.valid: must be .*\['train', 'valid'\]: found 'test'"),
    ],
)
def test_a_config_that_cannot_work_is_rejected_with_field_and_value(
    store, tmp_path, field, value, message
):
    c = store_config(store)
    if field == "data.store":
        c.source = ConfigDict()
    section = c
    *path, name = field.split(".")
    for part in path:
        section = section[part]
    with c.unlocked():
        section[name] = value
    with pytest.raises(InputError, match=message):
        train(c, tmp_path / "run", report=nothing)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("model", "mlp_units", (0,)),
        ("optim.dense", "name", "adamm"),
        ("optim.tables", "decay", "cosines"),
        ("optim.tables", "name", "adamm"),
        ("data", "shards", 5),
    ],
)
def test_what_is_wrong_whatever_the_data_is_rejected_before_any_is_made(
    tmp_path, section, field, value
):
    c = tiny.config()
    wrong = c
    for part in section.split("."):
        wrong = wrong[part]
    wrong[field] = value
    with pytest.raises(InputError, match=field):
        train(c, tmp_path / "run", report=nothing)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_more_epochs_than_the_config_says_are_reported(store, tmp_path):
    lines = []
    c = store_config(store, num_steps=0, num_epochs=np.float64(0.05))
    result = train(c, tmp_path / "many", report=lines.append)
    (line,) = [line for line in lines if line.startswith("num_epochs=0.05 is rounded up ")]
    assert "0.06 epochs of 6,000 examples: a step takes 128" in line
    assert result.step == 3  # in executions of two steps
    c.num_epochs = np.float64(1e300)
    with pytest.raises(InputError, match="must give at most 2,147,483,647 steps: found more"):
        train(c, tmp_path / "endless", report=nothing)


def test_labels_that_teach_nothing_are_rejected_or_reported(tmp_path):
    def trained(name, click, buy, kind="binary", direct=False):
        columns = {"click": click, "buy": buy, "user": list(range(64))}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        c = tiny.config(num_steps=2, log_every_steps=2, batch_size=64)
        files = dict(train=str(tmp_path / f"{name}.parquet"))
        c.source = ConfigDict(dict(kind="parquet", files=files))
        c.features.tasks = [dict(name=name, label=name) for name in ("click", "buy")]
        c.features.tasks[1]["kind"] = kind
        c.features.dense, c.features.ragged, c.features.keep = [], [], []
        c.features.categorical = [dict(columns="user", encoding="integer", rows=64)]
        c.data.valid, c.data.direct = "", direct
        c.checkpoint.every_steps = c.eval.every_steps = 2
        lines = []
        train(c, tmp_path / name, report=lines.append)
        return [line for line in lines if " label" in line and "/train" in line]

    unknown = pa.array([None] * 64, pa.float32())
    with pytest.raises(InputError, match="found none that is known, of click, buy, in 64 examples"):
        trained("none", unknown, unknown)
    assert not (tmp_path / "none" / "config.json").exists()
    with pytest.raises(InputError, match="found none that is known and has a weight .* in 64 ex"):
        trained("direct", unknown, unknown, direct=True)
    alike, unheard = trained("alike", [0] * 64, unknown)
    assert alike.startswith("All 64 labels of click are 0 in")
    assert unheard.startswith("No label of buy is known in")
    assert Checkpoints(tmp_path / "alike", read_only=True).untrained(2) == ["buy"]
    assert trained("both", [0, 1] * 32, [1, 0] * 32) == []
    (price,) = trained("price", [0, 1] * 32, [2.5] * 64, kind="real")
    assert price.startswith("All 64 labels of buy are 2.5 in")


def test_labels_that_are_known_only_where_the_parent_is_positive_are_rejected(store, tmp_path):
    c = store_config(store)
    c.model.parents = ConfigDict({"conversion": "click"})
    with pytest.raises(InputError, match=r"model.parents: labels of 'conversion' must be known wh"):
        train(c, tmp_path, report=nothing)
    assert not (tmp_path / "config.json").exists()

    # Few are known, but some of them where there was no click.
    rows = [f"{i % 3 == 0:d},{'' if i % 10 else 0},{i % 7}" for i in range(600)]
    (tmp_path / "a.csv").write_text("\n".join(["click,conversion,user", *rows]) + "\n")
    c = tiny.config(num_steps=2, log_every_steps=2)
    c.source = ConfigDict(dict(kind="csv", files=dict(train=str(tmp_path / "a.csv"))))
    c.features.tasks = [dict(name=name, label=name) for name in ("click", "conversion")]
    c.features.dense, c.features.ragged, c.features.keep = [], [], []
    c.features.categorical, c.data.valid = [dict(columns="user")], ""
    c.model.parents = ConfigDict({"conversion": "click"})
    c.checkpoint.every_steps = c.eval.every_steps = 2
    train(c, tmp_path / "run", report=nothing)


def test_a_batch_that_does_not_divide_over_the_devices_names_the_numbers(store, tmp_path):
    c = store_config(store, batch_size=8)
    c.data.shards = 4
    c.mesh.devices = 8
    with pytest.raises(InputError, match="batch_size.*batch_size=8 on 8 devices, a share of 1"):
        train(c, tmp_path, report=nothing)


def test_a_config_that_was_rejected_leaves_the_workdir_to_the_next(store, finished, tmp_path):
    c = store_config(store, num_steps=8)
    c.model.norm = "bach"
    with pytest.raises(InputError, match="model.norm"):
        train(c, tmp_path, report=nothing)
    run(store, tmp_path, num_steps=8)

    before = (tmp_path / "config.json").read_text()
    c = store_config(store)
    c.model.mlp_units = (32,)
    layer = r"tower.layer_0.kernel: \(\d+, 16\), by the config \(\d+, 32\)\n"
    with pytest.raises(InputError, match=f"(?s)checkpoints/8: arrays must .*{layer}"):
        train(c, tmp_path, report=nothing, allow_config_change=True)
    c = store_config(store)
    c.optim.tables.name = "sgd"
    with pytest.raises(InputError, match=r"slots.dim8.accumulator: .*, by the config absent\n"):
        train(c, tmp_path, report=nothing, allow_config_change=True)
    assert (tmp_path / "config.json").read_text() == before


def test_data_that_was_prepared_again_is_rejected_on_resume(store, tmp_path):
    run(store, tmp_path / "run", num_steps=8)
    c = tiny.config()
    c.source.seed = 4
    other = tmp_path / "other"
    prepare(c.features.to_dict(), c.source.to_dict(), other, block_size=512, report=nothing)
    with pytest.raises(InputError, match="dense must be those .* trained on: 'f0'"):
        train_run(other, tmp_path / "run", tiny.config())

    c = tiny.config()
    c.features.dense = [dict(columns="f*", standardize=False)]
    for name, rows in (("first", 6000), ("second", 6001)):
        c.source.rows.train = rows
        path = tmp_path / name
        prepare(c.features.to_dict(), c.source.to_dict(), path, block_size=512, report=nothing)
    c.num_steps = 8
    train_run(tmp_path / "first", tmp_path / "plain", c)
    c.num_steps = 16
    with pytest.raises(InputError, match="must be the data that the run .* was trained on"):
        train_run(tmp_path / "second", tmp_path / "plain", c, same_path=tmp_path / "first")


def train_run(store, workdir, c, same_path=None):
    """Trains on `store`, moved to the path of the one before where that is given."""
    if same_path is not None:
        shutil.rmtree(same_path)
        store = shutil.move(store, same_path)
        (workdir / "config.json").write_text(
            (workdir / "config.json").read_text().replace('"num_steps": 8', '"num_steps": 16')
        )
    c.data.store = str(store)
    if same_path is None and (workdir / "config.json").is_file():
        return train(c, workdir, report=nothing, allow_config_change=True)
    return train(c, workdir, report=nothing)


def test_parameters_that_are_not_finite_are_never_saved(store, tmp_path):
    c = store_config(store, num_steps=2, steps_per_execution=1, log_every_steps=1)
    c.data.valid = ""
    c.eval.every_steps = 1
    c.optim.dense.name = "sgd"
    c.optim.dense.base_learning_rate = 3e38
    c.optim.dense.base_batch = 1
    c.optim.dense.scaling = "linear"
    with pytest.raises(RunError, match=r"step 1: parameters and tables must be finite"):
        train(c, tmp_path, report=nothing)
    assert Checkpoints(tmp_path, read_only=True).step() is None


def test_tables_that_no_memory_of_this_machine_has_room_for_are_rejected(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr(meshes, "host_memory", lambda: 1 << 10)
    with pytest.raises(InputError, match=r"need \d+\.\d\d KiB, .* this machine: it has 1.00 KiB"):
        run(store, tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_two_processes_cannot_train_in_one_workdir(store, tmp_path):
    with locked(tmp_path), pytest.raises(RunError, match="another process trains in this"):
        run(store, tmp_path)
    run(store, tmp_path, num_steps=2, log_every_steps=2)


def test_a_workdir_that_is_a_file_is_rejected(store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--workdir: .*file must be a writable directory"):
        run(store, tmp_path / "file")


def test_a_metric_that_decides_must_be_defined(tmp_path, monkeypatch):
    c = tiny.config()
    c.source.rows.valid = 1  # one label: no AUC
    c.eval.metric = "click/auc"
    for patience in (0, 1):
        c.eval.early_stopping_patience = patience
        with pytest.raises(InputError, match="click/auc must have .*'valid'.*found 1 labels, all"):
            train(c, tmp_path, report=nothing)
    assert not (tmp_path / "checkpoints").exists()
    # As where nothing is counted: the steps that were trained are not lost.
    monkeypatch.setattr(jobs, "_check_metric", lambda *_: None)
    with pytest.raises(RunError, match="click/auc must be defined .* split 'valid'.*Step 8 is sav"):
        train(c, tmp_path, report=nothing)
    assert Checkpoints(tmp_path, read_only=True).step() == 8


TRAINED_ON = SimpleNamespace(
    has_statistics=True,
    statistics={"tasks": {"y": {"known": 7}, "buy": {"known": 0}}},
    path="train",
)


@pytest.mark.parametrize(
    ("metric", "labels", "value"),
    [
        ("gauc", dict(known=7, positives=7), "7 labels, all 1"),
        ("auc", dict(known=7, positives=6), ""),
        ("logloss", dict(known=7, positives=0), ""),
        ("logloss", dict(known=0, positives=0), "none that is known"),
        ("normalized_deviance", dict(kind="count", known=7, positives=7, min=2, max=2), "all 2"),
        ("normalized_deviance", dict(kind="count", known=7, positives=7, min=2, max=3), ""),
        ("deviance", dict(kind="count", known=7, positives=7, min=2, max=2), ""),
    ],
)
def test_a_metric_that_decides_must_have_the_labels_it_needs(metric, labels, value):
    split = SimpleNamespace(has_statistics=True, statistics={"tasks": {"y": labels}}, name="valid")
    section = default().eval
    section.metric = f"y/{metric}"
    with pytest.raises(InputError, match=value) if value else contextlib.nullcontext():
        jobs._check_metric(section, section.metric, TRAINED_ON, split)


def test_a_metric_that_decides_must_be_of_a_task_with_training_labels():
    section = default().eval
    section.metric = "buy/logloss"
    with pytest.raises(
        InputError, match="eval.metric: must be of a task that is trained.*buy is k"
    ):
        jobs._check_metric(section, section.metric, TRAINED_ON, TRAINED_ON)


def test_weights_of_training_examples_must_not_all_be_0(tmp_path):
    def make_store(weights):
        rows = "".join(f"{label},{weight}\n" for label, weight in weights)
        (tmp_path / "day.csv").write_text("label,w\n" + rows)
        features = dict(tasks=[dict(name="click", label="label", weight="w")])
        source = dict(kind="csv", files=dict(train=str(tmp_path / "day.csv")))
        return prepare(features, source, tmp_path / str(len(weights)), report=nothing)

    with pytest.raises(InputError, match="must have weights above 0 to train on: found 0 for all"):
        jobs._check_labels(make_store([(1, 0), (0, 0), ("", 1)]).split("train"), nothing)
    lines = []
    jobs._report_undefined(
        make_store([(1, 0), (1, 0), (1, 0), ("", 1)]).split("train"), lines.append
    )
    assert [line.partition(" in ")[0] for line in lines] == [
        "All weights of known labels of click are 0",
    ]  # fmt: skip
    jobs._check_labels(make_store([(1, 0), (0, 1)]).split("train"), nothing)
    (tmp_path / "two.csv").write_text("label,w\n1,0\n0,0\n1,0\n0,0\n0,0\n")
    tasks = [dict(name="click", label="label", weight="w"), dict(name="buy", label="label")]
    source = dict(kind="csv", files=dict(train=str(tmp_path / "two.csv")))
    split = prepare(dict(tasks=tasks), source, tmp_path / "two", report=nothing).split("train")
    lines = []
    jobs._check_labels(split, lines.append)
    ending = f"are 0 in {split.path}: this task is not trained"
    assert lines == [f"All weights of known labels of click {ending}"]


def test_a_signal_while_the_last_save_is_written_ends_nothing(store, tmp_path, monkeypatch):
    """The run has no other work left. Only a second signal would end it."""
    before, waited = Checkpoints.wait, []

    def wait(checkpoints):
        if not waited and (tmp_path / "metrics.jsonl").exists():
            waited.append(signal.getsignal(signal.SIGTERM))
            os.kill(os.getpid(), signal.SIGTERM)
        before(checkpoints)

    # Else the process that runs the tests would end.
    default = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("the program would have ended"))
    monkeypatch.setattr(Checkpoints, "wait", wait)
    try:
        assert run(store, tmp_path).step == 16
    finally:
        signal.signal(signal.SIGTERM, default)
    assert len(waited) == 1
    assert is_finished(tmp_path)


def test_a_run_that_stops_reports_where_it_stands(store, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, tiny\n"
        "from jaxrank.train import train\n"
        "def slow_report(text):\n"
        "    if text.startswith('step 8:'):\n"
        "        time.sleep(1.5)\n"
        "c = tiny.config()\n"
        "c.watch.hang_seconds = 0.5\n"
        "c.data.store = sys.argv[1]\n"
        "train(c, sys.argv[2], report=slow_report)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(store), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}", "XLA_FLAGS": quick_compile.XLA_FLAGS},
    )
    assert done.returncode == 0, done.stderr
    assert "no progress for 0.5 s. Stacks of all threads:\nThread " in done.stderr
    assert "in slow_report" in done.stderr
    assert len(records(tmp_path / "run")) == 16


def test_a_finished_run_has_a_summary_and_a_report(finished, store, tmp_path):
    workdir, result = finished
    results = json.loads((workdir / "summary.json").read_text())
    assert results["result"]["metrics"]["click"] == result.metrics["click"]
    assert results["result"]["constant"]["click"] == result.constant["click"]
    assert results["result"]["phase_seconds"] == dict(result.phase_seconds)
    assert results["data"]["splits"]["valid"]["tasks"]["click"]["known"] == 1000
    assert [t["table"] for t in results["tables"]] == ["c0", "c1", "l0", "l1"]
    assert results["config"] == json.loads((workdir / "config.json").read_text())
    buckets, histogram = (results["result"][name]["click"] for name in ("buckets", "histograms"))
    assert sum(bucket["examples"] for bucket in buckets) == 1000
    assert sum(histogram["positive"] + histogram["negative"]) == pytest.approx(1000)
    assert "</html>" in (workdir / "report.html").read_text()
    shutil.copytree(workdir, tmp_path / "copy")
    (tmp_path / "copy" / "report.html").unlink()
    train(store_config(store), tmp_path / "copy", report=nothing, page=False)
    again = json.loads((tmp_path / "copy" / "summary.json").read_text())
    for name in ("metrics", "buckets", "histograms", "phase_seconds", "examples_per_second"):
        assert again["result"][name] == results["result"][name]
    assert not (tmp_path / "copy" / "report.html").exists()
