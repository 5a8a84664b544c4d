"""Sections on the run: learning curves, placement, time and config."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrank import config_files, json_files
from jaxrank.config import default
from jaxrank.errors import InputError
from jaxrank.metrics.registry import TITLES
from jaxrank.run_report.collect import RunReport
from jaxrank.run_report.history import Curve
from jaxrank.run_report.markup import Markup, number, table, tag
from jaxrank.run_report.score_sections import note
from jaxrank.run_report.svg import Series, bar, color, lines

_METRICS_OF_A_TASK = 2
_MAX_TABLES = 20
_EXCHANGE = {
    "fullest_device": "fullest device over the mean",
    "buffer_use": "share of the exchange buffers in use",
    "rounds": "rounds of the exchange per step",
    "unique_ids": "distinct ids per step",
}


def learning_curves(runs: Sequence[RunReport]) -> list[Markup]:
    """Draws the metrics over steps and over time: evaluations as points, training pale."""
    names = _curve_names(runs)
    charts = []
    for name in names:
        task, _, metric = name.rpartition("/")
        title = f"{task} {TITLES.get(metric, metric)}" if task else name
        pair = [
            lines(f"{title} over {axis}", series, x_label=axis, y_label=title)
            for axis, series in (
                ("steps", _series(runs, name, "steps")),
                (_unit(runs)[0], _series(runs, name, "seconds")),
            )
            if series
        ]
        charts.append(tag("h3", title))
        charts.append(tag("div", *pair, class_="charts"))
    if not charts:
        return [note("No step has been recorded.")]
    text = (
        "Points are evaluations. The pale lines are means over training steps, each on its own"
        " batch before the update. Time is that of the run's programs, without pauses between"
        " them."
    )
    return [note(text), *charts]


def curve_panels(runs: Sequence[RunReport]) -> list[dict[str, Any]]:
    """Returns the evaluations of the runs over steps, for `plots.draw_panels`."""
    panels = []
    for name in _curve_names(runs):
        series = [s for s in _series(runs, name, "steps") if not s.faint]
        lines_ = [
            {"label": s.name, "x": s.x, "y": s.y, "low": (), "style": "line", "color": s.color}
            for s in series or _series(runs, name, "steps")
        ]
        labels = {"title": name, "x_label": "steps", "y_label": name}
        panels.append({**labels, "series": lines_, "x_scale": "linear", "y_scale": "linear"})
    return panels


def _curve_names(runs: Sequence[RunReport]) -> list[str]:
    evaluated = [name for run in runs for name in run.history.valid]
    names: list[str] = []
    per_task: dict[str, int] = {}
    for name in dict.fromkeys(evaluated):
        task = name.rpartition("/")[0]
        per_task[task] = per_task.get(task, 0) + 1
        if per_task[task] <= _METRICS_OF_A_TASK:
            names.append(name)
    return names or (["loss"] if any("loss" in run.history.train for run in runs) else [])


def _unit(runs: Sequence[RunReport]) -> tuple[str, float]:
    last = [c.seconds[-1] for run in runs for c in run.history.train.values() if len(c.seconds)]
    longest = max((s for s in last if s == s), default=0.0)
    return ("hours", 3600.0) if longest > 7200 else ("seconds", 1.0)


def _series(runs: Sequence[RunReport], name: str, axis: str) -> list[Series]:
    series = []
    unit = 1.0 if axis == "steps" else _unit(runs)[1]

    def xs(curve: Curve) -> np.ndarray:
        return getattr(curve, axis) / unit

    for i, run in enumerate(runs):
        run_color = color(i)
        if (curve := run.history.train.get(name)) and np.isfinite(xs(curve)).any():
            label = f"{run.name}, training"
            series.append(Series(label, xs(curve), curve.values, run_color, faint=True))
        if (curve := run.history.valid.get(name)) and np.isfinite(xs(curve)).any():
            label = f"{run.name}, validation"
            series.append(Series(label, xs(curve), curve.values, run_color))
    return series


def placement(runs: Sequence[RunReport]) -> list[Markup]:
    """Lists where tables are placed, and how even the load of the devices was."""
    parts = []
    for run in runs:
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        tables = sorted(run.summary["tables"], key=lambda t: -t["rows"])
        copies = sum(t["replicated_rows"] for t in tables)
        rows = sum(t["rows"] for t in tables)
        devices = run.summary["devices"] or "unknown"
        text = (
            f"{prefix}{len(tables)} tables with {rows:,} rows; {copies:,} rows are replicated on"
            f" every device, the others are split. Devices: {devices}."
        )
        parts.append(tag("p", text))
        balance = _balance(run)
        if balance:
            header = ["stack", "measure", "mean of the run"]
            parts.append(table(header, balance, texts=2))
        else:
            parts.append(note(f"{prefix}One device holds all rows, so nothing is exchanged."))
        listed = [
            [t["table"], number(t["rows"]), number(t["replicated_rows"]), _placed(t)]
            for t in tables[:_MAX_TABLES]
        ]
        more = f", the largest {_MAX_TABLES}" if len(tables) > _MAX_TABLES else ""
        summary = tag("summary", f"Tables{more}")
        header = ["table", "rows", "replicated rows", "placement"]
        parts.append(tag("details", summary, table(header, listed)))
        parts += _pretrained(tables, prefix)
    return parts


def _pretrained(tables: Sequence[Mapping[str, Any]], prefix: str) -> list[Markup]:
    """Lists the tables that started from pre-trained vectors, and their coverage."""
    rows = [
        [
            entry["table"],
            entry["init_from"]["path"],
            f"{entry['init_from']['row_coverage']:.1%}",
            f"{entry['init_from']['lookup_coverage']:.1%}",
            number(entry["init_from"]["lr_multiplier"]),
        ]
        for entry in tables
        if "init_from" in entry
    ]
    if not rows:
        return []
    header = ["table", "pre-trained vectors", "of rows", "of lookups", "lr multiplier"]
    text = f"{prefix}Coverage of pre-trained vectors: shares of the values and of their lookups in"
    return [note(f"{text} the training data that have one."), table(header, rows, texts=2)]


def _placed(entry: Mapping[str, Any]) -> str:
    if entry["replicated_rows"] == entry["rows"]:
        return "replicated"
    return "split by row" + (", hot rows replicated" if entry["replicated_rows"] else "")


def _balance(run: RunReport) -> list[list[str]]:
    rows = []
    for name, curve in run.history.train.items():
        start, _, measure = name.rpartition("/")
        if start.startswith("exchange/") and measure in _EXCHANGE:
            mean = float(np.nanmean(curve.values)) if len(curve.values) else float("nan")
            rows.append([start.removeprefix("exchange/"), _EXCHANGE[measure], number(mean)])
    return rows


def times(runs: Sequence[RunReport]) -> list[Markup]:
    """Lists the seconds of each phase, and the speed."""
    parts = []
    for run in runs:
        result = run.summary["result"] or {}
        phases = result.get("phase_seconds")
        if len(runs) > 1:
            parts.append(tag("h3", run.name))
        if not phases:
            parts.append(note("Known when the run has finished."))
            continue
        total = sum(phases.values()) or 1.0
        rows = [
            [phase, bar(seconds / total), f"{seconds:,.1f} s", f"{seconds / total:.1%}"]
            for phase, seconds in phases.items()
        ]
        speed = number(_rounded(result.get("examples_per_second")))
        text = f"{total:,.1f} s in the last command; training at {speed} examples/s."
        recorded = [c.seconds[-1] for c in run.history.train.values() if len(c.seconds)]
        if recorded and max(recorded) > 1.05 * total:
            text += f" All commands of the run took {max(recorded):,.0f} s up to the last step."
        parts.append(table(["phase", "", "time", "share"], rows, texts=2))
        parts.append(tag("p", text))
        if run.summary["description"]:
            parts.append(
                tag("details", tag("summary", "Model"), tag("pre", run.summary["description"]))
            )
    return parts


def _rounded(speed: Any) -> float | None:
    return None if speed is None or speed != speed else float(round(speed))


def configs(runs: Sequence[RunReport]) -> list[Markup]:
    """Lists the fields that differ between the runs, and those that differ from the default."""
    parts = []
    flat = [config_files.flatten(run.summary["config"]) for run in runs]
    if len(runs) > 1:
        rows = config_files.differing_fields(flat)
        parts.append(tag("h3", "Differences between the runs"))
        header = ["field", *(run.name for run in runs)]
        parts.append(table(header, rows, texts=len(header)) if rows else note("None."))
    for run, fields in zip(runs, flat, strict=True):
        name = config_files.model_name(run.summary["config"])
        defaults = config_files.flatten(config_files.to_plain(_default(name)))
        changed = [[p, config_files.as_text(v)] for p, v in fields.items() if defaults.get(p) != v]
        of_run = f" of {run.name}" if len(runs) > 1 else ""
        title = tag("summary", f"{len(changed)} fields{of_run} that differ from the defaults")
        body = table(["field", "value"], changed, texts=2)
        parts.append(tag("details", title, body))
        whole = json_files.to_text(run.summary["config"], indent=1)
        parts.append(tag("details", tag("summary", f"All fields{of_run}"), tag("pre", whole)))
    return parts


def _default(model: str) -> Any:
    """Returns the default config of a model, or of the ranker if the model is not registered."""
    try:
        return default(model)
    except InputError:
        return default()
