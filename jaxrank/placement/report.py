"""A plan as people read it, as JSON, and as a picture."""

from typing import Any

from jaxrank import plots
from jaxrank.placement.plan import MOST_IMBALANCE, Planned
from jaxrank.placement.planner import TablePlan
from jaxrank.report import format_bytes

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
    for name, capacity in case.partition.capacities.items():
        lines.append(
            f"  buffers of {name:<10} {capacity:,} ids for each of {case.partition.shards} owners;"
            f" fullest over mean {found.fullest[name]:.2f}; rounds {found.rounds[name]:.2f}"
        )
    if case.partition.capacities:
        lines.append(f"  buffer use            {found.buffer_use:.3f} of the places")
    return lines


def to_json(planned: Planned) -> dict[str, Any]:
    """The plan for `json_files.to_text`. Bytes are those of one device, but `bytes` of a table: all
    its rows once, with their accumulators."""
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
        "bytes_by_kind": case.bytes,
        "exchanged_bytes_per_step": case.exchanged,
        "imbalance": found.imbalance,
        "largest_imbalance": found.largest_imbalance,
        "lookups_per_device": found.lookups,
        "batches": found.batches,
        "buffer_use": found.buffer_use,
        "capacity": case.partition.capacities,
        "rounds": found.rounds,
        "fullest_over_mean": found.fullest,
        "tables": tables,
        "refusal": planned.refusal,
        "warnings": planned.warnings,
    }


def draw(planned: Planned, path: str) -> None:
    """Writes a picture, a PNG: bytes by kind and lookups of each device.

    Raises:
        RunError: the file cannot be written.
    """
    case, replay = planned.case, planned.replay
    plots.draw_plan(
        case.bytes._asdict(),
        case.machine.memory,
        replay.lookups,
        path,
        fits=not case.over,
        imbalance=replay.imbalance,
        even=MOST_IMBALANCE,
    )
