"""The config's `features` section: tasks, dense, categorical and ragged features, and their
encoding.

`FeatureSpec.from_state` reads and checks the section. `resolve.resolve` replaces patterns by the
columns of a source.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxrank import json_files
from jaxrank.data.spec.derived import DerivedSpec
from jaxrank.data.spec.entries import (
    CALENDAR_FORMS,
    COLUMNS_OF_TASKS,
    TIME_UNITS,
    CategoricalSpec,
    DenseSpec,
    RaggedSpec,
    TaskSpec,
    instant,
)
from jaxrank.data.spec.sequences import SequenceSpec, check_sequences
from jaxrank.errors import InputError
from jaxrank.features import RESERVED_ROWS
from jaxrank.validate import field, parse, require


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A table and the encoding of values as its rows. `rows` is the number in the config.

    salts: of its features, in order.
    """

    name: str
    encoding: str
    min_count: int
    max_rows: int
    keep_days: int
    max_waiting: int
    rows: int
    on_bad_id: str
    salts: tuple[str, ...]

    @property
    def all_rows(self) -> int:
        """Returns `rows`, plus the shared row for invalid ids if `on_bad_id` is "oov"."""
        return self.rows + (self.on_bad_id == "oov")


# Fields that must be equal for features that share a table.
_OF_TABLES = (
    "encoding",
    "min_count",
    "max_rows",
    "keep_days",
    "max_waiting",
    "rows",
    "on_bad_id",
)


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """The `features` section. After `resolve`, each entry has exactly one column and a table."""

    tasks: tuple[TaskSpec, ...] = field(
        non_empty=True,
        help="labels to predict",
        hint="Each is a dict such as dict(name='click', label='clicked').",
    )
    dense: tuple[DenseSpec, ...] = field((), help="columns of numbers")
    categorical: tuple[CategoricalSpec, ...] = field((), help="columns with a fixed number of ids")
    ragged: tuple[RaggedSpec, ...] = field((), help="columns with lists of ids of any length")
    sequences: tuple[SequenceSpec, ...] = field(
        (), help="ragged features whose lists are aligned, event by event"
    )
    derived: tuple[DerivedSpec, ...] = field(
        (), help="columns that are computed from others; other fields can name them"
    )
    keep: tuple[str, ...] = field((), single=True, help="columns that are copied to predictions")
    time: str = field("", help="the column with the time of each event; it is kept")
    time_format: str = field(
        "",
        choices=("", *TIME_UNITS, *CALENDAR_FORMS),
        help="format of numbers and digits in columns of times: a unit of the time since 1970, or"
        " the digits of a date. Empty: seconds from 1980 to 2099, and YYYYMMDD of 2013 to 2099;"
        " others are rejected",
    )
    group: str = field(
        "",
        help="the column whose values name requests, such as a page view; it is kept, and `prepare`"
        " brings the examples of a request together",
    )
    as_of: str = field(
        "",
        help="time of the data snapshot, for tasks with a `time`; empty: the latest event of each"
        " split",
    )
    skip: tuple[str, ...] = field(
        (),
        single=True,
        help="features, or patterns of them, that training leaves out of its model; `prepare`"
        " stores them all the same",
    )
    by_day: bool = field(False, help="stores each day of `time` (UTC) in separate files")

    def check(self, where: str) -> None:
        names = [task.name for task in self.tasks]
        for i, name in enumerate(names):
            must = "used once, each for one task"
            require(name not in names[:i], f"{where}.tasks[{i}].name", must, name)
        self._check_times(where)
        check_sequences(self.sequences, where, self.time)
        written = {f"{kind}_{name}": name for name in names for kind in ("label", "predicted")}
        for column in self.kept_columns:
            if column in written:
                raise InputError(
                    f"{where}: keep, time and group must name other columns than those that predict"
                    f" writes for each task: found the column {column!r} and the task"
                    f" {written[column]!r}. Rename the task or the column."
                )

    def _check_times(self, where: str) -> None:
        must = "the name of the column of times with by_day"
        require(bool(self.time) or not self.by_day, f"{where}.time", must, self.time)
        for section in ("categorical", "ragged"):
            for i, entry in enumerate(getattr(self, section)):
                must = f"the name of the column of times with {where}.{section}[{i}].keep_days"
                require(bool(self.time) or not entry.keep_days, f"{where}.time", must, self.time)
        timed = [i for i, task in enumerate(self.tasks) if task.time]
        if timed:
            compared = f"{where}.tasks[{timed[0]}].time"
            must = f"the name of the column of events' times, which {compared} is compared with"
            require(bool(self.time), f"{where}.time", must, self.time)
        if self.as_of:
            instant(self.as_of, f"{where}.as_of")
            require(bool(timed), f"{where}.as_of", "empty where no task has a `time`", self.as_of)

    @property
    def records_days(self) -> bool:
        """Returns True if a store records the day of each id's last event."""
        limited = any(
            t.keep_days or t.max_rows or t.min_count > 1
            for t in self.tables
            if t.encoding == "vocabulary"
        )
        timed = any(task.time for task in self.tasks)
        return bool(self.time) and (self.by_day or timed or limited)

    @property
    def stored(self) -> "FeatureSpec":
        """Returns the spec of a store, which has all features."""
        return dataclasses.replace(self, skip=())

    def without_labels(self) -> "FeatureSpec":
        """Returns the spec for examples without labels: no task names a column."""
        tasks = tuple(TaskSpec(name=task.name, kind=task.kind) for task in self.tasks)
        return dataclasses.replace(self, tasks=tasks, as_of="")

    def to_state(self) -> dict[str, Any]:
        """Returns the section as plain data, with all defaults."""
        tree = json_files.plain(self)
        assert isinstance(tree, dict)
        return tree

    @classmethod
    def from_state(cls, section: Mapping[str, Any]) -> "FeatureSpec":
        """Reads and checks the section of a config, or the result of `to_state`.

        Raises:
            InputError: a field is unknown or missing, or has a wrong type or an invalid value.
        """
        return parse(cls, section, "features")

    @property
    def columns_of_tasks(self) -> frozenset[str]:
        """Returns the columns that tasks name."""
        named = {getattr(task, field) for task in self.tasks for field in COLUMNS_OF_TASKS}
        return frozenset(named - {""})

    @property
    def named(self) -> frozenset[str]:
        """Returns all texts in the section, including the names of all columns that are read."""
        return frozenset((*_texts(self.to_state()), *(entry.column for entry in self.dense)))

    @property
    def kept_columns(self) -> tuple[str, ...]:
        """Returns the columns that are copied to predictions: `keep`, `time` and `group`, each
        once.
        """
        return tuple(dict.fromkeys(c for c in (*self.keep, self.time, self.group) if c))

    @property
    def tables(self) -> tuple[TableSpec, ...]:
        """The tables of a resolved spec, in the order of their first feature.

        Raises:
            InputError: two features that share a table encode it differently.
        """
        sharing: dict[str, list[CategoricalSpec | RaggedSpec]] = {}
        entries: list[CategoricalSpec | RaggedSpec] = [*self.categorical, *self.ragged]
        for entry in entries:
            sharing.setdefault(entry.table, []).append(entry)
        return tuple(_table(name, entries) for name, entries in sharing.items())


def _texts(tree: Any) -> Iterator[str]:
    """Yields all texts in plain data."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _texts(value)


def _table(name: str, entries: list[CategoricalSpec | RaggedSpec]) -> TableSpec:
    first = entries[0]
    for entry in entries[1:]:
        for shared in _OF_TABLES:
            if getattr(first, shared) != getattr(entry, shared):
                raise InputError(
                    f"features: {first.name} and {entry.name} share the table {name!r}, so {shared}"
                    f" must be the same: found {getattr(first, shared)!r} and"
                    f" {getattr(entry, shared)!r}."
                )
        if entry.encoding == "bucket":
            raise InputError(
                f"features: a table of encoding='bucket' must have one feature: found {first.name}"
                f" and {entry.name} in the table {name!r}."
            )
    fields = {shared: getattr(first, shared) for shared in _OF_TABLES}
    if isinstance(first, CategoricalSpec) and first.boundaries:
        fields["rows"] = RESERVED_ROWS + len(first.boundaries) + 1
    return TableSpec(name, salts=tuple(entry.salt for entry in entries), **fields)
