"""Preparation in units: any number of processes, resumed, by day, with skipped records, with a key,
and between remote file systems.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import preparations
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkout import ROOT
from preparations import (
    FEATURES,
    TASK,
    content,
    files,
    lasting_content,
    make_rows,
    run,
    write_csv,
)

from jaxrank.data import rejects
from jaxrank.data.examples import join
from jaxrank.data.files import to_path
from jaxrank.data.prepare import fit_unit, units
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.prepare.runners import Local
from jaxrank.data.sources import text
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError, RunError

small_units = pytest.fixture(preparations.small_units)


def test_rejected_records_are_json_whatever_numbers_they_hold(tmp_path):
    numbers = [1.0, float("nan"), float("-inf")]
    table = {"label": [1, 2, 2], "x": numbers, "more": [{"of": [x, None]} for x in numbers]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "a.parquet")))
    features = dict(tasks=[dict(name="click", label="label")])
    options = dict(on_error="skip", max_rejected=2, report=lambda _: None)
    store = prepare(features, source, tmp_path / "store", **options)

    def rejected(constant):
        raise AssertionError(constant)

    lines = (store.path / "rejected.jsonl").read_text().splitlines()
    result = [json.loads(line, parse_constant=rejected)["record"] for line in lines]
    assert [r["x"] for r in result] == ["nan", "-inf"]
    assert [r["more"] for r in result] == [{"of": ["nan", None]}, {"of": ["-inf", None]}]


def test_the_store_is_the_same_from_any_number_of_processes(tmp_path, small_units):
    train = files(tmp_path / "raw", 150, 40, 1, 77)
    alone = run(tmp_path / "one", train, runner=Local(1))
    run(tmp_path / "two", train, runner=Local(2))
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert [f["name"] for f in alone.entries["train"]["files"]] == [
        f"0000{i}-00000.arrow" for i in range(4)
    ]
    numbers = join(list(alone.split("train").blocks())).kept["n"].to_pylist()
    assert numbers == [str(i) for i in range(268)]


def test_files_whose_columns_are_in_another_order_give_the_same_store(
    tmp_path, small_units, monkeypatch
):
    monkeypatch.setattr(text, "_PART_BYTES", 500)
    train = files(tmp_path / "raw", 60, 60, 60)
    run(tmp_path / "expected", train, runner=Local(1))
    with open(train[1], newline="") as file:
        records = list(csv.DictReader(file))
    with open(train[1], "w", newline="") as file:
        names = ["user", "n", "tags", "day", "x", "label"]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    run(tmp_path / "store", train, runner=Local(2))
    assert lasting_content(tmp_path / "store") == lasting_content(tmp_path / "expected")


def test_small_files_share_a_unit_and_large_ones_are_cut(tmp_path, monkeypatch):
    train = files(tmp_path / "raw", *([20] * 30))
    size = Path(train[0]).stat().st_size
    monkeypatch.setattr(units, "_UNIT_BYTES", 10 * size)
    store = run(tmp_path / "joined", train)
    assert 3 <= len(store.entries["train"]["files"]) <= 4
    monkeypatch.setattr(text, "_PART_BYTES", size // 3)
    cut = run(tmp_path / "cut", train)
    assert len(cut.entries["train"]["files"]) >= 60
    for result in (store, cut):
        numbers = join(list(result.split("train").blocks())).kept["n"].to_pylist()
        assert numbers == [str(i) for i in range(600)]
    a, b = (s.entries["train"]["statistics"] for s in (store, cut))
    assert a["categorical"] == b["categorical"]
    assert a["list_lengths"]["max_total_per_run"] == b["list_lengths"]["max_total_per_run"]


# Partitions by day.


def test_a_store_by_day_has_the_days_of_every_unit(tmp_path, small_units):
    train = files(tmp_path / "raw", 150, 40, 130)
    features = FEATURES | dict(time="day", by_day=True)
    store = run(tmp_path / "store", train, features, runner=Local(1))
    assert sorted(store.splits) == [f"train/2024-05-0{d}" for d in (1, 2, 3, 4)]
    split = store.split("train")
    assert [day for day, _ in split.days] == [f"2024-05-0{d}" for d in (1, 2, 3, 4)]
    assert sum(count for _, count in split.days) == len(split.block_rows)
    assert split.rows == 320
    for day, first, last in (("01", 0, 100), ("02", 100, 200), ("04", 300, 320)):
        block = join(list(store.split(f"train/2024-05-{day}").blocks()))
        assert block.kept["n"].to_pylist() == [str(i) for i in range(first, last)]
    some = store.split("train/2024-05-02:2024-05-03")
    assert join(list(some.blocks())).kept["n"].to_pylist() == [str(i) for i in range(100, 300)]
    whole = run(tmp_path / "whole", train, runner=Local(1)).split("train")
    for key in ("rows", "tasks", "categorical"):
        assert split.statistics[key] == whole.statistics[key]
    for key in ("max_total_per_run", "max_per_example"):
        assert split.statistics["list_lengths"][key] == whole.statistics["list_lengths"][key]
    with pytest.raises(InputError, match=r"2024-05-01 to 2024-05-04: found '2024-06-01'"):
        store.split("train/2024-06-01")


def test_a_record_without_a_time_has_no_day(tmp_path):
    rows = make_rows(5)
    rows[3][-1] = ""
    train = write_csv(tmp_path / "a.csv", rows)
    features = FEATURES | dict(time="day", by_day=True)
    with pytest.raises(InputError, match="a.csv, row 5, column day: must be a time, as by_day is"):
        run(tmp_path / "store", train, features)


def test_a_record_without_a_time_that_is_skipped_teaches_nothing(tmp_path):
    rows = make_rows(200)
    late = [[*row[:2], 1e9, "somebody", *row[4:]] for row in make_rows(3, 200)]
    for row, time in zip(late, ("", "yesterday", "2024-13-01"), strict=True):
        row[-1] = time
    features = FEATURES | dict(time="day", by_day=True)
    train = write_csv(tmp_path / "a.csv", [*rows, *late])
    store = run(tmp_path / "store", train, features, on_error="skip")
    clean = run(tmp_path / "clean", write_csv(tmp_path / "b.csv", rows), features)
    assert store.schema == clean.schema
    assert store.split("train").fingerprint == clean.split("train").fingerprint
    assert len((store.path / "rejected.jsonl").read_text().splitlines()) == 3


# Skipped records.


def test_records_that_are_skipped_are_listed_and_the_rest_is_that_of_clean_data(tmp_path):
    rows = make_rows(200)
    bad = [list(row) for row in rows]
    bad[10][1] = "2"  # a label
    bad[50][2] = "many"  # a float
    bad[51][1], bad[51][2] = "maybe", "1e999"
    bad[199][4] = "a||b"  # a list
    train = write_csv(tmp_path / "bad.csv", bad)
    lines = Path(train).read_text().splitlines()
    lines[100] += ",more"  # row 101 of the file
    Path(train).write_text("\n".join(lines) + "\n")
    left = [row for i, row in enumerate(rows) if i not in (10, 50, 51, 99, 199)]
    reported: list[str] = []
    store = run(tmp_path / "store", train, on_error="skip", report=reported.append)
    clean = run(tmp_path / "clean", write_csv(tmp_path / "clean.csv", left))
    assert store.split("train").fingerprint == clean.split("train").fingerprint
    assert store.schema == clean.schema
    rejected = [json.loads(x) for x in (store.path / "rejected.jsonl").read_text().splitlines()]
    by_row = {entry["row"]: entry for entry in rejected}
    assert sorted(by_row) == [12, 52, 53, 101, 201]
    assert by_row[12]["column"] == "label"
    assert by_row[12]["record"] | {"label": "2"} == by_row[12]["record"]
    assert by_row[52]["found"] == "'many'"
    assert "columns" in by_row[101]["must"]
    assert any("5 record(s) skipped" in line for line in reported)
    with pytest.raises(InputError, match=r"at most 4 records may be skipped"):
        run(tmp_path / "few", train, on_error="skip", max_rejected=4)
    with pytest.raises(InputError, match="^--max-rejected: must be 0 or more: found -1"):
        run(tmp_path / "none", train, on_error="skip", max_rejected=-1)
    with pytest.raises(InputError, match=r"bad.csv, row"):
        run(tmp_path / "none", train)
    assert not (tmp_path / "none").exists()


def test_with_null_values_the_store_is_that_of_empty_cells_and_skipped_records_are_as_written(
    tmp_path, small_units, monkeypatch
):
    monkeypatch.setattr(text, "_PART_BYTES", 1000)
    rows = make_rows(100)
    for i, row in enumerate(rows):
        for column in (1, 2, 3, 4, 5):
            if (i + column) % 4 == 0:
                row[column] = ""
    features = FEATURES | dict(keep=["n", "day"])
    clean = run(tmp_path / "clean", write_csv(tmp_path / "clean.csv", rows), features)
    nulls = ["\\N", "NULL", "NaN"]
    filled = [[nulls[i % 3] if v == "" else v for v in row] for i, row in enumerate(rows)]
    filled.insert(60, [900, 7, "NaN", "NULL", "\\N", ""])
    train = write_csv(tmp_path / "a.csv", filled)
    options = dict(source=dict(null_values=nulls), on_error="skip")
    store = run(tmp_path / "store", train, features, **options, runner=Local(2))
    assert store.vocabulary("user")[0] == clean.vocabulary("user")[0]
    whole, expected = (join(list(s.split("train").blocks())) for s in (store, clean))
    for name in ("labels", "dense", "ids", "list_values", "list_lengths"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(expected, name))
    assert whole.kept == expected.kept
    assert whole.kept["day"].null_count
    (lines,) = map(json.loads, (store.path / "rejected.jsonl").read_text().splitlines())
    assert (lines["row"], lines["found"]) == (62, "'7'")
    written = dict(n="900", label="7", x="NaN", user="NULL", tags="\\N", day=None)
    assert lines["record"] == written


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ("2024-05-01", dict(time="day", by_day=True)),
        ("1", dict(tasks=[TASK | dict(mask="day")])),
        ("0.5", dict(tasks=[TASK | dict(weight="day")])),
    ],
)
def test_a_missing_value_where_none_may_be_is_reported_as_it_is_written(tmp_path, value, change):
    days = [value, value, "NULL", value, ""]
    rows = [[*row[:-1], day] for row, day in zip(make_rows(5), days, strict=True)]
    train = write_csv(tmp_path / "a.csv", rows)
    options = dict(features=FEATURES | change, source=dict(null_values=["NULL"]))
    with pytest.raises(InputError, match=r"row 4, column day: must be .*: found 'NULL'\."):
        run(tmp_path / "store", train, **options)
    store = run(tmp_path / "store", train, **options, on_error="skip")
    lines = (store.path / "rejected.jsonl").read_text().splitlines()
    assert [json.loads(line)["found"] for line in lines] == ["'NULL'", "an empty value"]


def test_what_may_be_skipped_is_counted_over_all_units(tmp_path, small_units):
    train = files(tmp_path / "raw", 20, 20, 20)
    for path in train:
        Path(path).write_text(Path(path).read_text() + "1,2\n3\n")
    with pytest.raises(InputError, match=r"at most 5 records may be skipped .*: found 6"):
        run(tmp_path / "store", train, on_error="skip", max_rejected=5, runner=Local(1))
    assert run(tmp_path / "all", train, on_error="skip", max_rejected=6, runner=Local(1))


def test_lines_before_a_part_are_counted_once(tmp_path, monkeypatch):
    path = Path(write_csv(tmp_path / "a.csv", make_rows(400)))
    path.write_text(path.read_text() + "1,2\n" * 30)
    monkeypatch.setattr(text, "_PART_BYTES", path.stat().st_size - 1000)
    counted = []
    real = rejects._count_lines
    monkeypatch.setattr(
        rejects, "_count_lines", lambda *place: counted.append(place) or real(*place)
    )
    store = run(tmp_path / "store", str(path), on_error="skip")
    lines = [json.loads(line) for line in (store.path / "rejected.jsonl").read_text().splitlines()]
    assert [entry["row"] for entry in lines] == list(range(402, 432))
    assert len(counted) == 2  # for the part with invalid records, while fitting and encoding


def test_a_worker_that_is_killed_is_reported(tmp_path, small_units, monkeypatch):
    train = files(tmp_path / "raw", 20, 20)
    monkeypatch.setattr(fit_unit, "fit", _killed)
    with pytest.raises(RunError, match=r"one of 2 worker processes .* was killed"):
        run(tmp_path / "store", train, runner=Local(2))


def test_a_program_without_a_guard_is_reported(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "from types import SimpleNamespace\n"
        "from jaxrank.data.prepare.runners import Local\n"
        "Local(2).run(print, None, [SimpleNamespace(bytes=2**30)] * 2)\n"
    )
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    guard = "a program that starts processes must do so under `if __name__ == '__main__':`"
    assert f"\njaxrank.errors.InputError: workers of prepare: {guard}, because" in ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.endswith(
        f"worker processes of prepare could not start, see its error above: {guard}."
    )


def _killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


# Hash keys.


def test_with_a_key_no_raw_value_is_in_any_file(tmp_path):
    rows = [[i, 1, 0.5, f"secret-{i % 7}", f"hidden{i % 3}", "d"] for i in range(40)]
    rows[4][1] = "secret-label"
    train = write_csv(tmp_path / "a.csv", rows)
    key = tmp_path / "key"
    key.write_text("correct horse battery\n")
    features = {k: v for k, v in FEATURES.items() if k != "keep"}
    store = run(tmp_path / "store", train, features, on_error="skip", hash_key_file=str(key))
    plain = run(tmp_path / "plain", train, features, on_error="skip")
    assert b"secret" in b"".join(content(tmp_path / "plain").values())
    everything = b"".join(content(tmp_path / "store").values())
    assert b"secret" not in everything
    assert b"mlp_units" not in everything
    assert b"horse" not in everything

    def keyed(value):
        secret = b"correct horse battery"
        return hashlib.blake2b(value.encode(), key=secret, digest_size=16).hexdigest()

    values, counts = store.vocabulary("user")
    raw, raw_counts = plain.vocabulary("user")
    expected = dict(zip(map(keyed, raw), raw_counts.tolist(), strict=True))
    assert dict(zip(values, counts.tolist(), strict=True)) == expected
    # The same examples read the same values.
    for name, block in (("user", "ids"), ("tags", "list_values")):
        local, theirs = store.vocabulary(name)[0], plain.vocabulary(name)[0]
        a = getattr(join(list(store.split("train").blocks())), block).reshape(-1)
        b = getattr(join(list(plain.split("train").blocks())), block).reshape(-1)
        assert [local[i - 2] for i in a] == [keyed(theirs[i - 2]) for i in b]
    again = run(
        tmp_path / "again", train, features, on_error="skip", hash_key_file=str(key),
        vocabularies=str(store.path),
    )  # fmt: skip
    assert again.vocabulary("user")[0] == values
    with pytest.raises(InputError, match="same --hash-key-file"):
        run(tmp_path / "other", train, features, vocabularies=str(store.path))
    key.write_text("short")
    with pytest.raises(InputError, match="key: must have from 16 to 64 bytes: found 5"):
        run(tmp_path / "other", train, features, hash_key_file=str(key))


# Remote paths.


def test_standard_input_is_a_file_like_any_other(tmp_path, monkeypatch):
    train = write_csv(tmp_path / "a.csv", make_rows(100))
    expected = run(tmp_path / "expected", train)

    class Input:
        buffer = io.BytesIO(Path(train).read_bytes())

    monkeypatch.setattr(sys, "stdin", Input)
    assert run(tmp_path / "store", "-").split("train").fingerprint == (
        expected.split("train").fingerprint
    )
    assert sorted(p.name for p in (tmp_path / "store").iterdir()) == [
        "manifest.json", "train", "vocabulary",
    ]  # fmt: skip
    Input.buffer = io.BytesIO(Path(train).read_bytes() + b"1,2\n")
    with pytest.raises(InputError, match="standard input, row 102: must have 6 columns"):
        run(tmp_path / "bad", "-")


def test_the_config_of_the_docs_prepares_what_it_says(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "data.md").read_text()
    block = page.split("## Your own data")[1].split("```python\n")[1].split("```")[0]
    defined = {}
    exec(block, defined)
    c = defined["get_config"]()
    rows = [
        "num_a,num_b,user,item,history,timestamp,clicked,bought",
        *(f"{i},{i % 3},u{i % 5},i{i % 4},i{i % 4}|i{i % 3},{i},{i % 2}," for i in range(40)),
    ]
    monkeypatch.chdir(tmp_path)
    for file in c.source.files.values():
        Path(file).write_bytes(gzip.compress("\n".join(rows).encode()))
    features, source = c.features.to_dict(), c.source.to_dict()
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    assert [store.split(split).rows for split in ("train", "valid")] == [40, 40]


def test_a_store_at_a_url_that_needs_a_package_is_rejected():
    """The test assumes that a package for one of these kinds of URL is missing."""

    def is_missing(protocol):
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError:
            return True
        return False

    protocol = next(filter(is_missing, ("gs", "s3", "abfs", "oss", "dropbox", "box")))
    with pytest.raises(InputError, match=f"^{protocol}://bucket/x: this kind of URL cannot be"):
        to_path(f"{protocol}://bucket/x")


def test_a_store_at_a_url_is_the_local_one(tmp_path):
    memory = fsspec.filesystem("memory")
    train = files(tmp_path / "raw", 60, 30)
    for path in train:
        memory.pipe(f"/raw/{Path(path).name}", Path(path).read_bytes())
    local = run(tmp_path / "store", train)
    remote = run("memory://stores/a", "memory://raw/")
    assert remote.split("train").fingerprint == local.split("train").fingerprint
    assert remote.vocabulary("user")[0] == local.vocabulary("user")[0]
    again = open_store("memory://stores/a")
    assert again.schema == local.schema
    with pytest.raises(InputError, match="a: must not exist yet"):
        run("memory://stores/a", "memory://raw/")
    assert not memory.exists("/stores/a/_units")


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_blocks_are_smaller_and_hold_the_same(tmp_path, compression):
    train = files(tmp_path / "raw", 5000)
    plain = run(tmp_path / "plain", train)
    store = run(tmp_path / "store", train, compression=compression)
    assert store.split("train").fingerprint == plain.split("train").fingerprint
    assert store.split("train").bytes < 0.8 * plain.split("train").bytes
    for a, b in zip(store.split("train").blocks(), plain.split("train").blocks(), strict=True):
        np.testing.assert_array_equal(a.list_values, b.list_values)
    with pytest.raises(InputError, match="data.compression: must be one of '', 'lz4', 'zstd'"):
        run(tmp_path / "other", train, compression="gzip")


# Delayed labels.


def test_a_split_is_looked_at_at_its_last_event(tmp_path):
    hour = 3600

    def table(first, name):
        # Four clicks at intervals of an hour. The second one converted half an hour later.
        rows = [[1, first + k * hour, first + 1.5 * hour if k == 1 else ""] for k in range(4)]
        path = tmp_path / f"{name}.csv"
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows([["label", "at", "bought_at"], *rows])
        return str(path)

    task = dict(name="buy", time="bought_at", window_hours=2)
    features = dict(tasks=[TASK, task], time="at", time_format="seconds")
    source = dict(kind="csv", files=dict(train=table(0, "a"), valid=table(24 * hour, "b")))
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    for split in ("train", "valid"):
        labels = join(list(store.split(split).blocks())).labels[:, 1]
        np.testing.assert_array_equal(labels, [0, 1, np.nan, np.nan])
        assert store.split(split).statistics["tasks"]["buy"]["pending"] == 2
    later = prepare(
        features | dict(as_of="1970-01-01 04:30"), source, tmp_path / "later",
        report=lambda _: None,
    )  # fmt: skip
    labels = join(list(later.split("train").blocks())).labels[:, 1]
    np.testing.assert_array_equal(labels, [0, 1, 0, np.nan])
