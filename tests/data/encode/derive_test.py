"""Derived columns, compared with plain Python in every reader of raw data."""

import csv
import datetime
import math
import zoneinfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tfrecords
import xxhash
from jaxrank_serving.derived import columns

from jaxrank.data.encode import derive
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.direct import open_direct
from jaxrank.errors import InputError

ZONE = "America/New_York"
DERIVED = [
    dict(name="hour", kind="hour", columns="at", zone=ZONE),
    dict(name="weekday", kind="weekday", columns="at", zone=ZONE),
    dict(name="utc", kind="hour", columns="at"),
    dict(name="pair", kind="cross", columns=("user", "item")),
    dict(name="three", kind="cross", columns=("user", "item", "hour")),
    dict(name="ratio", kind="ratio", columns=("x", "y")),
    dict(name="difference", kind="difference", columns=("x", "y")),
    dict(name="log", kind="log", columns="difference"),
    dict(name="age", kind="age", columns=("at", "born"), unit="days"),
    dict(name="age_bucket", kind="bucket", columns="age", boundaries=(0.0, 1.5, 30.0)),
]
NAMES = [entry["name"] for entry in DERIVED]
FEATURES = dict(
    tasks=[dict(name="click", label="label")],
    derived=DERIVED,
    dense=[dict(columns=["ratio", "difference", "log", "age"], standardize=False)],
    categorical=[
        dict(columns=["hour", "utc"], encoding="integer", rows=24),
        dict(columns=["weekday", "age_bucket"], encoding="integer", rows=7),
        dict(columns=["pair", "three"], encoding="hash", rows=1000),
    ],
    keep=NAMES,
)


def crossed(*parts):
    if all(part is None for part in parts):
        return None
    data = b"".join(
        b"\xff\xff\xff\xff" if p is None else len(p.encode()).to_bytes(4, "little") + p.encode()
        for p in parts
    )
    return xxhash.xxh3_64_hexdigest(data)


def plain(row):
    """The derived values of a record."""
    at, born, user, item, x, y = (row[k] for k in ("at", "born", "user", "item", "x", "y"))
    local = None if at is None else at.replace(tzinfo=datetime.UTC).astimezone(
        zoneinfo.ZoneInfo(ZONE)
    )  # fmt: skip
    numbers = None not in (x, y)
    difference = x - y if numbers else None
    age = None if None in (at, born) else (at - born).total_seconds() / 86_400
    hour = None if local is None else local.hour
    return {
        "hour": hour,
        "weekday": None if local is None else local.weekday(),
        "utc": None if at is None else at.hour,
        "pair": crossed(user, item),
        "three": crossed(user, item, None if hour is None else str(hour)),
        "ratio": x / y if numbers and y else None,
        "difference": difference,
        "log": None if difference is None
        else math.copysign(math.log1p(abs(difference)), difference),
        "age": age,
        "age_bucket": None if age is None else sum(age >= edge for edge in (0.0, 1.5, 30.0)),
    }  # fmt: skip


def generated(seed, count=500):
    random = np.random.default_rng(seed)
    # Both changes of clocks of a year in New York are within these times.
    start = datetime.datetime(2024, 1, 1)
    shift = [datetime.timedelta(seconds=int(s)) for s in random.integers(0, 365 * 86_400, count)]
    before = [datetime.timedelta(hours=int(h)) for h in random.integers(-30, 2000, count)]

    def some(values):
        return [None if random.random() < 0.2 else v for v in values]

    at = [start + s for s in shift]
    return {
        "label": random.integers(0, 2, count).tolist(),
        "at": some(at),
        "born": some([a - b for a, b in zip(at, before, strict=True)]),
        "user": some([f"u{i or ''}" for i in random.integers(0, 9, count)]),
        "item": some([["ä", "1:2", "12", "2"][i] for i in random.integers(0, 4, count)]),
        "x": some(random.integers(-9, 9, count).astype(float).tolist()),
        "y": some(random.integers(-2, 3, count).astype(float).tolist()),
    }


def tf_example(row):
    """Encodes a record as tf.Example, in which a missing value is a feature that is absent."""
    kinds = {int: "int64", float: "float32"}
    features = {
        name: tfrecords.feature(kinds[type(value)], [value])
        if type(value) in kinds
        else tfrecords.feature("bytes", [str(value).encode()])
        for name, value in row.items()
        if value is not None
    }
    return tfrecords.example(features)


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("derived")
    columns = generated(0)
    pq.write_table(pa.table(columns), folder / "raw.parquet")
    with open(folder / "raw.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [list(columns), *zip(*columns.values(), strict=True)]
        )
    parquet, text, records = (
        dict(kind=kind, files=dict(train=str(folder / f"raw.{kind}")))
        for kind in ("parquet", "csv", "tfrecord")
    )
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    tfrecords.write_file(folder / "raw.tfrecord", map(tf_example, rows))
    readers = {
        "parquet": prepare(FEATURES, parquet, folder / "a", report=lambda _: None),
        "csv": prepare(FEATURES, text, folder / "b", report=lambda _: None),
        "tfrecord": prepare(FEATURES, records, folder / "c", report=lambda _: None),
        "direct": open_direct(FEATURES, parquet),
    }
    return readers, [plain(row) for row in rows]


@pytest.mark.parametrize("reader", ["parquet", "csv", "tfrecord", "direct"])
def test_derived_values_are_those_of_plain_python(stores, reader):
    store, expected = stores[0][reader], stores[1]
    block, first = (s.split("train").read_block(0) for s in (store, stores[0]["parquet"]))
    assert np.array_equal(block.ids, first.ids)
    assert np.array_equal(block.dense, first.dense)
    result = block.kept.to_pylist()
    for name in NAMES:
        values, reference = [row[name] for row in result], [row[name] for row in expected]
        if name == "log":  # NumPy may round the last bit in another way
            values, reference = ([v and float(f"{v:.12g}") for v in c] for c in (values, reference))
        assert values == reference
        assert len(set(values)) > 3
        assert None in values
    ratio = np.array([row["ratio"] or 0 for row in expected], np.float32)
    assert np.array_equal(block.dense[:, 0], ratio)


def test_parts_of_a_cross_do_not_run_into_each_other(stores):
    block = stores[0]["parquet"].split("train").read_block(0)
    pairs = set(block.kept.column("pair").to_pylist())
    # With missing users and items, of which one pair is missing. u, 12 and u1, 2 are two pairs.
    assert len(pairs) == 10 * 5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (dict(kind="hours", columns="at"), r"derived\[0\].kind: must be one of .*'hours'"),
        (dict(kind="hour", columns="att"), r"derived\[0\].columns: .*no column 'att'.*'at'"),
        (dict(kind="cross", columns="at"), r"columns: must be 2 or 3 columns \(kind='cross'\)"),
        (dict(kind="hour", columns="at", zone="Europe/Berlim"), "IANA.*nearest is 'Europe/Berlin'"),
        (dict(kind="log", columns="x", zone=ZONE), "zone.*kind.*log"),
        (dict(kind="bucket", columns="x"), "boundaries: must be rising"),
        (dict(kind="log", columns="x", name="y"), r"derived\[0\].name: must be .*no other.*'y'"),
        (dict(kind="log", columns="user", name="z"), r"raw.parquet, row \d+, column user.*number"),
    ],
)
def test_what_cannot_be_derived_is_refused(tmp_path, entry, message):
    pq.write_table(pa.table(generated(0, 20)), tmp_path / "raw.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "raw.parquet")))
    features = dict(tasks=FEATURES["tasks"], derived=[dict(name="new") | entry], dense=["x"])
    features["dense"] = [dict(columns="x")]
    with pytest.raises(InputError, match=message):
        prepare(features, source, tmp_path / "store", report=lambda _: None)


def test_a_record_that_cannot_be_derived_is_skipped_as_it_was_written(tmp_path):
    table = pa.table({"label": [0, 1, 1], "x": ["1", "two", "3"]})
    pq.write_table(table, tmp_path / "raw.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "raw.parquet")))
    features = dict(
        tasks=FEATURES["tasks"],
        derived=[dict(name="log", kind="log", columns="x")],
        dense=[dict(columns="log", standardize=True)],
    )
    store = prepare(features, source, tmp_path / "store", on_error="skip", report=lambda _: None)
    assert store.split("train").rows == 2
    assert store.schema.dense[0].mean == pytest.approx((math.log(2) + math.log(4)) / 2)
    text = (tmp_path / "store/rejected.jsonl").read_text()
    assert '"two"' in text
    assert '"log":' not in text


@pytest.mark.parametrize("offsets", [derive._offsets, columns._offsets], ids=["data", "serving"])
@pytest.mark.parametrize(
    ("zone", "start"),
    [
        ("America/St_Johns", "2010-03-14T03:25"),  # clocks changed a minute after midnight
        ("America/St_Johns", "2010-11-07T02:25"),
        ("Antarctica/Casey", "2022-10-01T15:50"),
    ],
)
def test_clocks_that_change_within_a_quarter_of_an_hour_are_right(offsets, zone, start):
    first = datetime.datetime.fromisoformat(start).replace(tzinfo=datetime.UTC).timestamp()
    times = first + np.arange(0, 1800, 7.5)
    clock = zoneinfo.ZoneInfo(zone)
    local = [datetime.datetime.fromtimestamp(t, datetime.UTC).astimezone(clock) for t in times]
    expected = [moment.utcoffset().total_seconds() for moment in local]
    assert len(set(expected)) == 2
    np.testing.assert_array_equal(offsets(times, clock), expected)
