"""Parquet files: columns in directory names, parts of row groups, and damaged files."""

import datetime
import os
import pickle
import random
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw import every_chunk
from servers import serving

from jaxrank.data.prepare.passes import prepare
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources import parquet
from jaxrank.data.sources.partitions import partition_values
from jaxrank.data.sources.registry import make_source
from jaxrank.errors import InputError


def open_source(files, **more):
    return make_source(dict(kind="parquet", files=dict(train=files) | more))


def read_rows(chunks):
    """Returns (file, row, {column: value}) of every record."""
    result = []
    for chunk in chunks:
        records = chunk.batch.to_pylist()
        result += [(chunk.file, n, r) for n, r in zip(chunk.rows.tolist(), records, strict=True)]
    return result


def records(source, split="train"):
    return [record for _, _, record in read_rows(every_chunk(source, split))]


def write(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


# Directories with columns.


def test_directories_that_arrow_wrote_give_back_the_columns_that_they_were_made_of(tmp_path):
    draw = random.Random(3)
    days = ["2024-05-01", "2024-05-02", "a/b c%=ü", None]
    table = pa.table(
        {
            "n": pa.array(range(200)),
            "day": pa.array([draw.choice(days) for _ in range(200)]),
            "hour": pa.array([draw.choice([-3, 7, 23]) for _ in range(200)]),
        }
    )
    pq.write_to_dataset(table, tmp_path / "clicks", partition_cols=["day", "hour"])
    source = open_source(str(tmp_path / "clicks"))
    assert source.columns("train") == ["n", "day", "hour"]
    result = sorted(records(source), key=lambda record: record["n"])
    assert result == table.to_pylist()
    assert {type(record["hour"]) for record in result} == {int}


def test_a_key_is_text_unless_all_its_values_in_all_splits_spell_int64(tmp_path):
    columns = {"n": [1]}
    for hour, size, store in (("07", "1", "x"), ("23", str(2**63), "1")):
        write(
            tmp_path / "train" / f"hour={hour}" / f"size={size}" / f"s={store}" / "a.parquet",
            columns,
        )
    path = write(tmp_path / "test" / "hour=-1" / "size=3" / "s=2" / "a.parquet", columns)
    source = open_source(str(tmp_path / "train"), test=path)
    assert records(source) == [
        {"n": 1, "hour": 7, "size": "1", "s": "x"},
        {"n": 1, "hour": 23, "size": str(2**63), "s": "1"},
    ]
    assert records(source, "test") == [{"n": 1, "hour": -1, "size": "3", "s": "2"}]
    columns = [chunk.batch.schema.types for chunk in every_chunk(source, "test")]
    assert columns == [[pa.int64(), pa.int64(), pa.string(), pa.string()]]


def test_globs_lists_and_urls_name_columns_as_directories_do(tmp_path):
    paths = [
        write(tmp_path / f"day={day}" / "more" / "part-0.parquet", {"n": [day]})
        for day in (2, 1, 3)
    ]
    expected = {day: {"n": day, "day": day} for day in (1, 2, 3)}
    glob = open_source(str(tmp_path / "day=*" / "more" / "*.parquet"))
    assert records(glob) == [expected[1], expected[2], expected[3]]
    assert records(open_source(paths[:2])) == [expected[2], expected[1]]
    memory = fsspec.filesystem("memory")
    for day in (1, 2):
        memory.pipe_file(f"/clicks/day={day}/a.parquet", Path(paths[day % 2]).read_bytes())
    try:
        assert records(open_source("memory://clicks")) == [expected[1], expected[2]]
    finally:
        memory.rm("/clicks", recursive=True)


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("s3://a=b/day=1/x.parquet", {"day": "1"}),
        ("https://a=b/day=1/x.parquet?sign=x/y=z", {"day": "1"}),
        ("/a=b=c/=d/e/day=1/f=g", {"a": "b=c", "day": "1"}),
        ("part=1.parquet", {}),
    ],
)
def test_only_directories_name_columns(path, keys):
    assert partition_values(path) == keys


def test_a_key_that_is_also_a_column_is_rejected_where_it_is_used(tmp_path):
    source = open_source(write(tmp_path / "day=1" / "a.parquet", {"n": [1], "day": [7]}))
    source.check_columns({"n"})
    assert source.columns("train") == ["n", "day"]
    assert records(source) == [{"n": 1, "day": 7}]
    with pytest.raises(InputError, match=r"day=1/a\.parquet, column day: must be .* in both"):
        source.check_columns({"day"})


def test_keys_that_some_paths_lack_or_have_twice_are_no_columns(tmp_path):
    write(tmp_path / "day=1" / "a.parquet", {"n": [1]})
    write(tmp_path / "month=1" / "a.parquet", {"n": [1]})
    source = open_source(str(tmp_path))
    assert source.columns("train") == ["n"]
    assert records(source) == [{"n": 1}] * 2
    assert "'day' is a key of some directories" in source.hint
    features = dict(tasks=[dict(name="click", label="n")], categorical=[dict(columns="day")])
    files = dict(kind="parquet", files=dict(train=str(tmp_path)))
    with pytest.raises(InputError, match=r"'day' matches no column.*'day' is a key of .*month=1"):
        prepare(features, files, tmp_path / "store")
    twice = write(tmp_path / "day=1" / "day=2" / "b.parquet", {"n": [1]})
    assert open_source(twice).columns("train") == ["n"]


def test_a_list_of_fixed_size_that_is_null_is_missing(tmp_path):
    values = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int64(), 2))
    path = write(tmp_path / "a.parquet", {"h": values, "name": ["a", "b", "ü"]})
    result = records(open_source(path))
    assert [record["h"] for record in result] == [[1, 2], None, [3, 4]]
    assert [record["name"] for record in result] == ["a", "b", "ü"]


def test_times_of_int96_are_read_beyond_the_range_of_nanoseconds(tmp_path):
    times = [datetime.datetime(9999, 12, 31, 23, 59, 59), datetime.datetime(2024, 5, 1, 12, 30)]
    table = pa.table({"t": pa.array(times, pa.timestamp("us"))})
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    result = records(open_source(str(tmp_path / "a.parquet")))
    assert [record["t"] for record in result] == times


# Parts.


def many_groups(tmp_path, groups=(30, 50, 20, 1, 99, 40), name="a.parquet"):
    """Writes a file with row groups of these sizes. Column n counts the rows from 1."""
    path = tmp_path / name
    with pq.ParquetWriter(path, pa.schema({"n": pa.int64(), "text": pa.string()})) as writer:
        start = 1
        for rows in groups:
            n = range(start, start + rows)
            writer.write_table(pa.table({"n": n, "text": [f"value {i}" for i in n]}))
            start += rows
    return str(path)


def test_parts_are_runs_of_row_groups_that_reach_the_rows_of_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_ROWS_PER_PART", 80)
    first, second = many_groups(tmp_path), many_groups(tmp_path, [200, 3], "b.parquet")
    parts = open_source([first, second]).parts("train")
    assert [(p.file, p.start, p.stop) for p in parts] == [
        (first, 0, 2), (first, 2, 5), (first, 5, 6), (second, 0, 1), (second, 1, 2),
    ]  # fmt: skip


def test_parts_are_runs_of_row_groups_that_reach_the_bytes_of_a_part(tmp_path, monkeypatch):
    path = many_groups(tmp_path, [100] * 6)
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(i).total_byte_size for i in range(6)]
    monkeypatch.setattr(parquet, "_BYTES_PER_PART", sizes[0] + sizes[1])
    parts = [(p.start, p.stop) for p in open_source(path).parts("train")]
    assert parts == [(0, 2), (2, 4), (4, 6)]


def test_parts_of_a_source_that_was_sent_give_every_row_its_number_in_any_order(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(parquet, "_ROWS_PER_PART", 60)
    monkeypatch.setattr(parquet, "_ROWS_PER_CHUNK", 7)
    path = many_groups(tmp_path)
    source = pickle.loads(pickle.dumps(open_source(path)))
    parts = source.parts("train")
    assert len(parts) == 3
    result = []
    for part in reversed(parts):
        chunks = list(source.chunks(part, Rejects()))
        assert max(chunk.batch.num_rows for chunk in chunks) == 7
        result.append(read_rows(chunks))
    rows = [row for part in reversed(result) for row in part]
    assert [(n, record["n"]) for _, n, record in rows] == [(i, i) for i in range(1, 241)]


def test_no_more_than_a_row_group_is_in_memory(tmp_path):
    rows, groups = 20_000, 50
    path = tmp_path / "a.parquet"
    values = np.random.default_rng(1).integers(0, 2**62, rows * groups)
    pq.write_table(pa.table({"n": values}), path, row_group_size=rows, use_dictionary=False)
    source = open_source(str(path))
    assert len(source.parts("train")) == 1
    before, most = pa.total_allocated_bytes(), 0
    for chunk in every_chunk(source, "train"):
        del chunk
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 4 * rows * 8  # of 50 times as many bytes


# Damage.


def assert_rejected(path, *, match, policy="skip"):
    with pytest.raises(InputError, match=match) as caught:
        list(every_chunk(open_source(path), "train", Rejects(policy, limit=10**6)))
    assert path in str(caught.value)


def test_damage_names_the_file_and_is_not_skipped(tmp_path):
    path = tmp_path / "a.parquet"
    for use_dictionary in (True, False):
        columns = {"n": np.arange(5000) % 100}
        write(path, columns, write_page_checksum=True, use_dictionary=use_dictionary)
        whole = bytearray(path.read_bytes())
        whole[300] ^= 1
        path.write_bytes(whole)
        assert_rejected(str(path), match="must be a readable Parquet file.*CRC")
    path.write_bytes(whole[:-20])
    assert_rejected(str(path), match="must be a readable Parquet file")


@pytest.mark.parametrize("groups", [(7, 5, 9), (30,)])
def test_lists_of_dictionaries_are_read_over_several_row_groups(tmp_path, groups):
    path, start, written = tmp_path / "a.parquet", 0, []
    kind = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema({"tags": pa.list_(kind), "of": pa.struct({"kind": kind})})
    with pq.ParquetWriter(path, schema) as writer:
        for rows in groups:
            n = range(start, start + rows)
            tags = [[f"t{i * k % 11}" for k in range(i % 4)] for i in n]
            some = [{"tags": t, "of": {"kind": f"k{i % 3}"}} for t, i in zip(tags, n, strict=True)]
            writer.write_table(pa.Table.from_pylist(some, schema))
            written += some
            start += rows
    assert records(open_source(str(path))) == written


def test_columns_that_no_feature_names_are_not_read(tmp_path):
    unread = pa.array([b"x", b"\xff"]).view(pa.string())  # invalid text
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": [0, 1], "user": ["u", "v"], "unread": unread}), path)
    features = dict(tasks=[dict(name="click", label="label")], categorical=[dict(columns="user")])
    source = dict(kind="parquet", files=dict(train=str(path)))
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    assert store.vocabulary("user")[0] == ["u", "v"]
    # --on-error=skip skips records, but not files that cannot be read.
    with pytest.raises(InputError, match=r"a.parquet: must be a readable Parquet file"):
        prepare(features, source, tmp_path / "b", on_error="skip", report=lambda _: None)


def test_rows_are_counted_where_all_columns_are_in_the_names_of_directories(tmp_path):
    (tmp_path / "user=u" / "label=1").mkdir(parents=True)
    pq.write_table(pa.table({"other": [1, 2, 3]}), tmp_path / "user=u" / "label=1" / "a.parquet")
    features = dict(tasks=[dict(name="click", label="label")], categorical=[dict(columns="user")])
    source = dict(kind="parquet", files=dict(train=str(tmp_path)))
    store = prepare(features, source, tmp_path / "store", report=lambda _: None)
    assert store.split("train").rows == 3


def test_text_that_is_not_utf8_is_rejected(tmp_path):
    offsets = pa.py_buffer(np.array([0, 2, 4], np.int32))
    text = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"ok\xff\xfe"))
    path = write(tmp_path / "a.parquet", {"text": text})
    assert_rejected(path, match="must be a readable Parquet file.*UTF8")


def test_a_summary_of_other_files_is_rejected(tmp_path):
    collected = []
    table = pa.table({"label": [1, 0]})
    pq.write_table(table, tmp_path / "a.parquet", metadata_collector=collected)
    collected[0].set_file_path("a.parquet")
    pq.write_metadata(table.schema, tmp_path / "_metadata", metadata_collector=collected)
    source = dict(kind="parquet", files=dict(train=f"{tmp_path}/*"))
    with pytest.raises(InputError, match="_metadata: must hold its rows itself: .*'a.parquet'"):
        make_source(source)
    source["files"]["train"] = str(tmp_path)
    assert len(make_source(source).files) == 1


def test_a_name_that_is_not_utf8_is_rejected(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, {"the name": [1]}, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"the name", b"the\xffname"))
    assert_rejected(str(path), match="must be a readable Parquet file.*can't decode byte 0xff")


def test_columns_of_one_name_are_rejected(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["n", "n"]), path)
    assert_rejected(str(path), match="column names must differ: found 'n' twice")


def test_a_file_that_changes_after_it_was_opened_is_rejected(tmp_path):
    path = many_groups(tmp_path)
    source = open_source(path)
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(InputError, match=r"a\.parquet: must not change while it is read"):
        list(every_chunk(source, "train"))


def test_a_server_that_sends_whole_files_only_has_no_parts(tmp_path):
    write(tmp_path / "a.parquet", {"n": [1, 2]})
    with (
        serving(tmp_path) as url,
        pytest.raises(InputError, match=r"a.parquet: .*range requests.* Copy the file first"),
    ):
        open_source(f"{url}/a.parquet")
