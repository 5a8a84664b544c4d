"""The config's `features` section: which columns are labels, floats, ids and lists, and how each
is encoded.

`parse.feature_spec` reads and checks the section; `resolve.resolve` puts the columns of a source in
place of the patterns.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxrank.errors import InputError
from jaxrank.features import KINDS, RESERVED_ROWS
from jaxrank.validate import one_of, plain

ENCODINGS = ("vocabulary", "hash", "integer")
BAD_ID_POLICIES = ("error", "oov", "hash", "clip")


# The fields of a task that name a column.
COLUMNS_OF_TASKS = ("label", "mask", "weight", "truth", "negative_rate_column", "time")


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A label column, with what may go with it.

    kind: of the labels, which may all be empty: binary: 0 or 1, or false or true; real: a finite
        number; count: a whole number, 0 or more. See `features.Task`. Only a binary task may have
        `truth`, a rate of negatives or a `time`.

    mask: a column that is 0 or false where the label is unknown and 1 or true where it is known.
    weight: a column with each example's weight for this task.
    truth: a column with the planted probability of generated data, of all traffic.

    Where negatives were left out of the data, predictions are still of all traffic:

    negative_rate: the share of the negatives that was kept.
    negative_rate_column: a column with that share, where it is not everywhere the same: that with
        which each example would have been kept if it were negative. Positives have it too.
    negative_correction: weight: a negative counts 1 / rate times, in the loss and in metrics;
        shift: log(rate) is taken from the logit before the loss, for which every example counts
        once, and in metrics a negative counts 1 / rate times (King & Zeng, Logistic Regression in
        Rare Events Data, 2001, have both).

    A conversion that comes later than its click:

    time: a column with the time of the conversion, empty where there was none. The label is unknown
        where the window of `window_hours` after the event (`FeatureSpec.time`) was still open when
        the data was looked at (`FeatureSpec.as_of`); else 1 where the conversion came within it,
        else 0. Conversions that came in windows still open do not count: those that have not come
        yet are of the same time. Of `label`, which may be left out, only counts where it is
        unknown: the task's label is unknown there.
    window_hours: the attribution window.
    """

    name: str
    label: str = ""
    kind: str = one_of("binary", KINDS)
    mask: str = ""
    weight: str = ""
    truth: str = ""
    negative_rate: float = 1.0
    negative_rate_column: str = ""
    negative_correction: str = one_of("weight", ["weight", "shift"])
    time: str = ""
    window_hours: float = 0.0

    @property
    def is_sampled(self) -> bool:
        """Whether negatives were left out of its data."""
        return self.negative_rate < 1 or bool(self.negative_rate_column)

    @property
    def is_shifted(self) -> bool:
        return self.is_sampled and self.negative_correction == "shift"


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
    """Columns with a fixed number of ids, or of numbers that are put into buckets.

    table: the embedding table; empty for one of the column's own name.
    min_count: values seen less often in the training split are unknown (vocabulary).
    max_rows: at most so many values are known, the most frequent; 0: no limit (vocabulary).
    rows: of the table, with the two reserved ones (hash) or as the data numbers them (integer).
    length: ids in each cell; in a text column they stand between `separator`s.
    salt: goes before each value when it is hashed. Features that share a table may have different
        ones: then equal values of theirs have different rows.
    on_bad_id: what becomes of a whole number, of any size, that is none of the `rows` (integer).
        error: the preparation stops; oov: all share one more row, the table's last; hash: its row
        is a hash of it; clip: the first row if it is negative, else the last.
    boundaries: a number's bucket is how many of these, which rise, are at most the number, and each
        bucket is a row behind the reserved ones; compared as float32 (bucket).
    buckets: in place of `boundaries`, how many buckets of about equally many examples of the
        training split; fewer where single values are frequent (bucket).
    """

    columns: tuple[str, ...]
    table: str = ""
    encoding: str = one_of("vocabulary", [*ENCODINGS, "bucket"])
    min_count: int = 1
    max_rows: int = 0
    rows: int = 0
    length: int = 1
    separator: str = ""
    salt: str = ""
    on_bad_id: str = one_of("error", BAD_ID_POLICIES)
    boundaries: tuple[float, ...] = ()
    buckets: int = 0

    @property
    def name(self) -> str:
        return self.columns[0]

    def edges(self, learned: Mapping[str, np.ndarray | list[float]]) -> np.ndarray:
        """f32[buckets - 1]: the boundaries, given those that were learned by name of feature."""
        return np.asarray(learned[self.name] if self.buckets else self.boundaries, np.float32)


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
    combiner: str = one_of("mean", ["sum", "mean", "sqrtn", "none"])
    max_length: int = 0
    on_overlong: str = one_of("error", ["error", "truncate"])
    encoding: str = one_of("vocabulary", ENCODINGS)
    min_count: int = 1
    max_rows: int = 0
    rows: int = 0
    salt: str = ""
    on_bad_id: str = one_of("error", BAD_ID_POLICIES)

    @property
    def name(self) -> str:
        return self.columns[0]


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """A table and how values become its rows; `rows` is what the config says.

    salts: of its features, in order.
    """

    name: str
    encoding: str
    min_count: int
    max_rows: int
    rows: int
    on_bad_id: str
    salts: tuple[str, ...]

    @property
    def all_rows(self) -> int:
        """`rows`, and under "oov" the one behind them that all bad ids share."""
        return self.rows + (self.on_bad_id == "oov")


# What features that share a table must agree on.
_OF_TABLES = ("encoding", "min_count", "max_rows", "rows", "on_bad_id")


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """The `features` section. After `resolve` each entry has exactly one column, and a table.

    keep: columns that are passed through to predictions.
    time: the column with the time of each event; it is kept. See `encode.times.seconds`.
    group: a column that is kept.
    as_of: when the data was looked at, for tasks with a `time`; empty: at the latest event of each
        split.
    by_day: each day of `time` (UTC) has files of its own in the store.
    """

    tasks: tuple[TaskSpec, ...]
    floats: tuple[FloatSpec, ...] = ()
    ids: tuple[IdSpec, ...] = ()
    lists: tuple[ListSpec, ...] = ()
    keep: tuple[str, ...] = ()
    time: str = ""
    group: str = ""
    as_of: str = ""
    by_day: bool = False

    def without_labels(self) -> "FeatureSpec":
        """The spec for examples of which no label is known: no task names a column."""
        tasks = tuple(TaskSpec(name=task.name, kind=task.kind) for task in self.tasks)
        return dataclasses.replace(self, tasks=tasks, as_of="")

    def to_state(self) -> dict[str, Any]:
        """The section as plain data, with every default filled in; see `parse.feature_spec`."""
        tree = plain(dataclasses.asdict(self))
        assert isinstance(tree, dict)
        return tree

    @property
    def columns_of_tasks(self) -> frozenset[str]:
        """The columns that tasks name."""
        named = {getattr(task, field) for task in self.tasks for field in COLUMNS_OF_TASKS}
        return frozenset(named - {""})

    @property
    def named(self) -> frozenset[str]:
        """Every text in the section, among them the names of all columns that are read."""
        return frozenset(_texts(self.to_state()))

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
        sharing: dict[str, list[IdSpec | ListSpec]] = {}
        entries: list[IdSpec | ListSpec] = [*self.ids, *self.lists]
        for entry in entries:
            sharing.setdefault(entry.table, []).append(entry)
        return tuple(_table(name, entries) for name, entries in sharing.items())


def _texts(tree: Any) -> Iterator[str]:
    """Every text within plain data."""
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _texts(value)


def _table(name: str, entries: list[IdSpec | ListSpec]) -> TableSpec:
    first = entries[0]
    for entry in entries[1:]:
        for field in _OF_TABLES:
            if getattr(first, field) != getattr(entry, field):
                raise InputError(
                    f"features: {first.name} and {entry.name} share the table {name!r}, so {field}"
                    f" must be the same: found {getattr(first, field)!r} and"
                    f" {getattr(entry, field)!r}."
                )
        if entry.encoding == "bucket":
            raise InputError(
                f"features: a table of encoding='bucket' must have one feature: found {first.name}"
                f" and {entry.name} in the table {name!r}."
            )
    fields = {field: getattr(first, field) for field in _OF_TABLES}
    if isinstance(first, IdSpec) and first.boundaries:
        fields["rows"] = RESERVED_ROWS + len(first.boundaries) + 1
    return TableSpec(name, salts=tuple(entry.salt for entry in entries), **fields)
