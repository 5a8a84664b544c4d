"""A file is complete whenever it exists under its name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrank.atomic import replacing


@pytest.mark.parametrize("options", [{}, {"unique": True}, {"sync": True}])
def test_a_file_is_replaced_by_what_was_written(tmp_path, options):
    path = tmp_path / "file"
    path.write_text("before")
    with replacing(path, **options) as partial:
        partial.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(error), replacing(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise error
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import os, signal, sys
from pathlib import Path
from jaxrank.atomic import replacing
with replacing(Path(sys.argv[1])) as partial:
    partial.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


NULL = Path("/dev/null")


def test_a_killed_process_leaves_what_was_there_and_the_next_one_writes(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    killed = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_text() == "before"
    with replacing(path) as partial:
        partial.write_text("after")
    assert os.listdir(tmp_path) == ["file"]


def test_a_device_is_never_replaced():
    with pytest.raises(OSError, match="is not a regular file.*/dev/null"), replacing(NULL):
        pass
    assert NULL.is_char_device()
