"""Charts as inline SVG: lines with points and error bars, and histograms."""

import colorsys
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrank.run_report.markup import Markup, join, tag

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#333333")
_WIDTH, _HEIGHT = 420, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 12, 44
_MANY_DECADES = 1.5  # from which on an axis is logarithmic, if it may be


def color(index: int) -> str:
    """Returns the color of a run of a page. No two runs have the same."""
    if index < len(COLORS):
        return COLORS[index]
    golden = (math.sqrt(5) - 1) / 2  # spreads hues evenly, however many there are
    parts = colorsys.hls_to_rgb(index * golden % 1, 0.4, 0.6)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


class Series(NamedTuple):
    """One line of a chart, f[n] each. Points that are not finite are left out.

    errors: half lengths of error bars; None: none.
    faint: drawn thin and pale, behind the others.
    dashed: without points.
    """

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    color: str
    errors: Sequence[float] | np.ndarray | None = None
    faint: bool = False
    dashed: bool = False


class _Axis:
    """Maps values to pixels, with round numbers to label.

    Args:
        values: that must be visible.
        start, end: pixels of the ends.
        may_be_log: True if the axis is logarithmic when the values span many powers of 10.
    """

    def __init__(self, values: np.ndarray, start: float, end: float, may_be_log: bool):
        values = values[np.isfinite(values)]
        low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
        self._start, self._end = start, end
        self.is_log = bool(may_be_log and low > 0 and high / low > 10**_MANY_DECADES)
        if self.is_log:
            self._low, self._high = math.log10(low), math.log10(high)
            first, last = math.floor(self._low), math.ceil(self._high)
            step = max(1, (last - first) // 6)
            ticks = [10.0**e for e in range(first, last + 1, step)]
        else:
            if low == high:
                low, high = low - (abs(low) or 1) / 10, high + (abs(high) or 1) / 10
            margin = (high - low) * 0.03
            self._low, self._high = low - margin, high + margin
            ticks = _round_numbers(low, high)
        self.ticks = [t for t in ticks if -0.5 <= self._share(t) * 1e3 <= 1000.5]

    def _share(self, value: float) -> float:
        value = math.log10(value) if self.is_log else value
        return (value - self._low) / ((self._high - self._low) or 1.0)

    def pixel(self, value: float) -> float:
        """Returns the pixel of a value. Values beyond the ends are at the ends."""
        if self.is_log and value <= 0:
            return self._start
        share = min(max(self._share(value), 0.0), 1.0)
        return round(self._start + share * (self._end - self._start), 2)


def _round_numbers(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _short(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def lines(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    text: Callable[[float], str] = _short,
) -> Markup:
    """Returns a chart of lines with points.

    Args:
        title: for readers who do not see the picture.
        series: at least one.
        x_label, y_label: of the axes.
        log: True if an axis may be logarithmic.
        text: formats the numbers of the axis x.
    """
    x_values = np.concatenate([np.asarray(s.x, np.float64) for s in series])
    y_values = np.concatenate([np.asarray(s.y, np.float64) for s in series])
    x = _Axis(x_values, _LEFT, _WIDTH - _RIGHT, log)
    y = _Axis(y_values, _HEIGHT - _BOTTOM, _TOP, log)
    drawn = [_line(s, x, y) for s in sorted(series, key=lambda s: not s.faint)]
    return _chart(title, [_frame(x, y, x_label, y_label, text), *drawn], series)


def _line(series: Series, x: _Axis, y: _Axis) -> Markup:
    values = [np.asarray(v, np.float64) for v in (series.x, series.y)]
    shown = np.isfinite(values[0]) & np.isfinite(values[1])
    points = [(x.pixel(a), y.pixel(b)) for a, b in zip(*(v[shown] for v in values), strict=True)]
    parts = []
    if len(points) > 1:
        style = {"stroke_opacity": "0.45"} if series.faint else {}
        parts.append(
            tag(
                "polyline",
                points=" ".join(f"{a:g},{b:g}" for a, b in points),
                fill="none",
                stroke=series.color,
                stroke_width="1" if series.faint else "1.8",
                stroke_dasharray="5 4" if series.dashed else None,
                **style,
            )
        )
    if series.errors is not None:
        for (at, _), value, error in zip(
            points, values[1][shown], np.asarray(series.errors, np.float64)[shown], strict=True
        ):
            if math.isfinite(error):
                ends = {"y1": y.pixel(value - error), "y2": y.pixel(value + error)}
                parts.append(tag("line", x1=at, x2=at, stroke=series.color, **ends))
    if not series.dashed and (not series.faint or len(points) == 1):
        parts += [tag("circle", cx=a, cy=b, r="2.6", fill=series.color) for a, b in points]
    return join(parts)


def histogram(
    title: str,
    edges: Sequence[float],
    heights: Sequence[tuple[str, Sequence[float], str]],
    *,
    x_label: str,
    text: Callable[[float], str] = _short,
) -> Markup:
    """Returns overlapping histograms, each scaled to a sum of 1.

    Args:
        edges: of m bins, [m + 1].
        heights: name, weight in each bin [m] and color of each.
        text: formats the numbers of the axis x.
    """
    x = _Axis(np.asarray(edges, np.float64), _LEFT, _WIDTH - _RIGHT, False)
    shares = [np.asarray(h, np.float64) / (sum(h) or 1.0) for _, h, _ in heights]
    y = _Axis(np.concatenate([[0.0], *shares]), _HEIGHT - _BOTTOM, _TOP, False)
    parts = [_frame(x, y, x_label, "share of the weight", text)]
    for share, (_, _, color) in zip(shares, heights, strict=True):
        outline = [(x.pixel(edges[0]), y.pixel(0))]
        for left, right, value in zip(edges[:-1], edges[1:], share, strict=True):
            outline += [(x.pixel(left), y.pixel(value)), (x.pixel(right), y.pixel(value))]
        outline.append((x.pixel(edges[-1]), y.pixel(0)))
        points = " ".join(f"{a:g},{b:g}" for a, b in outline)
        parts.append(tag("polygon", points=points, fill=color, fill_opacity="0.3", stroke=color))
    legend = [Series(name, (), (), color) for name, _, color in heights]
    return _chart(title, parts, legend)


def _frame(x: _Axis, y: _Axis, x_label: str, y_label: str, text: Callable[[float], str]) -> Markup:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for value in x.ticks:
        at = x.pixel(value)
        parts.append(tag("line", x1=at, x2=at, y1=_TOP, y2=bottom, class_="grid"))
        parts.append(tag("text", text(value), x=at, y=bottom + 16, text_anchor="middle"))
    for value in y.ticks:
        at = y.pixel(value)
        parts.append(tag("line", x1=_LEFT, x2=right, y1=at, y2=at, class_="grid"))
        parts.append(tag("text", _short(value), x=_LEFT - 6, y=at + 4, text_anchor="end"))
    middle = (_LEFT + right) / 2
    parts.append(tag("text", x_label, x=middle, y=_HEIGHT - 8, text_anchor="middle"))
    centre = (_TOP + bottom) / 2
    turned = f"rotate(-90 12 {centre:g})"
    parts.append(tag("text", y_label, x=12, y=centre, text_anchor="middle", transform=turned))
    return join(parts)


def _chart(title: str, parts: Sequence[Markup], series: Sequence[Series]) -> Markup:
    picture = tag(
        "svg",
        tag("title", title),
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
    )
    solid = {s.color for s in series if not s.faint}
    names = {s.name: s for s in series if s.name and not (s.faint and s.color in solid)}
    legend = [
        tag("span", tag("i", "\u00a0", style=f"background:{s.color}"), " ", name, " ")
        for name, s in names.items()
    ]
    return tag("figure", picture, tag("figcaption", *legend) if legend else "")


def whisker(
    value: float, interval: Sequence[float] | None, low: float, high: float, mark: float
) -> Markup:
    """Returns a small picture of a value and its 95% interval, for a cell of a table.

    Args:
        interval: its ends, if it is defined.
        low, high: ends of the axis.
        mark: a value to compare with, a vertical line.
    """
    axis = _Axis(np.array([low, high]), 4, 136, False)
    parts = [tag("line", x1=axis.pixel(mark), x2=axis.pixel(mark), y1=1, y2=15, class_="grid")]
    if math.isfinite(value):
        start, stop = interval or (value, value)
        ends = {"x1": axis.pixel(start), "x2": axis.pixel(stop)}
        parts.append(tag("line", y1=8, y2=8, stroke=COLORS[0], stroke_width="2", **ends))
        parts.append(tag("circle", cx=axis.pixel(value), cy=8, r="3.4", fill=COLORS[0]))
    return tag("svg", *parts, viewBox="0 0 140 16", class_="whisker", role="presentation")


def bar(share: float, color: str = COLORS[0]) -> Markup:
    """Returns a bar of a fraction between 0 and 1, for a cell of a table."""
    width = round(136 * min(max(share, 0.0), 1.0), 1)
    rect = tag("rect", x=0, y=3, width=width, height=10, fill=color)
    return tag("svg", rect, viewBox="0 0 140 16", class_="whisker", role="presentation")
