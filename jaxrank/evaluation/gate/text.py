"""The printed result of a gate, and its JSON."""

import math
from collections.abc import Mapping
from typing import Any

from jaxrank.evaluation.comparison.text import describe as describe_comparison
from jaxrank.evaluation.gate.conditions import LIKELY, POSSIBLY, SURELY
from jaxrank.evaluation.gate.judge import Gate, Verdict
from jaxrank.evaluation.report import value_name

_USE = {
    SURELY: "the whole 95% interval",
    LIKELY: "the estimate",
    POSSIBLY: "a part of the 95% interval",
}
_MAX_SLICES = 5


def to_json(gate: Gate) -> dict[str, Any]:
    """Returns the result of `jaxrank evaluate` with a gate.

    It has the fields of the evaluation, `comparison`, `gate`, and `error` if the gate fails.
    """
    result = gate.evaluation._asdict()
    result["comparison"] = gate.comparison._asdict()
    result["gate"] = {
        "passed": gate.passes,
        "conditions": [
            {**v._asdict(), "passed": v.passes, "uses": _USE[v.certainty]} for v in gate.verdicts
        ],
    }
    if not gate.passes:
        result["error"] = f"the gate failed: {'; '.join(_reasons(gate))}"
    return result


def describe(gate: Gate) -> str:
    """Formats the comparison, if there is one, and the verdict of each condition."""
    lines = [describe_comparison(gate.comparison)] if len(gate.comparison.runs) > 1 else []
    for verdict in gate.verdicts:
        word = "passes" if verdict.passes else "FAILS"
        lines.append(f"gate {word:<7} {verdict.condition}: {_outcome(verdict)}")
        lines += [f"  {line}" for line in _slice_lines(verdict, gate)]
    return "\n".join(lines)


def _reasons(gate: Gate) -> list[str]:
    reasons = []
    for verdict in gate.verdicts:
        if verdict.holds is not False:
            reasons.append(f"{verdict.condition}: {_outcome(verdict)}")
        if verdict.slices and verdict.slices["failed"]:
            reasons += [f"{verdict.condition}, {line}" for line in _slice_lines(verdict, gate)]
    return reasons


def _outcome(verdict: Verdict) -> str:
    if verdict.holds is None:
        return f"undefined, so it cannot pass, by {_USE[verdict.certainty]}"
    span = {"estimate": verdict.value, "low": verdict.low, "high": verdict.high}
    verb = "fulfils" if verdict.holds else "does not fulfil"
    return f"{_span(span, verdict.is_relative)}; {_USE[verdict.certainty]} {verb} it"


def _span(span: Mapping[str, float], is_relative: bool) -> str:
    unit, factor = ("%", 100) if is_relative else ("", 1)
    form = "+.4g" if is_relative else ".5g"
    estimate, low, high = (f"{factor * span[n]:{form}}{unit}" for n in ("estimate", "low", "high"))
    return estimate if math.isnan(span["low"]) else f"{estimate} ({low} to {high})"


def _slice_lines(verdict: Verdict, gate: Gate) -> list[str]:
    if verdict.slices is None or gate.comparison.by is None:
        return []
    failed, column = verdict.slices["failed"], gate.comparison.by["column"]
    judged, undefined = verdict.slices["judged"], verdict.slices["undefined"]
    line = f"by {column}: {len(failed):,} of {judged:,} values fulfil it"
    line += f", {undefined:,} are too small to judge" * bool(undefined)
    if others := verdict.slices["others"]:
        line += f", and {others:,} smaller ones were not looked at"
    shown = [
        f"{value_name(entry['value'])}: {_span(entry, verdict.is_relative)}"
        for entry in failed[:_MAX_SLICES]
    ]
    shown += ["..."] * (len(failed) > _MAX_SLICES)
    return [f"{line}{': ' if shown else ''}{', '.join(shown)}"]
