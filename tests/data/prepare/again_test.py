"""A preparation that is run again resumes after an error or a kill, and uses no stale files."""

import http.server
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import preparations
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preparations import (
    FEATURES,
    content,
    counted,
    files,
    lasting_content,
    make_rows,
    run,
    write_csv,
)
from servers import NoMark, serving

from jaxrank.data.examples import join
from jaxrank.data.files import describe
from jaxrank.data.prepare import encode_unit, fit_unit, units
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.prepare.runners import Local
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError, RunError

small_units = pytest.fixture(preparations.small_units)


def test_what_was_done_before_an_error_is_not_done_again(tmp_path, small_units, monkeypatch):
    train = files(tmp_path / "raw", 50, 50, 50)
    expected = run(tmp_path / "expected", train, runner=Local(1))
    good = Path(train[2]).read_text()
    Path(train[2]).write_text(good.replace("\n149,", "\nx,9", 1).replace(",1,", ",7,", 1))
    with pytest.raises(InputError, match=r"2.csv, row \d+, column label"):
        run(tmp_path / "store", train, runner=Local(1))
    assert not (tmp_path / "store").exists()
    assert (tmp_path / ".store.partial").is_dir()

    Path(train[2]).write_text(good)
    read = counted(monkeypatch)
    run(tmp_path / "store", train, runner=Local(1))
    # Both passes read the corrected file. The fit states of the other files exist.
    assert read[0] == 2
    assert lasting_content(tmp_path / "store") == lasting_content(expected.path)
    assert not (tmp_path / ".store.partial").exists()


@pytest.mark.parametrize("when", ["fitted", "encoded"])
@pytest.mark.parametrize("text", ["label,user,item,n\n", "what is no CSV\n1,2\n", ""])
def test_a_file_that_is_replaced_meanwhile_ends_the_preparation(
    tmp_path, small_units, monkeypatch, when, text
):
    train = files(tmp_path / "raw", 50, 50)
    module, function = dict(fitted=(fit_unit, "fit"), encoded=(encode_unit, "encode"))[when]
    real = getattr(module, function)

    def replaced(original, unit, *rest):
        if unit.index == 1 and not text:
            Path(train[1]).unlink()
        elif unit.index == 1:
            Path(train[1]).write_text(text + Path(train[1]).read_text().partition("\n")[2])
        return real(original, unit, *rest)

    monkeypatch.setattr(module, function, replaced)
    with pytest.raises(RunError, match=r"1.csv: must .*until it has been prepared"):
        run(tmp_path / "store", train, runner=Local(1))
    assert not (tmp_path / "store").exists()


def test_what_is_put_where_the_store_will_be_costs_no_work(tmp_path, small_units, monkeypatch):
    train = files(tmp_path / "raw", 50, 50)
    expected = run(tmp_path / "expected", train, runner=Local(1))
    (tmp_path / "store").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="store: must not exist yet"):
        run(tmp_path / "store", train, runner=Local(1))
    (tmp_path / "store").unlink()

    real = encode_unit.encode

    def encode(*args):
        (tmp_path / "store").mkdir(exist_ok=True)
        real(*args)

    monkeypatch.setattr(encode_unit, "encode", encode)
    with pytest.raises(InputError, match="store: must not exist yet"):
        run(tmp_path / "store", train, runner=Local(1))
    monkeypatch.setattr(encode_unit, "encode", real)
    (tmp_path / "store").rmdir()
    read = counted(monkeypatch)
    run(tmp_path / "store", train, runner=Local(1))
    assert read == []
    assert content(tmp_path / "store") == content(expected.path)


def test_a_killed_preparation_is_resumed(tmp_path, small_units, monkeypatch):
    train = files(tmp_path / "raw", 50, 50, 50)
    expected = run(tmp_path / "expected", train, runner=Local(1))
    program = f"""
import os, signal
from jaxrank.data.prepare import units
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.prepare.runners import Local
from jaxrank.data.store.writer import SplitWriter
units._UNIT_BYTES = 1
real = SplitWriter.write
def write(self, block):
    if self.path.name == "train" and self._prefix == "00002-":
        os.kill(os.getpid(), signal.SIGKILL)
    real(self, block)
SplitWriter.write = write
prepare({FEATURES!r}, dict(kind="csv", files=dict(train={train!r})),
        {str(tmp_path / "store")!r}, runner=Local(1))
"""
    killed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr
    read = counted(monkeypatch)
    run(tmp_path / "store", train, runner=Local(1))
    assert read == [2]  # encoded; the fit states and the other two blocks exist
    assert content(tmp_path / "store") == content(expected.path)


@pytest.mark.parametrize("change", ["features", "file", "key", "nulls"])
def test_what_was_done_of_other_data_or_otherwise_is_done_again(
    tmp_path, small_units, monkeypatch, change
):
    train = files(tmp_path / "raw", 50, 50)
    last = Path(train[1]).read_text()
    Path(train[1]).write_text(last + "bad\n")
    with pytest.raises(InputError):
        run(tmp_path / "store", train, runner=Local(1))
    Path(train[1]).write_text(last)
    features, options = FEATURES, {}
    if change == "features":
        features = FEATURES | dict(categorical=[dict(columns="user", min_count=2)])
    elif change == "file":
        write_csv(train[0], make_rows(51, 1000))
    elif change == "nulls":
        options["source"] = dict(null_values=["u1"])
    else:
        (tmp_path / "key").write_text("0123456789abcdef")
        options["hash_key_file"] = str(tmp_path / "key")
    read = counted(monkeypatch)
    run(tmp_path / "store", train, features, runner=Local(1), **options)
    assert sorted(read) == [0, 0, 1, 1]
    monkeypatch.undo()
    monkeypatch.setattr(units, "_UNIT_BYTES", 1)
    run(tmp_path / "expected", train, features, runner=Local(1), **options)
    assert content(tmp_path / "store") == content(tmp_path / "expected")


def broken(path):
    """Makes the label of the last record in a file invalid, and returns the original text."""
    text = Path(path).read_text()
    *lines, last = text.splitlines(keepends=True)
    Path(path).write_text("".join(lines) + last.replace(",0,", ",7,").replace(",1,", ",7,"))
    return text


def test_what_a_later_attempt_wrote_over_is_done_again(tmp_path, small_units, monkeypatch):
    train = files(tmp_path / "raw", 50, 50, 50)
    good = broken(train[2])
    with pytest.raises(InputError, match="column label"):
        run(tmp_path / "store", train, runner=Local(1))
    real = encode_unit.SplitWriter.close

    def interrupted(self):
        if self._prefix == "00001-":
            raise RuntimeError("its end")
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(encode_unit.SplitWriter, "close", interrupted)
        with pytest.raises(RuntimeError, match="its end"):
            run(tmp_path / "store", train, runner=Local(1), on_error="skip")
    Path(train[2]).write_text(good)
    run(tmp_path / "store", train, runner=Local(1))
    run(tmp_path / "expected", train, runner=Local(1))
    assert content(tmp_path / "store") == content(tmp_path / "expected")


def test_what_was_written_and_is_gone_is_done_again(tmp_path, small_units):
    train = files(tmp_path / "raw", 50, 50)
    good = broken(train[1])
    with pytest.raises(InputError, match="column label"):
        run(tmp_path / "store", train, runner=Local(1))
    (tmp_path / ".store.partial" / "train" / "00000-00000.arrow").unlink()
    Path(train[1]).write_text(good)
    run(tmp_path / "store", train, runner=Local(1))
    run(tmp_path / "expected", train, runner=Local(1))
    assert content(tmp_path / "store") == content(tmp_path / "expected")


def test_an_error_before_anything_is_read_forgets_nothing(tmp_path, small_units, monkeypatch):
    train = files(tmp_path / "raw", 50, 50)
    good = broken(train[1])
    with pytest.raises(InputError, match="column label"):
        run(tmp_path / "store", train, runner=Local(1))
    with pytest.raises(InputError, match="no such file"):
        run(tmp_path / "store", [*train, str(tmp_path / "gone.csv")], runner=Local(1))
    Path(train[1]).write_text(good)
    read = counted(monkeypatch)
    run(tmp_path / "store", train, runner=Local(1))
    assert read == [1, 1]


def test_what_all_files_say_of_a_column_is_part_of_what_each_became(tmp_path, small_units):
    def write(zip_code, labels):
        path = tmp_path / "raw" / f"zip={zip_code}" / "0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"label": labels}), path)

    def prepared(name):
        features = dict(tasks=[preparations.TASK], categorical=[dict(columns="zip")])
        source = dict(kind="parquet", files=dict(train=str(tmp_path / "raw")))
        return prepare(features, source, tmp_path / name, report=lambda _: None, runner=Local(1))

    write("0101", [1, 0])
    write("0202", [0, 0])
    write("0303", [1, 7])
    with pytest.raises(InputError, match="column label"):
        prepared("store")
    write("0303", [1, 0])
    write("0404-X", [0, 1])  # with it the column is no longer numeric
    store = prepared("store")
    assert store.vocabulary("zip")[0] == ["0101", "0202", "0303", "0404-X"]
    assert content(store.path) == content(prepared("expected").path)


@pytest.mark.parametrize("kind", [http.server.SimpleHTTPRequestHandler, NoMark])
def test_a_file_that_a_server_has_replaced_is_read_again(tmp_path, small_units, kind):
    features = dict(tasks=[preparations.TASK], categorical=[dict(columns="user")])

    def write(name, label, time):
        path = write_csv(tmp_path / name, [[i, label, 0, "u", "", ""] for i in range(20)])
        os.utime(path, (time, time))

    write("0.csv", 0, 1_000_000)
    write("1.csv", 7, 1_000_000)
    with serving(tmp_path, kind) as url:
        assert bool(describe(f"{url}/0.csv").mark) == (kind is not NoMark)
        paths = [f"{url}/{i}.csv" for i in (0, 1)]
        with pytest.raises(InputError, match="column label"):
            run(tmp_path / "store", paths, features, runner=Local(1))
        for name in ("0.csv", "1.csv"):  # as long as before
            write(name, 1, 2_000_000)
        store = run(tmp_path / "store", paths, features, runner=Local(1))
    assert join(list(store.split("train").blocks())).labels.tolist() == [[1]] * 40


@pytest.mark.parametrize("place", ["local", "memory"])
def test_nothing_of_other_attempts_is_in_a_store(tmp_path, small_units, place):
    """Asserts that no obsolete files and, with a key, no raw values are left."""
    train = files(tmp_path / "raw", 50, 50, 50)
    broken(train[2])
    (tmp_path / "key").write_text("0123456789abcdef")
    output = tmp_path / "store" if place == "local" else "memory://again_test/store"
    with pytest.raises(InputError, match="column label"):
        run(output, train, runner=Local(1))
    fewer = {k: v for k, v in FEATURES.items() if k not in ("ragged", "keep")}
    run(output, train[:2], fewer, runner=Local(1), hash_key_file=str(tmp_path / "key"))
    expected = tmp_path / "expected"
    run(expected, train[:2], fewer, runner=Local(1), hash_key_file=str(tmp_path / "key"))
    if place == "local":
        assert content(output) == content(expected)
        assert {p.name for p in output.iterdir()} == {p.name for p in expected.iterdir()}
        return
    system = fsspec.filesystem("memory")
    # The name is not treated as a pattern, and other stores below the URL are left alone.
    assert system.find("/again_test/store") == sorted(
        f"/again_test/store/{name}" for name in content(expected)
    )
    result = {
        name.removeprefix("/again_test/store/"): system.cat(name)
        for name in system.find("/again_test/store")
    }
    assert result == content(expected)


def test_records_that_another_attempt_skipped_are_not_reported(tmp_path, small_units):
    train = files(tmp_path / "raw", 50, 50)
    good = broken(train[0])
    broken(train[1])
    with pytest.raises(InputError, match="at most 1 records"):
        run(tmp_path / "store", train, runner=Local(1), on_error="skip", max_rejected=1)
    Path(train[0]).write_text(good)
    store = run(tmp_path / "store", train, runner=Local(1), on_error="skip")
    assert len((store.path / "rejected.jsonl").read_text().splitlines()) == 1


def test_a_split_may_have_any_name(tmp_path):
    path = write_csv(tmp_path / "a.csv", make_rows(20))
    section = dict(kind="csv", files=dict(train=path, units=path, rejected=path))
    prepare(FEATURES, section, tmp_path / "store", report=lambda _: None)
    store = open_store(tmp_path / "store")
    assert [store.split(name).rows for name in ("train", "units", "rejected")] == [20] * 3
    for name in ("units", "rejected"):
        assert len(list(store.split(name).blocks())) == 1


def test_a_store_at_a_url_leaves_what_others_have_below_it(tmp_path, small_units):
    train = files(tmp_path / "raw", 50, 50)
    below = run("memory://again_others/day1", train, runner=Local(1))
    system = fsspec.filesystem("memory")
    system.pipe("/again_others/mine/data.arrow", b"mine")
    good = broken(train[1])
    features = FEATURES | dict(categorical=[dict(columns="user", table="*"), dict(columns="day")])
    with pytest.raises(InputError, match="column label"):
        run("memory://again_others", train, features, runner=Local(1))
    assert system.exists("/again_others/vocabulary/*.arrow")
    Path(train[1]).write_text(good)
    store = run("memory://again_others", train, runner=Local(1))
    assert not [name for name in system.find("/again_others/vocabulary") if "*" in name]
    assert system.cat("/again_others/mine/data.arrow") == b"mine"
    for result in (store, below):
        assert len(list(result.split("train").blocks())) == 2
        assert len(result.vocabulary("user")[0]) > 1
