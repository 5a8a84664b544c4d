"""Formats the statistics of a split, and the changes of vocabularies, as text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from jaxrank.data.statistics.admission import Changes
from jaxrank.data.statistics.vocabulary import find_two_forms
from jaxrank.features import Dense

_MAX_TABLE_ROWS = 20
_MAX_VOCABULARIES = 20
_MAX_WORST = 3
# A dense feature with a mean or deviation above `_LARGE`, or a mean above `_LARGE` deviations, was
# learned worse than by a regression.
_LARGE, _SMALL_STD = 10, 0.01

Columns = Mapping[str, Mapping[str, Any]]


def lines(statistics: Mapping[str, Any]) -> list[str]:
    """Formats the result of `Statistics.summary`: a table for each kind of feature.

    If there are many features, a summary names only those with the worst values.
    """
    kinds = [statistics[kind] for kind in ("dense", "categorical", "ragged")]
    needs_table = sum(map(len, kinds)) > _MAX_TABLE_ROWS
    return [
        *(_task(name, task) for name, task in statistics["tasks"].items()),
        *(_summary(statistics) if needs_table else _tables(statistics)),
        *_out_of_range(statistics),
        *_late(statistics),
    ]


def _task(name: str, task: Mapping[str, Any]) -> str:
    if "kind" in task:
        moments = ", ".join(f"{key} {_number(task[key])}" for key in ("mean", "std", "min", "max"))
        return f"{name}: {task['known']:,} labels ({task['kind']}), {moments}"
    positive = task["positives"] / max(task["known"], 1)
    pending = f", {task['pending']:,} pending" if task["pending"] else ""
    return f"{name}: {task['known']:,} labels, {positive:.2%} positive{pending}"


def _out_of_range(statistics: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {column['out_of_range']:,} ids are out of range of their table"
        for kind in ("categorical", "ragged")
        for name, column in statistics[kind].items()
        if column["out_of_range"]
    ]


def unscaled(dense: Sequence[Dense], statistics: Mapping[str, Any]) -> dict[str, str]:
    """Returns {name: moments} of dense features whose numbers are large or close to each other.

    Features with `standardize` or `log` are not among them.

    Args:
        dense: of the schema.
        statistics: of the training split, with the moments of raw numbers.
    """
    result = {}
    for feature in dense:
        moments = statistics["dense"].get(feature.name, {})  # indicators have none
        mean, std = moments.get("mean"), moments.get("std")
        if feature.log or (feature.mean, feature.std) != (0, 1) or mean is None:
            continue
        is_far = abs(mean) > _LARGE or abs(mean) > max(1, _LARGE * std) and std > 0
        if is_far or std > _LARGE or 0 < std < _SMALL_STD:
            result[feature.name] = f"mean {_number(mean)}, std {_number(std)}"
    return result


def unscaled_line(dense: Sequence[Dense], statistics: Mapping[str, Any]) -> str:
    """Returns a sentence on the result of `unscaled`; empty if there are no such features."""
    texts = [f"{name} ({moments})" for name, moments in unscaled(dense, statistics).items()]
    if not texts:
        return ""
    return (
        f"Dense features that are not scaled: {first_names(texts)}. Models learn such numbers"
        " badly: leave `standardize` out of features.dense, or set log=True, and prepare again."
    )


def first_names(names: Sequence[str]) -> str:
    """Joins the first names, and the number of the others."""
    more = f" and {len(names) - _MAX_WORST} more" * (len(names) > _MAX_WORST)
    return ", ".join(names[:_MAX_WORST]) + more


def _late(statistics: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}: {column['late_ids']:,} ids in {column['late_lists']:,} lists are masked, because"
        " their events are not before the time of the example"
        for name, column in statistics["ragged"].items()
        if column.get("late_ids")
    ]


# Few features.


def _tables(statistics: Mapping[str, Any]) -> list[str]:
    rows = max(statistics["rows"], 1)
    dense = [
        [
            name,
            f"{f['missing'] / rows:.2%}",
            *(_number(f[k]) for k in ("mean", "std", "min", "max")),
        ]
        for name, f in statistics["dense"].items()
    ]
    new = {kind: ["new"] * bool(_compared(statistics[kind])) for kind in ("categorical", "ragged")}
    categorical = [
        [
            name,
            *(f"{share:.2%}" for share in (_missing(f), f["unknown_share"])),
            *(_new(f) for _ in new["categorical"]),
            f"{f['distinct']:,}",
        ]
        for name, f in statistics["categorical"].items()
    ]
    ragged = [
        [
            name,
            f"{f['mean']:.2f}",
            *(f"{f[k]:,}" for k in ("p50", "p95", "p99", "max")),
            *(f"{share:.2%}" for share in (f["empty"] / rows, f["unknown_share"])),
            *(_new(f) for _ in new["ragged"]),
            f"{f['distinct']:,}",
            f"{f['truncated_share']:.2%}",
        ]
        for name, f in statistics["ragged"].items()
    ]
    of_ids = ["missing", "unknown", *new["categorical"], "distinct (approx.)"]
    of_lists = ["mean", "p50", "p95", "p99", "max", "empty", "unknown", *new["ragged"]]
    return [
        *_table(["dense", "missing", "mean", "std", "min", "max"], dense),
        *_table(["categorical", *of_ids], categorical),
        *_table(["ragged", *of_lists, "distinct (approx.)", "truncated"], ragged),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats aligned columns, the first one left-aligned. Returns [] if there are no rows."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
        for row in (header, *rows)
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _missing(column: Mapping[str, Any]) -> float:
    return column["missing"] / max(column["ids"], 1)


def _compared(columns: Columns) -> Columns:
    """Selects the columns whose values were looked up in an earlier store's vocabulary."""
    return {name: column for name, column in columns.items() if "new_share" in column}


def _new(column: Mapping[str, Any]) -> str:
    return f"{column['new_share']:.2%}" if "new_share" in column else "-"


# Many features.


def _summary(statistics: Mapping[str, Any]) -> list[str]:
    rows = max(statistics["rows"], 1)
    dense, categorical, ragged = (statistics[kind] for kind in ("dense", "categorical", "ragged"))
    lines = []
    if dense:
        lines.append(_worst("dense", dense, "missing", lambda f: f["missing"] / rows))
    if categorical:
        lines.append(_worst("categorical", categorical, "missing", _missing))
        lines.append(_worst("categorical", categorical, "unknown", lambda f: f["unknown_share"]))
    if new := _compared(categorical):
        lines.append(_worst("categorical", new, "new", lambda f: f["new_share"]))
    if ragged:
        longest = max(ragged, key=lambda name: ragged[name]["max"])
        total = sum(f["mean"] for f in ragged.values())
        truncated = sum(f["truncated_ids"] for f in ragged.values())
        lines.append(
            f"{_features(ragged, 'ragged')}: {total:.2f} ids per example, longest list"
            f" {ragged[longest]['max']:,} ids ({longest}), {truncated:,} ids truncated"
        )
        lines.append(_worst("ragged", ragged, "empty", lambda f: f["empty"] / rows))
        lines.append(_worst("ragged", ragged, "unknown", lambda f: f["unknown_share"]))
        if new := _compared(ragged):
            lines.append(_worst("ragged", new, "new", lambda f: f["new_share"]))
        lines.append(_worst("ragged", ragged, "truncated", lambda f: f["truncated_share"]))
    return lines


def _features(columns: Columns, kind: str) -> str:
    return f"{len(columns)} {kind} feature{'s' * (len(columns) > 1)}"


def _worst(
    kind: str, columns: Columns, quantity: str, share_of: Callable[[Mapping[str, Any]], float]
) -> str:
    """Formats the mean share of all columns, and the columns with the largest shares."""
    shares = {name: share_of(column) for name, column in columns.items()}
    text = f"{_features(columns, kind)}: {sum(shares.values()) / len(shares):.2%} {quantity}"
    order = sorted((name for name in shares if shares[name]), key=lambda name: -shares[name])
    worst = ", ".join(f"{name} ({shares[name]:.2%})" for name in order[:_MAX_WORST])
    return f"{text}, most in {worst}" if worst else text


def vocabulary_lines(by_table: Mapping[str, Changes], *, is_first: bool) -> list[str]:
    """Formats the changes of vocabularies. Of many tables, those that lose most lookups.

    Args:
        is_first: True without earlier vocabularies. All rows are new then, and only they are shown.
    """
    worst = sorted(by_table, key=lambda name: -by_table[name].lost_share)
    shown = set(worst[:_MAX_VOCABULARIES])
    lines = [
        f"table {name}: {changes.new:,} rows" if is_first else _changes(name, changes)
        for name, changes in by_table.items()
        if name in shown
    ]
    if len(worst) > _MAX_VOCABULARIES:
        lines.append(f"and {len(worst) - _MAX_VOCABULARIES} tables that lose fewer lookups")
    return lines


def forms_line(what: str, values: pa.Array | pa.ChunkedArray) -> str:
    """Returns a sentence on values that differ only in their form; empty if there are none.

    Args:
        what: what has the values, such as "table user".
        values: see `find_two_forms`.
    """
    if (pair := find_two_forms(values)) is None:
        return ""
    count, forms = pair
    return (
        f"{what}: {count:,} values differ from another only in their form, such as"
        f" {' and '.join(map(repr, forms[:2]))}, and are different ids. If they mean the same,"
        " write all files in one form"
    )


def _changes(table: str, changes: Changes) -> str:
    dropped = f", {changes.dropped:,} more do not" if changes.dropped else ""
    lost = f"{changes.lost_share:.2%} of {changes.lookups:,} lookups lost"
    return (
        f"table {table}: {changes.kept:,} rows kept, {changes.new:,} new, {changes.evicted:,}"
        f" evicted; {changes.waiting:,} ids wait{dropped}; {lost}"
    )
