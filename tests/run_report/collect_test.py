"""Tests of what a report scores of a run without a summary."""

import types

import by_day
import pyarrow as pa
import pytest

from jaxrank import json_files
from jaxrank.errors import InputError
from jaxrank.run_report import collect, summary


@pytest.mark.parametrize(
    ("train", "valid", "expected"),
    [
        ("train", "next_day", "train/2024-05-03"),
        ("train/2024-05-01:2024-05-02", "next_day", "train/2024-05-02"),
        ("train/2024-05-01", "train", ""),  # all days, which evaluate resolves itself
        ("train/2024-05-01", "train/2024-05-02", ""),
    ],
)
def test_the_split_to_score_is_that_of_the_config(tmp_path, train, valid, expected):
    table = pa.table({"x": [0.5, 1.5], "y": [0.0, 1.0]})
    days = [f"2024-05-0{n}" for n in (1, 2, 3)]
    features = dict(tasks=[dict(name="click", label="y")], dense=[dict(columns="x")])
    store = by_day.write(tmp_path, dict.fromkeys(days, table), features, 2)
    data = types.SimpleNamespace(train=train, valid=valid)
    run = types.SimpleNamespace(builder=types.SimpleNamespace(data=data))
    assert collect._split(run, store) == expected


@pytest.mark.parametrize("text", ["{}", '{"result": 3}', '{"result": null, "data": []}'])
def test_a_summary_or_slices_of_another_shape_are_named(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    if text == "{}":  # as for a run without a summary
        assert not summary.read(tmp_path)
    else:
        with pytest.raises(InputError, match=r"summary.json: must have an object `"):
            summary.read(tmp_path)
    (tmp_path / "evaluations").mkdir()
    (tmp_path / "evaluations" / "by-c1.json").write_text(text)
    with pytest.raises(InputError, match=r"by-c1.json: must be the result of .* --by"):
        collect._slices(tmp_path)


def test_slices_of_an_earlier_version_have_the_intervals_of_their_errors(tmp_path):
    value = {"value": 1, "metrics": {"click": {"auc": 0.7, "logloss": 0.3}}}
    value["errors"] = {"click": {"auc": 0.01, "logloss": None}}
    (tmp_path / "evaluations").mkdir()
    json_files.write(tmp_path / "evaluations" / "by-c1.json", {"by": {"values": [value]}})
    ((entry,),) = [e["by"]["values"] for e in collect._slices(tmp_path)]
    assert entry["intervals"]["click"]["auc"] == pytest.approx([0.7 - 0.0196, 0.7 + 0.0196])
    assert entry["intervals"]["click"]["logloss"] is None
    assert "errors" not in entry
