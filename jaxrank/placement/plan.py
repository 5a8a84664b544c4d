"""The placement of a config's tables on a machine that may be absent, and its cost."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import embedding, opening
from jaxrank import mesh as meshes
from jaxrank.build import Builder
from jaxrank.data.examples import Examples
from jaxrank.data.sources import registry
from jaxrank.errors import InputError
from jaxrank.placement import budget, traffic
from jaxrank.placement.cost import Machine, PlacementCost, PlacementPlanner, PlanInputs
from jaxrank.placement.replay import Replay, replay
from jaxrank.report import Report, format_bytes
from jaxrank.workdir.data import RunData

# A higher imbalance is worth a warning: steps wait for the busiest device.
MAX_IMBALANCE = 1.05
# Maximum number of replayed batches and of their ids: 100 batches of 1,000 features take hours.
MAX_BATCHES, MAX_IDS = 100, 2**29
# Usable fraction of the memory: what the compiler adds is not counted.
MAX_FILLED_FRACTION = 0.9


class PlanReport(NamedTuple):
    """A placement and the result of its replay.

    batch_size: examples per step over all devices.
    replay: the cost of stored or generated batches.
    row_bytes: {table: bytes of a row with its accumulators}.
    change: the smallest change with which the placement fits, or empty if it fits.
    """

    batch_size: int
    cost: PlacementCost
    replay: Replay
    row_bytes: dict[str, int]
    change: str
    warnings: tuple[str, ...]

    @property
    def error(self) -> str:
        """The excess over the memory and a change that fits, or empty if the placement fits."""
        text = budget.shortage(self.cost.bytes, self.cost.machine.memory)
        return f"{text} {self.change}" if text else ""


def plan(
    config: ConfigDict,
    *,
    devices: int,
    memory: int,
    topology: str = "",
    replicas: int | None = None,
    batches: int | None = None,
    workdir: str,
    report: Report,
) -> PlanReport:
    """Plans the tables of a config and replays batches of its training data.

    Args:
        devices: number of devices of the machine, of which `mesh.devices` may use fewer.
        memory: bytes per device.
        topology: name of the machine. May be empty.
        replicas: in place of `mesh.replicas`.
        batches: number of replayed batches. None: the default number.
        workdir: of a run, whose store is read if it exists. May be empty.
        report: gets lines to print.

    Raises:
        InputError: a field or number is invalid, or there is no data.
    """
    if batches is not None and batches < 1:
        raise InputError(f"--batches: must be at least 1: found {batches}.")
    configs.check(config)
    mesh = configs.mesh(config)
    replicas = mesh.replicas if replicas is None else replicas
    machine = Machine(topology, meshes.used(mesh.devices, devices), replicas, memory)
    builder, data = load_inputs(config, workdir, report)
    lists = builder.plan_list_room(data.split, data.traffic.list_lengths, report)
    workload = builder.workload(lists)
    planner, size = PlacementPlanner(workload, data), workload.batch_size
    cost = planner.cost(machine)
    if batches is None:
        batches = max(2, min(MAX_BATCHES, round(MAX_IDS / (size * data.traffic.ids_per_example))))
    drawn = traffic.batches(data.reads, size, data.traffic.parts, workload.seed)
    flag = "mesh.devices" if mesh.devices else "--devices"  # sets the number of devices
    replayed = replay(
        cost.layout,
        _reported(itertools.islice(drawn, batches), batches, report),
        replicas=cost.partition.replicas,
        shards=cost.partition.shards,
        capacities=cost.partition.capacities,
    )
    return PlanReport(
        batch_size=size,
        cost=cost,
        replay=replayed,
        row_bytes={
            t.name: budget.row_bytes(planner.row_optimizer, t.dim) for t in cost.plan.tables
        },
        change=_smallest_change(planner, cost, flag) if cost.excess_bytes else "",
        warnings=(*cost.plan.warnings, *_warnings(cost, replayed, data.traffic, size)),
    )


def _reported(batches: Iterator[Examples], count: int, report: Report) -> Iterator[Examples]:
    """Yields the batches and reports each quarter."""
    quarters = {max(1, round(count * i / 4)) for i in range(1, 4)}
    for done, batch in enumerate(batches):
        if done in quarters:
            report(f"replayed {done} of {count} batches")
        yield batch


def load_inputs(config: ConfigDict, workdir: str, report: Report) -> tuple[Builder, PlanInputs]:
    """Opens the data of a config, or generates it without a store, and measures a sample.

    Args:
        workdir: of a run, whose store is read if it exists. May be empty.

    Raises:
        InputError: see `opening.open_data`, or there is neither.
    """
    opened = open_data(config, workdir, report)
    split, reads, schema = opened.split, opened.generated, opened.builder.schema
    if split is not None:
        reads = traffic.StoredReads(split, schema)
    report(f"Reading a sample of {split.path if split else 'generated data'}")
    return opened.builder, PlanInputs(schema, reads, traffic.measure(reads), split)


def open_data(config: ConfigDict, workdir: str, report: Report) -> opening.OpenedData:
    """Opens the data of a config, or generates it without a store. See `load_inputs`."""
    config = opening.inherit(config, workdir)
    return opening.open_data(config, workdir, report, generate=_generate)


def _generate(data: RunData) -> traffic.GeneratedReads:
    if data.source.get("kind") != "synthetic":
        raise InputError(
            f"data.store: must be prepared data: found {data.path or 'none'!r}. Run"
            " `jaxrank prepare` first, and set --config.data.store to its output."
        )
    data.check_splits("the generated data")
    source = registry.synthetic_source(data.source)
    return traffic.GeneratedReads(source, data.settings["train"], data.features)


def _warnings(
    cost: PlacementCost, replayed: Replay, sample: traffic.Traffic, batch_size: int
) -> Iterator[str]:
    machine = cost.machine
    if not cost.excess_bytes and cost.bytes.total > MAX_FILLED_FRACTION * machine.memory:
        yield (
            f"a device needs {cost.bytes.total / machine.memory:.0%} of its memory, without"
            " buffers that the compiler adds. It may not fit."
        )
    if replayed.imbalance > MAX_IMBALANCE:
        yield (
            f"the busiest device serves {replayed.imbalance:.3f} times the mean, and each step"
            " waits for it. Increase batch_size to reduce the imbalance."
        )
    for name, rounds in replayed.rounds.items():
        if rounds > 1:
            yield (
                f"the exchange of {name} takes {rounds:.2f} rounds per step: its buffers are too"
                " small. Raise embedding.exchange_slack, or exchange_capacity if it is set."
            )
    share = batch_size // machine.devices
    if machine.devices > 1 and sample.examples < share:
        yield (
            f"a device takes {share:,} examples per step, more than the {sample.examples:,} of"
            " the sample. Its reads are underestimated."
        )


def _smallest_change(planner: PlacementPlanner, cost: PlacementCost, flag: str) -> str:
    """Describes the smallest change with which the placement fits."""
    for text, machine, placement_of in _changes(planner, cost, flag):
        try:
            other = planner.cost(machine, placement_of)
        except InputError:  # for example, the batch does not divide over the devices
            continue
        if not other.excess_bytes:
            needed = format_bytes(other.bytes.total)
            return f"The smallest change that fits: {text} ({needed} per device)."
    return "Neither other placements nor more devices make it fit."


def _changes(
    planner: PlacementPlanner, cost: PlacementCost, flag: str
) -> Iterator[tuple[str, Machine, dict[str, str] | None]]:
    machine = cost.machine
    forced = [t for t in cost.plan.tables if planner.placement_of[t.name] == "replicated"]
    forced.sort(key=lambda t: -t.rows * t.dim)
    for count in range(1, len(forced) + 1):
        names = [t.name for t in forced[:count]]
        split = dict.fromkeys(names, "rows")
        yield f"embedding.placements = {split}", machine, planner.placement_of | split
    for replicas in range(machine.replicas - 1, 0, -1):
        if machine.replicas % replicas == 0:
            yield f"--replicas={replicas}", machine._replace(replicas=replicas), None
    devices = 1 << machine.devices.bit_length()
    while devices <= embedding.GROUPS * machine.replicas:
        yield f"{flag}={devices}", machine._replace(devices=devices), None
        devices *= 2
