"""Times: a column of them as seconds since 1970, and the days that they lie in. All in UTC."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.encode.columns import Column, is_text, uncastable

DAY = 86_400  # seconds
_FIRST, _LAST = -62_135_596_800, 253_402_300_799  # the years 1 to 9999
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of a second
_MUST = "a time: seconds since 1970 in UTC, or text such as 2024-05-01 12:30:00"
_NUMBER = r"^[-+]?[0-9]+(\.[0-9]*)?$"
_ZONE = r"[T ][0-9:.]+(Z|[+-][0-9]{2}(:?[0-9]{2})?)$"


def seconds(column: Column, missing: bool = True) -> np.ndarray:
    """f64[n] seconds since 1970-01-01 00:00 UTC, NaN where the time is missing.

    Numbers, and text of digits, are such seconds. Other text is of ISO 8601: a date, or a date and
    a time of the day, with "T" or a space between; a fraction of a second counts to its sixth
    digit. Times without a zone, Arrow's too, are in UTC.

    Args:
        missing: whether a time may be missing.

    Raises:
        BadRows: a value is no time of the years 1 to 9999.
        InputError: the column is of a type without times.
    """
    kind = column.values.type
    if is_text(kind):
        values = _of_text(column)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values = column.values.cast(pa.float64(), safe=False)
    elif pa.types.is_timestamp(kind):
        values = pc.divide(_counts(column.values), float(_UNITS[kind.unit]))
    elif pa.types.is_date32(kind):
        values = pc.multiply(column.values.cast(pa.int32()).cast(pa.float64()), float(DAY))
    elif pa.types.is_date64(kind):
        values = pc.divide(_counts(column.values), 1000.0)
    else:
        column.refuse_type(_MUST)
    result = values.to_numpy(zero_copy_only=False)  # NaN for null
    absent = column.values.is_null().to_numpy(zero_copy_only=False)
    bad = ~((result >= _FIRST) & (result <= _LAST))
    if missing:
        bad &= ~absent
    if bad.any():
        late = bool(result[bad][0] > _LAST)
        hint = " Are these milliseconds? Divide them by 1000." if late else ""
        column.reject(np.flatnonzero(bad), _MUST, hint)
    return result


def _counts(values: pa.Array) -> pa.Array:  # times of any unit -> f64[n] of that unit
    return values.cast(pa.int64()).cast(pa.float64(), safe=False)


def _of_text(column: Column) -> pa.Array:
    texts = column.values
    nothing = pa.scalar(None, pa.string())
    is_number = pc.match_substring_regex(texts, _NUMBER)
    found = pc.if_else(is_number, texts, nothing).cast(pa.float64())
    if pc.all(is_number).as_py():
        return found
    # Arrow reads times with a zone and times without one as different types.
    dates = pc.replace_substring_regex(texts, r"(\.[0-9]{6})[0-9]+", r"\1")
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
            found = pc.coalesce(found, pc.divide(micros, 1e6))
    if bad:
        column.reject(np.sort(np.concatenate(bad)), _MUST)
    return found


def days(times: np.ndarray) -> np.ndarray:
    """f64[n] seconds since 1970 -> datetime64[D][n]; NaT for NaN. Its text is as "2024-05-01"."""
    known = ~np.isnan(times)
    result = np.full(len(times), np.datetime64("NaT"), "datetime64[D]")
    result[known] = np.floor(times[known] / DAY).astype(np.int64).astype("datetime64[D]")
    return result
