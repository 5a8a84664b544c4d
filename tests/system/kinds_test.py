"""Tasks of every kind from a CSV file to a resumed run, scores and predictions."""

import dataclasses
import json
import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from ml_collections import ConfigDict
from runs import nothing, records
from sklearn.metrics import log_loss, mean_poisson_deviance, mean_squared_error, r2_score
from task_kinds import KINDS, MAIN, config

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.labels import encode_labels
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics import report as statistics_report
from jaxrank.data.statistics import split as stats
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.evaluation import days, evaluate, report
from jaxrank.evaluation.model_view import check_features
from jaxrank.features import Task
from jaxrank.metrics import sums
from jaxrank.metrics.registry import METRICS
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def store(variants):
    return variants.store("kinds")


@pytest.fixture(scope="module")
def finished(variants):
    return variants.unbroken("kinds")


# Training and evaluation.


def test_every_kind_of_task_learns_what_is_planted(finished):
    _, result, _ = finished
    for name, main in MAIN.items():
        model, constant = result.metrics[name], result.constant[name]
        assert model[main] < 0.88 * constant[main]
        assert set(model) == set(constant)
        assert model["calibration"] == pytest.approx(1, abs=0.25)
        assert 1250 < model["examples"] < 1450
    assert result.metrics["price"]["normalized_squared_error"] < 0.3
    assert result.best_possible is None


def test_metrics_of_each_kind_are_written_and_the_first_task_picks_the_best(store, finished):
    workdir, result, lines = finished
    names = {task: [metric.name for metric in METRICS[kind]] for task, kind in KINDS.items()}
    wanted = {f"{t}/{m}" for t in names for m in (*names[t], "calibration", "examples")}
    first, *_, last = records(workdir, "train")
    assert {k for k in last if k.split("/")[0] in names} == wanted
    assert {k for k in records(workdir, "valid")[0] if "/" in k} == wanted
    for name, main in MAIN.items():
        assert last[f"{name}/{main}"] < first[f"{name}/{main}"]
    # Each step's loss is the sum of the tasks', of which two are halves of the metric.
    variance = open_store(store).split("train").statistics["traffic"]["price"]["std"] ** 2
    for record in (first, last):
        parts = record["visits/deviance"] / 2, record["click/logloss"]
        # That of a real task is relative to the variance of its training labels.
        parts += (record["price/squared_error"] / 2 / variance,)
        assert record["loss"] == pytest.approx(sum(parts), rel=1e-5)
    best = json.loads((workdir / "checkpoints" / "192" / "run" / "metadata").read_text())
    assert best["metric"] == result.metrics["visits"]["deviance"]
    (line,) = [line for line in lines if line.startswith("step 192")]
    reported = [
        f"visits: deviance {result.metrics['visits']['deviance']:.5f}, normalized ",
        f"click: logloss {result.metrics['click']['logloss']:.5f}, AUC ",
        f"price: squared error {result.metrics['price']['squared_error']:.5f}, normalized ",
    ]
    assert all(text in line for text in reported)
    text = report.format_training(result, str(workdir))
    for words in (r"visits +deviance +normalized +calibration", r"price +squared error +normal"):
        assert re.search(words, text)


def test_scores_and_predictions_are_those_of_sklearn(store, finished, tmp_path):
    workdir, result, _ = finished
    scored = evaluate.evaluate(str(workdir))
    assert scored.metrics == result.metrics
    evaluate.predict(str(workdir), output=str(tmp_path / "p.parquet"), checkpoint="newest",
                    data="", split="")  # fmt: skip
    table = pq.read_table(tmp_path / "p.parquet")
    raw = pa.csv.read_csv(store.parent / "valid.csv")
    for name, results in scored.metrics.items():
        label = raw[name].to_numpy()
        known = ~np.isnan(label)
        y, p = label[known], table[f"predicted_{name}"].to_numpy()[known]
        np.testing.assert_array_equal(table[f"label_{name}"].to_numpy(), label.astype(np.float32))
        w = raw["w"].to_numpy()[known] if name == "price" else np.ones(len(y))
        error = {"visits": mean_poisson_deviance, "price": mean_squared_error}.get(name, log_loss)
        assert results[MAIN[name]] == pytest.approx(error(y, p, sample_weight=w), rel=1e-6)
        assert results["calibration"] == pytest.approx((w * p).sum() / (w * y).sum(), rel=1e-6)
        assert results["examples"] == (w > 0).sum()
        buckets = scored.buckets[name]
        assert sum(b["examples"] for b in buckets) == results["examples"]
        assert (max(b["predicted"] for b in buckets) > 1.5) == (name != "click")
        if name == "price":
            normalized = 1 - r2_score(y, p, sample_weight=w)
            assert results["normalized_squared_error"] == pytest.approx(normalized, rel=1e-5)
    assert "observed" in report.format_evaluation(scored)


def test_means_over_days_are_weighted_by_examples():
    def day(deviance, examples):
        result = {"deviance": deviance, "normalized_deviance": math.nan, "calibration": 1.0}
        return {"visits": result | {"examples": examples}}

    mean = days.mean([day(1.0, 30), day(2.0, 10)])["visits"]
    assert (mean["deviance"], mean["examples"]) == (1.25, 40)
    assert math.isnan(mean["normalized_deviance"])


@pytest.mark.parametrize(
    ("parents", "kinds"),
    [
        (dict(visits="click"), "'visits' and 'click' must be .*kinds .'count', 'binary'"),
        (dict(click="price"), "'click' and 'price' must be .*kinds .'binary', 'real'"),
    ],
)
def test_a_task_without_a_probability_has_no_parent_and_is_none(store, tmp_path, parents, kinds):
    c = config(store.parent)
    with c.unlocked():
        c.model.parents = parents
    with pytest.raises(InputError, match=f"model.parents: {kinds}"):
        train(c, tmp_path, report=nothing)


def test_a_model_does_not_read_a_store_whose_task_is_of_another_kind(store):
    opened = open_store(store)
    first, *rest = opened.schema.tasks
    assert first == Task("visits", "count")
    other = dataclasses.replace(
        opened.schema, tasks=(dataclasses.replace(first, kind="real"), *rest)
    )
    with pytest.raises(InputError, match=r"tasks must be .* trained on.*visits"):
        check_features(other, opened)


# Labels.


def prepared(tmp_path, column, kind, **options):
    """Prepares a store of one task whose labels are the texts of `column`."""
    text = "".join(f"{value},0\n" for value in column)
    (tmp_path / "day.csv").write_text(f"y,x\n{text}")
    section = dict(
        tasks=[dict(name="y", label="y", kind=kind)],
        categorical=[dict(columns="x", encoding="integer", rows=1)],
    )
    source = dict(kind="csv", files=dict(train=str(tmp_path / "day.csv")))
    return prepare(section, source, tmp_path / "store", report=nothing, **options)


@pytest.mark.parametrize(
    ("kind", "column", "expected"),
    [
        ("real", ["1.5", "-3", "", "0", "1e15"], [1.5, -3, np.nan, 0, 1e15]),
        ("count", ["0", "3.0", "", "12", "1e3", "1e12"], [0, 3, np.nan, 12, 1000, 1e12]),
        ("binary", ["0", "1.0", ""], [0, 1, np.nan]),
    ],
)
def test_labels_are_read_as_their_kind_has_them(tmp_path, kind, column, expected):
    store = prepared(tmp_path, column, kind)
    (block,) = open_store(store.path).split("train").blocks()
    np.testing.assert_array_equal(block.labels[:, 0], np.float32(expected))
    known = np.float64(np.float32(expected)[~np.isnan(expected)])
    result = store.split("train").statistics["tasks"]["y"]
    wanted = {"known": len(known), "positives": (known > 0).sum(), "pending": 0}
    if kind != "binary":
        assert result.pop("kind") == kind
        wanted |= dict(mean=known.mean(), std=known.std())
        wanted |= dict(min=known.min(), max=known.max())
    assert result == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("kind", "bad", "must"),
    [
        *(("real", bad, "a finite number from -1e15 to 1e15, or empty")
          for bad in ("nan", "inf", "-inf", "1e39", "-1e19", "much", "1,5")),
        *(("count", bad, "a whole number from 0 to 1e12, or empty")
          for bad in ("-1", "2.5", "nan", "inf", "2e12", "three")),
        *(("binary", bad, "0, 1, true, false or empty")
          for bad in ("2", "-1", "0.5", "nan", "yes")),
    ],
)  # fmt: skip
def test_a_bad_label_is_named_by_file_row_column_and_value(tmp_path, kind, bad, must):
    written = f'"{bad}"' if "," in bad else bad
    place = f"day.csv, row 4, column y: must be {must}: found {bad!r}"
    with pytest.raises(InputError, match=re.escape(place)):
        prepared(tmp_path, ["1", "", written, "0"], kind)


def test_bad_labels_are_skipped_and_reported_one_by_one(tmp_path):
    column = ["1", "-1", "2", "1.5", "", "x", "4"]
    store = prepared(tmp_path, column, "count", on_error="skip")
    (block,) = store.split("train").blocks()
    np.testing.assert_array_equal(block.labels[:, 0], np.float32([1, 2, np.nan, 4]))
    lines = (tmp_path / "store" / "rejected.jsonl").read_text().splitlines()
    result = sorted(
        (reported["row"], reported["column"], reported["found"])
        for reported in map(json.loads, lines)
    )
    assert result == [(3, "y", "'-1'"), (5, "y", "'1.5'"), (7, "y", "'x'")]
    assert store.split("train").statistics["tasks"]["y"]["known"] == 3


@pytest.mark.parametrize("kind", ["real", "count"])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(truth="p"), r"truth is read only where .*kind is one of .*: found 'p'"),
        (
            dict(negative_rate=0.5),
            r"negative_rate is read only where .*: found 0\.5.*Leave it at 1.0",
        ),
        (dict(negative_rate_column="r"), r"negative_rate_column is read only where .*: found 'r'"),
        (dict(time="t", window_hours=1), r"time is read only where .*: found 't'"),
        (dict(label=""), r"label: must be the name of a column"),
    ],
)
def test_what_only_a_binary_task_can_have_is_rejected(kind, change, named):
    task = dict(name="y", label="y", kind=kind) | change
    with pytest.raises(InputError, match=rf"features.tasks\[0\].{named}"):
        FeatureSpec.from_state(dict(tasks=[task], time="at"))
    FeatureSpec.from_state(dict(tasks=[task | dict(kind="binary", label="y")], time="at"))


def test_an_unknown_kind_is_rejected():
    with pytest.raises(InputError, match="kind: must be one of 'binary', 'real', 'count': found"):
        FeatureSpec.from_state(dict(tasks=[dict(name="y", label="y", kind="ordinal")]))


@pytest.mark.parametrize("correction", ["weight", "shift"])
def test_no_label_of_0_counts_as_a_negative_that_was_kept_but_that_of_its_task(correction):
    sampled = dict(name="c", label="c", negative_rate=0.1, negative_correction=correction)
    numbers = [dict(name=k, label=k, kind=k) for k in ("count", "real")]
    section = FeatureSpec.from_state(dict(tasks=[numbers[0], sampled, numbers[1]]))
    batch = pa.RecordBatch.from_pydict({name: [0, 1] for name in ("count", "c", "real")})
    result = encode_labels(Chunk(batch, "day.parquet", numbered(1, 2)), section.tasks)
    weights = np.ones((2, 3), np.float32) if result.weights is None else result.weights
    logit_correction = (
        np.zeros((2, 3), np.float32) if result.logit_correction is None else result.logit_correction
    )
    np.testing.assert_array_equal(result.labels, [[0, 0, 0], [1, 1, 1]])
    traffic = sums.traffic_weights(weights, result.labels, logit_correction)
    np.testing.assert_allclose(traffic, [[1, 10, 1], [1, 1, 1]], rtol=1e-6)


# Statistics of labels.


def spec(*kinds):
    tasks = [dict(name=f"t{i}", label=f"t{i}", kind=kind) for i, kind in enumerate(kinds)]
    return FeatureSpec.from_state(ConfigDict(dict(tasks=tasks)).to_dict())


def counted(labels, *kinds):
    statistics = stats.Statistics(spec(*kinds))
    none = np.zeros((len(labels), 0))
    statistics.add(labels, none, none.astype(np.int32))
    return statistics


def test_statistics_of_labels_of_all_parts_are_those_of_the_whole():
    r = np.random.default_rng(0)
    labels = np.stack([r.poisson(2, 900), r.integers(0, 2, 900), r.normal(50, 3, 900)], axis=1)
    labels = np.where(r.random(labels.shape) < 0.2, np.nan, labels).astype(np.float32)
    labels[:100, 2] = np.nan  # a part without a label
    kinds = ("count", "binary", "real")
    whole = counted(labels, *kinds).summary()
    parts = [counted(labels[p], *kinds) for p in (slice(0, 100), slice(100, 850), slice(850, 900))]
    merged = stats.merged([json.loads(json.dumps(part.summary())) for part in parts])
    for result in (whole, merged):
        for i, (name, task) in enumerate(result["tasks"].items()):
            known = labels[:, i][~np.isnan(labels[:, i])].astype(np.float64)
            wanted = {"known": len(known), "positives": (known > 0).sum(), "pending": 0}
            if kinds[i] != "binary":
                assert task.pop("kind") == kinds[i]
                wanted |= dict(mean=known.mean(), std=known.std())
                wanted |= dict(min=known.min(), max=known.max())
            assert task == pytest.approx(wanted, rel=1e-9), name
    empty = parts[0].summary()["tasks"]["t2"]
    assert (empty["known"], empty["mean"], empty["max"]) == (0, None, None)
    text = statistics_report.lines(counted(labels, *kinds).summary())
    assert re.match(r"t0: \d+ labels \(count\), mean 1\.\d+, std 1\.\d+, min 0, ma", text[0])
    assert re.match(r"t1: \d+ labels, \d\d\.\d\d% positive", text[1])


def test_statistics_of_tasks_of_other_kinds_do_not_merge():
    labels = np.zeros((3, 1), np.float32)
    parts = [counted(labels, kind).summary() for kind in ("real", "count")]
    with pytest.raises(InputError, match=r"same kinds: found \['real'\] and \['count'\]"):
        stats.merged(parts)
