"""Entries of `features.derived`: columns that are computed from columns of the raw data."""

import dataclasses
import datetime
import zoneinfo
from collections.abc import Sequence

import numpy as np

from jaxrank.errors import InputError
from jaxrank.validate import field, nearest, require

# The numbers of columns that each kind reads.
_INPUTS = {
    "hour": (1, 1),
    "weekday": (1, 1),
    "cross": (2, 3),
    "ratio": (2, 2),
    "difference": (2, 2),
    "log": (1, 1),
    "bucket": (1, 1),
    "age": (2, 2),
}
UNITS = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86_400}


class UnknownColumn(InputError):
    """A column that a config names is missing in the data, or a pattern matches nothing."""


@dataclasses.dataclass(frozen=True)
class DerivedSpec:
    """A column that other entries can name like a column of the raw data."""

    name: str = field(help="name of the new column, which the raw data must not have")
    kind: str = field(
        choices=tuple(_INPUTS),
        help="hour: 0 to 23, and weekday: 0 for Monday to 6, of a time; cross: one id for each"
        " combination of two or three ids; ratio: a / b; difference: a - b; log: sign(x)"
        " log(1 + |x|); bucket: the number of boundaries that are at most a number; age: the time"
        " from the second time to the first",
    )
    columns: tuple[str, ...] = field(
        non_empty=True,
        single=True,
        help="columns of the raw data, or of earlier entries of `derived`; a text is a list of one",
    )
    zone: str = field(
        "UTC",
        read_when=("kind", ("hour", "weekday")),
        help="IANA time zone of hours and weekdays, such as Europe/Berlin",
    )
    unit: str = field(
        "hours", choices=tuple(UNITS), read_when=("kind", ("age",)), help="unit of an age"
    )
    boundaries: tuple[float, ...] = field(
        (), read_when=("kind", ("bucket",)), help="increasing numbers, compared as float32"
    )

    def check(self, where: str) -> None:
        require(bool(self.name), f"{where}.name", "the name of a column", self.name)
        least, most = _INPUTS[self.kind]
        must = f"{least} columns" if least == most else f"{least} or {most} columns"
        condition = least <= len(self.columns) <= most
        require(condition, f"{where}.columns", f"{must} (kind={self.kind!r})", self.columns)
        if self.kind == "bucket":
            with np.errstate(over="ignore", invalid="ignore"):
                steps = np.diff(np.array(self.boundaries, np.float32))
            condition = bool(self.boundaries) and bool((steps > 0).all())
            require(condition, f"{where}.boundaries", "rising, as float32", self.boundaries)
        if self.zone != "UTC":
            self._check_zone(where)

    def _check_zone(self, where: str) -> None:
        try:
            zoneinfo.ZoneInfo(self.zone)
        except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
            known = zoneinfo.available_timezones()
            raise InputError(
                f"{where}.zone: must be an IANA time zone: found"
                f" {self.zone!r}{nearest(self.zone, known)}."
            ) from error

    @property
    def time_zone(self) -> datetime.tzinfo:
        return datetime.UTC if self.zone == "UTC" else zoneinfo.ZoneInfo(self.zone)


def check_column(name: str, columns: Sequence[str], where: str) -> None:
    """Raises UnknownColumn, with the nearest names, unless the data has the column."""
    if name not in columns:
        raise UnknownColumn(f"{where}: the data has no column {name!r}{nearest(name, columns, 3)}.")


def add_derived(entries: Sequence[DerivedSpec], columns: Sequence[str]) -> list[str]:
    """Returns the columns of the raw data and behind them the derived ones.

    Raises:
        UnknownColumn: an entry reads a column that is not there.
        InputError: its name is taken.
    """
    names = list(columns)
    for i, entry in enumerate(entries):
        where = f"features.derived[{i}]"
        for name in entry.columns:
            check_column(name, names, f"{where}.columns")
        must = "the name of no other column"
        require(entry.name not in names, f"{where}.name", must, entry.name)
        names.append(entry.name)
    return names
