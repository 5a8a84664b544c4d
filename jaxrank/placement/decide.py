"""Where the tables of a run lie: decided when it begins, and kept for as long as it lasts.

A run that goes on with other devices keeps its placement, so that its checkpoints fit; only the
room of its exchange is measured anew.
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
    """Where the tables lie.

    hot: by stack; what is kept.
    room: of the exchange of each stack; see `Embedding`.
    messages: lines for people.
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
    """The placement of a run, from a sample of its training data; process 0 decides for all.

    Args:
        kept: what was decided when the run began; None if it begins now.
        dim_of: {table: the dimension of its vectors}.
        placement, placements: fields of `config.embedding`.
        make_workload: called where the placement is measured, which is on several devices.

    Raises:
        InputError: a device has not enough memory, or a field of the config cannot be.
    """
    planner.placements([table.name for table in schema.tables], placement, placements)
    _check_kept(kept or {}, dim_of)
    if mesh.size == 1:
        hot = dict(kept or {})
        layout = layouts.layout(schema, dim_of, hot)
        return Placement(layout, hot, {stack.name: 1.0 for stack in layout.stacks})
    found: dict[str, Any] = {}
    with processes.together():
        if processes.is_first():
            found = _measured(make_workload(), split, schema, mesh, kept)
    found = processes.from_first(found)
    hot = {name: ReplicatedRows.from_state(tree) for name, tree in found["hot"].items()}
    layout = layouts.layout(schema, dim_of, hot)
    return Placement(layout, hot, found["room"], tuple(found["messages"]))


def _check_kept(kept: Mapping[str, ReplicatedRows], dim_of: Mapping[str, int]) -> None:
    for stack, hot in kept.items():
        for table in {*hot.replicated_tables, *hot.hot_rows}:
            if table not in dim_of or layouts.stack_name(dim_of[table]) != stack:
                raise InputError(
                    f"table {table!r} must be of {stack}, as when the run began: found dimension"
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
    data = placement_cost.PlanInputs(schema, reads, measure(reads), split.statistics)
    memory = _memory(mesh)
    machine = placement_cost.Machine("", mesh.size, mesh.shape[meshes.REPLICA], memory or 2**62)
    cost = placement_cost.PlacementPlanner(workload, data).cost(machine, hot=kept)
    shortage = budget.shortage(cost.bytes, machine.memory)
    if shortage:
        raise InputError(f"{shortage} `jaxrank plan` says what would fit.")
    hot = {name: found.to_state() for name, found in cost.plan.hot.items()}
    return {"hot": hot, "room": cost.room, "messages": _messages(cost)}


def _memory(mesh: Mesh) -> int:
    """Bytes of a device of this process; 0 where they are not known, as on CPU."""
    mine = [d for d in mesh.devices.flat if d.process_index == processes.place()[0]]
    return (mine[0].memory_stats() or {}).get("bytes_limit", 0)


def _messages(cost: placement_cost.PlacementCost) -> list[str]:
    whole = [t for t in cost.plan.tables if t.placement == "replicated"]
    hot = sum(t.replicated_rows for t in cost.plan.tables if t.placement == "rows")
    split = len(cost.plan.tables) - len(whole)
    buffers = ", ".join(
        f"{name} {capacity:,}" for name, capacity in cost.partition.capacities.items()
    )
    lines = [
        f"Placement: {len(whole)} table(s) on every device, {split} split by row, the"
        f" {hot:,} hottest rows of these on every device too; {cost.bytes.total / 2**20:,.1f} MiB"
        f" a device; ids of a buffer of the exchange: {buffers or 'none'}"
    ]
    return lines + list(cost.plan.warnings)
