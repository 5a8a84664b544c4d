"""Files by path or URL: local ones, and whatever fsspec reaches (gs://, s3://, https://, ...)."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa

from jaxrank.errors import InputError


class File(NamedTuple):
    """What tells whether a file is still the one that was read.

    size: bytes, -1 where the file system does not tell.
    mark: its time of change, or the version that the file system gives it.
    """

    path: str
    size: int
    mark: str


def is_local(path: str | os.PathLike[str]) -> bool:
    return "://" not in str(path)


def _file_system(path: str) -> tuple[Any, str]:
    """The file system of a URL, and the path within it."""
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: this kind of URL cannot be opened: {error}.") from error


def find(value: Any, where: str) -> list[str]:
    """The files that a path or URL, a glob, a directory, or a list of those means.

    Of a directory, all files in it and below, in order of their names, but what begins with "." or
    "_", as Spark's _SUCCESS.

    Args:
        where: the field of the config, for messages.

    Raises:
        InputError: nothing is there.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        found = [path for i, v in enumerate(value) for path in find(v, f"{where}[{i}]")]
        if not found:
            raise InputError(f"{where}: must have at least one file: found none.")
        return found
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{where}: must be a path or a list of paths: found {value!r}.")
    text = str(value)
    return _find_local(text) if is_local(text) else _find_remote(text)


def _find_local(text: str) -> list[str]:
    path = Path(text)
    if path.is_dir():
        inside = [p for p in path.rglob("*") if p.is_file() and _is_data(p.relative_to(path).parts)]
        return [str(p) for p in sorted(inside)] or _none_inside(text)
    if path.exists():
        return [text]
    if not glob.has_magic(text):
        raise InputError(f"{text}: no such file or directory.")
    matches = sorted(p for p in glob.glob(text, recursive=True) if Path(p).is_file())
    if not matches:
        raise InputError(f"{text}: this pattern matches no file.")
    return matches


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
    return not any(part.startswith((".", "_")) for part in parts)


def _none_inside(path: str) -> list[str]:
    raise InputError(
        f"{path}: the directory must hold at least one file whose name does not begin with '.' or"
        " '_': found none."
    )


def open_input(path: str) -> pa.NativeFile:
    """The file for reading, at random access.

    Raises:
        InputError: it is not there, or cannot be opened.
    """
    try:
        if is_local(path):
            return pa.OSFile(path)
        system, inner = _file_system(path)
        return pa.PythonFile(system.open(inner, "rb"), "r")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: must be a file that can be read: found {error}.") from error


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
    marks = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "created")
    size = info.get("size")
    mark = next((str(info[m]) for m in marks if info.get(m)), "")
    return File(path, -1 if size is None else int(size), mark)
