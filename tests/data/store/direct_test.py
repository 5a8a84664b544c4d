"""Training on Parquet files gives the same result as training on a prepared store."""

import dataclasses
import os
import pickle
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrank.data.batches.pipeline import EvaluationBatches, TrainBatches
from jaxrank.data.examples import join
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store import direct
from jaxrank.data.store.direct import open_direct
from jaxrank.errors import InputError
from jaxrank.features import MAX_GROUP
from jaxrank.layout import layout

_BLOCK = 300
AT = 1_700_000_000
FEATURES = dict(
    tasks=[
        dict(name="click", label="label", weight="importance"),
        dict(name="buy", label="bought"),
    ],
    dense=[
        dict(columns="f*", log=True, missing_indicator=True),
        dict(columns="image", length=2, standardize=False),
    ],
    categorical=[
        dict(columns="user", encoding="integer", rows=40, on_bad_id="oov"),
        dict(columns="site", encoding="hash", rows=50, salt="s"),
        dict(columns="hour", encoding="integer", rows=24),
        dict(columns="pair", encoding="integer", rows=9, length=2),
    ],
    ragged=[
        dict(columns="tags", encoding="integer", rows=30, max_length=6, on_overlong="truncate"),
        dict(columns="seen", table="user", weights="w", encoding="integer", rows=40)
        | dict(on_bad_id="oov"),
        dict(columns=["past", "past_site"], encoding="hash", rows=60, combiner="none")
        | dict(max_length=3, on_overlong="truncate"),
    ],
    sequences=[
        dict(name="history", columns=["past", "past_site"], order="oldest_first")
        | dict(time="past_at", ages=True),
    ],
    time="at",
    keep=["key"],
)  # fmt: skip


def drawn(seed, rows):
    draw = random.Random(seed)
    tags = [[draw.randrange(30) for _ in range(draw.randrange(9))] for _ in range(rows)]
    seen = [[draw.randrange(50) for _ in range(draw.randrange(4))] for _ in range(rows)]
    other = random.Random(seed + 1)
    past_at = [sorted(other.choices(range(AT - 900, AT + 90), k=i % 6)) for i in range(rows)]
    past = [[other.randrange(99) for _ in times] for times in past_at]
    return {
        "key": [f"{seed}-{i}" for i in range(rows)],
        "label": [draw.randrange(2) for _ in range(rows)],
        "importance": [draw.choice([0.0, 1.0, 2.5]) for _ in range(rows)],
        "bought": [draw.choice([0, 1, None]) for _ in range(rows)],
        "f1": [draw.choice([None, draw.gauss(0, 9)]) for _ in range(rows)],
        "f2": [draw.gauss(0, 1) for _ in range(rows)],
        "user": [draw.choice([None, draw.randrange(45)]) for _ in range(rows)],
        "site": [draw.choice(["", f"site {draw.randrange(90)}"]) for _ in range(rows)],
        "pair": [draw.choice([None, [1, draw.randrange(9)]]) for _ in range(rows)],
        "tags": [draw.choice([None, t]) for t in tags],
        "seen": seen,
        "w": [[draw.random() for _ in s] for s in seen],
        "at": [AT] * rows,
        "past_at": past_at,
        "past": past,
        "image": [other.choice([None, [other.random(), 2.0]]) for _ in range(rows)],
        "past_site": [[f"s{i % 7}" for i in ids] for ids in past],
        "unused": [{"deep": 1}] * rows,
    }


def write_day(root, hour, rows, group):
    path = root / f"hour={hour}" / "part-0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table(drawn(hour, rows)), path, row_group_size=group)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A source with row groups of whole blocks, and the store that `prepare` writes from it."""
    root = tmp_path_factory.mktemp("direct")
    write_day(root / "train", 3, 7 * _BLOCK + 45, 3 * _BLOCK)
    write_day(root / "train", 20, 2 * _BLOCK, _BLOCK)
    write_day(root / "test", 5, 1111, 2 * _BLOCK)
    files = {split: str(root / split) for split in ("train", "test")}
    source = dict(kind="parquet", files=files)
    # One unit of work per file, so blocks do not cross files.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxrank.data.prepare.units._UNIT_BYTES", 1)
        return source, prepare(
            FEATURES, source, root / "store", block_size=_BLOCK, report=lambda _: None
        )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(direct, "_BLOCK_ROWS", _BLOCK)


def batch_arrays(batch):
    flat = {"floats": batch.dense, "labels": batch.labels, "weights": batch.weights}
    flat |= {f"ids {name}": array for name, array in batch.ids.items()}
    for name, lists in batch.lists.items():
        flat |= {f"{name} {field}": array for field, array in lists._asdict().items()}
    return flat | {"dropped": batch.dropped}


def assert_same_batch(actual, expected):
    first, second = batch_arrays(actual), batch_arrays(expected)
    assert list(first) == list(second)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)


def train_batches(store, **changed):
    lay = layout(store.schema, {table.name: 8 for table in store.schema.tables})
    options = dict(
        batch_size=64, steps_per_execution=2, seed=5, shards=4, window_blocks=2, num_workers=0,
        prefetch_batches=2, list_slack=8.0, on_overflow="error", order="shuffled",
        num_steps=100,
    )  # fmt: skip
    return TrainBatches(store.split("train"), lay, **options | changed)


# Equality with the prepared store.


def test_blocks_and_schema_are_those_of_a_prepared_store(data):
    source, prepared = data
    store = open_direct(FEATURES, source)
    assert store.schema == prepared.schema
    assert store.spec.features == prepared.spec.features
    assert list(store.splits) == list(prepared.splits)
    for name, split in store.splits.items():
        expected = prepared.split(name)
        assert split.rows == expected.rows
        assert split.block_rows.tolist() == expected.block_rows.tolist()
        for block, other in zip(split.blocks(), expected.blocks(), strict=True):
            assert block.kept.equals(other.kept)
            for field in dataclasses.fields(block):
                if field.name != "kept":
                    result, wanted = (getattr(b, field.name) for b in (block, other))
                    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_training_batches_are_those_of_a_prepared_store(data, workers):
    source, prepared = data
    batches = train_batches(open_direct(FEATURES, source), num_workers=workers)
    expected = train_batches(prepared)
    assert batches.capacities == expected.capacities
    count = 0
    for batch, other in zip(batches, expected, strict=True):
        assert_same_batch(batch, other)
        count += 1
    assert count == 50  # more than two epochs


def test_evaluation_batches_are_those_of_a_prepared_store(data):
    source, prepared = data
    result = []
    for store in (open_direct(FEATURES, source), prepared):
        lay = layout(store.schema, {table.name: 8 for table in store.schema.tables})
        batches = EvaluationBatches(store.split("test"), lay, batch_size=MAX_GROUP)
        result.append((batches.capacities, list(batches)))
    assert result[0][0] == result[1][0]
    for (batch, rows), (other, expected) in zip(result[0][1], result[1][1], strict=True):
        assert rows == expected
        assert_same_batch(batch, other)


def test_list_lengths_are_exact_and_read_when_they_are_asked_for(data, monkeypatch):
    source, _ = data
    split = open_direct(FEATURES, source).split("train")
    assert "statistics" not in vars(split)
    read = []
    chunk = split._chunk
    monkeypatch.setattr(
        split, "_chunk", lambda p, columns: read.append(columns) or chunk(p, columns)
    )
    result = split.statistics
    of_history = {"past", "past_site", "past_at", "at"}
    assert {name for columns in read for name in columns} == {"tags", "seen"} | of_history
    lengths = join(list(split.blocks())).list_lengths.astype(int)
    sums = [lengths[i : i + MAX_GROUP].sum(axis=0) for i in range(len(lengths))]
    assert result["rows"] == len(lengths) == 9 * _BLOCK + 45
    assert result["list_lengths"]["max_total_per_run"] == np.max(sums, axis=0).tolist()
    assert result["list_lengths"]["max_per_example"] == lengths.max(axis=0).tolist()
    assert result["list_lengths"]["max_per_example"] == [6, 3, 3, 3, 3]
    np.testing.assert_allclose(result["list_lengths"]["mean"], lengths.mean(axis=0))
    covariance = np.cov(lengths.T, bias=True)
    np.testing.assert_allclose(result["list_lengths"]["covariance"], covariance, rtol=1e-12)
    assert split.statistics is result


# Reading.


def test_a_row_group_is_read_once_for_blocks_that_are_read_in_order(data, monkeypatch):
    source, _ = data
    split = pickle.loads(pickle.dumps(open_direct(FEATURES, source).split("train")))
    groups = []
    read = pq.ParquetFile.read_row_group

    def counted(self, group, columns):
        groups.append(group)
        assert "unused" not in columns
        return read(self, group, columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    rows = [block.rows for block in split.blocks()]
    assert rows == [_BLOCK] * 9 + [45]
    assert groups == [0, 1, 0, 1, 2]
    for index in (9, 0, 9, 0):
        split.read_block(index)
    assert groups[5:] == [0]


def test_the_fingerprint_is_of_the_data_and_not_of_its_place(tmp_path):
    features = FEATURES | {"ragged": [], "sequences": []}
    result = []
    for place, seed in (("here", 3), ("there", 3), ("other", 4)):
        path = tmp_path / place / "hour=7" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table(drawn(seed, 400)), path)
        source = dict(kind="parquet", files=dict(train=str(tmp_path / place)))
        result.append(open_direct(features, source).split("train").fingerprint)
    os.rename(tmp_path / "here" / "hour=7", tmp_path / "here" / "hour=8")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "here")))
    result.append(open_direct(features, source).split("train").fingerprint)
    assert result[0] == result[1]
    assert len(set(result)) == 3


def test_a_bad_value_is_named_with_its_row_in_the_file(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"label": [1] * 1000, "user": [i % 40 for i in range(1000)]}
    columns["user"][977] = 40
    pq.write_table(pa.table(columns), path, row_group_size=2 * _BLOCK)
    features = dict(
        tasks=[dict(name="click", label="label")],
        categorical=[dict(columns="user", encoding="integer", rows=40)],
    )
    source = dict(kind="parquet", files=dict(train=str(path)))
    split = open_direct(features, source).split("train")
    split.read_block(2)
    with pytest.raises(
        InputError, match=r"a\.parquet, row 978, column user: .*0 to 39.* 40"
    ) as bad:
        split.read_block(3)
    sent = pickle.loads(pickle.dumps(bad.value))  # as sent by a worker
    assert isinstance(sent, InputError)
    assert str(sent) == str(bad.value)
    os.truncate(path, os.path.getsize(path) - 1)
    with pytest.raises(InputError, match=r"a\.parquet: must not change while it is read"):
        open_and_forget(split).read_block(0)


def open_and_forget(split):
    return pickle.loads(pickle.dumps(split))


# Unsupported features.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(categorical=[dict(columns="site")]), "'site' must have encoding='integer' or 'hash'"),
        (
            dict(ragged=[dict(columns="tags")], sequences=[]),
            "'tags' must have encoding='integer' or 'hash'",
        ),
        (dict(dense=[dict(columns="f1", standardize=True)]), "fitted .*found f1"),
        (
            dict(categorical=[dict(columns="f1", encoding="bucket", buckets=4)], dense=[]),
            "fitted .*found f1",
        ),
        (dict(time="hour", by_day=True), r"features\.by_day: must be False"),
        (dict(categorical=[dict(columns="no", encoding="hash", rows=9)]), "'no' matches no column"),
    ],
)
def test_what_must_be_learned_needs_prepare(data, changed, message):
    with pytest.raises(InputError, match=message):
        open_direct(FEATURES | changed, data[0])
