"""A run with a sequence: late events, and scores of a bundle."""

import csv

import histories
import jaxrank_serving
import numpy as np
import pyarrow.parquet as pq
import pytest
from checkout import ROOT
from jaxrank_serving import RequestError
from ml_collections import ConfigDict
from runs import nothing, saved

from jaxrank import config_files
from jaxrank.data.prepare.passes import prepare
from jaxrank.evaluation import evaluate
from jaxrank.export.bundle import export_bundle
from jaxrank.export.comparison import parity
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")
CONTEXT = ("seen", "seen_kind", "seen_when", "time")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return histories.write(tmp_path_factory.mktemp("histories") / "raw")


@pytest.fixture(scope="module")
def store(raw, tmp_path_factory):
    """The folder of the prepared data, and what preparation reported."""
    folder, lines = tmp_path_factory.mktemp("store") / "store", []
    c = histories.config(raw)
    prepare(c.features.to_dict(), c.source.to_dict(), folder, report=lines.append)
    return folder, lines


def on_store(raw, store, **fields):
    c = histories.config(raw, **fields)
    c.data.store = str(store[0])
    return c


def parse_rows(raw):
    with open(raw / "valid.csv") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k != "click"} for row in rows]


def test_preparation_reports_the_events_that_it_masks(raw, store):
    late = [
        sum(int(when) >= int(row["time"]) for when in row["seen_when"].split("|") if when)
        for row in parse_rows(raw)
    ]
    expected = (
        f"  seen: {sum(late)} ids in {np.count_nonzero(late)} lists are masked, because their"
        " events are not before the time of the example"
    )
    assert sum(late) > 50
    assert expected in store[1]


@pytest.mark.parametrize("pool", ["target_attention", "transformer"])
def test_a_bundle_scores_histories_like_predict(raw, store, tmp_path, monkeypatch, pool):
    monkeypatch.setattr(parity, "_REPEATS", dict.fromkeys(parity.CANDIDATES, 1))
    saved(on_store(raw, store, pool=pool), tmp_path / "run")
    evaluate.predict(str(tmp_path / "run"), output=str(tmp_path / "p.parquet"))
    expected = pq.read_table(tmp_path / "p.parquet")["predicted_click"].to_numpy()
    assert expected.std() > 0.01
    export_bundle(str(tmp_path / "run"), output=str(tmp_path / "out"), report=nothing)
    scorer = jaxrank_serving.load(tmp_path / "out")
    rows = parse_rows(raw)
    np.testing.assert_allclose(scorer.score({}, rows)["click"], expected, atol=1e-6)
    for row, score in list(zip(rows, expected, strict=True))[:20]:
        context = {name: row[name] for name in CONTEXT}
        candidate = {name: value for name, value in row.items() if name not in CONTEXT}
        scores = scorer.score(context, [candidate] * 2)["click"]
        np.testing.assert_allclose(scores, score, atol=1e-6)
    if pool == "transformer":
        return
    longest = max(rows, key=lambda row: len(row["seen"]))
    for column, value, message in (
        ("seen_when", "", r"seen_when.*as many values as seen has"),
        ("seen_kind", "k1", r"seen_kind.*as many values as seen has, \d: found 1"),
        ("time", None, r"time.*must be a time"),
        ("seen_when", "|".join(longest["seen_when"].split("|")[::-1]), "in the order 'oldest_fir"),
    ):
        with pytest.raises(RequestError, match=message):
            scorer.score({}, [longest | {column: value}])
    now = {k: v for k, v in longest.items() if k != "time"}
    assert scorer.score({}, [now])["click"] != scorer.score({}, [longest])["click"]


@pytest.mark.slow
def test_target_attention_learns_what_the_mean_cannot(tmp_path):
    """The truth depends on the number of past events of the candidate's category."""
    closed = {}
    for pool in ("target_attention", "mean"):
        c = config_files.load(ROOT / "configs" / "sequences.py")
        c.source.rows = ConfigDict(dict(train=60_000, valid=20_000))
        c.source.dense, c.source.categorical, c.source.signal = 0, [], 2.0
        c.source.history_categories = c.source.history_items = 20
        c.features.categorical, c.features.dense = c.features.categorical[2:], []
        for entries in (c.features.categorical, c.features.ragged):
            for entry in entries:
                entry["rows"] = 20
        c.model.cross, c.model.mlp_units, c.embedding.dim = "none", (32,), 4
        if pool == "mean":
            c.model.sequences = ConfigDict({"history": dict(pool="mean")})
        c.batch_size, c.num_epochs = 256, 3.0
        c.optim.dense.base_batch = c.optim.tables.base_batch = 256
        c.optim.dense.base_learning_rate = 0.005
        c.data.store, c.mesh.devices = str(tmp_path / "data"), 1
        if pool == "target_attention":
            prepare(c.features.to_dict(), c.source.to_dict(), tmp_path / "data", report=nothing)
        result = train(c, tmp_path / pool, report=nothing)
        model, best, constant = (
            metrics["click"]["logloss"]
            for metrics in (result.metrics, result.best_possible, result.constant)
        )
        closed[pool] = (constant - model) / (constant - best)
    assert closed["target_attention"] > 0.85
    assert 0.3 < closed["mean"] < closed["target_attention"] - 0.3
