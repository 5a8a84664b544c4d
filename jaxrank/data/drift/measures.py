"""Measures how far the data of one side has moved from that of another, feature by feature."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.drift.counts import Counts, folded_note
from jaxrank.data.drift.sides import Side
from jaxrank.data.encode.raw_numbers import raw_numbers
from jaxrank.features import MISSING_ROW, RESERVED_ROWS, UNKNOWN_ROW, Dense, Table

_BUCKETS = 10  # of numbers
_FREQUENT = 20  # ids that have a category each
_INDEXED_VALUES = 1 << 22  # of a vocabulary, at a time
_PRIOR = 0.5  # added to each count, so that an empty category is finite

Pair = tuple[float, float]  # of the old and the new side


class Measures(NamedTuple):
    """The changes of one feature. None where a feature has no such number.

    kind: "dense", "categorical" or "ragged".
    psi: population stability index, sum((q - p) log(q / p)) over categories with the old share p
        and the new share q. Numbers have ten buckets with equal old shares and one of missing
        values. Ids have the 20 most frequent old ones, all other old ones, those that only the new
        side has, unknown and missing ones.
    new: share of the new side's ids that do not occur on the old side. Of a store, these are ids
        with a row that neither have one nor wait for one in the old store. For a log, they include
        the unknown ids that do not wait for a row in the store, if it records which ids wait.
    lost: share of the old side's ids with a row that do not occur on the new side. Ids that lost
        their row and occur there wait for one, and are not lost.
    missing: shares of missing numbers or ids, or of empty lists.
    unknown: shares of ids that the vocabulary of a side lacks. Those of stores are neither new nor
        lost.
    mean: of the raw numbers, or of the lengths of lists.
    shift: of the mean, in deviations of the old numbers or as a fraction of the old length.
    note: why something is absent.
    undefined: names of the thresholds whose number exists for this kind of feature and cannot be
        computed from these sides.
    """

    name: str
    kind: str
    psi: float | None = None
    new: float | None = None
    lost: float | None = None
    missing: Pair | None = None
    unknown: Pair | None = None
    mean: Pair | None = None
    shift: float | None = None
    note: str = ""
    undefined: tuple[str, ...] = ()


def measure(
    sides: tuple[Side, Side], counts: tuple[Counts, Counts], statistics: tuple[Any, Any]
) -> list[Measures]:
    """Measures each feature that both sides have, and notes the others.

    Args:
        statistics: of both sides, see `Side.statistics`.
    """
    old, new = sides
    rows = counts[0].rows, counts[1].rows
    results = []
    for kind in ("dense", "categorical", "ragged"):
        features = [{f.name: f for f in getattr(side.schema, kind)} for side in sides]
        names = [n for n in dict.fromkeys([*features[0], *features[1]])]
        for name in names:
            if kind == "dense" and not any(name in c.numbers for c in counts):
                continue  # the indicator of another feature
            columns = [s[kind].get(name) for s in statistics]
            if any(name not in f for f in features) or None in columns:
                where = old.path if name not in features[0] else new.path
                results.append(Measures(name, kind, note=f"absent in {where}"))
            elif kind == "dense":
                pair = features[0][name], features[1][name]
                results.append(_measure_numbers(name, pair, counts, columns, rows))
            else:
                result = _measure_ids(name, kind, sides, counts, columns)
                results.append(_with_lengths(result, columns, rows) if kind == "ragged" else result)
    return results


def _measure_numbers(
    name: str,
    features: tuple[Dense, Dense],
    counts: tuple[Counts, Counts],
    columns: list[Mapping[str, Any]],
    rows: tuple[int, int],
) -> Measures:
    missing = tuple(int(column["missing"]) for column in columns)
    sketches = [c.numbers[name] for c in counts]
    if not all(sketch.is_exact for sketch in sketches):
        sketches = [sketch.rounded() for sketch in sketches]
    edges = sketches[0].boundaries(_BUCKETS)
    if not len(edges):  # one old value: others are below or above it
        (value,) = sketches[0].range[:1] or (0.0,)
        edges = np.array([value, np.nextafter(np.float32(value), np.float32(np.inf))], np.float64)
    categories = []
    for sketch, feature, absent, total in zip(sketches, features, missing, rows, strict=True):
        buckets = sketch.bucket_counts(edges)
        if buckets.sum() == total and absent:
            # Missing numbers without an indicator are stored as the mean.
            mean = raw_numbers(np.zeros(1), feature).astype(np.float32)  # as the edges were
            at = np.searchsorted(edges, mean, side="right")
            buckets[at] -= absent
        categories.append(np.append(buckets, absent))
    means = [column["mean"] for column in columns]
    is_known = None not in means
    empty_sides = means.count(None)
    return Measures(
        name,
        "dense",
        psi=psi(*categories),
        missing=_shares(missing, rows),
        mean=(means[0], means[1]) if is_known else None,
        shift=_shift(means[0], means[1], columns[0]["std"]) if is_known else None,
        note="all its numbers are missing on one side" if empty_sides == 1 else "",
        undefined=("mean",) if empty_sides == 1 else (),
    )


def _measure_ids(
    name: str,
    kind: str,
    sides: tuple[Side, Side],
    counts: tuple[Counts, Counts],
    columns: list[Mapping[str, Any]],
) -> Measures:
    tables = [_table(side, kind, name) for side in sides]
    absent = [int(column.get("missing", 0)) for column in columns]
    total = [int(column["ids"]) for column in columns]
    present = [t - a for t, a in zip(total, absent, strict=True)]
    reserved = 0 if tables[0].encoding == "integer" else RESERVED_ROWS
    is_vocabulary = [table.encoding == "vocabulary" for table in tables]
    unseen = [int(column["unknown"]) for column in columns]
    unknown = [count + c.waiting[name] for count, c in zip(unseen, counts, strict=True)]
    result = Measures(
        name,
        kind,
        missing=_shares(absent, total),
        unknown=_shares(unknown, present) if all(is_vocabulary) else None,
    )
    mapped = _mapped(tables, sides, counts[1].ids[name])
    if isinstance(mapped, str):
        undefined = ["psi", "new", "lost"]
        if is_vocabulary[0] != is_vocabulary[1]:
            undefined.append("unknown")
        return result._replace(note=mapped, undefined=tuple(undefined))
    if any(name in c.folded for c in counts):
        result = result._replace(note=f"{folded_note()}: its changes may be larger")
    after, only_new, admitted = mapped
    before = counts[0].ids[name].copy()
    hidden = _without_row(tables, sides, before, after)
    evicted = before[hidden].sum()
    before[hidden] = 0
    size = max(len(before), len(after))
    before, after = (np.pad(c, (0, size - len(c))) for c in (before, after))
    known = [c[reserved:] for c in (before, after)]
    frequent = np.argsort(-known[0], kind="stable")[:_FREQUENT]
    frequent = frequent[known[0][frequent] > 0]
    occurs = known[0] > 0
    categories = []
    # An id that has a row on one side and waits for one on the other is unknown on both.
    without_row = (unknown[0] + evicted, unknown[1] + admitted)
    for side, extra in ((0, 0), (1, only_new)):
        frequent_counts = known[side][frequent]
        others = known[side][occurs].sum() - frequent_counts.sum()
        fresh = known[side][~occurs].sum() + extra
        categories.append(
            np.array([*frequent_counts, others, fresh, without_row[side], absent[side]], np.float64)
        )
    fresh = known[1][~occurs].sum() + only_new
    absent_count = known[0][known[1] == 0].sum()
    compared = known[1].sum() + only_new + admitted
    if tables[1].name in sides[1].waiting_from:  # ids that a log has first have no row
        fresh, compared = fresh + unseen[1], compared + unknown[1]
    return result._replace(
        psi=psi(*categories),
        new=float(fresh / max(compared, 1)),
        lost=float(absent_count / max(known[0].sum() + evicted, 1)),
    )


def _mapped(
    tables: list[Table], sides: tuple[Side, Side], counts: np.ndarray
) -> tuple[np.ndarray, int, int] | str:
    """Returns the new counts by the old table's rows, and the counts of ids that it lacks.

    The first of these is of ids that it does not know, the second of those that wait for a row.
    Rows that are unrelated give the reason as text.
    """
    old, new = tables
    if old.encoding != new.encoding:
        return f"its encoding is {new.encoding}, was {old.encoding}"
    if dataclasses.replace(old, name=new.name) == new or old.encoding == "integer":
        return counts, 0, 0
    if old.encoding != "vocabulary":
        differing = "buckets" if old.encoding == "bucket" else "number or salt of hashed rows"
        return f"its {differing} differ, so its ids cannot be compared"
    values = sides[1].values(new.name)
    present = np.zeros(len(values), np.int64)  # rows behind the last one that occurs have no count
    present[: max(len(counts) - RESERVED_ROWS, 0)] = counts[RESERVED_ROWS:]
    values, present = values.filter(pa.array(present > 0)), present[present > 0]
    row = _rows_of_values(values, sides[0].values(old.name))
    result = np.zeros(old.rows, np.int64)
    for reserved in (MISSING_ROW, UNKNOWN_ROW):
        result[reserved] = counts[reserved] if len(counts) > reserved else 0
    result[RESERVED_ROWS + row[row >= 0]] = present[row >= 0]
    values, present = values.filter(pa.array(row < 0)), present[row < 0]
    history = sides[0].history(old.name)
    if history is None:
        return result, int(present.sum()), 0
    waited = _rows_of_values(values, _strings(history.waiting)) >= 0
    return result, int(present[~waited].sum()), int(present[waited].sum())


def _without_row(
    tables: list[Table], sides: tuple[Side, Side], before: np.ndarray, after: np.ndarray
) -> np.ndarray:
    """Returns the old rows of ids that have no row on the new side, but occur there and wait.

    Args:
        before: counts of the old side by its rows.
        after: counts of the new side by the same rows.
    """
    history = sides[1].history(tables[1].name) if tables[1].encoding == "vocabulary" else None
    if history is None or not len(history.waiting):
        return np.zeros(0, np.int64)
    older = sides[0].history(tables[0].name)
    # Days of which the new store has data: those after the old store's, and its newest.
    last = history.newest - 1
    if older is not None and older.by_event == history.by_event:
        last = min(last, older.newest)
    recent = history.waiting.filter(pc.greater(history.waiting["last_day"], last))
    after = np.pad(after, (0, max(len(before) - len(after), 0)))[: len(before)]
    rows = np.flatnonzero((before > 0) & (after == 0))
    rows = rows[rows >= RESERVED_ROWS]
    values = sides[0].values(tables[0].name).take(pa.array(rows - RESERVED_ROWS))
    return rows[_rows_of_values(values, _strings(recent)) >= 0]


def _strings(waiting: pa.Table) -> pa.ChunkedArray:
    """Returns the values of a table of waiting ids, as a vocabulary has them."""
    return waiting["value"].cast(pa.string())


def _rows_of_values(values: pa.ChunkedArray, vocabulary: pa.ChunkedArray) -> np.ndarray:
    """Returns i64[values], the position of each value in a vocabulary, or -1.

    A part of the vocabulary at a time, because the index of its values takes several times the
    memory of the values.
    """
    row = np.full(len(values), -1)
    for start in range(0, len(vocabulary), _INDEXED_VALUES):
        part = pc.index_in(values, value_set=vocabulary.slice(start, _INDEXED_VALUES))
        part = part.fill_null(-1).to_numpy()
        row[part >= 0] = start + part[part >= 0]
    return row


def _table(side: Side, kind: str, name: str) -> Table:
    feature = next(f for f in getattr(side.schema, kind) if f.name == name)
    return next(t for t in side.schema.tables if t.name == feature.table)


def _with_lengths(
    result: Measures, columns: list[Mapping[str, Any]], rows: tuple[int, int]
) -> Measures:
    lengths = [float(column["mean"] or 0) for column in columns]
    return result._replace(
        missing=_shares([int(column["empty"]) for column in columns], rows),
        mean=(lengths[0], lengths[1]),
        shift=_shift(lengths[0], lengths[1], lengths[0]),
    )


def psi(old: np.ndarray, new: np.ndarray) -> float:
    """Returns the population stability index of counts of the same categories, each [k]."""
    used = (old > 0) | (new > 0)
    if not old.sum() or not new.sum() or not used.any():
        return 0.0 if old.sum() == new.sum() else math.inf
    p, q = ((c[used] + _PRIOR) / (c[used] + _PRIOR).sum() for c in (old, new))
    return float(((q - p) * np.log(q / p)).sum())


def _shares(parts: Any, totals: Any) -> Pair:
    old, new = (part / max(total, 1) for part, total in zip(parts, totals, strict=True))
    return float(old), float(new)


def _shift(old: float, new: float, unit: float) -> float:
    """Returns the change in units. Without a unit any change is infinite."""
    if old == new:
        return 0.0
    return (new - old) / unit if unit else math.copysign(math.inf, new - old)
