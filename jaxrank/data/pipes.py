"""Copies pipes to files, for input that is read more than once."""

import errno
import os
import select
import shutil
import stat
import time
from typing import BinaryIO

from jaxrank.errors import InputError

_WRITER_SECONDS = 30.0  # time limit for a program to open the pipe
_POLL_MILLISECONDS = 100


def is_pipe(path: str) -> bool:
    """Returns True if a path is an existing pipe, such as /dev/fd/63 of the shell's <(command)."""
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except OSError:
        return False


def copy(path: str, file: BinaryIO) -> None:
    """Copies everything that is written to a pipe.

    Raises:
        InputError: no program opened it for writing within `_WRITER_SECONDS`, or nothing was
            written.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise InputError(f"{path}: must be a pipe that can be read: found {error}.") from error
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        first = _first(descriptor, path)
        if not first:
            raise InputError(
                f"{path}: must be a pipe that a program writes records to: found its end without"
                " any. See whether the program has failed."
            )
        file.write(first)
        os.set_blocking(descriptor, True)
        shutil.copyfileobj(pipe, file)


def _first(descriptor: int, path: str) -> bytes:
    """Returns the first bytes of a pipe, or b"" if its writer wrote nothing."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + _WRITER_SECONDS
    while True:
        has_event = bool(poll.poll(_POLL_MILLISECONDS))
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            deadline = time.monotonic() + _WRITER_SECONDS  # a writer exists and is not ready yet
            continue
        if data or has_event:
            return data
        if time.monotonic() > deadline:
            raise InputError(
                f"{path}: must be a file, or a pipe that a program writes to: found a pipe that no"
                f" program has opened for writing in {_WRITER_SECONDS:g} seconds."
            )
