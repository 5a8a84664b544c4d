"""Tests of the files that a run and its continuation write."""

import builtins
import collections
import io
import json
import math
import os
import struct

import numpy as np
import pytest
from runs import lines as records
from tensorboardX.proto.event_pb2 import Event, SessionLog

from jaxrank.errors import InputError
from jaxrank.telemetry import writers
from jaxrank.telemetry.writers import Writer

PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 3, 2)


def events(workdir):
    """Returns (run, event) in the order in which TensorBoard reads them: by file name."""
    for path in sorted((workdir / "tensorboard").rglob("events.*")):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            yield path.parent.name, Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def scalars(workdir):
    """Returns {run/tag: [(step, value)]}. START removes its step and later ones."""
    result = {}
    for run, event in events(workdir):
        if event.session_log.status == SessionLog.START:
            result = {
                t: [p for p in ps if p[0] < event.step or not t.startswith(f"{run}/")]
                for t, ps in result.items()
            }
        for value in event.summary.value:
            if value.WhichOneof("value") == "simple_value":
                result.setdefault(f"{run}/{value.tag}", []).append((event.step, value.simple_value))
    return result


def lines(workdir):
    """Returns all records without their times."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in records(workdir, None)]


def test_numbers_stand_in_both_files(tmp_path):
    with Writer(tmp_path / "run", start_step=0) as writer:
        writer.write(20, {"loss": np.float32(0.5), "examples": 7})
        writer.write(20, {"auc": 0.75}, kind="valid")
    assert lines(tmp_path / "run") == [
        {"step": 20, "kind": "train", "loss": 0.5, "examples": 7},
        {"step": 20, "kind": "valid", "auc": 0.75},
    ]
    assert scalars(tmp_path / "run") == {
        "train/loss": [(20, 0.5)],
        "train/examples": [(20, 7.0)],
        "valid/auc": [(20, 0.75)],
    }


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    with Writer(tmp_path, start_step=0) as writer:
        writer.write(1, {"a": float("nan"), "b": np.float64("inf"), "c": None, "d": 1.0})
    assert lines(tmp_path) == [
        {"step": 1, "kind": "train", "a": None, "b": None, "c": None, "d": 1.0}
    ]
    result = scalars(tmp_path)
    assert np.isnan(result["train/a"][0][1])
    assert "train/c" not in result


def test_a_resumed_run_leaves_each_step_once(tmp_path):
    with Writer(tmp_path, start_step=0) as writer:
        for step in (10, 20, 30, 40):
            writer.write(step, {"loss": step / 8})
    with Writer(tmp_path, start_step=20) as writer:
        for step in (30, 40, 50):
            writer.write(step, {"loss": step / 4})
    expected = [(10, 1.25), (20, 2.5), (30, 7.5), (40, 10.0), (50, 12.5)]
    assert [(r["step"], r["loss"]) for r in records(tmp_path, None)] == expected
    assert scalars(tmp_path) == {"train/loss": expected}


def test_the_time_of_a_resumed_run_continues_without_the_pause(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(writers.time, "perf_counter", lambda: now[0])
    with Writer(tmp_path, start_step=0, started=990.0) as writer:
        for step in (1, 2, 3):
            now[0] += 5.0
            writer.write(step, {"loss": 1.0})
    now[0] = 77.0  # another program
    with Writer(tmp_path, start_step=2, started=70.0) as writer:
        writer.write(3, {"loss": 1.0})
    assert [r["seconds"] for r in records(tmp_path, None)] == [15.0, 20.0, 27.0]


def test_records_of_a_version_without_times_stay_and_time_starts_at_zero(tmp_path, monkeypatch):
    monkeypatch.setattr(writers.time, "perf_counter", lambda: 8.0)
    line = '{"step": 1, "kind": "train", "loss": 0.5}\n'
    (tmp_path / "metrics.jsonl").write_text(line)
    folder = tmp_path / "tensorboard"
    writers._open_events(folder, 0).close()  # of the only run of that version
    with Writer(tmp_path, start_step=1, started=6.0) as writer:
        writer.write(2, {"loss": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text().startswith(line)
    assert [r.get("seconds") for r in records(tmp_path, None)] == [None, 2.0]
    assert {run for run, _ in events(tmp_path)} == {"tensorboard", "train", "valid"}
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5), (2, 1.0)]}


def test_rates_of_an_earlier_version_get_their_new_names_in_both_files(tmp_path):
    earlier = [{"step": i, "kind": "train", "rate": i / 8, "table_rate": 0.1} for i in (1, 2, 3)]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in earlier))
    new = {"learning_rate": 0.5, "table_learning_rate": 0.2}
    with Writer(tmp_path, start_step=3) as writer:
        writer.write(4, new)
    assert lines(tmp_path) == [
        {"step": i, "kind": "train", "learning_rate": i / 8, "table_learning_rate": 0.1}
        for i in (1, 2, 3)
    ] + [{"step": 4, "kind": "train"} | new]
    names = {"train/learning_rate", "train/table_learning_rate"}
    assert scalars(tmp_path).keys() == names
    written = file.read_bytes()
    Writer(tmp_path, start_step=4).close()
    assert file.read_bytes() == written


def test_constant_numbers_have_no_chart_until_they_change(tmp_path):
    with Writer(tmp_path, start_step=0) as writer:
        for step in (1, 2, 3, 4):
            writer.write(
                step, {"learning_rate": 0.5, "loss": float(step), "late": float(step == 4)}
            )
    expected = {
        "train/loss": [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)],
        "train/late": [(1, 0.0), (3, 0.0), (4, 1.0)],
    }
    assert scalars(tmp_path) == expected
    with Writer(tmp_path, start_step=4) as writer:
        writer.write(5, {"learning_rate": 0.5, "loss": 4.0, "late": 1.0})
        writer.write(6, {"learning_rate": 0.25})
    result = scalars(tmp_path)
    assert result["train/loss"] == [*expected["train/loss"], (5, 4.0)]
    assert result["train/late"] == [*expected["train/late"], (5, 1.0)]
    assert result["train/learning_rate"] == [(1, 0.5), (5, 0.5), (6, 0.25)]


def test_a_single_evaluation_has_the_tags_of_the_training(tmp_path):
    with Writer(tmp_path, start_step=0) as writer:
        for step in (1, 2):
            writer.write(step, {"loss": float(step), "examples": 64, "auc": float("nan")})
        writer.write(2, {"loss": 0.5, "examples": 256, "auc": 0.7}, kind="valid")
    assert scalars(tmp_path) == {
        "train/loss": [(1, 1.0), (2, 2.0)],
        "valid/loss": [(2, 0.5)],
        "valid/auc": [(2, pytest.approx(0.7))],  # undefined in the batches of the training
    }


def test_hparams_and_pictures_belong_to_the_validation(tmp_path):
    with Writer(tmp_path, start_step=0) as writer:
        writer.hparams({"batch_size": 128, "optim.dense.name": "adam"}, ["click/auc"])
        writer.image(8, "reliability", PNG)
    shown = {v.tag: (run, v) for run, event in events(tmp_path) for v in event.summary.value}
    assert {run for run, _ in shown.values()} == {"valid"}
    image = shown["reliability"][1].image
    assert (image.width, image.height) == (3, 2)
    assert image.encoded_image_string == PNG
    content = shown["_hparams_/session_start_info"][1].metadata.plugin_data.content
    assert b"optim.dense.name" in content
    assert b"click/auc" in shown["_hparams_/experiment"][1].metadata.plugin_data.content


def test_a_run_that_begins_again_at_zero_forgets_the_first(tmp_path):
    for loss in (1.0, 2.0):
        with Writer(tmp_path, start_step=0) as writer:
            writer.write(10, {"loss": loss})
    assert [r["loss"] for r in records(tmp_path, None)] == [2.0]
    assert scalars(tmp_path) == {"train/loss": [(10, 2.0)]}


@pytest.mark.parametrize("half", ['{"step": 15, "ki', '{"step": 15, "kind": "train"}', "{}\n"])
def test_a_half_written_last_line_is_dropped(tmp_path, half):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 10, "kind": "train"}\n' + half)
    with Writer(tmp_path, start_step=20) as writer:
        writer.write(30, {})
    assert [r["step"] for r in records(tmp_path, None)] == [10, 30]
    assert [p.name for p in tmp_path.rglob("*.partial")] == []


def test_a_broken_line_elsewhere_stops_the_run_and_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 10, "kind": "train"}\nnonsense\n{"step": 30, "kind": "train"}\n'
    path.write_text(text)
    with pytest.raises(InputError, match=r"metrics.jsonl .*nonsense.* in line 2"):
        Writer(tmp_path, start_step=20)
    assert path.read_text() == text


def test_flush_brings_all_records_to_the_files_and_full_buffers_flush_themselves(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(writers, "FLUSH_RECORDS", 3)
    writer = Writer(tmp_path, start_step=0)
    writer.write(1, {"loss": 1.0})
    assert records(tmp_path, None) == []
    writer.flush()
    assert len(records(tmp_path, None)) == 1
    for step in (2, 3, 4, 5):
        writer.write(step, {"loss": float(step)})
    assert len(records(tmp_path, None)) == len(scalars(tmp_path)["train/loss"]) == 4
    monkeypatch.setattr(writers, "FLUSH_SECONDS", 0.0)
    writer.write(6, {"loss": 1.0})
    assert len(records(tmp_path, None)) == 6
    writer.close()
    writer.close()


def test_a_thousand_records_open_no_file_and_reach_the_disk_in_one_flush(tmp_path, monkeypatch):
    calls = collections.Counter()

    def counted(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            calls[name] += 1
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(writers, "FLUSH_SECONDS", math.inf)
    with Writer(tmp_path, start_step=0) as writer:
        files = writer._runs["train"].events
        for owner, name in ((Writer, "flush"), (files, "flush"), (os, "fsync")):
            counted(owner, name)
        for owner, name in ((io, "open"), (builtins, "open"), (files, "write_event")):
            counted(owner, name)
        for step in range(writers.FLUSH_RECORDS - 1):
            writer.write(
                step, {"loss": 0.5 + step, "auc": 0.7, "learning_rate": 0.1, "rounds": 1e6}
            )
        assert not calls
        writer.write(writers.FLUSH_RECORDS - 1, {"loss": 0.25})
        monkeypatch.undo()
    assert calls == {"flush": 2, "fsync": 2, "write_event": writers.FLUSH_RECORDS}
    assert len(records(tmp_path, None)) == writers.FLUSH_RECORDS


def test_text_stands_at_the_step_that_the_run_began_with(tmp_path):
    with Writer(tmp_path, start_step=7) as writer:
        writer.text("config", "batch_size: 4096")
    (event,) = [e for _, e in events(tmp_path) if e.summary.value]
    assert event.step == 7
    assert event.summary.value[0].tensor.string_val[0] == b"batch_size: 4096"
    assert event.summary.value[0].metadata.plugin_data.plugin_name == "text"


def test_values_cannot_take_the_name_of_a_record_field(tmp_path):
    with (
        Writer(tmp_path, start_step=0) as writer,
        pytest.raises(ValueError, match="day, kind, seconds, step"),
    ):
        writer.write(1, {"step": 2.0})
