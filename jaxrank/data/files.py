"""Files by path or URL: local ones, and whatever fsspec reaches (gs://, s3://, https://, ...)."""

import contextlib
import functools
import glob
import io
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
from upath import UPath

from jaxrank.atomic import replacing
from jaxrank.errors import InputError, RunError

# What file systems tell of a file that is another one when it has changed, the best first.
_VERSIONS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "generation")
_CHANGES = ("mtime", "modify", "LastModified", "Last-Modified", "last_modified", "created")

_PAUSES = (1.0, 5.0)  # seconds before what a server did not give is asked for again

AnyPath = str | os.PathLike[str] | UPath


class File(NamedTuple):
    """What tells whether a file is still the one that was read.

    size: bytes, -1 where the file system does not tell.
    mark: its time of change, or the version that the file system gives it.
    """

    path: str
    size: int
    mark: str


def is_local(path: AnyPath) -> bool:
    return "://" not in str(path)


def _file_system(path: str) -> tuple[Any, str]:
    """The file system of a URL, and the path within it."""
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: this kind of URL cannot be opened: {error}.") from error


def path_of(path: AnyPath) -> UPath:
    """A path or URL as one that has the methods of pathlib.

    Raises:
        InputError: there is no file system for URLs of this kind.
    """
    try:
        parsed = UPath(path)
        if not is_local(path):
            _ = parsed.fs  # only then it looks for the package of this kind
        return parsed
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: this kind of URL cannot be opened: {error}.") from error


def check_named(value: Any, where: str) -> None:
    """Refuses what is no path or URL, nor a list of those; whether files are there, `find` tells.

    Args:
        where: the field of the config, for messages.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise InputError(f"{where}: must have at least one file: found none.")
        for i, entry in enumerate(value):
            check_named(entry, f"{where}[{i}]")
    elif not isinstance(value, str | os.PathLike):
        raise InputError(f"{where}: must be a path or a list of paths: found {value!r}.")
    elif not os.fspath(value):
        raise InputError(f"{where}: must be a path or a list of paths: found ''.")


def find(value: Any) -> list[str]:
    """The files that a path or URL, a glob, a directory, or a list of those means.

    Of a directory, all files in it and below, in order of their names, but "lost+found" and what
    begins with "." or "_", as Spark's _SUCCESS. Each file is there once, whatever names and links
    lead to it.

    Args:
        value: as `check_named` lets it pass.

    Raises:
        InputError: nothing is there.
    """
    return _each_once(_all_of(value))


def _all_of(value: Any) -> list[str]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [path for entry in value for path in _all_of(entry)]
    text = os.fspath(value)
    return _find_local(text) if is_local(text) else _find_remote(text)


def _each_once(paths: Sequence[str]) -> list[str]:
    """The first path of each file, but a link only where no path is the file's own."""
    chosen: dict[Any, str] = {}
    for path in paths:
        identity = identify(path)
        if identity not in chosen or _is_link(chosen[identity]) and not _is_link(path):
            chosen[identity] = path
    kept = set(chosen.values())
    return [path for path in dict.fromkeys(paths) if path in kept]


def _is_link(path: str) -> bool:
    return is_local(path) and os.path.islink(path)


def identify(path: str) -> Any:
    """A value that is equal for two paths exactly if they lead to the same file."""
    if not is_local(path):
        return path
    status = os.stat(path)
    # Some file systems have no numbers of files; links of a file under two names need them.
    if status.st_nlink > 1 and status.st_ino:
        return status.st_dev, status.st_ino
    return os.path.realpath(path)


def _find_local(text: str) -> list[str]:
    try:
        return _listed(text)
    except OSError as error:
        raise InputError(f"{text}: cannot be listed: {error}.") from error


def _listed(text: str) -> list[str]:
    path = Path(text)
    if path.is_dir():
        inside = sorted(_data_in(path, path.resolve(), set()))
        return [str(p) for p in inside] or _none_inside(text)
    if path.exists():
        _is_file(path)
        return [text]
    if not glob.has_magic(text):
        raise InputError(f"{text}: no such file or directory.")
    matches = sorted(p for p in glob.glob(text, recursive=True) if _is_file(Path(p)))
    if not matches:
        raise InputError(f"{text}: this pattern matches no file.")
    _check_listed(text)
    return matches


def _is_file(path: Path) -> bool:
    """Whether a path is a file that is there, and not a directory.

    Raises:
        InputError: it is a link to nothing, or a pipe or device; data that is left out would be
            missed by nobody.
    """
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{path}: must be a file: it is a link to {os.readlink(path)!r}, not there."
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        kind = "a pipe (FIFO)" if path.is_fifo() else "a socket or device"
        raise InputError(
            f"{path}: must be a file: found {kind}. `prepare` reads a pipe only where source.files"
            " names it by itself."
        )
    return path.is_file()


def _check_listed(pattern: str) -> None:
    """Refuses a pattern with a directory on its way that cannot be read, which `glob` passes by."""
    parts = Path(pattern).parts
    if parts[-1] == "**":  # what lies in the last directories, too
        parts = (*parts, "*")
    for i in range(1, len(parts)):
        needed = os.R_OK | os.X_OK if glob.has_magic(parts[i]) else os.X_OK
        for directory in map(Path, glob.glob(str(Path(*parts[:i])), recursive=True)):
            if (
                directory.is_dir()
                and _is_data((directory.name,))
                and not os.access(directory, needed)
            ):
                raise InputError(f"{pattern}: {directory} must be a directory that can be read.")


def _data_in(directory: Path, root: Path, linked: set[Path]) -> list[Path]:
    """The files in and below a directory that are data.

    Links to directories outside `root` are followed, each of these once; what they could lead to
    within it is read by its own name.
    """
    paths = []
    for path in sorted(directory.iterdir()):
        if not _is_data((path.name,)):
            continue
        if _is_file(path):
            paths.append(path)
        elif path.is_dir():
            target = path.resolve()
            if path.is_symlink():
                if target.is_relative_to(root) or target in linked:
                    continue
                linked.add(target)
            paths += _data_in(path, root, linked)
    return paths


def _find_remote(url: str) -> list[str]:
    system, path = _file_system(url)
    try:
        if system.isfile(path) or (not glob.has_magic(url) and _is_http(url)):
            return [url]
        if glob.has_magic(path):
            matches = sorted(p for p in system.glob(path) if system.isfile(p))
            if not matches:
                raise InputError(f"{url}: this pattern matches no file.")
            return [system.unstrip_protocol(p) for p in matches]
        inside = sorted(system.find(path))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{url}: cannot be listed: {error}.") from error
    if not inside:
        raise InputError(f"{url}: no such file or directory.")
    root = path.rstrip("/") + "/"
    data = [p for p in inside if _is_data(tuple(p.removeprefix(root).split("/")))]
    return [system.unstrip_protocol(p) for p in data] or _none_inside(url)


def _is_http(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _is_data(parts: tuple[str, ...]) -> bool:
    return not any(part.startswith((".", "_")) or part == "lost+found" for part in parts)


def _none_inside(path: str) -> list[str]:
    raise InputError(
        f"{path}: the directory must hold at least one file whose name does not begin with '.' or"
        " '_': found none."
    )


def open_input(path: str) -> pa.NativeFile:
    """The file for reading, at random access.

    Raises:
        InputError: it is not there, or cannot be opened.
        RunError: from what reads it: a server does not give what the file holds.
    """
    try:
        if is_local(path):
            return pa.OSFile(path)
        system, inner = _file_system(path)
        # Of size 0: from the start to the end only.
        options = {} if has_ranges(path) else {"block_size": 0}
        return pa.PythonFile(_Remote(path, system.open(inner, "rb", **options)), "r")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: must be a file that can be read: found {error}.") from error


class _Remote(io.RawIOBase):
    """A file of a remote file system, each of which has errors of its own.

    What cannot be read is asked for again, and in the end a RunError: the data may be well.
    """

    def __init__(self, path: str, file: Any):
        self._path, self._file = path, file

    def read(self, size: int = -1) -> bytes:
        # Of a stream that has only a start and an end nobody knows how much of it was lost.
        pauses = _PAUSES if self._file.seekable() else ()
        for pause in pauses:
            try:
                return self._file.read(size)
            except Exception:
                time.sleep(pause)
        return self._do(self._file.read, size)

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        return self._do(self._file.seek, position, whence)

    def tell(self) -> int:
        return self._do(self._file.tell)

    def close(self) -> None:
        self._file.close()
        super().close()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._file.seekable()

    def _do(self, function: Any, *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise RunError(f"{self._path}: could not be read: {reason}.") from error


@functools.cache
def has_ranges(path: str) -> bool:
    """Whether a part of the file can be read by itself: some web servers send only all of it."""
    if not _is_http(path):
        return True
    system, inner = _file_system(path)
    try:
        with system.open(inner, "rb", block_size=1) as stream:
            stream.seek(1)
            stream.read(1)
    except Exception:  # servers refuse in many ways
        return False
    return True


def describe(path: str) -> File:
    """Size and mark of a file.

    Raises:
        InputError: it is not there.
    """
    try:
        if is_local(path):
            status = os.stat(path)
            return File(path, status.st_size, str(status.st_mtime_ns))
        system, inner = _file_system(path)
        info = system.info(inner)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: must be a file that can be read: found {error}.") from error
    size = info.get("size")
    mark = next((str(info[m]) for m in _VERSIONS + _CHANGES if info.get(m)), "")
    return File(path, -1 if size is None else int(size), mark)


def write_whole(path: UPath, data: bytes | pa.Buffer) -> None:
    """Writes a file that is whole when it has its name."""
    if not is_local(str(path)):
        path.write_bytes(bytes(data))  # a file that is not closed is not there
        return
    with replacing(Path(str(path))) as partial:
        partial.write_bytes(data)


def check_parent(output: Path, flag: str = "--output") -> None:
    """Raises InputError unless `output` can be made: its directories may have to be made, too."""
    there = next(path for path in output.absolute().parents if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "not writable by this user" if there.is_dir() else "no directory"
        raise InputError(
            f"{flag}: {there} must be a directory that can be written to make {output}: it is"
            f" {reason}."
        )


def names_below(path: UPath) -> list[str]:
    """The files in and below a directory, by their paths in it."""
    if is_local(str(path)):
        below = Path(str(path))
        return [p.relative_to(below).as_posix() for p in below.rglob("*") if not p.is_dir()]
    path.fs.invalidate_cache()  # others write there
    root = path.path.rstrip("/") + "/"
    return [name.removeprefix(root) for name in path.fs.find(path.path)]


def remove(path: UPath) -> None:
    """Removes a file, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if is_local(str(path)):
            path.unlink()
        else:
            path.fs.rm_file(path.path)  # `unlink` takes its name for a pattern


def remove_directory(path: UPath) -> None:
    """Removes a directory and all in it, if it is there."""
    if is_local(str(path)):
        shutil.rmtree(str(path), ignore_errors=True)
    elif path.exists():
        path.fs.rm(path.path, recursive=True)
