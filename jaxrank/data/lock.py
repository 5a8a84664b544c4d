"""Locks of files and directories, for one writing process at a time."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_MAX_ABSENT = 1000  # attempts to open a path that does not exist


@contextlib.contextmanager
def new_directory(
    target: Path,
    *,
    check_free: Callable[[], None],
    locked: Exception,
    keep: Callable[[], bool] = lambda: False,
) -> Iterator[Path]:
    """Yields a hidden directory beside `target`, to be renamed to `target` when it is complete.

    It is locked in the meantime, and removed at the end unless it was renamed. A killed process
    leaves its directory behind, and the next process gets it with its content.

    Args:
        check_free: raises if `target` exists.
        locked: raised if another process has locked the directory.
        keep: returns True if a directory that was not renamed is to be kept.
    """
    path = target.with_name(f".{target.name}.partial")
    descriptor = lock_directory(path)
    if descriptor is None:
        raise locked
    try:
        check_free()  # another process may have completed it in the meantime
        yield path
    finally:
        # After a renaming the name may belong to another process.
        if _is_same_file(descriptor, path) and not keep():
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def lock_directory(path: Path) -> int | None:
    """Creates and locks a directory and returns its descriptor, or None if another process has the
    lock.

    The lock lasts until the descriptor is closed, so a killed process releases it.
    """

    def opened() -> int:
        path.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    return hold(path, opened)


def hold(path: Path, opened: Callable[[], int]) -> int | None:
    """Returns a locked descriptor of `path`, or None if another process has the lock.

    The lock lasts until the descriptor is closed, so a killed process releases it.

    Args:
        opened: creates `path` if needed, opens it and returns the descriptor.

    Raises:
        OSError: an error of `opened`, other than a concurrent move or removal of `path`. Or the
            file system has no locks.
    """
    absent = 0
    while True:
        try:
            descriptor = opened()
        except FileNotFoundError:  # its owner has just moved or removed it
            absent += 1
            if absent == _MAX_ABSENT:
                raise  # nothing can be created there, as in /proc
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)  # moved or removed before the lock was free


def _is_same_file(descriptor: int, path: Path) -> bool:
    """Returns True if a path still refers to the open descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def remove_empty_directories(path: Path) -> None:
    """Removes the directories below `path` that contain no file."""
    for inside, _, _ in os.walk(path, topdown=False):
        if Path(inside) != path and not os.listdir(inside):
            os.rmdir(inside)


def empty_directory(path: Path) -> None:
    """Removes the content of a directory but not the directory, which may be locked."""
    for inside in path.iterdir():
        if inside.is_dir() and not inside.is_symlink():
            shutil.rmtree(inside)
        else:
            inside.unlink()
