"""A plan as people read it, as JSON, and as a picture."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from jaxrank.embedding.planner import TablePlan
from jaxrank.errors import RunError
from jaxrank.plan import MOST_IMBALANCE, Planned
from jaxrank.topology import format_bytes

_MOST_TABLES_TOLD = 60


def describe(planned: Planned) -> str:
    """The plan as aligned text."""
    lines = [*_tables(planned), "", *_memory(planned), "", *_traffic(planned)]
    lines += [f"warning: {warning}" for warning in planned.warnings]
    return "\n".join(lines)


def _tables(planned: Planned) -> list[str]:
    case = planned.case
    rows = sum(t.rows for t in case.plan.tables)
    machine = f" ({case.machine.name})" if case.machine.name else ""
    copies = f" in {case.machine.replicas} replicas" if case.machine.replicas > 1 else ""
    lines = [
        f"{len(case.plan.tables)} tables, {rows:,} rows; devices: {case.machine.devices:,}"
        f"{machine}{copies}; batch: {planned.batch_size:,}"
    ]
    largest = sorted(case.plan.tables, key=lambda t: -t.rows * planned.row_bytes[t.name])
    told = {t.name for t in largest[:_MOST_TABLES_TOLD]}
    shown = [t for t in case.plan.tables if t.name in told]
    cells: list[tuple[str, ...]] = [("table", "rows", "dim", "size", "placement", "lookups", "why")]
    cells += [_cells(t, planned.row_bytes[t.name]) for t in shown]
    widths = [max(len(row[i]) for row in cells) for i in range(6)]
    for row in cells:
        name, *numbers = (f"{c:>{w}}" for c, w in zip(row[:4], widths[:4], strict=True))
        lines.append(
            f"{name.strip():<{widths[0]}}  {'  '.join(numbers)}  {row[4]:<{widths[4]}}"
            f"  {row[5]:>{widths[5]}}  {row[6]}"
        )
    if len(shown) < len(case.plan.tables):
        lines.append(f"and {len(case.plan.tables) - len(shown):,} smaller ones")
    return lines


def _cells(table: TablePlan, row_bytes: int) -> tuple[str, ...]:
    return (
        table.name,
        f"{table.rows:,}",
        str(table.dim),
        format_bytes(table.rows * row_bytes),
        table.placement,
        f"{table.unique:,.0f}",
        table.reason,
    )


def _memory(planned: Planned) -> list[str]:
    case = planned.case
    kinds = [*case.bytes._asdict().items(), ("total", case.bytes.total)]
    lines = ["memory of each device"]
    lines += [f"  {name:<14}{format_bytes(count):>12}" for name, count in kinds]
    share = f"{case.bytes.total / case.machine.memory:.1%}"
    fits = f"does not fit: {format_bytes(case.over)} too much" if case.over else "fits"
    lines.append(f"  {fits}; {share} of {format_bytes(case.machine.memory)}")
    return lines


def _traffic(planned: Planned) -> list[str]:
    found, case = planned.replay, planned.case
    lines = [
        f"each step, replayed with {found.batches} batches",
        f"  lookups of a device   {found.lookups.mean():,.0f} rows on average, after duplicates",
        f"  imbalance             {found.imbalance:.4f} largest over mean; worst batch"
        f" {found.largest_imbalance:.4f}",
        f"  sent by a device      {format_bytes(case.exchanged)}",
    ]
    for name, capacity in case.split.capacities.items():
        lines.append(
            f"  buffers of {name:<10} {capacity:,} ids for each of {case.split.shards} owners;"
            f" fullest over mean {found.fullest[name]:.2f}; rounds {found.rounds[name]:.2f}"
        )
    if case.split.capacities:
        lines.append(f"  buffer use            {found.buffer_use:.3f} of the places")
    return lines


def to_json(planned: Planned) -> dict[str, Any]:
    """The plan as plain data. Bytes are those of one device, but `bytes` of a table: all its rows
    once, with their accumulators."""
    case, found = planned.case, planned.replay
    tables = []
    for table in case.plan.tables:
        entry = table._asdict() | {"bytes": table.rows * planned.row_bytes[table.name]}
        entry["lookups"] = entry.pop("unique")
        tables.append(entry)
    return {
        "devices": case.machine.devices,
        "topology": case.machine.name,
        "replicas": case.machine.replicas,
        "batch_size": planned.batch_size,
        "fits": not case.over,
        "over_bytes": case.over,
        "memory_bytes": case.machine.memory,
        "bytes_per_device": [case.bytes.total] * case.machine.devices,
        "bytes_by_kind": case.bytes._asdict(),
        "exchanged_bytes_per_step": case.exchanged,
        "imbalance": found.imbalance,
        "largest_imbalance": found.largest_imbalance,
        "lookups_per_device": found.lookups.tolist(),
        "batches": found.batches,
        "buffer_use": found.buffer_use,
        "capacity": dict(case.split.capacities),
        "rounds": found.rounds,
        "fullest_over_mean": found.fullest,
        "tables": tables,
        "refusal": planned.refusal,
        "warnings": list(planned.warnings),
    }


def draw(planned: Planned, path: str) -> None:
    """Writes a picture, a PNG: bytes by kind and lookups of each device.

    Raises:
        RunError: the file cannot be written.
    """
    case, found = planned.case, planned.replay
    figure = Figure(figsize=(10, 7), layout="constrained")
    memory, lookups = figure.subplots(2, 1, sharex=True)
    device = np.arange(case.machine.devices)
    bottom = 0.0
    for name, count in case.bytes._asdict().items():
        height = count / 2**30
        memory.bar(device, height, bottom=bottom, width=0.9, label=f"{name} {height:,.3g}")
        bottom += height
    limit = case.machine.memory / 2**30
    if bottom > limit / 4:  # else it would press the bars flat
        memory.axhline(limit, color="black", linestyle="--", label=f"memory {limit:,.3g}")
    memory.set_ylabel("GiB")
    memory.set_title(
        f"Memory of each device: {bottom:,.3g} of {limit:,.3g} GiB,"
        f" {'does not fit' if case.over else 'fits'}"
    )
    memory.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    lookups.bar(device, found.lookups, width=0.9)
    mean = found.lookups.mean()
    lookups.axhline(mean, color="black", label=f"mean {mean:,.0f}")
    lookups.axhline(
        MOST_IMBALANCE * mean, color="black", linestyle=":", label=f"{MOST_IMBALANCE} of the mean"
    )
    lookups.set_xlabel("device")
    lookups.set_ylabel("rows a step")
    lookups.set_title(
        f"Rows that each device serves: largest over mean {found.imbalance:.4f} in a step"
    )
    lookups.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    try:
        figure.savefig(Path(path), format="png", dpi=120)
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error}.") from error
