"""Prices of devices, from a CSV file that the user edits."""

import csv
import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from jaxrank import shipped
from jaxrank.errors import InputError

COLUMNS = ("device", "unit", "usd_per_hour", "date", "source")


class Price(NamedTuple):
    """The price of one unit of a device.

    unit: "core" of a CPU, "chip" of others. A TPU v2 or v3 has two devices of JAX per chip.
    usd_per_hour: None: not known.
    date: day on which the price was valid, such as "2026-11-28".
    row: number of its row in the file, from 1 for the header.
    """

    unit: str
    usd_per_hour: float | None
    date: str
    row: int


class Prices:
    """A table of prices.

    Args:
        path: a CSV file with COLUMNS. Empty: `configs/prices.csv`, which comes with the program.

    Raises:
        InputError: the file cannot be read, or a cell is invalid.
    """

    def __init__(self, path: str = ""):
        self.path = Path(path) if path else shipped.folder("configs") / "prices.csv"
        self.by_device: Mapping[str, Price] = dict(self._rows())

    def _rows(self) -> list[tuple[str, Price]]:
        try:
            # Spreadsheets write a mark at the beginning, which utf-8-sig skips.
            with self.path.open(newline="", encoding="utf-8-sig") as file:
                lines = list(csv.reader(file))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise InputError(
                f"--prices: {self.path} must be a readable CSV file: found {error}."
            ) from error
        if not lines or tuple(lines[0]) != COLUMNS:
            header = lines[0] if lines else []
            raise InputError(
                f"{self.path}, row 1: must have the columns {', '.join(COLUMNS)}: found"
                f" {', '.join(header) or 'nothing'}."
            )
        rows = [(i, line) for i, line in enumerate(lines[1:], 2) if line]
        prices = [self._row(i, line) for i, line in rows]
        first: dict[str, Price] = {}
        for name, price in prices:
            if first.setdefault(name, price) is not price:
                raise InputError(
                    f"{self.path}, row {price.row}, column device: must be a device that no other"
                    f" row has: found {name!r}, as in row {first[name].row}."
                )
        return prices

    def _row(self, number: int, cells: list[str]) -> tuple[str, Price]:
        where = f"{self.path}, row {number}"
        if len(cells) != len(COLUMNS):
            raise InputError(f"{where}: must have {len(COLUMNS)} cells: found {len(cells)}.")
        device, unit, text, date, _ = (cell.strip() for cell in cells)
        if not device:
            raise InputError(f"{where}, column device: must be the name of a device: found none.")
        expected = "core" if device == "cpu" else "chip"
        if unit != expected:
            raise InputError(
                f"{where}, column unit: must be {expected!r} for {device}: found {unit!r}."
            )
        if not text:
            return device, Price(unit, None, date, number)
        try:
            usd = float(text)
        except ValueError:
            usd = -1.0
        if not 0 < usd < math.inf:
            raise InputError(
                f"{where}, column usd_per_hour: must be a number above 0, or empty if it is not"
                f" known: found {text!r}."
            )
        try:
            datetime.date.fromisoformat(date)
        except ValueError as error:
            raise InputError(
                f"{where}, column date: must be the day of the price, such as 2026-11-28: found"
                f" {date!r}."
            ) from error
        return device, Price(unit, usd, date, number)

    def usd_per_hour(self, device: str) -> float:
        """Returns the price of one unit of a device.

        Raises:
            InputError: the table has no such device, or no price for it.
        """
        if device not in self.by_device:
            raise InputError(
                f"{self.path}: must have a row for the device {device!r}: it has"
                f" {', '.join(self.by_device) or 'none'}. Copy the file, add the row and pass it"
                " with --prices."
            )
        price = self.by_device[device]
        if price.usd_per_hour is None:
            raise InputError(
                f"{self.path}, row {price.row}, column usd_per_hour: must be the price of one"
                f" {price.unit} of {device}, which is empty. Copy the file, enter your price with"
                " its date, and pass it with --prices."
            )
        return price.usd_per_hour

    def known(self, device: str) -> float | None:
        """Returns the price of one unit of a device, None if it is not known."""
        price = self.by_device.get(device)
        return price.usd_per_hour if price else None

    def dates(self) -> str:
        """Returns the first and the last day of the prices as text."""
        days = sorted(p.date for p in self.by_device.values() if p.usd_per_hour is not None)
        return " to ".join(dict.fromkeys(days[:1] + days[-1:])) or "no day"
