"""The directory of a run: its config, the schema it was trained on, and its data if prepared here.

WORKDIR/config.json  schema.json  placement.json  metrics.jsonl  tensorboard/  checkpoints/  data/
profile/  follow/  damaged/  debug/  finished
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrank import json_files, renames, validate
from jaxrank.config import FREE, default
from jaxrank.config_files import differences, from_plain, model_name, to_plain
from jaxrank.data.files import is_local
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.layout import ReplicatedRows
from jaxrank.runtime import processes

_FINISHED = "finished"


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
    return json_files.read(path)


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
        old, new = (
            _with_paths(_filled(tree, to_plain(default(model_name(tree)))), os.path.realpath)
            for tree in (renames.config(_read(path)), to_plain(config))
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


def save(
    workdir: Path, config: ConfigDict, schema: Schema, hot: Mapping[str, ReplicatedRows]
) -> None:
    """Records what the run in `workdir` is; only once it is known to work. Process 0 does.

    Its data is named by paths that mean the same in any working directory.
    """
    with processes.together():
        if processes.is_first():
            json_files.write(workdir / "schema.json", schema)
            tree = {name: found.to_state() for name, found in hot.items()}
            json_files.write(workdir / "placement.json", tree, indent=None)
            plain = _with_paths(to_plain(config), _absolute)
            json_files.write(workdir / "config.json", plain)


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
    return from_plain(renames.config(_read(workdir / "config.json")))


def store_of_run(workdir: Path) -> str:
    """The store that the run in `workdir` names; empty if there is no run, or it names none."""
    return load_config(workdir).data.store if (workdir / "config.json").is_file() else ""


def load_schema(workdir: Path) -> Schema:
    """The schema that the model in `workdir` was trained on."""
    path = workdir / "schema.json"
    tree = renames.features(_read(path))
    try:
        return validate.parse(Schema, tree, "")
    except InputError as error:
        raise InputError(f"{path}: is not a schema that jaxrank wrote: {error}") from error


def load_placement(workdir: Path) -> dict[str, ReplicatedRows]:
    """Where the tables of the run in `workdir` lie."""
    path = workdir / "placement.json"
    try:
        return {
            name: ReplicatedRows.from_state(tree)
            for name, tree in renames.placement(_read(path)).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: is not a placement that jaxrank wrote: {error}.") from error
