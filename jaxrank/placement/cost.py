"""Cost of a placement on one machine. It is computed again for each machine."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxrank.build import Workload
from jaxrank.data.store.split import Split
from jaxrank.embedding import check_row_shards
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.layout import Layout, ReplicatedRows, ids_of_device, layout
from jaxrank.placement import budget, planner, traffic
from jaxrank.program import BatchShape, check_batch
from jaxrank.step import StepSpec, layers_state, model_inputs


class Machine(NamedTuple):
    """The machine that a placement is planned for.

    name: of the topology, or empty if only the number of devices is known.
    replicas: number of copies of the split rows.
    memory: bytes per device.
    """

    name: str
    devices: int
    replicas: int
    memory: int


class PlacementCost(NamedTuple):
    """A placement on a machine, with its cost.

    ids: {stack: number of ids in a device's share of a batch, with PAD}.
    exchanged: bytes that one device sends per step.
    """

    machine: Machine
    plan: planner.Plan
    layout: Layout
    ids: dict[str, int]
    partition: budget.Partition
    bytes: budget.Bytes
    exchanged: int

    @property
    def room(self) -> dict[str, float]:
        """{stack: room of its exchange}, see `Embedding`."""
        return {name: n / self.ids[name] for name, n in self.partition.capacities.items()}

    @property
    def excess_bytes(self) -> int:
        """Bytes by which a device exceeds its memory, or 0."""
        return max(0, self.bytes.total - self.machine.memory)


class PlanInputs(NamedTuple):
    """Input of a plan. split: the stored training split. None: data is generated."""

    schema: Schema
    reads: traffic.Reads
    traffic: traffic.Traffic
    split: Split | None

    @property
    def rows(self) -> int:
        """Number of training examples."""
        return int(self.reads.part_rows.sum())


class PlacementPlanner:
    """Computes the cost of placements of one workload on several machines.

    Raises, when called too:
        InputError: a field of the config or a number of the machine is invalid.
    """

    def __init__(self, workload: Workload, data: PlanInputs):
        self._workload, self._data = workload, data
        names = [table.name for table in data.schema.tables]
        self.placement_of = planner.placements(names, workload.placement, workload.placements)
        lists = workload.lists
        sizes = (workload.batch_size, lists.group, lists.capacities)
        self.shape = BatchShape(*sizes, lists.has_requests)
        self.row_optimizer = workload.step_spec.embedding.row_optimizer
        self._dense = _dense(workload.step_spec)

    def cost(
        self,
        machine: Machine,
        placement_of: Mapping[str, str] | None = None,
        hot: Mapping[str, ReplicatedRows] | None = None,
    ) -> PlacementCost:
        """Plans the placement on one machine and computes its cost.

        Args:
            placement_of: {table: requested placement}. None: as the config requests.
            hot: the rows of an earlier placement, which is kept.
        """
        work, devices = self._workload, machine.devices
        _check_machine(machine, work.batch_size)
        plan = planner.make_plan(
            self._data.schema,
            work.dim_of,
            self._data.traffic,
            devices=devices,
            share=work.batch_size // devices,
            placement_of=placement_of or self.placement_of,
            hot=hot,
        )
        planned = layout(self._data.schema, work.dim_of, plan.hot)
        batch = self.shape.struct(planned)
        shards = devices // machine.replicas
        ids = ids_of_device(planned, batch, devices)
        capacities = planner.capacities(
            planned,
            plan.unique,
            ids,
            devices=devices,
            shards=shards,
            slack=work.slack,
            fixed=work.capacity,
        )
        partition = budget.Partition(machine.replicas, shards, capacities)
        needed = budget.device_bytes(
            planned,
            self.row_optimizer,
            partition,
            batch,
            self._dense,
            steps_per_execution=work.steps_per_execution,
            updates_whole_tables=work.step_spec.embedding.l2_scope == "table",
            averages=work.step_spec.ema_decay > 0,
        )
        exchanged = budget.exchanged(planned, partition, self._dense)
        return PlacementCost(machine, plan, planned, ids, partition, needed, exchanged)


def _check_machine(machine: Machine, batch_size: int) -> None:
    devices, replicas = machine.devices, machine.replicas
    if devices < 1:
        raise InputError(f"--devices: must be at least 1: found {devices}.")
    if replicas < 1 or devices % replicas:
        raise InputError(
            f"--replicas: must divide the number of devices: found {replicas}, {devices} devices."
        )
    check_row_shards(devices // replicas)
    check_batch("batch_size", batch_size, 1, devices)  # data.shards may be set later


def _dense(step_spec: StepSpec) -> budget.DensePart:
    """Counts the bytes of the layers from their shapes, without computing anything."""
    inputs = model_inputs(step_spec.embedding.layout)
    layers = jax.eval_shape(lambda: layers_state(step_spec, jax.random.key(0), inputs.zeros()))
    weights = layers["params"], layers["model_state"]

    def activations(examples: int) -> int:
        apply = functools.partial(step_spec.model.apply, train=False)
        traced = jax.make_jaxpr(apply)(*weights, inputs.shapes(examples))
        return _bytes([v.aval for equation in traced.jaxpr.eqns for v in equation.outvars])

    return budget.DensePart(
        parameters=_bytes(layers["params"]),
        state=_bytes((layers["model_state"], layers["opt_state"])),
        # Arrays that do not grow with the batch, such as a transposed weight, cancel out.
        activations=activations(2) - activations(1),
    )


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
