"""Sections on the data: statistics of the splits, and how far they differ."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrank import config_files
from jaxrank.run_report.collect import RunReport
from jaxrank.run_report.markup import Markup, number, table, tag
from jaxrank.run_report.score_sections import note
from jaxrank.run_report.svg import bar

_MAX_SPLITS = 12
_MAX_SHIFTED_FEATURES = 20
_KINDS = ("dense", "categorical", "ragged")

Statistics = Mapping[str, Any]


def statistics(runs: Sequence[RunReport]) -> list[Markup]:
    """Lists examples, labels and features of each split, once for equal data."""
    parts = []
    for run in _distinct(runs):
        data = run.summary["data"]
        title = f"{run.name}: {data['store']}" if len(runs) > 1 else data["store"]
        splits = data["splits"]
        if not splits:
            parts.append(note(f"The data of {run.name} was not read."))
            continue
        parts.append(tag("h3", title))
        parts.append(_splits(splits))
        if len(splits) > _MAX_SPLITS:
            parts.append(note(f"{len(splits) - _MAX_SPLITS} more splits or days are not shown."))
        largest = max(splits, key=lambda name: splits[name].get("rows", 0))
        features = _features(splits[largest])
        if features:
            header = ["feature", "kind", "missing", "unknown", "distinct", "mean", "deviation"]
            summary = tag("summary", f"{len(features)} features of {largest}")
            parts.append(tag("details", summary, table(header, features, texts=2)))
    return parts


def _distinct(runs: Sequence[RunReport]) -> list[RunReport]:
    return list({str(run.summary["data"]): run for run in reversed(runs)}.values())[::-1]


def _splits(splits: Mapping[str, Statistics]) -> Markup:
    tasks = list(dict.fromkeys(t for s in splits.values() for t in s.get("tasks", {})))
    header = ["split", "examples"]
    for task in tasks:
        header += [f"{task}: labels", f"{task}: mean"]
    rows = []
    for name, split in list(splits.items())[:_MAX_SPLITS]:
        row = [name, number(split.get("rows"))]
        for task in tasks:
            labels = split.get("tasks", {}).get(task, {})
            row += [number(labels.get("known")), number(_label_mean(labels))]
        rows.append(row)
    return table(header, rows)


def _label_mean(labels: Mapping[str, Any]) -> float | None:
    if "mean" in labels:
        return labels["mean"]
    known = labels.get("known")
    return labels["positives"] / known if known else None


class _Measures(NamedTuple):
    """Numbers of one feature in one split. None: it has none such."""

    missing: float | None = None
    unknown: float | None = None
    distinct: float | None = None
    mean: float | None = None
    std: float | None = None


def _measures(split: Statistics, kind: str, name: str) -> _Measures:
    column, rows = split[kind][name], max(split.get("rows", 0), 1)
    if kind == "dense":
        missing = column["missing"] / rows
        return _Measures(missing, mean=column.get("mean"), std=column.get("std"))
    share, distinct = column.get("unknown_share"), column.get("distinct")
    if kind == "categorical":
        missing = column["missing"] / max(column.get("ids", rows), 1)
        return _Measures(missing, share, distinct)
    return _Measures(column["empty"] / rows, share, distinct, column.get("mean"))


def _features(split: Statistics) -> list[list[str]]:
    rows = []
    for kind in _KINDS:
        for name in split.get(kind, {}):
            m = _measures(split, kind, name)
            shares = [_percent(m.missing), _percent(m.unknown)]
            rows.append([name, kind, *shares, *map(number, (m.distinct, m.mean, m.std))])
    return rows


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"


def drift(runs: Sequence[RunReport]) -> list[Markup]:
    """Ranks features and labels by how far two splits differ."""
    parts = []
    for run in _distinct(runs):
        pair = _compared(run)
        if pair is None:
            continue
        first, second = (run.summary["data"]["splits"][name] for name in pair)
        shifts = _shifts(first, second)
        if not shifts:
            continue
        shifts.sort(key=lambda row: -row[0])
        title = f"{run.name}: from {pair[0]} to {pair[1]}" if len(runs) > 1 else ""
        title = title or f"From {pair[0]} to {pair[1]}"
        rows = [[name, bar(shift), f"{shift:.3g}", *cells] for shift, name, *cells in shifts]
        header = ["", "shift", "", "what", *pair]
        parts.append(tag("h3", title))
        parts.append(table(header, rows[:_MAX_SHIFTED_FEATURES], texts=2))
        if len(rows) > _MAX_SHIFTED_FEATURES:
            others = f"{len(rows) - _MAX_SHIFTED_FEATURES:,} others shift by less."
            parts.append(note(others))
    if not parts:
        return [note("There are no two splits with statistics.")]
    text = (
        "The largest change of each feature: of the mean in standard deviations, of the share of"
        " missing, unknown or empty values, or of the mean length relative to the first. 0 is none;"
        " above 0.1 is large."
    )
    return [note(text), *parts]


def _compared(run: RunReport) -> tuple[str, str] | None:
    """Returns the splits of training and validation, or the first and the last day."""
    splits = [n for n, s in run.summary["data"]["splits"].items() if "tasks" in s]
    fields = config_files.flatten(run.summary["config"])
    train, valid = (fields.get(f"data.{name}", "") for name in ("train", "valid"))
    if train in splits and valid in splits and train != valid:
        return train, valid
    days = sorted(name for name in splits if name.startswith(f"{train.partition('/')[0]}/"))
    if len(days) > 1:
        return days[0], days[-1]
    return (splits[0], splits[-1]) if len(splits) > 1 else None


def _shifts(first: Statistics, second: Statistics) -> list[tuple[Any, ...]]:
    """Returns (shift, name, what, value before, value after) of each feature and task."""
    rows: list[tuple[Any, ...]] = []
    for kind in _KINDS:
        for name in first.get(kind, {}):
            if name in second.get(kind, {}):
                a, b = _measures(first, kind, name), _measures(second, kind, name)
                rows.append(_largest(name, kind, a, b))
    for name, labels in first.get("tasks", {}).items():
        before, after = map(_label_mean, (labels, second["tasks"].get(name, {})))
        if before is not None and after is not None:
            change = abs(after - before) / (abs(before) or 1.0)
            texts = number(before), number(after)
            rows.append((change, f"label {name}", "mean, relative", *texts))
    return rows


def _largest(name: str, kind: str, a: _Measures, b: _Measures) -> tuple[Any, ...]:
    missing = "empty" if kind == "ragged" else "missing"
    changes = []
    for quantity, before, after in (
        (missing, a.missing, b.missing),
        ("unknown", a.unknown, b.unknown),
    ):
        if before is not None and after is not None:
            changes.append((abs(after - before), quantity, _percent(before), _percent(after)))
    if a.mean is not None and b.mean is not None:
        unit = a.std if kind == "dense" else abs(a.mean)
        change = abs(b.mean - a.mean) / (unit or 1.0)
        word = "mean" if kind == "dense" else "mean length"
        changes.append((change, word, number(a.mean), number(b.mean)))
    shift, quantity, before_text, after_text = max(changes, default=(0.0, "", "", ""))
    return shift, name, quantity, before_text, after_text
