"""Resolves the `features` section against data: patterns become columns, and columns a schema."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import xxhash

from jaxrank import json_files
from jaxrank.data.spec.derived import UnknownColumn, check_column
from jaxrank.data.spec.entries import COLUMNS_OF_TASKS, CategoricalSpec, DenseSpec, RaggedSpec
from jaxrank.data.spec.features import FeatureSpec, TableSpec
from jaxrank.data.spec.sequences import SequenceSpec, age_features, with_ages
from jaxrank.errors import InputError
from jaxrank.features import (
    RESERVED_ROWS,
    Categorical,
    Dense,
    Ragged,
    Schema,
    Table,
    Task,
    indicator_of,
)
from jaxrank.validate import nearest

_MAX_TABLE_BYTES = 200  # of file systems with 255, without ends of names
_MAX_SHOWN = 80  # characters of a name


def resolve(spec: FeatureSpec, columns: Sequence[str], unread: Collection[str] = ()) -> FeatureSpec:
    """Returns the spec with a separate entry for each column of the source that a pattern matches.

    A pattern with wildcards skips the columns that a task names, weights of lists, kept columns,
    and columns that another section names without wildcards. A pattern of only wildcards, such as
    "*" or "[a-z]*", takes only columns that no other entry takes, and as ids none that a derived
    number or time is computed from. Buckets may share their columns with floats:
    they neither reserve columns nor skip those that other sections name.

    Args:
        unread: further columns to skip.

    Raises:
        InputError: a name or pattern matches nothing, or a column is used twice.
    """
    computed = age_features(spec.sequences)
    columns = [name for name in columns if name not in computed]
    reserved = {*spec.kept_columns, *unread}
    for i, task in enumerate(spec.tasks):
        for field in COLUMNS_OF_TASKS:
            reserved.add(_exact(getattr(task, field), columns, f"features.tasks[{i}].{field}"))
    for entry in spec.ragged:
        reserved.add(_exact(entry.weights, columns, "features.ragged: weights"))
    for i, sequence in enumerate(spec.sequences):
        reserved.add(_exact(sequence.time, columns, f"features.sequences[{i}].time"))
    for i, name in enumerate(spec.keep):
        _exact(name, columns, f"features.keep[{i}]")
    _exact(spec.time, columns, "features.time")
    _exact(spec.group, columns, "features.group")
    ragged = [entry for entry in spec.ragged if not computed & set(entry.columns)]
    sections = {"dense": spec.dense, "categorical": spec.categorical, "ragged": ragged}
    # The ids of a cross may be features too. Numbers and times that others read are no ids.
    computed_from = {c for d in spec.derived if d.kind != "cross" for c in d.columns}
    claims = _Claims(sections, columns, computed_from)
    floats, ids, lists = (
        _expand(entries, columns, reserved, section, claims)
        for section, entries in sections.items()
    )
    lists = with_ages(spec.sequences, _set_tables(lists))
    resolved = dataclasses.replace(spec, dense=floats, categorical=_set_tables(ids), ragged=lists)
    for list_spec in spec.ragged:
        shared = [e for e in lists if e.weights and e.weights == list_spec.weights]
        if list_spec.weights and len(shared) > 1:
            raise InputError(
                f"features.ragged: the weights {list_spec.weights!r} must belong to one column:"
                f" found the columns {list(list_spec.columns)}."
            )
    _check_labels(spec, resolved)
    _ = resolved.tables  # rejects shared tables with conflicting settings
    return resolved


def _check_labels(spec: FeatureSpec, resolved: FeatureSpec) -> None:
    """Raises InputError if a label is also a feature, which a model would only copy."""
    labels = {task.label: task.name for task in spec.tasks if task.label}
    for section in ("dense", "categorical", "ragged"):
        for entry in getattr(resolved, section):
            if entry.columns[0] in labels:
                raise InputError(
                    f"features.{section}: a feature must be known before the label: found"
                    f" {entry.columns[0]!r}, the label of task {labels[entry.columns[0]]!r}. Remove"
                    " it."
                )


def resolve_stored(spec: FeatureSpec, schema: Schema, stored: Schema) -> FeatureSpec:
    """Resolves a spec as for the preparation of a store, without its source.

    Args:
        schema: the features of the result.
        stored: of the store, which has more features than `schema` if a run left some out.
    """
    both = schema, stored
    columns = [f.name for s in both for part in (s.dense, s.categorical, s.ragged) for f in part]
    columns += [re.sub(r"\[\d+\]$", "", f.name) for s in both for f in s.dense]  # of vectors
    columns += [getattr(task, field) for task in spec.tasks for field in COLUMNS_OF_TASKS]
    columns += [*(entry.weights for entry in spec.ragged), *spec.kept_columns]
    columns += [sequence.time for sequence in spec.sequences]
    resolved = resolve(spec, [name for name in dict.fromkeys(columns) if name])
    floats = _order_entries(resolved.dense, schema.dense)
    # Indicators follow their floats in a schema, and a pattern may have matched them.
    indicators = {indicator_of(entry.name) for entry in floats if entry.missing_indicator}
    return dataclasses.replace(
        resolved,
        dense=take_transforms(
            tuple(entry for entry in floats if entry.name not in indicators), stored
        ),
        categorical=_order_entries(resolved.categorical, schema.categorical),
        ragged=_order_entries(resolved.ragged, schema.ragged),
    )


def take_transforms(dense: Sequence[DenseSpec], stored: Schema) -> tuple[DenseSpec, ...]:
    """Returns resolved entries, of which open ones have the transform of the stored feature."""
    features = {feature.name: feature for feature in stored.dense}
    return tuple(e.as_stored(features[e.name]) if e.name in features else e for e in dense)


def sort_features(spec: FeatureSpec, schema: Schema) -> FeatureSpec:
    """Sorts a resolved spec's features as in a schema, with other features at the end.

    A model reads features by position, but files may have their columns in any order.
    """

    def ordered(entries: Sequence[Any], features: Sequence[Any]) -> tuple[Any, ...]:
        place = {feature.name: i for i, feature in enumerate(features)}
        return tuple(sorted(entries, key=lambda entry: place.get(entry.name, len(place))))

    return dataclasses.replace(
        spec,
        dense=ordered(spec.dense, schema.dense),
        categorical=ordered(spec.categorical, schema.categorical),
        ragged=ordered(spec.ragged, schema.ragged),
    )


def _order_entries(entries: Sequence[Any], features: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the entry of each feature that has one."""
    by_name = {entry.name: entry for entry in entries}
    return tuple(by_name[f.name] for f in features if f.name in by_name)


def _exact(name: str, columns: Sequence[str], where: str) -> str:
    if name:
        check_column(name, columns, where)
    return name


class _Claims:
    """The columns that the entries of all sections take by name or by a pattern with letters.

    Args:
        computed_from: numbers and times that derived columns are computed from. A pattern of only
            wildcards does not take them as ids.
    """

    def __init__(
        self,
        sections: Mapping[str, Sequence[Any]],
        columns: Sequence[str],
        computed_from: Collection[str],
    ):
        known = set(columns)
        self._computed_from = set(computed_from)
        self._named: dict[str, set[str]] = {}
        self._matched: list[tuple[Any, set[str]]] = []
        for section, entries in sections.items():
            claiming = [e for e in entries if not _is_bucket(e)]
            self._named[section] = {c for e in claiming for c in e.columns if c in known}
            for entry in claiming:
                patterns = [p for p in entry.columns if not _is_catch_all(p)]
                matches = {c for p in patterns for c in columns if c == p or fnmatchcase(c, p)}
                self._matched.append((entry, matches))

    def other_columns(self, section: str, entry: Any, pattern: str) -> set[str]:
        """Returns the columns that an entry's wildcard pattern leaves to other entries."""
        if _is_bucket(entry):
            return set()
        others = [names for other, names in self._named.items() if other != section]
        if _is_catch_all(pattern):
            others += [c for e, c in self._matched if e is not entry]
            if section != "dense":
                others.append(self._computed_from)
        return set().union(*others)


def _is_bucket(entry: Any) -> bool:
    return isinstance(entry, CategoricalSpec) and entry.encoding == "bucket"


def _is_catch_all(pattern: str) -> bool:
    return not re.sub(r"\[.[^\]]*\]", "", pattern).strip("*?")


def _match(
    patterns: Sequence[str],
    columns: Sequence[str],
    reserved: set[str],
    where: str,
    passed_over: Callable[[str], set[str]],
) -> list[str]:
    """Returns the columns that match any of the patterns, in the order of the source."""
    known = set(columns)
    matched: set[str] = set()
    for pattern in patterns:
        if pattern in known:
            matched.add(pattern)
            continue
        not_free = reserved | passed_over(pattern)
        free = {c for c in columns if c not in not_free and fnmatchcase(c, pattern)}
        if not free:
            taken = [c for c in columns if c in not_free and fnmatchcase(c, pattern)]
            why = f" that no other field names: found {taken}." if taken else ""
            raise UnknownColumn(
                f"{where}: {pattern!r} matches no column of the data"
                f"{why or nearest(pattern, columns, 3) + '.'}"
            )
        matched |= free
    return [c for c in columns if c in matched]


def _expand(
    entries: Sequence[Any],
    columns: Sequence[str],
    reserved: set[str],
    section: str,
    claims: _Claims,
) -> tuple[Any, ...]:
    where = f"features.{section}"
    owner: dict[str, int] = {}
    expanded = []
    for i, entry in enumerate(entries):
        passed_over = functools.partial(claims.other_columns, section, entry)
        field = f"{where}[{i}].columns"
        for column in _match(entry.columns, columns, reserved, field, passed_over):
            if column in owner:
                raise InputError(
                    f"{where}: a column must be used by one entry: found {column!r} in"
                    f" {where}[{owner[column]}] and {where}[{i}]."
                )
            owner[column] = i
            length = entry.length if isinstance(entry, DenseSpec) else 1
            names = [column] if length == 1 else [f"{column}[{k}]" for k in range(length)]
            expanded += [dataclasses.replace(entry, columns=(name,)) for name in names]
    return tuple(expanded)


def _fault_of_table(name: str) -> str:
    """Returns what a name must be to name the file of a vocabulary, "" if it can."""
    if "/" in name:
        return "has no '/'"
    if "\0" in name or name.encode(errors="replace").decode() != name:
        return "has only letters of files"
    if len(name.encode()) > _MAX_TABLE_BYTES:
        return f"has at most {_MAX_TABLE_BYTES} bytes"
    return ""


def _set_tables(entries: Sequence[Any]) -> tuple[Any, ...]:
    for entry in entries:
        if fault := _fault_of_table(entry.table or entry.name):
            raise InputError(
                f"features: the column {entry.name[:_MAX_SHOWN]!r} must have a table whose name"
                f" {fault}: set `table`."
            )
    return tuple(dataclasses.replace(e, table=e.table or e.name) for e in entries)


def build_schema(
    spec: FeatureSpec,
    rows: Mapping[str, int],
    checksums: Mapping[str, str],
    transforms: Mapping[str, tuple[float, float]],
    boundaries: Mapping[str, np.ndarray] | None = None,
) -> Schema:
    """Returns the schema of a resolved spec.

    Args:
        rows: of each vocabulary, by table. Other tables take them from the spec.
        checksums: of each vocabulary, by table.
        transforms: mean and deviation, after `log`, of every standardised float.
        boundaries: of every feature with fitted buckets, by name.
    """
    fitted = boundaries or {}
    edges = {f.table: f.edges(fitted) for f in spec.categorical if f.boundaries or f.name in fitted}
    tables = spec.tables
    floats: list[Dense] = []
    for entry in spec.dense:
        floats.append(Dense(entry.name, entry.log, *entry.scale(transforms)))
        if entry.missing_indicator:
            floats.append(Dense(indicator_of(entry.name)))
    return Schema(
        tasks=tuple(Task(t.name, t.kind, t.is_shifted) for t in spec.tasks),
        dense=tuple(floats),
        categorical=tuple(Categorical(f.name, f.table, f.length) for f in spec.categorical),
        ragged=tuple(_ragged(f, spec.sequences) for f in spec.ragged),
        tables=tuple(
            Table(t.name, _rows(t, rows, edges), t.encoding, _checksum(t, checksums, edges))
            for t in tables
        ),
    )


def provisional_schema(spec: FeatureSpec) -> Schema:
    """Returns the schema of a resolved spec before fitting.

    Tables have names, but vocabularies have no values yet.
    """
    rows = {t.name: RESERVED_ROWS + 1 for t in spec.tables if t.encoding == "vocabulary"}
    transforms = {f.name: (0.0, 1.0) for f in spec.dense}
    boundaries = {f.name: np.zeros(1) for f in spec.categorical if f.buckets}
    return build_schema(spec, rows, {}, transforms, boundaries)


def _ragged(entry: RaggedSpec, sequences: Sequence[SequenceSpec]) -> Ragged:
    length = entry.max_length if entry.combiner == "none" else 0
    names = [sequence.name for sequence in sequences if entry.name in sequence.features]
    return Ragged(
        entry.name, entry.table, entry.combiner, entry.is_weighted, length, "".join(names)
    )


def _rows(
    table: TableSpec, vocabularies: Mapping[str, int], edges: Mapping[str, np.ndarray]
) -> int:
    if table.name in edges:
        return RESERVED_ROWS + len(edges[table.name]) + 1
    return vocabularies.get(table.name, table.all_rows)


def _checksum(
    table: TableSpec, vocabularies: Mapping[str, str], edges: Mapping[str, np.ndarray]
) -> str:
    """Returns a checksum of everything that determines the rows of values.

    That is the vocabulary, the boundaries, the salts of the table's features, or the policy for
    invalid ids.
    """
    if table.name in edges:
        return xxhash.xxh3_64_hexdigest(edges[table.name].astype("<f4").tobytes())
    if table.encoding == "hash":
        is_shared = len(set(table.salts)) == 1
        text = table.salts[0] if is_shared else json_files.to_text(table.salts)
        return xxhash.xxh3_64_hexdigest(text.encode())
    if table.on_bad_id != "error":
        return xxhash.xxh3_64_hexdigest(table.on_bad_id.encode())
    return vocabularies.get(table.name, "")


def shared_salt(spec: FeatureSpec, table: Table) -> str | None:
    """Returns the salt of a hashed table, None if its features have different ones.

    Args:
        spec: a section, resolved or not.
    """
    entries: list[CategoricalSpec | RaggedSpec] = [*spec.categorical, *spec.ragged]
    salts = sorted({entry.salt for entry in entries})
    matching = (s for s in salts if xxhash.xxh3_64_hexdigest(s.encode()) == table.checksum)
    return next(matching, None)


def num_numbered(table: Table) -> int:
    """Returns the number of rows of a table of row numbers, without the row for invalid ids."""
    has_shared_row = table.checksum == xxhash.xxh3_64_hexdigest(b"oov")
    return table.rows - has_shared_row
