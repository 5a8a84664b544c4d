"""Preparation of a store: fitted values, written files, and the state after a failure."""

import collections
import csv
import gzip
import math
import random
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from jaxrank import json_files, validate
from jaxrank.data.examples import join
from jaxrank.data.prepare import encode_unit
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.sources import text
from jaxrank.data.spec.derived import add_derived
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import resolve
from jaxrank.data.statistics.report import unscaled
from jaxrank.data.store.reader import is_store, open_store
from jaxrank.errors import InputError, RunError
from jaxrank.features import MAX_GROUP, MISSING_ROW, PAD, UNKNOWN_ROW, Dense, Schema

CLICK = dict(name="click", label="label")


def write_csv(path, header, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])
    return str(path)


def prepare_csv(tmp_path, header, rows, *, test=None, options=None, name="store", **features):
    files = dict(train=write_csv(tmp_path / f"{name}.csv", header, rows))
    if test is not None:
        files["test"] = write_csv(tmp_path / f"{name}_test.csv", header, test)
    return prepare(
        dict(tasks=[CLICK]) | features,
        dict(kind="csv", files=files),
        tmp_path / name,
        report=lambda _: None,
        **(options or {}),
    )


def prepare_parquet(tmp_path, columns, **features):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table(columns), path)
    source = dict(kind="parquet", files=dict(train=str(path)))
    features = dict(tasks=[CLICK]) | features
    return prepare(features, source, tmp_path / "store", report=lambda _: None)


def whole(store, split="train"):
    return join(list(store.split(split).blocks()))


def read_lists(block):
    """Converts list_values to nested lists: [example][list] -> ids."""
    values = iter(block.list_values.tolist())
    return [[[next(values) for _ in range(n)] for n in row] for row in block.list_lengths]


# Real data.


def test_criteo_sample_is_encoded_as_plain_python_encodes_it(tmp_path, shared_data, monkeypatch):
    monkeypatch.setattr(text, "_ROWS_PER_CHUNK", 2000)
    path = shared_data / "criteo_sample" / "train.tsv.gz"
    features = dict(
        tasks=[CLICK],
        dense=[dict(columns="I*", log=True, standardize=True, missing_indicator=True)],
        categorical=[dict(columns="C*", min_count=3)],
        keep=["label"],
    )
    source = dict(kind="criteo", files=dict(train=str(path)))
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    block = whole(store)
    with gzip.open(path, "rt", newline="") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]

    np.testing.assert_array_equal(block.labels[:, 0], [float(r[0]) for r in rows])
    assert block.kept.column("label").to_pylist() == [r[0] for r in rows]
    for i in range(13):
        raw = [r[1 + i] for r in rows]
        logs = [math.copysign(math.log1p(abs(float(v))), float(v)) for v in raw if v]
        mean = math.fsum(logs) / len(logs)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / len(logs))
        scaled = iter([(x - mean) / std for x in logs])
        expected = [next(scaled) if v else 0.0 for v in raw]
        np.testing.assert_allclose(block.dense[:, 2 * i], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(block.dense[:, 2 * i + 1], [v == "" for v in raw])
        assert store.schema.dense[2 * i + 1].name == f"I{i + 1}:missing"
    for i in range(26):
        raw = [r[14 + i] for r in rows]
        counts = collections.Counter(v for v in raw if v)
        order = sorted((v for v in counts if counts[v] >= 3), key=lambda v: (-counts[v], v))
        row_of = {v: 2 + k for k, v in enumerate(order)} | {"": MISSING_ROW}
        np.testing.assert_array_equal(block.ids[:, i], [row_of.get(v, UNKNOWN_ROW) for v in raw])
        values, seen = store.vocabulary(f"C{i + 1}")
        assert values == order
        assert seen.tolist() == [counts[v] for v in order]
        statistics = store.split("train").statistics["categorical"][f"C{i + 1}"]
        assert statistics["missing"] == raw.count("")
        assert statistics["unknown"] == sum(n for v, n in counts.items() if n < 3)


# Vocabularies.


def test_rows_follow_falling_counts_and_rare_values_are_unknown(tmp_path):
    users = ["b", "b", "a", "a", "c", "c", "c", "rare", ""]
    store = prepare_csv(
        tmp_path, ["label", "user"], [[1, u] for u in users], test=[[0, "new"], [0, "a"], [0, ""]],
        categorical=[dict(columns="user", min_count=2)],
    )  # fmt: skip
    assert store.vocabulary("user")[0] == ["c", "a", "b"]
    assert store.schema.tables[0].rows == 5
    assert whole(store).ids[:, 0].tolist() == [4, 4, 3, 3, 2, 2, 2, UNKNOWN_ROW, MISSING_ROW]
    assert whole(store, "test").ids[:, 0].tolist() == [UNKNOWN_ROW, 3, MISSING_ROW]
    assert store.split("test").statistics["categorical"] == {
        "user": {
            "ids": 3, "missing": 1, "unknown": 1, "out_of_range": 0, "unknown_share": 0.5,
            "distinct": 1,
        }
    }  # fmt: skip


def test_counting_in_many_small_merges_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_MIN_CHUNK_BYTES", 256)
    monkeypatch.setattr(text, "_ROWS_PER_CHUNK", 10)
    monkeypatch.setattr("jaxrank.data.statistics.vocabulary._MERGE_AFTER", 5)
    draw = random.Random(1)
    users = [f"u{int(draw.paretovariate(0.7))}" for _ in range(3000)]
    store = prepare_csv(
        tmp_path, ["label", "user"], [[1, u] for u in users], categorical=[dict(columns="user")]
    )
    counts = collections.Counter(users)
    values, seen = store.vocabulary("user")
    assert values == sorted(counts, key=lambda v: (-counts[v], v))
    assert seen.tolist() == [counts[v] for v in values]


def test_an_earlier_stores_rows_stay_and_new_values_follow(tmp_path):
    ids = [dict(columns="user", min_count=2)]
    first = prepare_csv(
        tmp_path, ["label", "user"], [[1, u] for u in "ccbbbaax"], categorical=ids, name="day1"
    )
    assert first.vocabulary("user")[0] == ["b", "a", "c"]
    second = prepare_csv(
        tmp_path, ["label", "user"], [[1, u] for u in "zzzzyyyxaccccccc"], categorical=ids,
        name="day2",
        options=dict(vocabularies=str(tmp_path / "day1")),
    )  # fmt: skip
    values, counts = second.vocabulary("user")
    assert values == ["b", "a", "c", "z", "y", "x"]
    assert counts.tolist() == [3, 2 + 1, 2 + 7, 4, 3, 1 + 1]
    assert whole(second).ids[:, 0].tolist() == [5] * 4 + [6] * 3 + [7, 3] + [4] * 7
    assert first.schema.tables[0].checksum != second.schema.tables[0].checksum


def test_an_earlier_store_gives_the_scale_of_standardised_floats(tmp_path):
    floats = [dict(columns="x", standardize=True)]
    prepare_csv(tmp_path, ["label", "x"], [[1, 2], [1, 4]], dense=floats, name="day1")
    options = dict(vocabularies=str(tmp_path / "day1"))
    later = prepare_csv(
        tmp_path, ["label", "x"], [[1, 100], [0, 3]], dense=floats, name="day2", options=options
    )
    assert whole(later).dense[:, 0].tolist() == [97, 0]  # mean 3, deviation 1


def test_an_earlier_scale_is_of_values_or_of_their_logs(tmp_path):
    rows = [[1, 2], [1, 4]]
    floats = dict(columns="x", standardize=True)
    prepare_csv(tmp_path, ["label", "x"], rows, dense=[floats | dict(log=True)], name="day1")
    options = dict(vocabularies=str(tmp_path / "day1"))
    with pytest.raises(
        InputError, match=r"day1: the dense feature 'x' must have log=False .* log=True"
    ):
        prepare_csv(tmp_path, ["label", "x"], rows, dense=[floats], name="day2", options=options)
    same = prepare_csv(
        tmp_path, ["label", "x"], rows, dense=[floats | dict(log=True)], name="day3",
        options=options,
    )  # fmt: skip
    assert same.schema == open_store(tmp_path / "day1").schema
    floats = dict(columns="x", standardize=False)
    plain = prepare_csv(  # nothing was fitted for x, so there is nothing to reuse
        tmp_path, ["label", "x"], rows, dense=[floats], name="day4", options=options
    )
    assert plain.schema.dense == (Dense("x"),)


def test_floats_are_standardised_unless_the_config_says_otherwise(tmp_path):
    prices = [round(float(x), 3) for x in np.exp(np.random.default_rng(0).normal(3, 2, 400))]
    header, rows = ["label", "year", "price", "raw"], []
    for i, price in enumerate(prices):
        rows.append([i % 2, 1980 + i % 45 if i else "", price, 100 * i])
    floats = [
        dict(columns=["year", "price"], missing_indicator=True),
        dict(columns="raw", standardize=False),
    ]
    store = prepare_csv(tmp_path, header, rows, dense=floats)
    year, _, price, _, raw = store.schema.dense
    years, logs = np.array([row[1] for row in rows[1:]], float), np.log1p(prices)
    assert (year.log, price.log, raw) == (False, True, Dense("raw"))
    assert (year.mean, year.std) == pytest.approx((years.mean(), years.std()))
    assert (price.mean, price.std) == pytest.approx((logs.mean(), logs.std()))
    dense = whole(store).dense
    assert dense[0, :2].tolist() == [0, 1]  # a missing year is the mean
    np.testing.assert_allclose(dense[1:, 0] * years.std() + years.mean(), years, rtol=1e-6)
    np.testing.assert_allclose(dense[:, 2] * logs.std() + logs.mean(), logs, rtol=1e-5)
    assert dense[:, 4].tolist() == [row[3] for row in rows]


@pytest.mark.parametrize("field", [dict(), dict(standardize=False), dict(log=True)])
def test_open_floats_are_scaled_as_in_the_earlier_store(tmp_path, field):
    header, rows = ["label", "x"], [[i % 2, 100 * i] for i in range(40)]
    floats, later = [dict(columns="x", **field)], [[1, 5000], [0, 7]]
    first = prepare_csv(tmp_path, header, rows, dense=floats, name="day1")
    options = dict(vocabularies=str(tmp_path / "day1"))
    second = prepare_csv(
        tmp_path, header, later, dense=[dict(columns="x")], name="day2", options=options
    )
    assert second.schema == first.schema
    refitted = prepare_csv(
        tmp_path, header, later, dense=[dict(columns="x")], name="day3",
        options=options | dict(refit_scales=True),
    )  # fmt: skip
    assert refitted.schema.dense[0].mean == pytest.approx(2503.5)


@pytest.mark.parametrize("field", [dict(), dict(encoding="hash", rows=99)])
def test_ids_that_another_file_writes_in_another_form_are_reported(tmp_path, field):
    (tmp_path / "in").mkdir()
    for name, form in (("a", "36"), ("b", "36.0")):
        write_csv(
            tmp_path / "in" / f"{name}.csv",
            ["label", "c"],
            [[1, form], [0, "7"], [1, "1,234"], [0, 1234]],
        )
    lines: list[str] = []
    source = dict(kind="csv", files=dict(train=str(tmp_path / "in")))
    features = dict(tasks=[CLICK], categorical=[dict(columns="c", **field)])
    prepare(features, source, tmp_path / "store", report=lines.append)
    (line,) = (line for line in lines if "only in their form" in line)
    # Without a vocabulary only the first file is looked at.
    count, name = (2, "feature") if field else (4, "table")
    assert line.startswith(f"{name} c: {count} values differ from another only in their form, such")
    assert "'1,234'" in line or "'36'" in line


def test_open_floats_stay_as_they_are_without_a_training_split(tmp_path):
    lines: list[str] = []
    path = write_csv(tmp_path / "a.csv", ["label", "x"], [[1, 2000], [0, 2001]])
    source = dict(kind="csv", files=dict(test=path))
    features = dict(tasks=[CLICK], dense=[dict(columns="x")])
    store = prepare(features, source, tmp_path / "store", report=lines.append)
    assert store.schema.dense == (Dense("x"),)
    (line,) = (line for line in lines if "Dense features that are not scaled: x" in line)
    assert line.endswith(
        "They are scaled by a split 'train', or as in a store that --vocabularies names."
    )


def test_the_schema_holds_the_transform_of_each_float(tmp_path):
    header, rows = ["label", "x", "y", "z"], [[1, 1.5, 4, 7], [0, 2.5, 4, 8], [0, "", 4, 9]]
    floats = [
        dict(columns="x", log=True, standardize=True, missing_indicator=True),
        dict(columns="y", standardize=True),
        dict(columns="z", log=True),
    ]
    store = prepare_csv(tmp_path, header, rows, dense=floats)
    logs = np.log1p([1.5, 2.5])
    x, *others = store.schema.dense
    assert (x.name, x.log) == ("x", True)
    assert (x.mean, x.std) == pytest.approx((logs.mean(), logs.std()))
    # A column of one value is divided by 1.
    assert others == [Dense("x:missing"), Dense("y", False, 4.0, 1.0), Dense("z", True, 0.0, 1.0)]
    np.testing.assert_allclose(whole(store).dense[:2, 0] * x.std + x.mean, logs, rtol=1e-6)
    other = prepare_csv(tmp_path, header, [*rows, [1, 3.5, 4, 7]], dense=floats, name="other")
    assert other.schema.dense[0] != x
    assert other.schema.dense[1:] == store.schema.dense[1:]


def test_a_later_store_extends_the_earlier_ones_tables(tmp_path):
    ids = [dict(columns="user")]
    first = prepare_csv(
        tmp_path, ["label", "user"], [[1, u] for u in "aab"], categorical=ids, name="day1"
    )
    second = prepare_csv(
        tmp_path, ["label", "user"], [[1, u] for u in "ccca"], categorical=ids, name="day2",
        options=dict(vocabularies=str(first.path)),
    )  # fmt: skip
    alone = prepare_csv(
        tmp_path, ["label", "user"], [[1, u] for u in "ccca"], categorical=ids, name="alone"
    )
    (table,) = first.schema.tables
    assert second.schema.tables[0].rows == table.rows + 1
    assert second.extends(table)
    assert not alone.extends(table)
    assert not first.extends(second.schema.tables[0])


def test_a_damaged_vocabulary_of_an_earlier_store_is_rejected(tmp_path):
    ids = [dict(columns="user")]
    first = prepare_csv(tmp_path, ["label", "user"], [[1, "a"]], categorical=ids, name="day1")
    (first.path / "vocabulary" / "user.arrow").unlink()
    with pytest.raises(InputError, match=r"vocabulary/user.arrow: this file .* is missing"):
        prepare_csv(
            tmp_path, ["label", "user"], [[1, "a"]], categorical=ids, name="day2",
        options=dict(vocabularies=str(first.path)),
        )  # fmt: skip


def test_a_split_alone_is_encoded_with_an_earlier_stores_vocabularies(tmp_path):
    features = dict(tasks=[CLICK], categorical=[dict(columns="user")])
    first = prepare_csv(tmp_path, ["label", "user"], [[1, "a"], [1, "b"], [1, "b"]],
                        categorical=features["categorical"])  # fmt: skip
    path = write_csv(tmp_path / "later.csv", ["label", "user"], [[1, "new"], [1, "a"]])
    source = dict(kind="csv", files=dict(test=path))
    with pytest.raises(InputError, match=r"split 'train' to fit user"):
        prepare(features, source, tmp_path / "later", report=lambda _: None)
    later = prepare(
        features, source, tmp_path / "later", vocabularies=str(first.path), report=lambda _: None
    )
    assert whole(later, "test").ids[:, 0].tolist() == [UNKNOWN_ROW, 3]
    assert later.schema.tables == first.schema.tables


def test_an_earlier_table_of_another_encoding_is_rejected(tmp_path):
    rows = [[1, "a"]]
    prepare_csv(tmp_path, ["label", "user"], rows, categorical=[dict(columns="user")], name="day1")
    with pytest.raises(InputError, match=r"table 'user' must have encoding='hash'.*'vocabulary'"):
        prepare_csv(
            tmp_path, ["label", "user"], rows, name="day2",
            categorical=[dict(columns="user", encoding="hash", rows=9)],
            options=dict(vocabularies=str(tmp_path / "day1")),
        )  # fmt: skip


def test_an_earlier_feature_of_another_number_of_buckets_is_rejected(tmp_path):
    rows = [[i % 2, i] for i in range(40)]

    def prepared(name, buckets, **options):
        ids = [dict(columns="x", encoding="bucket", buckets=buckets)]
        return prepare_csv(
            tmp_path, ["label", "x"], rows, categorical=ids, name=name, options=options
        )

    first = prepared("day1", 4)
    earlier = dict(vocabularies=str(first.path))
    with pytest.raises(InputError, match=r"day1: the feature 'x' must have buckets=8 .* buckets=4"):
        prepared("day2", 8, **earlier)
    assert prepared("day3", 4, **earlier).schema.tables == first.schema.tables


@pytest.mark.parametrize("log", [True, False])
def test_records_are_skipped_in_learning_as_in_encoding(tmp_path, log):
    """The value is out of range of float32, but its logarithm is not."""
    rows = [[1, "1e39", "a"], [0, "1", "b"], [0, "3", "c"]]

    def prepared(name, on_error):
        return prepare_csv(
            tmp_path, ["label", "x", "user"], rows, categorical=[dict(columns="user")], name=name,
            dense=[dict(columns="x", log=log, standardize=True)],
            options=dict(on_error=on_error),
        )  # fmt: skip

    result = prepared("skipped", "skip")
    kept = rows if log else rows[1:]
    assert result.vocabulary("user")[0] == [user for *_, user in kept]
    block = whole(result)
    assert block.ids[:, 0].tolist() == list(range(2, 2 + len(kept)))
    assert block.dense[:, 0].mean() == pytest.approx(0, abs=1e-6)
    if log:
        np.testing.assert_array_equal(block.dense, whole(prepared("whole", "error")).dense)
    else:
        with pytest.raises(InputError, match=r"row 2, column x: .* range of float32: found '1e39'"):
            prepared("whole", "error")


def test_features_that_name_a_table_share_its_vocabulary(tmp_path):
    header = ["label", "query", "title", "words"]
    rows = [[1, "a", "b", "c|c|c"], [0, "b", "b", ""], [0, "", "new", "a"]]
    store = prepare_csv(
        tmp_path, header, rows,
        categorical=[dict(columns=["query", "title"], table="word")],
        ragged=[dict(columns="words", table="word")],
    )  # fmt: skip
    assert [t.name for t in store.schema.tables] == ["word"]
    assert store.vocabulary("word")[0] == ["b", "c", "a", "new"]
    assert whole(store).ids.tolist() == [[4, 2], [2, 2], [MISSING_ROW, 5]]
    assert read_lists(whole(store)) == [[[3, 3, 3]], [[]], [[4]]]


# Other encodings.


def test_hashed_rows_are_stable_and_in_range(tmp_path):
    users = [f"user{i}" for i in range(2000)]
    rows = [[1, u] for u in [*users, ""]]
    ids = [dict(columns="user", encoding="hash", rows=100, salt="s:")]
    store = prepare_csv(tmp_path, ["label", "user"], rows, categorical=ids)
    result = whole(store).ids[:, 0]
    expected = [2 + xxhash.xxh64_intdigest(("s:" + u).encode()) % 98 for u in users]
    assert result.tolist() == [*expected, MISSING_ROW]
    assert result[:3].tolist() == [64, 4, 76]  # fixed, because stored models depend on it
    assert set(result[:-1].tolist()) == set(range(2, 100))
    assert store.schema.tables[0].rows == 100
    other = prepare_csv(
        tmp_path, ["label", "user"], rows, categorical=[ids[0] | dict(salt="t:")], name="other"
    )
    assert other.schema.tables[0].checksum != store.schema.tables[0].checksum


@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint64(), pa.float64(), pa.string()])
def test_integer_ids_are_rows_already(tmp_path, kind):
    users = pa.array([0, 99, None, 7], pa.int64()).cast(kind)
    store = prepare_parquet(
        tmp_path, {"label": [1, 0, 1, 1], "user": users},
        categorical=[dict(columns="user", encoding="integer", rows=100)],
    )  # fmt: skip
    assert whole(store).ids[:, 0].tolist() == [0, 99, PAD, 7]
    assert store.schema.tables[0].rows == 100
    assert store.split("train").statistics["categorical"]["user"] == {
        "ids": 4, "missing": 1, "unknown": 0, "out_of_range": 0, "unknown_share": 0,
        "distinct": 3,
    }  # fmt: skip


# Policies for integer ids that are out of range. For a table of 7 rows:
GOOD = [0, 6, None, 3]
BAD = [
    *(-1, 7, -(2**31), 2**31 - 1, 2**31, 2**32, 2**32 + 3, 2**63 - 1, -(2**63)),
    *(2**63, 2**64 - 1, 2**64, 2**64 + 3, -(2**64) - 1, 10**25, -(10**25)),
]


def _encode_row(value, policy, rows=7):
    """Computes the row of one id with Python integers."""
    if value is None:
        return PAD
    if 0 <= value < rows:
        return value
    return {
        "oov": rows,
        "hash": xxhash.xxh64_intdigest(str(value).encode()) % rows,
        "clip": 0 if value < 0 else rows - 1,
    }[policy]


def _to_array(kind, values):
    if kind == "text":
        # Leading zeros do not change a number.
        spelled = [v if v is None else f"{'-' if v < 0 else ''}000{abs(v)}" for v in values]
        return pa.array(spelled)
    if kind == "float":
        return pa.array([v if v is None else float(v) for v in values])
    return pa.array(values, kind)


@pytest.mark.parametrize("policy", ["oov", "hash", "clip"])
@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        (pa.int16(), -(2**15), 2**15 - 1),
        (pa.int32(), -(2**31), 2**31 - 1),
        (pa.int64(), -(2**63), 2**63 - 1),
        (pa.uint64(), 0, 2**64 - 1),
        ("float", -(10**30), 10**30),
        ("text", -(10**30), 10**30),
    ],
)
def test_an_id_outside_its_table_gets_the_row_of_its_policy(tmp_path, policy, kind, least, most):
    bad = [v for v in BAD if least <= v <= most] * 2
    if kind == "float":  # as the nearest float
        bad = [int(float(v)) for v in bad]
        if policy == "hash":  # larger floats were rounded, so that ids would share a hash
            bad = [v for v in bad if abs(v) < 2**53]
    values = [v for pair in zip(bad, GOOD * len(bad), strict=False) for v in pair] + GOOD
    lists = [values[i : i + 3] for i in range(0, len(values), 3)]
    lists = [[v for v in cells if v is not None] for cells in lists]
    flat = [v for cells in lists for v in cells]
    ends = np.cumsum([0] + [len(cells) for cells in lists])
    columns = {
        "label": [1] * len(lists),
        "id": _to_array(kind, values[: len(lists)]),
        "list": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), _to_array(kind, flat)),
    }
    both = dict(encoding="integer", rows=7, table="t", on_bad_id=policy)
    store = prepare_parquet(
        tmp_path,
        columns,
        categorical=[dict(columns="id", **both)],
        ragged=[dict(columns="list", **both)],
    )
    (table,) = store.schema.tables
    assert table.rows == (8 if policy == "oov" else 7)
    block = whole(store)
    expected = [_encode_row(v, policy) for v in values[: len(lists)]]
    assert block.ids[:, 0].tolist() == expected
    assert block.list_values.tolist() == [_encode_row(v, policy) for v in flat]
    assert max(block.list_values) < table.rows
    statistics = store.split("train").statistics
    for part, name, used in (("categorical", "id", values[: len(lists)]), ("ragged", "list", flat)):
        outside = sum(v is not None and not 0 <= v < 7 for v in used)
        assert statistics[part][name]["out_of_range"] == outside > 0
    assert statistics["categorical"]["id"]["missing"] == values[: len(lists)].count(None)


def test_hashes_of_ids_outside_their_table_are_stable(tmp_path):
    values = ["-1", "100", "18446744073709551616", "0018446744073709551616"]
    ids = [dict(columns="user", encoding="integer", rows=100, on_bad_id="hash")]
    store = prepare_csv(tmp_path, ["label", "user"], [[1, v] for v in values], categorical=ids)
    result = whole(store).ids[:, 0].tolist()
    assert result == [28, 30, 91, 91]  # fixed, because stored models depend on it


def test_ids_outside_their_tables_are_counted_by_feature_and_reported(tmp_path):
    header = ["label", "a", "b", "c", "l", "m"]
    rows = [
        [1, -1, 5, "3|-4", "1|77|-2", "9"],
        [0, 10, 9, "", "10|10|10|10", ""],
        [1, "", 10**40, "12|99", "", "0|1"],
    ]
    lines: list[str] = []
    oov = dict(encoding="integer", rows=10, table="shared", on_bad_id="oov")
    path = write_csv(tmp_path / "a.csv", header, rows)
    store = prepare(
        dict(
            tasks=[CLICK],
            categorical=[
                dict(columns=["a", "b"], **oov),
                dict(columns="c", encoding="integer", rows=13, length=2, separator="|",
                     on_bad_id="clip"),
            ],
            ragged=[dict(columns="l", **oov), dict(columns="m", encoding="integer", rows=10)],
        ),
        dict(kind="csv", files=dict(train=path)),
        tmp_path / "store",
        report=lines.append,
    )  # fmt: skip
    statistics = store.split("train").statistics
    result = {
        n: f["out_of_range"] for p in ("categorical", "ragged") for n, f in statistics[p].items()
    }
    assert result == {"a": 2, "b": 1, "c": 2, "l": 6, "m": 0}
    assert whole(store).ids.tolist() == [[10, 5, 3, 0], [10, 9, PAD, PAD], [PAD, 10, 12, 12]]
    assert [t.rows for t in store.schema.tables] == [11, 13, 10]
    assert [line for line in lines if "out of range" in line] == [
        "  a: 2 ids are out of range of their table",
        "  b: 1 ids are out of range of their table",
        "  c: 2 ids are out of range of their table",
        "  l: 6 ids are out of range of their table",
    ]


def test_a_summary_of_many_features_keeps_the_lines_of_bad_ids(tmp_path):
    names = [f"c{i}" for i in range(30)]
    ids = [dict(columns="c*", encoding="integer", rows=20, on_bad_id="clip")]
    path = write_csv(tmp_path / "a.csv", ["label", *names], [[1, *range(30)]])
    lines: list[str] = []
    source = dict(kind="csv", files=dict(train=path))
    prepare(dict(tasks=[CLICK], categorical=ids), source, tmp_path / "store", report=lines.append)
    outside = [line for line in lines if "out of range" in line]
    assert outside == [f"  c{i}: 1 ids are out of range of their table" for i in range(20, 30)]


def test_tables_with_other_policies_are_other_tables(tmp_path):
    stores = {}
    for policy in ("error", "oov", "hash", "clip"):
        ids = [dict(columns="user", encoding="integer", rows=9, on_bad_id=policy)]
        stores[policy] = prepare_csv(
            tmp_path, ["label", "user"], [[1, 0], [1, 8]], categorical=ids, name=policy
        )
    for local, store in stores.items():
        for other, table in ((p, s.schema.tables[0]) for p, s in stores.items()):
            assert store.extends(table) == (local == other)
    assert stores["error"].schema.tables[0].checksum == ""  # as in versions without the option


@pytest.mark.parametrize("kind", [pa.int32(), pa.uint64(), pa.float64(), pa.large_string()])
def test_whole_numbers_in_a_vocabulary_are_their_digits(tmp_path, kind):
    users = pa.array([10, 9, None, 10], pa.int64()).cast(kind)
    columns = {"label": [True, False, None, True], "user": users, "d": users.dictionary_encode()}
    store = prepare_parquet(
        tmp_path, columns, categorical=[dict(columns=["user", "d"])], keep=["d"]
    )
    assert store.vocabulary("user")[0] == ["10", "9"]
    assert whole(store).ids.tolist() == [[2, 2], [3, 3], [MISSING_ROW] * 2, [2, 2]]
    assert whole(store).kept.column("d").to_pylist() == users.to_pylist()
    np.testing.assert_array_equal(whole(store).labels[:, 0], [1, 0, np.nan, 1])


def test_a_fixed_number_of_ids_has_a_column_each(tmp_path):
    rows = [[1, "a b c", "x"], [1, "", "y"], [1, "b  a", "x"]]
    store = prepare_csv(
        tmp_path, ["label", "last", "z"], rows,
        categorical=[dict(columns="last", length=3, separator=" ", encoding="hash", rows=1000),
             dict(columns="z")],
    )  # fmt: skip
    a, b, c = (2 + xxhash.xxh64_intdigest(v.encode()) % 998 for v in "abc")
    assert whole(store).ids.tolist() == [[a, b, c, 2], [0, 0, 0, 3], [b, 0, a, 2]]
    assert store.split("train").statistics["categorical"]["last"]["missing"] == 4


# Floats and tasks.


def test_floats_are_logged_and_scaled_over_what_is_there(tmp_path):
    x = [1.5, -20.0, None, 1e6, 0.0]
    y = [None, 4.0, 4.0, None, 4.0]
    columns = {"label": [1] * 5, "x": x, "y": y}
    store = prepare_parquet(
        tmp_path, columns,
        dense=[dict(columns="x", log=True, standardize=True, missing_indicator=True),
                dict(columns="y", standardize=True)],
    )  # fmt: skip
    values = np.array([v for v in x if v is not None])
    logs = np.sign(values) * np.log1p(np.abs(values))
    scaled = (logs - logs.mean()) / logs.std()
    floats = whole(store).dense
    np.testing.assert_allclose(floats[[0, 1, 3, 4], 0], scaled, rtol=1e-6)
    assert floats[2, 0] == 0
    assert floats[:, 1].tolist() == [0, 0, 1, 0, 0]
    assert floats[:, 2].tolist() == [0] * 5  # a constant column, and missing values
    result = store.split("train").statistics["dense"]
    assert result["x"]["missing"] == 1
    for name, expected in (("mean", values.mean()), ("std", values.std()), ("max", 1e6)):
        assert result["x"][name] == pytest.approx(expected)
    assert result["y"] == {"missing": 2, "mean": 4, "std": 0, "min": 4, "max": 4}


@pytest.mark.parametrize("log", [False, True])
def test_a_column_of_one_value_is_zero_however_its_mean_is_rounded(tmp_path, log):
    columns = {"label": [1] * 6000, "x": [0.1] * 6000, "one": [1] * 6000}
    floats = [dict(columns=["x", "one"], log=log, standardize=True)]
    store = prepare_parquet(tmp_path, columns, dense=floats)
    assert not whole(store).dense.any()
    assert [f.std for f in store.schema.dense] == [1, 1]


def test_scales_of_a_file_that_drifts_are_those_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrank.data.sources.parquet._ROWS_PER_CHUNK", 64)
    x = np.random.default_rng(5).normal(size=1000) + np.arange(1000) ** 1.5
    floats = [dict(columns="x", standardize=True)]
    store = prepare_parquet(tmp_path, {"label": [1] * 1000, "x": x}, dense=floats)
    expected = (x - x.mean()) / x.std()
    np.testing.assert_allclose(whole(store).dense[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_masks_weights_and_truth_belong_to_their_task(tmp_path):
    header = ["click", "buy", "clicked", "w", "p"]
    rows = [["1", "1.0", 1, 0.5, 0.25], ["0", "0", 0, 2, ""], ["", "1", 1, 0, 1]]
    store = prepare_csv(
        tmp_path, header, rows,
        tasks=[dict(name="ctr", label="click", truth="p"),
               dict(name="cvr", label="buy", mask="clicked", weight="w")],
    )  # fmt: skip
    block, nan = whole(store), np.nan
    np.testing.assert_array_equal(block.labels, np.float32([[1, 1], [0, nan], [nan, 1]]))
    np.testing.assert_array_equal(block.weights, np.float32([[1, 0.5], [1, 2], [1, 0]]))
    np.testing.assert_array_equal(block.truth, np.float32([[0.25, nan], [nan, nan], [1, nan]]))
    assert store.split("train").statistics["tasks"] == {
        "ctr": {"known": 2, "positives": 1, "pending": 0},
        "cvr": {"known": 2, "positives": 2, "pending": 0},
    }


# Lists.


def test_lists_of_text_and_of_native_types_are_the_same(tmp_path):
    draw = random.Random(2)
    lists = {
        name: [[draw.choice("abcdefg") for _ in range(draw.randrange(5))] for _ in range(700)]
        for name in ("one", "two")
    }
    weights = [[draw.randrange(8) / 4 for _ in ids] for ids in lists["two"]]
    lists["one"][3] = None
    features = dict(
        ragged=[dict(columns="one", separator=";"), dict(columns="two", weights="w", separator=";")]
    )
    native = prepare_parquet(tmp_path, {"label": [1] * 700, **lists, "w": weights}, **features)
    joined = [
        [1, *(";".join(map(str, cell or [])) for cell in cells)]
        for cells in zip(lists["one"], lists["two"], weights, strict=True)
    ]
    texts = prepare_csv(tmp_path, ["label", "one", "two", "w"], joined, name="text", **features)
    row_of = [
        {value: 2 + i for i, value in enumerate(native.vocabulary(name)[0])}
        for name in ("one", "two")
    ]
    expected = [
        [[row_of[0][v] for v in cells or []], [row_of[1][v] for v in two]]
        for cells, two in zip(lists["one"], lists["two"], strict=True)
    ]
    expected_weights = [
        w
        for cells, ws in zip(lists["one"], weights, strict=True)
        for w in [1.0] * len(cells or []) + ws
    ]
    for store in (native, texts):
        assert read_lists(whole(store)) == expected
        assert whole(store).list_weights.tolist() == expected_weights
        assert store.schema.ragged[1].weighted
    assert native.split("train").statistics == texts.split("train").statistics


def test_an_overlong_list_is_cut_where_that_is_asked_for(tmp_path):
    rows = [[1, "a|b|c|d", "1|2|3|4"], [1, "d", "5"], [1, "", ""], [1, "c|c|c", "6|7|8"]]
    store = prepare_csv(
        tmp_path, ["label", "tags", "w"], rows,
        ragged=[dict(columns="tags", weights="w", max_length=2, on_overlong="truncate")],
    )  # fmt: skip
    assert store.vocabulary("tags")[0] == ["c", "a", "b", "d"]  # of the kept ids
    assert read_lists(whole(store)) == [[[3, 4]], [[5]], [[]], [[2, 2]]]
    assert whole(store).list_weights.tolist() == [1, 2, 5, 6, 7]
    assert store.split("train").statistics["ragged"]["tags"] == {
        "ids": 5, "mean": 5 / 4, "p50": 1, "p95": 2, "p99": 2, "max": 2, "empty": 1,
        "truncated_lists": 2, "truncated_share": 0.5, "truncated_ids": 3, "unknown": 0,
        "unknown_share": 0, "out_of_range": 0, "distinct": 4,
    }  # fmt: skip


def test_a_list_that_is_not_combined_has_as_many_places_as_its_longest_may_have(tmp_path):
    rows = [[1, "a|b|c|d", "x"], [1, "", ""], [1, "b", "y|x"]]
    sequence = dict(columns="tags", combiner="none", max_length=3, on_overlong="truncate")
    store = prepare_csv(
        tmp_path, ["label", "tags", "l"], rows, ragged=[sequence, dict(columns="l", max_length=5)]
    )
    tags, plain = store.schema.ragged
    assert (tags.combiner, tags.length, tags.weighted) == ("none", 3, False)
    assert (plain.combiner, plain.length) == ("mean", 0)
    assert read_lists(whole(store)) == [[[3, 2, 4], [2]], [[], []], [[2], [3, 2]]]
    older = json_files.plain(store.schema)
    assert validate.parse(Schema, older, "") == store.schema
    for entry in older["ragged"]:
        del entry["length"]
    assert [f.length for f in validate.parse(Schema, older, "").ragged] == [0, 0]
    with pytest.raises(InputError, match=r"at most max_length=3 ids: found 4"):
        prepare_csv(
            tmp_path, ["label", "tags", "l"], rows, ragged=[sequence | dict(on_overlong="error")],
            name="other",
        )  # fmt: skip


def test_statistics_of_list_lengths_equal_those_of_numpy(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrank.data.sources.parquet._ROWS_PER_CHUNK", 300)
    generator = np.random.default_rng(3)
    n = 2 * MAX_GROUP + 77
    lengths = generator.integers(0, 9, (n, 2))
    lengths[600:700] += 20
    lengths[-77:] += 30
    columns = {
        "label": [1] * n,
        **{name: [[1] * k for k in lengths[:, i]] for i, name in enumerate(["a", "b"])},
    }
    for size in (8192, 100):
        features = dict(tasks=[CLICK], ragged=[dict(columns=["a", "b"])])
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        source = dict(kind="parquet", files=dict(train=str(tmp_path / "a.parquet")))
        store = prepare(
            features, source, tmp_path / f"store{size}", block_size=size, report=lambda _: None
        )
        result = store.split("train").statistics["list_lengths"]
        runs = [lengths[i : i + MAX_GROUP].sum(axis=0) for i in range(n)]
        assert result["max_total_per_run"] == np.max(runs, axis=0).tolist()
        assert result["max_per_example"] == lengths.max(axis=0).tolist()
        np.testing.assert_allclose(result["mean"], lengths.mean(axis=0))
        np.testing.assert_allclose(result["covariance"], np.cov(lengths.T, bias=True))


# Columns and blocks.


def test_patterns_pass_over_labels_and_kept_columns(tmp_path):
    header = ["f_label", "f_b", "f_a", "f_time", "f_group", "c"]
    store = prepare_csv(
        tmp_path, header, [[1, 2, 3, 4, 5, "x"]],
        tasks=[dict(name="click", label="f_label")],
        dense=[dict(columns="f_*")], categorical=[dict(columns=["c", "f_group"])],
        keep=["c"], time="f_time", group="f_group",
    )  # fmt: skip
    assert [f.name for f in store.schema.dense] == ["f_b", "f_a"]
    assert [f.name for f in store.schema.categorical] == ["f_group", "c"]
    assert whole(store).kept.to_pylist() == [{"c": "x", "f_time": "4", "f_group": "5"}]


@pytest.mark.parametrize("block_size", [1, 7, 100, 1000])
def test_all_blocks_but_the_last_are_full(tmp_path, monkeypatch, block_size):
    monkeypatch.setattr(text, "_MIN_CHUNK_BYTES", 200)
    monkeypatch.setattr(text, "_ROWS_PER_CHUNK", 10)
    rows = [[i % 2, i, "|".join("ab"[: i % 3]), f"k{i}"] for i in range(150)]
    store = prepare_csv(
        tmp_path, ["label", "x", "tags", "key"], rows, options=dict(block_size=block_size),
        dense=[dict(columns="x", standardize=False)], ragged=[dict(columns="tags")], keep=["key"],
    )  # fmt: skip
    full, rest = divmod(150, block_size)
    sizes = store.split("train").block_rows.tolist()
    assert sizes == [block_size] * full + ([rest] if rest else [])
    block = whole(store)
    assert block.dense[:, 0].tolist() == list(range(150))
    assert read_lists(block) == [[[2, 3][: i % 3]] for i in range(150)]
    assert block.kept.column("key").to_pylist() == [f"k{i}" for i in range(150)]
    assert store.split("train").statistics["rows"] == 150


@pytest.mark.parametrize(
    ("features", "expected"),
    [
        (
            dict(dense=[dict(columns="price")], categorical=[dict(columns="*")]),
            (["price"], [*"abh"]),
        ),
        (
            dict(
                dense=[dict(columns="pr*")],
                categorical=[dict(columns="*")],
                ragged=[dict(columns="h")],
            ),
            (["price"], ["a", "b"]),
        ),
        (dict(dense=[dict(columns="price")], categorical=[dict(columns=["p*", "a"])]), None),
        (
            dict(categorical=[dict(columns="a", table="t"), dict(columns="*")]),
            ([], [*"abh", "price"]),
        ),
        (
            dict(dense=[dict(columns="p*")], categorical=[dict(columns="p*")]),
            (["price"], ["price"]),
        ),
        (
            dict(
                dense=[dict(columns="p*")],
                categorical=[dict(columns="price", encoding="bucket", buckets=3, table="t")],
            ),
            (["price"], ["price"]),
        ),
        (
            dict(dense=[dict(columns="p*")], categorical=[dict(columns="[a-z]*")]),
            (["price"], [*"abh"]),
        ),
        (
            dict(
                derived=[
                    dict(name="log", kind="log", columns="price"),
                    dict(name="ab", kind="cross", columns=["a", "b"]),
                ],
                dense=[dict(columns="log")],
                categorical=[dict(columns="*")],
            ),
            (["log"], ["a", "ab", "b", "h"]),
        ),
    ],
)
def test_a_pattern_passes_over_what_other_entries_name(features, expected):
    spec = FeatureSpec.from_state(dict(tasks=[CLICK]) | features)
    columns = ["label", "price", "a", "b", "h"]
    if expected is None:
        with pytest.raises(InputError, match=r"categorical\[0\].columns: 'p\*' matches no column"):
            resolve(spec, columns)
        return
    result = resolve(spec, add_derived(spec.derived, columns))
    assert ([f.name for f in result.dense], sorted(f.name for f in result.categorical)) == expected


def test_two_thousand_columns_by_pattern(tmp_path):
    names = ["label", *(f"f{i}" for i in range(1900)), *(f"c{i}" for i in range(100))]
    generator = np.random.default_rng(4)
    values = generator.integers(0, 50, (1500, 2000))
    rows = [[1, *row] for row in values.tolist()]
    lines: list[str] = []
    path = write_csv(tmp_path / "wide.csv", names, rows)
    store = prepare(
        dict(
            tasks=[CLICK],
            dense=[dict(columns="f*", standardize=True)],
            categorical=[dict(columns="c*", encoding="integer", rows=50)],
        ),
        dict(kind="csv", files=dict(train=path)),
        tmp_path / "store",
        report=lines.append,
    )
    floats = values[:, :1900]
    expected = (floats - floats.mean(axis=0)) / floats.std(axis=0)
    np.testing.assert_allclose(whole(store).dense, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(whole(store).ids, values[:, 1900:])
    assert len(lines) < 10


def test_dense_features_with_large_numbers_are_reported(tmp_path):
    names = ["label", "age", "rate", "small", "flag", "scaled", "amount", "none", "stars"]
    rows = [
        [i % 2, 18 + i, 0.2, i / 1e5, i % 2, 1e9 + i, 1000 * i, "", 4 + i / 100] for i in range(50)
    ]
    lines: list[str] = []
    store = prepare(
        dict(
            tasks=[CLICK],
            dense=[
                dict(columns=["age", "rate", "small", "flag", "none", "stars"], standardize=False),
                dict(columns="scaled", standardize=True),
                dict(columns="amount", log=True),
            ],
        ),
        dict(kind="csv", files=dict(train=write_csv(tmp_path / "a.csv", names, rows))),
        tmp_path / "store",
        report=lines.append,
    )
    (line,) = (line for line in lines if "not scaled" in line)
    assert line.startswith(
        "Dense features that are not scaled: age (mean 42.5, std 14.43), small (mean 0.000245, std"
        " 0.0001443), stars (mean 4.245, std 0.1443). Models learn"
    )
    statistics = store.split("train").statistics
    assert list(unscaled(store.schema.dense, statistics)) == ["age", "small", "stars"]


def test_a_report_has_a_line_for_each_feature(tmp_path):
    lines: list[str] = []
    path = write_csv(tmp_path / "a.csv", ["label", "x", "c", "l"], [[1, "", "a", "a|b"], [0] * 4])
    prepare(
        dict(
            tasks=[CLICK],
            dense=[dict(columns="x")],
            categorical=[dict(columns="c", min_count=2)],
            ragged=[dict(columns="l")],
        ),
        dict(kind="csv", files=dict(train=path)),
        tmp_path / "store",
        report=lines.append,
    )
    assert any("train: 2 rows in" in line for line in lines)
    assert [line for line in lines if line.startswith("  ")] == [
        "  click: 2 labels, 50.00% positive",
        "  dense  missing  mean  std  min  max",
        "  x       50.00%     0    0    0    0",
        "  categorical  missing  unknown  distinct (approx.)",
        "  c              0.00%  100.00%                   0",
        "  ragged  mean  p50  p95  p99  max  empty  unknown  distinct (approx.)  truncated",
        "  l       1.50    1    2    2    2  0.00%    0.00%                   3      0.00%",
    ]


# The spec.


def test_the_manifest_holds_the_section_with_its_defaults(tmp_path):
    short = dict(tasks=[CLICK], categorical=[dict(columns="c")])
    long = dict(
        tasks=(dict(label="label", name="click", kind="binary", mask="", weight="", truth=""),),
        categorical=[dict(columns=["c"], min_count=1, table="")],
        dense=[],
    )
    assert FeatureSpec.from_state(short).to_state() == FeatureSpec.from_state(long).to_state()
    assert (
        FeatureSpec.from_state(short).to_state()
        != FeatureSpec.from_state(short | dict(time="c")).to_state()
    )
    store = prepare_csv(tmp_path, ["label", "c"], [[1, "a"]], categorical=short["categorical"])
    assert store.spec.features == FeatureSpec.from_state(short).to_state()


# Failures.


def test_a_preparation_of_little_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    path = write_csv(tmp_path / "a.csv", ["label", "x"], [[1, i] for i in range(1000)])
    real, calls = encode_unit.Encoder.encode, []

    def encode(self, chunk):
        calls.append(chunk)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, chunk)

    monkeypatch.setattr(encode_unit.Encoder, "encode", encode)
    features = dict(tasks=[CLICK], dense=[dict(columns="x", standardize=True)])
    source = dict(kind="csv", files=dict(train=path, valid=path))
    with pytest.raises(KeyboardInterrupt):
        prepare(features, source, tmp_path / "store", block_size=8, report=lambda _: None)
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"]
    monkeypatch.undo()
    prepare(features, source, tmp_path / "store", report=lambda _: None)
    assert is_store(tmp_path / "store")


def test_a_full_disk_leaves_nothing_and_names_the_store(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["label", "x"], [[1, i] for i in range(50_000)])
    program = f"""
        import resource, sys
        sys.dont_write_bytecode = True  # Python would cut it at the limit and keep it
        from jaxrank.data.prepare.passes import prepare
        from jaxrank.errors import RunError
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            prepare(
                dict(tasks=[dict(name="click", label="label")], dense=[dict(columns="x")]),
                dict(kind="csv", files=dict(train={path!r})),
                {str(tmp_path / "store")!r},
                report=lambda _: None,
            )
        except RunError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"{tmp_path / 'store'}: the store could not be written" in done.stdout
    assert "File too large" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["a.csv"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    path = write_csv(tmp_path / "a.csv", ["label"], [[1]])
    source = dict(kind="csv", files=dict(train=path))
    with pytest.raises(RunError, match=r"file/store: the store could not be written"):
        prepare(dict(tasks=[CLICK]), source, tmp_path / "file" / "store")


def test_a_store_is_never_overwritten(tmp_path):
    store = prepare_csv(tmp_path, ["label"], [[1]])
    with pytest.raises(InputError, match=r"store: must not exist yet"):
        prepare_csv(tmp_path, ["label"], [[0]])
    assert open_store(store.path).split("train").statistics["tasks"]["click"]["positives"] == 1
