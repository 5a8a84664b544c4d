"""Tests of the location of a run's data."""

import os

import examples
import pytest
import raw_csv
import tiny
from ml_collections import ConfigDict
from runs import nothing

from jaxrank import opening
from jaxrank.config import default
from jaxrank.errors import InputError
from jaxrank.workdir import files


@pytest.mark.parametrize(
    ("fields", "options", "path", "is_direct", "is_own"),
    [
        ({}, {}, "{run}/data", False, True),
        ({}, dict(inherits=True), "/of/the/run", False, False),
        ({"store": "/mine"}, {}, "/mine", False, False),
        ({"store": "/mine"}, dict(inherits=True), "/mine", False, False),
        ({"direct": True}, {}, "", True, False),
        ({"direct": True}, dict(inherits=True), "", True, False),
        ({"direct": True, "store": "/mine"}, {}, "", True, False),
        ({"store": "/mine"}, dict(store_path="/given"), "/given", False, False),
        ({"direct": True}, dict(store_path="/given"), "/given", False, False),
    ],
)
def test_the_first_that_is_named_is_the_data_of_a_run(
    tmp_path, fields, options, path, is_direct, is_own
):
    run = tmp_path / "run"
    run.mkdir()
    of_run = default()
    of_run.data.store = "/of/the/run"
    files.save(run, of_run, examples.small_schema(), {})
    c = tiny.config()
    c.data.update(fields)
    result = opening.locate(c, run, **options)
    assert (result.path, result.is_direct, result.is_own) == (
        path.format(run=run),
        is_direct,
        is_own,
    )
    assert result.exists() == is_direct


def test_a_run_that_names_no_store_has_its_own(tmp_path):
    files.save(tmp_path, default(), examples.small_schema(), {})
    c = tiny.config()
    for workdir in (tmp_path, tmp_path / "none yet"):
        result = opening.locate(c, workdir, inherits=True)
        assert result.path == str(workdir / "data")
        assert result.is_own


def test_without_a_workdir_there_may_be_no_data(tmp_path):
    c = tiny.config()
    result = opening.locate(c, "", inherits=True)
    assert not result.exists()
    assert (result.path, result.is_own) == ("", False)


def test_names_are_checked_before_data_is_read_whether_it_exists_or_not(tmp_path):
    c = tiny.config()
    located = opening.locate(c, tmp_path)
    seen = []

    def check(schema):
        seen.append([task.name for task in schema.tasks])
        raise InputError("no")

    with pytest.raises(InputError, match="^no$"):
        located.prepare(nothing, check)
    assert not located.exists()
    located.prepare(nothing)
    with pytest.raises(InputError, match="^no$"):
        located.prepare(nothing, check)
    assert seen == [["click", "conversion"]] * 2


def test_a_source_file_that_has_changed_since_it_was_prepared_is_reported(tmp_path, monkeypatch):
    folder = raw_csv.write(tmp_path / "raw", 1)
    c = raw_csv.config(folder)
    lines = []

    def prepare(store=""):
        c.data.store = store
        del lines[:]
        opening.locate(c, tmp_path / "run").prepare(lines.append)
        return [line for line in lines if line.startswith("Warning")]

    assert prepare() == prepare() == []
    old = os.stat(folder / "train.csv")
    raw_csv.write(folder, 2)  # the same column names in the same files
    os.utime(folder / "valid.csv", ns=(old.st_atime_ns, old.st_mtime_ns + 10**9))
    store = tmp_path / "run/data"
    expected = (
        f"Warning: {folder}/train.csv and 1 other source file(s) have changed since {store} was"
        f" prepared; remove {store} to prepare it again"
    )
    monkeypatch.chdir(tmp_path / "run")
    assert prepare() == prepare(str(store)) == [expected]
    (folder / "valid.csv").unlink()
    monkeypatch.chdir(folder)
    assert prepare() == [
        expected.replace(f"{folder}/train.csv and 1 other source file(s) have", "train.csv has")
    ]


@pytest.mark.parametrize(
    ("stored", "wanted", "suits"),
    [
        (dict(standardize=False), dict(), True),  # the default of earlier versions
        (dict(standardize=True), dict(), True),
        (dict(), dict(), True),
        (dict(), dict(standardize=False), False),
        (dict(log=True), dict(), False),
        (dict(log=True, standardize=False), dict(log=True), True),
        (dict(log=True, standardize=True), dict(log=True), False),
    ],
)
def test_a_config_that_leaves_scales_open_suits_a_store_with_any(tmp_path, stored, wanted, suits):
    path = tmp_path / "a.csv"
    path.write_text("y,x\n1,5\n0,7\n")
    source = dict(kind="csv", files=dict(train=str(path)))

    def open_data(**fields):
        c = default()
        c.source = ConfigDict(source)
        c.features.tasks = [dict(name="t", label="y")]
        c.features.dense = [dict(columns="x", **fields)]
        c.data.store, c.data.valid = str(tmp_path / "store"), "train"
        return opening.locate(c, tmp_path / "run").prepare(nothing)

    first = open_data(**stored)
    if suits:
        assert open_data(**wanted).schema == first.schema
        return
    with pytest.raises(InputError, match=r"features of the config.*\n.*features.dense"):
        open_data(**wanted)
