"""The type of functions that report progress, and parsing and formatting of memory sizes."""

import re
from collections.abc import Callable

from jaxrank.errors import InputError

# Called with each line, which it prints, writes to the log, or drops.
Report = Callable[[str], None]

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = {"": 1, "B": 1} | _BINARY | _DECIMAL


def parse_bytes(text: str) -> int:
    """Parses "16GiB", "80GB", "1.5 TiB" or a number of bytes to bytes.

    Raises:
        InputError: the text is none of these, or the size is not above 0.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or match[2].lower() not in units or not float(match[1]):
        raise InputError(
            "--memory: must be a number of bytes above 0, or one with a unit of"
            f" {', '.join((*_BINARY, *_DECIMAL))}, such as 16GiB: found {text!r}."
        )
    return int(float(match[1]) * units[match[2].lower()])


def format_bytes(count: float) -> str:
    """Formats bytes, such as "1.50 GiB"."""
    size, unit = float(count), "B"
    for unit_name, factor in _BINARY.items():
        if abs(count) >= factor:
            size, unit = count / factor, unit_name
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.2f} {unit}"
