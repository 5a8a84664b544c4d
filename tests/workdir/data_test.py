"""Tests of the location of a run's data."""

import examples
import pytest
import tiny
from runs import nothing

from jaxrank.config import default
from jaxrank.errors import InputError
from jaxrank.workdir import data, files


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
    result = data.locate(c.data, c.features, c.source, run, **options)
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
        result = data.locate(c.data, c.features, c.source, workdir, inherits=True)
        assert result.path == str(workdir / "data")
        assert result.is_own


def test_without_a_workdir_there_may_be_no_data(tmp_path):
    c = tiny.config()
    result = data.locate(c.data, c.features, c.source, "", inherits=True)
    assert not result.exists()
    assert (result.path, result.is_own) == ("", False)


def test_names_are_checked_before_data_is_read_whether_it_exists_or_not(tmp_path):
    c = tiny.config()
    located = data.locate(c.data, c.features, c.source, tmp_path)
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
