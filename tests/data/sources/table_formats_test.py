"""Directories of Parquet files with a table log are read as the log lists them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw import every_chunk

from jaxrank.data.sources.registry import make_source
from jaxrank.errors import InputError


def values(path):
    source = make_source(dict(kind="parquet", files=dict(train=str(path))))
    return [record["user"] for chunk in every_chunk(source, "train")
            for record in chunk.batch.to_pylist()]  # fmt: skip


def add(name, **more):
    return dict(add=dict(path=name, size=1, dataChange=True, **more))


def remove(name):
    return dict(remove=dict(path=name, dataChange=True))


class Table:
    """Writes a directory with a Delta Lake log, in which each file has one user of its own name."""

    def __init__(self, path):
        self.path, self._version = path, 0
        (path / "_delta_log").mkdir(parents=True)

    def file(self, name):
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"user": [name], "label": [1]}), path)

    def commit(self, *actions):
        text = "\n".join(map(json.dumps, actions))
        (self.path / "_delta_log" / f"{self._version:020d}.json").write_text(text)
        self._version += 1

    def checkpoint(self, *actions):
        file = self.path / "_delta_log" / f"{self._version - 1:020d}.checkpoint.parquet"
        keys = ("add", "remove", "metaData")
        pq.write_table(pa.Table.from_pylist([{k: a.get(k) for k in keys} for a in actions]), file)


@pytest.fixture
def table(tmp_path):
    table = Table(tmp_path / "table")
    for name in ("old.parquet", "new.parquet", "day=1/a b.parquet", "never.parquet"):
        table.file(name)
    table.commit(dict(protocol=dict(minReaderVersion=1)), add("old.parquet"))
    table.commit(remove("old.parquet"), add("new.parquet"), add("day=1/a%20b.parquet"))
    return table


def test_the_log_of_a_delta_table_says_which_files_count(table, tmp_path):
    current = {"new.parquet", "day=1/a b.parquet"}
    assert set(values(table.path)) == current
    assert set(values(table.path / "**" / "*.parquet")) == current
    assert values(table.path / "day=1") == ["day=1/a b.parquet"]
    (tmp_path / "link").symlink_to(table.path / "day=1")
    assert values(tmp_path / "link") == ["day=1/a b.parquet"]
    with pytest.raises(
        InputError, match=r"old.parquet: must be a current file of its Delta table: found 1 file"
    ):
        values(table.path / "old.parquet")


def test_a_log_continues_from_its_last_checkpoint(table):
    table.checkpoint(add("new.parquet"), add("day=1/a%20b.parquet"))
    (table.path / "_delta_log" / f"{0:020d}.json").unlink()
    table.commit(remove("day=1/a%20b.parquet"))
    assert values(table.path) == ["new.parquet"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (add("new.parquet", deletionVector=dict(storageType="u")), "no deletion vectors"),
        (dict(metaData=dict(configuration={"delta.columnMapping.mode": "name"})), "found name"),
        (add("s3://other/x.parquet"), "paths within the table"),
        (add("gone.parquet"), "gone.parquet: must exist, .*_delta_log names it"),
    ],
)
def test_a_log_that_cannot_be_followed_is_rejected(table, action, message):
    table.commit(action)
    with pytest.raises(InputError, match=message):
        values(table.path)


def test_a_log_with_a_gap_is_rejected(table):
    (table.path / "_delta_log" / f"{0:020d}.json").unlink()
    with pytest.raises(
        InputError, match=r"_delta_log: .* every commit since .*read.format\('delta'"
    ):
        values(table.path)


@pytest.mark.parametrize(
    ("log", "title"),
    [
        (".hoodie/x", "a Hudi"),
        ("metadata/v2.metadata.json", "an Iceberg"),
        ("metadata/v1.metadata.json.gz", "an Iceberg"),
        (".hoodie_partition_metadata", "a Hudi"),
        ("_spark_metadata/0", "a Spark streaming"),
        ("snapshot/LATEST", "a Paimon"),
    ],
)
@pytest.mark.parametrize("below", ["", "data"])
def test_tables_whose_log_is_not_read_are_rejected(tmp_path, log, title, below):
    (tmp_path / log).parent.mkdir(exist_ok=True)
    (tmp_path / log).write_text("{}")
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"user": ["a"], "label": [1]}), tmp_path / "data" / "a.parquet")
    with pytest.raises(InputError, match=f"must not exist: found the log of {title}.*Write the"):
        values(tmp_path / below)


@pytest.mark.parametrize("changes", ["delta_0000002_0000002", "delete_delta_0000003_0000003_0000"])
def test_changes_of_a_hive_table_are_rejected(tmp_path, changes):
    for name in ("base_0000001", changes):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"user": ["a"], "label": [1]}), tmp_path / name / "a.parquet")
    with pytest.raises(InputError, match=f"{changes}: must not exist: found changes of a Hive"):
        values(tmp_path)


@pytest.mark.parametrize("name", ["version-hint.text", "snap-1-1-x.avro", "0a-m0.avro"])
def test_a_table_of_iceberg_is_known_by_any_of_its_metadata(tmp_path, name):
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / name).write_text("1")
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"user": ["a"]}), tmp_path / "data" / "a.parquet")
    with pytest.raises(InputError, match="metadata: must not exist: found the log of an Iceberg"):
        values(tmp_path / "data")
    (tmp_path / "metadata" / name).rename(tmp_path / "metadata" / "about.txt")
    assert values(tmp_path / "data") == ["a"]


@pytest.mark.parametrize("kind", ["csv", "criteo", "tfrecord"])
@pytest.mark.parametrize("named", ["", "part*", "part-0"])
def test_a_streaming_log_beside_text_is_not_passed_over(tmp_path, kind, named):
    (tmp_path / "part-0").write_text("label,user\n1,u\n")
    (tmp_path / "_spark_metadata").mkdir()
    with pytest.raises(InputError, match="_spark_metadata: must not exist: found the log of a Sp"):
        make_source(dict(kind=kind, files=dict(train=str(tmp_path / named))))


@pytest.mark.parametrize(
    "action", ["[1]", '{"add": {"size": 1}}', '{"add": 3}', "7", '{"remove": "x"}']
)
def test_a_log_of_other_values_is_rejected_with_its_file(table, action):
    (table.path / "_delta_log" / f"{2:020d}.json").write_text(action)
    with pytest.raises(InputError, match=r"0002.json: must hold actions of a Delta table: found"):
        values(table.path)
