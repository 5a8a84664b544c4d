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
    ("in place", lambda c: "" if c.compiler_error else "yes" if c.tables_aliased else "no"),
    ("compiled in", lambda c: f"{c.compile_seconds:.0f} s"),
)


def describe(compiled: list[Compiled]) -> str:
    """Formats the results for one device of each slice as aligned text.

    Columns that no slice has are left out, such as operations, which the GPU compiler does not
    count.
    """
    columns = [column for column in _COLUMNS if any(column[1](program) for program in compiled)]
    rows = [[name for name, _ in columns]]
    rows += [[cell(program) for _, cell in columns] for program in compiled]
    lines = _aligned(rows)
    for program in compiled:
        sent = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in program.collectives.items())
        lines += [f"{program.topology.name}: {sent}"] if sent else []
        lines += (
            [f"{program.topology.name}: {program.compiler_error}"] if program.compiler_error else []
        )
    is_timed = any(program.step_time for program in compiled)
    return "\n".join(lines + (_scaling(compiled) if is_timed else []))


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(f"{c:>{w}}" for c, w in zip(row, widths, strict=True)) for row in rows]


def _scaling(compiled: list[Compiled]) -> list[str]:
    times = [program.step_time for program in compiled if program.step_time]
    first = smallest(times)
    names = ["batch", "fits", "step, ms", *first.seconds, "examples/s", "speed-up", "of linear"]
    rows = [["slice", *names, "limit"]]
    rows += [_row(program, program.step_time, first) for program in compiled if program.step_time]
    head = f"Estimated milliseconds per step, and speed-up over {first.topology.name}:"
    note = "Estimates of the step without launches and input; not a throughput to expect."
    lines = ["", head, *_aligned(rows), note]
    if first.topology.cores == 8:
        cores, published = PUBLISHED
        lines.append(
            f"Measured by Snap, 2022, with {cores} times as many cores: {published}x,"
            f" {published / cores:.1%} of linear"
        )
    return lines


def _row(program: Compiled, took: StepTime, first: StepTime) -> list[str]:
    return [
        program.topology.name,
        f"{took.batch_size:,}",
        "yes" if program.fits else "no",
        f"{1e3 * took.total:,.3f}",
        *(f"{1e3 * seconds:,.3f}" for seconds in took.seconds.values()),
        f"{took.examples_per_second:,.0f}",
        f"{speedup(first, took):.2f}x",
        f"{efficiency(first, took):.1%}",
        took.limit,
    ]


def smallest(times: list[StepTime]) -> StepTime:
    """Returns the time of the slice with the fewest devices, the base of the comparison."""
    return min(times, key=lambda step_time: step_time.topology.devices)


def draw(compiled: list[Compiled], path: str | Path) -> bool:
    """Writes a PNG of the step times and of the growth of examples/s with the devices.

    Returns False, and writes nothing, if no time was estimated.

    Raises:
        RunError: the file cannot be written.
    """
    times = [program.step_time for program in compiled if program.step_time]
    if times:
        times = sorted(times, key=lambda step_time: step_time.topology.devices)
        first = times[0].topology
        draw_scaling(
            [f"{program.topology.name}\nbatch {program.batch_size:,}" for program in times],
            [program.seconds for program in times],
            [program.topology.devices for program in times],
            [speedup(times[0], program) for program in times],
            path,
            base=first.name,
            published=PUBLISHED if first.cores == 8 else None,
        )
    return bool(times)


def error(compiled: list[Compiled]) -> str:
    """Describes the slices that are too small and by how much. Empty if all fit."""
    small = [program for program in compiled if not program.fits]
    return "; ".join(
        f"{program.topology.name}: a device must have"
        f" {format_bytes(max(1, program.used_bytes - program.usable_bytes))} more than the"
        f" {format_bytes(program.usable_bytes)} that a program may use"
        for program in small
    )


def to_json(compiled: list[Compiled]) -> dict[str, Any]:
    """Converts the results to plain data. Bytes and operations are per device."""
    times = [program.step_time for program in compiled if program.step_time]
    return {
        "topologies": [_plain(program) for program in compiled],
        "error": error(compiled),
        "scaling": [
            _plain_time(program, program.step_time, smallest(times))
            for program in compiled
            if program.step_time
        ],
    }


def _plain_time(program: Compiled, took: StepTime, first: StepTime) -> dict[str, Any]:
    return {
        "name": program.topology.name,
        "batch_size": took.batch_size,
        "fits": program.fits,
        "step_seconds": took.total,
        "seconds": took.seconds,
        "product_flops": took.product_flops,
        "memory_bytes": took.memory_bytes,
        "examples_per_second": took.examples_per_second,
        "speedup": speedup(first, took),
        "efficiency": efficiency(first, took),
        "limit": took.limit,
    }


def _plain(program: Compiled) -> dict[str, Any]:
    return {
        "name": program.topology.name,
        "cores": program.topology.cores,
        "devices": program.topology.devices,
        "fits": program.fits,
        "hbm_bytes": program.topology.hbm_bytes,
        "usable_bytes": program.usable_bytes,
        "used_bytes": program.used_bytes,
        "tables_bytes": program.tables_bytes,
        "state_bytes": program.state_bytes,
        "batches_bytes": program.batches_bytes,
        "temporaries_bytes": program.temporaries_bytes,
        "evaluation_bytes": program.evaluation_bytes,
        "collective_bytes": sum(program.collectives.values()),
        "collectives": program.collectives,
        "flops": program.flops,
        "tables_aliased": program.tables_aliased,
        "compile_seconds": program.compile_seconds,
        "compiler_error": program.compiler_error,
    }
