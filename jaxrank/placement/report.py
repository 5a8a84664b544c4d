"""Output of a plan: text, JSON, and a picture."""

from typing import Any

from jaxrank import plots
from jaxrank.placement.plan import MAX_IMBALANCE, PlanReport
from jaxrank.placement.planner import TablePlan
from jaxrank.report import format_bytes

_MAX_REPORTED_TABLES = 60


def describe(planned: PlanReport) -> str:
    """Formats the plan as aligned text."""
    lines = [*_tables(planned), "", *_memory(planned), "", *_traffic(planned)]
    lines += [f"warning: {warning}" for warning in planned.warnings]
    return "\n".join(lines)


def _tables(planned: PlanReport) -> list[str]:
    cost = planned.cost
    rows = sum(t.rows for t in cost.plan.tables)
    machine = f" ({cost.machine.name})" if cost.machine.name else ""
    copies = f" in {cost.machine.replicas} replicas" if cost.machine.replicas > 1 else ""
    lines = [
        f"{len(cost.plan.tables)} tables, {rows:,} rows; devices: {cost.machine.devices:,}"
        f"{machine}{copies}; batch: {planned.batch_size:,}"
    ]
    largest = sorted(cost.plan.tables, key=lambda t: -t.rows * planned.row_bytes[t.name])
    names = {t.name for t in largest[:_MAX_REPORTED_TABLES]}
    shown = [t for t in cost.plan.tables if t.name in names]
    cells: list[tuple[str, ...]] = [("table", "rows", "dim", "size", "placement", "lookups", "why")]
    cells += [_cells(t, planned.row_bytes[t.name]) for t in shown]
    widths = [max(len(row[i]) for row in cells) for i in range(6)]
    for row in cells:
        name, *numbers = (f"{c:>{w}}" for c, w in zip(row[:4], widths[:4], strict=True))
        lines.append(
            f"{name.strip():<{widths[0]}}  {'  '.join(numbers)}  {row[4]:<{widths[4]}}"
            f"  {row[5]:>{widths[5]}}  {row[6]}"
        )
    if len(shown) < len(cost.plan.tables):
        lines.append(f"and {len(cost.plan.tables) - len(shown):,} smaller tables")
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


def _memory(planned: PlanReport) -> list[str]:
    cost = planned.cost
    kinds = [*cost.bytes._asdict().items(), ("total", cost.bytes.total)]
    lines = ["memory of each device"]
    lines += [f"  {name:<14}{format_bytes(count):>12}" for name, count in kinds]
    share = f"{cost.bytes.total / cost.machine.memory:.1%}"
    fits = (
        f"does not fit: {format_bytes(cost.excess_bytes)} too much" if cost.excess_bytes else "fits"
    )
    lines.append(f"  {fits}; {share} of {format_bytes(cost.machine.memory)}")
    return lines


def _traffic(planned: PlanReport) -> list[str]:
    replayed, cost = planned.replay, planned.cost
    lines = [
        f"each step, replayed with {replayed.batches} batches",
        f"  lookups per device    {replayed.lookups.mean():,.0f} rows on average, after duplicates",
        f"  imbalance             {replayed.imbalance:.4f} largest over mean; worst batch"
        f" {replayed.largest_imbalance:.4f}",
        f"  sent per device       {format_bytes(cost.exchanged)}",
    ]
    for name, capacity in cost.partition.capacities.items():
        lines.append(
            f"  buffers of {name:<10} {capacity:,} ids for each of {cost.partition.shards} owners;"
            f" fullest over mean {replayed.fullest[name]:.2f}; rounds {replayed.rounds[name]:.2f}"
        )
    if cost.partition.capacities:
        lines.append(f"  buffer use            {replayed.buffer_use:.3f} of the places")
    return lines


def to_json(planned: PlanReport) -> dict[str, Any]:
    """Converts the plan for `json_files.to_text`.

    Bytes are per device, except `bytes` of a table: all its rows once, with their accumulators.
    """
    cost, replayed = planned.cost, planned.replay
    tables = []
    for table in cost.plan.tables:
        entry = table._asdict() | {"bytes": table.rows * planned.row_bytes[table.name]}
        entry["lookups"] = entry.pop("unique")
        tables.append(entry)
    return {
        "devices": cost.machine.devices,
        "topology": cost.machine.name,
        "replicas": cost.machine.replicas,
        "batch_size": planned.batch_size,
        "fits": not cost.excess_bytes,
        "over_bytes": cost.excess_bytes,
        "memory_bytes": cost.machine.memory,
        "bytes_per_device": [cost.bytes.total] * cost.machine.devices,
        "bytes_by_kind": cost.bytes,
        "exchanged_bytes_per_step": cost.exchanged,
        "imbalance": replayed.imbalance,
        "largest_imbalance": replayed.largest_imbalance,
        "lookups_per_device": replayed.lookups,
        "batches": replayed.batches,
        "buffer_use": replayed.buffer_use,
        "capacity": cost.partition.capacities,
        "rounds": replayed.rounds,
        "fullest_over_mean": replayed.fullest,
        "tables": tables,
        "error": planned.error,
        "warnings": planned.warnings,
    }


def draw(planned: PlanReport, path: str) -> None:
    """Writes a PNG picture of the bytes by kind and the lookups of each device.

    Raises:
        RunError: the file cannot be written.
    """
    cost, replay = planned.cost, planned.replay
    plots.draw_plan(
        cost.bytes._asdict(),
        cost.machine.memory,
        replay.lookups,
        path,
        fits=not cost.excess_bytes,
        imbalance=replay.imbalance,
        even=MAX_IMBALANCE,
    )
