"""What a `features` section must hold beyond its types; each check raises InputError."""

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrank.data.spec.features import FeatureSpec, IdSpec, ListSpec, TaskSpec
from jaxrank.errors import InputError
from jaxrank.features import RESERVED_ROWS

_MAX_ROWS = 2**31 - 1  # rows are int32, and the largest is PAD
_MAX_BUCKETS = 2**16  # as many as `Quantiles` can tell apart


class _Entry:
    """Requirements of one entry; a message names the field, and what they depend on."""

    def __init__(self, entry: Any, where: str, given: str = ""):
        self._entry, self._where, self._given = entry, where, given

    def require(self, holds: bool, field: str, must: str) -> None:
        if not holds:
            raise InputError(
                f"{self._where}.{field}: must be {must}{self._given}:"
                f" found {getattr(self._entry, field)!r}."
            )


def check_tasks(spec: FeatureSpec) -> None:
    """Refuses tasks that cannot be told apart, and numbers and columns that cannot be."""
    if not spec.tasks:
        raise InputError("features.tasks: must have at least one task: found none.")
    for i, task in enumerate(spec.tasks):
        where = f"features.tasks[{i}]"
        # It is part of the names of metrics, where "/" stands between task and metric.
        if not task.name or "/" in task.name:
            raise InputError(f"{where}.name: must be a name without '/': found {task.name!r}.")
        _check_label(task, spec, where)
        entry = _Entry(task, where)
        rate = task.negative_rate
        # Its inverse is a weight, which is float32.
        entry.require(1e-38 <= rate <= 1, "negative_rate", "at least 1e-38 and at most 1")
        holds = rate == 1 or not task.negative_rate_column
        entry.require(holds, "negative_rate", "1 where negative_rate_column gives the rate")
        _check_kind(task, where)
    _check_unique([t.name for t in spec.tasks], "features.tasks: a name")
    written = {f"{kind}_{t.name}": t.name for t in spec.tasks for kind in ("label", "predicted")}
    for column in spec.kept_columns:
        if column in written:
            raise InputError(
                "features: keep, time and group must name other columns than those that predict"
                f" writes for each task: found the column {column!r} and the task"
                f" {written[column]!r}. Rename the task or the column."
            )


def check_times(spec: FeatureSpec) -> None:
    """Refuses what cannot be known of the times of events."""
    if spec.by_day and not spec.time:
        raise InputError("features.time: must name the column of times with by_day: found ''.")
    if spec.as_of:
        instant(spec.as_of, "features.as_of")
        if not any(task.time for task in spec.tasks):
            raise InputError(
                f"features.as_of: must be empty where no task has a `time`: found {spec.as_of!r}."
            )


def _check_label(task: TaskSpec, spec: FeatureSpec, where: str) -> None:
    entry = _Entry(task, where)
    entry.require(bool(task.label or task.time), "label", "the name of a column, unless `time` is")
    if task.time:
        entry.require(task.window_hours > 0, "window_hours", "above 0 where the task has a `time`")
        if not spec.time:
            raise InputError(
                f"features.time: must name the column of events' times, which {where}.time is"
                " compared with: found ''."
            )
    else:
        entry.require(task.window_hours == 0, "window_hours", "0 where the task has no `time`")


def _check_kind(task: TaskSpec, where: str) -> None:
    """Refuses what only a label of 0 or 1 can have."""
    if task.kind == "binary":
        return
    entry = _Entry(task, where, f", as only binary tasks have it (kind={task.kind!r})")
    entry.require(task.negative_rate == 1, "negative_rate", "1")
    for field in ("negative_rate_column", "time", "truth"):
        entry.require(not getattr(task, field), field, "empty")


def _check_unique(names: Sequence[str], what: str) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InputError(f"{what} must be used once: found {name!r} twice.")


def check_ids(entry: IdSpec, where: str) -> None:
    """Refuses numbers that cannot be, and fields that the entry's encoding does not read."""
    found = _Entry(entry, where, f" (encoding={entry.encoding!r})")
    if entry.encoding == "bucket":
        _check_buckets(entry, found)
    else:
        found.require(not entry.boundaries, "boundaries", "empty, as there are no buckets")
        found.require(entry.buckets == 0, "buckets", "0, as there are none")
        _check_encoding(entry, found)
    found.require(entry.length >= 1, "length", "1 or more")
    _check_table(entry, found)


def check_list(entry: ListSpec, where: str) -> None:
    """As `check_ids`; and what a list that is not combined cannot have."""
    found = _Entry(entry, where, f" (encoding={entry.encoding!r})")
    _check_encoding(entry, found)
    _check_table(entry, found)
    found.require(entry.max_length >= 0, "max_length", "0 or more")
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


def _check_encoding(entry: IdSpec | ListSpec, found: _Entry) -> None:
    if entry.encoding == "vocabulary":
        found.require(entry.min_count >= 1, "min_count", "1 or more")
        most = _MAX_ROWS - RESERVED_ROWS
        found.require(0 <= entry.max_rows <= most, "max_rows", f"from 0 to {most}")
        found.require(entry.rows == 0, "rows", "0, as the vocabulary gives the number of rows")
    else:
        least = RESERVED_ROWS + 1 if entry.encoding == "hash" else 1
        most = _MAX_ROWS - (entry.on_bad_id == "oov")
        found.require(least <= entry.rows <= most, "rows", f"from {least} to {most}")
        _check_uncounted(entry, found)
    found.require(entry.encoding == "hash" or not entry.salt, "salt", "empty, as nothing is hashed")
    holds = entry.encoding == "integer" or entry.on_bad_id == "error"
    found.require(holds, "on_bad_id", "'error', as every id has a row")


def _check_buckets(entry: IdSpec, found: _Entry) -> None:
    if entry.boundaries:
        rising = np.diff(np.array(entry.boundaries, np.float32)) > 0
        found.require(bool(rising.all()), "boundaries", "rising, as float32")
        found.require(entry.buckets == 0, "buckets", "0 where `boundaries` are given")
    else:
        must = f"from 2 to {_MAX_BUCKETS} where no `boundaries` are given"
        found.require(2 <= entry.buckets <= _MAX_BUCKETS, "buckets", must)
    found.require(entry.length == 1, "length", "1, as a number has one bucket")
    found.require(entry.rows == 0, "rows", "0, as the boundaries give the number of rows")
    found.require(not entry.salt, "salt", "empty, as nothing is hashed")
    found.require(entry.on_bad_id == "error", "on_bad_id", "'error', as every number has a row")
    _check_uncounted(entry, found)


def _check_uncounted(entry: IdSpec | ListSpec, found: _Entry) -> None:
    found.require(entry.min_count == 1, "min_count", "1, as nothing is counted")
    found.require(entry.max_rows == 0, "max_rows", "0, as nothing is counted")


def _check_table(entry: IdSpec | ListSpec, found: _Entry) -> None:
    # The table's name is the name of its vocabulary's file.
    found.require("/" not in entry.table, "table", "a name without '/'")


def instant(text: str, where: str) -> float:
    """Seconds since 1970 of one time, as "2024-05-01" or "2024-05-01T12:30:00+02:00".

    Raises:
        InputError: it is none; names the field `where`.
    """
    try:
        found = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise InputError(
            f"{where}: must be a time such as 2024-05-01 12:30:00: found {text!r}."
        ) from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=datetime.UTC)
    return found.timestamp()
