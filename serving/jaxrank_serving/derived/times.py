"""Reads times as seconds since 1970, as `jaxrank.data.encode.times` does. All times are in UTC."""

import datetime
import re
from typing import Any

import numpy as np

from jaxrank_serving.errors import RequestError
from jaxrank_serving.values import EXACT_BELOW, Cells, scalar

_DAY = 86_400  # seconds
_FIRST, _LAST = -62_135_596_800, 253_402_300_799  # the years 1 to 9999
_FIRST_SECONDS, _LAST_SECONDS = 315_532_800, 4_102_444_799  # 1980 to 2099
_PLAIN_DATES = (20_130_000, 21_000_000)  # YYYYMMDD is no other form between them
# The rules of jaxrank.data.encode.times for dates of ten digits; a test compares both.
_VALID_SHARES = 0.12, 0.31, 0.24, 0.6  # of months, days, hours and minutes
_OTHER_ORDERS = ("DDMMYYYYHH", "MMDDYYYYHH", "DDMMYYHHMM", "MMDDYYHHMM")
_OTHER_YEARS = (1980, 2099)
_OTHER_SHARES = {"DD": 0.31, "MM": 0.12, "YYYY": 0.012, "YY": 1.0, "HH": 0.24, "mm": 0.6}
_IMPROBABLE = 1e-3
_LOOKED_AT = 1000  # numbers
_UNITS = {
    **{"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9},
    **{"minutes": 60.0, "hours": 3600.0, "days": 86_400.0},
}
_TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # per second
_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?")
_ISO = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[T ]([0-9]{2})(?::([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,6})[0-9]*)?)?)?"
    r"(Z| ?UTC| ?GMT| Z|[+-][0-9]{2}(?::?[0-9]{2})?)?)?"
)
_SPACED_OFFSET = re.compile(r"(:[0-9.]+) ([+-][0-9]{2}(:?[0-9]{2})?)\Z")
_EPOCH = datetime.datetime(1970, 1, 1)
_MUST = "a time: seconds since 1970 in UTC, or text such as 2024-05-01 12:30:00"


def seconds(cells: Cells, time_format: str) -> np.ndarray:
    """Returns f64[n] seconds since 1970-01-01 00:00 UTC, NaN where the time is missing.

    Args:
        cells: numbers, text, or dates and times of Python.
        time_format: of numbers, as `features.time_format` in jaxrank's config.

    Raises:
        RequestError: a value is not a time of the years 1 to 9999, or a number needs a format.
    """
    must = _MUST
    if time_format:
        must = f"a time: {time_format}, or text such as 2024-05-01 12:30"
    result = np.full(len(cells.values), np.nan)
    numbers: list[tuple[int, float]] = []
    for i, value in enumerate(cells.values):
        value = scalar(value)
        if value is None or value == "":
            continue
        try:
            read = _value(value, cells.column.type)
        except (ValueError, TypeError, OverflowError) as error:
            raise _rejected(cells, i, must) from error
        if isinstance(read, float):
            numbers.append((i, read))
        else:
            result[i] = _to_seconds(read, cells.column.type)
    if numbers:
        places = [i for i, _ in numbers]
        read_numbers = np.array([number for _, number in numbers])
        result[places] = _parse_numbers(read_numbers, time_format)
    bad = ~((result >= _FIRST) & (result <= _LAST))
    for i in np.flatnonzero(bad).tolist():
        if cells.values[i] is not None and cells.values[i] != "":
            raise _rejected(cells, i, must)
    return result


def _rejected(cells: Cells, index: int, must: str) -> RequestError:
    try:
        cells.reject(index, must)
    except RequestError as error:
        return error


def _value(value: Any, kind: str) -> float | int:
    """Returns a number as float, and microseconds since 1970 of text and of dates as int.

    Raises:
        ValueError, TypeError or OverflowError: the value is not a time.
    """
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value) else _microseconds(value)
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        return (value - _EPOCH) // datetime.timedelta(microseconds=1)
    if isinstance(value, datetime.date):
        return (value - _EPOCH.date()).days * _DAY * 10**6
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if kind not in ("float16", "float32"):
        return float(value)
    number = float(np.dtype(kind).type(value))
    if EXACT_BELOW[kind] <= abs(number) < 2.0**63:  # the column has rounded it
        raise ValueError
    return number


def _microseconds(text: str) -> int:
    match = _ISO.fullmatch(_SPACED_OFFSET.sub(r"\1\2", text))
    if match is None:
        raise ValueError
    *clock, fraction, zone = match.groups()
    year, month, day, hour, minute, second = (int(part or 0) for part in clock)
    time = datetime.datetime(year, month, day, hour, minute, second)
    microseconds = (time - _EPOCH) // datetime.timedelta(microseconds=1)
    microseconds += int((fraction or "").ljust(6, "0"))
    if zone and zone[0] in "+-":
        hours, minutes = int(zone[1:3]), int(zone[-2:]) if len(zone) > 3 else 0
        if hours > 23 or minutes > 59:
            raise ValueError
        offset = (hours * 3600 + minutes * 60) * 10**6
        microseconds += offset if zone[0] == "-" else -offset
    return microseconds


def _to_seconds(microseconds: int, kind: str) -> float:
    """Converts microseconds by the resolution of a column: of timestamps, dates or text."""
    if kind.startswith("date"):
        return float(microseconds // (_DAY * 10**6) * _DAY)
    unit = kind.partition("[")[2].strip("]").partition(",")[0] if "[" in kind else "us"
    ticks = _TICKS[unit]
    return float(microseconds * ticks // 10**6) / ticks


def _parse_numbers(numbers: np.ndarray, time_format: str) -> np.ndarray:
    """Converts f64[n] numbers to f64[n] seconds, NaN where one does not match."""
    if time_format in _UNITS:
        result = numbers * _UNITS[time_format]
        if time_format == "seconds":  # may count from any start
            return result
        return np.where((result >= _FIRST_SECONDS) & (result < _LAST_SECONDS + 1), result, np.nan)
    if time_format:
        return _calendar(numbers, time_format)
    result = np.where((numbers >= _FIRST_SECONDS) & (numbers <= _LAST_SECONDS), numbers, np.nan)
    # Numbers of ten digits could also be dates. Of seconds before 2033 all are, or none.
    for name in ("YYYYMMDDHH", "YYMMDDHHMM"):
        could_be = np.flatnonzero(result >= 2e9)
        result[could_be[~np.isnan(_calendar(result[could_be], name))]] = np.nan
        early = result < 2e9
        if _are_dates(result[early], name):
            result[early] = np.nan
    for name in _OTHER_ORDERS:
        could_be = np.flatnonzero(result >= 2e9)
        result[could_be[_in_order(result[could_be], name)]] = np.nan
        early = result < 2e9
        if _are_in_order(result[early], name):
            result[early] = np.nan
    first, last = _PLAIN_DATES
    short = np.flatnonzero((numbers > first) & (numbers < last))
    result[short] = _calendar(numbers[short], "YYYYMMDD")
    return result


def _are_dates(numbers: np.ndarray, form: str) -> bool:
    """Returns True if all numbers are dates of a form, which would be improbable for seconds."""
    # Most seconds are no dates, so that the first one ends the search.
    if not len(numbers) or any(
        np.isnan(_calendar(part, form)).any() for part in (numbers[:1], numbers)
    ):
        return False
    fields = (len(form) - form.count("Y")) // 2
    probability = 1.0
    for field, share in enumerate(_VALID_SHARES[:fields]):
        above = 100 ** (fields - field)
        probability *= share ** len(np.unique(numbers[:_LOOKED_AT] // above))
    return probability < _IMPROBABLE


def _order_parts(name: str) -> list[str]:
    """Returns the fields of a name of `_OTHER_ORDERS`, with minutes as "mm"."""
    year = "YYYY" if "YYYY" in name else "YY"
    start, end = name.split(year)
    return [start[:2], start[2:], year, *(["HH", "mm"] if end == "HHMM" else ["HH"])]


def _in_order(numbers: np.ndarray, name: str) -> np.ndarray:
    """Returns bool[n]: True for dates of a name of `_OTHER_ORDERS`, of 1980 to 2099."""
    rest, fields = np.floor(np.nan_to_num(numbers)).astype(np.int64), {}
    for part in reversed(_order_parts(name)):
        rest, fields[part] = np.divmod(rest, 10 ** len(part))
    year = fields.get("YYYY")
    if year is None:
        year = np.where(fields["YY"] < 69, fields["YY"] + 2000, fields["YY"] + 1900)
    digits = ((year * 100 + fields["MM"]) * 100 + fields["DD"]) * 100 + fields["HH"]
    digits = digits * 100 + fields.get("mm", 0)
    first, last = _OTHER_YEARS
    whole = (rest == 0) & (numbers == np.floor(numbers)) & (year >= first) & (year <= last)
    return whole & ~np.isnan(_calendar(np.where(whole, digits, 0.0), "YYYYMMDDHHMM"))


def _are_in_order(numbers: np.ndarray, name: str) -> bool:
    """Returns True if all numbers are dates of an order, as `_are_dates` does."""
    if not len(numbers) or not all(_in_order(part, name).all() for part in (numbers[:1], numbers)):
        return False
    parts, above, probability = _order_parts(name), 10**10, 1.0
    for last, part in zip(parts, parts[1:], strict=False):
        above //= 10 ** len(last)
        draws = len(np.unique(numbers[:_LOOKED_AT] // above))
        probability *= _OTHER_SHARES[part] ** draws
    return probability < _IMPROBABLE


def _calendar(numbers: np.ndarray, form: str) -> np.ndarray:
    """Returns f64[n] seconds of dates written as digits, NaN where a number is not a date."""
    year_digits = form.count("Y")
    fields = (len(form) - year_digits) // 2
    result = np.full(len(numbers), np.nan)
    for i, number in enumerate(numbers.tolist()):
        if not (number >= 0 and number < 10.0 ** len(form) and number == int(number)):
            continue
        rest, parts = int(number), []
        for _ in range(fields):
            rest, part = divmod(rest, 100)
            parts.append(part)
        month, day, hour, minute, second = [*parts[::-1], *[1, 1][fields:], 0, 0, 0][:5]
        # The convention of strptime: 69 to 99 are 1969 to 1999.
        year = rest if year_digits == 4 else rest + (2000 if rest < 69 else 1900)
        try:
            time = datetime.datetime(year, month, day, hour, minute, second)
        except ValueError:
            continue
        result[i] = (time - _EPOCH).total_seconds()
    return result
