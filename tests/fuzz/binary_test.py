"""Random and damaged Parquet and TFRecord files are read correctly or raise an InputError.

Content under a checksum is read correctly or not at all: the records and lengths of TFRecord, and
the pages of Parquet. The footer and page headers of Parquet have no checksum, so a change may give
other data. A TFRecord file that ends between two records is valid. In these cases the tests only
require that there is no other exception, no crash and no endless loop.
"""

import os
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkout import HELPERS, ROOT
from fuzzing import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated, page_bytes, parquet_file, read, tfrecord_file
from tfrecords import example, feature, framed

from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.tfrecord import example_columns
from jaxrank.data.sources.tfrecord.tf_example import ColumnType
from jaxrank.errors import InputError

# Valid files.

_INTEGERS = [pa.int8(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64()]
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def _values(kind):
    if pa.types.is_integer(kind):
        bits = kind.bit_width - (not pa.types.is_unsigned_integer(kind))
        return st.integers(0 if pa.types.is_unsigned_integer(kind) else -(2**bits), 2**bits - 1)
    if pa.types.is_floating(kind):
        return st.floats(width=kind.bit_width, allow_nan=False)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_binary(kind):
        return st.binary(max_size=6)
    if pa.types.is_list(kind):
        return st.lists(st.none() | _values(kind.value_type), max_size=4)
    return _TEXT


_SIMPLE = st.sampled_from(
    [*_INTEGERS, pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.binary()]
)
_KINDS = _SIMPLE | _SIMPLE.map(pa.list_) | st.just(pa.dictionary(pa.int32(), pa.string()))


@st.composite
def tables(draw):
    rows = draw(st.integers(1, 40))
    columns = {}
    for name in draw(st.lists(_TEXT.filter(bool), min_size=1, max_size=4, unique=True)):
        kind = draw(_KINDS)
        values = draw(st.lists(st.none() | _values(kind), min_size=rows, max_size=rows))
        is_dictionary = pa.types.is_dictionary(kind)
        array = pa.array(values, pa.string() if is_dictionary else kind)
        columns[name] = array.dictionary_encode() if is_dictionary else array
    return pa.table(columns)


_OPTIONS = st.fixed_dictionaries(
    {
        "row_group_size": st.integers(1, 50),
        # Arrow 26 cannot read back one empty list that it wrote in a page of up to 64 bytes.
        "data_page_size": st.sampled_from([100, 2**20]),
        "compression": st.sampled_from(["none", "snappy", "gzip", "zstd"]),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "use_dictionary": st.booleans(),
        "write_page_checksum": st.booleans(),
    }
)


def test_random_tables_come_out_of_parquet_as_they_went_in(tmp_path):
    path = tmp_path / "a.parquet"

    @given(table=tables(), options=_OPTIONS)
    @settings(max_examples=CASES, deadline=None, database=None, derandomize=True)
    def round_trip(table, options):
        pq.write_table(table, path, **options)
        assert read("parquet", path) == dict(enumerate(table.to_pylist(), start=1))

    round_trip()


# Damage to data with checksums.


def test_a_changed_page_of_parquet_is_rejected(tmp_path):
    path = tmp_path / "a.parquet"
    for seed in range(CASES):
        records = parquet_file(path, seed)
        whole, places = path.read_bytes(), page_bytes(path)
        assert read("parquet", path) == dict(enumerate(records, start=1))
        damaged = mutated(whole, random.Random(seed), places)
        if damaged != whole:
            path.write_bytes(damaged)
            with pytest.raises(InputError, match=r"a\.parquet: must be a readable Parquet file"):
                read("parquet", path)


def test_changed_tfrecords_lose_records_only_where_that_is_reported(tmp_path):
    path = tmp_path / "a.tfrecord"
    outcomes = {"rejected": 0, "skipped": 0}
    for seed in range(CASES):
        draw = random.Random(seed)
        records = tfrecord_file(path, seed, rows=draw.choice([5, 60]))
        expected = dict(enumerate(records, start=1))
        assert read("tfrecord", path) == expected
        whole = path.read_bytes()
        damaged = mutated(whole, draw, range(len(whole)))
        if damaged == whole:
            continue
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.tfrecord"):
            read("tfrecord", path)
        rejects = Rejects("skip", limit=1000)
        try:
            result = read("tfrecord", path, rejects)
        except InputError:
            outcomes["rejected"] += 1
            continue
        outcomes["skipped"] += 1
        assert all(expected[row] == record for row, record in result.items())
        assert len(result) + rejects.count == len(expected)
    assert all(outcomes.values())


def test_a_tfrecord_file_that_ends_early_gives_whole_records_or_none(tmp_path):
    path = tmp_path / "a.tfrecord"
    for seed in range(CASES):
        records = tfrecord_file(path, seed, rows=20)
        whole = path.read_bytes()
        stop = random.Random(seed).randrange(len(whole))
        path.write_bytes(whole[:stop])
        try:
            result = read("tfrecord", path, Rejects("skip", limit=1000))
        except InputError:
            continue
        assert result == dict(enumerate(records[: len(result)], start=1))


# Damage to data without checksums.


@pytest.mark.parametrize("kind", ["parquet", "tfrecord"])
def test_no_damage_ends_in_anything_but_an_input_error(tmp_path, kind):
    command = [sys.executable, "mutations.py", kind, "0", str(CASES), str(tmp_path)]
    paths = [str(ROOT), *sys.path]
    done = subprocess.run(
        command,
        cwd=HELPERS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        timeout=300,
    )
    output = done.stdout.decode().split("\n")
    assert done.returncode == 0, f"case {output[-2]}: {done.stderr.decode()}"
    assert output[-2].startswith("read ")


def test_damaged_examples_are_read_alike_by_numpy_and_protobuf(monkeypatch):
    types = {"label": "int64", "price": "float32", "user": "bytes", "tags": "list<int64>"}
    columns = {name: ColumnType.parse(text) for name, text in types.items()}
    few = example_columns._FEW
    read_some = 0
    for seed in range(CASES):
        draw = random.Random(seed)
        records = []
        for _ in range(40):
            whole = example(
                {
                    "label": feature("int64", [draw.randrange(2)]),
                    "price": feature("float32", [draw.random()]),
                    "user": feature("bytes", [draw.randbytes(3)]),
                    "tags": feature("int64", [draw.randrange(300) for _ in range(3)]),
                }
            )
            records.append(mutated(whole, draw) if draw.random() < 0.7 else whole)
        result = []
        for at_least in (few, 10**9):
            monkeypatch.setattr(example_columns, "_FEW", at_least)
            batch, bad = example_columns.decode_columns(records, columns)
            places = {b.place for b in bad}
            good = [r for i, r in enumerate(batch.to_pylist()) if i not in places]
            # the text, because NaN is not equal to itself
            result.append((sorted(b[:4] for b in bad), repr(good)))
            read_some += len(good)
        assert result[0] == result[1]
    assert read_some


def test_random_bytes_are_no_files(tmp_path):
    for kind in ("parquet", "tfrecord"):
        path = tmp_path / f"a.{kind}"
        for seed in range(30):
            data = random.Random(seed).randbytes(seed * 10)
            for content in (data, framed(data)[:8] + data, b"PAR1" + data + b"PAR1"):
                path.write_bytes(content)
                with pytest.raises(InputError, match=f"a.{kind}"):
                    read(kind, path)
