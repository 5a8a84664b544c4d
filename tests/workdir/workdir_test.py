"""Tests of valid workdirs, and of the files that they keep of a run."""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
import tiny
import tiny_config
from runs import nothing, saved, store_config

from jaxrank import cli
from jaxrank.config import default
from jaxrank.config_files import from_plain, to_plain
from jaxrank.data.prepare.passes import prepare
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import evaluate
from jaxrank.export.write import export
from jaxrank.train import train
from jaxrank.workdir import files as workdir
from jaxrank.workdir import lock

pytestmark = pytest.mark.usefixtures("shared_programs")

CONFIG = f"--config={tiny_config.__file__}"


@pytest.mark.parametrize("url", ["gs://bucket/run", "file:///run", "simplecache::s3://bucket/run"])
@pytest.mark.parametrize(
    "command",
    [("train", CONFIG), ("bench", CONFIG), ("evaluate",), ("predict", "--output=p.parquet")],
    ids=lambda command: command[0],
)
def test_every_verb_rejects_a_workdir_that_is_a_url(tmp_path, monkeypatch, command, url):
    monkeypatch.chdir(tmp_path)
    message = f"--workdir: must be .*found the URL {url}. Mount .* NFS"
    with pytest.raises(InputError, match=message):
        cli.run([*command, f"--workdir={url}"])
    assert list(tmp_path.iterdir()) == []


def test_a_url_that_became_a_path_is_rejected_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="found the URL gs:/bucket/run"):
        train(tiny_config.get_config(), Path("gs://bucket/run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["run", "/tmp/a:b/run", "../a//b", "/mnt/gs:/run", "C:", "1:/2"])
def test_a_path_with_colons_and_slashes_is_a_workdir(name):
    expected = Path(os.path.abspath(name))
    assert workdir.directory(name) == workdir.directory(Path(name)) == expected


def saved_config(run):
    return json.loads((run / "config.json").read_text())


def write_old_paths(run, store):
    """Turns a run into one of an older version, which kept paths as they were typed."""
    tree = saved_config(run)
    tree["data"]["store"] = store
    (run / "config.json").write_text(json.dumps(tree))


@pytest.fixture
def run(store, tmp_path, monkeypatch):
    """A run with a checkpoint, started in the folder of its store with a relative path."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    shutil.copytree(store, tmp_path / "here" / "B1")
    monkeypatch.chdir(tmp_path / "here")
    saved(store_config("B1"), tmp_path / "run")
    return tmp_path / "run"


def another_store(path):
    """Prepares another store that the model of `run` can read."""
    c = tiny.config()
    c.source.rows.valid = 1500
    prepare(c.features.to_dict(), c.source.to_dict(), path, block_size=512, report=nothing)
    return path


def test_a_run_is_scored_and_exported_in_any_directory_with_the_store_that_it_has(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path / "there")
    another_store(tmp_path / "there" / "B1")
    result = evaluate.evaluate(str(run))
    assert result.data == str(tmp_path / "here" / "B1" / "valid")
    assert evaluate.predict(str(run), output=str(tmp_path / "p.parquet")).rows == 1000
    export(str(run), output=str(tmp_path / "exported"))


@pytest.mark.parametrize("there", ["here", "there"])
@pytest.mark.parametrize("kept", ["absolute", "as typed"])
def test_a_run_resumes_however_its_store_is_spelled(run, tmp_path, monkeypatch, there, kept):
    monkeypatch.chdir(tmp_path / there)
    (tmp_path / "link").symlink_to(tmp_path / "here")
    relative = {"here": "B1", "there": "../here/B1"}[there]
    if kept == "as typed":
        write_old_paths(run, relative)
    for spelled in (relative, "../link/B1", tmp_path / "here" / "B1", tmp_path / "link/../here/B1"):
        workdir.check_config(run, store_config(spelled))
    with pytest.raises(InputError, match='data.store: ".*/here/B1", now ".*/B2"'):
        workdir.check_config(run, store_config("B2"))
    train(store_config(relative), run, report=nothing)  # its last step is saved
    assert Path(saved_config(run)["data"]["store"]) == tmp_path / "here" / "B1"


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("", ""),
        ("gs://bucket/B1", "gs://bucket/B1"),
        ("/data/B1", "/data/B1"),
        ("/link/../B1", "/link/../B1"),
        ("B1", "{here}/B1"),
        ("./deep/B1/", "{here}/deep/B1"),
        ("link/B1", "{here}/link/B1"),
        ("link/../B1", "{elsewhere}/B1"),
    ],
)
def test_a_path_that_is_kept_means_what_was_typed(tmp_path, monkeypatch, typed, kept):
    current, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    current.mkdir()
    (current / "link").symlink_to(elsewhere / "deep")
    monkeypatch.chdir(current)
    tree = workdir._map_paths(to_plain(store_config(typed)), workdir._absolute)
    assert tree["data"]["store"] == kept.format(here=current, elsewhere=elsewhere)


def test_files_are_kept_by_absolute_paths_only_where_they_are_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    c = tiny.config()
    files = dict(train=["a/*.parquet", "s3://b/c.parquet"], valid="/v.parquet")
    with c.unlocked():
        c.source = dict(kind="parquet", files=files)
    for direct in (False, True):
        c.data.direct = direct
        kept = workdir._map_paths(to_plain(c), workdir._absolute)
        first = f"{tmp_path}/a/*.parquet" if direct else "a/*.parquet"
        expected = dict(train=[first, "s3://b/c.parquet"], valid="/v.parquet")
        assert kept["source"]["files"] == expected
        assert to_plain(from_plain(kept)) == kept


def test_another_store_where_that_of_the_run_was_is_rejected_unless_it_is_given(run, tmp_path):
    current = tmp_path / "here" / "B1"
    shutil.rmtree(current)
    c = tiny.config()
    c.features.dense = []  # nothing is fitted to the data, so a model of one can read the other
    for rows in (6000, 6001):
        c.source.rows.train = rows
        path = tmp_path / str(rows)
        prepare(c.features.to_dict(), c.source.to_dict(), path, block_size=512, report=nothing)
    run = tmp_path / "without_floats"
    shutil.move(tmp_path / "6000", current)
    c.data.store = str(current)
    saved(c, run)
    evaluate.evaluate(str(run))
    shutil.rmtree(current)
    shutil.move(tmp_path / "6001", current)
    message = "here/B1/train: must be the data .*without_floats was trained on"
    output = str(tmp_path / "output")
    for rejected in (
        lambda: evaluate.evaluate(str(run)),
        lambda: evaluate.predict(str(run), output=output),
        lambda: export(str(run), output=output),
    ):
        with pytest.raises(InputError, match=message):
            rejected()
    assert not Path(output).exists()
    evaluate.evaluate(str(run), data=str(current))
    export(str(run), output=output, data=str(current))


def list_paths(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("there", [(), ("run/",), ("run/notes.txt",), ("run/checkpoints/",)])
def test_a_rejected_start_leaves_nothing_that_was_not_there(store, tmp_path, there):
    for name in there:
        folder, _, file = name.rpartition("/")
        (tmp_path / "a" / folder).mkdir(parents=True)
        if file:
            (tmp_path / "a" / folder / file).write_text("mine")
    before = list_paths(tmp_path)
    c = store_config(store)
    with pytest.raises(InputError, match="/nope/config.json: no such file"):
        train(c, tmp_path / "a" / "run", report=nothing, init_from="/nope")
    assert list_paths(tmp_path) == before
    c.data.train = "nope"  # rejected earlier, before there are checkpoints
    with pytest.raises(InputError, match="data.train: must be a split .* found 'nope'"):
        train(c, tmp_path / "a" / "run", report=nothing)
    assert list_paths(tmp_path) == before


def test_a_rejected_start_keeps_the_data_that_it_prepared(tmp_path):
    older = tmp_path / "older"  # its choices are there, and no more
    older.mkdir()
    (older / "config.json").write_text(json.dumps(to_plain(tiny.config())))
    with pytest.raises(InputError, match="older/schema.json: no such file"):
        train(tiny.config(), tmp_path / "run", report=nothing, init_from=str(older))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]


def test_a_rejected_start_leaves_a_run_as_it_is(run):
    (run / ".lock").write_text("of the run")
    before = list_paths(run)
    with pytest.raises(InputError, match="same config: "):
        train(store_config("B1", num_steps=24), run, report=nothing)
    assert list_paths(run) == before
    with lock.locked(run), pytest.raises(RunError, match="another process trains"):
        train(store_config("B1"), run, report=nothing)
    assert list_paths(run) == before


def test_of_a_lock_that_its_owner_removes_meanwhile_a_new_one_is_made(tmp_path, monkeypatch):
    directory, flock, locks = tmp_path / "run", fcntl.flock, []

    def late(descriptor, how):
        locks.append(descriptor)
        if len(locks) == 1:  # opened, and its owner ends now
            (directory / ".lock").unlink()
            directory.rmdir()
        return flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with lock.locked(directory):
        assert len(locks) == 2
        assert (directory / ".lock").is_file()
        with pytest.raises(RunError, match="another process trains"), lock.locked(directory):
            pass
    assert list_paths(tmp_path) == []


def test_who_holds_a_workdir_is_reported_and_how_to_free_it_of_one_that_is_lost(
    tmp_path, monkeypatch
):
    """An NFS server may keep the lock of a machine that was preempted."""
    with lock.locked(tmp_path):
        current = rf"process {os.getpid()} on {re.escape(socket.gethostname())} since \d{{4}}-"
        # This machine holds no lock of a process that has ended.
        lines = rf"{current}.* UTC\. Wait for it, or end it\.$"
        with pytest.raises(RunError, match=lines) as result, lock.locked(tmp_path):
            pass
        assert result.value.exit_status == 1  # a later start may succeed
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        lines = rf"{current}.* only if that machine is off, remove {tmp_path}/.lock"
        with pytest.raises(RunError, match=lines), lock.locked(tmp_path):
            pass
        (tmp_path / ".lock").unlink()
        with lock.locked(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_rejected(tmp_path, monkeypatch, number):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    lines = f"--workdir: {tmp_path} must be .* with locks"
    with pytest.raises(InputError, match=lines), lock.locked(tmp_path):
        pass


def refused_by_the_system(number):
    def reject(path, *_):
        raise OSError(number, os.strerror(number), str(path))

    return reject


@pytest.mark.parametrize("verb", ["train", "bench"])
@pytest.mark.parametrize(
    ("place", "reason"),
    [("/proc/zz", "No such file or directory: '/proc/zz'"), ("{file}/run", "Not a directory")],
)
def test_a_workdir_that_cannot_be_made_is_named_with_its_flag(tmp_path, verb, place, reason):
    (tmp_path / "file").write_text("")
    place = place.format(file=tmp_path / "file")
    message = f"--workdir: {place} must be a writable directory: found .*{reason}"
    with pytest.raises(InputError, match=message):
        cli.run([verb, CONFIG, f"--workdir={place}"])


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_workdir_that_cannot_be_written_is_named_but_a_full_disk_is_no_wrong_use(
    tmp_path, monkeypatch, number
):
    reason = os.strerror(number)
    kind, message = InputError, f"--workdir: {tmp_path} must be .*writable.*: found .*{reason}"
    if number == errno.ENOSPC:
        kind, message = OSError, reason
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused_by_the_system(number))
        with pytest.raises(kind, match=message), lock.locked(tmp_path):
            pass


def test_a_run_resumes_under_a_version_that_has_more_fields(tmp_path):
    c = default()
    written = to_plain(c)
    del written["model"]["dense_mlp_units"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    workdir.check_config(tmp_path, c)
    c.model.dense_mlp_units = (8,)
    with pytest.raises(InputError, match=r"model.dense_mlp_units: \[\], now \[8\]"):
        workdir.check_config(tmp_path, c)
    written["model"]["mlp_units"] = 5
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match=r"model.mlp_units: 5, now \[256, 128\]"):
        workdir.check_config(tmp_path, c)


@pytest.mark.parametrize(("path", "value"), [("eval.batch_size", "many"), ("eval", 3)])
def test_the_config_of_a_run_with_fields_of_another_type_is_named(tmp_path, path, value):
    section, _, name = path.partition(".")
    written = to_plain(default())
    written[section] = written[section] | {name: value} if name else value
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match=r"config.json: must be the config of a run, as saved: "):
        workdir.load_config(tmp_path)
