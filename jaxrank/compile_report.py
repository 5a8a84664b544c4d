"""What `compile` found as people read it, and as JSON."""

from pathlib import Path
from typing import Any

from jaxrank.compile import Compiled
from jaxrank.pictures import draw_scaling
from jaxrank.scaling import StepTime, efficiency, speedup
from jaxrank.topology import format_bytes

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
    ("sent a step", lambda c: format_bytes(sum(c.collectives.values()))),
    ("Gflop a step", lambda c: f"{c.flops / 1e9:,.1f}"),
    ("in place", lambda c: "" if c.refused else "yes" if c.tables_aliased else "no"),
    ("compiled in", lambda c: f"{c.compile_seconds:.0f} s"),
)


def describe(found: list[Compiled]) -> str:
    """Aligned text, of one device of each slice."""
    rows = [[name for name, _ in _COLUMNS]]
    rows += [[cell(one) for _, cell in _COLUMNS] for one in found]
    lines = _aligned(rows)
    for one in found:
        sent = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in one.collectives.items())
        lines += [f"{one.topology.name}: {sent}"] if sent else []
        lines += [f"{one.topology.name}: {one.refused}"] if one.refused else []
    times = [one.step_time for one in found if one.step_time]
    return "\n".join(lines + (_scaling(times) if times else []))


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]


def _scaling(times: list[StepTime]) -> list[str]:
    first = smallest(times)
    parts = list(first.seconds)
    rows = [["slice", "batch", "step, ms", *parts, "examples/s", "speed-up", "of linear", "limit"]]
    rows += [
        [
            one.topology.name,
            f"{one.batch_size:,}",
            f"{1e3 * one.total:,.3f}",
            *(f"{1e3 * one.seconds[part]:,.3f}" for part in parts),
            f"{one.examples_per_second:,.0f}",
            f"{speedup(first, one):.2f}x",
            f"{efficiency(first, one):.1%}",
            one.limit,
        ]
        for one in times
    ]
    return ["", "By a model of the step, milliseconds; see jaxrank/scaling.py", *_aligned(rows)]


def smallest(times: list[StepTime]) -> StepTime:
    """That of the fewest devices, which others are held against."""
    return min(times, key=lambda one: one.topology.devices)


def draw(found: list[Compiled], path: str | Path) -> None:
    """Writes a PNG of the times of steps, and how examples a second grow with the devices.

    Raises:
        RunError: the file cannot be written.
    """
    times = sorted(
        (one.step_time for one in found if one.step_time), key=lambda one: one.topology.devices
    )
    draw_scaling(times, path)


def refusal(found: list[Compiled]) -> str:
    """Which slices are too small, and by how much; empty where none is."""
    small = [one for one in found if not one.fits]
    return "; ".join(
        f"{one.topology.name}: a device must have"
        f" {format_bytes(max(1, one.used_bytes - one.usable_bytes))} more than the"
        f" {format_bytes(one.usable_bytes)} that a program may use"
        for one in small
    )


def to_json(found: list[Compiled]) -> dict[str, Any]:
    """As plain data: bytes and operations of one device."""
    plain = {"topologies": [_plain(one) for one in found], "refusal": refusal(found)}
    times = [one.step_time for one in found if one.step_time]
    return plain | ({"scaling": [_plain_time(one, smallest(times)) for one in times]})


def _plain_time(one: StepTime, first: StepTime) -> dict[str, Any]:
    return {
        "name": one.topology.name,
        "batch_size": one.batch_size,
        "step_seconds": one.total,
        "seconds": one.seconds,
        "flops": one.flops,
        "memory_bytes": one.memory_bytes,
        "examples_per_second": one.examples_per_second,
        "speedup": speedup(first, one),
        "efficiency": efficiency(first, one),
        "limit": one.limit,
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
