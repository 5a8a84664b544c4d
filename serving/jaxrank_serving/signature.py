"""The meaning of a bundle: its raw columns, their encodings, the tables and the model."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeGuard

from jaxrank_serving.errors import BundleError

# Of bundles whose outputs have no meaning, by kind.
_MEANINGS = {"binary": "probability", "real": "number", "count": "expected count"}
SOURCES = ("any", "context", "candidate")


@dataclasses.dataclass(frozen=True)
class Output:
    """A prediction.

    kind: of the task: "binary", "real" or "count".
    parent: the task that the probability is conditional on, or "".
    meaning: "probability", "number" or "expected count"; "score" of a task that was trained by
        ranking alone. A score has an order within a request and no calibration.
    """

    name: str
    task: str
    kind: str
    parent: str
    meaning: str


@dataclasses.dataclass(frozen=True)
class Column:
    """A raw column of a request.

    type: of the column in the training data, such as "text", "int64" or "float32".
    is_list: True if cells are lists of values of that type.
    source: "context", "candidate", or "any" of both.
    required: False if a request may omit it. It then has the value `default`.
    now: True if a request that omits it has the time at which it is scored, also if `required`.
    """

    name: str
    type: str
    is_list: bool
    source: str
    required: bool
    default: Any
    now: bool


@dataclasses.dataclass(frozen=True)
class Derived:
    """A column that is computed from others. Its fields are the fields of `features.derived`."""

    name: str
    kind: str
    columns: tuple[str, ...]
    zone: str
    unit: str
    boundaries: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Dense:
    """A number: (x - mean) / std of x or, with `log`, of sign(x) log(1 + |x|). 0 where missing.

    index: of the number in a cell of `length` numbers.
    missing_indicator: True if it is followed by 1 where the value is missing, else 0.
    """

    name: str
    column: str
    index: int
    length: int
    separator: str
    log: bool
    mean: float
    std: float
    missing_indicator: bool


@dataclasses.dataclass(frozen=True)
class Categorical:
    """`length` ids per cell, each with its own vector.

    encoding: "vocabulary", "hash", "integer" or "bucket".
    boundaries: of buckets; empty for other encodings.
    """

    name: str
    table: str
    encoding: str
    length: int
    separator: str
    brackets: str
    salt: str
    boundaries: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Ragged:
    """A list of ids. The fields are the ones of `features.ragged` in jaxrank's config."""

    name: str
    table: str
    encoding: str
    separator: str
    brackets: str
    padding: tuple[str, ...]
    weights: str
    weight_separator: str
    combiner: str
    max_length: int
    on_overlong: str
    keep: str
    salt: str


@dataclasses.dataclass(frozen=True)
class Events:
    """A sequence: ragged features whose n-th ids are of one event of a history.

    features: that the model reads.
    order: of the events in requests, "oldest_first" or "newest_first".
    time: column of the events' times, or "".
    example_time: column of the time of the request, or "". Later events are left out.
    age: name of the feature of the events' ages.
    """

    name: str
    features: tuple[str, ...]
    order: str
    time: str
    example_time: str
    age: str


@dataclasses.dataclass(frozen=True)
class Table:
    """A table: rows `offset` to `offset + rows - 1` of its stack.

    on_bad_id: policy for a row number that is out of range.
    seed: of the hashes of its values in the index.
    """

    name: str
    stack: str
    offset: int
    rows: int
    encoding: str
    on_bad_id: str
    seed: int


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables of one dimension, in one file. A last row of zeros is read where nothing is.

    rows: without the last one.
    dtype: "float32", "bfloat16" or "int8"; int8 has a factor per row in the file `scales`.
    ids: [feature, place] of each vector of the input `<name>_ids`.
    lists: features of the vectors of the input `<name>_lists`.
    sequences: features whose vectors follow those of `ids`, `max_length` places each.
    """

    name: str
    dim: int
    rows: int
    dtype: str
    file: str
    scales: str
    ids: tuple[tuple[str, int], ...]
    lists: tuple[str, ...]
    sequences: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Index:
    """The index from values to rows; see `index.Index`."""

    file: str
    values: int
    bits: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Model:
    """Files of the dense part; "" for one that is absent.

    inputs: names of its inputs, in order.
    """

    onnx: str
    stablehlo: str
    inputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Corrections of calibrated log-odds z per value of a feature: slope * z + offset.

    feature: one id per candidate.
    rows: of the feature's table, ascending, one per value. Other rows have slope 1 and offset 0.
    slopes, offsets: of each row, one number per task. The model reads those of the candidates as
        the inputs `calibration_slopes` and `calibration_offsets`, f32[n, tasks].
    """

    feature: str
    rows: tuple[int, ...]
    slopes: tuple[tuple[float, ...], ...]
    offsets: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class TaskStatistics:
    """Means of the labels and of the scores of a task, None where they are not known.

    metrics: of the scores, such as "auc" and "logloss", as far as they are known.
    """

    task: str
    label_mean: float | None
    score_mean: float | None
    metrics: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FeatureStatistics:
    """Shares of the values of a feature, and the mean number of its ids per example."""

    name: str
    missing: float | None
    unknown: float | None
    mean_length: float | None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of the data that the run was evaluated with, or else was trained with.

    split: of that data.
    rows: of the split.
    scored_rows: number of its first rows that have the score means and the metrics.
    """

    split: str
    rows: int | None
    scored_rows: int | None
    tasks: tuple[TaskStatistics, ...]
    features: tuple[FeatureStatistics, ...]


@dataclasses.dataclass(frozen=True)
class Signature:
    """The content of signature.json.

    columns: of requests.
    derived: columns that features read beside those, in the order in which they are computed.
    time_format: of numbers in columns of times.
    model: files of the dense part.
    missing_texts: texts that stand for a missing value in any text column.
    hash_key: fingerprint of the key of a store with keyed hashes, or "".
    preparation: the sections `features` and `source` of the data, to encode files of it. Empty in
        bundles of format 1.
    origin: the run, the checkpoint and versions.
    calibration: by value. None: there is none, or one map per task, which the model contains.
    """

    outputs: tuple[Output, ...]
    columns: tuple[Column, ...]
    derived: tuple[Derived, ...]
    time_format: str
    dense: tuple[Dense, ...]
    categorical: tuple[Categorical, ...]
    ragged: tuple[Ragged, ...]
    sequences: tuple[Events, ...]
    tables: tuple[Table, ...]
    stacks: tuple[Stack, ...]
    index: Index
    model: Model
    missing_texts: tuple[str, ...]
    hash_key: str
    statistics: Statistics
    preparation: Mapping[str, Any]
    origin: Mapping[str, Any]
    calibration: Calibration | None


def upgraded(tree: Any, version: int) -> Any:
    """Returns a signature with the fields of the current format.

    Args:
        tree: plain data of signature.json.
        version: `format_version` of the bundle. Version 1 had no derived columns, sequences,
            statistics or preparation. Some of version 2 have neither calibration by value nor
            the meaning of outputs. Some of versions 2 and 3 have no metrics.
    """
    if isinstance(tree, dict):
        tree = {"calibration": None, **tree}
        outputs = tree.get("outputs", ())
        if _are_entries(outputs):
            tree["outputs"] = [{"meaning": _MEANINGS.get(str(o.get("kind"))), **o} for o in outputs]
        recorded = tree.get("statistics")
        if isinstance(recorded, dict):
            recorded = tree["statistics"] = {"scored_rows": None, **recorded}
            if _are_entries(tasks := recorded.get("tasks")):
                recorded["tasks"] = [{"metrics": {}, **task} for task in tasks]
    if version > 1 or not isinstance(tree, dict):
        return tree
    absent: dict[str, Any] = {"split": "", "rows": None, "scored_rows": None}
    absent |= {"tasks": [], "features": []}
    added = {"derived": [], "time_format": "", "sequences": [], "preparation": {}}
    result = {**added, "statistics": absent, **tree}
    for field, (name, value) in {
        "columns": ("now", lambda column: False),
        "outputs": ("parent", lambda output: output.get("given")),
    }.items():
        entries = tree.get(field)
        if _are_entries(entries):
            result[field] = [{name: value(entry), **entry} for entry in entries]
    return result


def _are_entries(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)


def parse(tree: Any, where: str = "signature.json") -> Signature:
    """Reads a signature from plain data.

    Raises:
        BundleError: a field is missing or has another type.
    """
    return _parsed(Signature, tree, where)


def _parsed(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin is types.UnionType:  # of a type and None
        return None if value is None else _parsed(typing.get_args(kind)[0], value, where)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        if not isinstance(value, dict) or not hints.keys() <= value.keys():
            raise BundleError(f"{where}: must have the fields {sorted(hints)}: found {value!r:.80}")
        fields = {n: _parsed(hint, value[n], f"{where}.{n}") for n, hint in hints.items()}
        return kind(**fields)  # type: ignore[operator]
    if origin is tuple:
        if not isinstance(value, list):
            raise BundleError(f"{where}: must be a list: found {value!r:.80}")
        inner = typing.get_args(kind)
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise BundleError(f"{where}: must have {len(kinds)} values: found {value!r:.80}")
        parts = zip(kinds, value, strict=True)
        return tuple(_parsed(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(parts))
    if origin is not None:
        kind = dict
    is_valid = type(value) is kind or (kind is float and type(value) is int)
    if not is_valid:
        raise BundleError(f"{where}: must be {kind.__name__}: found {value!r:.80}")
    return value
