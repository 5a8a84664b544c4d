"""The printed result of `jaxrank compare`."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrank.evaluation.comparison.compare import Comparison, leading_metric, surely_worse
from jaxrank.evaluation.report import cluster_line, margins_text, value_name
from jaxrank.metrics.registry import CALIBRATION, metric_named, title_of

_MAX_VALUES = 20
_MAX_FIELDS = 40
_COLUMNS = 4  # of metrics in a table
_ROUNDING = 5e-6  # differences below it print as 0


def describe(result: Comparison) -> str:
    """Formats metrics, differences with intervals, slices and fields of the config."""
    first = result.runs[0]
    lines = [f"{result.examples:,} examples; differences to {first['workdir']}"]
    lines += [f"  {_letter(i)}  {run['checkpoint']}" for i, run in enumerate(result.runs)]
    lines.append(cluster_line(result.cluster, result.requests))
    for task in first["metrics"]:
        metrics = [run["metrics"][task] for run in result.runs]
        lines += _task(task, metrics, [of_run[task] for of_run in result.differences])
    if result.by:
        lines += _slices(result.by, first["metrics"])
    lines.append("config" if result.config else "The configs are equal.")
    for entry in itertools.islice(result.config, _MAX_FIELDS):
        values = "  ".join(f"{_letter(i)} {v}" for i, v in enumerate(entry["values"]))
        lines.append(f"  {entry['field']}: {values}")
    if len(result.config) > _MAX_FIELDS:
        lines.append(f"  and {len(result.config) - _MAX_FIELDS:,} more; --json has all")
    return "\n".join(lines)


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else f"run {index + 1}"


def _task(
    task: str, metrics: Sequence[Mapping[str, float]], differences: Sequence[Mapping[str, Any]]
) -> list[str]:
    names = [name for name in metrics[0] if name != "examples"]
    lines = []
    for start in range(0, len(names), _COLUMNS):
        title = task if not start else ""
        lines += _columns(title, names[start : start + _COLUMNS], metrics, differences)
    return lines


def _columns(
    title: str,
    names: Sequence[str],
    metrics: Sequence[Mapping[str, float]],
    differences: Sequence[Mapping[str, Any]],
) -> list[str]:
    lines = [f"{title:<18}" + "".join(f"{title_of(name):>33}" for name in names)]
    for i, values in enumerate(metrics):
        cells = "".join(f"{values[name]:>33.5f}" for name in names)
        lines.append(f"  {_letter(i):<16}{cells}")
        if i:
            cells = "".join(f"{_shown(differences[i - 1][name], name):>33}" for name in names)
            lines.append(f"  {_letter(i)} - {_letter(0):<12}{cells}")
    return lines


def _shown(entry: Mapping[str, float], name: str) -> str:
    """Formats a difference, with a verdict if its interval does not contain 0."""
    difference, low, high = entry["difference"], entry["low"], entry["high"]
    if math.isnan(low):
        return "undefined"
    sign = ""
    is_shown = abs(difference) >= _ROUNDING
    if is_shown and name != CALIBRATION and (low > 0 or high < 0):
        is_better = (difference > 0) == metric_named(name).higher_is_better
        sign = " better" if is_better else " worse"
    return f"{difference:+.5f} {margins_text(difference, low, high)}{sign}"


def _slices(by: Mapping[str, Any], metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = []
    values = by["values"]
    for task, of_task in metrics.items() if values else ():
        name = leading_metric(of_task)
        if not by["is_ordered"]:  # the worst first
            values = sorted(values, key=lambda entry: -surely_worse(entry, task, name))
        together = ", intervals of all values together" * by["simultaneous"]
        lines.append(f"{task}, {title_of(name)} by {by['column']}{together}")
        for entry in values[:_MAX_VALUES]:
            text = value_name(entry["value"])
            base = f"{_letter(0)} {entry['runs'][0]['metrics'][task][name]:.5f}"
            others = [
                f"{_letter(i + 1)} {_shown(of_run[task][name], name)}"
                for i, of_run in enumerate(entry["differences"])
            ]
            lines.append(f"  {text[:40]:<28}{entry['examples']:>12,}  {'  '.join([base, *others])}")
        if len(values) > _MAX_VALUES:
            rest = "later ones" if by["is_ordered"] else "better or smaller ones"
            lines.append(f"  and {len(values) - _MAX_VALUES:,} {rest}; --json has more")
    return lines
