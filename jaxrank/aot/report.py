"""Output of `compile`: text, JSON and a picture."""

from pathlib import Path
from typing import Any

from jaxrank.aot.compile import Compiled
from jaxrank.aot.scaling import PUBLISHED, StepTime, efficiency, speedup
from jaxrank.plots import draw_scaling
from jaxrank.report import format_bytes

_COLUMNS = (
    ("slice", lambda c: c.topology.name),
    ("devices", lambda c: f"{c.topology.devices:,}"),
    ("fits", lambda c: "yes" if c.fits else "no"),
    ("used", lambda c: format_bytes(c.used_bytes)),
    ("of", lambda c: format_bytes(c.usable_bytes)),
    ("tables", lambda c: format_bytes(c.tables_bytes)),
    ("state", lambda c: format_bytes(c.state_bytes)),
    ("batches", lambda c: format_bytes(c.batches_bytes)),
    ("temporaries", lambda c: format_bytes(c.temporaries_bytes)),
    ("evaluation", lambda c: format_bytes(c.evaluation_bytes)),
    ("sent per step", lambda c: format_bytes(sum(c.collectives.values()))),
    ("Gflop per step", lambda c: f"{c.flops / 1e9:,.1f}" if c.flops else ""),
    ("in place", lambda c: "" if c.refused else "yes" if c.tables_aliased else "no"),
    ("compiled in", lambda c: f"{c.compile_seconds:.0f} s"),
)


def describe(found: list[Compiled]) -> str:
    """Formats the results for one device of each slice as aligned text."""
    rows = [[name for name, _ in _COLUMNS]]
    rows += [[cell(one) for _, cell in _COLUMNS] for one in found]
    lines = _aligned(rows)
    for one in found:
        sent = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in one.collectives.items())
        lines += [f"{one.topology.name}: {sent}"] if sent else []
        lines += [f"{one.topology.name}: {one.refused}"] if one.refused else []
    is_timed = any(one.step_time for one in found)
    return "\n".join(lines + (_scaling(found) if is_timed else []))


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]


def _scaling(found: list[Compiled]) -> list[str]:
    times = [one.step_time for one in found if one.step_time]
    first = smallest(times)
    names = ["batch", "fits", "step, ms", *first.seconds, "examples/s", "speed-up", "of linear"]
    rows = [["slice", *names, "limit"]]
    rows += [_row(one, one.step_time, first) for one in found if one.step_time]
    head = f"Estimated milliseconds per step, and speed-up over {first.topology.name}:"
    lines = ["", head, *_aligned(rows)]
    if first.topology.cores == 8:
        cores, published = PUBLISHED
        lines.append(
            f"Measured by Snap, 2022, with {cores} times as many cores: {published}x,"
            f" {published / cores:.1%} of linear"
        )
    return lines


def _row(one: Compiled, took: StepTime, first: StepTime) -> list[str]:
    return [
        one.topology.name,
        f"{took.batch_size:,}",
        "yes" if one.fits else "no",
        f"{1e3 * took.total:,.3f}",
        *(f"{1e3 * seconds:,.3f}" for seconds in took.seconds.values()),
        f"{took.examples_per_second:,.0f}",
        f"{speedup(first, took):.2f}x",
        f"{efficiency(first, took):.1%}",
        took.limit,
    ]


def smallest(times: list[StepTime]) -> StepTime:
    """Returns the time of the slice with the fewest devices, the base of the comparison."""
    return min(times, key=lambda one: one.topology.devices)


def draw(found: list[Compiled], path: str | Path) -> bool:
    """Writes a PNG of the step times and of the growth of examples/s with the devices.

    Returns False, and writes nothing, if no time was estimated.

    Raises:
        RunError: the file cannot be written.
    """
    times = [one.step_time for one in found if one.step_time]
    if times:
        times = sorted(times, key=lambda one: one.topology.devices)
        first = times[0].topology
        draw_scaling(
            [f"{one.topology.name}\nbatch {one.batch_size:,}" for one in times],
            [one.seconds for one in times],
            [one.topology.devices for one in times],
            [speedup(times[0], one) for one in times],
            path,
            base=first.name,
            published=PUBLISHED if first.cores == 8 else None,
        )
    return bool(times)


def refusal(found: list[Compiled]) -> str:
    """Describes the slices that are too small and by how much. Empty if all fit."""
    small = [one for one in found if not one.fits]
    return "; ".join(
        f"{one.topology.name}: a device must have"
        f" {format_bytes(max(1, one.used_bytes - one.usable_bytes))} more than the"
        f" {format_bytes(one.usable_bytes)} that a program may use"
        for one in small
    )


def to_json(found: list[Compiled]) -> dict[str, Any]:
    """Converts the results to plain data. Bytes and operations are per device."""
    times = [one.step_time for one in found if one.step_time]
    return {
        "topologies": [_plain(one) for one in found],
        "refusal": refusal(found),
        "scaling": [
            _plain_time(one, one.step_time, smallest(times)) for one in found if one.step_time
        ],
    }


def _plain_time(one: Compiled, took: StepTime, first: StepTime) -> dict[str, Any]:
    return {
        "name": one.topology.name,
        "batch_size": took.batch_size,
        "fits": one.fits,
        "step_seconds": took.total,
        "seconds": took.seconds,
        "product_flops": took.product_flops,
        "memory_bytes": took.memory_bytes,
        "examples_per_second": took.examples_per_second,
        "speedup": speedup(first, took),
        "efficiency": efficiency(first, took),
        "limit": took.limit,
    }


def _plain(one: Compiled) -> dict[str, Any]:
    return {
        "name": one.topology.name,
        "cores": one.topology.cores,
        "devices": one.topology.devices,
        "fits": one.fits,
        "hbm_bytes": one.topology.hbm_bytes,
        "usable_bytes": one.usable_bytes,
        "used_bytes": one.used_bytes,
        "tables_bytes": one.tables_bytes,
        "state_bytes": one.state_bytes,
        "batches_bytes": one.batches_bytes,
        "temporaries_bytes": one.temporaries_bytes,
        "evaluation_bytes": one.evaluation_bytes,
        "collective_bytes": sum(one.collectives.values()),
        "collectives": one.collectives,
        "flops": one.flops,
        "tables_aliased": one.tables_aliased,
        "compile_seconds": one.compile_seconds,
        "refused": one.refused,
    }
