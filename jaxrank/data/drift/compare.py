"""Compares the data of two days, or a log of scored requests with a store."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxrank.data.drift.counts import Counts
from jaxrank.data.drift.measures import Measures, measure
from jaxrank.data.drift.sides import is_log, log_side, open_side
from jaxrank.errors import InputError
from jaxrank.report import Report


def _change(pair: tuple[float, float] | None) -> float | None:
    return None if pair is None else abs(pair[1] - pair[0])


def _size(value: float | None) -> float | None:
    return None if value is None else abs(value)


# The numbers that a threshold bounds, by the name of its flag without --max-.
MEASURES: Mapping[str, Callable[[Measures], float | None]] = {
    "psi": lambda m: m.psi,
    "new": lambda m: m.new,
    "lost": lambda m: m.lost,
    "missing": lambda m: _change(m.missing),
    "unknown": lambda m: _change(m.unknown),
    "mean": lambda m: _size(m.shift) if m.kind == "dense" else None,
    "length": lambda m: _size(m.shift) if m.kind == "ragged" else None,
}


class Drift(NamedTuple):
    """Result of `compare_data`.

    old, new: the compared data.
    rows: of both.
    features: measures, those that exceed a threshold first, then by falling psi.
    exceeded: {feature: names of the thresholds}.
    """

    old: str
    new: str
    rows: tuple[int, int]
    features: list[Measures]
    exceeded: dict[str, list[str]]


def compare_data(
    old: str,
    new: str,
    *,
    old_split: str = "",
    new_split: str = "",
    hash_key_file: str = "",
    thresholds: Mapping[str, float] | None = None,
    report: Report = print,
) -> Drift:
    """Reads both sides once and measures how each feature has moved.

    Memory grows with the tables and the number of features, not with the data.

    Args:
        old: a store.
        new: a store, or a log of raw values in Parquet or CSV files.
        old_split, new_split: splits. Empty: "train", or the only one.
        hash_key_file: the key of a store with keyed hashes, for a log.
        thresholds: the largest accepted number of `MEASURES`, by name. A feature that is absent on
            one side exceeds any, and one that cannot be compared exceeds those whose number is
            undefined.
        report: receives a line per side.

    Raises:
        InputError: a side cannot be read, or a threshold is invalid.
    """
    limits = dict(thresholds or {})
    for name, limit in limits.items():
        if not (limit >= 0 and math.isfinite(limit)):
            raise InputError(f"--max-{name}: must be a number of at least 0: found {limit}.")
    first, store = open_side(old, old_split, "--old-split")
    if is_log(new):
        if new_split:
            raise InputError(f"--new-split: must be empty for a log: found {new_split!r}.")
        second = log_side(new, store, hash_key_file)
    else:
        if hash_key_file:
            raise InputError(f"--hash-key-file: must be used with a log: found the store {new}.")
        second, _ = open_side(new, new_split, "--new-split")
        if first.hash_key != second.hash_key:
            raise InputError(
                f"{second.path}: must have been prepared with the same --hash-key-file as"
                f" {first.path}, or both without one, so that their values can be compared: found"
                " another key."
            )
    counts = []
    for side in (first, second):
        report(f"Reading {side.path}")
        counts.append(Counts.count(side))
        if not counts[-1].rows:
            raise InputError(f"{side.path}: must have examples to compare: found none.")
    statistics = first.statistics(), second.statistics()
    features = measure((first, second), (counts[0], counts[1]), statistics)
    exceeded = {m.name: names for m in features if (names := _exceeded(m, limits))}
    ranked = sorted(features, key=lambda m: (m.name not in exceeded, *_rank(m)))
    rows = counts[0].rows, counts[1].rows
    return Drift(first.path, second.path, rows, ranked, exceeded)


def _exceeded(measures: Measures, limits: Mapping[str, float]) -> list[str]:
    if limits and measures.missing is None:
        return ["absent"]
    values = {name: MEASURES[name](measures) for name in limits}
    return [
        name
        for name, value in values.items()
        if name in measures.undefined or (value is not None and not value <= limits[name])
    ]


def _rank(measures: Measures) -> Sequence[float]:
    """Returns a key that sorts features with larger changes first.

    Features that are absent or cannot be compared come before them.
    """
    is_left_out = measures.psi is None and bool(measures.note)
    if measures.missing is None or measures.undefined or is_left_out:
        return (-math.inf,)
    others = [MEASURES[name](measures) or 0.0 for name in ("new", "lost", "missing", "unknown")]
    return (-(measures.psi or 0.0), -max(others))
