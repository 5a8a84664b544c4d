"""Builds signature.json of a bundle; `jaxrank_serving.signature` describes its fields."""

import dataclasses
import fnmatch
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from jaxrank import json_files
from jaxrank.data.encode.columns import is_list, is_text
from jaxrank.data.spec.derived import DerivedSpec
from jaxrank.data.spec.entries import CategoricalSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.sequences import SequenceSpec, age_features
from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError
from jaxrank.layout import Layout
from jaxrank.validate import nearest

_TYPES = {"float": "float32", "double": "float64", "halffloat": "float16"}


class Requests(NamedTuple):
    """The content of requests.

    context: columns, or patterns of them, that all candidates share. Empty: a request may give any
        column in its context or with its candidates.
    defaults: {column: value} of columns that a request may omit. A text is read as JSON, except
        that a number stays as it is written for a column of text. Empty: a missing value.
    """

    context: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = {}

    @classmethod
    def parse(cls, context: Sequence[str], defaults: Sequence[str]) -> "Requests":
        """Reads the flags --context and --default.

        Raises:
            InputError: a default is not NAME=VALUE.
        """
        values: dict[str, str] = {}
        for text in defaults:
            name, equals, value = text.partition("=")
            if not name or not equals:
                raise InputError(f"--default: must be NAME=VALUE: found {text!r}.")
            values[name] = value
        return cls(tuple(c for text in context for c in text.split(",") if c), values)


def raw_columns(spec: FeatureSpec) -> list[str]:
    """Returns the raw columns that a resolved spec's features and `derived_columns` read."""
    derived = derived_columns(spec)
    names = _read_by_features(spec)
    names += [column for entry in derived for column in entry.columns]
    computed = {entry.name for entry in derived}
    return [name for name in dict.fromkeys(names) if name not in computed]


def derived_columns(spec: FeatureSpec) -> list[DerivedSpec]:
    """Returns the derived columns that a resolved spec's features read, in order."""
    read, result = set(_read_by_features(spec)), []
    for entry in reversed(spec.derived):
        if entry.name in read:
            read |= set(entry.columns)
            result.append(entry)
    return result[::-1]


def _read_by_features(spec: FeatureSpec) -> list[str]:
    names = [entry.column for entry in spec.dense]
    names += [entry.name for entry in spec.categorical] + [entry.name for entry in spec.ragged]
    names += [entry.weights for entry in spec.ragged if entry.weights]
    timed = [sequence for sequence in _sequences(spec) if sequence.time]
    names += [name for sequence in timed for name in (sequence.time, spec.time)]
    computed = age_features(spec.sequences)
    return [name for name in dict.fromkeys(names) if name not in computed]


def _sequences(spec: FeatureSpec) -> list[SequenceSpec]:
    """Returns the sequences of which a feature is read."""
    read = {entry.name for entry in spec.ragged}
    return [sequence for sequence in spec.sequences if read.intersection(sequence.features)]


def _has_request_time(spec: FeatureSpec) -> bool:
    """Returns True if `time` is read only as a time, which that of a request can replace."""
    reading = [entry.kind for entry in derived_columns(spec) if spec.time in entry.columns]
    by_sequences = any(sequence.time for sequence in _sequences(spec))
    is_time = {"hour", "weekday", "age"}.issuperset(reading) and bool(reading or by_sequences)
    others = dataclasses.replace(spec, sequences=())
    return is_time and spec.time not in _read_by_features(others)


def signature(
    layout: Layout, store: Store, spec: FeatureSpec, types: pa.Schema, requests: Requests
) -> dict[str, Any]:
    """Returns the parts of a signature that do not depend on how files were written.

    Args:
        spec: resolved.
        types: of the raw columns.

    Raises:
        InputError: `requests` names a column that no feature reads.
    """
    schema = layout.schema
    scales = {f.name: f for f in schema.dense}
    kinds = {table.name: table.encoding for table in schema.tables}
    nulls = store.spec.source.get("null_values") or ()
    fields = ("name", "length", "separator", "log", "missing_indicator", "column", "index")
    return {
        "columns": _columns(spec, types, requests),
        "derived": [json_files.plain(entry) for entry in derived_columns(spec)],
        "time_format": spec.time_format,
        "dense": [
            {field: getattr(entry, field) for field in fields}
            | {"mean": scales[entry.name].mean, "std": scales[entry.name].std}
            for entry in spec.dense
        ],
        "categorical": [_categorical(e, store, kinds[e.table]) for e in spec.categorical],
        "ragged": [_ragged(entry) for entry in spec.ragged],
        "sequences": [_sequence(entry, spec) for entry in _sequences(spec)],
        "missing_texts": [nulls] if isinstance(nulls, str) else list(nulls),
        "preparation": {
            "features": spec.to_state(),
            "source": {k: v for k, v in store.spec.source.items() if k != "files"},
        },
        "hash_key": store.spec.hash_key or "",
    }


def _columns(spec: FeatureSpec, types: pa.Schema, requests: Requests) -> list[dict[str, Any]]:
    names = raw_columns(spec)
    absent = [("--context", p) for p in requests.context if not fnmatch.filter(names, p)]
    absent += [("--default", name) for name in requests.defaults if name not in names]
    for flag, name in absent:
        raise InputError(
            f"{flag}: must name a column that a feature reads: found {name!r}"
            f"{nearest(name, names, 3)}."
        )
    result = []
    for name in names:
        kind = types.field(name).type
        is_context = any(fnmatch.fnmatchcase(name, pattern) for pattern in requests.context)
        source = "candidate" if requests.context else "any"
        result.append(
            {
                "name": name,
                "type": _type(kind.value_type if is_list(kind) else kind),
                "is_list": is_list(kind),
                "source": "context" if is_context else source,
                "required": name not in requests.defaults,
                "default": _default(requests.defaults.get(name, ""), kind),
                "now": name == spec.time
                and name not in requests.defaults
                and _has_request_time(spec),
            }
        )
    return result


def _default(given: Any, kind: pa.DataType) -> Any:
    """Returns the default of a column; see `Requests`."""
    if not isinstance(given, str):
        return given
    try:
        value = json.loads(given) if given else None
    except ValueError:
        return given
    is_text = not is_list(kind) and _type(kind) in ("text", "binary")
    return given if is_text and isinstance(value, int | float) else value  # also true and false


def _type(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return _type(kind.value_type)
    if is_text(kind) or pa.types.is_null(kind):
        return "text"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "binary"
    if pa.types.is_decimal(kind):
        return "float64"
    return _TYPES.get(str(kind), str(kind))


def _categorical(entry: CategoricalSpec, store: Store, encoding: str) -> dict[str, Any]:
    fields = ("name", "table", "length", "separator", "brackets", "salt")
    edges = entry.edges(store.spec.boundaries).tolist() if encoding == "bucket" else []
    return {field: getattr(entry, field) for field in fields} | {
        "encoding": encoding,
        "boundaries": edges,
    }


def _ragged(entry: Any) -> dict[str, Any]:
    fields = (
        *("name", "table", "encoding", "separator", "brackets", "padding", "weights"),
        *("weight_separator", "combiner", "max_length", "on_overlong", "keep", "salt"),
    )
    return {field: getattr(entry, field) for field in fields}


def _sequence(entry: SequenceSpec, spec: FeatureSpec) -> dict[str, Any]:
    read = [feature.name for feature in spec.ragged]
    return {
        "name": entry.name,
        "features": [name for name in entry.features if name in read],
        "order": entry.order,
        "time": entry.time,
        "example_time": spec.time if entry.time else "",
        "age": entry.age,
    }


def stacks(
    layout: Layout, spec: FeatureSpec, seeds: Mapping[str, int], dtype: str
) -> dict[str, list[dict[str, Any]]]:
    """Returns the parts `tables` and `stacks` of a signature.

    Args:
        seeds: of each table with a vocabulary.
        dtype: of the stored rows.
    """
    schema = layout.schema
    by_name = {table.name: table for table in schema.tables}
    policies = {table.name: table.on_bad_id for table in spec.tables}
    places = [(f.name, place) for f in schema.categorical for place in range(f.length)]
    tables, described = [], []
    for stack in layout.stacks:
        offset = 0
        for name in stack.tables:
            table = by_name[name]
            tables.append(
                {
                    "name": name,
                    "stack": stack.name,
                    "offset": offset,
                    "rows": table.rows,
                    "encoding": table.encoding,
                    "on_bad_id": policies[name],
                    "seed": seeds.get(name, 0),
                }
            )
            offset += table.rows
        described.append(
            {
                "name": stack.name,
                "dim": stack.dim,
                "rows": stack.rows,
                "dtype": dtype,
                "file": f"tables/{stack.name}.bin",
                "scales": f"tables/{stack.name}.scales.bin" if dtype == "int8" else "",
                "ids": [places[i] for i in stack.columns],
                "lists": [schema.ragged[i].name for i in stack.lists],
                "sequences": [schema.ragged[i].name for i in stack.sequences],
            }
        )
    return {"tables": tables, "stacks": described}
