"""Files that are complete whenever they exist under their name."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

MARK = "Written by jaxrank"  # near the start of pages and pictures, which may be replaced
_MARK_WITHIN = 4096  # bytes


def is_marked(path: Path) -> bool:
    """Returns True if a file has the mark of the program's pages and pictures."""
    try:
        with path.open("rb") as file:
            return MARK.encode() in file.read(_MARK_WITHIN)
    except OSError:
        return False


@contextlib.contextmanager
def replacing(path: Path, *, unique: bool = False, sync: bool = False) -> Iterator[Path]:
    """Yields a hidden path beside `path`, and renames that file to `path` at the end.

    An exception removes the file and leaves what was at `path`. A process that is killed leaves the
    hidden file, which the next one overwrites unless names are unique.

    Args:
        unique: whether other processes may write the same `path` at the same time.
        sync: whether the content must be on the disk before the rename.

    Raises:
        OSError: `path` is a device or another thing that a file must not replace.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "is not a regular file, which could be replaced", str(path))
    mark = f".{os.getpid()}" if unique else ""
    partial = path.with_name(f".{path.name}{mark}.partial")
    try:
        yield partial
        if sync:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
