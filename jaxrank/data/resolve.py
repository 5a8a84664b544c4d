"""The `features` section meets data: patterns become columns, and columns a schema."""

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from jaxrank.data.spec import FeatureSpec, ListSpec, TableSpec, nearest
from jaxrank.errors import InputError
from jaxrank.features import Categorical, Dense, Ragged, Schema, Table, Task


def resolve(spec: FeatureSpec, columns: Sequence[str]) -> FeatureSpec:
    """The spec with an entry of its own for each column of the source that a pattern matches.

    A pattern that holds wildcards passes over the columns that are named elsewhere as a label, a
    mask, a weight, a truth, as weights of a list, or to be kept.

    Raises:
        InputError: a name or pattern matches nothing, or a column is used twice.
    """
    reserved = set(spec.kept_columns)
    for i, task in enumerate(spec.tasks):
        for field in ("label", "mask", "weight", "truth"):
            reserved.add(_exact(getattr(task, field), columns, f"features.tasks[{i}].{field}"))
    for entry in spec.lists:
        reserved.add(_exact(entry.weights, columns, "features.lists: weights"))
    for i, name in enumerate(spec.keep):
        _exact(name, columns, f"features.keep[{i}]")
    _exact(spec.time, columns, "features.time")
    _exact(spec.group, columns, "features.group")
    resolved = dataclasses.replace(
        spec,
        floats=_expand(spec.floats, columns, reserved, "features.floats"),
        ids=_with_tables(_expand(spec.ids, columns, reserved, "features.ids")),
        lists=_with_tables(_expand(spec.lists, columns, reserved, "features.lists")),
    )
    for list_spec in spec.lists:
        if list_spec.weights and len(_match(list_spec.columns, columns, reserved, "")) > 1:
            raise InputError(
                f"features.lists: the weights {list_spec.weights!r} must belong to one column:"
                f" found the columns {list(list_spec.columns)}."
            )
    _ = resolved.tables  # refuses shared tables that disagree
    return resolved


def _exact(name: str, columns: Sequence[str], where: str) -> str:
    if name and name not in columns:
        raise InputError(f"{where}: the data has no column {name!r}{nearest(name, columns, 3)}.")
    return name


def _match(
    patterns: Sequence[str], columns: Sequence[str], reserved: set[str], where: str
) -> list[str]:
    """The columns that any of the patterns matches, in the order of the source."""
    known = set(columns)
    matched: set[str] = set()
    for pattern in patterns:
        if pattern in known:
            matched.add(pattern)
            continue
        free = {c for c in columns if c not in reserved and fnmatch.fnmatchcase(c, pattern)}
        if not free:
            raise InputError(
                f"{where}: {pattern!r} matches no column of the data{nearest(pattern, columns, 3)}."
            )
        matched |= free
    return [c for c in columns if c in matched]


def _expand(
    entries: Sequence[Any], columns: Sequence[str], reserved: set[str], where: str
) -> tuple[Any, ...]:
    owner: dict[str, int] = {}
    expanded = []
    for i, entry in enumerate(entries):
        for column in _match(entry.columns, columns, reserved, f"{where}[{i}].columns"):
            if column in owner:
                raise InputError(
                    f"{where}: a column must be used by one entry: found {column!r} in"
                    f" {where}[{owner[column]}] and {where}[{i}]."
                )
            owner[column] = i
            expanded.append(dataclasses.replace(entry, columns=(column,)))
    return tuple(expanded)


def _with_tables(entries: Sequence[Any]) -> tuple[Any, ...]:
    for entry in entries:
        if not entry.table and "/" in entry.name:
            raise InputError(
                f"features: the column {entry.name!r} must have a table named without '/':"
                " set `table`."
            )
    return tuple(dataclasses.replace(e, table=e.table or e.name) for e in entries)


def build_schema(
    spec: FeatureSpec,
    rows: Mapping[str, int],
    checksums: Mapping[str, str],
    transforms: Mapping[str, tuple[float, float]],
) -> Schema:
    """The schema of a resolved spec.

    Args:
        rows: of each vocabulary, by table; other tables have theirs from the spec.
        checksums: of each vocabulary, by table.
        transforms: mean and deviation, after `log`, of every float that is standardised.
    """
    floats: list[Dense] = []
    for entry in spec.floats:
        floats.append(Dense(entry.name, entry.log, *entry.scale(transforms)))
        if entry.missing_indicator:
            floats.append(Dense(f"{entry.name}:missing"))
    return Schema(
        tasks=tuple(Task(t.name, t.kind) for t in spec.tasks),
        floats=tuple(floats),
        ids=tuple(Categorical(f.name, f.table, f.length) for f in spec.ids),
        lists=tuple(_ragged(f) for f in spec.lists),
        tables=tuple(
            Table(t.name, rows.get(t.name, t.all_rows), t.encoding, _checksum(t, checksums))
            for t in spec.tables
        ),
    )


def _ragged(entry: ListSpec) -> Ragged:
    length = entry.max_length if entry.combiner == "none" else 0
    return Ragged(entry.name, entry.table, entry.combiner, bool(entry.weights), length)


def _checksum(table: TableSpec, vocabularies: Mapping[str, str]) -> str:
    """Of what decides the rows of values: the vocabulary, the salt, or what becomes of bad ids."""
    if table.encoding == "hash":
        return xxhash.xxh3_64_hexdigest(table.salt.encode())
    if table.on_bad_id != "error":
        return xxhash.xxh3_64_hexdigest(table.on_bad_id.encode())
    return vocabularies.get(table.name, "")
