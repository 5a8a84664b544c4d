"""The curves in metrics.jsonl, in few points."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_MAX_LINES = 4_000  # of training steps that are read, evenly spread
_POINTS = 150  # of a curve of the training
_VALID = b'"kind": "valid"'
_LABELS = ("step", "kind", "day", "seconds")


class Curve(NamedTuple):
    """One number over the run: f64[n] each. Seconds are NaN in records of earlier versions."""

    steps: np.ndarray
    seconds: np.ndarray
    values: np.ndarray


class History(NamedTuple):
    """The curves of a run by name, in training and in evaluations."""

    train: Mapping[str, Curve]
    valid: Mapping[str, Curve]


def read(path: Path) -> History:
    """Reads metrics.jsonl. An absent file has no curves, and damaged lines are skipped.

    Points of the training are means over consecutive steps. Of a long run only some steps are read,
    so that the time to read it is bounded.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    is_valid = [_VALID in line[:80] for line in lines]
    train = [line for line, valid in zip(lines, is_valid, strict=True) if not valid]
    chosen = train[:: max(1, -(-len(train) // _MAX_LINES))]
    evaluations = [line for line, valid in zip(lines, is_valid, strict=True) if valid]
    return History(
        {name: _thinned(curve) for name, curve in _curves(chosen).items()}, _curves(evaluations)
    )


def _curves(lines: Iterable[bytes]) -> dict[str, Curve]:
    points: dict[str, list[tuple[float, float, float]]] = {}
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # a run that is killed leaves an incomplete line
            continue
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            continue
        at = record["step"], _number(record.get("seconds"))
        for name, value in record.items():
            if name not in _LABELS:
                points.setdefault(name, []).append((*at, _number(value)))
    return {name: Curve(*np.array(rows, np.float64).T) for name, rows in points.items()}


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _thinned(curve: Curve) -> Curve:
    """Returns the means over parts of equal length."""
    if len(curve.steps) <= _POINTS:
        return curve
    starts = np.arange(_POINTS) * len(curve.steps) // _POINTS
    counts = np.diff(np.append(starts, len(curve.steps)))
    return Curve(*(np.add.reduceat(column, starts) / counts for column in curve))
