"""The lock that keeps every other run out of a workdir."""

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from jaxrank.data.lock import hold
from jaxrank.errors import InputError, RunError
from jaxrank.runtime import processes

# What may be otherwise a while later, and so is no wrong use.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes `workdir`, and holds it against every other run while the context lasts.

    Of the processes of a run the first holds it; the others look whether they see the same one.
    Where no run has begun in the end, as it was refused, what was made for it is removed if empty.

    Raises:
        InputError: it is not a directory that can be written and locked, or the processes of this
            run do not share it.
        RunError: another run trains in it, which it may soon do no more.
    """
    with contextlib.ExitStack() as stack:
        with processes.together():
            mark = stack.enter_context(_marked(workdir)) if processes.is_first() else ""
        mark = processes.from_first(mark)
        with processes.together():
            lock = workdir / ".lock"
            if not lock.is_file() or lock.read_text() != mark:
                raise InputError(
                    f"--workdir: {workdir} must be one directory that all processes share, but what"
                    " process 0 wrote there is not here."
                )
        yield


@contextlib.contextmanager
def _marked(workdir: Path) -> Iterator[str]:
    """Holds the lock of `workdir`, and tells what it wrote there."""
    descriptor, is_new, made = _lock(workdir)
    had_checkpoints = (workdir / "checkpoints").exists()
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    who = f"process {os.getpid()} on {socket.gethostname()} since {since}"
    mark = f"{secrets.token_hex(8)} {who}"
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, mark.encode())
        os.fsync(descriptor)
        yield mark
    finally:
        holds_run = (workdir / "config.json").exists()
        if not holds_run and not had_checkpoints:
            _remove_if_empty(workdir / "checkpoints")
        if not holds_run and is_new:
            # While it is held: who opened it before and locks it next sees that it is gone.
            (workdir / ".lock").unlink(missing_ok=True)
            for directory in made:
                _remove_if_empty(directory)
        os.close(descriptor)


def _lock(workdir: Path) -> tuple[int, bool, list[Path]]:
    """The descriptor of the locked file, whether the file is new, and the directories that were
    made for it, innermost first."""
    path = workdir / ".lock"
    made: list[Path] = []
    is_new = False

    def opened() -> int:
        nonlocal made, is_new
        try:
            made = [place for place in (workdir, *workdir.parents) if not place.exists()]
            workdir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            if error.filename == str(path) and not workdir.exists():
                raise FileNotFoundError from error  # its owner has just removed it
            raise InputError(
                f"--workdir: {workdir} must be a directory that can be written: found {error}."
            ) from error
        is_new = os.fstat(descriptor).st_size == 0
        return descriptor

    try:
        descriptor = hold(path, opened)
    except OSError as error:
        raise _without_locks(path, error) from error
    if descriptor is None:
        raise _held(path)
    return descriptor, is_new, made


def _held(path: Path) -> RunError:
    """The error where another process has the lock, which names it."""
    _, _, who = path.read_text().partition(" ") if path.is_file() else ("", "", "")
    return RunError(
        f"{path.parent}: another process trains in this workdir{who and ': '}{who}. If that"
        f" machine was lost, the file system may still hold its lock: remove {path}."
    )


def _without_locks(path: Path, error: OSError) -> Exception:
    """The error where a lock can never be had, unless the cause may pass."""
    if error.errno in _PASSING:
        return error
    return InputError(
        f"--workdir: {path.parent} must be on a file system with locks (flock): found {error}."
    )


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
