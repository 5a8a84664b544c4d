"""Files by path or URL: local ones, and any fsspec file system (gs://, s3://, https://, ...)."""

import contextlib
import functools
import glob
import io
import itertools
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
from upath import UPath

from jaxrank.atomic import is_marked, replacing
from jaxrank.data import file_names
from jaxrank.errors import InputError, RunError
from jaxrank.validate import nearest

# Properties by which file systems mark a changed file, the most reliable first.
_VERSIONS = ("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "generation")
_CHANGES = ("mtime", "modify", "LastModified", "Last-Modified", "last_modified", "created")

_NO_MATCH = (
    "{}: this pattern must match at least one file: found none. Correct the pattern, or create the"
    " files."
)

_LOCAL_URLS = ("file://", "local://")
_MAX_COMPARED = 1000  # files of a directory whose names are compared with a missing one
_PAUSES = (1.0, 5.0)  # seconds before each retry of a failed request

AnyPath = str | os.PathLike[str] | UPath


class File(NamedTuple):
    """Identifies the version of a file that was read.

    size: bytes, or -1 if the file system does not report them.
    mark: modification time, or the version that the file system reports.
    """

    path: str
    size: int
    mark: str


def is_local(path: AnyPath) -> bool:
    return "://" not in str(path)


def _file_system(path: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path within it."""
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: this kind of URL cannot be opened: {error}.") from error


def to_path(path: AnyPath) -> UPath:
    """Converts a path or URL to an object with the methods of pathlib.

    Raises:
        InputError: no file system supports URLs of this kind.
    """
    try:
        parsed = UPath(path)
        if not is_local(path):
            _ = parsed.fs  # imports the package of this kind
        return parsed
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: this kind of URL cannot be opened: {error}.") from error


def check_named(value: Any, where: str) -> None:
    """Rejects a value that is not a path or URL or a list of them. `find` checks that they exist.

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


class MissingFile(InputError):
    """A local file or directory that a config names does not exist."""


def find(value: Any) -> list[str]:
    """Returns the files of a path or URL, a glob, a directory, or a list of these.

    A directory yields all files in and below it, sorted by name. "lost+found" and names that begin
    with "." or "_", such as Spark's _SUCCESS, are skipped. Each file is returned once, even if
    several names or links lead to it.

    Args:
        value: a value that `check_named` accepts.

    Raises:
        MissingFile: a local path does not exist.
        InputError: there are no files.
    """
    named: set[str] = set()
    paths = _find_all(value, named)
    file_names.check_beside(paths, named)
    return _each_once(paths)


def _find_all(value: Any, named: set[str]) -> list[str]:
    """Returns the files of a value.

    Args:
        named: receives the files that no directory or pattern stands for.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [path for entry in value for path in _find_all(entry, named)]
    text = os.fspath(value)
    paths = _find_local(text) if is_local(text) else _find_remote(text)
    if paths == [text]:
        named.add(text)
    return paths


def _each_once(paths: Sequence[str]) -> list[str]:
    """Returns the first path of each file. A link counts only if no path is the file's own name."""
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
    """Returns a key that is equal for two paths if and only if they lead to the same file."""
    if path.startswith(_LOCAL_URLS):
        path = _file_system(path)[1]
    if not is_local(path):
        return path
    status = os.stat(path)
    # Some file systems have no inode numbers. Only hard links need them.
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
        inside = [str(p) for p in sorted(_list_data(path, path.resolve(), set()))]
        return inside or _none_inside(text)
    if path.exists():
        _is_file(path)
        return [text]
    if not glob.has_magic(text):
        raise MissingFile(f"{text}: no such file or directory{_nearest(path)}.")
    matches = sorted(p for p in glob.glob(text, recursive=True) if _is_file(Path(p)))
    if not matches:
        raise InputError(_NO_MATCH.format(text))
    _check_listed(text)
    file_names.check_matches(text, matches)
    return matches


def _nearest(path: Path) -> str:
    """Returns the name of a file beside `path` with a similar name, as `validate.nearest`."""
    try:
        with os.scandir(path.parent) as entries:
            return nearest(path.name, [e.name for e in itertools.islice(entries, _MAX_COMPARED)])
    except OSError:
        return ""


def _is_file(path: Path) -> bool:
    """Returns True if a path is an existing file and not a directory.

    Raises:
        InputError: it is a dangling link, a pipe or a device. Skipping it would lose data silently.
    """
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{path}: must be a file: found a link to {os.readlink(path)!r}, which does not exist."
        )
    if path.exists() and not path.is_file() and not path.is_dir():
        kind = "a pipe (FIFO)" if path.is_fifo() else "a socket or device"
        raise InputError(
            f"{path}: must be a file: found {kind}. A pipe is read only if source.files names it"
            " directly."
        )
    return path.is_file()


def _check_listed(pattern: str) -> None:
    """Rejects a pattern with an unreadable directory on its path, which `glob` skips silently."""
    parts = Path(pattern).parts
    if parts[-1] == "**":  # also matches files in the innermost directories
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


def _list_data(directory: Path, root: Path, linked: set[Path]) -> list[Path]:
    """Returns the data files in and below a directory.

    Links to directories outside `root` are followed, each of them once. Directories within `root`
    are read by their own names.
    """
    paths = []
    for path in sorted(directory.iterdir()):
        if not _is_data((path.name,)):
            continue
        if _is_file(path):
            file_names.check_finished(str(path))
            paths.append(path)
        elif path.is_dir():
            target = path.resolve()
            if path.is_symlink():
                if target.is_relative_to(root) or target in linked:
                    continue
                linked.add(target)
            paths += _list_data(path, root, linked)
    return paths


def _find_remote(url: str) -> list[str]:
    system, path = _file_system(url)
    try:
        if system.isfile(path) or (not glob.has_magic(url) and _is_http(url)):
            return [url]
        if glob.has_magic(path):
            matches = sorted(p for p in system.glob(path) if system.isfile(p))
            if not matches:
                raise InputError(_NO_MATCH.format(url))
            file_names.check_matches(path, matches)
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
    for name in data:
        file_names.check_finished(name)
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
    """Opens a file for random-access reads.

    Raises:
        InputError: it does not exist, or cannot be opened.
        RunError: on a later read, if a server does not return the content.
    """
    try:
        if is_local(path):
            return pa.OSFile(path)
        system, inner = _file_system(path)
        # Block size 0 reads sequentially only.
        options = {} if has_ranges(path) else {"block_size": 0}
        return pa.PythonFile(_Remote(path, system.open(inner, "rb", **options)), "r")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: must be a file that can be read: found {error}.") from error


class _Remote(io.RawIOBase):
    """A file of a remote file system, with uniform errors.

    Failed reads are retried and finally raise a RunError, because the data may be valid.
    """

    def __init__(self, path: str, file: Any):
        self._path, self._file = path, file

    def read(self, size: int = -1) -> bytes:
        # A sequential stream cannot be retried: the lost position is unknown.
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
    """Returns True if the server supports range requests. Some servers send only whole files."""
    if not _is_http(path):
        return True
    system, inner = _file_system(path)
    try:
        with system.open(inner, "rb", block_size=1) as stream:
            stream.seek(1)
            stream.read(1)
    except Exception:  # servers fail in many ways
        return False
    return True


def describe(path: str) -> File:
    """Returns the size and mark of a file.

    Raises:
        InputError: it does not exist.
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


def absolute(mark: File) -> File:
    """Returns the description of a file with a path that is valid in any directory."""
    return mark._replace(path=os.path.abspath(mark.path)) if is_local(mark.path) else mark


def changed(marks: Sequence[File]) -> list[str]:
    """Returns the paths of local files that still exist and differ from their descriptions."""
    return [
        mark.path
        for mark in marks
        if is_local(mark.path) and os.path.isfile(mark.path) and describe(mark.path) != mark
    ]


def write_whole(path: UPath, data: bytes | pa.Buffer) -> None:
    """Writes a file atomically: it is complete once it exists."""
    if not is_local(str(path)):
        path.write_bytes(bytes(data))  # object stores create the file when it is closed
        return
    with replacing(Path(str(path))) as partial:
        partial.write_bytes(data)


def check_parent(output: Path, flag: str = "--output") -> None:
    """Raises InputError unless `output` and its missing parent directories can be created."""
    existing = next(path for path in output.absolute().parents if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        reason = "not writable by this user" if existing.is_dir() else "not a directory"
        raise InputError(
            f"{flag}: {existing} must be a writable directory, so that {output} can be created: it"
            f" is {reason}."
        )


def check_replaceable(output: Path, flag: str) -> None:
    """Raises InputError if a page or picture would replace a file that the program did not write.

    Devices and pipes are written to.
    """
    if output.is_file() and not is_marked(output):
        raise InputError(
            f"{flag}: {output} must be a new file or one that jaxrank wrote, which is replaced:"
            " found another file. Remove it or name another."
        )


def relative_names(path: UPath) -> list[str]:
    """Returns the relative paths of the files in and below a directory."""
    if is_local(str(path)):
        below = Path(str(path))
        return [p.relative_to(below).as_posix() for p in below.rglob("*") if not p.is_dir()]
    path.fs.invalidate_cache()  # other processes write there
    root = path.path.rstrip("/") + "/"
    return [name.removeprefix(root) for name in path.fs.find(path.path)]


def remove(path: UPath) -> None:
    """Removes a file if it exists."""
    with contextlib.suppress(FileNotFoundError):
        if is_local(str(path)):
            path.unlink()
        else:
            path.fs.rm_file(path.path)  # `unlink` would treat the name as a pattern


def remove_directory(path: UPath) -> None:
    """Removes a directory with its content if it exists."""
    if is_local(str(path)):
        shutil.rmtree(str(path), ignore_errors=True)
    elif path.exists():
        path.fs.rm(path.path, recursive=True)
