"""The lock that excludes every other run from a workdir."""

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

# Errors that may pass, so they are not errors of the user.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Creates `workdir`, and locks it against every other run within the context.

    Process 0 holds the lock, and the other processes check that they see the same directory. If no
    run was started, for example because its config is invalid, created directories are removed if
    they are empty.

    Raises:
        InputError: the workdir cannot be written or locked, or the processes do not share it.
        RunError: another run trains in it, which may end soon.
    """
    with contextlib.ExitStack() as stack:
        with processes.together():
            mark = stack.enter_context(_marked(workdir)) if processes.is_first() else ""
        mark = processes.broadcast_value(mark)
        with processes.together():
            lock = workdir / ".lock"
            if not lock.is_file() or lock.read_text() != mark:
                raise InputError(
                    f"--workdir: {workdir} must be a directory that all processes share: this"
                    " process does not see the lock file of process 0. Use a shared file system."
                )
        yield


@contextlib.contextmanager
def _marked(workdir: Path) -> Iterator[str]:
    """Holds the lock of `workdir`, and yields the text that it wrote to the lock file."""
    descriptor, is_new, new_directories = _lock(workdir)
    had_checkpoints = (workdir / "checkpoints").exists()
    start = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    holder = f"process {os.getpid()} on {socket.gethostname()} since {start}"
    mark = f"{secrets.token_hex(8)} {holder}"
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
            # Removed while the lock is held: a process that opened the file before and locks it
            # next notices that it has been removed.
            (workdir / ".lock").unlink(missing_ok=True)
            for directory in new_directories:
                _remove_if_empty(directory)
        os.close(descriptor)


def _lock(workdir: Path) -> tuple[int, bool, list[Path]]:
    """Locks the lock file of `workdir`.

    Returns:
        Its descriptor, True if the file is new, and the directories that were created, innermost
        first.
    """
    path = workdir / ".lock"
    created: list[Path] = []
    is_new = False

    def opened() -> int:
        nonlocal created, is_new
        try:
            created = [place for place in (workdir, *workdir.parents) if not place.exists()]
            workdir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            if error.filename == str(path) and not workdir.exists():
                raise FileNotFoundError from error  # its owner has just removed it
            raise InputError(
                f"--workdir: {workdir} must be a writable directory: found {error}."
            ) from error
        is_new = os.fstat(descriptor).st_size == 0
        return descriptor

    try:
        descriptor = hold(path, opened)
    except OSError as error:
        raise _without_locks(path, error) from error
    if descriptor is None:
        raise _held(path)
    return descriptor, is_new, created


def _held(path: Path) -> RunError:
    """Returns the error for a lock that another process holds, with the name of that process."""
    _, _, holder = path.read_text().partition(" ") if path.is_file() else ("", "", "")
    # This machine frees the lock of a process that has ended, so here the holder is alive.
    is_local = f" on {socket.gethostname()} since " in holder or not holder
    advice = (
        " Wait for it, or end it."
        if is_local
        else " Wait for it. A file server may keep the lock of a machine that is lost (NFSv3): only"
        f" if that machine is off, remove {path}."
    )
    return RunError(
        f"{path.parent}: another process trains in this workdir{holder and ': '}{holder}.{advice}"
    )


def _without_locks(path: Path, error: OSError) -> Exception:
    """Returns the error for a file system without locks, or `error` itself if it may pass."""
    if error.errno in _PASSING:
        return error
    return InputError(
        f"--workdir: {path.parent} must be on a file system with locks (flock): found {error}."
    )


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()
