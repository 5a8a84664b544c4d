"""The config's `features` section: which columns are labels, floats, ids and lists, and how each
is encoded.

`FeatureSpec.from_config` checks the section by itself; `resolve.resolve` puts the columns of a
source in place of the patterns.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxrank.errors import InputError
from jaxrank.features import RESERVED_ROWS

ENCODINGS = ("vocabulary", "hash", "integer")
BAD_ID_POLICIES = ("error", "oov", "hash", "clip")
_MAX_ROWS = 2**31 - 1  # rows are int32, and the largest is PAD

Entry = TypeVar("Entry")


def _one_of(default: str, choices: Sequence[str]) -> Any:
    return dataclasses.field(default=default, metadata={"choices": tuple(choices)})


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A label column of 0, 1 or empty, with what may go with it.

    mask: a column that is 0 where the label is unknown and 1 where it is known.
    weight: a column with each example's weight for this task.
    truth: a column with the planted probability of generated data.
    """

    name: str
    label: str
    kind: str = _one_of("binary", ["binary"])
    mask: str = ""
    weight: str = ""
    truth: str = ""


@dataclasses.dataclass(frozen=True)
class FloatSpec:
    """Float columns.

    log: sign(x) log(1 + |x|).
    standardize: minus the mean, over the deviation, of the training split, after `log`.
    missing_indicator: a second column "<name>:missing" that is 1 where there was no value.
    """

    columns: tuple[str, ...]
    log: bool = False
    standardize: bool = False
    missing_indicator: bool = False

    @property
    def name(self) -> str:
        return self.columns[0]

    def scale(self, transforms: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        """What is subtracted and then divided by, given what was learned of each column.

        A column of one value has deviation 0 and is divided by 1.
        """
        mean, std = transforms[self.name] if self.standardize else (0.0, 1.0)
        return float(mean), float(std) if std > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class IdSpec:
    """Columns with a fixed number of ids.

    table: the embedding table; empty for one of the column's own name.
    min_count: values seen less often in the training split are unknown (vocabulary).
    rows: of the table, with the two reserved ones (hash) or as the data numbers them (integer).
    length: ids in each cell; in a text column they stand between `separator`s.
    salt: goes before each value when it is hashed.
    on_bad_id: what becomes of a whole number, of any size, that is none of the `rows` (integer).
        error: the preparation stops; oov: all share one more row, the table's last; hash: its row
        is a hash of it; clip: the first row if it is negative, else the last.
    """

    columns: tuple[str, ...]
    table: str = ""
    encoding: str = _one_of("vocabulary", ENCODINGS)
    min_count: int = 1
    rows: int = 0
    length: int = 1
    separator: str = ""
    salt: str = ""
    on_bad_id: str = _one_of("error", BAD_ID_POLICIES)

    @property
    def name(self) -> str:
        return self.columns[0]


@dataclasses.dataclass(frozen=True)
class ListSpec:
    """Columns with a list of ids of any length; `IdSpec` has the fields that are not here.

    weights: a column with as many numbers as there are ids.
    combiner: how a list's vectors become one; none: they do not, and each of the `max_length`
        places has a vector of its own.
    max_length: of a list, 0 for no limit; `on_overlong` says what becomes of a longer one.
    """

    columns: tuple[str, ...]
    table: str = ""
    separator: str = "|"
    weights: str = ""
    combiner: str = _one_of("mean", ["sum", "mean", "sqrtn", "none"])
    max_length: int = 0
    on_overlong: str = _one_of("error", ["error", "truncate"])
    encoding: str = _one_of("vocabulary", ENCODINGS)
    min_count: int = 1
    rows: int = 0
    salt: str = ""
    on_bad_id: str = _one_of("error", BAD_ID_POLICIES)

    @property
    def name(self) -> str:
        return self.columns[0]


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A table and how values become its rows; `rows` is what the config says."""

    name: str
    encoding: str
    min_count: int
    rows: int
    salt: str
    on_bad_id: str

    @property
    def all_rows(self) -> int:
        """`rows`, and under "oov" the one behind them that all bad ids share."""
        return self.rows + (self.on_bad_id == "oov")


# What features that share a table must agree on.
_OF_TABLES = ("encoding", "min_count", "rows", "salt", "on_bad_id")


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """The `features` section. After `resolve` each entry has exactly one column, and a table."""

    tasks: tuple[TaskSpec, ...]
    floats: tuple[FloatSpec, ...] = ()
    ids: tuple[IdSpec, ...] = ()
    lists: tuple[ListSpec, ...] = ()
    keep: tuple[str, ...] = ()
    time: str = ""
    group: str = ""

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> "FeatureSpec":
        """The section, checked.

        Raises:
            InputError: an unknown or missing field, a wrong type, a value that cannot be.
        """
        spec = _parse(cls, section, "features")
        if not spec.tasks:
            raise InputError("features.tasks: must have at least one task: found none.")
        _check_tasks(spec)
        for kind in ("floats", "ids", "lists"):
            for i, entry in enumerate(getattr(spec, kind)):
                where = f"features.{kind}[{i}]"
                if not entry.columns:
                    raise InputError(f"{where}.columns: must name a column: found none.")
                if not isinstance(entry, FloatSpec):
                    _check_encoding(entry, where)
        return spec

    def to_config(self) -> dict[str, Any]:
        """The section as plain data, with every default filled in."""
        tree = _plain(dataclasses.asdict(self))
        assert isinstance(tree, dict)
        return tree

    @property
    def kept_columns(self) -> tuple[str, ...]:
        """What is passed through to predictions: `keep`, `time` and `group`, each once."""
        return tuple(dict.fromkeys(c for c in (*self.keep, self.time, self.group) if c))

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The tables of a resolved spec, in the order of their first feature.

        Raises:
            InputError: two features that share a table encode it differently.
        """
        found: dict[str, tuple[TableSpec, str]] = {}
        entries: list[IdSpec | ListSpec] = [*self.ids, *self.lists]
        for entry in entries:
            fields = {field: getattr(entry, field) for field in _OF_TABLES}
            table = TableSpec(entry.table, **fields)
            first, first_name = found.setdefault(entry.table, (table, entry.name))
            for field in _OF_TABLES:
                if getattr(first, field) != getattr(table, field):
                    raise InputError(
                        f"features: {first_name} and {entry.name} share the table"
                        f" {entry.table!r}, so {field} must be the same: found"
                        f" {getattr(first, field)!r} and {getattr(table, field)!r}."
                    )
        return tuple(table for table, _ in found.values())


def canonical(section: Mapping[str, Any]) -> dict[str, Any]:
    """The `features` section as plain data with all defaults; equal sections give equal data."""
    return FeatureSpec.from_config(section).to_config()


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return [_plain(value) for value in tree]
    return tree


def nearest(name: str, known: Iterable[str], count: int = 1) -> str:
    """The known names most like `name`, as a sentence's end: "; the nearest is 'b'"."""
    close = difflib.get_close_matches(name, sorted(known), n=count, cutoff=0.0)
    if not close:
        return ""
    return f"; the nearest {'is' if len(close) == 1 else 'are'} {', '.join(map(repr, close))}"


def check_keys(section: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Refuses a key that nobody reads."""
    for key in section:
        if key not in known:
            raise InputError(f"{where}: has no field {key!r}{nearest(str(key), known)}.")


def _parse(cls: type[Entry], section: Any, where: str) -> Entry:
    """A dataclass from its section of the config."""
    if not isinstance(section, Mapping):
        raise InputError(f"{where}: must be a dict: found {section!r}.")
    types = typing.get_type_hints(cls)
    check_keys(section, list(types), where)
    values = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in section:
            place = f"{where}.{field.name}"
            value = _value(types[field.name], section[field.name], place)
            choices = field.metadata.get("choices")
            if choices and value not in choices:
                raise InputError(
                    f"{place}: must be one of {', '.join(map(repr, choices))}: found {value!r}."
                )
            values[field.name] = value
        elif field.default is dataclasses.MISSING:
            raise InputError(f"{where}: must have a field {field.name!r}: found {sorted(section)}.")
    return cls(**values)


def _value(kind: Any, value: Any, where: str) -> Any:
    if typing.get_origin(kind) is tuple:
        return _sequence(typing.get_args(kind)[0], value, where)
    # A bool is an int to Python, and never meant as one here.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise InputError(
            f"{where}: must be of type {kind.__name__}:"
            f" found {value!r}, of type {type(value).__name__}."
        )
    return value


def _sequence(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    if kind is str and isinstance(value, str):
        value = [value]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InputError(
            f"{where}: must be a list: found {value!r}, of type {type(value).__name__}."
        )
    places = [f"{where}[{i}]" for i in range(len(value))]
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return tuple(_parse(kind, v, place) for v, place in zip(value, places, strict=True))
    return tuple(_value(kind, v, place) for v, place in zip(value, places, strict=True))


def _check_unique(names: Sequence[str], what: str) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError(f"{what} must be used once: found {name!r} twice.")


def _check_tasks(spec: FeatureSpec) -> None:
    for i, task in enumerate(spec.tasks):
        # It is part of the names of metrics, where "/" stands between task and metric.
        if not task.name or "/" in task.name:
            raise InputError(
                f"features.tasks[{i}].name: must be a name without '/': found {task.name!r}."
            )
    _check_unique([t.name for t in spec.tasks], "features.tasks: a name")
    written = {f"{kind}_{t.name}": t.name for t in spec.tasks for kind in ("label", "predicted")}
    for column in spec.kept_columns:
        if column in written:
            raise InputError(
                "features: keep, time and group must name other columns than those that predict"
                f" writes for each task: found the column {column!r} and the task"
                f" {written[column]!r}. Rename the task or the column."
            )


def _check_encoding(entry: IdSpec | ListSpec, where: str) -> None:
    """Refuses numbers that cannot be, and fields that the entry's encoding does not read."""

    def require(holds: bool, field: str, what: str) -> None:
        if not holds:
            raise InputError(
                f"{where}.{field}: must be {what} (encoding={entry.encoding!r}):"
                f" found {getattr(entry, field)!r}."
            )

    if entry.encoding == "vocabulary":
        require(entry.min_count >= 1, "min_count", "1 or more")
        require(entry.rows == 0, "rows", "0, as the vocabulary gives the number of rows")
    else:
        least = RESERVED_ROWS + 1 if entry.encoding == "hash" else 1
        most = _MAX_ROWS - (entry.on_bad_id == "oov")
        require(least <= entry.rows <= most, "rows", f"from {least} to {most}")
        require(entry.min_count == 1, "min_count", "1, as nothing is counted")
    require(entry.encoding == "hash" or not entry.salt, "salt", "empty, as nothing is hashed")
    holds = entry.encoding == "integer" or entry.on_bad_id == "error"
    require(holds, "on_bad_id", "'error', as every id has a row")
    # The table's name is the name of its vocabulary's file.
    require("/" not in entry.table, "table", "a name without '/'")
    if isinstance(entry, IdSpec):
        require(entry.length >= 1, "length", "1 or more")
    else:
        require(entry.max_length >= 0, "max_length", "0 or more")
        _check_sequence(entry, where)


def _check_sequence(entry: ListSpec, where: str) -> None:
    """Refuses what a list that is not combined cannot have."""
    if entry.combiner != "none":
        return
    if entry.max_length < 1:
        raise InputError(
            f"{where}.max_length: must be 1 or more with combiner='none', for each id of a list has"
            f" a place: found {entry.max_length}."
        )
    if entry.weights:
        raise InputError(
            f"{where}.weights: must be empty with combiner='none', as nothing is summed: found"
            f" {entry.weights!r}."
        )
