import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from checkout import ROOT
from servers import Ranges, serving
from store_blocks import SPEC, write_train

from jaxrank.data import files
from jaxrank.data.examples import Examples, cut, join
from jaxrank.data.lock import lock_directory
from jaxrank.data.statistics import vocabulary
from jaxrank.data.statistics.vocabulary import checksum
from jaxrank.data.store import file as store_file
from jaxrank.data.store import manifest as manifests
from jaxrank.data.store.reader import is_store, open_store
from jaxrank.data.store.writer import StoreWriter
from jaxrank.errors import InputError, RunError
from jaxrank.features import Dense, Schema, Table, Task

WORDS = ["b", "a"]
TABLE = Table("t", 4, "vocabulary", checksum(pa.array(WORDS)))
# A third, and the neighbour of a float, to detect rounding on the way.
FLOATS = (Dense("x", True, 1 / 3, float(np.nextafter(2.5, 3))), Dense("x:missing"))
SCHEMA = Schema((Task("click"),), FLOATS, (), (), (TABLE, Table("other", 9, "integer")))


def block(rows=100, lists=2, seed=0, weighted=True):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (rows, lists)).astype(np.int32)
    total = int(lengths.sum())
    return Examples(
        dense=rng.normal(size=(rows, 3)).astype(np.float32),
        ids=rng.integers(0, 9, (rows, 4)).astype(np.int32),
        list_lengths=lengths,
        list_values=rng.integers(0, 9, total).astype(np.int32),
        list_weights=rng.random(total).astype(np.float32) if weighted else None,
        labels=rng.integers(0, 2, (rows, 1)).astype(np.float32),
        kept=pa.RecordBatch.from_pydict({"name": [f"n{i}" for i in range(rows)]}),
    )


def write(path, blocks, schema=SCHEMA):
    with StoreWriter(path) as writer:
        write_train(writer, blocks)
        writer.write_vocabulary("t", WORDS, [7, 3])
        return writer.finish(schema, SPEC)


def assert_blocks_equal(actual, expected):
    for name in [f.name for f in dataclasses.fields(Examples) if f.name != "kept"]:
        a, b = getattr(actual, name), getattr(expected, name)
        if b is None:
            assert a is None
        else:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert actual.kept.equals(expected.kept)


@pytest.mark.parametrize(("lists", "weighted"), [(2, True), (2, False), (0, False)])
def test_blocks_come_back_as_they_were_written(tmp_path, lists, weighted):
    blocks = [block(100, lists, seed, weighted) for seed in range(70)]  # more than a file contains
    write(tmp_path / "s", blocks)
    split = open_store(tmp_path / "s").split("train")
    assert split.rows == 7000
    assert len(list((tmp_path / "s" / "train").iterdir())) == 2
    for result, expected in zip(split.blocks(), blocks, strict=True):
        assert_blocks_equal(result, expected)


def test_a_vocabulary_is_mapped_into_memory_and_not_copied(tmp_path):
    values = pa.array([f"value {i}" for i in range(10_000)])
    path = files.to_path(tmp_path) / "t.arrow"
    vocabulary.write_file(path, values, np.ones(10_000, np.int64))
    before = pa.total_allocated_bytes()
    content = vocabulary.read_file(path)
    assert pa.total_allocated_bytes() - before < 10_000
    assert content["value"].to_pylist() == values.to_pylist()


def test_vocabulary_comes_back_in_row_order(tmp_path):
    values, counts = write(tmp_path / "s", [block()]).vocabulary("t")
    assert values == ["b", "a"]
    assert counts.tolist() == [7, 3]


def test_slices_joined_again_are_the_block():
    whole = block()
    pieces = [cut(whole, a, b) for a, b in [(0, 1), (1, 40), (40, 40), (40, 100)]]
    assert_blocks_equal(join(pieces), whole)


def test_an_interrupted_store_is_not_one_and_is_replaced_by_the_next(tmp_path):
    path = tmp_path / "s"

    def interrupted():
        yield block()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, interrupted())
    assert list(tmp_path.iterdir()) == []
    killed = tmp_path / ".s.partial"
    (killed / "train").mkdir(parents=True)
    assert not is_store(path)
    write(path, [block()])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_a_store_is_never_overwritten(tmp_path):
    write(tmp_path / "s", [block()])
    with pytest.raises(InputError, match="s: must not exist yet"):
        write(tmp_path / "s", [block()])


def test_a_missing_or_incomplete_store_is_named(tmp_path):
    with pytest.raises(InputError, match="none: no such store"):
        open_store(tmp_path / "none")
    with pytest.raises(InputError, match="not a complete store, it has no manifest.json"):
        open_store(tmp_path)


def test_a_store_of_another_version_is_rejected_with_both(tmp_path):
    write(tmp_path / "s", [block()])
    path = tmp_path / "s" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format_version": 99, "jaxrank_version": "9.9"}))
    with pytest.raises(InputError, match=r"version must be 5, found 99 \(written by jaxrank 9.9\)"):
        open_store(tmp_path / "s")
    path.write_text("{")
    with pytest.raises(InputError, match="manifest.json: not readable as JSON"):
        open_store(tmp_path / "s")


def test_every_flipped_byte_of_the_values_is_found(tmp_path):
    write(tmp_path / "s", [block(20)])
    path = tmp_path / "s" / "train" / "00000.arrow"
    good = path.read_bytes()
    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    buffers = [b for c in reader.get_batch(0).columns for b in c.buffers() if b is not None]
    content = b"".join(b.to_pybytes() for b in buffers)
    assert len(content) > 500
    for buffer in buffers:
        at = good.find(buffer.to_pybytes())
        bad = bytearray(good)
        bad[at + buffer.size // 2] ^= 0x10
        path.write_bytes(bad)
        with pytest.raises(InputError, match="train/00000.arrow: block 0 is corrupt: its checksum"):
            open_store(tmp_path / "s").split("train").read_block(0)


def test_a_column_of_another_name_or_type_is_found(tmp_path):
    write(tmp_path / "s", [block(20)])
    path = tmp_path / "s" / "train" / "00000.arrow"
    size = path.stat().st_size
    content = pa.ipc.open_file(path.read_bytes()).read_all()
    names = content.schema.names
    last = names.index("kept.name")
    for other in [
        content.rename_columns([name.replace("list_weights", "list_weightz") for name in names]),
        content.rename_columns([name.replace("kept.name", "kept.nome") for name in names]),
        content.set_column(last, "kept.name", content["kept.name"].cast(pa.binary())),
    ]:
        with pa.ipc.new_file(str(path), other.schema) as sink:
            sink.write_table(other)
        assert path.stat().st_size == size
        with pytest.raises(InputError, match="train/00000.arrow: block 0 is corrupt: its checksum"):
            open_store(tmp_path / "s").split("train").read_block(0)


def test_a_truncated_or_missing_file_is_named(tmp_path):
    write(tmp_path / "s", [block()])
    path = tmp_path / "s" / "train" / "00000.arrow"
    good = path.read_bytes()
    path.write_bytes(good[:-100])
    expected = f"00000.arrow: must have {len(good)} bytes .* found {len(good) - 100}"
    with pytest.raises(InputError, match=expected):
        open_store(tmp_path / "s").split("train").read_block(0)
    path.write_bytes(b"\0" * len(good))
    with pytest.raises(InputError, match="00000.arrow: not a readable Arrow file"):
        open_store(tmp_path / "s").split("train").read_block(0)
    path.unlink()
    with pytest.raises(InputError, match="00000.arrow: this file of the store is missing"):
        open_store(tmp_path / "s").split("train").read_block(0)


def _shorter(path):
    os.truncate(path, path.stat().st_size // 2)


def _other_values(path):
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x01" * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_shorter, r"00000.arrow: must have \d+ bytes as the manifest says: found \d+"),
        (_other_values, "00000.arrow: (block . is corrupt|not a readable Arrow file)"),
    ],
)
def test_a_file_that_changes_after_it_was_read_is_rejected(tmp_path, change, message):
    """The file is mapped: reading past its new end would crash the process."""
    split = write(tmp_path / "s", [block(), block(seed=1)]).split("train")
    split.read_block(0)
    split.read_block(1)
    change(tmp_path / "s" / "train" / "00000.arrow")
    with pytest.raises(InputError, match=message):
        list(split.blocks())


@pytest.mark.parametrize("way", ["touched", "copied over", "removed"])
def test_a_file_with_what_was_written_is_read_on(tmp_path, way):
    split = write(tmp_path / "s", [block(), block(seed=1)]).split("train")
    split.read_block(0)
    path = tmp_path / "s" / "train" / "00000.arrow"
    if way == "touched":
        os.utime(path, ns=(1, 1))
    elif way == "copied over":
        shutil.copy(path, tmp_path / "copy")
        os.replace(tmp_path / "copy", path)
    else:
        path.unlink()
    for index, seed in ((0, 0), (1, 1)):
        assert_blocks_equal(split.read_block(index), block(seed=seed))


@pytest.fixture
def no_pauses(monkeypatch):
    monkeypatch.setattr(files, "_PAUSES", (0.0, 0.0))


class _Sometimes(Ranges):
    """A web server without directories that rejects the first requests for parts of a file."""

    rejected = 0

    def do_GET(self):
        kind = type(self).__mro__[1]
        if self.path.endswith(".arrow") and "Range" in self.headers and kind.rejected:
            kind.rejected -= 1
            self.send_error(503)
        else:
            super().do_GET()

    def do_HEAD(self):
        if "." in self.path.rpartition("/")[2]:
            super().do_HEAD()
        else:
            self.send_error(404)


def test_what_a_server_does_not_give_at_once_is_asked_for_again(tmp_path, no_pauses, monkeypatch):
    expected = [block(), block(seed=1)]
    write(tmp_path / "s", expected)
    with serving(tmp_path, _Sometimes) as url:
        assert_blocks_equal(open_store(f"{url}/s").split("train").read_block(0), expected[0])
        monkeypatch.setattr(_Sometimes, "rejected", 2)
        assert_blocks_equal(open_store(f"{url}/s").split("train").read_block(1), expected[1])
        assert _Sometimes.rejected == 0
        monkeypatch.setattr(_Sometimes, "rejected", 1000)
        message = "/s/train/00000.arrow: could not be read: 503"
        with pytest.raises(RunError, match=message) as result:
            open_store(f"{url}/s").split("train").read_block(0)
        assert result.value.exit_status == 1  # the same command may succeed later


def test_a_store_of_which_no_server_has_a_list_is_named():
    with serving(".") as url:
        pass
    with pytest.raises(InputError, match=f"{url}/s: no such store. Check that its server"):
        open_store(f"{url}/s")


def test_the_schema_comes_back_exactly(tmp_path):
    assert write(tmp_path / "s", [block()]).schema == SCHEMA
    assert open_store(tmp_path / "s").schema.dense[0].std == np.nextafter(2.5, 3)


# Vocabularies.


def make_damage(change):
    def damage(path):
        content = bytearray(path.read_bytes())
        change(content)
        path.write_bytes(content)

    return damage


def other_columns(path):
    content = pa.table({"value": pa.array(WORDS)})
    with pa.ipc.new_file(str(path), content.schema) as sink:
        sink.write_table(content)


def other_counts(path):
    content = pa.ipc.open_file(path.read_bytes()).read_all()
    content = content.set_column(1, content.schema.field("count"), pa.array([7, 4]))
    with pa.ipc.new_file(str(path), content.schema) as sink:
        sink.write_table(content)


def other_values(path):
    content = pa.ipc.open_file(path.read_bytes()).read_all()
    content = content.set_column(0, content.schema.field("value"), pa.array(["b", "c"]))
    with pa.ipc.new_file(str(path), content.schema) as sink:
        sink.write_table(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "this file of the store is missing"),
        (make_damage(lambda c: c.__delitem__(slice(-60, None))), "must be a readable Arrow file"),
        (lambda path: path.write_text("a,b"), "must be a readable Arrow file"),
        (other_columns, r"must have the columns value \(string\) and count"),
        (other_counts, "is corrupt: its checksum must be"),
        (other_values, f"is corrupt: its checksum must be {TABLE.checksum}, found"),
    ],
)
def test_a_damaged_vocabulary_is_named(tmp_path, damage, message):
    store = write(tmp_path / "s", [block()])
    damage(tmp_path / "s" / "vocabulary" / "t.arrow")
    with pytest.raises(InputError, match=f"vocabulary/t.arrow: {message}"):
        store.vocabulary("t")


@pytest.mark.parametrize("table", ["other", "none"])
def test_a_table_without_a_vocabulary_is_named(tmp_path, table):
    with pytest.raises(InputError, match=f"must have a table '{table}' with encoding='vocabulary'"):
        write(tmp_path / "s", [block()]).vocabulary(table)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (TABLE, True),
        (Table("other", 9, "integer"), True),
        (Table("t", 3, "vocabulary", checksum(pa.array(["b"]))), True),
        (Table("t", 2, "vocabulary", checksum(pa.array([], pa.string()))), True),
        (Table("t", 3, "vocabulary", checksum(pa.array(["a"]))), False),
        (Table("t", 4, "vocabulary", checksum(pa.array(["a", "b"]))), False),
        (Table("t", 5, "vocabulary", checksum(pa.array(["b", "a", "c"]))), False),
        (Table("t", 3, "hash", checksum(pa.array(["b"]))), False),
        (Table("other", 8, "integer"), False),
        (Table("none", 9, "integer"), False),
    ],
)
def test_a_table_is_extended_by_one_that_begins_with_its_values(tmp_path, table, expected):
    assert write(tmp_path / "s", [block()]).extends(table) is expected


# The manifest.


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["format_version"], "must have the key 'format_version'"),
        (["schema"], "must have the key 'schema'"),
        (["schema", "tasks"], "schema.tasks is missing"),
        (["schema", "tasks", 0, "name"], r"schema.tasks\[0\].name is missing"),
        (["spec"], "must have the key 'spec'"),
        (["spec", "hash_key"], "must have the key 'hash_key'"),
        (["counts"], "must have the key 'counts'"),
        (["splits"], "must have the key 'splits'"),
        (["splits", "train", "statistics"], "must have the key 'statistics'"),
        (["splits", "train", "files"], "must have the key 'files'"),
        (["splits", "train", "files", 0, "name"], "must have the key 'name'"),
        (["splits", "train", "files", 0, "bytes"], "must have the key 'bytes'"),
        (["splits", "train", "files", 0, "blocks"], "must have the key 'blocks'"),
        (["splits", "train", "files", 0, "blocks", 0, "rows"], "must have the key 'rows'"),
        (["splits", "train", "files", 0, "blocks", 0, "checksum"], "must have the key 'checksum'"),
    ],
)
def test_a_manifest_that_lacks_a_key_is_named_with_it(tmp_path, keys, message):
    write(tmp_path / "s", [block()])
    path = tmp_path / "s" / "manifest.json"
    manifest = tree = json.loads(path.read_text())
    for key in keys[:-1]:
        tree = tree[key]
    del tree[keys[-1]]
    path.write_text(manifests.SEAL.to_text(manifest))
    with pytest.raises(InputError, match=f"s/manifest.json: {message}"):
        open_store(tmp_path / "s")


@pytest.mark.parametrize("content", ["[]", "null", "3", '"manifest"'])
def test_json_that_is_no_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(
        InputError, match="manifest.json: must hold a JSON object.*Prepare the data again"
    ):
        open_store(tmp_path)


def test_parts_of_a_manifest_of_another_type_are_named(tmp_path):
    write(tmp_path / "s", [block()])
    path = tmp_path / "s" / "manifest.json"
    manifest = json.loads(path.read_text())
    for part in ({"splits": []}, {"schema": []}, {"splits": {"train": 3}}, {"spec": 3}):
        path.write_text(manifests.SEAL.to_text(manifest | part))
        with pytest.raises(
            InputError, match="manifest.json: (must be a manifest|schema.*: must be)"
        ):
            open_store(tmp_path / "s")


@pytest.mark.parametrize("rows", [-1, 2.5, "20", True, None, 10**30])
def test_rows_that_are_no_number_of_examples_are_rejected(tmp_path, rows):
    write(tmp_path / "s", [block()])
    path = tmp_path / "s" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["splits"]["train"]["files"][0]["blocks"][0]["rows"] = rows
    path.write_text(manifests.SEAL.to_text(manifest))
    with pytest.raises(InputError, match=f"manifest.json: .* number of examples: {rows!r}"):
        open_store(tmp_path / "s")


def _other_split(manifest, name):
    manifest["splits"][name] = manifest["splits"].pop("train")


def _other_file(manifest, name):
    manifest["splits"]["train"]["files"][0]["name"] = f"{name}.arrow"


def _other_table(manifest, name):
    manifest["schema"]["tables"][0]["name"] = name


@pytest.mark.parametrize("change", [_other_split, _other_file, _other_table])
@pytest.mark.parametrize("name", ["../other/a", "/other/a", "train/../../other/a", "a/b"])
def test_a_manifest_that_names_files_outside_its_store_is_rejected(tmp_path, change, name):
    write(tmp_path / "s", [block()])
    path = tmp_path / "s" / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest, name)
    path.write_text(manifests.SEAL.to_text(manifest))
    with pytest.raises(InputError, match=f"manifest.json: must be a manifest.* name.*{name}"):
        open_store(tmp_path / "s")


def test_a_changed_byte_of_the_manifest_is_found(tmp_path):
    write(tmp_path / "s", [block()])
    path = tmp_path / "s" / "manifest.json"
    text = path.read_text()
    checksum = json.loads(text)["checksum"]
    # Numbers that only the checksum protects. The last one is the checksum itself.
    for old, new in [("0.3333", "0.3433"), ('"rows": 4', '"rows": 5'), (checksum, "0" * 16)]:
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        with pytest.raises(InputError, match="manifest.json: is corrupt: its checksum must be"):
            open_store(tmp_path / "s")
    path.write_text(json.dumps({k: v for k, v in json.loads(text).items() if k != "checksum"}))
    with pytest.raises(InputError, match="manifest.json: must have the key 'checksum'"):
        open_store(tmp_path / "s")


def test_a_fingerprint_changes_when_data_is_prepared_again(tmp_path):
    seeds = {"a": [1, 2], "again": [1, 2], "other": [1, 3], "less": [1], "swapped": [2, 1]}
    names = {name: [block(9, seed=seed) for seed in alone] for name, alone in seeds.items()}
    result = {n: write(tmp_path / n, b).split("train").fingerprint for n, b in names.items()}
    assert result["a"] == result["again"] == open_store(tmp_path / "a").split("train").fingerprint
    assert len(set(result.values())) == 4
    assert int(result["a"], 16)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs the /proc of Linux")
def test_a_pass_over_many_files_keeps_few_of_them_open(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrank.data.store.writer._BLOCKS_PER_FILE", 1)
    blocks = [block(3, seed=seed) for seed in range(100)]
    split = write(tmp_path / "s", blocks).split("train")
    kept = [split.read_block(0)]  # outlives its reader
    for index, expected in enumerate(blocks):
        assert_blocks_equal(split.read_block(index), expected)
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split()[-1] for line in maps if str(tmp_path) in line}
    assert 1 <= len(mapped) <= 65
    assert_blocks_equal(kept[0], blocks[0])
    assert_blocks_equal(split.read_block(1), blocks[1])


@pytest.mark.parametrize(("per_file", "together"), [(1, True), (2, False)])
def test_threads_read_two_files_at_once_but_not_one(tmp_path, monkeypatch, per_file, together):
    monkeypatch.setattr("jaxrank.data.store.writer._BLOCKS_PER_FILE", per_file)
    split = write(tmp_path / "s", [block(), block(seed=1)]).split("train")
    both, decode = threading.Barrier(2), store_file.from_arrow

    def meet(batch):
        both.wait(5 if together else 0.2)
        return decode(batch)

    monkeypatch.setattr(store_file, "from_arrow", meet)
    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(split.read_block, index) for index in range(2)]
    if together:
        for read, seed in zip(reads, range(2), strict=True):
            assert_blocks_equal(read.result(), block(seed=seed))
    else:
        assert all(isinstance(r.exception(), threading.BrokenBarrierError) for r in reads)


# Two writers.

_WRITER = """
    import sys
    from jaxrank.data.store.writer import StoreWriter
    with StoreWriter(sys.argv[1]) as writer:
        (writer.work / "train").mkdir()
        print("writing", flush=True)
        sys.stdin.read()
"""


def writing_process(path):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_WRITER), str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_store_that_another_process_writes_is_rejected_until_that_one_is_killed(tmp_path):
    with writing_process(tmp_path / "s") as process:
        (tmp_path / ".s.partial" / "stray").write_text("")
        for _ in range(2):
            with pytest.raises(RunError, match="s: .* another process is writing this store"):
                write(tmp_path / "s", [block()])
        assert (tmp_path / ".s.partial" / "train").is_dir()
        process.send_signal(signal.SIGKILL)
    assert (tmp_path / ".s.partial" / "train").is_dir()
    write(tmp_path / "s", [block()])
    assert [p.name for p in tmp_path.iterdir()] == ["s"]
    assert sorted(p.name for p in (tmp_path / "s").iterdir()) == [
        "manifest.json", "train", "vocabulary",
    ]  # fmt: skip


def test_a_process_that_ends_without_finishing_leaves_nothing_and_no_lock(tmp_path):
    with writing_process(tmp_path / "s") as process:
        process.communicate("")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "s", [block()])


def test_a_store_that_was_finished_while_another_waited_is_not_overwritten(tmp_path):
    late = StoreWriter(tmp_path / "s")
    write(tmp_path / "s", [block()])
    with pytest.raises(InputError, match="s: must not exist yet"), late:
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def test_ending_a_finished_writer_leaves_the_next_ones_work(tmp_path):
    first = StoreWriter(tmp_path / "s")
    with first as writer:
        write_train(writer, [block()])
        writer.finish(SCHEMA, SPEC)
        shutil.rmtree(tmp_path / "s")
        second = StoreWriter(tmp_path / "s").__enter__()
    write_train(second, [block()])
    second.finish(dataclasses.replace(SCHEMA, tasks=()), SPEC)
    second.__exit__()
    assert open_store(tmp_path / "s").schema.tasks == ()


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs the /proc of Linux")
def test_a_directory_that_cannot_be_created_is_an_error():
    with pytest.raises(FileNotFoundError):
        lock_directory(Path("/proc/nosuch/store"))
