"""The placement of a run's tables. It is decided when the run starts and kept until it ends.

A run that resumes on other devices keeps its placement, so that its checkpoints fit. Only the room
of its exchange is measured again.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxrank import layout as layouts
from jaxrank import mesh as meshes
from jaxrank.build import Workload
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.layout import Layout, ReplicatedRows
from jaxrank.placement import budget, planner
from jaxrank.placement import cost as placement_cost
from jaxrank.placement.traffic import StoredReads, measure
from jaxrank.runtime import processes


class Placement(NamedTuple):
    """The placement of the tables.

    hot: {stack: its replicated and hot rows}. Checkpoints keep it.
    room: {stack: room of its exchange}, see `Embedding`.
    messages: lines to print.
    """

    layout: Layout
    hot: dict[str, ReplicatedRows]
    room: dict[str, float]
    messages: tuple[str, ...] = ()


def decide(
    split: Split,
    schema: Schema,
    mesh: Mesh,
    kept: Mapping[str, ReplicatedRows] | None,
    *,
    dim_of: Mapping[str, int],
    placement: str,
    placements: Mapping[str, str],
    make_workload: Callable[[], Workload],
) -> Placement:
    """Decides the placement of a run from a sample of its training data. Process 0 decides for all.

    Args:
        kept: the placement that was decided when the run started. None: it starts now.
        dim_of: {table: dimension of its vectors}.
        placement, placements: fields of `config.embedding`.
        make_workload: called if the placement is measured, on several devices.

    Raises:
        InputError: the placement exceeds the memory of a device, or a field of the config is
            invalid.
    """
    planner.placements([table.name for table in schema.tables], placement, placements)
    _check_kept(kept or {}, dim_of)
    if mesh.size == 1:
        hot = dict(kept or {})
        layout = layouts.layout(schema, dim_of, hot)
        return Placement(layout, hot, {stack.name: 1.0 for stack in layout.stacks})
    decision: dict[str, Any] = {}
    with processes.together():
        if processes.is_first():
            decision = _measured(make_workload(), split, schema, mesh, kept)
    decision = processes.broadcast_value(decision)
    hot = {name: ReplicatedRows.from_state(tree) for name, tree in decision["hot"].items()}
    layout = layouts.layout(schema, dim_of, hot)
    return Placement(layout, hot, decision["room"], tuple(decision["messages"]))


def _check_kept(kept: Mapping[str, ReplicatedRows], dim_of: Mapping[str, int]) -> None:
    for stack, hot in kept.items():
        for table in {*hot.replicated_tables, *hot.hot_rows}:
            if table not in dim_of or layouts.stack_name(dim_of[table]) != stack:
                raise InputError(
                    f"table {table!r} must be in {stack}, as when the run started: found dimension"
                    f" {dim_of.get(table)}. Use another --workdir."
                )


def _measured(
    workload: Workload,
    split: Split,
    schema: Schema,
    mesh: Mesh,
    kept: Mapping[str, ReplicatedRows] | None,
) -> dict[str, Any]:
    reads = StoredReads(split, schema)
    data = placement_cost.PlanInputs(schema, reads, measure(reads), split)
    memory = _memory(mesh)
    machine = placement_cost.Machine("", mesh.size, mesh.shape[meshes.REPLICA], memory or 2**62)
    cost = placement_cost.PlacementPlanner(workload, data).cost(machine, hot=kept)
    shortage = budget.shortage(cost.bytes, machine.memory)
    if shortage:
        raise InputError(f"{shortage} Run `jaxrank plan` to find a change that fits.")
    hot = {name: rows.to_state() for name, rows in cost.plan.hot.items()}
    return {"hot": hot, "room": cost.room, "messages": _messages(cost)}


def _memory(mesh: Mesh) -> int:
    """Returns the bytes of a device of this process. 0 if unknown, as on CPU."""
    local_devices = [d for d in mesh.devices.flat if d.process_index == processes.place()[0]]
    return (local_devices[0].memory_stats() or {}).get("bytes_limit", 0)


def _messages(cost: placement_cost.PlacementCost) -> list[str]:
    whole = [t for t in cost.plan.tables if t.placement == "replicated"]
    hot = sum(t.replicated_rows for t in cost.plan.tables if t.placement == "rows")
    split = len(cost.plan.tables) - len(whole)
    buffers = ", ".join(
        f"{name} {capacity:,}" for name, capacity in cost.partition.capacities.items()
    )
    lines = [
        f"Placement: {len(whole)} table(s) replicated, {split} split by row, with their"
        f" {hot:,} hottest rows replicated; {cost.bytes.total / 2**20:,.1f} MiB"
        f" per device; ids per exchange buffer: {buffers or 'none'}"
    ]
    return lines + list(cost.plan.warnings)
