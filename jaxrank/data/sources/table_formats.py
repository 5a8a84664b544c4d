"""Handles directories of Parquet files whose current files are listed in the log of a table format.

The log of Delta Lake is read. Tables of other formats are rejected.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet

from jaxrank.data import files
from jaxrank.errors import InputError

_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.parquet")
_ICEBERG = re.compile(r"version-hint\.text|snap-.*\.avro|.*-m\d+\.avro")
_HIVE_DELTA = re.compile(r"(delete_)?delta_\d+_\d+(_\d+)?")
_STREAMING = "_spark_metadata"
# Files that only tables of a format have: its title, and its name in Spark.
_LOGS = {
    ".hoodie": ("a Hudi", "hudi"),
    ".hoodie_partition_metadata": ("a Hudi", "hudi"),
    _STREAMING: ("a Spark streaming", "parquet"),
    "snapshot/LATEST": ("a Paimon", "paimon"),
}
_WHAT_TO_DO = (
    "Write the table as plain Parquet first, as with"
    " spark.read.format({kind!r}).load(...).write.parquet(...)"
)


def current(paths: Sequence[str]) -> list[str]:
    """Removes the Parquet files that the log of their table does not list as current.

    Raises:
        InputError: the table's format is not supported, or its log cannot be read.
    """
    tables: dict[str, str | None] = {}  # by directory
    active: dict[str, frozenset[str]] = {}  # by table
    kept = []
    for path in paths:
        whole = _resolved(path)
        table = _find_table(whole.rpartition("/")[0], tables)
        if table is not None and table not in active:
            active[table] = _active(table)
        if table is None or whole[len(table) + 1 :] in active[table]:
            kept.append(path)
    if paths and not kept:
        raise InputError(
            f"{paths[0]}: must be a current file of its Delta table: found {len(paths)} file(s)"
            " that its log has removed. Name the table's directory."
        )
    return kept


def check_plain(paths: Sequence[str]) -> None:
    """Rejects files of text or TFRecord in a directory whose log says which files are current.

    Raises:
        InputError: names the log.
    """
    for directory in dict.fromkeys(path.rpartition("/")[0] for path in map(_resolved, paths)):
        if not directory or _is_web(directory):
            continue
        log = f"{directory}/{_STREAMING}"
        if files.to_path(log).exists():
            raise InputError(
                f"{log}: must not exist: found the log of a Spark streaming table. This log says"
                " which files are current, but is not supported, so files of failed tries would be"
                " read too. Write the table again first, as with spark.read and write.save(...)."
            )


def _resolved(path: str) -> str:
    return os.path.realpath(path) if files.is_local(path) else path


def _is_web(directory: str) -> bool:
    return directory.startswith(("http:", "https:")) or directory.endswith(("/", ":"))


def _find_table(directory: str, known: dict[str, str | None]) -> str | None:
    """Returns the Delta table that contains a directory, or None."""
    parent = directory.rpartition("/")[0]
    if not directory or _is_web(directory):
        return None
    if directory not in known:
        where = files.to_path(directory)
        for name, (title, kind) in _LOGS.items():
            if (where / name).exists():
                raise _rejected(f"{directory}/{name}", title, kind)
        if _HIVE_DELTA.fullmatch(directory.rpartition("/")[2]):
            raise InputError(
                f"{directory}: must not exist: found changes of a Hive table with transactions,"
                " whose deleted rows would be read too. Write the table as plain Parquet first, as"
                " with spark.table(...).write.parquet(...)."
            )
        if _is_iceberg(where / "metadata"):
            raise _rejected(f"{directory}/metadata", "an Iceberg", "iceberg")
        is_table = (where / "_delta_log").exists()
        known[directory] = directory if is_table else _find_table(parent, known)
    return known[directory]


def _is_iceberg(metadata: Any) -> bool:
    try:
        return metadata.is_dir() and any(
            ".metadata.json" in entry.name or _ICEBERG.fullmatch(entry.name)
            for entry in metadata.iterdir()
        )
    except OSError:
        return False


def _rejected(log: str, title: str, kind: str) -> InputError:
    return InputError(
        f"{log}: must not exist: found the log of {title} table. This log says which files are"
        " current, but is not supported, so replaced files would be read too."
        f" {_WHAT_TO_DO.format(kind=kind)}."
    )


def _active(table: str) -> frozenset[str]:
    """Returns the relative paths of the files in the newest version of a Delta table.

    Raises:
        InputError: the log has gaps, or requires an unsupported feature.
    """
    log = f"{table}/_delta_log"
    names = sorted(entry.name for entry in files.to_path(log).iterdir())
    commits = {int(m[1]): m[0] for m in map(_COMMIT.fullmatch, names) if m}
    checkpoints = {int(m[1]): m[0] for m in map(_CHECKPOINT.fullmatch, names) if m}
    start = max(checkpoints, default=-1)
    later = sorted(version for version in commits if version > start)
    newest = later[-1] if later else start
    if newest < 0 or later != list(range(start + 1, newest + 1)):
        raise _cannot(log, "every commit since the last checkpoint in one file", names[:10])
    active: set[str] = set()
    names = [checkpoints[start]] if start >= 0 else []
    names += [commits[version] for version in later]
    for name in names:
        read = _commit if name.endswith(".json") else _checkpoint
        try:
            _apply(read(f"{log}/{name}"), active, log)
        except (AttributeError, KeyError, TypeError) as error:
            raise InputError(
                f"{log}/{name}: must hold actions of a Delta table: found another value, as of"
                f" {type(error).__name__}: {error}."
            ) from error
    for name in sorted(active):
        if not files.to_path(f"{table}/{name}").exists():
            raise InputError(f"{table}/{name}: must exist, because {log} names it: found no file.")
    return frozenset(active)


def _cannot(log: str, must: str, actual: object) -> InputError:
    return InputError(
        f"{log}: the log of this Delta table must have {must}: found {actual}."
        f" {_WHAT_TO_DO.format(kind='delta')}."
    )


def _commit(path: str) -> Iterator[Mapping[str, Any]]:
    try:
        for line in files.to_path(path).read_text().splitlines():
            if line.strip():
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: must be JSON, one action per line: found {error}.") from error


def _checkpoint(path: str) -> Iterable[Mapping[str, Any]]:
    try:
        with files.open_input(path) as stream:
            file = pa.parquet.ParquetFile(stream)
            wanted = ("add", "metaData", "protocol", "sidecar")
            names = [name for name in file.schema_arrow.names if name in wanted]
            return file.read(names).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: must be a checkpoint of a log: found {error}.") from error


def _apply(actions: Iterable[Mapping[str, Any]], active: set[str], log: str) -> None:
    """Applies the add and remove actions of one version."""
    added, removed = set(), set()
    for action in actions:
        if action.get("sidecar"):
            raise _cannot(log, "checkpoints without sidecar files", action["sidecar"])
        settings = dict((action.get("metaData") or {}).get("configuration") or {})
        mode = settings.get("delta.columnMapping.mode", "none")
        if mode != "none":
            raise _cannot(log, "delta.columnMapping.mode=none", mode)
        add, remove = action.get("add"), action.get("remove")
        if add:
            if add.get("deletionVector"):
                raise _cannot(log, "no deletion vectors", f"one of {add['path']}")
            added.add(_relative(add["path"], log))
        if remove:
            removed.add(_relative(remove["path"], log))
    active -= removed
    active |= added


def _relative(path: str, log: str) -> str:
    name = unquote(path)
    if "://" in name or name.startswith("/"):
        raise _cannot(log, "paths within the table", path)
    return name
