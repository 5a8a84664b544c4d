import json

import numpy as np
import pyarrow as pa
import pytest

from jaxrank.data.store import Block, StoreWriter, concatenate, is_store, open_store, slice_block
from jaxrank.errors import InputError
from jaxrank.features import Schema, Task

SCHEMA = Schema((Task("click"),), (), (), (), ())


def block(rows=100, lists=2, seed=0, weighted=True):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, (rows, lists)).astype(np.int32)
    total = int(lengths.sum())
    return Block(
        floats=rng.normal(size=(rows, 3)).astype(np.float32),
        ids=rng.integers(0, 9, (rows, 4)).astype(np.int32),
        list_lengths=lengths,
        list_values=rng.integers(0, 9, total).astype(np.int32),
        list_weights=rng.random(total).astype(np.float32) if weighted else None,
        labels=rng.integers(0, 2, (rows, 1)).astype(np.float32),
        weights=None,
        truth=None,
        kept=pa.RecordBatch.from_pydict({"name": [f"n{i}" for i in range(rows)]}),
    )


def write(path, blocks):
    with StoreWriter(path) as writer:
        split = writer.split("train", {})
        for b in blocks:
            split.write(b)
        writer.write_vocabulary("t", ["b", "a"], [7, 3])
        return writer.finish(SCHEMA, {"features": {}})


def assert_blocks_equal(found, expected):
    for name in Block._fields[:-1]:
        a, b = getattr(found, name), getattr(expected, name)
        if b is None:
            assert a is None
        else:
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
    assert found.kept.equals(expected.kept)


@pytest.mark.parametrize(("lists", "weighted"), [(2, True), (2, False), (0, False)])
def test_blocks_come_back_as_they_were_written(tmp_path, lists, weighted):
    blocks = [block(100, lists, seed, weighted) for seed in range(70)]  # more than a file holds
    write(tmp_path / "s", blocks)
    split = open_store(tmp_path / "s").split("train")
    assert split.rows == 7000
    assert len(list((tmp_path / "s" / "train").iterdir())) == 2
    for found, expected in zip(split.blocks(), blocks, strict=True):
        assert_blocks_equal(found, expected)


def test_vocabulary_comes_back_in_row_order(tmp_path):
    values, counts = write(tmp_path / "s", [block()]).vocabulary("t")
    assert values == ["b", "a"]
    assert counts.tolist() == [7, 3]


def test_slices_joined_again_are_the_block():
    whole = block()
    pieces = [slice_block(whole, a, b) for a, b in [(0, 1), (1, 40), (40, 40), (40, 100)]]
    assert_blocks_equal(concatenate(pieces), whole)


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


def test_a_store_of_another_version_is_refused_with_both(tmp_path):
    write(tmp_path / "s", [block()])
    path = tmp_path / "s" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format_version": 99, "jaxrank_version": "9.9"}))
    with pytest.raises(InputError, match=r"version must be 1, found 99 \(written by jaxrank 9.9\)"):
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
