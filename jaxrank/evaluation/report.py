"""The result of a training run, and results as printed text."""

import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrank.data.statistics.report import first_names
from jaxrank.evaluation.days import DayScore
from jaxrank.evaluation.evaluate import Evaluation
from jaxrank.evaluation.requests import WEIGHTING, request_lines
from jaxrank.evaluation.score import Metrics
from jaxrank.evaluation.slices import surely_lost
from jaxrank.losses import DEFAULT_OF_KIND
from jaxrank.metrics.exact import calibration_error
from jaxrank.metrics.intervals import Z
from jaxrank.metrics.registry import CALIBRATION, NORMALIZED, TITLES, title_of

_SHOWN = 20  # values of a column
_SHOWN_IN_ORDER = 100  # values of a column of days, hours or buckets
_MIN_SHOWN_SECONDS = 0.05  # seconds of a phase
_FEW_CLUSTERS = 20  # below, intervals of differences covered 92% where 95% was meant
_MISSING = "missing"
_PROPER = frozenset(DEFAULT_OF_KIND.values())  # losses whose minimum is that of the metrics
_LOSS_CAUSE = (
    "a loss other than bce, squared and poisson (task_losses), whose minimum is not at the rate of"
    " the labels (run `jaxrank calibrate` after training, and compare AUC);"
)
_CAUSES = (
    " too few steps (num_epochs, num_steps); a learning rate that is"
    " too high or too low (optim.dense.base_learning_rate, optim.tables.base_learning_rate); stale"
    " statistics of batch norm (model.batch_norm_momentum); a shift between the splits."
)
_NOT_TRAINED = " (not trained)"

Intervals = Mapping[str, Mapping[str, Sequence[float]]]  # {task: {metric: [low, high]}}


class Result(NamedTuple):
    """Result of a training run.

    step: number of steps done.
    examples_per_second: of training, without compilation, evaluation and saving.
    seconds: of the whole command, without the baseline.
    phase_seconds: `seconds` by phase, see `telemetry.phases`.
    metrics, best_possible, constant: on the validation data, see `evaluate`. In progressive
        validation these are means over the days, each scored at its own step.
    checkpoint: the checkpoint of `metrics`: the newest one, or the best with early stopping.
    checkpoint_step: step of that checkpoint.
    days: the scores of each day in progressive validation.
    untrained: tasks without weight, which stay as they were initialised.
    baseline: the fields of `baseline.Baseline`; None unless it was asked for.
    trained_steps: steps of this command, 0 if the run had finished before.
    buckets, histograms: of the scores behind `metrics`, see `evaluate.Evaluation`. In progressive
        validation they are of the last day. Empty without validation.
    requests: what the metrics of requests count, see `evaluate.Evaluation`.
    losses: {task: name} of the losses that are chosen for tasks.
    unscaled: dense features with large numbers, see `data.statistics.report.unscaled`.
    """

    step: int
    examples_per_second: float
    seconds: float
    phase_seconds: Mapping[str, float]
    metrics: Metrics
    best_possible: Metrics | None
    constant: Metrics | None
    checkpoint: str
    checkpoint_step: int
    days: list[DayScore]
    untrained: tuple[str, ...] = ()
    baseline: dict[str, Any] | None = None
    trained_steps: int = 0
    buckets: Mapping[str, list[dict[str, float]]] = MappingProxyType({})
    histograms: Mapping[str, dict[str, list[float]]] = MappingProxyType({})
    requests: dict[str, Any] | None = None
    losses: Mapping[str, str] = MappingProxyType({})
    unscaled: tuple[str, ...] = ()


def _first_names(values: Mapping[str, float]) -> list[str]:
    return [name for name in values if name != "examples"][:2]


def short_summary(metrics: Metrics, untrained: Collection[str] = ()) -> str:
    """Formats the first two metrics of each task.

    Example: "click: logloss 0.43037, AUC 0.81834; conversion: ...".
    """
    return "; ".join(
        f"{task}{_NOT_TRAINED * (task in untrained)}: "
        + ", ".join(f"{title_of(c)} {values[c]:.5f}" for c in _first_names(values))
        for task, values in metrics.items()
    )


def worse_than_constant(metrics: Metrics) -> dict[str, str]:
    """Returns {task: metric} for tasks whose loss is above the loss of the best constant."""
    return {
        task: f"{title_of(name)} {values[name]:.5f}"
        for task, values in metrics.items()
        for name in NORMALIZED
        if values.get(name, 0) > 1
    }


def constant_warning(
    metrics: Metrics,
    losses: Mapping[str, str],
    *,
    is_first: bool = True,
    unscaled: Sequence[str] = (),
) -> str:
    """Returns a sentence on tasks that are worse than a constant and why; empty if none is.

    Args:
        losses: {task: name} of the losses that are chosen for tasks.
        is_first: whether the causes are listed.
        unscaled: dense features with large numbers, the first cause.
    """
    worse = worse_than_constant(metrics)
    if not worse:
        return ""
    tasks = ", ".join(f"{task} ({shown}, which should be below 1)" for task, shown in worse.items())
    start = f"Worse than the best constant: {tasks}."
    if not is_first:
        return f"{start} Likely causes: see the first evaluation."
    other = {losses[task] for task in worse if task in losses} - {"", *_PROPER}
    cause = f" {_LOSS_CAUSE}" if other else ""
    names = first_names(unscaled) if unscaled else "large numbers that are"
    cause = f" {names} not scaled (standardize or log in features.dense);{cause}"
    return f"{start} Likely causes, in this order:{cause}{_CAUSES}"


def evaluation_line(
    start: str,
    metrics: Metrics,
    untrained: Collection[str] = (),
    losses: Mapping[str, str] = MappingProxyType({}),
    *,
    is_first: bool = True,
    unscaled: Sequence[str] = (),
) -> str:
    """Returns the line of an evaluation, with a second one where a constant does better.

    Args:
        untrained: tasks of weight 0, to which no constant is compared.
        losses, is_first, unscaled: see `constant_warning`.
    """
    line = f"{start}: {short_summary(metrics, untrained)}"
    trained = {k: v for k, v in metrics.items() if k not in untrained}
    warning = constant_warning(trained, losses, is_first=is_first, unscaled=unscaled)
    return f"{line}\n  {warning}" if warning else line


def flatten_metrics(metrics: Metrics) -> dict[str, float]:
    """Returns the metrics of all tasks by their recorded names, for example "click/logloss"."""
    return {f"{task}/{name}": v for task, values in metrics.items() for name, v in values.items()}


def _width(name: str) -> int:
    """Returns the width of a metric's column, without the space before it."""
    return max(14, len(title_of(name)))


def _titles(metrics: dict[str, float]) -> str:
    return "".join(f" {title_of(c):>{_width(c)}}" for c in metrics if c != "examples")


def _values(metrics: dict[str, float]) -> str:
    # The space separates columns even if a squared error is wider than its column.
    return "".join(f" {v:>{_width(c)}.5f}" for c, v in metrics.items() if c != "examples")


def _reference(name: str, metrics: Mapping[str, float], model: Mapping[str, float]) -> str:
    """Formats metrics of a reference in the columns of a model, blank where there is none."""
    cells = (
        f" {metrics[c]:>{_width(c)}.5f}" if c in metrics else (1 + _width(c)) * " "
        for c in model
        if c != "examples"
    )
    return f"  {name:<16}{''.join(cells)}".rstrip()


def _line(name: str, metrics: dict[str, float]) -> str:
    return f"  {name:<16}{_values(metrics)}"


def _table(
    metrics: Metrics,
    constant: Metrics | None,
    best: Metrics | None,
    untrained: Collection[str] = (),
    losses: Mapping[str, str] = MappingProxyType({}),
    baseline: Metrics | None = None,
    intervals: Intervals = MappingProxyType({}),
    unscaled: Sequence[str] = (),
) -> list[str]:
    lines = []
    for task, values in metrics.items():
        title = task + _NOT_TRAINED * (task in untrained)
        lines.append(f"{title:<18}{_titles(values)}")
        lines.append(_line("model", values))
        if task in intervals:
            lines += _interval_lines(values, intervals[task])
        if baseline and task in baseline:
            lines.append(_reference("regression", baseline[task], values))
        if best and task in best:
            lines.append(_reference("best possible", best[task], values))
        if constant:
            lines.append(_reference("best constant", constant[task], values))
        if constant and best and task in best and "logloss" in values:
            gap = constant[task]["logloss"] - best[task]["logloss"]
            above = values["logloss"] - best[task]["logloss"]
            if above == above:  # NaN if no label is known
                lines += _gap_lines(above, gap)
        lines.append(f"  on {values['examples']:,} examples")
    trained = {task: values for task, values in metrics.items() if task not in untrained}
    warning = constant_warning(trained, losses, unscaled=unscaled)
    return [*lines, warning] if warning else lines


def _gap_lines(above: float, gap: float) -> list[str]:
    """Formats the fraction of the gap between two losses that a model closes.

    Args:
        above: loss of the model minus the best possible.
        gap: loss of the best constant minus the best possible.
    """
    start = f"  logloss is {above:.5f} above the best possible: the model"
    if above > gap > 0:
        share = f"{(above - gap) / gap:.1%}"
        return [f"{start} is {share}", "  of the gap worse than the best constant"]
    share = f"{(gap - above) / gap:.1%}" if gap > 0 else "none"
    return [
        f"{start} closes",
        f"  {share} of the gap between the best constant and the best possible",
    ]


def margins_text(value: float, low: float, high: float, *, form: str = ".5f") -> str:
    """Formats how far the ends of an interval are from its value, such as "±0.00123".

    Returns "-0.00123/+0.00201" if the sides differ, and an empty text if the ends are undefined.
    """
    if math.isnan(high - low):
        return ""
    below, above = f"{value - low:{form}}", f"{high - value:{form}}"
    return f"±{above}" if below == above else f"-{below}/+{above}"


def _margins(
    values: Mapping[str, float], intervals: Mapping[str, Sequence[float]], names: Iterable[str]
) -> list[str]:
    """Returns `margins_text` of each metric."""
    undefined = (math.nan, math.nan)
    return [margins_text(values.get(n, math.nan), *intervals.get(n, undefined)) for n in names]


def _interval_lines(
    values: Mapping[str, float], intervals: Mapping[str, Sequence[float]]
) -> list[str]:
    """Formats intervals in the columns of a model, two sides that differ below each other."""
    names = [name for name in values if name != "examples"]
    texts = _margins(values, intervals, names)
    sides = [text.partition("/") for text in texts]
    rows = [[low for low, _, _ in sides], [high for _, _, high in sides]]
    widths = [_width(name) for name in names]
    cells = [
        "".join(f" {cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in rows
        if any(row)
    ]
    return [
        f"{title:<18}{row}".rstrip()
        for title, row in zip(("  95% interval", ""), cells, strict=False)
    ]


def _days(scores: list[DayScore]) -> list[str]:
    lines = []
    for task in scores[0]["metrics"]:
        titles = _titles(scores[0]["metrics"][task])
        lines.append(f"{task:<22}{'step':>15}{'examples':>15}{titles}")
        for score in scores:
            values = score["metrics"][task]
            counts = f"{score['step']:>15,}{values['examples']:>15,}"
            lines.append(f"  {score['day']:<20}{counts}{_values(values)}")
    return [*lines, "Means over the days, weighted by examples:"]


def format_training(result: Result, workdir: str, *, page: bool = True) -> str:
    """Formats the summary of `jaxrank train`. `page`: whether report.html was written."""
    workdir = os.path.abspath(workdir)
    valid = [f"Validation at step {result.checkpoint_step:,}:"] if result.metrics else []
    if result.days:
        valid = ["Each day, scored before any of it was trained on:"]
    title = f"Trained to step {result.step:,} in {result.seconds:.0f} s:"
    if not result.trained_steps:
        title = (
            f"The run had already finished at step {result.step:,}. Nothing was trained; this"
            f" command took {result.seconds:.0f} s:"
        )
    lines = [
        "",
        title,
        *_phases(result),
        *valid,
        *(_days(result.days) if result.days else []),
        *_table(
            result.metrics,
            result.constant,
            result.best_possible,
            result.untrained,
            result.losses,
            result.baseline["metrics"] if result.baseline else None,
            unscaled=result.unscaled,
        ),
        *_baseline(result),
        *request_lines(result.requests),
        f"checkpoint   {result.checkpoint}",
        f"TensorBoard  tensorboard --logdir={os.path.join(workdir, 'tensorboard')}",
        f"every step   {os.path.join(workdir, 'metrics.jsonl')}",
        *([f"report       {os.path.join(workdir, 'report.html')}"] if page else []),
    ]
    return "\n".join(lines)


def _phases(result: Result) -> list[str]:
    """Formats the seconds of each phase that took any, and the speed of training."""
    lines = []
    for phase, seconds in result.phase_seconds.items():
        speed = result.examples_per_second
        # NaN without two consecutive executions, for example in a run that had finished before.
        is_shown = phase == "training" and speed == speed
        speed_text = f"  {speed:,.0f} examples/s" if is_shown else ""
        if seconds >= _MIN_SHOWN_SECONDS:
            lines.append(f"  {phase:<16}{seconds:>8,.1f} s{speed_text}")
    return lines


def _baseline(result: Result) -> list[str]:
    """Describes the fit of the baseline, and compares the model's logloss with it."""
    if result.baseline is None:
        return []
    ids, seconds = result.baseline["distinct_ids"], result.baseline["seconds"]
    lines = [
        f"regression: scikit-learn on {ids:,} distinct ids, {result.baseline['features']}, in"
        f" {seconds:.0f} s"
    ]
    for task, metrics in result.baseline["metrics"].items():
        change = result.metrics[task]["logloss"] / metrics["logloss"] - 1
        strength = result.baseline["strengths"][task]
        word = "higher" if change > 0 else "lower"
        lines.append(
            f"  {task}: C={strength:.3g}, chosen on these rows; the model's logloss is"
            f" {abs(change):.2%} {word}"
        )
        difference = result.baseline["differences"].get(task, {}).get("logloss")
        if difference and not math.isnan(difference["low"]):
            lines.append(f"  {_baseline_verdict(**difference)}")
    return lines


def _baseline_verdict(difference: float, low: float, high: float) -> str:
    """Formats the difference of the loglosses of model and regression, and what it shows."""
    line = f"difference {difference:+.5f}, paired 95% interval {low:+.5f} to {high:+.5f}"
    if low <= 0 <= high:
        return f"{line}: these rows do not show which is better"
    return f"{line}: the model is {'worse' if low > 0 else 'better'}"


def _names(entries: list[dict[str, Any]]) -> list[str]:
    """Formats values of a column with distinct names, of at most 29 characters if possible."""
    whole = [value_name(entry["value"]) for entry in entries]
    short = [text if len(text) < 30 else f"{text[:9]}...{text[-17:]}" for text in whole]
    return [a if short.count(a) == 1 else b for a, b in zip(short, whole, strict=True)]


def value_name(value: Any) -> str:
    """Formats the value of a slice, so that different values have different names."""
    if isinstance(value, list):
        return ", ".join(value_name(part) for part in value)
    text = str(value)
    if value is None:
        return _MISSING
    return repr(text) if text in ("", _MISSING) or not text.isprintable() else text


def _slice_names(metrics: Mapping[str, float]) -> list[str]:
    """Returns the metrics of a table of slices: of requests alone if a task is only ranked."""
    names = [name for name in metrics if name != "examples"]
    return [name for name in names if name in TITLES] if CALIBRATION in names else names


def _slices(by: dict[str, Any]) -> list[str]:
    lines = []
    values = by["values"]
    most = _SHOWN_IN_ORDER if by["is_ordered"] else _SHOWN
    for task in values[0]["metrics"] if values else []:
        names = _slice_names(values[0]["metrics"][task])
        if not by["is_ordered"]:
            values = sorted(values, key=lambda entry: -surely_lost(entry, task))  # the worst first
        shown = values[:most]
        spans = [entry.get("intervals", {}).get(task, {}) for entry in shown]
        margins = [
            _margins(entry["metrics"][task], span, names)
            for entry, span in zip(shown, spans, strict=True)
        ]
        widths = [len(text) + 1 for texts in margins for text in texts]
        width = max([9, *widths, *(len(title_of(name)) - 9 for name in names)])
        header = "".join(f"{title_of(name):>{10 + width}}" for name in names)
        lines.append(f"{task + ' by ' + by['column']:<32}{'examples':>12}{header}")
        for entry, name, texts in zip(shown, _names(shown), margins, strict=True):
            metrics = entry["metrics"][task]
            cells = "".join(
                f" {metrics.get(c, math.nan):>9.5f}{text:<{width}}"
                for c, text in zip(names, texts, strict=True)
            )
            lines.append(f"  {name:<30}{metrics['examples']:>12,}{cells}")
        if len(values) > most:
            rest = "later ones" if by["is_ordered"] else "better or smaller ones"
            lines.append(f"  and {len(values) - most:,} {rest}; --json has all")
        if task in by["gauc"]:
            lines.append(
                f"  mean AUC of the values, by weight: {by['gauc'][task]:.5f} (GAUC by"
                f" {by['column']}, weighted by {WEIGHTING}, without"
                f" {by['gauc_excluded'][task]:.1%} of the weight in values of one label)"
            )
    return lines


def cluster_line(
    cluster: Mapping[str, Any] | None, requests: Mapping[str, Any] | None = None
) -> str:
    """Says what the intervals of a result take as independent."""
    if cluster is None:
        line = "95% intervals of independent examples"
        return f"{line}, and of independent requests by {requests['column']}" if requests else line
    line = f"95% intervals clustered by {cluster['column']} ({cluster['clusters']:,} values)"
    if cluster["clusters"] < _FEW_CLUSTERS:
        line += f"; with fewer than {_FEW_CLUSTERS}, intervals of differences may be short"
    return line


def reliability_panels(
    buckets: Mapping[str, Sequence[Mapping[str, float]]],
) -> list[dict[str, Any]]:
    """Returns the reliability diagram of each task, for `plots.draw_panels`.

    Args:
        buckets: of each task; see `exact.calibration_buckets`. Bars are 95% intervals.
    """
    line: dict[str, Any] = {"low": [], "high": [], "color": "gray", "style": "dashed"}
    panels = []
    for task, entries in buckets.items():
        predicted = [b["predicted"] for b in entries]
        observed = [b["observed"] for b in entries]
        half = [Z * b["error"] for b in entries]
        ends = [min(predicted, default=0.0), max(predicted, default=1.0)]
        points = {
            "label": "buckets of equal count",
            "x": predicted,
            "y": observed,
            "low": [y - h for y, h in zip(observed, half, strict=True)],
            "high": [y + h for y, h in zip(observed, half, strict=True)],
            "color": "C0",
            "style": "points",
        }
        error = calibration_error(entries)
        panels.append(
            {
                "title": f"{task}: ECE {error:.5f}",
                "series": [line | {"label": "calibrated", "x": ends, "y": ends}, points],
                "x_label": "predicted",
                "y_label": "observed",
                "x_scale": "linear",
                "y_scale": "linear",
            }
        )
    return panels


def calibration_line(origin: Mapping[str, Any]) -> str:
    """Says how the predictions of a checkpoint are calibrated."""
    tasks = ", ".join(origin["tasks"])
    by = f" and value of {origin['by']}" if origin.get("by") else ""
    return f"calibrated by {origin['method']}{by} on {origin['split']}: {tasks}"


def format_evaluation(result: Evaluation) -> str:
    """Formats the summary of `jaxrank evaluate`."""
    lines = [
        f"{result.checkpoint} on {result.data}: {result.seconds:.1f} s",
        *([calibration_line(result.calibrated)] if result.calibrated else []),
        *_table(
            result.metrics,
            result.constant,
            result.best_possible,
            result.untrained,
            result.losses,
            intervals=result.intervals,
        ),
        *request_lines(result.requests),
        cluster_line(result.cluster, result.requests),
    ]
    for task, buckets in result.buckets.items():
        error = result.calibration_error.get(task, math.nan)
        lines.append(f"calibration of {task}, by prediction: mean error (ECE) {error:.5f}")
        lines += [
            f"  {b['lower']:.4f} to {b['upper']:.4f}: predicted {b['predicted']:.5f}, observed"
            f" {b['observed']:.5f}, {b['examples']:,} examples"
            for b in buckets
        ]
    if result.by:
        lines += _slices(result.by)
    return "\n".join(lines)
