"""Parses columns of times as seconds since 1970, and computes their days. All times are in UTC."""

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.encode.columns import Column, inexact, is_text, python_value, uncastable
from jaxrank.data.spec.entries import CALENDAR_FORMS, TIME_UNITS

DAY = 86_400  # seconds
_FIRST, _LAST = -62_135_596_800, 253_402_300_799  # the years 1 to 9999
# Only numbers from 1980 to 2099 are read as seconds. Smaller and larger numbers include dates
# written as digits, times in other units, and days or hours since 1970.
_FIRST_SECONDS, _LAST_SECONDS = 315_532_800, 4_102_444_799
# YYYYMMDD of these years is not a date in any other form: it begins with 20 and a "month" above 12.
_PLAIN_YEARS = (2013, 2099)
# Of two digits: the share of months, days, hours and minutes.
_VALID_SHARES = 0.12, 0.31, 0.24, 0.6
# Dates of ten digits that begin with the day or the month, which no `time_format` reads.
_OTHER_ORDERS = ("DDMMYYYYHH", "MMDDYYYYHH", "DDMMYYHHMM", "MMDDYYHHMM")
_OTHER_YEARS = (1980, 2099)
# The share of valid fields. The first one of seconds before 2033 is 1, because they begin with 10
# to 19 and, before 2001, with 3 to 9.
_OTHER_SHARES = {"DD": 0.31, "MM": 0.12, "YYYY": 0.012, "YY": 1.0, "HH": 0.24, "mm": 0.6}
_IMPROBABLE = 1e-3
_LOOKED_AT = 1000  # numbers, which end the search for dates in most data
_ARROW_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # ticks per second
_MUST = "a time: seconds since 1970 in UTC, or text such as 2024-05-01 12:30:00"
_NUMBER = r"^[-+]?[0-9]+(\.[0-9]*)?$"
_ZONE = r"[T ][0-9:.]+(Z|[+-][0-9]{2}(:?[0-9]{2})?)$"
_NAMED_ZONE = r" ?(UTC|GMT|Z)$"
_SPACED_OFFSET = r"(:[0-9.]+) ([+-][0-9]{2}(:?[0-9]{2})?)$"


def seconds(column: Column, missing: bool = True, time_format: str = "") -> np.ndarray:
    """Returns f64[n] seconds since 1970-01-01 00:00 UTC, NaN where the time is missing.

    Numbers and digit-only text are read as `time_format` says. Other text is ISO 8601: a date, or a
    date and a time of the day, separated by "T" or a space. Fractions of a second are truncated to
    six digits. Times without a time zone, including Arrow's, are in UTC.

    Args:
        missing: True if a time may be missing.
        time_format: format of numbers. Empty: seconds from 1980 to 2099, and YYYYMMDD of 2013 to
            2099. Otherwise one of `TIME_UNITS` or `CALENDAR_FORMS`. Units other than seconds are
            of 1980 to 2099, and seconds may count from any start.

    Raises:
        BadRows: a value is not a time of the years 1 to 9999, or a number needs a format.
        InputError: the column type has no times.
    """
    kind = column.values.type
    if is_text(kind):
        result = _parse_texts(column, time_format)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        _check_digits(column)
        values = column.values.cast(pa.float64(), safe=False)
        result = _parse_numbers(_as_numpy(values), time_format)
    elif pa.types.is_timestamp(kind):
        result = _as_numpy(pc.divide(_counts(column.values), float(_ARROW_UNITS[kind.unit])))
    elif pa.types.is_date32(kind):
        days_since = column.values.cast(pa.int32()).cast(pa.float64())
        result = _as_numpy(pc.multiply(days_since, float(DAY)))
    elif pa.types.is_date64(kind):
        result = _as_numpy(pc.divide(_counts(column.values), 1000.0))
    else:
        column.reject_type(_MUST)
    absent = column.values.is_null().to_numpy(zero_copy_only=False)
    bad = ~((result >= _FIRST) & (result <= _LAST))
    if missing:
        bad &= ~absent
    if bad.any():
        rows = np.flatnonzero(bad)
        column.reject(rows, _must(time_format), _hint(column, int(rows[0]), time_format))
    return result


def other_form(column: Column) -> str:
    """Returns a form of dates that all numbers have which are read as seconds, or "".

    Few numbers can be both. Then seconds are assumed.
    """
    values = column.values
    if is_text(values.type):
        is_number = pc.match_substring_regex(values, _NUMBER)
        values = values.filter(pc.fill_null(is_number, False)).cast(pa.float64())
    elif not pa.types.is_integer(values.type) and not pa.types.is_floating(values.type):
        return ""
    numbers = _as_numpy(values.cast(pa.float64(), safe=False))
    numbers = numbers[(numbers >= _FIRST_SECONDS) & (numbers <= _LAST_SECONDS)]
    if not len(numbers):
        return ""
    if not np.isnan(_calendar(numbers, _Form.parse("YYMMDDHHMM"))).any():
        return "YYMMDDHHMM"
    return next((name for name in _OTHER_ORDERS if _in_order(numbers, name).all()), "")


def _check_digits(column: Column) -> None:
    """Rejects times in a short float column that were rounded when they were written.

    Seconds of today are rounded to multiples of 128 in float32. A double has enough digits.
    """
    kind = column.values.type
    if not pa.types.is_floating(kind) or pa.types.is_float64(kind):
        return
    numbers = _as_numpy(column.values).astype(np.float64)
    rounded = inexact(np.abs(numbers), kind)
    if rounded.any():
        column.reject(
            np.flatnonzero(rounded),
            f"a time with all its digits, and {kind} has rounded it",
            " Write the column as int64, double or a timestamp.",
        )


def _must(time_format: str) -> str:
    if not time_format:
        return _MUST
    years = " of 1980 to 2099" * (time_format in TIME_UNITS and time_format != "seconds")
    return (
        f"a time: {time_format}{years}, as features.time_format says, or text such as"
        " 2024-05-01 12:30"
    )


def _as_numpy(values: pa.Array) -> np.ndarray:  # NaN for null
    return values.to_numpy(zero_copy_only=False)


def _counts(values: pa.Array) -> pa.Array:  # times of any unit -> f64[n] of that unit
    return values.cast(pa.int64()).cast(pa.float64(), safe=False)


def _parse_texts(column: Column, time_format: str) -> np.ndarray:
    texts = column.values
    nothing = pa.scalar(None, pa.string())
    is_number = pc.match_substring_regex(texts, _NUMBER)
    numbers = _as_numpy(pc.if_else(is_number, texts, nothing).cast(pa.float64()))
    result = _parse_numbers(numbers, time_format)
    if pc.all(is_number).as_py():
        return result
    # Arrow parses times with and without a time zone as different types.
    dates = pc.replace_substring_regex(texts, r"(\.[0-9]{6})[0-9]+", r"\1")
    dates = pc.replace_substring_regex(dates, _NAMED_ZONE, "Z")
    dates = pc.replace_substring_regex(dates, _SPACED_OFFSET, r"\1\2")
    dates = pc.if_else(is_number, nothing, dates)
    zoned = pc.match_substring_regex(dates, _ZONE)
    plain, with_zone = pa.timestamp("us"), pa.timestamp("us", "UTC")
    parts = (
        (pc.if_else(zoned, nothing, dates), plain),
        (pc.if_else(zoned, dates, nothing), with_zone),
    )
    bad: list[np.ndarray] = []
    for values, kind in parts:
        try:
            micros = values.cast(kind).cast(pa.int64()).cast(pa.float64(), safe=False)
        except pa.ArrowInvalid:
            bad.append(uncastable(values, kind))
        else:
            read = _as_numpy(pc.divide(micros, 1e6))
            result = np.where(np.isnan(read), result, read)
    if bad:
        column.reject(np.sort(np.concatenate(bad)), _must(time_format))
    return result


def _parse_numbers(numbers: np.ndarray, time_format: str) -> np.ndarray:
    """Converts f64[n] numbers to f64[n] seconds, NaN where one is missing or does not match."""
    if time_format in TIME_UNITS:
        result = numbers * TIME_UNITS[time_format]
        if time_format == "seconds":
            return result
        return np.where((result >= _FIRST_SECONDS) & (result < _LAST_SECONDS + 1), result, np.nan)
    if time_format in CALENDAR_FORMS:
        return _calendar(numbers, _Form.parse(time_format))
    result = np.where((numbers >= _FIRST_SECONDS) & (numbers <= _LAST_SECONDS), numbers, np.nan)
    # Numbers of ten digits could also be seconds, but only of 2033 and later. Of earlier ones all
    # are dates, or none.
    for name in ("YYYYMMDDHH", "YYMMDDHHMM"):
        form = _Form.parse(name)
        could_be = np.flatnonzero(result >= 2e9)
        if len(could_be):
            result[could_be[~np.isnan(_calendar(result[could_be], form))]] = np.nan
        if _are_dates(result[result < 2e9], form):
            result[result < 2e9] = np.nan
    for name in _OTHER_ORDERS:
        could_be = np.flatnonzero(result >= 2e9)
        result[could_be[_in_order(result[could_be], name)]] = np.nan
        if _are_in_order(result[result < 2e9], name):
            result[result < 2e9] = np.nan
    first, last = (year * 10_000 for year in _PLAIN_YEARS)
    short = np.flatnonzero((numbers > first) & (numbers < last + 10_000))
    if len(short):
        result[short] = _calendar(numbers[short], _Form.parse("YYYYMMDD"))
    return result


class _Form(NamedTuple):
    """Format of dates as digits: digits of the year, and number of two-digit fields after it."""

    year_digits: int
    fields: int

    @classmethod
    def parse(cls, name: str) -> "_Form":
        """Parses a name of `CALENDAR_FORMS`."""
        digits = name.count("Y")
        return cls(digits, (len(name) - digits) // 2)


def _are_dates(seconds: np.ndarray, form: _Form) -> bool:
    """Returns True if all numbers are dates of a form, which would be improbable for seconds.

    The probability is that of seconds in other months, days, hours or minutes than others of them.
    Within an hour of digits, seconds are alike: all of the first minute are dates, or none is.
    """
    if not len(seconds) or np.isnan(_calendar(seconds[:_LOOKED_AT], form)).any():
        return False
    probability = 1.0
    for field, share in enumerate(_VALID_SHARES[: form.fields]):
        above = 100 ** (form.fields - field)
        probability *= share ** len(np.unique(seconds[:_LOOKED_AT] // above))
    return probability < _IMPROBABLE and not np.isnan(_calendar(seconds, form)).any()


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
    read = _calendar(digits.astype(np.float64), _Form.parse("YYYYMMDDHHMM"))
    first, last = _OTHER_YEARS
    whole = (rest == 0) & (numbers == np.floor(numbers))
    return whole & (year >= first) & (year <= last) & ~np.isnan(read)


def _are_in_order(seconds: np.ndarray, name: str) -> bool:
    """Returns True if all numbers are dates of an order, as `_are_dates` does."""
    if not len(seconds) or not _in_order(seconds[:_LOOKED_AT], name).all():
        return False
    parts, above, probability = _order_parts(name), 10**10, 1.0
    for last, part in zip(parts, parts[1:], strict=False):
        above //= 10 ** len(last)
        draws = len(np.unique(seconds[:_LOOKED_AT] // above))
        probability *= _OTHER_SHARES[part] ** draws
    return probability < _IMPROBABLE and bool(_in_order(seconds, name).all())


def _calendar(numbers: np.ndarray, form: _Form) -> np.ndarray:
    """Returns f64[n] seconds of dates written as digits, NaN where a number is not a date."""
    whole = (numbers == np.floor(numbers)) & (numbers >= 0)
    whole &= numbers < 10.0 ** (form.year_digits + 2 * form.fields)
    rest = np.where(whole, numbers, 0).astype(np.int64)
    parts = []
    for _ in range(form.fields):
        rest, part = np.divmod(rest, 100)
        parts.append(part)
    rest_of = [np.full(len(numbers), first) for first in (1, 1, 0, 0, 0)[form.fields :]]
    month, day, hour, minute, second = parts[::-1] + rest_of
    # The convention of strptime: 69 to 99 are 1969 to 1999.
    year = np.where(rest < 69, rest + 2000, rest + 1900) if form.year_digits == 2 else rest
    valid = whole & (year >= 1) & (month >= 1) & (month <= 12) & (day >= 1)
    valid &= (hour < 24) & (minute < 60) & (second < 60)
    first = ((year - 1970) * 12 + np.where(valid, month, 1) - 1).astype("datetime64[M]")
    date = first.astype("datetime64[D]") + (day - 1).astype("timedelta64[D]")
    valid &= date.astype("datetime64[M]") == first
    clock = hour * 3600.0 + minute * 60.0 + second
    return np.where(valid, date.astype(np.int64) * float(DAY) + clock, np.nan)


def _hint(column: Column, row: int, time_format: str) -> str:
    """Suggests what an invalid number may be, as a sentence with a leading space."""
    text = str(python_value(column.values, row))
    text = text.removesuffix(".0")
    if time_format or not text.isdecimal():
        return ""
    number = np.array([float(text)])
    forms = [name for name in CALENDAR_FORMS if _is_date(text, number, name)]
    orders = [name for name in _OTHER_ORDERS if _in_order(number, name)[0]]
    if forms:
        choices = " or ".join(f"features.time_format={name!r}" for name in forms)
        other = f" Write dates as {' or '.join(orders)} as text such as 2024-05-01 12:00."
        return f" Are these dates as {' or '.join(forms)}? Set {choices}.{other * bool(orders)}"
    if orders:
        return (
            f" Are these dates as {' or '.join(orders)}? Write them as text such as"
            " 2024-05-01 12:00. Set features.time_format='seconds' if they are seconds."
        )
    for name, unit in TIME_UNITS.items():
        per_second = round(1 / unit) if unit < 1 else 0
        if per_second and _FIRST_SECONDS <= number[0] * unit <= _LAST_SECONDS:
            divisor = f"{per_second:,}" if per_second > 1000 else str(per_second)
            return (
                f" Are these {name}? Divide them by {divisor}, or set"
                f" features.time_format={name!r}."
            )
    units = ", ".join(map(repr, TIME_UNITS))
    return (
        " A number is read as seconds from 1980 to 2099, and as YYYYMMDD from 2013 to 2099: set"
        f" features.time_format to the unit of others ({units}) or to the form of the digits."
    )


def _is_date(text: str, number: np.ndarray, name: str) -> bool:
    """Returns True if digits are a date of a form. Four-digit years must be from 1900 to 2199."""
    short = name.count("Y") == 2
    # A number lacks the leading zero of a year below 10.
    if len(text) != len(name) - (short and len(text) % 2):
        return False
    is_plausible = short or 1900 <= int(text[:4]) < 2200
    return is_plausible and not np.isnan(_calendar(number, _Form.parse(name))[0])


def days(times: np.ndarray) -> np.ndarray:
    """Maps f64[n] seconds since 1970 to datetime64[D][n], NaT for NaN. Prints as "2024-05-01"."""
    known = ~np.isnan(times)
    result = np.full(len(times), np.datetime64("NaT"), "datetime64[D]")
    result[known] = np.floor(times[known] / DAY).astype(np.int64).astype("datetime64[D]")
    return result
