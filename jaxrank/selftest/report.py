"""Output of `selftest`: a table and JSON."""

import textwrap
from typing import Any

from jaxrank.selftest.check import FAIL, Check
from jaxrank.selftest.supervise import Result

_HEAD = ("check", "result", "finding", "what to do")
_WIDTHS = (16, 14, 46, 42)


def describe(result: Result) -> str:
    """Formats the checks as one table, and a line with their number."""
    rows = [_HEAD, *(_cells(check) for check in result.checks)]
    lines = [line for row in rows for line in _wrapped(row)]
    lines.insert(1, "  ".join("-" * width for width in _WIDTHS))
    return "\n".join([*lines, "", summary(result)])


def summary(result: Result) -> str:
    """Returns one sentence about all checks."""
    failed, number = result.failed, len(result.checks)
    if failed:
        return f"{len(failed)} of {number} checks failed: {', '.join(failed)}."
    return f"No check failed, in {result.seconds:.0f} s."


def _cells(check: Check) -> tuple[str, ...]:
    status = check.status.upper() if check.status == FAIL else check.status
    return check.name, status, check.finding, check.advice if check.status == FAIL else ""


def _wrapped(cells: tuple[str, ...]) -> list[str]:
    """Returns the lines of a row, with each cell wrapped to the width of its column."""
    wrapped = [textwrap.wrap(cell, width) for cell, width in zip(cells, _WIDTHS, strict=True)]
    height = max(map(len, wrapped))
    lines = []
    for i in range(height):
        parts = [lines_[i] if i < len(lines_) else "" for lines_ in wrapped]
        lines.append("  ".join(f"{p:<{w}}" for p, w in zip(parts, _WIDTHS, strict=True)).rstrip())
    return lines


def to_json(result: Result) -> dict[str, Any]:
    """Converts the result to plain data."""
    return {
        "checks": [check._asdict() for check in result.checks],
        "seconds": result.seconds,
        "error": summary(result) if result.failed else "",
    }
