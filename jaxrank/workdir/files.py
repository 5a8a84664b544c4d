"""The directory of a run: its config, the schema it was trained on, and its data if prepared here.

WORKDIR/config.json  schema.json  placement.json  metrics.jsonl  tensorboard/  checkpoints/  data/
profile/  follow/  damaged/  debug/  finished
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from jaxrank.config import FREE, default, differences, from_plain, to_plain
from jaxrank.data.files import is_local
from jaxrank.data.lock import is_at
from jaxrank.errors import InputError, RunError
from jaxrank.features import Schema
from jaxrank.layout import Hot
from jaxrank.runtime import processes

_FINISHED = "finished"
# What may be otherwise a while later, and so is no wrong use.
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)


def directory(given: str | Path) -> Path:
    """The workdir that `--workdir` names.

    Raises:
        InputError: it is a URL, which would become a directory of each machine's own disk.
    """
    # A Path has kept one slash of two.
    if "://" in str(given) or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(given)):
        raise InputError(
            "--workdir must be a directory of a file system that all processes see, for it is"
            f" locked and files in it are renamed: found the URL {given}. Mount a file system that"
            " all machines share, as NFS, and give the path there. Prepared data may be at a URL:"
            " --config.data.store."
        )
    return Path(given)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path}: no such file. Is {path.parent} the workdir of a run?")
    try:
        tree = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON: {error}.") from error
    if not isinstance(tree, dict):
        raise InputError(f"{path}: must hold a JSON object, as jaxrank wrote it: found {tree!r}.")
    return tree


def _write(path: Path, tree: Any, indent: int | None = 1) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(tree, indent=indent) + "\n")
    os.replace(partial, path)


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
    lock = _lock(workdir)
    had_checkpoints = (workdir / "checkpoints").exists()
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    who = f"process {os.getpid()} on {socket.gethostname()} since {since}"
    mark = f"{secrets.token_hex(8)} {who}"
    try:
        os.ftruncate(lock.descriptor, 0)
        os.write(lock.descriptor, mark.encode())
        os.fsync(lock.descriptor)
        yield mark
    finally:
        holds_run = (workdir / "config.json").exists()
        if not holds_run and not had_checkpoints:
            _remove_if_empty(workdir / "checkpoints")
        if not holds_run and lock.is_new:
            # While it is held: who opened it before and locks it next sees that it is gone.
            (workdir / ".lock").unlink(missing_ok=True)
            for directory in lock.made:
                _remove_if_empty(directory)
        os.close(lock.descriptor)


class _Lock(NamedTuple):
    """Of the locked file; whether it was made, and which directories for it, innermost first."""

    descriptor: int
    is_new: bool
    made: list[Path]


def _lock(workdir: Path) -> _Lock:
    path = workdir / ".lock"
    while True:
        try:
            made = [place for place in (workdir, *workdir.parents) if not place.exists()]
            workdir.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        except OSError as error:
            if error.errno in _PASSING:
                raise
            if error.filename == str(path) and not workdir.exists():
                continue  # its owner has just removed it
            raise InputError(
                f"--workdir: {workdir} must be a directory that can be written: found {error}."
            ) from error
        is_new = os.fstat(descriptor).st_size == 0
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(descriptor, path):
                return _Lock(descriptor, is_new, made)
        except OSError as error:
            os.close(descriptor)
            raise _not_locked(path, error) from error
        os.close(descriptor)  # the file was removed before its lock was free


def _not_locked(path: Path, error: OSError) -> Exception:
    """What to raise where a lock cannot be had, as another has it or there are none."""
    if isinstance(error, BlockingIOError):
        _, _, who = path.read_text().partition(" ") if path.is_file() else ("", "", "")
        return RunError(
            f"{path.parent}: another process trains in this workdir{who and ': '}{who}. If that"
            f" machine was lost, the file system may still hold its lock: remove {path}."
        )
    if error.errno in _PASSING:
        return error
    return InputError(
        f"--workdir: {path.parent} must be on a file system with locks (flock): found {error}."
    )


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def check_config(workdir: Path, config: ConfigDict) -> None:
    """Refuses a workdir that holds a run of another config; paths may be spelled in other ways,
    fields that are FREE differ, and those that the run's version did not have be as they are left.

    Raises:
        InputError: naming each field that differs.
    """
    path = workdir / "config.json"
    with processes.together():  # a relative path may be another one in each process
        if not path.is_file():
            return
        fields = to_plain(default())
        old, new = (
            _with_paths(_filled(tree, fields), os.path.realpath)
            for tree in (_read(path), to_plain(config))
        )
        lines = differences(old, new)
        changed = [line for line in lines if line.partition(":")[0] not in FREE]
        if changed:
            raise InputError(
                f"{workdir}: holds a run of another config; these fields differ:\n  "
                + "\n  ".join(changed)
                + "\nUse another --workdir, or --allow-config-change to go on with the new values."
            )


def _filled(tree: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """A plain config with the fields of another that it does not have."""
    found = {**others, **tree}
    for key, value in others.items():
        if isinstance(value, Mapping) and isinstance(found[key], Mapping):
            found[key] = _filled(found[key], value)
    return found


def _with_paths(tree: dict[str, Any], changed: Callable[[str], str]) -> dict[str, Any]:
    """A plain config whose local paths of the data that a run reads are changed.

    That is the store or, with data.direct, the files of the source. What a store was prepared from
    is not read again, and stays as its manifest has it.
    """
    data, source = tree.get("data"), tree.get("source")
    if not isinstance(data, Mapping) or not isinstance(source, Mapping):
        return tree
    data = {**data, "store": _each_path(data.get("store"), changed)}
    if data.get("direct"):
        source = {**source, "files": _each_path(source.get("files"), changed)}
    return tree | {"data": data, "source": source}


def _each_path(value: Any, changed: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _each_path(inside, changed) for key, inside in value.items()}
    if isinstance(value, list):
        return [_each_path(inside, changed) for inside in value]
    return changed(value) if isinstance(value, str) and value and is_local(value) else value


def _absolute(path: str) -> str:
    if os.path.isabs(path):
        return path
    # What ".." leads to depends on links before it.
    return os.path.realpath(path) if ".." in Path(path).parts else str(Path(path).absolute())


def save(workdir: Path, config: ConfigDict, schema: Schema, hot: Mapping[str, Hot]) -> None:
    """Records what the run in `workdir` is; only once it is known to work. Process 0 does.

    Its data is named by paths that mean the same in any working directory.
    """
    with processes.together():
        if processes.is_first():
            _write(workdir / "schema.json", schema.to_json())
            tree = {name: found.to_json() for name, found in hot.items()}
            _write(workdir / "placement.json", tree, indent=None)
            _write(workdir / "config.json", _with_paths(to_plain(config), _absolute))


def mark_finished(workdir: Path, finished: bool) -> None:
    """Records whether the run in `workdir` has come to its end. Process 0 does."""
    with processes.together():
        if processes.is_first():
            mark = workdir / _FINISHED
            mark.touch() if finished else mark.unlink(missing_ok=True)


def is_finished(workdir: Path) -> bool:
    """Whether the run has come to its end, as process 0 sees it."""
    return processes.from_first((workdir / _FINISHED).exists())


def has_checkpoint(workdir: Path) -> bool:
    """Whether a run in `workdir` has got as far as a checkpoint."""
    directory = workdir / "checkpoints"
    return directory.is_dir() and any(path.name.isdecimal() for path in directory.iterdir())


def load_config(workdir: Path) -> ConfigDict:
    """The config that the run in `workdir` was started with."""
    return from_plain(_read(workdir / "config.json"))


def with_store_of_run(config: ConfigDict, workdir: Path) -> ConfigDict:
    """A config that names no data, with the store that the run in `workdir` names, if there is one.

    The store in the workdir is not named, so it is not what this gives.
    """
    if config.data.store or config.data.direct or not (workdir / "config.json").is_file():
        return config
    config = config.copy_and_resolve_references()
    config.data.store = load_config(workdir).data.store
    return config


def load_schema(workdir: Path) -> Schema:
    """The schema that the model in `workdir` was trained on."""
    path = workdir / "schema.json"
    try:
        return Schema.from_json(_read(path))
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: is not a schema that jaxrank wrote: {error}.") from error


def load_placement(workdir: Path) -> dict[str, Hot]:
    """Where the tables of the run in `workdir` lie."""
    path = workdir / "placement.json"
    try:
        return {name: Hot.from_json(tree) for name, tree in _read(path).items()}
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a placement that jaxrank wrote: {error}.") from error
