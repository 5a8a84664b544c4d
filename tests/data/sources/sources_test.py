"""Raw files of every kind are read as the records that they contain."""

import csv
import functools
import gzip
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raw import every_chunk

from jaxrank.data.sources import text
from jaxrank.data.sources.registry import make_source
from jaxrank.errors import InputError


def records(source, split):
    """Returns (row number, {column: value}) of every record, and the files in order."""
    rows, files = [], []
    for chunk in every_chunk(source, split):
        numbers = chunk.rows.tolist()
        rows += zip(numbers, chunk.batch.to_pylist(), strict=True)
        if chunk.file not in files:
            files.append(chunk.file)
    return rows, files


def test_criteo_sample_is_read_as_the_csv_module_reads_it(shared_data):
    path = shared_data / "criteo_sample" / "train.tsv.gz"
    source = make_source(dict(kind="criteo", files=dict(train=[str(path)])))
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    assert source.columns("train") == names
    with gzip.open(path, "rt", newline="") as file:
        reader = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        expected = [
            (line, {n: v or None for n, v in zip(names, values, strict=True)})
            for line, values in enumerate(reader, start=1)
        ]
    assert records(source, "train")[0] == expected


def test_csv_rows_are_line_numbers_and_quotes_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbflabel,"the ""name"""\r\n1,"a,b"\r\n,c\r\n')
    source = make_source(dict(kind="csv", files=dict(train=str(path))))
    assert source.columns("train") == ["label", 'the "name"']
    expected = [
        (2, {"label": "1", 'the "name"': "a,b"}),
        (3, {"label": None, 'the "name"': "c"}),
    ]
    assert records(source, "train") == (expected, [str(path)])


def test_row_numbers_go_on_from_chunk_to_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_MIN_CHUNK_BYTES", 64)
    monkeypatch.setattr(text, "_ROWS_PER_CHUNK", 10)
    path = tmp_path / "a.csv"
    path.write_text("n\n" + "".join(f"{line}\n" for line in range(2, 1002)))
    source = make_source(dict(kind="csv", files=dict(train=str(path))))
    chunks = list(every_chunk(source, "train"))
    assert len(chunks) > 20
    rows, _ = records(source, "train")
    assert len(rows) == 1000
    assert all(int(record["n"]) == number for number, record in rows)


class OtherPath:
    """A path class of a library other than pathlib."""

    def __init__(self, path):
        self._path = str(path)

    def __fspath__(self):
        return self._path


def test_a_file_is_read_once_whatever_names_and_links_lead_to_it(tmp_path):
    days, other = tmp_path / "days", tmp_path / "other"
    for directory in (days, other, days / ".data"):
        directory.mkdir()
    named = days / "day_1.csv", days / "day_2.csv", other / "day_3.csv", days / ".data" / "x.csv"
    for path in named:
        path.write_text(f"label,user\n1,{path.stem}\n")
    (days / "a_latest.csv").symlink_to(days / "day_2.csv")
    (days / "linked.csv").symlink_to(other / "day_3.csv")
    (days / "linked_again.csv").symlink_to(other / "day_3.csv")
    (days / "up").symlink_to(tmp_path)
    (days / "hard.csv").hardlink_to(days / "day_1.csv")
    # A mounted Kubernetes volume, where files are links to hidden files.
    (days / "x.csv").symlink_to(days / ".data" / "x.csv")

    def users(*paths):
        source = make_source(dict(kind="csv", files=dict(train=list(paths))))
        return [record["user"] for _, record in records(source, "train")[0]]

    assert sorted(users(str(days))) == ["day_1", "day_2", "day_3", "x"]
    pattern, path = str(days / "day_*.csv"), str(days / "day_1.csv")
    assert users(path, pattern, f"{days}/../days/day_2.csv") == ["day_1", "day_2"]
    urls = [f"{protocol}{named[1]}" for protocol in ("file://", "local://")]
    assert users(str(named[1]), *urls, f"file://{days}/a_latest.csv") == ["day_2"]


def test_a_list_of_paths_globs_and_directories_is_read_in_order(tmp_path):
    inside = tmp_path / "days"
    inside.mkdir()
    (inside / ".hidden.csv").write_text("n\nhidden\n")
    (inside / "_SUCCESS").write_text("")
    (inside / "day2.csv").write_text("n\n2\n")
    (inside / "day1.csv.gz").write_bytes(gzip.compress(b"n\n1\n"))
    (tmp_path / "first.csv").write_text("n\n0\n")
    for i in (4, 3):
        (tmp_path / f"late{i}.csv").write_bytes(gzip.compress(f"n\n{i}\n".encode()))
    for name in ("day2.csv~", "day3.csv._COPYING_"):  # would be read as two more days
        (inside / name).write_text("n\n2\n")
        with pytest.raises(InputError, match=rf"{name}: must not be a backup or unfinished file"):
            make_source(dict(kind="csv", files=dict(train=str(inside))))
        (inside / name).unlink()
    (inside / "day1.csv").write_text("n\n1\n")
    with pytest.raises(InputError, match=r"day1.csv.gz: must not lie beside day1.csv, whose"):
        make_source(dict(kind="csv", files=dict(train=str(inside))))
    (inside / "day1.csv").unlink()
    files = [str(tmp_path / "first.csv"), OtherPath(inside), str(tmp_path / "late*.csv")]
    source = make_source(dict(kind="csv", files=dict(train=files, test=files[0])))
    assert source.splits == ["train", "test"]
    rows, order = records(source, "train")
    assert [record["n"] for _, record in rows] == ["0", "1", "2", "3", "4"]
    assert [name.rsplit("/", 1)[1] for name in order] == [
        "first.csv", "day1.csv.gz", "day2.csv", "late3.csv", "late4.csv",
    ]  # fmt: skip
    assert len(records(source, "test")[0]) == 1


@pytest.mark.parametrize("named", ["", "*"])
@pytest.mark.parametrize(
    "copy",
    [
        *("part-0 (1).csv", "part-0(2).csv", "Copy of part-0.csv", "Copy (2) of part-0.csv"),
        *("part-0 - Copy.csv", "part-0 - Copy (2).csv", "part-0 copy.csv", "part-0 copy 2.csv"),
        *("part-0.copy.csv", "part-0_backup.csv", "part-0.bak.csv", "Backup of part-0.csv"),
        *("part-0_copy.csv", "part-0 (another copy).csv", "part-0 (3rd copy).csv", "part-0 (1)"),
        *("part-0 (Ann's conflicted copy 2024-05-01).csv", "part-0 - Kopie.csv"),
    ],
)
def test_a_copy_beside_its_file_is_not_read_as_more_rows(tmp_path, copy, named):
    original = tmp_path / ("part-0.csv" if copy.endswith(".csv") else "part-0")
    for path in (original, tmp_path / copy):
        path.write_text("n\n1\n")
    source = dict(kind="csv", files=dict(train=f"{tmp_path}/{named}"))
    with pytest.raises(InputError, match=rf"{re.escape(copy)}: must not lie beside part-0.*copy"):
        make_source(source)
    packed = original.with_name(f"{original.name}.gz")
    packed.write_bytes(gzip.compress(original.read_bytes()))
    original.unlink()
    with pytest.raises(InputError, match=rf"{re.escape(copy)}: must not lie beside part-0"):
        make_source(source)
    packed.unlink()
    assert len(make_source(source).files) == 1


def test_names_that_are_like_copies_are_other_files(tmp_path):
    (tmp_path / "backup").mkdir()
    names = "a.csv", "a (2024).csv", "photocopy.csv", "photo.csv", "a-2.csv", "b (1).csv"
    for name in (*names, "backup/c.csv"):
        (tmp_path / name).write_text("n\n1\n")
    source = make_source(dict(kind="csv", files=dict(train=str(tmp_path))))
    assert len(source.files) == 7


@pytest.mark.parametrize(
    ("names", "value", "message"),
    [
        (["d.csv", "d.csv.gz"], "*", "d.csv.gz: must not lie beside d.csv, whose compressed copy"),
        (["d.csv.gz", "d.csv.zst"], "", "d.csv.zst: must not lie beside d.csv.gz, whose compr"),
        (["d.csv", "d.csv.gz"], ["*.csv", "*.gz"], "d.csv.gz: must not lie beside d.csv"),
        (["d.csv", "d.csv.gz"], ["d.csv", "d.csv.gz"], ""),
        (["d.csv", "d (1).csv"], ["d.csv", "d (*"], r"d \(1\).csv: must not lie beside d.csv"),
        (["d.csv", "backup/d.csv"], "", "backup/d.csv: must not lie beside ../d.csv, whose copy"),
        (["d.csv", "d.csv.bak"], "d*", "d.csv.bak: must not be a backup or unfinished file"),
        (["d.csv", "d.csv~"], "*", "d.csv~: must not be a backup or unfinished file"),
        (["d.csv", "#d.csv#"], "", "#d.csv#: must not be a backup or unfinished file"),
        (["e.csv.bak", "d.csv.bak"], "*.bak", ""),
        (["d.csv", "_temporary/0/d.csv"], "**/*.csv", "_temporary/0/d.csv: must not be in a dir"),
        (["d.csv", "_tmp/d.csv"], "*/*.csv", "_tmp/d.csv: must not be in a directory whose name"),
        (["_raw/d.csv", "_raw/e.csv"], "_r*/*.csv", ""),
    ],
)
@pytest.mark.parametrize("protocol", ["", "file://"])
def test_names_of_copies_and_unfinished_files_are_rejected_in_patterns_too(
    tmp_path, names, value, message, protocol
):
    packs = {".gz": gzip.compress, ".zst": functools.partial(pa.compress, codec="zstd")}
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packs.get(path.suffix, bytes)(f"n\n{name}\n".encode()))
    values = [value] if isinstance(value, str) else value
    source = dict(kind="csv", files=dict(train=[f"{protocol}{tmp_path}/{v}" for v in values]))
    if not message:
        assert len(make_source(source).files) == 2
        return
    with pytest.raises(InputError, match=message):
        make_source(source)


def test_directories_that_are_linked_are_read_once(tmp_path):
    for name in ("real", "days/day1", "days/day4", "days/lost+found"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "t.csv").write_text(f"n\n{name}\n")
    for name, target in (
        ("days/day2", "../real"),
        ("days/day3", "../real"),
        ("days/latest", "day4"),
        ("days/self", "."),
        ("real/back", "../days"),
        ("real/self", "."),
    ):
        (tmp_path / name).symlink_to(target)
    source = make_source(dict(kind="csv", files=dict(train=str(tmp_path / "days"))))
    rows, order = records(source, "train")
    assert [record["n"] for _, record in rows] == ["days/day1", "real", "days/day4"]
    assert [Path(name).parent.name for name in order] == ["day1", "day2", "day4"]


@pytest.mark.parametrize("pattern", ["", "*.csv", "day?.csv"])
def test_a_link_to_nothing_is_not_passed_over(tmp_path, pattern):
    (tmp_path / "day1.csv").write_text("n\n1\n")
    (tmp_path / "day2.csv").symlink_to(tmp_path / "gone.csv")
    with pytest.raises(InputError, match=r"day2.csv: must be a file: found a link to '.*gone.csv'"):
        make_source(dict(kind="csv", files=dict(train=str(tmp_path / pattern))))


@pytest.mark.parametrize("pattern", ["*/x.csv", "**/*.csv", "*/*.csv", "**"])
def test_a_directory_that_may_not_be_read_is_not_passed_over(tmp_path, monkeypatch, pattern):
    for name in ("a", "b", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.csv").write_text("n\n1\n")
    closed = {tmp_path / "b", tmp_path / "lost+found"}
    # Root can read all files, so the permission error is simulated.
    monkeypatch.setattr("os.access", lambda path, _: Path(path) not in closed)
    with pytest.raises(InputError, match=r"/b must be a directory that can be read"):
        make_source(dict(kind="csv", files=dict(train=str(tmp_path / pattern))))


def test_gzip_of_several_members_is_read_to_its_end(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"n\n1\n") + gzip.compress(b"2\n"))
    source = make_source(dict(kind="csv", files=dict(train=str(path))))
    assert [r["n"] for _, r in records(source, "train")[0]] == ["1", "2"]


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_the_last_line_needs_no_end(tmp_path, end):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n3,4" + end)
    rows, _ = records(make_source(dict(kind="csv", files=dict(train=str(path)))), "train")
    assert rows == [(2, {"a": "1", "b": "2"}), (3, {"a": "3", "b": "4"})]


def test_parquet_rows_are_counted_from_one_and_types_are_kept(tmp_path):
    path = tmp_path / "a.parquet"
    n = 40_000
    table = pa.table(
        {
            "n": pa.array(range(1, n + 1)),
            "text": pa.array([f"v{i % 7}" for i in range(n)]).dictionary_encode(),
            "list": pa.array([[i, i + 1] if i % 3 else None for i in range(n)]),
        }
    )
    pq.write_table(table, path, row_group_size=9_000)
    source = make_source(dict(kind="parquet", files=dict(train=str(path))))
    assert source.columns("train") == ["n", "text", "list"]
    rows, _ = records(source, "train")
    assert [record for _, record in rows] == table.to_pylist()
    assert all(record["n"] == number for number, record in rows)


def test_an_empty_path_is_not_the_current_directory():
    source = dict(kind="csv", files=dict(train="", valid="a.csv"))
    with pytest.raises(InputError, match=r"source.files.train: must be a path .* found ''"):
        make_source(source)
