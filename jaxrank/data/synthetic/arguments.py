"""Arguments of generated data, checked; what is refused is named as a field of `source`."""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrank.data.synthetic.clock import Clock
from jaxrank.errors import InputError


class ListShape(NamedTuple):
    """Of a column of lists: rows of its table, mean length, and whether its ids have weights."""

    rows: int
    mean_length: float
    weighted: bool = False


def check(name: str, value: Any, holds: bool, rule: str) -> None:
    """Raises InputError unless `holds`; `rule` says what `value` must be."""
    if not holds:
        raise InputError(f"source.{name}: must be {rule}: found {value!r}.")


def check_sizes(sizes: Mapping[str, Any]) -> None:
    for name, value in sizes.items():
        check(name, value, _is_whole(value) and value >= 0, "a whole number, not negative")


def check_numbers(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        check(name, value, _is_number(value) and value >= 0, "a number, not negative")


def check_rates(rates: Mapping[str, Any]) -> None:
    for name, rate in rates.items():
        check(name, rate, _is_number(rate) and 0 < rate < 1, "in (0, 1)")


def check_share(name: str, value: Any, rule: str) -> None:
    """`rule`: an interval from 0 to 1, of which one end is open."""
    least, most = rule.startswith("[0"), rule.endswith("1]")
    holds = _is_number(value) and 0 <= value <= 1
    check(name, value, holds and (least or value != 0) and (most or value != 1), rule)


def checked_rows(rows: Any) -> dict[str, int]:
    is_rows = isinstance(rows, Mapping) and len(rows) > 0
    check("rows", rows, is_rows, "a dict of split names and numbers")
    check_sizes({f"rows.{name}": count for name, count in rows.items()})
    return dict(rows)


def checked_ids(ids: Any) -> tuple[int, ...]:
    _check_list("ids", ids)
    check("ids", tuple(ids), all(map(_is_table_size, ids)), "in [1, 2**31)")
    return tuple(ids)


def checked_lists(lists: Any) -> list[ListShape]:
    _check_list("lists", lists)
    return [_checked_list(f"lists[{i}]", entry) for i, entry in enumerate(lists)]


def make_clock(rows: Mapping[str, int], days: Any, first_day: Any) -> Clock | None:
    """The times of splits that have `rows`; None where they have no days."""
    if not isinstance(days, Mapping):
        days = dict.fromkeys(rows, days)
    check("days", days, set(days) == set(rows), f"a number, or one for each of {list(rows)}")
    holds = isinstance(first_day, Mapping) and set(first_day) <= set(rows)
    check("first_day", first_day, holds, f"a dict of splits among {list(rows)}")
    check_sizes({f"days.{name}": number for name, number in days.items()})
    check_sizes({f"first_day.{name}": number for name, number in first_day.items()})
    some = any(days.values())
    check("days", dict(days), all(days.values()) or not some, "0 for all splits or for none")
    check("first_day", first_day, some or not first_day, "empty without days")
    return Clock(days, {name: first_day.get(name, 0) for name in rows}) if some else None


def _is_number(value: Any) -> bool:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return real and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_table_size(value: Any) -> bool:
    return _is_whole(value) and 0 < value < 2**31


def _check_list(name: str, value: Any) -> None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    check(name, value, is_list, "a list")


def _checked_list(name: str, entry: Any) -> ListShape:
    check(name, entry, isinstance(entry, Mapping), "a dict")
    unknown = set(entry) - set(ListShape._fields)
    absent = {"rows", "mean_length"} - set(entry)
    if unknown or absent:
        raise InputError(
            f"source.{name}: must have rows, mean_length and perhaps weighted: found"
            f" {sorted(entry)}."
        )
    shape = ListShape(**entry)
    check(f"{name}.rows", shape.rows, _is_table_size(shape.rows), "in [1, 2**31)")
    length = shape.mean_length
    check(f"{name}.mean_length", length, _is_number(length) and length > 0, "a positive number")
    check(f"{name}.weighted", shape.weighted, isinstance(shape.weighted, bool), "True or False")
    return shape
