"""A column with different types in the files of a directory."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrank.data.examples import join
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.direct import open_direct
from jaxrank.errors import InputError

TASK = dict(name="click", label="label")
TEXT = pa.array(["a", "b"])
NUMBERS = [3, 5]
DAY = datetime.datetime(2024, 5, 1)
PAIRS = {
    "null": (TEXT, pa.nulls(2)),
    "null first": (pa.nulls(2), TEXT),
    "whole and fractions": (pa.array(NUMBERS), pa.array([3.0, None])),
    "float widths": (pa.array(NUMBERS, pa.float32()), pa.array(NUMBERS, pa.float64())),
    "dictionary": (TEXT.dictionary_encode(), TEXT),
    "index types": (TEXT.dictionary_encode(), TEXT.dictionary_encode().cast(
        pa.dictionary(pa.int8(), pa.string()))),
    "widths": (pa.array(NUMBERS, pa.int32()), pa.array(NUMBERS, pa.int64())),
    "signs": (pa.array(NUMBERS, pa.uint8()), pa.array(NUMBERS, pa.int16())),
    "booleans": (pa.array([True, False]), pa.array([1, 0])),
    "large text": (TEXT.cast(pa.large_string()), TEXT),
    "text and bytes": (TEXT, TEXT.cast(pa.binary())),
    "bytes": (TEXT.cast(pa.binary()), TEXT.cast(pa.large_binary())),
}  # fmt: skip


def prepared(tmp_path, columns, **features):
    for i, column in enumerate(columns):
        table = pa.table({"label": [1, 0], "c": column})
        pq.write_table(table, tmp_path / f"{i}.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "*.parquet")))
    store = prepare(dict(tasks=[TASK]) | features, source, tmp_path / "s", report=lambda _: None)
    return store, source


@pytest.mark.parametrize("columns", PAIRS.values(), ids=PAIRS)
def test_values_that_are_the_same_have_the_same_rows_in_every_file(tmp_path, columns):
    store, _ = prepared(tmp_path, columns, categorical=[dict(columns="c")], keep=["label"])
    names = store.vocabulary("c")[0]
    result = [names[row - 2] if row >= 2 else None for row in join(
        list(store.split("train").blocks())).ids[:, 0].tolist()]  # fmt: skip

    def spelled(value):
        if value is None:
            return None
        return value.decode() if isinstance(value, bytes) else (
            value if isinstance(value, str) else str(int(value)))  # fmt: skip

    assert result == [spelled(v) for column in columns for v in column.to_pylist()]


@pytest.mark.parametrize(
    "columns",
    [
        (pa.array([[1], []]), pa.array([[], None], pa.list_(pa.null()))),
        (pa.array([[1], []]), pa.array([[], [1]], pa.list_(pa.int32()))),
        (pa.array([[1], []]), pa.array([[], [1]], pa.large_list(pa.int64()))),
        (pa.array([["x"], []]), pa.ListArray.from_arrays(
            pa.array([0, 0, 1], pa.int32()), pa.array(["x"]).dictionary_encode())),
        (pa.array([[1], []]), pa.array([[1.0], []])),
        (pa.array([[1], [1]]), pa.array([[1], None], pa.list_(pa.int64(), 1))),
    ],
)  # fmt: skip
def test_lists_of_the_same_ids_are_the_same_in_every_file(tmp_path, columns):
    store, _ = prepared(tmp_path, columns, ragged=[dict(columns="c")])
    lengths = join(list(store.split("train").blocks())).list_lengths[:, 0].tolist()
    assert lengths == [len(v or []) for column in columns for v in column.to_pylist()]
    assert len(store.vocabulary("c")[0]) == 1


TIMES = {
    "units": (pa.array([DAY] * 2, pa.timestamp("ms")), pa.array([DAY] * 2, pa.timestamp("ns"))),
    "zones": (pa.array([DAY, DAY], pa.timestamp("us")),
              pa.array([DAY, DAY], pa.timestamp("us", "UTC"))),
    "dates": (pa.array([DAY.date()] * 2), pa.array([DAY] * 2, pa.timestamp("s"))),
    "numbers": (pa.array([1714521600] * 2), pa.array([1714521600.0, 1714521600.0])),
}  # fmt: skip


@pytest.mark.parametrize("columns", TIMES.values(), ids=TIMES)
def test_times_may_have_other_types_and_are_kept_in_one(tmp_path, columns):
    store, source = prepared(tmp_path, columns, time="c", by_day=True)
    assert list(store.splits) == ["train/2024-05-01"]
    kept = [block.kept.column("c") for block in store.split("train").blocks()]
    assert len({column.type for column in kept}) == 1
    direct = open_direct(dict(tasks=[TASK], keep=["c"]), source).split("train")
    assert len({block.kept.column("c").type for block in direct.blocks()}) == 1


def test_numbers_are_floats_whatever_their_types(tmp_path):
    decimals = pa.array([1.25, 2.5]).cast(pa.decimal128(5, 2))
    columns = [pa.array(NUMBERS), decimals, pa.array([True, False]), pa.array(NUMBERS, "f4")]
    store, _ = prepared(tmp_path, columns, dense=[dict(columns="c", standardize=False)])
    result = np.concatenate([block.dense[:, 0] for block in store.split("train").blocks()])
    assert result.tolist() == [3, 5, 1.25, 2.5, 1, 0, 3, 5]


def test_ids_that_were_rounded_are_not_hidden_by_another_file(tmp_path):
    columns = [pa.array([1.0, 2.0]), pa.array([2.0**24, 1], pa.float32())]
    with pytest.raises(InputError, match="1.parquet, row 1, column c: .*below 16,777,216"):
        prepared(tmp_path, columns, categorical=[dict(columns="c")])


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("schema", [[], [("label", "f8"), ("c", "i8")]], ids=["none", "others"])
def test_a_file_without_rows_may_have_other_columns(tmp_path, schema, place):
    files = [pa.table({"label": [1, 0], "c": TEXT})]
    files.insert(place, pa.schema(schema).empty_table())
    for i, table in enumerate(files):
        pq.write_table(table, tmp_path / f"{i}.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "*.parquet")))
    features = dict(tasks=[TASK], categorical=[dict(columns="c")])
    store = prepare(features, source, tmp_path / "s", report=lambda _: None)
    assert store.split("train").statistics["rows"] == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [(pa.array(NUMBERS), TEXT), (pa.array(NUMBERS, "u8"), pa.array(NUMBERS)),
     (pa.array([[1], [2]]), pa.array(NUMBERS)), (pa.array(NUMBERS, "u8"), pa.array(NUMBERS, "i1")),
     (TEXT.dictionary_encode(), pa.array(NUMBERS).dictionary_encode()),
     (pa.array(NUMBERS, "f8"), TEXT), (pa.array([True, False]), TEXT),],
)  # fmt: skip
def test_types_of_other_values_are_rejected_with_what_to_do(tmp_path, first, second):
    message = r"1.parquet, column c: must be of type .* as in .*0.*Write the column with one type"
    with pytest.raises(InputError, match=message):
        prepared(tmp_path, [first, second], categorical=[dict(columns="c")])
