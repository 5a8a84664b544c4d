"""Every kind of bad input stops the preparation with file, row, column and value."""

import bz2
import gzip
import pickle
import re
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrank.data.prepare.passes import prepare
from jaxrank.data.sources import text
from jaxrank.data.store.direct import open_direct
from jaxrank.errors import InputError

CLICK = dict(name="click", label="label")
HEADER = "label,price,user,tags,w\n"
GOOD = "1,2.5,u1,a|b,1|2\n"


def run(tmp_path, content, *, name="day.csv", kind="csv", **features):
    """Prepares one file of the given text or bytes."""
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return run_files(tmp_path, str(path), kind=kind, **features)


def run_files(tmp_path, files, *, kind="csv", **features):
    features = dict(tasks=[CLICK]) | features
    source = dict(kind=kind, files=dict(train=files))
    try:
        return prepare(features, source, tmp_path / "store", report=lambda _: None)
    finally:
        left = [p.name for p in tmp_path.iterdir() if "store" in p.name]
        assert left in ([], ["store"])


def rejected(*parts):
    """An InputError whose message has the parts in this order."""
    return pytest.raises(InputError, match=".*".join(re.escape(part) for part in parts))


def run_parquet(tmp_path, columns, **features):
    path = tmp_path / "day.parquet"
    pq.write_table(pa.table(columns), path)
    return run_files(tmp_path, str(path), kind="parquet", **features)


FLOATS = [dict(columns="price")]
IDS = [dict(columns="user")]
LISTS = [dict(columns="tags")]


# Files.


def test_missing_file(tmp_path):
    with rejected("nowhere/day.csv: no such file or directory"):
        run_files(tmp_path, str(tmp_path / "nowhere" / "day.csv"))


def test_missing_directory_in_a_list(tmp_path):
    (tmp_path / "a.csv").write_text(HEADER + GOOD)
    with rejected("gone: no such file or directory"):
        run_files(tmp_path, [str(tmp_path / "a.csv"), str(tmp_path / "gone")])
    missing = str(tmp_path / "as.csv")
    with rejected(f"source.files.train: {missing}: no such", "nearest is 'a.csv'"):
        run_files(tmp_path, missing)


def test_empty_directory(tmp_path):
    (tmp_path / "days").mkdir()
    with rejected("days: the directory must hold at least one file"):
        run_files(tmp_path, str(tmp_path / "days"))


def test_glob_that_matches_nothing(tmp_path):
    with rejected("day*.csv: this pattern must match at least one file: found none"):
        run_files(tmp_path, str(tmp_path / "day*.csv"))


@pytest.mark.parametrize("content", ["", HEADER, gzip.compress(b"", mtime=0), HEADER[:-1]])
def test_file_without_rows(tmp_path, content):
    with rejected("day.csv: must have at least one row"):
        run(tmp_path, content)


def test_empty_criteo_file(tmp_path):
    with rejected("day.tsv: must have at least one row"):
        run(tmp_path, "", name="day.tsv", kind="criteo")


def test_parquet_without_rows(tmp_path):
    with rejected("day.parquet: must have at least one row"):
        run_parquet(tmp_path, {"label": pa.array([], pa.int64())})


def test_files_without_rows_are_passed_over_where_others_of_the_split_have_some(tmp_path):
    for name, content in (("a", HEADER), ("b", HEADER + GOOD * 3), ("c", HEADER[:-1])):
        (tmp_path / f"{name}.csv").write_text(content)
    assert run_files(tmp_path, str(tmp_path / "*.csv")).splits["train"].rows == 3
    with rejected("a.csv: must have at least one row: found none, nor in the other files of its"):
        run_files(tmp_path / "none", [str(tmp_path / "a.csv"), str(tmp_path / "c.csv")])
    (tmp_path / "d.csv").write_text("")
    (tmp_path / "f.csv").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress(b""))
    assert run_files(tmp_path / "some", str(tmp_path / "*.csv*")).splits["train"].rows == 3
    with rejected("d.csv: must have at least one row: found none, the file is empty"):
        run_files(tmp_path / "none", str(tmp_path / "d.csv"))


def test_parquet_parts_without_rows_are_passed_over(tmp_path):
    some = pa.table({"label": [1, 0, 1], "user": [1, 2, 0]})
    for name, table in (("a", some[:0]), ("b", some), ("c", some[:0]), ("d", some[1:])):
        pq.write_table(table, tmp_path / f"{name}.parquet")
    (tmp_path / "e.parquet").write_bytes(b"")
    ids = [dict(columns="user", encoding="integer", rows=3)]
    store = run_files(tmp_path, str(tmp_path / "*.parquet"), kind="parquet", categorical=ids)
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "*.parquet")))
    for split in (
        store.split("train"),
        open_direct(dict(tasks=[CLICK], categorical=ids), source).split("train"),
    ):
        result = [block.ids for block in split.blocks()]
        assert np.concatenate(result)[:, 0].tolist() == [1, 2, 0, 2, 0]


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "checksum"])
def test_corrupt_gzip(tmp_path, damage):
    rows = "".join(f"1,{i * 7919 % 1013},u{i},a|b,1|2\n" for i in range(5000))
    content = bytearray(gzip.compress((HEADER + rows).encode()))
    if damage == "truncated":
        del content[-2000:]
    elif damage == "overwritten":
        content[3000:3100] = bytes(100)
    else:
        content[-8:-4] = b"\0\0\0\0"
    with rejected("day.csv"):
        run(tmp_path, bytes(content), dense=FLOATS)


def test_plain_text_named_gz(tmp_path):
    with rejected("day.csv.gz: must be gzip, as its name says: found b'la'"):
        run(tmp_path, HEADER + GOOD, name="day.csv.gz")


def test_text_named_parquet(tmp_path):
    must = "day.parquet: must be a readable Parquet file: found "
    for content, kind in [
        (HEADER + GOOD, "text: set source.kind='csv'"),
        (gzip.compress(b"PAR1", mtime=0), "gzip: decompress it first"),
        (b"ARROW1\0\0" + bytes(20), "an Arrow or Feather file: write it as Parquet"),
        (b"PAR1" + bytes(20) + b"PAR2", "Parquet magic bytes not found in footer"),
    ]:
        with rejected(must + kind):
            run(tmp_path, content, name="day.parquet", kind="parquet")


def test_parquet_with_a_damaged_page(tmp_path):
    path = tmp_path / "day.parquet"
    table = pa.table({"label": [i % 2 for i in range(20_000)], "price": list(range(20_000))})
    pq.write_table(table, path, write_page_checksum=True, compression="none")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with rejected("day.parquet: must be a readable Parquet file"):
        run_files(tmp_path, str(path), kind="parquet", dense=FLOATS)


def test_headers_that_differ(tmp_path):
    (tmp_path / "a.csv").write_text("label,x,y\n1,2,3\n")
    (tmp_path / "b.csv").write_text("label,x,z\n1,2,3\n")
    with rejected("b.csv: must have the columns of", "missing ['y'], additional ['z']"):
        run_files(tmp_path, str(tmp_path / "*.csv"))


OTHER_KINDS = {
    "zip": (b"PK\3\4\x14\0\0\0", "a zip archive: unpack it first"),
    "parquet": (b"PAR1\x15\4\x15\x10\0", "Parquet: set source.kind='parquet'"),
    "utf16": ((HEADER + GOOD).encode("utf-16"), "UTF-16"),
    "utf16 without a mark": ((HEADER + GOOD).encode("utf-16-le"), "UTF-16"),
    "utf32": ((HEADER + GOOD).encode("utf-32"), "UTF-32"),
    "tar.gz": (
        gzip.compress(b"day.csv" + bytes(250) + b"ustar\x0000"),
        "a tar archive",
    ),
    "gzip twice": (gzip.compress(gzip.compress(b"a")), "gzip: decompress it once more"),
    "bzip2 in gzip": (gzip.compress(bz2.compress(b"a")), "bzip2: decompress it once more"),
    "zlib": (zlib.compress(b"label,user\n"), "zlib (deflate): decompress it first"),
    "snappy": (b"\xff\6\0\0sNaPpY\1\x10\0\0label,user\n", "snappy: decompress it first"),
    "compress": (b"\x1f\x9d\x90label,user\n", "compress (.Z): decompress it first"),
    "pickle": (pickle.dumps([1], 2), "a Python pickle"),
    "json of several lines": (b'[\n  {"label": 1},\n  {"label": 0}\n]\n', "JSON"),
    "html behind a line": (b"\n <HTML><body>404</body>\n", "a page of HTML"),
    "json": (b'{"label": 1, "user": "u"}\n{"label": 0, "user": "v"}\n', "JSON"),
    "an error of a server": (b"<Error><Code>AccessDenied</Code></Error>", "XML of an error"),
    "html": (b"<!DOCTYPE html>\n<html>\n", "a page of HTML"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\noid x\n", "git lfs pull"),
    "tfrecord": (struct.pack("<QI", 20, 12345) + bytes(range(20)), "set source.kind='tfrecord'"),
}


@pytest.mark.parametrize(("content", "shown"), OTHER_KINDS.values(), ids=OTHER_KINDS)
@pytest.mark.parametrize("more", [{}, dict(columns=["label", "user"])])
def test_files_that_are_no_text(tmp_path, content, shown, more):
    path = tmp_path / "day.csv"
    path.write_bytes(content)
    source = dict(kind="csv", files=dict(train=str(path))) | more
    with rejected("day.csv: must be text, plain or compressed: found ", shown):
        prepare(dict(tasks=[CLICK]), source, tmp_path / "store")


def test_a_header_that_begins_like_another_kind_is_text(tmp_path):
    for i, name in enumerate(("PAR1", "ORCID", "ARROW1", "x\1", "<errors>", "{a}")):
        (tmp_path / str(i)).mkdir()
        assert run(tmp_path / str(i), f"{name},label\n3,1\n").splits["train"].rows == 1


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (HEADER + GOOD, "text: set source.kind='csv'"),
        (gzip.compress((HEADER + GOOD).encode(), mtime=0), "text: set source.kind='csv'"),
        (b"PAR1\x15\4\x15\x10\0", "Parquet: set source.kind='parquet'"),
        (b"PK\3\4\x14\0\0\0", "a zip archive"),
        (zlib.compress((HEADER + GOOD).encode()), "zlib (deflate): decompress it first"),
    ],
)
def test_files_that_are_no_tfrecord(tmp_path, content, shown):
    with rejected("day.csv: must be TFRecord, plain or compressed by gzip: found ", shown):
        run(tmp_path, content, kind="tfrecord")


def test_zstd_that_begins_with_a_frame_without_data_is_read(tmp_path):
    frame = struct.pack("<II", 0x184D2A50, 4) + b"pzst"
    packed = pa.compress((HEADER + GOOD).encode(), "zstd", asbytes=True)
    for i, content in enumerate((frame + packed, packed + frame + packed)):
        (tmp_path / str(i)).mkdir()
        if i:  # the second header is found, so all frames are read
            with rejected("row 3: must be a record: found a repeated header"):
                run(tmp_path / str(i), content, name="day.csv.zst")
        else:
            assert run(tmp_path, content, name="day.csv.zst").splits["train"].rows == 1


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("1;2\n3;4\n", "is one name, '1;2': set source.delimiter=';'"),
        ("1\t2\n3\t4\n", "set source.delimiter='\\t'"),
        ("1\x012\n3\x014\n", "set source.delimiter='\\x01'"),
        ("1,2\n3,4\n", "name the columns in source.columns"),
    ],
)
@pytest.mark.parametrize(
    ("features", "name"),
    [
        ({}, "label"),
        (dict(derived=[dict(name="h", kind="hour", columns="ts")]), "ts"),
    ],
)
def test_a_column_that_is_missed_because_of_how_lines_are_read(
    tmp_path, content, hint, features, name
):
    with rejected(f"the data has no column {name!r}", hint):
        run(tmp_path, content, **features)


def test_a_key_of_directories_is_no_column_of_text(tmp_path):
    (tmp_path / "day=2024-05-01").mkdir()
    (tmp_path / "day=2024-05-01" / "a.csv").write_text(HEADER + GOOD)
    with rejected("features.time: the data has no column 'day'", "only with source.kind='parquet'"):
        run_files(tmp_path, str(tmp_path / "day=2024-05-01"), time="day")


def test_lines_of_one_column_name_the_delimiter(tmp_path):
    source = dict(kind="csv", files=dict(train=str(tmp_path / "day.csv")))
    source["columns"] = ["label", "user"]
    (tmp_path / "day.csv").write_text("1;u\n0;v\n")
    with rejected("row 1: must have 2 columns: found 1. Set source.delimiter=';'"):
        prepare(dict(tasks=[CLICK]), source, tmp_path / "store", report=lambda _: None)


@pytest.mark.parametrize(
    ("name", "must"),
    [
        ("a/b", "has no '/'"),
        ("a\0b", "has only letters of files"),
        ("\udcff", "has only letters of files"),
        ("\u00e9" * 101, "has at most 200 bytes"),
    ],
)
def test_a_table_is_named_as_a_file_can_be(tmp_path, name, must):
    columns = {"label": [1, 0], "user": ["u", "v"]}
    with rejected("table", "without '/'" if "/" in name else must):
        run_parquet(tmp_path, columns, categorical=[dict(columns="user", table=name)])
    if "\udcff" not in name:
        with rejected("features: the column", f"must have a table whose name {must}: set `table`"):
            run_parquet(tmp_path, columns | {name: ["a", "b"]}, categorical=[dict(columns=name)])


def test_a_label_is_no_feature(tmp_path):
    with rejected("features.categorical: a feature must be known before", "label of task 'click'"):
        run(tmp_path, HEADER + GOOD, categorical=[dict(columns="label")])


def test_header_with_a_name_twice(tmp_path):
    with rejected("day.csv, row 1: column names must differ: found 'x' twice"):
        run(tmp_path, "label,x,x\n1,2,3\n")


def test_parquet_types_that_differ(tmp_path):
    pq.write_table(pa.table({"label": [1], "price": [1.5]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"label": [1], "price": ["x"]}), tmp_path / "b.parquet")
    with rejected("b.parquet, column price: must be of type double", "found string"):
        run_files(tmp_path, str(tmp_path / "*.parquet"), kind="parquet", dense=FLOATS)
    pq.write_table(pa.table({"label": [1], "cost": [2.5]}), tmp_path / "b.parquet")
    with rejected("b.parquet: must have the columns of", "missing ['price'], additional []"):
        run_files(tmp_path, str(tmp_path / "*.parquet"), kind="parquet", dense=FLOATS)
    # What no feature names may be of any type, or not there, and all in any order.
    pq.write_table(pa.table({"z": [1], "price": [2.5], "label": [1]}), tmp_path / "b.parquet")
    floats = [dict(columns="price", standardize=False)]
    store = run_files(tmp_path, str(tmp_path / "*.parquet"), kind="parquet", dense=floats)
    result = np.concatenate([block.dense[:, 0] for block in store.split("train").blocks()])
    assert result.tolist() == [1.5, 2.5]


# Lines.


@pytest.mark.parametrize(("line", "columns"), [("1,2.5,u1,a|b", 4), ("1,2,3,4,5,6", 6)])
@pytest.mark.parametrize("good", [0, 3, 2000])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_too_few_or_too_many_columns(tmp_path, monkeypatch, line, columns, good, pack):
    monkeypatch.setattr(text, "_MIN_CHUNK_BYTES", 4096)
    monkeypatch.setattr(text, "_ROWS_PER_CHUNK", 100)
    content = pack((HEADER + GOOD * good + line + "\n" + GOOD).encode())
    with rejected(f"day.csv, row {good + 2}: must have 5 columns: found {columns}"):
        run(tmp_path, content)


def test_criteo_line_with_a_column_too_few(tmp_path):
    good = "\t".join(["0"] * 40) + "\n"
    with rejected("day.tsv, row 3: must have 40 columns: found 39"):
        run(tmp_path, good * 2 + good[2:] + good, name="day.tsv", kind="criteo")


def test_empty_line(tmp_path):
    with rejected("day.csv, row 4: must have a value in some column: found an empty line"):
        run(tmp_path, HEADER + GOOD * 2 + "\n" + GOOD)


def test_bytes_that_are_not_utf8(tmp_path):
    content = (HEADER + GOOD * 3 + "1,1,?,a,1\n").encode().replace(b"?", b"\xff")
    with rejected("day.csv, row 5, column user: must be UTF-8"):
        run(tmp_path, content)


def test_a_value_over_two_lines(tmp_path):
    with rejected("day.csv, row 3, column user: must be on one line", "a\\nb"):
        run(tmp_path, HEADER + GOOD + '1,1,"a\nb",a,1\n' + GOOD)


def test_a_quote_that_is_not_closed(tmp_path):
    with rejected("day.csv", "row"):
        run(tmp_path, HEADER + GOOD + '1,1,"ab,a,1\n' + GOOD)


# Labels and what goes with them.


@pytest.mark.parametrize("bad", ["2", "yes", "-1", "nan", "0.5", "t", "True ", "truefalse"])
def test_bad_label(tmp_path, bad):
    with rejected(
        f"day.csv, row 4, column label: must be 0, 1, true, false or empty: found '{bad}'"
    ):
        run(tmp_path, HEADER + GOOD * 2 + f"{bad},1,u,a,1\n" + GOOD)


@pytest.mark.parametrize(("bad", "shown"), [("2", "'2'"), ("no", "'no'"), ("", "an empty value")])
def test_bad_mask(tmp_path, bad, shown):
    task = CLICK | dict(mask="m")
    with rejected(f"day.csv, row 3, column m: must be 0, 1, true or false: found {shown}"):
        run(tmp_path, f"label,m\n1,0\n1,{bad}\n", tasks=[task])


@pytest.mark.parametrize("bad", ["-1", "inf", "1e36", "x", ""])
def test_bad_example_weight(tmp_path, bad):
    task = CLICK | dict(weight="m")
    result = repr(bad) if bad else "an empty value"
    must = "must be a finite number, 0 or more and at most 1e30"
    with rejected(f"day.csv, row 3, column m: {must}: found {result}"):
        run(tmp_path, f"label,m\n1,0\n1,{bad}\n", tasks=[task])


def test_real_labels_that_hardly_differ(tmp_path):
    task = dict(name="y", label="m", kind="real")
    with rejected("labels of 'y' in the split 'train' must have a range of at least 1e-15"):
        run(tmp_path, "label,m\n1,1e-25\n1,3e-25\n", tasks=[task])


def test_bad_truth(tmp_path):
    task = CLICK | dict(truth="p")
    with rejected("day.csv, row 3, column p: must be a number from 0 to 1, or empty: found '1.5'"):
        run(tmp_path, "label,p\n1,0.2\n1,1.5\n", tasks=[task])


# Floats.


@pytest.mark.parametrize("bad", ["abc", "nan", "inf", "-inf", " 1", "0x10"])
def test_bad_float(tmp_path, bad):
    must = "must be a finite number or empty"
    with rejected(f"day.csv, row 17, column price: {must}: found '{bad}'"):
        run(tmp_path, HEADER + GOOD * 15 + f"1,{bad},u,a,1\n", dense=FLOATS)


def test_nan_of_a_native_type(tmp_path):
    columns = {"label": [1, 0, 1], "price": [1.0, None, float("nan")]}
    with rejected("day.parquet, row 3, column price: must be a finite number or empty: found nan"):
        run_parquet(tmp_path, columns, dense=FLOATS)


def test_number_beyond_float32(tmp_path):
    with rejected("day.csv, row 3, column price: must be in the range of float32: found '1e39'"):
        run(tmp_path, HEADER + GOOD + "1,1e39,u,a,1\n", dense=FLOATS)


def test_number_whose_square_is_infinite(tmp_path):
    floats = [dict(columns="price", log=True, standardize=True)]
    must = "must be a number of at most 1e+150 in size, or empty"
    with rejected(f"day.csv, row 3, column price: {must}: found '-1e200'"):
        run(tmp_path, HEADER + GOOD + "1,-1e200,u,a,1\n", dense=floats)


def test_float_column_of_another_type(tmp_path):
    columns = {"label": [1], "price": [{"a": 1}]}
    with rejected(
        "day.parquet, column price: must be a finite number or empty", "struct<a: int64>"
    ):
        run_parquet(tmp_path, columns, dense=FLOATS)


# Ids.


def test_id_column_of_structs_or_lists(tmp_path):
    for value in ({"a": 1}, [1, 2]):
        kind = "struct" if isinstance(value, dict) else "list"
        columns = {"label": [1], "user": [value]}
        must = "must be text or whole numbers: found a column of type"
        with rejected(f"day.parquet, column user: {must} {kind}"):
            run_parquet(tmp_path, columns, categorical=IDS)


def test_id_with_a_fraction(tmp_path):
    columns = {"label": [1, 1], "user": [3.0, 2.5]}
    with rejected("day.parquet, row 2, column user: must be text or whole numbers: found 2.5"):
        run_parquet(tmp_path, columns, categorical=IDS)


DTYPES = {pa.float16(): np.float16, pa.float32(): np.float32, pa.float64(): np.float64}


@pytest.mark.parametrize(
    ("kind", "first"), [(pa.float64(), 2**53), (pa.float32(), 2**24), (pa.float16(), 2**11)]
)
def test_float_ids_that_were_rounded(tmp_path, kind, first):
    good, bad = first - 1, first if kind != pa.float64() else 4873214862074861234
    for sign in (1, -1):
        values = pa.array(np.array([good, sign * bad], DTYPES[kind]))
        must = f"must be a whole number below {first:,}, as {kind} rounds others"
        for column, features in (
            (values, dict(categorical=IDS)),
            (pa.ListArray.from_arrays([0, 1, 2], values), dict(ragged=[dict(columns="user")])),
            (values, dict(group="user", categorical=[dict(columns="device")])),
        ):
            with rejected(f"day.parquet, row 2, column user: {must}", "int64 or as text."):
                columns = {"label": [1, 0], "user": column, "device": ["a", "b"]}
                run_parquet(tmp_path, columns, **features)
    if first < 2**31:
        ids = [dict(columns="user", encoding="integer", rows=2**30)]
        with rejected("row 2, column user: must be a row that", "does not round", "as int64"):
            run_parquet(tmp_path, {"label": [1, 0], "user": absolute(values)}, categorical=ids)


def absolute(values):
    return pa.array(np.abs(values.to_numpy()))


def test_structs_of_ids_and_weights(tmp_path):
    columns = {"label": [1], "tags": [[{"id": 1, "w": 0.5}]]}
    with rejected("column tags", "type struct", "ids and weights as two lists of equal length"):
        run_parquet(tmp_path, columns, ragged=LISTS)
    columns["tags"] = pa.array([[(1, 0.5)]], pa.map_(pa.int64(), pa.float64()))
    with rejected("column tags", "type map", "as two columns of lists"):
        run_parquet(tmp_path, columns, ragged=LISTS)


@pytest.mark.parametrize("word", ["nan", "NULL", "None", "\\N", "N/A"])
def test_words_for_missing_values_are_named_with_their_field(tmp_path, word):
    hint = "If it stands for a missing value, list it in source.null_values."
    rows = HEADER + GOOD + f"1,{word},u,a,1\n"
    with rejected(f"row 3, column price: must be a finite number or empty: found {word!r}. {hint}"):
        run(tmp_path, rows, dense=FLOATS)
    with rejected(
        f"row 3, column label: must be 0, 1, true, false or empty: found {word!r}. {hint}"
    ):
        run(tmp_path, HEADER + GOOD + f"{word},1,u,a,1\n")
    lines = []
    path = tmp_path / "day.csv"
    path.write_text(f"label,user,tags,item\n1,u,a:1|b:0.5,4.87e+18\n0,{word},c:2| d:1,36.0\n")
    source = dict(kind="csv", files=dict(train=str(path)))
    prepare(
        dict(tasks=[CLICK], categorical=[*IDS, dict(columns="item")], ragged=LISTS),
        source,
        tmp_path / "x",
        report=lines.append,
    )
    reported = "".join(lines)
    assert f"feature user: 50.0% of the first 2 values are {word!r}" in reported
    assert "feature item: 50.0% of the first 2 values are numbers with an exp" in reported
    assert "feature item: 50.0% of the first 2 values are whole numbers with a frac" in reported
    assert "feature tags: 100% of the first 4 ids end in a separator and a number" in reported
    assert "contain" not in reported
    path.write_text("label,tags\n1,finance|games\n0,games|a|b\n1,\n0,sport\n")
    del lines[:]
    features = dict(tasks=[CLICK], ragged=[dict(columns="tags", separator=",")])
    prepare(features, source, tmp_path / "y", report=lines.append)
    assert "feature tags: most of the first 3 ids contain '|', such as 'finance|games'" in "".join(
        lines
    )
    assert "tags: 25.0% of the first 4 values begin or end with a space, such as ' d:1'" in reported


@pytest.mark.parametrize(
    ("cells", "section", "note"),
    [
        (["12:0.5", "12:0.7"], "categorical", "100% .* name the column in `ragged` with weight"),
        (["shoes:42", "hats:7"], "categorical", ""),
        (["12 0.5|13 2", "12 0.7"], "ragged", "67% .* such as '12 0.5'. .* set weight_separ"),
        (["12(0.5)|13(2)", "12(0.7)"], "ragged", "67% .* such as '12.0.5.'"),
        (["12_0.5|13_2.0", "12_0.7"], "ragged", "100% .* such as '12_0.5'"),
        (["0.5:a|2.0:b", "0.7:a"], "ragged", "100% .* begin .* write it behind the id"),
        (["12:50%|13:20%", "12:70%"], "ragged", "100% .* such as '12:50%'"),
        (["12:0.5|13|14|15", "12:0.7|16|17"], "ragged", "29% .* such as '12:0.5'"),
        (["1 2 3", "4 5"], "ragged", "contain ' ', .* set separator=' '"),
        (["New York|Paris", "San Jose"], "ragged", ""),
        (["1\t2\t3", "4\t5"], "ragged", r"contain '\\t'"),
        (["1\x022\x023", "4\x025"], "ragged", r"contain '\\x02'"),
        (["1/2/3", "4/5"], "ragged", "contain '/'"),
        (["news/sport", "news/tv"], "ragged", ""),
        (["1|2", "3|4"], "categorical", r"contain '\|', .* name the column in `ragged`"),
        (["1/2", "3, 4"], "categorical", ""),
        (["'a'", '"b"'], "categorical", "100% .* as a program prints them, such as \"'a'\""),
        (["0.5", "17.25"], "categorical", "100% .* numbers with a fraction, .* in `dense`"),
        (["1", "1.2.3"], "categorical", ""),
        (["np.int64(1)", "b'x'"], "categorical", "100% .* as a program prints them"),
        ([["'a'", "'b'"], ["it's"]], "ragged", "67% .* as a program prints them"),
        (["a\u00a0", "b"], "categorical", "50.0% .* begin or end with a space"),
        (["\ufeffa", "b"], "categorical", "50.0% .* begin or end with a space"),
        ([["1|2"], ["3|4", "5"]], "ragged", r"contain '\|', .* write each id as a part"),
        ([[b"1|2"], [b"3|4", b"5"]], "ragged", r"contain '\|', .* write each id as a part"),
    ],
)
def test_ids_that_seem_to_hold_more_than_an_id_are_reported(tmp_path, cells, section, note):
    lines: list[str] = []
    pq.write_table(pa.table({"label": [1, 0], "x": cells}), tmp_path / "a.parquet")
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "a.parquet")))
    features = dict(tasks=[CLICK]) | {section: [dict(columns="x")]}
    prepare(features, source, tmp_path / "s", report=lines.append)
    reported = [line for text in lines for line in text.splitlines() if "feature x" in line]
    assert len(reported) == bool(note)
    assert all(re.search(note, line) for line in reported)


def test_ids_and_times_that_are_no_features_are_reported_too(tmp_path):
    lines: list[str] = []
    path = tmp_path / "day.csv"
    path.write_text(
        "label,page,a,b,t,u\n"
        '1,4.87e+18,"[1, 2]",x,1410210012,1410210\n'
        "0,nan,[3],y,1410210059,1714521600\n"
    )
    features = dict(
        tasks=[CLICK],
        group="page",
        categorical=[dict(columns="ab"), dict(columns="h", encoding="integer", rows=24)],
        derived=[
            dict(name="ab", kind="cross", columns=["a", "b"]),
            dict(name="h", kind="hour", columns="t"),
        ],
    )
    source = dict(kind="csv", files=dict(train=str(path)))
    prepare(features, source, tmp_path / "s", report=lines.append)
    reported = "\n".join(lines)
    assert "group, column page: 50.0% of the first 2 values are numbers with an exp" in reported
    assert "group, column page: 50.0% of the first 2 values are 'nan'" in reported
    assert "cross ab, column a: 100.0% of the first 2 values are lists in brackets" in reported
    assert (
        "column t: all times of the first 2 rows that are read as seconds since 1970 could be dates"
        " as YYMMDDHHMM"
    ) in reported
    del lines[:]
    for more in (dict(time_format="seconds"), dict(derived=[features["derived"][0]])):
        few = dict(features, categorical=[dict(columns="ab")]) | more
        prepare(few, source, tmp_path / f"s{len(more)}{list(more)[0]}", report=lines.append)
    assert "could be dates" not in "\n".join(lines)


NOT_WHOLE = ["x", "0x10", "0XA", "1.5", "1e3", " 1", "-", "99999999999999999999x", "nan"]
# Of a table of 100 rows: just outside, beyond 32 bits, and beyond 64.
OUTSIDE = [
    *(-1, 100, -(2**31), 2**31 - 1, 2**31, 2**32, 2**32 + 5, 2**63 - 1, -(2**63)),
    *(2**63, 2**64 - 1, 2**64, 2**64 + 7, -(2**64), 10**30, -(10**30)),
]
POLICIES = ["oov", "hash", "clip"]


@pytest.mark.parametrize("bad", OUTSIDE)
def test_integer_id_out_of_range(tmp_path, bad):
    ids = [dict(columns="user", table="people", encoding="integer", rows=100)]
    must = "must be a row of the table 'people', 0 to 99 (rows=100), or empty"
    hint = "Set on_bad_id='oov', 'hash' or 'clip' to give such ids a row, or raise `rows`."
    with rejected(f"day.csv, row 4, column user: {must}: found '{bad}'. {hint}"):
        run(tmp_path, f"label,user\n1,0\n1,99\n1,{bad}\n", categorical=ids)


@pytest.mark.parametrize("bad", NOT_WHOLE)
def test_integer_id_that_is_no_whole_number(tmp_path, bad):
    ids = dict(columns="user", table="people", encoding="integer", rows=100)
    must = "must be a row of the table 'people', 0 to 99 (rows=100), or empty"
    with rejected(f"day.csv, row 4, column user: {must}: found '{bad}'."):
        run(tmp_path, f"label,user\n1,0\n1,99\n1,{bad}\n", categorical=[ids])
    for policy in POLICIES:
        must = "must be a whole number, or empty"
        with rejected(f"day.csv, row 5, column user: {must}: found '{bad}'."):
            run(
                tmp_path,
                f"label,user\n1,0\n1,{10**30}\n1,-1\n1,{bad}\n",
                categorical=[ids | dict(on_bad_id=policy)],
            )


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        *((pa.int32(), n) for n in OUTSIDE if -(2**31) <= n < 2**31),
        *((pa.int64(), n) for n in OUTSIDE if -(2**63) <= n < 2**63),
        *((pa.uint64(), n) for n in OUTSIDE if 0 <= n < 2**64),
        *((pa.float64(), float(n)) for n in OUTSIDE),
        *((pa.float64(), x) for x in (2.5, float("nan"), float("inf"))),
    ],
)
def test_integer_id_of_a_native_type_out_of_range(tmp_path, kind, bad):
    columns = {"label": [1] * 3, "user": pa.array([7, None, bad], kind)}
    must = "must be a row of the table 'people', 0 to 99 (rows=100), or empty"
    with rejected(f"day.parquet, row 3, column user: {must}: found {bad}."):
        run_parquet(
            tmp_path,
            columns,
            categorical=[dict(columns="user", table="people", encoding="integer", rows=100)],
        )


@pytest.mark.parametrize(
    ("kind", "bad"),
    [(pa.float64(), 2.0**53 + 2), (pa.float64(), -1e30), (pa.float32(), 2.0**24)],
)
def test_a_rounded_integer_id_is_not_hashed(tmp_path, kind, bad):
    columns = {"label": [1] * 3, "user": pa.array([7.0, None, bad], kind)}
    ids = [dict(columns="user", encoding="integer", rows=100, on_bad_id="hash")]
    with rejected(f"day.parquet, row 3, column user: must be a row that {kind} does not round"):
        run_parquet(tmp_path, columns, categorical=ids)


@pytest.mark.parametrize("bad", [2.5, float("nan"), float("inf"), float("-inf")])
def test_float_ids_that_are_no_whole_numbers_have_no_policy(tmp_path, bad):
    columns = {"label": [1] * 4, "user": [7.0, 1e300, None, bad]}
    ids = [dict(columns="user", encoding="integer", rows=100, on_bad_id="oov")]
    must = "must be a whole number, or empty"
    with rejected(f"day.parquet, row 4, column user: {must}: found {bad}."):
        run_parquet(tmp_path, columns, categorical=ids)


def test_list_id_out_of_range(tmp_path):
    lists = [dict(columns="tags", table="tag", encoding="integer", rows=10)]
    must = "must be a row of the table 'tag', 0 to 9 (rows=10), or empty"
    for bad in (-1, 10, 2**70):
        with rejected(f"day.csv, row 4, column tags: {must}: found '{bad}'."):
            run(tmp_path, f"label,tags\n1,0|9\n1,\n1,3|4|{bad}\n1,1\n", ragged=lists)


def test_wrong_number_of_ids(tmp_path):
    ids = [dict(columns="user", length=2, separator="|")]
    with rejected("day.csv, row 3, column user: must have length=2 ids: found 3 in 'a|b|c'"):
        run(tmp_path, "label,user\n1,a|b\n1,a|b|c\n", categorical=ids)


# Lists.


def test_list_with_an_empty_part(tmp_path):
    with rejected("day.csv, row 3, column tags: must be a list without empty ids"):
        run(tmp_path, HEADER + GOOD + "1,1,u,a||b,1\n", ragged=LISTS)


def test_other_number_of_weights_than_ids(tmp_path):
    lists = [dict(columns="tags", weights="w")]
    with rejected(
        "day.csv, row 3, column w: must have as many weights as tags has ids:"
        " found 2 weights and 3 ids"
    ):
        run(tmp_path, HEADER + GOOD + "1,1,u,a|b|c,1|2\n", ragged=lists)


@pytest.mark.parametrize("bad", ["-1", "nan", "x", "1e-39", "1e-60", "1e39"])
def test_bad_list_weight(tmp_path, bad):
    lists = [dict(columns="tags", weights="w")]
    must = "must be 0 or a finite number of at least 1e-38"
    with rejected(f"day.csv, row 3, column w: {must}: found '{bad}'"):
        run(tmp_path, HEADER + GOOD + f"1,1,u,a|b,1|{bad}\n", ragged=lists)


def test_overlong_list(tmp_path):
    lists = [dict(columns="tags", max_length=2)]
    with rejected(
        "day.csv, row 3, column tags: must have at most max_length=2 ids: found 3."
        " Raise max_length, or set on_overlong='truncate'."
    ):
        run(tmp_path, HEADER + GOOD + "1,1,u,a|b|c,1\n", ragged=lists)


def test_list_column_of_another_type(tmp_path):
    columns = {"label": [1], "tags": [5]}
    with rejected("day.parquet, column tags: must be a list", "found a column of type int64"):
        run_parquet(tmp_path, columns, ragged=LISTS)


# The config.


@pytest.mark.parametrize(
    ("features", "parts"),
    [
        (dict(denes=FLOATS), ["features.denes: must be a field", "features.dense"]),
        (
            dict(dense=[dict(columns="price", logs=True)]),
            ["features.dense[0].logs: must be a field", "features.dense[0].log?"],
        ),
        (
            dict(dense=[dict(columns="price", log=1)]),
            ["features.dense[0].log: must be True or False: found 1"],
        ),
        (
            dict(categorical=[dict(columns="user", min_count=True)]),
            ["features.categorical[0].min_count: must be a whole number: found True"],
        ),
        (dict(categorical=IDS[0]), ["features.categorical: must be a list"]),
        (dict(categorical=[{}]), ["features.categorical[0].columns is missing"]),
        (
            dict(categorical=[dict(columns="U*")]),
            ["features.categorical[0].columns: 'U*' matches no column"],
        ),
        (
            dict(categorical=[dict(columns="uesr")]),
            ["features.categorical[0].columns: 'uesr' matches no column", "'user'"],
        ),
        (dict(categorical=[dict(columns="lab*")]), ["'lab*' matches no column"]),
        (
            dict(dense=[dict(columns="price"), dict(columns="p*")]),
            ["found 'price' in features.dense[0] and features.dense[1]"],
        ),
        (dict(keep=["tiem"]), ["features.keep[0]: the data has no column 'tiem'"]),
        (dict(tasks=[dict(name="a", label="lable")]), ["no column 'lable'", "'label'"]),
        (dict(tasks=[]), ["features.tasks: must be a list with an entry"]),
        (
            dict(tasks=[CLICK | dict(name="")]),
            ["features.tasks[0].name: must be a name without '/': found ''"],
        ),
        (
            dict(tasks=[CLICK, CLICK | dict(name="a/b")]),
            ["features.tasks[1].name: must be a name without '/': found 'a/b'"],
        ),
        (
            dict(tasks=[CLICK, CLICK]),
            ["features.tasks[1].name: must be used once", "found 'click'"],
        ),
        (
            dict(keep=["label_click"]),
            ["found the column 'label_click' and the task 'click'"],
        ),
        (
            dict(group="predicted_click"),
            ["found the column 'predicted_click' and the task 'click'"],
        ),
        (
            dict(categorical=[dict(columns="user", encoding="hashed")]),
            ["features.categorical[0].encoding: must be one of", "found 'hashed'"],
        ),
        (
            dict(categorical=[dict(columns="user", encoding="hash", rows=2)]),
            ["features.categorical[0].rows: must be from 3 to", "found 2"],
        ),
        (
            dict(categorical=[IDS[0] | dict(on_bad_id="zero")]),
            [
                "categorical[0].on_bad_id: must be one of 'error', 'oov', 'hash', 'clip': found"
                " 'zero'"
            ],
        ),
        (
            dict(categorical=[IDS[0] | dict(on_bad_id="oov")]),
            [
                "categorical[0].on_bad_id is read only where",
                "found 'oov', features.categorical[0].encoding 'vocabulary'",
            ],
        ),
        (
            dict(ragged=[LISTS[0] | dict(encoding="hash", rows=9, on_bad_id="clip")]),
            [
                "ragged[0].on_bad_id is read only where",
                "found 'clip', features.ragged[0].encoding 'hash'",
            ],
        ),
        (
            dict(categorical=[IDS[0] | dict(encoding="integer", rows=2**31 - 1, on_bad_id="oov")]),
            [f"categorical[0].rows: must be from 1 to {2**31 - 2} (encoding='integer')"],
        ),
        (
            dict(
                categorical=[IDS[0] | dict(encoding="integer", rows=9)],
                ragged=[
                    dict(columns="tags", table="user", encoding="integer", rows=9, on_bad_id="hash")
                ],
            ),
            ["share the table 'user', so on_bad_id must be the same: found 'error' and 'hash'"],
        ),
        (
            dict(ragged=[LISTS[0] | dict(combiner="none")]),
            ["ragged[0].max_length: must be 1 or more with combiner='none'", "found 0"],
        ),
        (
            dict(ragged=[LISTS[0] | dict(combiner="none", max_length=3, weights="w")]),
            [
                "ragged[0].weights is read only where",
                "found 'w', features.ragged[0].combiner 'none'",
            ],
        ),
        (
            dict(ragged=[LISTS[0] | dict(combiner="max")]),
            ["ragged[0].combiner: must be one of 'sum', 'mean', 'sqrtn', 'none': found 'max'"],
        ),
        (
            dict(categorical=IDS, ragged=[dict(columns="tags", table="user", min_count=3)]),
            ["user and tags share the table 'user', so min_count must be the same: found 1 and 3"],
        ),
    ],
)
def test_bad_features_section(tmp_path, features, parts):
    with rejected(*parts):
        run(tmp_path, HEADER + GOOD, **features)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (dict(kind="cvs"), ["source.kind", "found 'cvs'"]),
        (dict(kind="csv", flies={}), ["source.flies: must be a field", "source.files"]),
        (dict(kind="synthetic", rowz=3), ["source.rowz: must be a field", "source.rows"]),
        (dict(kind="synthetic", seed=3), ["source.rows is missing"]),
        (dict(kind="csv", files={}), ["source.files: must be a dict of split names"]),
        (dict(kind="csv", files=dict(train=[])), ["source.files.train: must have at least one"]),
        (dict(kind="csv", files={"a/b": "x"}), ["name of a split", "found 'a/b'"]),
        (
            dict(kind="synthetic", rows=dict(vocabulary=1), seed=0),
            ["source.rows: the name of a split must", "found 'vocabulary'"],
        ),
    ],
)
def test_bad_source_section(tmp_path, source, parts):
    with rejected(*parts):
        prepare(dict(tasks=[CLICK]), source, tmp_path / "store")
