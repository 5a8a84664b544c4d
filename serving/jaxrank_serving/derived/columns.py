"""Computes derived columns of a request, as `jaxrank.data.encode.derive` does of raw data.

A derived value is missing where an input is missing, and a ratio also where it divides by 0. A
cross is missing only if all its ids are missing.
"""

import datetime
import zoneinfo
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from jaxrank_serving.derived.times import seconds
from jaxrank_serving.errors import BundleError, RequestError
from jaxrank_serving.signature import Column, Derived
from jaxrank_serving.values import Cells, numbers, texts

_TYPES = {"hour": "int64", "weekday": "int64", "bucket": "int64", "cross": "text"}
_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86_400}
_QUARTER = 900  # seconds
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_FIRST = datetime.datetime(1, 1, 2, tzinfo=datetime.UTC)
_LAST = datetime.datetime(9999, 12, 30, tzinfo=datetime.UTC)
_MISSING_PART = (-1).to_bytes(4, "little", signed=True)


class DerivedColumns:
    """Computes the derived columns of a signature.

    Args:
        entries: in the order in which they read each other.
        time_format: of numbers in columns of times.

    Raises:
        BundleError: this machine lacks a time zone.
    """

    def __init__(self, entries: Sequence[Derived], time_format: str):
        self._entries, self._time_format = entries, time_format
        self._zones = {e.zone: _zone(e) for e in entries if e.kind in ("hour", "weekday")}
        self._edges = {e.name: np.asarray(e.boundaries, np.float32) for e in entries}

    def add(self, columns: Mapping[str, Cells], rows: int) -> dict[str, Cells]:
        """Returns the columns and the derived ones.

        A column is of the context if all its inputs are. Otherwise it has n = `rows` values.

        Raises:
            RequestError: an input is not a number, a time or an id.
        """
        result = dict(columns)
        for entry in self._entries:
            inputs = [result[name] for name in entry.columns]
            is_context = all(cells.is_context for cells in inputs)
            count = 1 if is_context else rows
            values = self._values(entry, inputs, count)
            column = Column(
                entry.name, _TYPES.get(entry.kind, "float64"), False, "any", True, None, False
            )
            result[entry.name] = Cells(values, column, is_context)
        return result

    def _values(self, entry: Derived, inputs: Sequence[Cells], count: int) -> list[Any]:
        if entry.kind == "cross":
            return _crossed([_repeated(texts(cells), count) for cells in inputs])
        if entry.kind in ("hour", "weekday", "age"):
            first, *others = [_spread(seconds(c, self._time_format), count) for c in inputs]
            if entry.kind == "age":
                return _floats((first - others[0]) / _UNITS[entry.unit])
            local = first + _offsets(first, self._zones[entry.zone])
            # 1970-01-01 was a Thursday.
            hours, weekdays = local // 3600 % 24, (local // 86_400 + 3) % 7
            return _integers(hours if entry.kind == "hour" else weekdays, np.isnan(local))
        first, *others = [_spread(numbers(cells), count) for cells in inputs]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            if entry.kind == "ratio":
                ratio = np.where(others[0] == 0, np.nan, first / others[0])
                return _floats(np.where(np.isinf(ratio), np.nan, ratio))
            if entry.kind == "difference":
                return _floats(first - others[0])
            if entry.kind == "log":
                return _floats(np.copysign(np.log1p(np.abs(first)), first))
            single = first.astype(np.float32)
        bucket = np.searchsorted(self._edges[entry.name], single, side="right")
        return _integers(bucket, np.isnan(first))


def _zone(entry: Derived) -> datetime.tzinfo:
    if entry.zone == "UTC":
        return datetime.UTC
    try:
        return zoneinfo.ZoneInfo(entry.zone)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise BundleError(
            f"signature.json: {entry.name}: this machine must have the time zone"
            f" {entry.zone!r}: found {error}. Install the package tzdata."
        ) from error


def _repeated(values: list[Any], count: int) -> list[Any]:
    return values if len(values) == count else values * count


def _spread(values: np.ndarray, count: int) -> np.ndarray:
    return np.broadcast_to(values, (count,))


def _floats(values: np.ndarray) -> list[Any]:
    return [None if value != value else value for value in values.tolist()]


def _integers(values: np.ndarray, missing: np.ndarray) -> list[Any]:
    whole = np.where(missing, 0, values).astype(np.int64).tolist()
    return [None if m else v for v, m in zip(whole, missing.tolist(), strict=True)]


def _offsets(times: np.ndarray, zone: datetime.tzinfo) -> np.ndarray:
    """Returns f64[n], the seconds that clocks of a zone are ahead of UTC at times f64[n]."""
    seconds = np.floor(np.nan_to_num(times))
    quarters, index = np.unique(seconds // _QUARTER, return_inverse=True)
    first, last = (
        np.array([_offset(quarter * _QUARTER + second, zone) for quarter in quarters.tolist()])
        for second in (0, _QUARTER - 1)
    )
    offsets = first[index]
    # Clocks change within few quarters of an hour, such as one minute after midnight.
    for i in np.flatnonzero((first != last)[index]).tolist():
        offsets[i] = _offset(seconds[i].item(), zone)
    return offsets


def _offset(seconds: float, zone: datetime.tzinfo) -> float:
    moment = _EPOCH + datetime.timedelta(seconds=seconds)
    # Within a day of the first and the last moment, local times may not exist.
    offset = min(max(moment, _FIRST), _LAST).astimezone(zone).utcoffset()
    return offset.total_seconds() if offset else 0.0


def _crossed(parts: Sequence[list[str | None]]) -> list[str | None]:
    """Returns 16 hexadecimal digits for each combination of ids, None if all are missing."""
    result: list[str | None] = []
    for row in zip(*parts, strict=True):
        if not any(row):
            result.append(None)
            continue
        try:
            result.append(xxhash.xxh3_64_hexdigest(b"".join(map(_piece, row))))
        except UnicodeEncodeError as error:
            raise RequestError("ids", None, "text in UTF-8", f"{error.object!r:.80}") from error
    return result


def _piece(value: str | None) -> bytes:
    if value is None:
        return _MISSING_PART
    data = value.encode()
    return len(data).to_bytes(4, "little") + data
