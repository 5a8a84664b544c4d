"""Tests of the curves that a report reads."""

import json

import numpy as np

from jaxrank.run_report import history


def test_long_curves_are_means_of_parts_and_evaluations_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "_MAX_LINES", 600)
    path = tmp_path / "metrics.jsonl"
    lines = []
    for step in range(1, 1201):
        record = {"step": step, "kind": "train", "seconds": step / 2, "loss": float(step)}
        lines.append(record | ({"late": None} if step < 3 else {}))
        if step % 400 == 0:
            lines.append({"step": step, "kind": "valid", "seconds": step / 2, "click/auc": 0.5})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = history.read(path)
    curve = result.train["loss"]
    assert len(curve.steps) == history._POINTS
    # Every second line is read, and 4 of them are joined: steps 1, 3, 5 and 7 first.
    np.testing.assert_allclose(curve.values[:2], [4.0, 12.0])
    np.testing.assert_allclose(curve.steps, curve.values)
    np.testing.assert_allclose(curve.seconds, curve.steps / 2)
    assert np.isnan(result.train["late"].values).all()
    assert result.valid["click/auc"].steps.tolist() == [400, 800, 1200]


def test_damaged_lines_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('[1]\n{}\n{"step": 2, "loss": 0.5}\n{"step": 3, "lo')  # the last by a kill
    assert history.read(path).train["loss"].values.tolist() == [0.5]


def test_a_run_without_records_has_no_curves(tmp_path):
    assert history.read(tmp_path / "metrics.jsonl") == history.History({}, {})
