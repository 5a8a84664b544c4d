"""The directory of a run: its config, the schema it was trained on, and its data if prepared here.

WORKDIR/config.json  schema.json  metrics.jsonl  tensorboard/  checkpoints/  data/
"""

import json
import os
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxrank.config import differences, from_plain, to_plain
from jaxrank.errors import InputError
from jaxrank.features import Schema


def _read(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: no such file. Is {path.parent} the workdir of a run?")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise InputError(f"{path}: not readable as JSON: {error}.") from error


def _write(path: Path, tree: Any) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(tree, indent=1) + "\n")
    os.replace(partial, path)


def claim(workdir: Path, config: ConfigDict, *, allow_config_change: bool) -> None:
    """Makes `workdir` this run's, or finds that it is.

    Raises:
        InputError: it holds a run of another config, and that was not allowed.
    """
    plain = to_plain(config)
    path = workdir / "config.json"
    if path.is_file() and not allow_config_change:
        changed = differences(_read(path), plain)
        if changed:
            raise InputError(
                f"{workdir}: holds a run of another config; these fields differ:\n  "
                + "\n  ".join(changed)
                + "\nUse another --workdir, or --allow-config-change to go on with the new values."
            )
    workdir.mkdir(parents=True, exist_ok=True)
    _write(path, plain)


def load_config(workdir: Path) -> ConfigDict:
    """The config that the run in `workdir` was started with."""
    return from_plain(_read(workdir / "config.json"))


def save_schema(workdir: Path, schema: Schema) -> None:
    _write(workdir / "schema.json", schema.to_json())


def load_schema(workdir: Path) -> Schema:
    """The schema that the model in `workdir` was trained on."""
    return Schema.from_json(_read(workdir / "schema.json"))
