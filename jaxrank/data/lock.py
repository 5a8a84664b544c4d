"""Locks of files and directories that one process at a time may write."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def new_directory(
    target: Path,
    *,
    check_free: Callable[[], None],
    locked: Exception,
    keep: Callable[[], bool] = lambda: False,
) -> Iterator[Path]:
    """Yields a hidden directory beside `target`, to be renamed to `target` when it is complete.

    It is locked meanwhile. If it has not been renamed at the end, it is removed. A process that was
    killed leaves it, and the next one is handed it with what it holds.

    Args:
        check_free: raises if `target` exists.
        locked: raised if another process has the directory locked.
        keep: whether a directory that has not been renamed stays.
    """
    path = target.with_name(f".{target.name}.partial")
    descriptor = lock_directory(path)
    if descriptor is None:
        raise locked
    try:
        check_free()  # another process may have finished it since
        yield path
    finally:
        # The name may be another process's once it is renamed.
        if _is_at(descriptor, path) and not keep():
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def lock_directory(path: Path) -> int | None:
    """A descriptor of the directory, which is made if need be, or None if another has it locked.

    The lock is held until the descriptor is closed, so one that was killed holds none.
    """

    def opened() -> int:
        path.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    return hold(path, opened)


def hold(path: Path, opened: Callable[[], int]) -> int | None:
    """A locked descriptor of `path`, or None if another process has it locked.

    The lock is held until the descriptor is closed. A process that was killed holds none.

    Args:
        opened: opens `path`, which is made first if need be, and returns the descriptor.

    Raises:
        OSError: what `opened` raises, except that the owner has just moved or removed `path`. Or
            the file system has no locks.
    """
    while True:
        try:
            descriptor = opened()
        except FileNotFoundError:
            continue  # its owner has just moved or removed it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # moved or removed before the lock was free


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path is still that of what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove_empty_directories(path: Path) -> None:
    """Those below the directory in which there is no file."""
    for inside, _, _ in os.walk(path, topdown=False):
        if Path(inside) != path and not os.listdir(inside):
            os.rmdir(inside)


def empty_directory(path: Path) -> None:
    """Removes what the directory holds, and not the directory, which may be locked."""
    for inside in path.iterdir():
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside)
        else:
            inside.unlink()
