"""Entries of the section `features`: tasks, dense, categorical and ragged features."""

import dataclasses
import datetime
import re
from collections.abc import Mapping

import numpy as np

from jaxrank.errors import InputError
from jaxrank.features import KINDS, RESERVED_ROWS, Dense
from jaxrank.validate import field, require

ENCODINGS = ("vocabulary", "hash", "integer")
BAD_ID_POLICIES = ("error", "oov", "hash", "clip")
BRACKETS = ("error", "read", "keep")
COMBINERS = ("sum", "mean", "sqrtn", "none")
# Calendar formats of dates written as digits, and units of numbers since 1970 in seconds.
CALENDAR_FORMS = (
    *("YYYYMMDD", "YYMMDDHH", "YYYYMMDDHH", "YYYYMM", "YYMMDD"),
    *("YYMMDDHHMM", "YYYYMMDDHHMM", "YYMMDDHHMMSS", "YYYYMMDDHHMMSS"),
)
TIME_UNITS = {
    **{"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9},
    **{"minutes": 60.0, "hours": 3600.0, "days": 86_400.0},
}

_STRPTIME = {
    form: form.replace("YYYY", "%Y")
    .replace("YY", "%y")
    .replace("MM", "%m", 1)
    .replace("DD", "%d")
    .replace("HH", "%H")
    .replace("MM", "%M")
    .replace("SS", "%S")
    for form in CALENDAR_FORMS
}
_ZONE_NAME = re.compile(r" ?(UTC|GMT|Z)$")

# The fields of a task that name a column.
COLUMNS_OF_TASKS = ("label", "mask", "weight", "truth", "negative_rate_column", "time")

_MAX_ROWS = 2**31 - 1  # rows are int32, and the largest is PAD
_MAX_BUCKETS = 2**16  # resolution of `QuantileSketch`
_BINARY = ("kind", ("binary",))
_COUNTED = ("encoding", ("vocabulary",))

_COLUMNS = "columns, or patterns of columns; a text is a list of one"
_TABLE = "the embedding table; empty: a table with the name of the column"
_MIN_COUNT = "values with fewer examples on the training split and on earlier days are unknown"
_MAX_VALUES = (
    "maximum number of values, the most frequent ones; on later days those with the latest last"
    " event and of them the most frequent ones; 0: no limit"
)
_KEEP_DAYS = (
    "ids whose last event is this many days or more before the newest event lose their row, when a"
    " later day is prepared with --vocabularies; 0: never. Needs features.time"
)
_MAX_WAITING = (
    "maximum number of ids without a row whose counts are kept for later days, those with the"
    " latest last event and of them the most frequent ones"
)
_ROWS = (
    "rows of the table: including the two reserved ones (hash), or as numbered in the data"
    " (integer). A vocabulary and buckets define it themselves"
)
_SALT = (
    "prefix of each value when it is hashed. Equal values of features that share a table have"
    " different rows if the salts differ"
)
_BRACKETS = (
    "policy for a cell with a list in brackets or quotes, such as [1, 2]. error: the preparation"
    " stops; read: the list is parsed; keep: brackets are parts of ids"
)
_ON_BAD_ID = (
    "policy for an integer, of any size, that is out of range of the table. error: the preparation"
    " stops; oov: all of them share an additional last row; hash: the row is a hash of the integer;"
    " clip: the first row if it is negative, else the last"
)


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """A label column with its optional weight, mask and corrections.

    Only a binary task may have `truth`, a sampling rate of negatives or a `time`. The rates are for
    data with downsampled negatives, and predictions are still for the full traffic. `time` is for
    conversions that happen later than their click.

    References:
        King & Zeng, Logistic Regression in Rare Events Data, 2001, for both corrections.
    """

    name: str = field(help="name of the task in metrics and predictions; without '/'")
    label: str = field(
        "",
        help="the column of labels. With `time` it is optional, and only defines where the label is"
        " unknown",
    )
    kind: str = field(
        "binary",
        choices=KINDS,
        help="kind of the labels, any of which may be empty. binary: 0 or 1, or false or true;"
        " real: a number from -1e15 to 1e15; count: a whole number, 0 or more",
    )
    mask: str = field(
        "", help="a column: 0 or false where the label is unknown, 1 or true where it is known"
    )
    weight: str = field("", help="a column with each example's weight for this task, 0 to 1e30")
    truth: str = field(
        "",
        read_when=_BINARY,
        help="a column with the true probability of generated data, in the full traffic",
    )
    negative_rate: float = field(
        1.0,
        at_least=1e-38,  # its inverse is a weight, which is float32
        at_most=1,
        read_when=_BINARY,
        help="fraction of the negatives that was kept in the data",
    )
    negative_rate_column: str = field(
        "",
        read_when=_BINARY,
        help="a column with that fraction, if it varies: the probability of keeping the example if"
        " it were negative. Positives need it too",
    )
    negative_correction: str = field(
        "weight",
        choices=("weight", "shift"),
        help="weight: a negative has weight 1 / rate in the loss and in metrics; shift: log(rate)"
        " is subtracted from the logit before the loss, in which every example has weight 1, and a"
        " negative has weight 1 / rate in metrics",
    )
    time: str = field(
        "",
        read_when=_BINARY,
        help="a column with the time of the conversion, empty without one. The label is unknown if"
        " the window after the event (features.time) was still open at features.as_of. Otherwise"
        " it is 1 for a conversion within the window, else 0",
    )
    window_hours: float = field(0.0, unit="hours", help="the attribution window of `time`")

    def check(self, where: str) -> None:
        # The name is part of metric names, where "/" separates task and metric.
        is_name = bool(self.name) and "/" not in self.name
        require(is_name, f"{where}.name", "a name without '/'", self.name)
        must = "the name of a column, unless `time` is"
        require(bool(self.label or self.time), f"{where}.label", must, self.label)
        must = "1 where negative_rate_column gives the rate"
        condition = self.negative_rate == 1 or not self.negative_rate_column
        require(condition, f"{where}.negative_rate", must, self.negative_rate)
        hours = self.window_hours
        condition, must = hours == 0, "0 where the task has no `time`"
        if self.time:
            condition, must = hours > 0, "above 0 where the task has a `time`"
        require(condition, f"{where}.window_hours", must, hours)

    @property
    def is_sampled(self) -> bool:
        """Returns True if negatives of the task were downsampled."""
        return self.negative_rate < 1 or bool(self.negative_rate_column)

    @property
    def is_shifted(self) -> bool:
        return self.is_sampled and self.negative_correction == "shift"


@dataclasses.dataclass(frozen=True)
class DenseSpec:
    """Float columns."""

    columns: tuple[str, ...] = field(non_empty=True, single=True, help=_COLUMNS)
    log: bool = field(False, help="replaces a value x by sign(x) log(1 + |x|)")
    standardize: bool | None = field(
        None,
        help="subtracts the mean and divides by the standard deviation of the training split, after"
        " `log`. None: False with `log`, and otherwise True, with `log` added where numbers have a"
        " long tail. `prepare` prints what it chose",
    )
    missing_indicator: bool = field(
        False, help="adds a column '<name>:missing' that is 1 where the value is missing"
    )
    length: int = field(
        1,
        unit="numbers",
        at_least=1,
        help="numbers in each cell of a list or text column. Each is a separate float, '<name>[0]'"
        " and so on",
    )
    separator: str = field(
        "", help="separator of the numbers in a text; a list in brackets needs none"
    )

    @property
    def name(self) -> str:
        return self.columns[0]

    @property
    def column(self) -> str:
        """The column that a resolved entry reads."""
        return self.name if self.length == 1 else self.name.rpartition("[")[0]

    @property
    def index(self) -> int:
        """The index of a resolved entry among the numbers of a cell."""
        return 0 if self.length == 1 else int(self.name.rpartition("[")[2].removesuffix("]"))

    @property
    def is_open(self) -> bool:
        """True if the transform is chosen from the data."""
        return self.standardize is None and not self.log

    def as_stored(self, feature: Dense) -> "DenseSpec":
        """Returns the entry with the transform of a stored feature, if its own is open."""
        if not self.is_open:
            return self
        scaled = (feature.mean, feature.std) != (0.0, 1.0)
        return dataclasses.replace(self, log=feature.log, standardize=scaled)

    def scale(self, transforms: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
        """Returns the offset to subtract and the scale to divide by, from the fitted transforms.

        A column of one value has deviation 0 and is divided by 1.
        """
        mean, std = transforms[self.name] if self.standardize else (0.0, 1.0)
        return float(mean), float(std) if std > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class CategoricalSpec:
    """Columns with a fixed number of ids, or of numbers that are assigned to buckets."""

    columns: tuple[str, ...] = field(non_empty=True, single=True, help=_COLUMNS)
    table: str = field("", help=_TABLE)
    encoding: str = field(
        "vocabulary",
        choices=(*ENCODINGS, "bucket"),
        help="maps a value to a row: by a vocabulary, by a hash, by its bucket, or as the row"
        " number itself",
    )
    min_count: int = field(1, unit="examples", at_least=1, read_when=_COUNTED, help=_MIN_COUNT)
    max_rows: int = field(
        0,
        unit="rows",
        at_least=0,
        at_most=_MAX_ROWS - RESERVED_ROWS,
        read_when=_COUNTED,
        help=_MAX_VALUES,
    )
    keep_days: int = field(0, unit="days", at_least=0, read_when=_COUNTED, help=_KEEP_DAYS)
    max_waiting: int = field(
        1_000_000, unit="ids", at_least=0, read_when=_COUNTED, help=_MAX_WAITING
    )
    rows: int = field(
        0, unit="rows", at_most=_MAX_ROWS, read_when=("encoding", ("hash", "integer")), help=_ROWS
    )
    length: int = field(
        1,
        unit="ids",
        at_least=1,
        read_when=("encoding", ENCODINGS),
        help="number of ids in each cell; a text column separates them by `separator`",
    )
    separator: str = field("", help="separator of the ids in a text")
    brackets: str = field("error", choices=BRACKETS, help=_BRACKETS)
    salt: str = field("", read_when=("encoding", ("hash",)), help=_SALT)
    on_bad_id: str = field(
        "error", choices=BAD_ID_POLICIES, read_when=("encoding", ("integer",)), help=_ON_BAD_ID
    )
    boundaries: tuple[float, ...] = field(
        (),
        read_when=("encoding", ("bucket",)),
        help="increasing numbers, compared as float32. The bucket of a value is the number of"
        " boundaries that are at most the value. Each bucket is a row after the reserved ones",
    )
    buckets: int = field(
        0,
        unit="buckets",
        read_when=("encoding", ("bucket",)),
        help="number of buckets, instead of `boundaries`. Each has about equally many examples of"
        " the training split. There are fewer if single values are frequent",
    )

    def check(self, where: str) -> None:
        if self.encoding == "bucket":
            self._check_buckets(where)
        _check_table(self, where)

    def _check_buckets(self, where: str) -> None:
        buckets = self.buckets
        condition, must = (
            2 <= buckets <= _MAX_BUCKETS,
            f"from 2 to {_MAX_BUCKETS} without `boundaries`",
        )
        if self.boundaries:
            with np.errstate(over="ignore", invalid="ignore"):
                steps = np.diff(np.array(self.boundaries, np.float32))
            rising = bool((steps > 0).all())
            require(rising, f"{where}.boundaries", "rising, as float32", self.boundaries)
            condition, must = buckets == 0, "0 where `boundaries` are given"
        require(condition, f"{where}.buckets", must, buckets)

    @property
    def name(self) -> str:
        return self.columns[0]

    def edges(self, fitted: Mapping[str, np.ndarray | list[float]]) -> np.ndarray:
        """Returns the boundaries, f32[buckets - 1]. `fitted` has those that are fitted, by feature
        name.
        """
        return np.asarray(fitted[self.name] if self.buckets else self.boundaries, np.float32)


@dataclasses.dataclass(frozen=True)
class RaggedSpec:
    """Columns with a list of ids of any length."""

    columns: tuple[str, ...] = field(non_empty=True, single=True, help=_COLUMNS)
    table: str = field("", help=_TABLE)
    separator: str = field("|", help="separator of the ids in a text")
    brackets: str = field("error", choices=BRACKETS, help=_BRACKETS)
    padding: tuple[str, ...] = field(
        (),
        single=True,
        help="ids that are dropped from a list, with their weights: '' for an empty one, '-1' or"
        " '0' for padding",
    )
    weights: str = field(
        "",
        read_when=("combiner", ("sum", "mean", "sqrtn")),
        help="a column with one weight per id",
    )
    weight_separator: str = field(
        "",
        read_when=("combiner", ("sum", "mean", "sqrtn")),
        help="separator of an id and its weight in a text, as ':' in 12:0.5|13:2; instead of"
        " `weights`",
    )
    combiner: str = field(
        "mean",
        choices=COMBINERS,
        help="combines the vectors of a list; none: keeps them, one for each of `max_length`"
        " positions",
    )
    max_length: int = field(
        0,
        unit="ids",
        at_least=0,
        help="maximum length of a list; 0: no limit. At least 1 with combiner none",
    )
    on_overlong: str = field(
        "error", choices=("error", "truncate"), help="policy for a list above max_length"
    )
    keep: str = field(
        "first",
        choices=("first", "last"),
        read_when=("on_overlong", ("truncate",)),
        help="the ids that a longer list keeps",
    )
    encoding: str = field(
        "vocabulary",
        choices=ENCODINGS,
        help="maps a value to a row: by a vocabulary, by a hash, or as the row number itself",
    )
    min_count: int = field(1, unit="examples", at_least=1, read_when=_COUNTED, help=_MIN_COUNT)
    max_rows: int = field(
        0,
        unit="rows",
        at_least=0,
        at_most=_MAX_ROWS - RESERVED_ROWS,
        read_when=_COUNTED,
        help=_MAX_VALUES,
    )
    keep_days: int = field(0, unit="days", at_least=0, read_when=_COUNTED, help=_KEEP_DAYS)
    max_waiting: int = field(
        1_000_000, unit="ids", at_least=0, read_when=_COUNTED, help=_MAX_WAITING
    )
    rows: int = field(
        0, unit="rows", at_most=_MAX_ROWS, read_when=("encoding", ("hash", "integer")), help=_ROWS
    )
    salt: str = field("", read_when=("encoding", ("hash",)), help=_SALT)
    on_bad_id: str = field(
        "error", choices=BAD_ID_POLICIES, read_when=("encoding", ("integer",)), help=_ON_BAD_ID
    )

    def check(self, where: str) -> None:
        _check_table(self, where)
        condition = self.combiner != "none" or self.max_length >= 1
        must = "1 or more with combiner='none', because each id of a list has a position"
        require(condition, f"{where}.max_length", must, self.max_length)
        condition, must = (
            not (self.weights and self.weight_separator),
            "empty where `weights` is set",
        )
        require(condition, f"{where}.weight_separator", must, self.weight_separator)
        differ = not self.weight_separator or self.weight_separator != self.separator
        require(differ, f"{where}.weight_separator", "another than `separator`", self.separator)

    @property
    def is_weighted(self) -> bool:
        return bool(self.weights or self.weight_separator)

    @property
    def name(self) -> str:
        return self.columns[0]


def _check_table(entry: CategoricalSpec | RaggedSpec, where: str) -> None:
    # The table's name is also the name of its vocabulary's file.
    require("/" not in entry.table, f"{where}.table", "a name without '/'", entry.table)
    if entry.encoding in ("hash", "integer"):
        least = RESERVED_ROWS + 1 if entry.encoding == "hash" else 1
        most = _MAX_ROWS - (entry.on_bad_id == "oov")
        must = f"from {least} to {most} (encoding={entry.encoding!r})"
        require(least <= entry.rows <= most, f"{where}.rows", must, entry.rows)


def _digits_hint(text: str) -> str:
    """Suggests the form of a date that is written as digits, as a sentence with a leading space."""
    if not text.isdecimal():
        return ""
    for form, code in _STRPTIME.items():
        try:
            time = datetime.datetime.strptime(text, code)
        except ValueError:
            continue
        if len(text) == len(form) and 1970 <= time.year < 2200:
            return f" Is this {form}? Write '{time}'."
    return " Write seconds since 1970 as the text of a date." if 9 <= len(text) <= 10 else ""


def instant(text: str, where: str) -> float:
    """Parses a time such as "2024-05-01" or "2024-05-01T12:30:00+02:00" to seconds since 1970.

    Raises:
        InputError: the text is not a time. Names the field `where`.
    """
    must = f"{where}: must be a time such as 2024-05-01 12:30:00 or 2024-05-01T12:30:00+02:00"
    spaced = _ZONE_NAME.sub("", text)  # as in columns of times; without a zone it is UTC
    try:
        time = datetime.datetime.fromisoformat(spaced)
    except ValueError:
        raise InputError(f"{must}: found {text!r}.{_digits_hint(text)}") from None
    if text.isdecimal() and not 1970 <= time.year < 2200:  # such as YYMMDDHH
        raise InputError(f"{must}: found {text!r}, of the year {time.year}.{_digits_hint(text)}")
    if time.tzinfo is None:
        time = time.replace(tzinfo=datetime.UTC)
    return time.timestamp()
