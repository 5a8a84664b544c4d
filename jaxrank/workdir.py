"""The directory of a run: its config, the schema it was trained on, and its data if prepared here.

WORKDIR/config.json  schema.json  metrics.jsonl  tensorboard/  checkpoints/  data/
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrank.config import differences, from_plain, to_plain
from jaxrank.errors import InputError
from jaxrank.features import Schema


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


def _write(path: Path, tree: Any) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(tree, indent=1) + "\n")
    os.replace(partial, path)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes `workdir`, and holds it against every other process while the context lasts.

    Raises:
        InputError: it is not a directory, or another process trains in it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"--workdir: {workdir} must be a directory.") from error
    with open(workdir / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{workdir}: another process trains in this workdir.") from error
        yield


def check_config(workdir: Path, config: ConfigDict) -> None:
    """Refuses a workdir that holds a run of another config.

    Raises:
        InputError: naming each field that differs.
    """
    path = workdir / "config.json"
    changed = differences(_read(path), to_plain(config)) if path.is_file() else []
    if changed:
        raise InputError(
            f"{workdir}: holds a run of another config; these fields differ:\n  "
            + "\n  ".join(changed)
            + "\nUse another --workdir, or --allow-config-change to go on with the new values."
        )


def save(workdir: Path, config: ConfigDict, schema: Schema) -> None:
    """Records what the run in `workdir` is; only once it is known to work."""
    _write(workdir / "config.json", to_plain(config))
    _write(workdir / "schema.json", schema.to_json())


def load_config(workdir: Path) -> ConfigDict:
    """The config that the run in `workdir` was started with."""
    return from_plain(_read(workdir / "config.json"))


def load_schema(workdir: Path) -> Schema:
    """The schema that the model in `workdir` was trained on."""
    path = workdir / "schema.json"
    try:
        return Schema.from_json(_read(path))
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: is not a schema that jaxrank wrote: {error}.") from error
