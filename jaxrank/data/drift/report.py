"""The result of `jaxrank compare-data` as text and as JSON."""

from typing import Any

from jaxrank import json_files
from jaxrank.data.drift.compare import Drift
from jaxrank.data.drift.measures import Measures, Pair

_MAX_FEATURES = 40
_NUMBER_HINT = "psi: below 0.1 a small change, above 0.2 a large one"
_COLUMNS = ("psi", "new", "lost", "missing", "unknown", "mean or length", "shift")


def to_json(result: Drift) -> dict[str, Any]:
    """Returns the result, with `error` if a threshold is exceeded."""
    tree = json_files.plain(result)
    tree["features"] = [
        json_files.plain(m) | {"exceeds": result.exceeded.get(m.name, [])} for m in result.features
    ]
    if result.exceeded:
        listed = ", ".join(f"{n} ({', '.join(e)})" for n, e in result.exceeded.items())
        tree["error"] = f"the data has changed by more than a threshold: {listed}"
    return tree


def describe(result: Drift) -> str:
    """Formats a table of features, the worst first."""
    shown = result.features[:_MAX_FEATURES]
    rows = [_cells(m, result.exceeded.get(m.name, [])) for m in shown]
    header = ["feature", *_COLUMNS]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        f"{result.rows[0]:,} examples of {result.old}, then {result.rows[1]:,} of {result.new}",
        _NUMBER_HINT,
    ]
    for row in [header, *rows]:
        aligned = [row[0].ljust(widths[0])]
        aligned += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)]
        lines.append("  ".join([*aligned, *row[len(header) :]]).rstrip())
    if len(result.features) > len(shown):
        lines.append(f"and {len(result.features) - len(shown):,} more; --json has all")
    return "\n".join(lines)


def _cells(measures: Measures, exceeded: list[str]) -> list[str]:
    m = measures
    numbers = "" if m.mean is None else f"{m.mean[0]:.4g} to {m.mean[1]:.4g}"
    note = "; ".join([*([f"EXCEEDS {', '.join(exceeded)}"] if exceeded else []), *_note(m)])
    return [
        m.name,
        "" if m.psi is None else f"{m.psi:.4f}",
        *("" if v is None else f"{v:.2%}" for v in (m.new, m.lost)),
        *(_pair(p) for p in (m.missing, m.unknown)),
        numbers,
        "" if m.shift is None else f"{m.shift:+.3f}",
        note,
    ]


def _note(measures: Measures) -> list[str]:
    return [measures.note] if measures.note else []


def _pair(pair: Pair | None) -> str:
    return "" if pair is None else f"{pair[0]:.2%} to {pair[1]:.2%}"
