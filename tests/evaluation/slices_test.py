"""Tests of metrics per value of a column against scikit-learn on the predictions."""

import copy
import dataclasses
import json

import by_day
import daily
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import nothing, store_config
from sklearn import metrics as sk

from jaxrank import cli
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.evaluation import columns, evaluate, report, slices
from jaxrank.evaluation.requests import NO_REQUESTS
from jaxrank.features import Task
from jaxrank.run import build

pytestmark = pytest.mark.usefixtures("shared_programs")


def test_each_value_has_the_metrics_of_its_examples(run, predictions):
    result = evaluate.evaluate(str(run[0]), by="c1")
    assert result.by["column"] == "c1"
    table = {name: np.array(predictions[name].to_pylist()) for name in predictions.column_names}
    assert {e["value"] for e in result.by["values"]} == set(table["c1"].tolist())
    counts = []
    for entry in result.by["values"]:
        local = table["c1"] == entry["value"]
        counts.append(local.sum())
        for task in ("click", "conversion"):
            known = local & np.array([label is not None for label in table[f"label_{task}"]])
            labels = table[f"label_{task}"][known].astype(float)
            predicted = table[f"predicted_{task}"][known]
            score = entry["metrics"][task]
            assert entry["intervals"][task].keys() == score.keys() - {"examples"}
            assert score["examples"] == known.sum()
            if known.any():
                loss = sk.log_loss(labels, predicted, labels=[0, 1])
                assert score["logloss"] == pytest.approx(loss, rel=1e-5)
            if len(set(labels)) == 2:
                auc = sk.roc_auc_score(labels, predicted)
                assert score["auc"] == pytest.approx(auc, abs=1e-6)
            else:
                assert np.isnan(score["auc"])
    assert sum(counts) == 1000
    bounds = [e["intervals"]["click"]["normalized_entropy"][0] for e in result.by["values"]]
    defined = [bound for bound in bounds if np.isfinite(bound)]
    assert len(defined) > 1
    assert bounds[: len(defined)] == sorted(defined, reverse=True)  # the worst first
    rest = counts[len(defined) :]
    assert rest == sorted(rest, reverse=True)
    whole = evaluate.evaluate(str(run[0]))
    assert whole.by is None
    assert result.metrics == whole.metrics


def test_an_interval_is_printed_with_both_sides_where_they_differ(run):
    result = evaluate.evaluate(str(run[0]), by="c1")
    lines = report.format_evaluation(result).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  95% interval"))
    assert lines[first].count("±") == 4
    assert "best possible" in lines[first + 1]

    auc = result.metrics["click"]["auc"]
    intervals = copy.deepcopy(result.intervals)
    intervals["click"]["auc"] = [auc - 0.1, auc + 0.2]
    by = copy.deepcopy(result.by)
    entry = next(e for e in by["values"] if np.isfinite(e["metrics"]["click"]["auc"]))
    auc = entry["metrics"]["click"]["auc"]
    entry["intervals"]["click"]["auc"] = [auc - 0.3, auc + 0.4]
    text = report.format_evaluation(result._replace(intervals=intervals, by=by))
    lines = text.splitlines()
    assert lines[first].split()[3] == "-0.10000"
    assert lines[first + 1].split() == ["+0.20000"]
    assert lines[first].index("-0.10000") == lines[first + 1].index("+0.20000")
    header = next(line for line in lines if line.startswith("click by c1"))
    line = next(line for line in lines if f"{auc:.5f}-0.30000/+0.40000" in line)
    assert header.index("AUC") + 3 == line.index("-0.30000") + len("-0.30000/+0.40000 ")


def test_the_mean_auc_weighs_values_by_their_examples():
    groups = slices.Groups("user", ["a", "b", "c"], np.array([0, 0, 1, 1, 1, 2]))
    labels = np.float32([[1], [0], [1], [0], [0], [1]])
    logits = np.float32([[2], [1], [0], [1], [-1], [3]])
    weights = np.float32([[1], [1], [2], [1], [1], [9]])
    result = slices.group_metrics(groups, [Task("click")], logits, labels, weights)
    # a: 1.0 with weight 2; b: 0.5 with weight 4; c has no AUC.
    assert result.gauc == {"click": pytest.approx((2 * 1.0 + 4 * 0.5) / 6)}
    assert result.gauc_excluded == {"click": pytest.approx(9 / 15)}
    assert [e["value"] for e in result.values] == ["b", "a", "c"]


def test_a_split_by_day_has_its_days(tmp_path):
    names = daily.DAYS[:3]
    tables = {day: daily.table(i, 0) for i, day in enumerate(names)}
    store = by_day.write(tmp_path, tables, daily.FEATURES, block_size=100)
    groups = slices.read_groups(store, store.split("train"), "day")
    assert groups.is_ordered
    assert groups.values == names
    assert np.bincount(groups.code).tolist() == [len(table) for table in tables.values()]
    assert (np.diff(groups.code) >= 0).all()


def test_the_command_line_prints_and_reports_each_value(run, capsys):
    cli.run(["evaluate", f"--workdir={run[0]}", "--by=c1"])
    lines = capsys.readouterr().out
    assert "click by c1" in lines
    assert "mean AUC of the values, by weight:" in lines
    cli.run(["evaluate", f"--workdir={run[0]}", "--by=c1", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["by"]["values"][0]["metrics"]["click/examples"] > 0
    assert "click/gauc" in result["by"]["metrics"]


def test_values_that_differ_are_distinguished():
    values = [None, "missing", "", "a\nb", "https://example.org/a/long/path/1"]
    values += [values[-1][:-1] + "2", 3, 2.5, True, 40 * "a", 20 * "a" + "b" + 19 * "a"]
    names = report._names([{"value": value} for value in values])
    assert len(set(names)) == len(values)
    assert all(name.isprintable() and name for name in names)
    assert [len(name) > 29 for name in names] == 9 * [False] + 2 * [True]


def test_floats_that_json_does_not_have_are_text_and_zero_is_one_value(run, monkeypatch):
    numbers = [0.0, -0.0, np.nan, np.inf, -np.inf, None, 1.5, -np.nan]
    store = open_store(run[0] / "data")
    split = store.split("valid")
    kept = pa.RecordBatch.from_pydict({"x": pa.array(numbers)})
    block = dataclasses.replace(next(split.blocks()), kept=kept)
    monkeypatch.setattr(type(split), "blocks", lambda self: iter([block]))
    result = slices.read_groups(store, split, "x")
    values = [result.values[code] for code in result.code]
    assert values == [0.0, 0.0, "nan", "inf", "-inf", None, 1.5, "nan"]
    assert len(result.values) == 6
    rounded = pa.RecordBatch.from_pydict({"x": pa.array([2.0, 2.0**24], pa.float32())})
    block = dataclasses.replace(block, kept=rounded)
    for read, flag in ((slices.read_groups, "--by"), (slices.read_clusters, "eval.cluster")):
        with pytest.raises(
            InputError, match=f"{flag}: column 'x' must .* float has rounded 16777216"
        ):
            read(store, split, "x")


def test_what_cannot_be_a_column_is_named(run, monkeypatch):
    with pytest.raises(InputError, match=r"--by: must .*c1, p_click.* found 'day'"):
        evaluate.evaluate(str(run[0]), by="day")
    monkeypatch.setattr(slices, "MAX_VALUES", 3)
    with pytest.raises(InputError, match="column 'p_click' must have at most 3 .*: found 1,000"):
        evaluate.evaluate(str(run[0]), by="p_click")
    store = open_store(run[0] / "data")
    split = store.split("valid")
    blocks = [dataclasses.replace(b, kept=_with_list(b.kept)) for b in split.blocks()]
    monkeypatch.setattr(type(split), "blocks", lambda self: iter(blocks))
    with pytest.raises(
        InputError, match="column 'l' must .*: found list<[^:]*: int64> .*Name another"
    ):
        slices.read_groups(store, split, "l")


@pytest.mark.parametrize(("clusters", "says"), [(19, True), (20, False)])
def test_the_line_of_few_clusters_says_so(clusters, says):
    line = report.cluster_line({"column": "day", "clusters": clusters})
    assert line.startswith(f"95% intervals clustered by day ({clusters} values)")
    assert ("may be short" in line) == says


@pytest.mark.parametrize("cluster", ["c11", "c0,c1"])
def test_a_cluster_that_the_data_lack_is_rejected_before_training(cluster, store, tmp_path):
    c = store_config(store)
    c.eval.cluster = cluster
    with pytest.raises(InputError, match=f"eval.cluster: .*found '{cluster}'; the nearest .*'c1'"):
        build(c, tmp_path, nothing)
    c = store_config(store)
    c.eval.cluster, c.data.store = cluster, ""
    with pytest.raises(InputError, match=f"eval.cluster: .*found '{cluster}'; the nearest .*'c1'"):
        build(c, tmp_path, nothing)
    assert not (tmp_path / "data").exists()


def _with_list(batch):
    return pa.RecordBatch.from_pydict({"l": pa.array([[1]] * batch.num_rows)})


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array(["a", None, "b", "a"]).dictionary_encode(), ["a", None, "b", "a"]),
        (pa.DictionaryArray.from_arrays([0, 1, 1, 2], ["a", "b", "a"]), ["a", "b", "b", "a"]),
        (
            pa.array([1, 5_000, 1], pa.timestamp("ns")),
            [f"1970-01-01 00:00:00.00000{n}" for n in ("0001", "5000", "0001")],
        ),
        (pa.array([1, 2, 1], pa.time64("ns")), [f"00:00:00.00000000{n}" for n in (1, 2, 1)]),
        (pa.array([1.5, 0.5, None, 1.5], pa.float16()), [1.5, 0.5, None, 1.5]),
        (pa.array([True, False, None, True]), [True, False, None, True]),
        (pa.array([b"x", b"y", b"x"]), ["x", "y", "x"]),
    ],
)
def test_columns_of_any_type_have_each_value_once(column, expected):
    coded = columns.coded([column.slice(0, 2), column.slice(2)], "c", "--by")
    values = coded.dictionary.to_pylist()
    assert [values[i] for i in coded.indices.to_pylist()] == expected
    assert len(values) == len(set(expected))


def test_features_hours_and_buckets_can_be_sliced_and_combined(tmp_path):
    """Compares each kind of column with the raw data of a store by day."""
    r = np.random.default_rng(0)
    day = np.repeat(["2024-05-01", "2024-05-02"], 100)
    hours = np.sort(r.integers(24, size=(2, 100)), axis=1).reshape(-1)
    raw = {
        "time": [f"{d}T{h:02}:30:00" for d, h in zip(day, hours, strict=True)],
        "device": [(None, "phone", "tablet")[i] for i in r.integers(3, size=200)],
        "price": r.lognormal(2, 1, 200).round(2),
        "pair": [[(None, "a", "b", "rare")[i] for i in r.choice(3, 2)] for _ in range(199)]
        + [["rare", None]],
        "tags": [" ".join("abc"[: r.integers(4)]) for _ in range(200)],
        "click": r.integers(2, size=200),
    }
    store = _prepared(raw, tmp_path)
    split = store.split("train")

    def values(by):
        groups = slices.read_groups(store, split, by)
        return [groups.values[code] for code in groups.code], groups

    hour, groups = values("hour")
    assert hour == hours.tolist()
    clock, by_clock = values("clock")
    assert (clock, by_clock.is_ordered) == (hour, True)
    assert groups.is_ordered
    assert groups.values[:-1] == sorted(set(hours.tolist()))
    assert values("day")[0] == day.tolist()
    assert values("device")[0] == raw["device"]
    both, groups = values("hour,device")
    assert both == [list(pair) for pair in zip(hours.tolist(), raw["device"], strict=True)]
    clusters = slices.read_clusters(store, split, "device")
    assert clusters.size == 2 + raw["device"].count(None)  # a missing one is independent
    for device in ("phone", "tablet"):
        assert (
            len({c for c, d in zip(clusters.code, raw["device"], strict=True) if d == device}) == 1
        )
    pairs = [None if p == [None, None] else ", ".join(map(str, p)) for p in raw["pair"]]
    assert values("pair")[0] == [*pairs[:-1], "(unknown)"]
    clusters = slices.read_clusters(store, split, "pair")
    assert clusters.size == len({*pairs[:-1]} - {None}) + pairs.count(None) + 1
    assert values("tags")[0] == [f"{len(t.split())}" for t in raw["tags"]]
    for by, count in (("price", 10), ("price/4", 4)):
        buckets, groups = values(by)
        sizes = np.bincount(groups.code)
        assert len(sizes) == count
        assert np.ptp(sizes) <= 2
        for value, price in zip(buckets, raw["price"], strict=True):
            low, _, high = value.partition(" to ")
            if high:
                assert float(low) <= price < float(high)
        assert buckets[raw["price"].argmax()].endswith(" and more")
        assert buckets[raw["price"].argmin()].startswith("less than ")
    for by, message in (
        ("price/1", r"numbers in 2 to 1,000 buckets.*found 'price/1'"),
        ("device,", r"separated by commas: found 'device,'"),
        ("device,device", r"each once, separated by commas"),
        ("none", r"must be a stored column \(.*time\), a feature \(price, .*tags\), day, hour, or"),
    ):
        with pytest.raises(InputError, match=message):
            values(by)


def _prepared(raw, folder):
    pq.write_table(pa.table(raw), folder / "raw.parquet")
    features = dict(
        tasks=[dict(name="click", label="click")],
        derived=[dict(name="clock", kind="hour", columns="time")],
        dense=[dict(columns="price", log=True, standardize=True)],
        categorical=[
            dict(columns="clock", encoding="integer", rows=24),
            dict(columns="device", encoding="vocabulary"),
            dict(columns="pair", encoding="vocabulary", length=2, min_count=2),
            dict(columns="price", encoding="bucket", buckets=3),  # also a dense feature
        ],
        ragged=[dict(columns="tags", encoding="vocabulary", separator=" ")],
        time="time",
    )
    source = dict(kind="parquet", files=dict(train=str(folder / "raw.parquet")))
    return prepare(features, source, folder / "store", block_size=64, report=lambda _: None)


def test_results_of_ordered_columns_keep_their_order():
    code = np.repeat([0, 1, 2], [10, 30, 20])
    logits = np.random.default_rng(0).normal(size=(60, 1))
    labels = (np.arange(60) % 3 == 0).astype(float)[:, None]
    ones = np.ones((60, 1))
    users = slices.Clusters("user", 30, np.arange(60) // 2)
    for is_ordered, order in ((True, ["a", "b", "c"]), (False, ["b", "c", "a"])):
        groups = slices.Groups("day", ["a", "b", "c"], code, is_ordered)
        result = slices.group_metrics(groups, [Task("click")], logits, labels, ones, users)
        assert [entry["value"] for entry in result.values] == order
        by_value = {entry["value"]: entry["intervals"]["click"] for entry in result.values}
        assert np.isnan(by_value["a"]["auc"]).all()  # fewer clusters than needed
        assert np.isfinite(by_value["b"]["auc"]).all()


def test_values_are_not_sorted_by_the_loss_of_a_ranked_task():
    code = np.repeat([0, 1, 2], [30, 20, 25])
    logits = np.random.default_rng(0).normal(size=(75, 2))
    logits[code == 1, 0], logits[code == 2, 1] = 9, 9  # the worst of each task
    labels, ones = np.tile([0.0, 0.0, 1.0], 25)[:, None].repeat(2, axis=1), np.ones((75, 2))
    groups = slices.Groups("kind", ["a", "b", "c"], code)
    tasks = [Task("click"), Task("buy")]
    for ranked, order in (([], "b"), (["click"], "c"), (["click", "buy"], "acb")):
        spec = NO_REQUESTS._replace(ranked=tuple(ranked))
        result = slices.group_metrics(groups, tasks, logits, labels, ones, None, spec)
        assert "".join(entry["value"] for entry in result.values).startswith(order)
