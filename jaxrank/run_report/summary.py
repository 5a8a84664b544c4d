"""WORKDIR/summary.json: everything about a finished run that its report shows."""

import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxrank
from jaxrank import json_files
from jaxrank.config_files import to_plain
from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation.report import Result
from jaxrank.features import Schema
from jaxrank.layout import ReplicatedRows

_NAME = "summary.json"
_LARGE = ("mergeable", "list_lengths")  # parts of the statistics that no reader needs
# Measurements of a command that trained. One that only reports the result again keeps them.
_OF_TRAINING = ("seconds", "phase_seconds", "examples_per_second", "trained_steps")


def write(
    directory: Path,
    result: Result,
    *,
    config: Any,
    store: Store,
    tables: list[dict[str, Any]],
    devices: str,
    description: str,
) -> None:
    """Writes the summary of a run.

    Args:
        directory: of the run.
        result: of the command that finished the run.
        config: with a value in every field.
        store: the data of the run.
        tables: see `describe_tables`.
        devices: their number and kind.
        description: model, tables and data as text.

    Raises:
        RunError: the file cannot be written.
    """
    shown = json_files.plain(result)
    earlier = read(directory)
    if earlier and not result.trained_steps:
        shown |= {n: earlier["result"][n] for n in _OF_TRAINING if n in earlier["result"]}
    tree = {
        "version": jaxrank.__version__,
        "finished": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "result": shown,
        "description": description,
        "devices": devices,
        "data": {"store": str(store.path), "splits": split_statistics(store)},
        "tables": tables,
        "config": to_plain(config),
    }
    try:
        json_files.write(directory / _NAME, json_files.plain(tree, non_finite="null"))
    except OSError as error:
        raise RunError(f"{directory / _NAME}: cannot be written: {error}.") from error


def read(directory: Path) -> dict[str, Any] | None:
    """Reads the summary of a run; None if the run has none.

    Raises:
        InputError: the file is damaged.
    """
    path = directory / _NAME
    tree = json_files.read(path) if path.is_file() else None
    if tree:
        for name in ("result", "data", "config"):
            if not isinstance(tree.get(name, ""), dict | None):
                raise InputError(
                    f"{path}: must have an object `{name}`, as jaxrank wrote it: found"
                    f" {tree.get(name)!r}. Delete the file to score the run again."
                )
    return tree


def split_statistics(store: Store) -> dict[str, Any]:
    """Returns the statistics of each split, without the parts that only merging needs."""
    return {
        name: {k: v for k, v in split.statistics.items() if k not in _LARGE}
        for name, split in store.splits.items()
    }


def describe_tables(
    schema: Schema,
    hot: Mapping[str, ReplicatedRows],
    coverage: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Returns the rows of each table, and how many of them every device has.

    Args:
        hot: of each stack; see `workdir.files.load_placement`.
        coverage: of the tables that started from vectors; see `workdir.files.load_coverage`.
    """
    copies: Counter[str] = Counter()
    for rows in hot.values():
        copies.update(rows.hot_rows[: rows.replicated])
        copies.update({t.name: t.rows for t in schema.tables if t.name in rows.replicated_tables})
    return [
        {"table": table.name, "rows": table.rows, "replicated_rows": copies[table.name]}
        | ({"init_from": coverage[table.name]} if table.name in coverage else {})
        for table in schema.tables
    ]
