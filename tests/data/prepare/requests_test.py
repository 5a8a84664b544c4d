"""Tests of bringing the examples of a request together, against a loop over the raw records."""

from types import SimpleNamespace

import numpy as np
import preparations
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparations import FEATURES, files, make_rows, run

from jaxrank.data.prepare import gather_unit, scatter
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.prepare.runners import Local
from jaxrank.data.store.direct import open_direct
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.evaluation.requests import read_requests

GROUPED = FEATURES | dict(group="user", keep=["n", "user"])


def kept(split, name):
    return [v for block in split.blocks() for v in block.kept.column(name).to_pylist()]


def several_buckets(monkeypatch):
    monkeypatch.setattr(gather_unit, "_BUCKET_BYTES", 2000)
    monkeypatch.setattr(scatter, "_FLUSHED", 3000)
    preparations.small_units(monkeypatch)


@pytest.mark.parametrize("several", [False, True])
def test_the_examples_of_a_request_are_neighbours_in_their_raw_order(
    several, tmp_path, monkeypatch
):
    if several:
        several_buckets(monkeypatch)
    paths = files(tmp_path / "raw", 130, 70, 100)
    lines = []
    store = run(
        tmp_path / "store", paths, GROUPED, block_size=64, report=lines.append, runner=Local(1)
    )
    split = store.split("train")
    records = make_rows(130) + make_rows(70, 130) + make_rows(100, 200)
    expected = {}
    for record in records:
        expected.setdefault(record[3], []).append(str(record[0]))
    users, numbers = kept(split, "user"), kept(split, "n")
    starts = np.flatnonzero([True, *(a != b for a, b in zip(users[1:], users, strict=False))])
    stored = {users[s]: numbers[s:e] for s, e in zip(starts, [*starts[1:], 300], strict=True)}
    assert len(starts) == len(stored)  # no request is in two places
    assert stored == expected
    largest = max(map(len, expected.values()))
    assert any(
        f"{len(expected)} requests by user, {300 / len(expected):.1f} examples on average,"
        f" {largest} at most" in line
        for line in lines
    )
    begin = 0
    for block in split.blocks():
        users_of_block = {users[i] for i in range(begin, begin + block.rows)}
        assert block.rows <= 64 or len(users_of_block) == 1
        assert block.rows == sum(len(expected[user]) for user in users_of_block)
        hashes = block.requests[:, 0]
        assert len(set(hashes)) == len(users_of_block)
        assert (hashes[1:] >= hashes[:-1]).all()
        begin += block.rows
    lengths = np.concatenate([block.list_lengths for block in split.blocks()])
    assert split.statistics["list_lengths"]["max_total_per_run"] == [int(lengths.sum())]
    scattered = run(tmp_path / "plain", paths, block_size=64).split("train")
    for name in ("tasks", "dense", "categorical", "ragged", "traffic"):
        assert split.statistics[name] == scattered.statistics[name]


def test_a_preparation_continues_between_buckets(tmp_path, monkeypatch):
    several_buckets(monkeypatch)
    paths = files(tmp_path / "raw", 130, 170)
    run(tmp_path / "whole", paths, GROUPED, block_size=64, runner=Local(1))
    calls = []
    real = gather_unit._write

    def failing(settings, directory, unit, parts):
        calls.append(unit.index)
        if len(calls) == 2:
            raise InputError("stopped")
        return real(settings, directory, unit, parts)

    monkeypatch.setattr(gather_unit, "_write", failing)
    with pytest.raises(InputError, match="stopped"):
        run(tmp_path / "store", paths, GROUPED, block_size=64, runner=Local(1))
    read = preparations.counted(monkeypatch)
    run(tmp_path / "store", paths, GROUPED, block_size=64, runner=Local(1))
    assert read == []  # encoded units are kept
    assert calls.count(calls[0]) == 1  # and so is the first bucket
    contents = [preparations.content(tmp_path / name) for name in ("whole", "store")]
    assert contents[0] == contents[1]


def test_an_example_without_a_request_is_alone_and_days_are_apart(tmp_path):
    path = tmp_path / "raw.csv"
    records = make_rows(12)
    for i, record in enumerate(records):
        record[3] = "" if i % 3 == 0 else "u1"
        record[5] = f"2024-05-0{1 + i % 2}"
    preparations.write_csv(path, records)
    spec = GROUPED | dict(time="day", by_day=True)
    run(tmp_path / "store", str(path), spec)
    store = open_store(tmp_path / "store")
    for day in (1, 2):
        (block,) = store.split(f"train/2024-05-0{day}").blocks()
        sizes = np.unique(block.requests[:, 0], return_counts=True)[1]
        assert sorted(sizes) == [1, 1, 4]
    code = read_requests(store.split("train"), "user", 10).code
    assert sorted(np.unique(code, return_counts=True)[1]) == [1, 1, 1, 1, 4, 4]


def test_requests_that_are_read_directly_are_those_of_a_store_without_days(tmp_path):
    """A value on two days is one request in both."""
    for day, keys in ((1, "abca"), (2, "acdd")):
        folder = tmp_path / "raw" / f"day={day}"
        folder.mkdir(parents=True)
        table = pa.table({"key": list(keys), "label": [0, 1, 0, 1], "item": [1, 2, 3, 4]})
        pq.write_table(table, folder / "part.parquet")
    features = dict(
        tasks=[dict(name="click", label="label")], group="key", keep=["key"],
        categorical=[dict(columns="item", encoding="integer", rows=9)],
    )  # fmt: skip
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "raw")))
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    splits = open_direct(features, source).split("train"), store.split("train")
    for split in splits:
        code = read_requests(split, "key", 10).code
        by_key = set(zip(kept(split, "key"), code.tolist(), strict=True))
        assert len(by_key) == len({key for key, _ in by_key}) == len(set(code.tolist())) == 4


def test_an_empty_text_is_no_request():
    column = pa.array(["", "a", None, "a", ""])
    for values in (column, column.dictionary_encode()):
        hashes = scatter.request_hashes(values, "x", "unit")
        assert len(set(hashes.tolist())) == 4
        assert hashes[1] == hashes[3]
        block = SimpleNamespace(
            labels=np.zeros((5, 1), np.float32), logit_correction=None, requests=None,
            kept=pa.RecordBatch.from_pydict({"x": values}),
        )  # fmt: skip
        code = read_requests(SimpleNamespace(blocks=lambda block=block: [block]), "x", 10).code
        assert len(set(code.tolist())) == 4
        assert code[1] == code[3]


def test_a_column_of_lists_is_no_request(tmp_path):
    with pytest.raises(InputError, match=r"features.group: column 'x' .*: found list<"):
        scatter.request_hashes(pa.array([[1], [2]]), "x", "")
