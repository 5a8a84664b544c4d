"""Sections on the scores: result, reliability, histograms and slices."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxrank.evaluation.report import cluster_line, margins_text, worse_than_constant
from jaxrank.metrics.exact import probability
from jaxrank.metrics.intervals import Z
from jaxrank.metrics.registry import BY_NAME, CALIBRATION, NORMALIZED, TITLES, title_of
from jaxrank.run_report.collect import RunReport
from jaxrank.run_report.markup import Markup, join, number, table, tag
from jaxrank.run_report.svg import COLORS, Series, color, histogram, lines, whisker

_MAX_SLICES = 20
_NO_SCORES = "No checkpoint of this run has been scored on validation data."


def note(*content: Any) -> Markup:
    return tag("p", *content, class_="note")


def result(runs: Sequence[RunReport]) -> list[Markup]:
    """Compares the metrics of each task with the best constant."""
    parts = [note("The best constant predicts the mean label for every example.")]
    for run in runs:
        parts.append(_facts(run))
        if run.summary["result"]:
            parts += _sentences(run, named=len(runs) > 1)
    for task in _tasks(runs):
        parts.append(tag("h3", task))
        parts.append(_metrics(task, runs))
        parts += _regression_notes(task, runs)
    return parts


def _facts(run: RunReport) -> Markup:
    known, result_ = run.summary, run.summary["result"]
    text = _NO_SCORES if not result_ else f"Checkpoint {result_['checkpoint']}."
    if result_ and not result_["metrics"]:
        text += " It has no scores, because the run has no validation data."
    if known["finished"]:
        text += f" Finished {known['finished']} on {known['devices']}."
    days = result_["days"] if result_ else []
    if days:
        text += f" Means over {len(days)} days, each scored before it was trained on."
    return tag("p", tag("strong", run.name), ": ", text)


def _sentences(run: RunReport, *, named: bool) -> Iterable[Markup]:
    result_ = run.summary["result"]
    worse = worse_than_constant(_defined(result_["metrics"])).keys() - set(result_["untrained"])
    for task, metrics in result_["metrics"].items():
        loss = next(iter(metrics))
        if not result_["constant"] or not _is_number(metrics[loss]):
            continue
        constant = result_["constant"][task].get(loss)
        if not constant:
            if loss in TITLES and constant == 0:
                text = f"{task}: {TITLES[loss]} {number(metrics[loss])}. All labels are equal, so a"
                text += " constant has no loss."
                yield tag("p", f"{run.name}, {text}" if named else text, class_="headline")
            if loss not in TITLES:
                text = f"{task}: {title_of(loss)} {number(metrics[loss])}."
                text += " Its scores are trained by ranking alone and are not probabilities."
                yield tag("p", f"{run.name}, {text}" if named else text, class_="headline")
            continue
        change = 1 - metrics[loss] / constant
        side = "below" if change >= 0 else "above"
        text = (
            f"{task}: {TITLES[loss]} {number(metrics[loss])} is {abs(change):.1%} {side} that of"
            f" the best constant ({number(constant)})."
        )
        best = (result_.get("best_possible") or {}).get(task)
        if best and constant > best[loss] and change > 0:
            share = (constant - metrics[loss]) / (constant - best[loss])
            text += f" It closes {share:.1%} of the gap to the best possible."
        if task in result_["untrained"]:
            text += " This task was not trained."
        text = f"{run.name}, {text}" if named else text
        yield tag("p", text, class_="bad" if task in worse else "headline")


def _defined(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    return {t: {n: v for n, v in m.items() if _is_number(v)} for t, m in metrics.items()}


def _is_number(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _tasks(runs: Sequence[RunReport]) -> list[str]:
    names = [task for run in runs for task in (run.summary["result"] or {}).get("metrics", {})]
    return list(dict.fromkeys(names))


def _metrics(task: str, runs: Sequence[RunReport]) -> Markup:
    scored = [run for run in runs if task in (run.summary["result"] or {}).get("metrics", {})]
    rows: list[tuple[str, Mapping[str, Any]]] = [
        (run.name, run.summary["result"]["metrics"][task]) for run in scored
    ]
    for run in scored:
        result_ = run.summary["result"]
        regression = (result_.get("baseline") or {}).get("metrics")
        references = {
            "logistic regression": regression,
            "best possible": result_.get("best_possible"),
            "best constant": result_["constant"],
        }
        for name, reference in references.items():
            title = f"{name} ({run.name})"
            if reference and task in reference:
                rows.append((title, reference[task]))
    unique = _without_copies(rows[: len(scored)], rows[len(scored) :])
    names = list(dict.fromkeys(name for _, values in unique for name in values))
    body = [[title, *(number(values.get(n)) for n in names)] for title, values in unique]
    return table(["", *(TITLES.get(n, n) for n in names)], body)


def _regression_notes(task: str, runs: Sequence[RunReport]) -> Iterable[Markup]:
    """Compares each run with its logistic regression, with the intervals of the differences."""
    for run in runs:
        baseline = (run.summary["result"] or {}).get("baseline") or {}
        # An earlier version stored no differences.
        differences = (baseline.get("differences") or {}).get(task) or {}
        texts = [
            f"{TITLES.get(name, name)} {entry['difference']:+.2g} ({entry['low']:+.2g} to"
            f" {entry['high']:+.2g})"
            for name, entry in differences.items()
            if all(map(_is_number, entry.values()))
        ]
        if texts:
            of_run = f" of {run.name}" if len(runs) > 1 else ""
            shown = f"Model minus logistic regression{of_run}, with paired 95% intervals:"
            yield note(f"{shown} {', '.join(texts)}.")


def _without_copies(
    models: list[tuple[str, Mapping[str, Any]]], references: list[tuple[str, Mapping[str, Any]]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """Joins references that are equal for all runs, as they are on equal data."""
    by_name: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for title, values in references:
        by_name.setdefault(title.rpartition(" (")[0], []).append((title, values))
    rows = list(models)
    for name, entries in by_name.items():
        are_equal = len({str(values) for _, values in entries}) == 1
        rows += [(name, entries[0][1])] if are_equal else entries
    return rows


def reliability(runs: Sequence[RunReport]) -> list[Markup]:
    """Draws observed over predicted, with the table."""
    charts, tables = [], []
    for task in _tasks(runs):
        series = []
        for i, run in enumerate(runs):
            buckets = _task_value(run, "buckets", task)
            if not buckets:
                continue
            x, y = ([b[n] for b in buckets] for n in ("predicted", "observed"))
            errors = [Z * b.get("error", math.nan) for b in buckets]
            series.append(Series(run.name, x, y, color(i), errors=errors))
            tables.append(tag("h3", f"{task}, {run.name}" if len(runs) > 1 else task))
            tables.append(_bucket_table(buckets))
        if series:
            values = [v for s in series for v in (*s.x, *s.y)]
            ends = [min(values), max(values)]
            diagonal = Series("as predicted", ends, ends, "#777", dashed=True)
            chart = lines(
                f"Reliability of {task}",
                [diagonal, *series],
                x_label="mean prediction",
                y_label="mean label",
                log=True,
            )
            charts.append(_titled(task, chart))
    if not charts:
        return [note(_NO_SCORES)]
    return [
        note(
            "Examples in ten groups of equal size by prediction. Above the diagonal the model"
            " predicts too little, below it too much. Bars are 95% intervals."
        ),
        tag("div", *charts, class_="charts"),
        tag("details", tag("summary", "Table"), *tables),
    ]


def _task_value(run: RunReport, name: str, task: str) -> Any:
    return ((run.summary["result"] or {}).get(name) or {}).get(task)


def _bucket_table(buckets: Sequence[Mapping[str, float]]) -> Markup:
    names = ("lower", "upper", "predicted", "observed", "examples", "weight")
    header = ("from", "to", "mean prediction", "mean label", "examples", "weight")
    return table(header, [[number(b.get(n)) for n in names] for b in buckets], texts=0)


def _titled(title: str, chart: Markup) -> Markup:
    return tag("div", tag("h3", title), chart)


def histograms(runs: Sequence[RunReport]) -> list[Markup]:
    """Draws the scores of each run by label."""
    charts = []
    for task in _tasks(runs):
        for run in runs:
            counts = _task_value(run, "histograms", task)
            if not counts or not counts["edges"]:
                continue
            is_binary = "positive" in counts
            names = ("negative", "positive") if is_binary else ("predicted", "labels")
            labels = [f"label {n}" if is_binary else n for n in names]
            chart = histogram(
                f"Scores of {task} by label",
                counts["edges"],
                [(t, counts[n], c) for t, n, c in zip(labels, names, COLORS, strict=False)],
                x_label="predicted probability (even in the logit)" if is_binary else "value",
                **({"text": _probability} if is_binary else {}),
            )
            charts.append(_titled(f"{task}, {run.name}" if len(runs) > 1 else task, chart))
    if not charts:
        return [note(_NO_SCORES)]
    text = "Each histogram sums to 1. The less they overlap, the better the model ranks."
    return [note(text), tag("div", *charts, class_="charts")]


def _probability(logit: float) -> str:
    p = float(probability(logit))
    return f"{p:.1g}" if p < 0.5 else f"{p:.3g}" if p < 0.999 else f"1-{1 - p:.0e}"


def slices(runs: Sequence[RunReport]) -> list[Markup]:
    """Lists the values of each column, the worst calibrated loss first."""
    parts = []
    for run in runs:
        for entry in run.slices:
            column = entry["by"]["column"]
            of_run = f" of {run.name}" if len(runs) > 1 else ""
            for task in entry["metrics"]:
                title = f"{task} by {column}{of_run}, checkpoint of step {entry['step']}"
                parts.append(tag("h3", title))
                parts.append(_slice_table(task, entry))
    if not parts:
        text = "None yet: jaxrank report RUN --by=COLUMN, or jaxrank evaluate --by=COLUMN first."
        return [note(text)]
    text = (
        "The worst first, by the lower end of the 95% interval of the normalised loss. Above 1 a"
        " constant of the slice is better. The line is the value of all examples. Intervals are of"
        " one slice alone: among many slices some are off by chance."
    )
    return [note(text), *parts]


def _slice_table(task: str, entry: Mapping[str, Any]) -> Markup:
    values = [v for v in entry["by"]["values"] if v.get("intervals") and task in v["intervals"]]
    if not values:
        return note("No examples.")
    names = list(values[0]["metrics"][task])
    normalized = next((n for n in names if n in NORMALIZED), CALIBRATION)
    shown = [n for n in names if n in BY_NAME or n == CALIBRATION]
    ranked = sorted(values, key=lambda v: -_surely(v, task, normalized))
    chosen = [v for v in ranked if v["metrics"][task]["examples"]][:_MAX_SLICES]
    whole = entry["metrics"][task].get(normalized)
    spans = [
        (x["metrics"][task].get(normalized), x["intervals"][task].get(normalized)) for x in chosen
    ]
    ends = [end for _, span in spans if _is_interval(span) for end in span]
    ends += [whole] if _is_number(whole) else []
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    rows = []
    for value, (at, span) in zip(chosen, spans, strict=True):
        metrics, intervals = value["metrics"][task], value["intervals"][task]
        picture = whisker(
            at if _is_number(at) else math.nan,
            span if _is_interval(span) else None,
            low,
            high,
            whole if _is_number(whole) else 1.0,
        )
        cells = [_format_interval(metrics.get(n), intervals.get(n)) for n in shown]
        rows.append([_name(value["value"]), picture, number(metrics["examples"]), *cells])
    header = [entry["by"]["column"], TITLES.get(normalized, normalized), "examples"]
    listed = table([*header, *(TITLES[n] for n in shown)], rows, texts=2)
    others = len(entry["by"]["values"]) - len(rows)
    more = [note(f"{others:,} more values are better, smaller or without labels.")]
    gauc = entry["by"]["gauc"].get(task)
    mean = [note(f"Mean AUC of the values (GAUC): {number(gauc)}")] if _is_number(gauc) else []
    clustered = [note(cluster_line(entry["cluster"]) + ".")] if entry.get("cluster") else []
    return join([listed, *(more if others else []), *mean, *clustered])


def _name(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(str(_name(part)) for part in value)
    return "missing" if value is None else value


def _is_interval(span: Any) -> bool:
    return span is not None and all(_is_number(end) for end in span)


def _surely(value: Mapping[str, Any], task: str, name: str) -> float:
    """Returns the lower end of the interval of a loss, the lowest number if it is undefined."""
    span = value["intervals"][task].get(name)
    return span[0] if _is_interval(span) else -math.inf


def _format_interval(value: Any, span: Any) -> str:
    if not _is_interval(span):
        return number(value)
    return f"{number(value)} {margins_text(value, *span, form='.2g')}"
