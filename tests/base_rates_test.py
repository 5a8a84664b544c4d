"""The base rates that tasks start from, against counts of the labels by hand."""

import json
import math

import by_day
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from runs import nothing, store_config

from jaxrank.base_rates import base_rates
from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.labels import encode_labels
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics import split as stats
from jaxrank.data.store import manifest
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.features import Task
from jaxrank.run import build

pytestmark = pytest.mark.usefixtures("shared_programs")


def log_odds(positives, negatives):
    return math.log(positives + 0.5) - math.log(negatives + 0.5)


def counted(tasks, columns):
    """The statistics of labels, as `prepare` counts them."""
    spec = FeatureSpec.from_state(dict(tasks=tasks))
    batch = pa.RecordBatch.from_pydict(columns)
    result = encode_labels(Chunk(batch, "a.csv", numbered(1, batch.num_rows)), spec.tasks)
    statistics = stats.Statistics(spec)
    none = np.zeros((batch.num_rows, 0))
    statistics.add(
        result.labels, none, none.astype(np.int32), result.weights, result.logit_correction
    )
    return json.loads(json.dumps(statistics.summary()))


@pytest.mark.parametrize(
    ("kind", "labels", "bias", "scale"),
    [
        ("binary", [1, 0, 0, None, 0], log_odds(1, 3), 1),
        ("binary", [0, 0, 0], log_odds(0, 3), 1),
        ("binary", [1, 1], log_odds(2, 0), 1),
        ("binary", [None], 0, 1),
        ("count", [0, 4, None], math.log(4.5 / 2.5), 1),
        ("count", [0, 0], math.log(0.5 / 2.5), 1),
        ("real", [-6.0, 2.0, 4.0, None], 0.0, math.sqrt(56 / 3)),
        ("real", [1e9, 3e9], 2e9, 1e9),
        ("real", [7.1, 7.1, 7.1], 7.1, 1),
        ("real", [None], 0, 1),
    ],
)
def test_a_task_starts_at_the_base_rate_of_its_known_labels(kind, labels, bias, scale):
    statistics = counted([dict(name="t", label="t", kind=kind)], {"t": pa.array(labels)})
    result = base_rates([Task("t", kind)], (), statistics)
    np.testing.assert_allclose(result, [[bias], [scale]], rtol=1e-6, atol=1e-6)


def test_labels_count_by_weight_and_one_without_weight_not_at_all():
    columns = {"t": [1, 0, 0, 1], "w": [0.5, 1.5, 1.0, 0.0]}
    statistics = counted([dict(name="t", label="t", weight="w")], columns)
    bias = base_rates([Task("t")], (), statistics).bias[0]
    unit = 0.5 / 2  # the mean weight of a positive
    assert bias == pytest.approx(math.log((0.5 + unit / 2) / (2.5 + unit / 2)), rel=1e-6)


@pytest.mark.parametrize("correction", ["weight", "shift"])
def test_base_rates_are_of_all_traffic_where_negatives_were_left_out(correction):
    tasks = [dict(name="t", label="t", negative_rate=0.01, negative_correction=correction)]
    statistics = counted(tasks, {"t": [1] * 20 + [0] * 300})
    bias = base_rates([Task("t")], (), statistics).bias[0]
    assert bias == pytest.approx(log_odds(20, 30_000), rel=1e-6)


@pytest.mark.parametrize("positives", [0, 30, 100])
def test_a_child_starts_at_its_joint_rate_over_that_of_its_parent(positives):
    columns = {"click": [1] * 100 + [0] * 900, "buy": [1] * positives + [0] * (1000 - positives)}
    statistics = counted([dict(name=name, label=name) for name in columns], columns)
    bias = base_rates([Task("click"), Task("buy")], (-1, 0), statistics).bias
    click, given_click = 1 / (1 + np.exp(-bias.astype(np.float64)))
    assert click == pytest.approx(100.5 / 1001, rel=1e-6)
    assert np.isfinite(bias).all()
    if positives < 100:
        assert click * given_click == pytest.approx((positives + 0.5) / 1001, rel=1e-5)


def test_statistics_of_parts_give_the_base_rate_of_the_whole():
    r = np.random.default_rng(0)
    columns = {"t": r.normal(5, 2, 300).round(2), "w": r.random(300)}
    tasks = [dict(name="t", label="t", kind="real", weight="w")]
    parts = [
        counted(tasks, {k: v[p] for k, v in columns.items()}) for p in np.r_[0:300].reshape(3, 100)
    ]
    result = base_rates([Task("t", "real")], (), stats.merged(parts))
    t, w = (columns[name] for name in "tw")
    mean = np.average(t, weights=w)
    expected = mean, math.sqrt(np.average((t - mean) ** 2, weights=w))
    np.testing.assert_allclose(np.ravel(result), expected, rtol=1e-5)
    # Merged with a part of a version that did not count them, there are none.
    older = {key: value for key, value in parts[0].items() if key != "traffic"}
    assert "traffic" not in stats.merged([older, parts[1]])


def first_state(config, workdir):
    """The first state of a run, and what is reported of it."""
    lines = []
    job = build(config, workdir, nothing)
    job.batches.close()
    return job.first_state(lines.append), lines


@pytest.mark.parametrize("devices", [1, 8])
def test_a_run_starts_at_the_base_rates_or_at_those_of_its_config(store, tmp_path, devices):
    c = store_config(store, ema_decay=0.9)
    c.mesh.devices = devices
    with c.unlocked():
        c.model.initial_bias = {"conversion": -1.25}
    state, lines = first_state(c, tmp_path)
    labels = np.concatenate([b.labels for b in open_store(store).split("train").blocks()])
    positives, negatives = ((labels[:, 0] == label).sum() for label in (1, 0))
    expected = [log_odds(positives, negatives), -1.25]
    for weights in (state, state.average):
        np.testing.assert_allclose(weights.bias, expected, rtol=1e-6)
        np.testing.assert_array_equal(weights.scale, [1, 1])
    (line,) = lines
    assert line == f"Initial bias: click {expected[0]:.5g}, conversion -1.25"


def test_a_bias_of_what_is_no_task_is_rejected(store, tmp_path):
    c = store_config(store)
    with c.unlocked():
        c.model.initial_bias = {"clicks": 0.0}
    with pytest.raises(
        InputError, match=r"model.initial_bias: 'clicks' .*\['click', 'conversion'\]"
    ):
        build(c, tmp_path, nothing)


def test_a_store_of_an_earlier_version_starts_at_0_and_says_so(store, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    for path in store.iterdir():
        (folder / path.name).symlink_to(path) if path.name != "manifest.json" else None
    tree = json.loads((store / "manifest.json").read_text())
    del tree["checksum"]
    for split in tree["splits"].values():
        del split["statistics"]["traffic"]
    (folder / "manifest.json").write_text(manifest.SEAL.to_text(tree))
    state, lines = first_state(store_config(folder), tmp_path / "run")
    np.testing.assert_array_equal(state.bias, [0, 0])
    assert "prepare it again. Outputs without model.initial_bias start at 0" in lines[0]


def test_data_that_is_read_directly_starts_at_0_and_says_so(tmp_path):
    table = pa.table({"click": [0, 1] * 64, "f0": np.arange(128.0)})
    pq.write_table(table, tmp_path / "train.parquet")
    c = tiny.config(batch_size=64, num_steps=2)
    with c.unlocked():
        c.source = dict(kind="parquet", files=dict(train=str(tmp_path / "train.parquet")))
        c.features = dict(
            tasks=[dict(name="click", label="click")],
            dense=[dict(columns="f0")],
            categorical=[],
            ragged=[],
        )
    c.data.direct, c.data.valid, c.eval.every_steps = True, "", 0
    state, lines = first_state(c, tmp_path / "run")
    np.testing.assert_array_equal(state.bias, [0])
    assert "read directly. Outputs without model.initial_bias start at 0" in lines[0]


@pytest.mark.parametrize(
    ("order", "weights", "positives", "negatives"),
    [
        ("days", (1.0, 1.0), 10, 90),
        ("shuffled", (1.0, 1.0), 130, 170),
        ("days", (0.0, 1.0), 20, 80),
    ],
)
def test_with_days_in_order_only_the_first_day_with_weight_counts(
    tmp_path, order, weights, positives, negatives
):
    labels = {
        "2024-05-01": [1] * 10 + [0] * 90,
        "2024-05-02": [1] * 20 + [0] * 80,
        "2024-05-03": [1] * 100,
    }
    weights = (*weights, 1.0)
    tables = {
        day: pa.table({"click": values, "f0": np.arange(100.0), "w": [weight] * 100})
        for (day, values), weight in zip(labels.items(), weights, strict=True)
    }
    tasks = [dict(name="click", label="click", weight="w")]
    features = dict(tasks=tasks, dense=[dict(columns="f0")])
    data = by_day.write(tmp_path, tables, features, block_size=50)
    c = tiny.config(batch_size=64, num_steps=2)
    with c.unlocked():
        c.features = dict(features, categorical=[], ragged=[], time="time", by_day=True)
    c.data.store, c.data.order, c.data.valid = str(data.path), order, ""
    c.eval.every_steps = 0
    state, _ = first_state(c, tmp_path / "run")
    np.testing.assert_allclose(state.bias, [log_odds(positives, negatives)], rtol=1e-6)
