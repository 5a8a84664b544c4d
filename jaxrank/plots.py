"""Plots. Only this module imports matplotlib."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxrank.atomic import MARK, replacing
from jaxrank.errors import RunError

_MAX_FEATURES = 40  # per plot. Features with the largest values are shown
_MAX_SPLITS = 4
_PANELS_PER_ROW = 3
_MAX_LABEL_CHARACTERS = 80  # of the names below a panel, before they are turned
_LENGTHS = {"mean": "o", "p50": "|", "p95": "<", "p99": ">", "max": "x"}

# {feature: {split: value}}.
_Values = dict[str, dict[str, float]]


def _save(figure: Figure, path: str | Path) -> None:
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        kind = "svg" if Path(path).suffix == ".svg" else "png"
        metadata = {"Creator" if kind == "svg" else "Software": MARK}
        with replacing(Path(path)) as partial:
            figure.savefig(partial, format=kind, dpi=120, metadata=metadata)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error}.") from error


def draw_scaling(
    names: Sequence[str],
    seconds: Sequence[Mapping[str, float]],
    devices: Sequence[int],
    speedups: Sequence[float],
    path: str | Path,
    *,
    base: str,
    published: tuple[float, float] | None = None,
) -> None:
    """Writes a PNG with the parts of a step's time, and the speed-up over the first slice.

    Args:
        names: names of the slices, at least one.
        seconds: {part of a step: seconds} of each slice.
        devices: number of devices of each slice, rising.
        speedups: examples/s of each slice, relative to the first.
        base: name of the first slice.
        published: (ratio of devices, speed-up) of a published measurement.

    Raises:
        RunError: the file cannot be written.
    """
    figure = Figure(figsize=(12, 5), layout="constrained")
    parts, curve = figure.subplots(1, 2)
    bottom = np.zeros(len(names))
    for part in seconds[0]:
        height = np.array([1e3 * times[part] for times in seconds])
        parts.bar(names, height, bottom=bottom, label=part)
        bottom += height
    parts.set_ylabel("milliseconds per step")
    parts.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    times_devices = np.array(devices) / devices[0]
    curve.plot(times_devices, speedups, "o-", label="estimate")
    curve.plot(times_devices, times_devices, "--", color="gray", label="linear")
    if published:
        curve.plot(*published, "x", color="black", label="Snap, 2022, measured")
    curve.set_xscale("log", base=2)
    curve.set_yscale("log", base=2)
    curve.xaxis.set_major_formatter("{x:g}")
    curve.yaxis.set_major_formatter("{x:g}")
    curve.set_xlabel(f"devices, relative to {base}")
    curve.set_ylabel("examples/s, relative to the same")
    curve.legend()
    _save(figure, path)


def draw_plan(
    sizes: Mapping[str, int],
    memory: int,
    lookups: np.ndarray,
    path: str | Path,
    *,
    fits: bool,
    imbalance: float,
    even: float,
) -> None:
    """Writes a PNG with the memory of each device by kind, and its lookups.

    Args:
        sizes: bytes of each device, by kind.
        memory: bytes of memory of each device.
        lookups: f[devices], rows that each device serves per step.
        fits: True if the sizes fit the memory.
        imbalance: largest over mean lookups per step.
        even: lookups over the mean up to which devices count as balanced.

    Raises:
        RunError: the file cannot be written.
    """
    figure = Figure(figsize=(10, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    device = np.arange(len(lookups))
    bottom = 0.0
    for name, count in sizes.items():
        height = count / 2**30
        upper.bar(device, height, bottom=bottom, width=0.9, label=f"{name} {height:,.3g}")
        bottom += height
    limit = memory / 2**30
    if bottom > limit / 4:  # otherwise the line would flatten the bars
        upper.axhline(limit, color="black", linestyle="--", label=f"memory {limit:,.3g}")
    upper.set_ylabel("GiB")
    upper.set_title(
        f"Memory of each device: {bottom:,.3g} of {limit:,.3g} GiB,"
        f" {'fits' if fits else 'does not fit'}"
    )
    upper.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    lower.bar(device, lookups, width=0.9)
    mean = lookups.mean()
    lower.axhline(mean, color="black", label=f"mean {mean:,.0f}")
    lower.axhline(even * mean, color="black", linestyle=":", label=f"{even} times the mean")
    lower.set_xlabel("device")
    lower.set_ylabel("rows per step")
    lower.set_title(f"Rows that each device serves per step: largest over mean {imbalance:.4f}")
    lower.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    _save(figure, path)


def draw_bench(
    rates: Mapping[str, float],
    stages: Mapping[str, float],
    path: str | Path,
    *,
    limit: str,
    title: str,
) -> None:
    """Writes a PNG with the speed of input, step and both, and the cost of each stage.

    Args:
        rates: examples/s of `input`, `step` and `both`.
        stages: seconds per million examples.
        limit: the slowest stage.
        title: names the device and the batch size.

    Raises:
        RunError: the file cannot be written.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    speeds, costs = figure.subplots(1, 2)
    bars = speeds.bar(list(rates), [rate / 1e6 for rate in rates.values()])
    speeds.bar_label(bars, [f"{rate:,.0f}" for rate in rates.values()])
    speeds.set_ylabel("million examples/s")
    speeds.set_title(
        f"Alone and together: both has {rates['both'] / rates['step']:.0%} of the step"
    )
    names = list(stages)
    colors = ["C3" if name == limit else "C0" for name in names]
    bars = costs.barh(names, list(stages.values()), color=colors)
    costs.bar_label(bars, [f"{seconds:.3g}" for seconds in stages.values()], padding=2)
    costs.invert_yaxis()
    costs.margins(x=0.15)
    costs.set_xlabel("seconds per million examples, each alone")
    costs.set_title(f"{limit} limits; {title}")
    _save(figure, path)


def draw_panels(panels: Sequence[Mapping[str, Any]], paths: Sequence[str | Path]) -> None:
    """Writes a picture of curves, points and bars, one file per path, as PNG or SVG.

    Args:
        panels: the fields of `studies.study.Panel`, as plain data.

    Raises:
        RunError: a file cannot be written.
    """
    columns = min(len(panels), _PANELS_PER_ROW)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(1 + 5 * columns, 4.5 * rows), layout="constrained")
    axes = np.ravel(figure.subplots(rows, columns, squeeze=False))
    for panel, ax in zip(panels, axes[: len(panels)], strict=True):
        _draw_panel(ax, panel)
    for unused in axes[len(panels) :]:
        unused.set_axis_off()
    for path in paths:
        _save(figure, path)


def _plain(text: Any) -> Any:
    """Returns a name that is drawn as it is. Between two `$` matplotlib reads a formula."""
    return text.replace("$", r"\$") if isinstance(text, str) else text


def _draw_panel(axes: Axes, panel: Mapping[str, Any]) -> None:
    for i, series in enumerate(panel["series"]):
        x, y, color = list(map(_plain, series["x"])), series["y"], series["color"] or f"C{i}"
        label = _plain(series["label"])
        if series["style"] == "bars":
            axes.bar(x, y, label=label, color=color)
            axes.margins(y=0.3)  # room for the legend
            continue
        line = {"line": "o-", "dashed": "o--", "points": "o"}[series["style"]]
        axes.plot(x, y, line, label=label, color=color, alpha=0.8, markersize=4)
        if series["low"]:
            axes.vlines(x, series["low"], series["high"], color=color, alpha=0.6)
    for axis, scale in ((axes.xaxis, panel["x_scale"]), (axes.yaxis, panel["y_scale"])):
        if scale != "linear":
            getattr(axes, f"set_{axis.axis_name}scale")("log", base=2 if scale == "log2" else 10)
            axis.set_major_formatter("{x:g}")
    texts = {x for series in panel["series"] for x in series["x"] if isinstance(x, str)}
    if sum(map(len, texts)) > _MAX_LABEL_CHARACTERS:
        axes.tick_params("x", rotation=90)
    axes.set_xlabel(_plain(panel["x_label"]))
    axes.set_ylabel(_plain(panel["y_label"]))
    axes.set_title(_plain(panel["title"]))
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if any(series["label"] for series in panel["series"]):
        axes.legend()


def draw_statistics(statistics: Mapping[str, Mapping[str, Any]], path: str | Path) -> None:
    """Writes a PNG of prepared data: missing values, distinct values and lengths of lists.

    At most 40 features, with the largest values, and the 4 largest splits are shown.

    Args:
        statistics: {split: statistics}, see `data.statistics`. Absent values are not drawn.

    Raises:
        RunError: the file cannot be written.
    """
    largest = sorted(statistics, key=lambda split: -statistics[split].get("rows", 0))
    shown = {split: statistics[split] for split in largest[:_MAX_SPLITS]}
    missing = _most(_values(shown, ("dense", "categorical", "ragged"), _missing))
    distinct = _most(
        _values(shown, ("categorical", "ragged"), lambda column, _: column.get("distinct"))
    )
    longest = _most(_values(shown, ("ragged",), lambda column, _: column.get("max")))
    panels = [values for values in (missing, distinct, longest) if values]
    heights = [1 + 0.25 * len(values) for values in panels] or [1]
    figure = Figure(figsize=(10, sum(heights) + 1), layout="constrained")
    labels = [
        f"{_plain(split)}: {split_statistics.get('rows', 0):,} rows"
        for split, split_statistics in shown.items()
    ]
    more = len(largest) - len(shown)
    figure.suptitle("Prepared data" + (f"; {more} more splits are not shown" if more else ""))
    axes = iter(np.ravel(figure.subplots(len(heights), 1, height_ratios=heights)))
    if missing:
        panel = next(axes)
        _bars(panel, missing, list(shown), labels)
        _name(panel, list(missing), "missing: fraction of examples (lists: of empty lists)")
    if distinct:
        panel = next(axes)
        _bars(panel, distinct, list(shown), labels)
        panel.set_xscale("symlog", linthresh=1)
        _name(panel, list(distinct), "distinct values")
    if longest:
        panel = next(axes)
        _lengths(panel, list(longest), shown)
        _name(panel, list(longest), "ids per list: mean, quantiles and maximum")
    _save(figure, path)


def _missing(column: Mapping[str, Any], rows: int) -> float | None:
    if "missing" in column:
        return column["missing"] / max(column.get("ids", rows), 1)
    return column["empty"] / max(rows, 1) if "empty" in column else None


def _values(
    shown: Mapping[str, Mapping[str, Any]],
    kinds: Iterable[str],
    value: Callable[[Mapping[str, Any], int], float | None],
) -> _Values:
    by_name: _Values = {}
    for kind in kinds:
        for split, statistics in shown.items():
            for name, column in statistics.get(kind, {}).items():
                number = value(column, statistics.get("rows", 0))
                if number is not None:
                    by_name.setdefault(name, {})[split] = number
    return by_name


def _most(values: _Values) -> _Values:
    """Selects the features with the largest values, the largest first."""
    order = sorted(values, key=lambda name: -max(values[name].values()))
    return {name: values[name] for name in order[:_MAX_FEATURES]}


def _places(count: int, part: int, parts: int) -> np.ndarray:
    """Returns the positions of one split's bars. Each feature has `parts` bars."""
    return np.arange(count) + (part - (parts - 1) / 2) * 0.8 / parts


def _name(axes: Axes, names: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(names)), list(map(_plain, names)))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title(title + (f"; {_MAX_FEATURES} largest" if len(names) == _MAX_FEATURES else ""))
    axes.grid(axis="x", alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def _bars(axes: Axes, values: _Values, splits: Sequence[str], labels: Sequence[str]) -> None:
    for i, (split, label) in enumerate(zip(splits, labels, strict=True)):
        widths = [by_split.get(split, 0.0) for by_split in values.values()]
        places = _places(len(values), i, len(splits))
        axes.barh(places, widths, height=0.8 / len(splits), label=label)


def _lengths(axes: Axes, names: Sequence[str], shown: Mapping[str, Mapping[str, Any]]) -> None:
    for i, statistics in enumerate(shown.values()):
        columns = [statistics.get("ragged", {}).get(name, {}) for name in names]
        places = _places(len(names), i, len(shown))
        for quantile, marker in _LENGTHS.items():
            lengths = [column.get(quantile, np.nan) for column in columns]
            label = "_" if i else quantile  # the legend of the bars has the colours of splits
            axes.plot(lengths, places, marker, color=f"C{i}", label=label)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=0)
