"""Delimited text is read as by the csv module, for any division into parts and any location."""

import csv
import gzip
import http.server
import io
import json
import lzma
import re

import fsspec
import pyarrow as pa
import pytest
from servers import NoSize, Ranges, serving

from jaxrank.data import files
from jaxrank.data.chunk import Part
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources import delimited, lines, text
from jaxrank.data.sources.registry import make_source
from jaxrank.data.sources.text import CRITEO_COLUMNS
from jaxrank.errors import InputError

NAMES = ["n", "name", "price"]
HEADER = b"n,name,price\n"
# Quotes, commas, empty values, multi-byte characters, and characters that some readers treat as
# line endings.
VALUES = ["", "a", '"a,b"', '""', '"say ""hi"""', "ünï", "\U0001f600", "x" * 40, "\x0b\x0c\u2028"]
ROWS = [f"{i},{VALUES[i % 9]},{i * 7919 % 101}" for i in range(60)]
PLAIN = "\n".join(["n,name,price", *ROWS, ""]).encode()


def open_source(path, kind="csv"):
    return make_source(dict(kind=kind, files=dict(train=str(path))))


def read(source, rejects=None, content=b""):
    """Returns (line number in the file, record) of every record, all parts in order.

    `content` is the file's content, in which the lines before a chunk's offset are counted.
    """
    result = []
    for part in source.parts("train"):
        for chunk in source.chunks(part, rejects or Rejects()):
            assert chunk.batch.num_rows == len(chunk.rows) > 0
            numbers = chunk.rows + content[: chunk.offset].count(b"\n")
            result += zip(numbers.tolist(), chunk.batch.to_pylist(), strict=True)
    return result


def expected(content, names=NAMES):
    """Parses CSV with a header by the csv module."""
    reader = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline="\n"))
    assert next(reader) == names
    return [
        (reader.line_num, {n: v or None for n, v in zip(names, values, strict=True)})
        for values in reader
    ]


@pytest.fixture
def small(monkeypatch):
    """Sets the bytes of a part and of the smallest chunk to a few lines."""

    def set_sizes(part, chunk=64, rows=5):
        monkeypatch.setattr(text, "_PART_BYTES", part)
        monkeypatch.setattr(text, "_MIN_CHUNK_BYTES", chunk)
        monkeypatch.setattr(text, "_ROWS_PER_CHUNK", rows)
        monkeypatch.setattr(delimited, "_PIECE_BYTES", max(chunk // 2, 1))

    return set_sizes


# Parts.

LONG = b"n,name,price\n1," + b"y" * 300 + b",2\n3,a,4\n"
CONTENTS = {
    "LF": PLAIN,
    "CRLF": PLAIN.replace(b"\n", b"\r\n"),
    "both ends": PLAIN.replace(b"\n", b"\r\n", 30),
    "no final newline": PLAIN[:-1],
    "final CR": PLAIN[:-1] + b"\r",
    "BOM": b"\xef\xbb\xbf" + PLAIN,
    "BOM before quotes": b'\xef\xbb\xbf"n","name","price"\r\n1,2,3',
    "one row": b"n,name,price\n1,a,2\n",
    "one row, no newline": b"n,name,price\n1,a,2",
    "a line longer than a part": LONG,
    "NUL": b"n,name,price\n1,\x00,2\n\x00\x00,,2\n",
    "a CR in quotes": b'n,name,price\n1,"a\rb",2\n3,c,4\n',
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_parts_together_have_each_line_once_with_its_number(tmp_path, small, content):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    for part, chunk in [(2, 1), (3, 64), (7, 1), (16, 1000), (100, 1), (1000, 64), (10**6, 10**6)]:
        small(part, chunk)
        source = open_source(path)
        assert read(source, content=content) == expected(content)
        cuts = [(p.start, p.stop) for p in source.parts("train")]
        assert cuts == [(i, min(i + part, len(content))) for i in range(0, len(content), part)]


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_gzip_is_one_part_and_is_read_as_the_plain_file_is(tmp_path, small, content):
    small(8)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(content))
    source = open_source(path)
    assert source.parts("train") == [Part("train", str(path), 0, path.stat().st_size)]
    assert read(source) == expected(content)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.csv.bz2", "bz2"),
        ("a.csv.zst", "zstd"),
        ("a.csv.lz4", "lz4"),
        ("a", "zstd"),
        ("a", "lz4"),
    ],
)
def test_other_compressions_are_read_as_gzip_is(tmp_path, small, name, kind):
    small(8)
    path = tmp_path / name
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, kind) as stream:
        stream.write(PLAIN)
    path.write_bytes(packed.getvalue())
    assert len(open_source(path).parts("train")) == 1
    assert read(open_source(path)) == expected(PLAIN)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=f"{name}: must be readable to its end"):
        read(open_source(path))


def test_what_is_compressed_otherwise_is_rejected(tmp_path):
    path = tmp_path / "a.csv.xz"
    path.write_bytes(lzma.compress(PLAIN))
    message = f"{path}: must be plain or one of gzip, bz2, zstd, lz4: found xz"
    with pytest.raises(InputError, match=message):
        open_source(path)
    path = path.rename(tmp_path / "a.csv.zst")
    with pytest.raises(InputError, match="a.csv.zst: must be zstd, as its name says"):
        open_source(path)


def test_a_part_has_the_lines_that_begin_in_it(tmp_path, small):
    small(10)
    path = tmp_path / "a.csv"
    #  parts:        |         |         |         |
    path.write_bytes(b"n\n2345678\n10\n13\n1678901234567\n33\n")
    source = open_source(path)
    result = [
        [r["n"] for c in source.chunks(p, Rejects()) for r in c.batch.to_pylist()]
        for p in source.parts("train")
    ]
    assert result == [["2345678"], ["10", "13", "1678901234567"], [], ["33"]]


def test_criteo_files_are_cut_too_and_have_no_quotes(tmp_path, small):
    names = list(text.CRITEO_COLUMNS)
    values = [[f'"{i}' if j % 3 else "" for j in range(40)] for i in range(50)]
    content = "".join("\t".join(row) + "\n" for row in values).encode()
    path = tmp_path / "a.tsv"
    path.write_bytes(content)
    small(333)
    source = open_source(path, "criteo")
    assert len(source.parts("train")) > 10
    wanted = [{n: v or None for n, v in zip(names, row, strict=True)} for row in values]
    assert read(source, content=content) == list(enumerate(wanted, start=1))


def test_criteo_files_may_have_no_label_in_any_line(tmp_path):
    path = tmp_path / "a.tsv"
    row = "\t".join("" if i % 5 else str(i) for i in range(39))
    path.write_text(f"{row}\n{row}\n")
    wanted = dict(zip(text.CRITEO_COLUMNS[1:], (v or None for v in row.split("\t")), strict=True))
    assert read(open_source(path, "criteo")) == [(1, wanted), (2, wanted)]
    path.write_text(f"{row}\n1\t{row}\n")
    with rejected("a.tsv, row 1: must have 40 columns: found 39"):
        read(open_source(path, "criteo"))


def test_a_byte_order_mark_is_a_mark_at_the_start_of_the_file_only(tmp_path, small):
    mark = "\ufeff"
    content = (mark + "n,x\n" + f"{mark}1,2\n" * 20).encode()
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    for part in (9, 1000):
        small(part, 1, 1)
        rows = read(open_source(path), content=content)
        assert rows == [(i, {"n": mark + "1", "x": "2"}) for i in range(2, 22)]


def test_a_nul_is_a_letter_like_others_in_long_values_too(tmp_path):
    values = ["x" * (12 + i % 8) + "\0" * (i % 3) for i in range(40)]
    path = tmp_path / "a.tsv"
    path.write_text(("\t".join(values) + "\n") * 3000)
    wanted = dict(zip(text.CRITEO_COLUMNS, values, strict=True))
    assert read(open_source(path, "criteo")) == [(i, wanted) for i in range(1, 3001)]


def test_chunks_are_of_a_few_thousand_rows_whatever_the_file(tmp_path):
    path = tmp_path / "a.csv"
    line = ",".join(["x" * 9] * 100) + "\n"
    path.write_text(",".join(f"c{i}" for i in range(100)) + "\n" + line * 40_000)
    source = open_source(path)
    before = pa.total_allocated_bytes()
    rows = []
    for chunk in source.chunks(source.parts("train")[0], Rejects()):
        rows.append(chunk.batch.num_rows)
        assert pa.total_allocated_bytes() - before < 80 * len(line) * 1024
    assert sum(rows) == 40_000
    assert max(rows) < 20_000


# Invalid lines.


def rejected(*parts):
    """Asserts an InputError whose message has the parts in this order."""
    return pytest.raises(InputError, match=".*".join(re.escape(part) for part in parts))


# line, column, requirement, actual value
BAD = {
    "too few": ("1,2", "", "have 3 columns", "2"),
    "too many": ("1,2,3,4,", "", "have 3 columns", "5"),
    "empty": ("", "", "have a value in some column", "an empty line"),
    "no value": (",,", "", "have a value in some column", "an empty line"),
    "not UTF-8": ("1,a\udcffb,3", "name", "UTF-8", r"b'a\xffb'"),
    "not UTF-8 in quotes": ('1,"a,\udcc3",3', "name", "UTF-8", r"b'a,\xc3'"),
    "open quote": ('1,"a,2', "name", "on one line, between two quotes if quoted", r"'a,2\n50,"),
    "lone quote": ('1,2,"', "price", "on one line, between two quotes if quoted", r"'\n50,"),
    "CR": ("1,a\rb,3", "", "delimited text", "a carriage return within the line"),
    "CR at its end": ("1,a,3\r", "", "delimited text", "a carriage return within the line"),
}


@pytest.fixture(params=BAD.values(), ids=BAD)
def bad_file(request, tmp_path, small):
    """Returns a case of one invalid line in a file that is split into many parts.

    It is (path, content, content without the invalid line, its line number, line, column, must,
    found).
    """
    line, *rest = request.param
    # CRLF, so that a CR at the end is extra.
    before, after = (
        b"".join(row.encode() + b"\r\n" for row in rows) for rows in (ROWS[:50], ROWS[50:])
    )
    bad = line.encode(errors="surrogateescape") + b"\r\n"
    path = tmp_path / "a.csv"
    content = HEADER + before + bad + after
    path.write_bytes(content)
    small(100)
    return path, content, HEADER + before + after, 52, line, *rest


def test_the_first_bad_line_is_named_with_its_number_in_a_later_part(bad_file):
    path, _, _, number, _, column, must, result = bad_file
    column = f", column {column}" if column else ""
    with rejected(f"a.csv, row {number}{column}: must", f"{must}: found {result}"):
        read(open_source(path))


def test_skipped_are_the_bad_lines_and_no_others(bad_file):
    path, content, good, number, bad, column, must, result = bad_file
    wanted = [(n + (n >= number), record) for n, record in expected(good)]
    rejects = Rejects("skip", 1)
    assert read(open_source(path), rejects, content) == wanted
    (entry,) = map(json.loads, rejects.lines)
    assert entry["found"].startswith(result)
    record = bad.encode(errors="surrogateescape").decode(errors="backslashreplace")
    reported = dict(file=str(path), row=number, column=column, must=must, record=record)
    assert entry == reported | dict(found=entry["found"])


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_many_bad_lines_of_a_block_are_skipped_in_order(tmp_path, small, pack):
    rows = [f"{i},a,{i}" if i % 7 and i % 5 else f"{i},a" for i in range(2, 500)]
    content = HEADER + "\n".join(rows).encode()
    path = tmp_path / "a.csv"
    path.write_bytes(pack(content))
    for sizes in [(10**6, 10**6), (300, 50), (40, 1)]:
        small(*sizes)
        rejects = Rejects("skip", 1000)
        result = read(open_source(path), rejects, content)
        assert [number for number, _ in result] == [i for i in range(2, 500) if i % 7 and i % 5]
        assert all(int(record["n"]) == number for number, record in result)
        bad = [json.loads(line)["row"] for line in rejects.lines]
        assert bad == [i for i in range(2, 500) if not (i % 7 and i % 5)]


@pytest.mark.parametrize(
    ("content", "bad"),
    [
        (b'1,"a\nb",2\n', [2, 3]),
        (b"1,a,2\r3,b,4\n", [2]),
        # The number of records equals the number of lines, unless lines are read one by one.
        (b'1,a,2\r3,b,4\n5,"a\nb",6\n', [2, 3, 4]),
        (b'5,"a\nb",6\n1,a,2\r3,b,4\n', [2, 3, 4]),
    ],
)
def test_a_record_is_one_line_and_a_line_one_record(tmp_path, content, bad):
    path = tmp_path / "a.csv"
    path.write_bytes(HEADER + content + b"7,c,8\n")
    rejects = Rejects("skip", 9)
    last = {"n": "7", "name": "c", "price": "8"}
    assert read(open_source(path), rejects) == [(bad[-1] + 1, last)]
    assert [json.loads(line)["row"] for line in rejects.lines] == bad
    with rejected(f"a.csv, row {bad[0]}"):
        read(open_source(path))


def test_an_empty_line_of_one_column_is_a_record_without_its_value(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'n\n1\n\n2,3\n""\n4\n')
    rejects = Rejects("skip", 9)
    result = [(number, record["n"]) for number, record in read(open_source(path), rejects)]
    assert result == [(2, "1"), (3, None), (5, None), (6, "4")]
    assert rejects.count == 1


def test_a_value_longer_than_the_csv_module_takes_is_kept_among_bad_lines(tmp_path):
    path = tmp_path / "a.csv"
    long = "x" * (csv.field_size_limit() + 1)
    path.write_text(f"n,name,price\n1,{long},2\n3\n4,{long}\n5,a,6\n")
    rejects = Rejects("skip", 2)
    assert [number for number, _ in read(open_source(path), rejects)] == [2, 5]
    assert [json.loads(line)["row"] for line in rejects.lines] == [3, 4]


def test_a_file_of_bad_lines_only_has_no_records_to_skip_to(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(HEADER + b"1\n" * 100)
    rejects = Rejects("skip", 100)
    assert read(open_source(path), rejects) == []
    assert rejects.count == 100
    with rejected("at most 99 records may be skipped"):
        read(open_source(path), Rejects("skip", 99))


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_quote_that_is_not_closed_at_the_end_of_the_file(tmp_path, end):
    path = tmp_path / "a.csv"
    path.write_bytes(HEADER + b'1,2,3\n1,2,"3' + end.encode())
    with rejected("a.csv, row 3, column price: must be on one line", r"found '3\n'"):
        read(open_source(path))


def test_a_line_that_does_not_end_stops_the_reading(tmp_path, small, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.csv"
    small(10**6)
    path.write_bytes(HEADER + b"1,2,3\n" * 10 + b"x" * 5000 + b"\n1,2,3\n")
    with rejected("a.csv: a line must have at most 1,000 bytes: found more from byte 73 on"):
        read(open_source(path), Rejects("skip", 9))
    path.write_bytes(b"x" * 100_000)
    with rejected("a.csv: a line must have at most 1,000 bytes: found more from byte 0 on"):
        open_source(path)


@pytest.mark.parametrize("keep", [0.2, 0.9, 0.999])
def test_gzip_that_is_cut_off_is_never_skipped(tmp_path, keep):
    content = gzip.compress(HEADER + b"".join(b"%d,a,%d\n" % (i, i * i) for i in range(40_000)))
    path = tmp_path / "a.csv.gz"
    path.write_bytes(content[: int(keep * len(content))])
    with rejected("a.csv.gz: must be readable to its end"):
        read(open_source(path), Rejects("skip", 10**6))


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ["must have at least one row"]),
        (b"\xef\xbb\xbf", ["must have at least one row"]),
        (b"a,b\r\n", ["must have at least one row"]),
        (b"\n1,2\n", ["row 1: must have the names of the columns: found an empty line"]),
        (b",\n1,2\n", ["row 1: must have the names of the columns"]),
        (b"a,a\n1,2\n", ["row 1: column names must differ: found 'a' twice"]),
        (b'a,"b\n1,2\n', ["row 1: must be on one line", r"found 'b\n'"]),
        (b"a,\xff\n1,2\n", ["row 1: must be UTF-8", "0xff"]),
        (b"a,b\r1,2\r", ["row 1: must be delimited text: found a carriage return"]),
        (b"a," + b"b" * 140_000 + b"\n1,2\n", ["row 1: must be delimited text", "131072"]),
    ],
)
def test_a_header_that_cannot_be_used(tmp_path, content, parts):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with rejected("a.csv", *parts):
        open_source(path)


@pytest.mark.parametrize("content", [b"", gzip.compress(b"", mtime=0)])
def test_a_criteo_file_without_lines(tmp_path, content):
    path = tmp_path / "a.tsv"
    path.write_bytes(content)
    with rejected("a.tsv: must have at least one row"):
        read(open_source(path, "criteo"))


@pytest.mark.parametrize("names", [CRITEO_COLUMNS, CRITEO_COLUMNS[1:]])
def test_a_header_of_a_criteo_file_is_rejected(tmp_path, names):
    path = tmp_path / "a.tsv"
    record = "\t".join(["1"] * len(names)) + "\n"
    path.write_text("\t".join(names) + "\n" + record)
    with rejected("a.tsv, row 1: must be a record", f"names '{names[0]}', ", "kind='csv'"):
        open_source(path, "criteo")
    path.write_text(",".join(names) + "\n" + record)
    with rejected("a.tsv, row 1: must have tabs", "found commas", "kind='csv'"):
        open_source(path, "criteo")
    path.write_text(record.replace("1", "", 14) + record)  # missing numbers are no names
    assert len(read(open_source(path, "criteo"))) == 2


@pytest.mark.parametrize("delimiter", ["", "ab", "é", "\x00", "\n", "\r", '"', 5])
def test_a_delimiter_that_cannot_be_used(tmp_path, delimiter):
    path = tmp_path / "a.csv"
    path.write_bytes(PLAIN)
    with rejected("source.delimiter: must", repr(delimiter)):
        make_source(dict(kind="csv", files=dict(train=str(path)), delimiter=delimiter))


@pytest.mark.parametrize("delimiter", ["\t", "|", " ", "\x01", "\\", "'"])
def test_any_other_delimiter(tmp_path, delimiter):
    path = tmp_path / "a.csv"
    path.write_text(delimiter.join("ab") + "\n" + f'"x{delimiter}y"{delimiter}z\n')
    source = make_source(dict(kind="csv", files=dict(train=str(path)), delimiter=delimiter))
    assert read(source) == [(2, {"a": f"x{delimiter}y", "b": "z"})]


# Headers in different orders.


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_each_part_is_read_by_the_header_of_its_own_file(tmp_path, small, pack):
    orders = [NAMES, ["price", "n", "name"], ["name", "price", "n"], NAMES]
    wanted = []
    for i, names in enumerate(orders):
        values = [{n: f"{n} {i} {row}" for n in NAMES} for row in range(40)]
        wanted += values
        rows = "".join(",".join(value[n] for n in names) + "\r\n" for value in values)
        mark = b"\xef\xbb\xbf" if i == 1 else b""
        content = mark + (",".join(names) + "\r\n" + rows).encode()
        (tmp_path / f"{i}.csv").write_bytes(pack(content))
    for sizes in [(10**6, 10**6), (300, 50), (40, 1)]:
        small(*sizes)
        source = open_source(tmp_path / "*.csv")
        assert source.columns("train") == NAMES
        assert pack is not bytes or sizes[0] > 300 or len(source.parts("train")) > 12
        result = []
        for part in source.parts("train"):
            for chunk in source.chunks(part, Rejects()):
                assert chunk.batch.schema.names == NAMES
                result += chunk.batch.to_pylist()
        assert result == wanted


def test_splits_may_have_other_orders_and_quotes_in_them(tmp_path):
    (tmp_path / "a.csv").write_text('"a,b",c\n1,2\n')
    (tmp_path / "b.csv").write_text('c,"a,b"\n3,"4,5"\n')
    files = dict(train=str(tmp_path / "a.csv"), valid=str(tmp_path / "b.csv"))
    source = make_source(dict(kind="csv", files=files))
    assert source.columns("valid") == ["a,b", "c"]
    (chunk,) = source.chunks(*source.parts("valid"), Rejects())
    assert chunk.batch.to_pylist() == [{"a,b": "4,5", "c": "3"}]
    assert chunk.batch.schema.names == ["a,b", "c"]


@pytest.mark.parametrize(
    ("header", "missing", "added"),
    [
        ("price,name", "['n']", "[]"),
        ("price,name,n,x", "[]", "['x']"),
        ("x,price,N", "['n', 'name']", "['x', 'N']"),
    ],
)
def test_columns_that_one_file_lacks_or_adds_are_named(tmp_path, header, missing, added):
    (tmp_path / "a.csv").write_bytes(PLAIN)
    (tmp_path / "b.csv").write_text(f"{header}\n1,2,3\n")
    with rejected("b.csv: must have the columns of", f"missing {missing}, additional {added}"):
        open_source(tmp_path / "*.csv")


def test_bad_lines_of_another_order_are_reported_as_the_file_has_them(tmp_path, small):
    small(60, 1)
    (tmp_path / "a.csv").write_text("n,name,price\n0,a,1\n")
    path = tmp_path / "b.csv"
    path.write_bytes(b"price,n,name\n" + b"7,8,x\n" * 20 + b"7,8\n7,\xff,x\n" + b"9,8,y\n" * 20)
    rejects = Rejects("skip", 2)
    result = [
        record for _, record in read(open_source(tmp_path / "*.csv"), rejects, path.read_bytes())
    ]
    good = dict(n="8", name="x", price="7")
    expected = [dict(n="0", name="a", price="1"), *[good] * 20]
    assert result == expected + [dict(n="8", name="y", price="9")] * 20
    reported = [(e["row"], e["column"], e["record"]) for e in map(json.loads, rejects.lines)]
    assert reported == [(22, "", "7,8"), (23, "n", r"7,\xff,x")]


# Texts for missing values.

NULLS = ["NULL", "NaN", "\\N", "None", "ünï", "a,b", "\0", ""]


def write_source(path, nulls, **more):
    files = dict(train=str(path))
    return make_source(dict(kind="csv", files=files, null_values=nulls) | more)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_cells_that_are_exactly_a_null_value_are_missing_in_every_column(tmp_path, small, pack):
    values = [*NULLS, "null", " NULL", "NULL ", "NULLNULL", "NU", "a", "\\\\N", "\ue000", "-"]
    table = [
        {n: values[(i * step) % len(values)] for n, step in zip(NAMES, (1, 3, 5), strict=True)}
        for i in range(1, 200)
    ]
    table = [row for row in table if any(v not in NULLS for v in row.values())]
    out = io.StringIO()
    writer = csv.DictWriter(out, NAMES, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    path = tmp_path / "a.csv"
    path.write_bytes(pack(out.getvalue().encode()))
    for sizes in [(10**6, 10**6), (300, 50), (40, 1)]:
        small(*sizes)
        result = [record for _, record in read(write_source(path, NULLS))]
        assert result == [{n: None if v in NULLS else v for n, v in r.items()} for r in table]
        result = [record for _, record in read(open_source(path))]
        assert result == [{n: v or None for n, v in r.items()} for r in table]


def test_in_quotes_a_null_value_is_missing_too_and_names_are_never_null(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('NULL,x\n"NULL",1\n"""NULL""",2\n')
    result = [record for _, record in read(write_source(path, ("NULL",)))]
    assert result == [{"NULL": None, "x": "1"}, {"NULL": '"NULL"', "x": "2"}]


def test_a_nul_beside_null_values_of_rare_letters_is_no_null_value(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("n,x\n\0,1\n\0\0,2\na,3\n")
    result = [record["n"] for _, record in read(write_source(path, ["\ue000", "\ue001", "\0\0"]))]
    assert result == ["\0", None, "a"]


def test_as_many_and_as_long_null_values_as_there_may_be(tmp_path):
    nulls = [chr(0x10000 + i) * 63 + chr(0x10000 + i // 2) for i in range(64)]
    path = tmp_path / "a.csv"
    rows = [*nulls, nulls[0][:-1], nulls[1] + "a"]
    path.write_text("n,x\n" + "".join(f"{value},1\n" for value in rows))
    result = [record["n"] for _, record in read(write_source(path, nulls))]
    assert result == [None] * 64 + rows[64:]


@pytest.mark.parametrize(
    ("nulls", "message"),
    [
        ("NULL", ": must be a list: found 'NULL'"),
        (None, ": must be a list: found None"),
        ([None], "[0]: must be text: found None"),
        (["NULL", 0], "[1]: must be text: found 0"),
        ({"NULL": 1}, ": must be a list: found {'NULL': 1}"),
        ([b"NULL"], "[0]: must be text: found b'NULL'"),
        (["a\n"], r": must be texts in UTF-8, on one line: found 'a\n'"),
        (["\udcff"], r": must be texts in UTF-8, on one line: found '\udcff'"),
        (
            ["a"] * 65,
            ": must be at most 64 strings of at most 64 characters: found 65, the longest of 1",
        ),
        (
            ["", "a" * 65],
            ": must be at most 64 strings of at most 64 characters: found 2, the longest of 65",
        ),
    ],
)
def test_null_values_that_cannot_be_used(tmp_path, nulls, message):
    path = tmp_path / "a.csv"
    path.write_bytes(PLAIN)
    with rejected(f"source.null_values{message}"):
        write_source(path, nulls)


def test_criteo_files_have_no_null_values(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("\t".join(["NULL"] * 40) + "\n")
    assert set(read(open_source(path, "criteo"))[0][1].values()) == {"NULL"}
    with rejected("source.null_values: must be a field of source: found no such field"):
        write_source(path, ["NULL"], kind="criteo")


def test_a_line_of_null_values_only_has_no_value(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(HEADER + b"1,a,2\nNULL,,\\N\n,,\n3,NULL,4\n")
    source = write_source(path, ["NULL", "\\N"])
    with rejected("row 3: must have a value in some column: found only missing values"):
        read(source)
    rejects = Rejects("skip", 2)
    assert [number for number, _ in read(source, rejects)] == [2, 5]
    reported = [(e["row"], e["found"], e["record"]) for e in map(json.loads, rejects.lines)]
    assert reported == [(3, "only missing values", "NULL,,\\N"), (4, "an empty line", ",,")]


def test_a_record_is_reported_as_the_file_has_it(tmp_path, small):
    """Covers any part, invalid lines, skipped records before it, and another column order."""
    rows = "".join(f'{i},"NULL",\n' if i % 3 else f"NULL,{i}\n" for i in range(2, 100))
    (tmp_path / "a.csv").write_text("price,n,name\n0,NULL,NULL\n")
    path = tmp_path / "b.csv"
    path.write_text("name,price,n\n" + rows)
    for sizes in [(10**6, 10**6), (300, 50), (40, 1)]:
        small(*sizes)
        source = write_source(tmp_path / "*.csv", ["NULL"])
        result = []
        for part in source.parts("train")[1:]:
            for chunk in source.chunks(part, Rejects("skip", 100)):
                kept = chunk.drop_records([0]) if len(chunk.rows) > 1 else chunk
                result += [kept.record(i) for i in range(len(kept.rows))]
                assert all(value["n"] is None for value in kept.batch.to_pylist())
        assert len(result) > 30
        for record in result:
            assert list(record) == ["price", "n", "name"]
            assert record["price"] == "NULL"
            assert record["n"] is None
            assert int(record["name"]) % 3


# URLs.


@pytest.fixture(params=[Ranges, http.server.SimpleHTTPRequestHandler, NoSize])
def server(request, tmp_path):
    """Starts a server and returns (URL of `tmp_path`, class of the server)."""
    with serving(tmp_path, request.param) as url:
        yield url, request.param


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_files_of_a_web_server_are_read_as_local_ones(tmp_path, server, small, name):
    url, kind = server
    small(400)
    content = gzip.compress(PLAIN) if name.endswith(".gz") else PLAIN
    (tmp_path / name).write_bytes(content)
    source = open_source(f"{url}/{name}")
    assert read(source, content=PLAIN) == expected(PLAIN)
    parts = source.parts("train")
    assert len(parts) == (3 if kind is Ranges and content is PLAIN else 1)
    assert parts[-1].stop == (1 if kind is NoSize else len(content))


def test_a_large_file_of_a_server_that_sends_whole_files_only(tmp_path, server):
    """A file larger than the read-ahead of HTTP."""
    url, _ = server
    (tmp_path / "a.csv").write_bytes(b"n\n" + b"".join(b"%d\n" % i for i in range(2, 900_000)))
    rows = 0
    source = open_source(f"{url}/a.csv")
    for part in source.parts("train"):
        for chunk in source.chunks(part, Rejects()):
            assert chunk.batch.column(0).to_pylist() == [str(n) for n in chunk.rows.tolist()]
            rows += chunk.batch.num_rows
    assert rows == 900_000 - 2


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_files_of_another_file_system_are_read_as_local_ones(small, pack):
    small(100)
    content = pack(PLAIN)
    url = "memory://text_test/days/a.csv"
    with fsspec.open(url, "wb") as file:
        file.write(content)
    source = open_source("memory://text_test/days/*.csv")
    assert files.describe(source.files[0]).size == len(content)
    assert len(source.parts("train")) == (len(content) // 100 + 1 if content == PLAIN else 1)
    assert read(source, content=PLAIN) == expected(PLAIN)


def test_bad_lines_of_a_url_have_their_numbers(small):
    small(100)
    url = "memory://text_test/bad.csv"
    with fsspec.open(url, "wb") as file:
        file.write(PLAIN + b"1\n" + PLAIN)
    with rejected("/text_test/bad.csv, row 62: must have 3 columns: found 1"):
        read(open_source(url))


# Escaped quotes, declared names, and repeated headers.


def csv_source(path, **more):
    return make_source(dict(kind="csv", files=dict(train=str(path))) | more)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (r'"say \"hi\""', 'say "hi"'),
        (r'"a\"",b"', None),
        (r'"\"x\""', '"x"'),
        (r'"C:\\dir"', r"C:\dir"),
        ('"doubled ""quotes"""', 'doubled "quotes"'),
        (r"a\,b", "a,b"),
    ],
)
def test_escaped_quotes_are_read_as_declared(tmp_path, cell, value):
    path = tmp_path / "day.csv"
    path.write_text(f"n,name,price\n1,{cell},3\n2,x,4\n")
    if value is not None:
        result = read(csv_source(path, escape="\\"))
        assert [record["name"] for _, record in result] == [value, "x"]


@pytest.mark.parametrize(
    "line", [r'1,"say \"hi\"",3', r'1,"\"x\"",3', '1,"a"b,3', r'1,"a\"",b,"c\"",3', '1,"a" ,3']
)
@pytest.mark.parametrize("after", ["", "2,x,4\n" * 100])
def test_a_value_that_continues_after_its_closing_quote_is_rejected(tmp_path, small, line, after):
    path = tmp_path / "day.csv"
    path.write_text(f"n,name,price\n0,y,1\n{line}\n{after}")
    with pytest.raises(InputError, match=r"row 3: must be delimited text whose.*source\.escape"):
        read(csv_source(path))
    rejects = Rejects("skip", 9)
    assert len(read(csv_source(path), rejects)) == 1 + after.count("\n")
    assert [json.loads(line)["row"] for line in rejects.lines] == [3]


@pytest.mark.parametrize("cell", ['5" pipe', 'a "b" c', '"C:\\"', '""', '"""x"""'])
def test_quotes_that_close_no_value_are_letters(tmp_path, small, cell):
    path = tmp_path / "day.csv"
    content = f"n,name,price\n1,{cell},3\n".encode()
    path.write_bytes(content)
    assert read(csv_source(path)) == expected(content)


def test_a_header_among_the_rows_is_rejected_and_may_be_skipped(tmp_path, small):
    path = tmp_path / "day.csv"
    path.write_bytes(PLAIN + PLAIN)
    with pytest.raises(InputError, match=r"row 62: must be a record: found a repeated header"):
        read(csv_source(path))
    rejects = Rejects("skip", 9)
    result = read(csv_source(path), rejects, PLAIN + PLAIN)
    assert [n for n, _ in result] == [*range(2, 62), *range(63, 123)]
    assert [json.loads(line)["row"] for line in rejects.lines] == [62]
    others = [",".join(NAMES[::-1]), ", ".join(NAMES), ",".join(NAMES).upper()]
    for header in [delimited.BYTE_ORDER_MARK + HEADER, *(f"{o}\n".encode() for o in others)]:
        path.write_bytes(PLAIN + header + PLAIN.removeprefix(HEADER))
        with pytest.raises(InputError, match=r"row 62: must be a record: found a repeated header"):
            read(csv_source(path))
    path.write_bytes(PLAIN + f"{NAMES[0]},{NAMES[0]},{NAMES[1]}\n".encode())
    assert len(read(csv_source(path))) == 61
    path.write_bytes(PLAIN + PLAIN)
    single = tmp_path / "single.csv"
    single.write_text("user\na\nUser\nuser\nb\n")
    with pytest.raises(InputError, match=r"row 4: must be a record: found a repeated header"):
        read(csv_source(single))
    # Next to an invalid line, and in a file with another column order.
    other = tmp_path / "other.csv"
    other.write_text("price,n,name\n1,2,a\nprice,n,name\n1,2\n3,4,b\n")
    rejects = Rejects("skip", 9)
    source = make_source(dict(kind="csv", files=dict(train=[str(path), str(other)])))
    chunks = [chunk for part in source.parts("train") for chunk in source.chunks(part, rejects)]
    assert [row for c in chunks if c.file == str(other) for row in c.rows.tolist()] == [2, 5]
    assert [json.loads(line)["row"] for line in rejects.lines] == [62, 3, 4]


def test_files_without_a_line_of_names_have_declared_ones(tmp_path, small):
    path = tmp_path / "day.csv"
    path.write_bytes(PLAIN.removeprefix(HEADER))
    result = read(csv_source(path, columns=NAMES))
    assert [(n + 1, record) for n, record in result] == expected(PLAIN)
    with pytest.raises(InputError, match=r"row 1: must have 2 columns: found 3"):
        read(csv_source(path, columns=NAMES[:2]))
    path.write_bytes(PLAIN)
    with pytest.raises(InputError, match=r"row 1: .*a repeated header.*Leave source\.columns out"):
        read(csv_source(path, columns=NAMES))
    with pytest.raises(InputError, match=r"source\.columns: must be names, each once"):
        csv_source(path, columns=["a", "a"])
