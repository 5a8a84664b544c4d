"""The directory of a run: its config, its schema, and its data if it was prepared for this run.

WORKDIR/config.json  schema.json  placement.json  code.json  init_from.json
metrics.jsonl  tensorboard/  checkpoints/  calibration/  data/  profile/  follow/  damaged/
debug/  evaluations/  summary.json  report.html  finished
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrank import json_files, renames, validate
from jaxrank.config import FREE, default
from jaxrank.config_files import code_names, differences, from_plain, model_name, to_plain
from jaxrank.data.files import is_local
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.layout import ReplicatedRows
from jaxrank.runtime import processes
from jaxrank.workdir import user_code

_FINISHED = "finished"
_COVERAGE = "init_from.json"


def directory(workdir: str | Path) -> Path:
    """Returns the absolute path of `--workdir`.

    Raises:
        InputError: it is a URL, which would become a directory on each machine's local disk.
    """
    # A Path has dropped one of the two slashes.
    if "://" in str(workdir) or re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/", str(workdir)):
        raise InputError(
            "--workdir: must be a directory on a file system that all processes share:"
            f" found the URL {workdir}. Mount a shared file system, for example NFS, and pass a"
            " path on it. Prepared data may be at a URL: --config.data.store."
        )
    return Path(os.path.abspath(workdir))


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"{path}: no such file. Check that {path.parent} is the workdir of a run.")
    return json_files.read(path)


def check_config(workdir: Path, config: ConfigDict) -> None:
    """Rejects a workdir with a run of another config.

    Paths are compared after they are resolved. FREE fields may differ. Fields that the version of
    the run did not have must have their default.

    Raises:
        InputError: names each field that differs.
    """
    path = workdir / "config.json"
    with processes.together():  # a relative path may differ between processes
        if not path.is_file():
            return
        old, new = (
            _map_paths(_filled(tree, to_plain(default(model_name(tree)))), os.path.realpath)
            for tree in (renames.config(_read(path)), to_plain(config))
        )
        lines = differences(old, new)
        changed = [line for line in lines if line.partition(":")[0] not in FREE]
        if changed:
            raise InputError(
                f"{workdir}: must hold a run of the same config: these fields differ:\n  "
                + "\n  ".join(changed)
                + "\nUse another --workdir, or --allow-config-change to continue with the new"
                " values."
            )


def _filled(tree: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a plain config with missing fields filled from another."""
    filled = {**others, **tree}
    for key, value in others.items():
        if isinstance(value, Mapping) and isinstance(filled[key], Mapping):
            filled[key] = _filled(filled[key], value)
    return filled


def _map_paths(tree: dict[str, Any], changed: Callable[[str], str]) -> dict[str, Any]:
    """Applies a function to the local paths of the data that a run reads in a plain config.

    These are the paths of pre-trained vectors and of the store or, with data.direct, of the source
    files. The source of a prepared store is not read again, and its paths must equal those in the
    manifest.
    """
    data, source = tree.get("data"), tree.get("source")
    if not isinstance(data, Mapping) or not isinstance(source, Mapping):
        return tree
    data = {**data, "store": _each_path(data.get("store"), changed)}
    embedding = dict(tree.get("embedding") or {})
    if "init_from" in embedding:
        embedding["init_from"] = _each_path(embedding["init_from"], changed)
        tree = tree | {"embedding": embedding}
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
    # The target of ".." depends on symbolic links before it.
    return os.path.realpath(path) if ".." in Path(path).parts else str(Path(path).absolute())


def save(
    workdir: Path, config: ConfigDict, schema: Schema, hot: Mapping[str, ReplicatedRows]
) -> None:
    """Writes the config, schema and placement of a run, in process 0.

    Call it after everything has been built successfully. Paths of the data are written in a form
    that does not depend on the working directory.
    """
    with processes.together():
        if processes.is_first():
            json_files.write(workdir / "schema.json", schema)
            tree = {name: rows.to_state() for name, rows in hot.items()}
            json_files.write(workdir / "placement.json", tree, indent=None)
            plain = _map_paths(to_plain(config), _absolute)
            user_code.save(workdir, code_names(plain))
            json_files.write(workdir / "config.json", plain)


def mark_finished(workdir: Path, finished: bool) -> None:
    """Records in process 0 whether the run in `workdir` has finished."""
    with processes.together():
        if processes.is_first():
            mark = workdir / _FINISHED
            mark.touch() if finished else mark.unlink(missing_ok=True)


def is_finished(workdir: Path) -> bool:
    """Returns True if the run has finished, as process 0 sees it."""
    return processes.broadcast_value((workdir / _FINISHED).exists())


def has_checkpoint(workdir: Path) -> bool:
    """Returns True if a run in `workdir` has saved a checkpoint."""
    directory = workdir / "checkpoints"
    return directory.is_dir() and any(path.name.isdecimal() for path in directory.iterdir())


def load_config(workdir: Path) -> ConfigDict:
    """Loads the config of the run in `workdir`.

    Raises:
        InputError: there is no run, its model is not registered, or a field has another type.
    """
    path = workdir / "config.json"
    tree = renames.config(_read(path))
    try:
        return from_plain(tree)
    except InputError as error:
        raise InputError(f"{path}: {error}{user_code.advice(workdir)}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: must be the config of a run, as saved: {error}") from error


def find_config(workdir: str | Path) -> ConfigDict | None:
    """Loads the config of the run in `workdir`. Returns None without a run or a workdir."""
    is_run = workdir and (directory(workdir) / "config.json").is_file()
    return load_config(directory(workdir)) if is_run else None


def load_schema(workdir: Path) -> Schema:
    """Loads the schema that the model in `workdir` was trained on."""
    path = workdir / "schema.json"
    tree = renames.features(_read(path))
    try:
        return validate.parse(Schema, tree, "")
    except InputError as error:
        raise InputError(f"{path}: must be a schema written by jaxrank: {error}") from error


def load_placement(workdir: Path) -> dict[str, ReplicatedRows]:
    """Loads the placement of the tables of the run in `workdir`."""
    path = workdir / "placement.json"
    try:
        return {
            name: ReplicatedRows.from_state(tree)
            for name, tree in renames.placement(_read(path)).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: must be a placement written by jaxrank: {error}.") from error


def save_coverage(workdir: Path, coverage: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the coverage of the tables that start from pre-trained vectors, in process 0.

    Args:
        coverage: by table; see `warm_start.pretrained`. Empty: there are none.
    """
    path = workdir / _COVERAGE
    if coverage:
        json_files.write(path, coverage)
    else:
        path.unlink(missing_ok=True)


def load_coverage(workdir: Path) -> dict[str, dict[str, Any]]:
    """Loads the result of `save_coverage`."""
    path = workdir / _COVERAGE
    return _read(path) if path.is_file() else {}
