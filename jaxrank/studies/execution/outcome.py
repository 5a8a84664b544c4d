"""Writes the outcome of a study: table, picture, conclusion and notes, as files and as text."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrank import json_files, plots
from jaxrank.atomic import replacing
from jaxrank.errors import InputError
from jaxrank.studies.study import Outcome, RunResult, Table, first_metrics

_DIGITS = 5  # significant digits of a printed number


def check_directory(workdir: Path, name: str) -> None:
    """Raises InputError if the files of an outcome would replace files that are not of a study."""
    kinds = ("csv", "json", "png", "svg")
    present = [path for kind in kinds if (path := workdir / f"{name}.{kind}").exists()]
    if present and not (workdir / "runs").is_dir():
        raise InputError(
            f"--workdir: {workdir} must not hold other files with the names of the study's results:"
            f" found {present[0].name}. Use another --workdir."
        )


def write(workdir: Path, name: str, outcome: Outcome, failed: list[RunResult]) -> dict[str, Any]:
    """Writes NAME.csv, NAME.json, NAME.png and NAME.svg, and returns the content of the JSON."""
    with (
        replacing(workdir / f"{name}.csv") as partial,
        partial.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(outcome.table.columns)
        writer.writerows(outcome.table.rows)
    files = [workdir / f"{name}.csv"]
    if outcome.panels:
        files += [workdir / f"{name}.{kind}" for kind in ("png", "svg")]
        plots.draw_panels([json_files.plain(panel) for panel in outcome.panels], files[1:])
    result = {
        "study": name,
        **json_files.plain(outcome),
        "failed": {result.spec.name: result.error for result in failed},
        "files": list(map(str, files)),
    }
    json_files.write(workdir / f"{name}.json", result)
    return result


def describe(outcome: Outcome, failed: list[RunResult]) -> str:
    """Returns the table, the conclusion, the notes and the errors of failed runs as text."""
    lines = [table_text(outcome.table), "", *outcome.conclusion]
    lines += ["", "Notes:", *(f"- {note}" for note in outcome.notes), ""] if outcome.notes else []
    if outcome.best_overrides:
        lines.append(f"Best values: {' '.join(outcome.best_overrides)}")
    lines += [f"{result.spec.name} failed: {result.error}" for result in failed]
    return "\n".join(lines)


def runs_table(results: Sequence[RunResult]) -> Table:
    """Returns a table of the runs that train or measure, with one row for each."""
    shown = [r for r in results if r.metrics or r.examples_per_second]
    names = first_metrics(shown)
    rows = [
        (r.spec.name, *(r.metrics.get(name) for name in names), r.examples_per_second or None)
        for r in shown
    ]
    return Table(("run", *names, "examples/s"), rows)


def table_text(table: Table) -> str:
    """Formats a table with aligned columns, numbers to the right."""
    rows = [[_cell(value) for value in row] for row in table.rows]
    numeric = [
        all(isinstance(value, int | float | None) for value in column)
        for column in zip(*table.rows, strict=True)
    ] or [False] * len(table.columns)
    widths = [max(map(len, column)) for column in zip(table.columns, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in (table.columns, *rows)
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        large = abs(value) >= 10**_DIGITS
        return f"{value:,.0f}" if large else f"{value:.{_DIGITS}g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
