"""Pipes in place of files."""

import os
import threading
from pathlib import Path

import pytest

from jaxrank.data import pipes
from jaxrank.data.prepare.passes import prepare
from jaxrank.errors import InputError

CLICK = dict(name="click", label="label")
ROWS = b"label,user\n1,u1\n0,u2\n"


def prepare_store(path, output):
    source = dict(kind="csv", files=dict(train=path))
    features = dict(tasks=[CLICK], categorical=[dict(columns="user")])
    return prepare(features, source, output, report=lambda _: None)


@pytest.mark.parametrize("in_a_list", [False, True])
def test_a_pipe_is_read_as_a_file_of_what_is_written_to_it(tmp_path, in_a_list):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: Path(path).write_bytes(ROWS))
    writer.start()
    store = prepare_store([path] if in_a_list else path, tmp_path / "store")
    writer.join()
    assert store.split("train").rows == 2


def test_a_pipe_without_a_writer_is_rejected_after_a_while(tmp_path, monkeypatch):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    monkeypatch.setattr(pipes, "_WRITER_SECONDS", 0.01)
    with pytest.raises(InputError, match="pipe: must be a file, or a pipe that a program"):
        prepare_store(path, tmp_path / "store")


def test_a_pipe_without_records_is_rejected_by_its_name(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: Path(path).write_bytes(b""))
    writer.start()
    with pytest.raises(InputError, match=f"^{path}: must be a pipe that a program writes records"):
        prepare_store(path, tmp_path / "store")
    writer.join()


@pytest.mark.parametrize("name", ["", "*"])
def test_a_pipe_among_files_is_not_passed_over(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.csv").write_bytes(ROWS)
    os.mkfifo(tmp_path / "in" / "b.csv")
    with pytest.raises(InputError, match=r"b.csv: must be a file: found a pipe \(FIFO\)"):
        prepare_store(str(tmp_path / "in" / name), tmp_path / "store")


def test_a_pipe_that_is_named_twice_is_rejected_at_once(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: Path(path).write_bytes(ROWS))
    writer.start()
    with pytest.raises(InputError, match=r"source.files: must name a pipe once: found .*pipe' ag"):
        prepare_store([path, f"{tmp_path}/./pipe"], tmp_path / "store")
    writer.join()
