"""A placement on one machine, and what it costs there: decided anew for each machine."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from jaxrank import budget, embedding, optim
from jaxrank.config import to_plain
from jaxrank.data import packing, traffic
from jaxrank.embedding import planner
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.layout import Hot, Layout, ids_of_device, layout
from jaxrank.program import BatchShape, dims_of, make_model
from jaxrank.step import model_inputs, with_log_variances


class Machine(NamedTuple):
    """What is planned for.

    name: of the topology; empty where only the number of devices is known.
    replicas: copies of the split rows.
    memory: bytes of one device.
    """

    name: str
    devices: int
    replicas: int
    memory: int


class Case(NamedTuple):
    """A placement on a machine.

    ids: by stack, ids of a device's share of a batch, PAD included.
    exchanged: bytes that one device sends in a step.
    """

    machine: Machine
    plan: planner.Plan
    layout: Layout
    ids: dict[str, int]
    split: budget.Split
    bytes: budget.Bytes
    exchanged: int

    @property
    def over(self) -> int:
        """Bytes that a device lacks; 0 where it fits."""
        return max(0, self.bytes.total - self.machine.memory)


class Data(NamedTuple):
    """What is planned by. statistics: of the training split, as `packing.capacity` wants them."""

    schema: Schema
    reads: traffic.Reads
    traffic: traffic.Traffic
    statistics: Mapping[str, Any]


class Maker:
    """Makes the cases of one config, for one machine and another.

    Raises, when called too:
        InputError: a field of the config, or the numbers of the machine, cannot be.
    """

    def __init__(self, config: ConfigDict, data: Data):
        self._config, self._data = config, data
        self.dim_of = dims_of(data.schema, config.embedding)
        plain = layout(data.schema, self.dim_of)
        self.placement_of = planner.placements(
            [table.name for table in data.schema.tables],
            config.embedding.placement,
            to_plain(config.embedding.placements),
        )
        tables = to_plain(config.optim.tables)
        self.rule = embedding.make_rule(tables["name"], **tables["settings"])
        self._dense = _dense(config, plain)
        self.shape = self._batch_shape(plain)

    def _batch_shape(self, plain: Layout) -> BatchShape:
        config = self._config
        group = packing.group_size(config.batch_size, config.data.shards)
        statistics, slack = self._data.statistics, config.data.list_slack
        capacities = {
            s.name: packing.capacity(s, statistics, group, slack) for s in plain.stacks if s.lists
        }
        return BatchShape(config.batch_size, group, capacities)

    def case(
        self,
        machine: Machine,
        placement_of: Mapping[str, str] | None = None,
        hot: Mapping[str, Hot] | None = None,
    ) -> Case:
        """The placement on one machine.

        Args:
            placement_of: what is asked for each table, where that is not what the config asks for.
            hot: a placement decided before, to be kept.
        """
        config, devices = self._config, machine.devices
        _check_machine(machine, config.batch_size)
        plan = planner.make_plan(
            self._data.schema,
            self.dim_of,
            self._data.traffic,
            devices=devices,
            share=config.batch_size // devices,
            placement_of=placement_of or self.placement_of,
            hot=hot,
        )
        planned = layout(self._data.schema, self.dim_of, plan.hot)
        batch = self.shape.struct(planned)
        shards = devices // machine.replicas
        ids = ids_of_device(planned, batch, devices)
        capacities = planner.capacities(
            planned,
            plan.unique,
            ids,
            devices=devices,
            shards=shards,
            slack=config.embedding.exchange_slack,
            fixed=config.embedding.exchange_capacity,
        )
        split = budget.Split(machine.replicas, shards, capacities)
        needed = budget.of_device(
            planned,
            self.rule,
            split,
            batch,
            self._dense,
            steps_per_call=config.steps_per_call,
            updates_whole_tables=config.embedding.l2_scope == "table",
            averages=config.ema_decay > 0,
        )
        exchanged = budget.exchanged(planned, split, self._dense)
        return Case(machine, plan, planned, ids, split, needed, exchanged)


def _check_machine(machine: Machine, batch_size: int) -> None:
    devices, replicas = machine.devices, machine.replicas
    if devices < 1:
        raise InputError(f"--devices must be at least 1: found {devices}.")
    if replicas < 1 or devices % replicas:
        raise InputError(
            f"--replicas must divide the number of devices: found {replicas}, {devices} devices."
        )
    if embedding.GROUPS % (devices // replicas):
        raise InputError(
            f"tables can be split over a number of devices that divides {embedding.GROUPS}: found"
            f" {devices // replicas}. Set --devices or --replicas."
        )
    if batch_size % devices:
        raise InputError(
            f"batch_size must divide over all devices: found batch_size={batch_size}, {devices}"
            " devices."
        )


def _dense(config: ConfigDict, plain: Layout) -> budget.Dense:
    """Bytes of the layers, counted from their shapes; nothing is computed."""
    model = make_model(config.model, plain.schema)
    optimizer = _optimizer(config)
    inputs = model_inputs(plain)

    def init(*inputs: Any) -> Any:
        params, model_state = model.init(jax.random.key(0), *inputs)
        if config.task_weighting == "uncertainty":
            params = with_log_variances(params, len(plain.schema.tasks))
        return params, model_state, optimizer.init(params)

    def activations(examples: int) -> int:
        several = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((examples, *x.shape[1:]), x.dtype), inputs
        )
        apply = functools.partial(model.apply, train=False)
        traced = jax.make_jaxpr(apply)(params, model_state, *several)
        return _bytes([v.aval for equation in traced.jaxpr.eqns for v in equation.outvars])

    params, model_state, opt_state = jax.eval_shape(init, *inputs)
    return budget.Dense(
        parameters=_bytes(params),
        state=_bytes((model_state, opt_state)),
        # What does not grow with the examples, such as a weight transposed, falls out.
        activations=activations(2) - activations(1),
    )


def _optimizer(config: ConfigDict) -> Any:
    settings = to_plain(config.optim.dense)
    for field in inspect.signature(optim.schedule).parameters:
        settings.pop(field, None)
    try:
        return optim.dense_optimizer(rate=lambda _: 0.0, **settings.pop("settings"), **settings)
    except InputError as error:
        raise InputError(f"optim.dense: {error}") from error


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
