"""The compiled programs of a run: the one place with jit, shardings and donation.

Training, evaluation and everything that measures or inspects the step use these, so what is
measured is what runs.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import embedding, models, optim, validate
from jaxrank import mesh as meshes
from jaxrank import step as steps
from jaxrank.config import to_plain
from jaxrank.data.batches import packing
from jaxrank.errors import InputError
from jaxrank.features import Batch, Schema
from jaxrank.layout import Layout, batch_of, ids_of_device
from jaxrank.metrics import sums as metrics
from jaxrank.runtime import processes
from jaxrank.timetable import make_timetable


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The static shape of a batch.

    batch_size: examples over all devices.
    group: examples whose lists are packed together.
    capacities: {stack: ids in a group}.
    """

    batch_size: int
    group: int
    capacities: dict[str, int]

    def struct(self, layout: Layout, leading: tuple[int, ...] = ()) -> Batch:
        """The batch as jax.ShapeDtypeStruct."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leading, *shape), dtype)

        shifts = layout.schema.shift_columns
        return batch_of(array, layout, self.batch_size, self.group, self.capacities, shifts)


class Program:
    """The programs of one trainee on one mesh.

    init: () -> TrainState, placed.
    train: (state, batches with a leading axis of steps) -> (state, StepMetrics with that axis).
        The state given is donated: its tables are updated in place.
    predict: (Weights, batch) -> (logits, labels, weights), each f32[B, tasks] of the whole batch on
        every device; logits and weights are of all traffic. Takes any batch shape.
    largest: numbers [devices] -> the largest, on every device.

    Raises:
        InputError: on CPU, `native` is there in some processes only, whose programs then differ.
    """

    def __init__(self, trainee: steps.Trainee, mesh: Mesh, shape: BatchShape):
        self.trainee = trainee
        self.mesh = mesh
        self.shape = shape
        if trainee.embedding.on_cpu:
            by = "native code" if trainee.embedding.is_native else "XLA, as with JAXRANK_NATIVE=0"
            processes.check_same("what works on rows and layers", by)
        init = functools.partial(steps.init_state, trainee)
        self.state_shape: steps.TrainState = jax.eval_shape(init)
        specs = self._specs(self.state_shape)
        self.state_sharding = self._shardings(specs)
        weights_specs = steps.weights_of(specs)
        options = trainee.model.compiler_options(meshes.platform(mesh))
        options |= meshes.exchange_options(mesh)
        self._init = jax.jit(init, out_shardings=self.state_sharding)
        self.train = jax.jit(
            self._on_devices(self._train, (specs, P(None, meshes.EXAMPLES)), (specs, P())),
            donate_argnums=0,
            in_shardings=(self.state_sharding, meshes.by_example(mesh, leading=1)),
            out_shardings=(self.state_sharding, meshes.replicated(mesh)),
            compiler_options=options | trainee.embedding.update_options,
        )
        eval_step = functools.partial(steps.eval_step, trainee)
        score = self._on_devices(eval_step, (weights_specs, P(meshes.EXAMPLES)), P(meshes.EXAMPLES))
        self.predict = jax.jit(
            lambda weights, batch: (
                score(weights, batch),
                batch.labels,
                metrics.of_all_traffic(batch.weights, batch.labels, batch.shifts),
            ),
            in_shardings=(steps.weights_of(self.state_sharding), meshes.by_example(mesh)),
            out_shardings=meshes.replicated(mesh),
            compiler_options=options,
        )
        self._finite = jax.jit(
            lambda weights: jnp.all(
                jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(weights)])
            )
        )

        self.largest = jax.jit(jnp.max, out_shardings=meshes.replicated(mesh))

    def init(self) -> steps.TrainState:
        return self._init()

    def blank(self) -> steps.TrainState:
        """Shapes of a state, in which a checkpoint goes; only the scratch arrays are there."""
        scratch = jax.jit(
            self.trainee.embedding.init_scratch, out_shardings=self.state_sharding.scratch
        )
        return self.state_shape._replace(scratch=scratch())

    def is_finite(self, weights: steps.Weights) -> bool:
        """Whether every number that predicts is finite; reads all tables once."""
        return bool(self._finite(weights))

    @functools.cached_property
    def buffers(self) -> dict[str, int]:
        """By stack whose rows travel, ids that one buffer of the training step has room for."""
        embedding = self.trainee.embedding
        if not embedding.exchanges:
            return {}
        ids = ids_of_device(embedding.layout, self.shape.struct(embedding.layout), self.mesh.size)
        return {
            name: embedding.exchange(name, ids[name]).capacity
            for name, parts in embedding.parts.items()
            if parts.split and ids[name]
        }

    def _specs(self, state: steps.TrainState) -> steps.TrainState:
        """How each array of a state lies on the mesh."""
        of_part = self.trainee.embedding.specs()
        specs = jax.tree.map(lambda _: P(), state)._replace(
            tables={
                name: jax.tree.map(lambda _, name=name: of_part[name], table)
                for name, table in state.tables.items()
            },
            scratch={name: of_part[name] for name in state.scratch},
        )
        if state.average:
            rows = {name: of_part[name] for name in state.average.rows}
            specs = specs._replace(average=specs.average._replace(rows=rows))
        return specs

    def _shardings(self, specs: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
        )

    def _on_devices(self, function: Any, in_specs: Any, out_specs: Any) -> Any:
        """The program of one device, on all devices of the mesh."""
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _train(self, state: steps.TrainState, batches: Batch) -> Any:
        step = functools.partial(steps.train_step, self.trainee)
        state, metrics = jax.lax.scan(step, state, batches)
        return steps.averaged(self.trainee, state, metrics.skipped), metrics


def dims_of(schema: Schema, config: ConfigDict) -> dict[str, int]:
    """The dimension of each table of `schema`, by `config.embedding`.

    Raises:
        InputError: a pattern of `dims` matches no table, or a dimension is not positive.
    """
    names = [t.name for t in schema.tables]
    dims = validate.matched("embedding.dims", "table", names, to_plain(config.dims))
    dim_of = dict.fromkeys(names, config.dim) | dims
    wrong = {n: dim for n, dim in dim_of.items() if not isinstance(dim, int) or dim < 1}
    if wrong:
        raise InputError(f"embedding.dim must be a whole number of at least 1: found {wrong}.")
    return dim_of


def make_model(config: ConfigDict, schema: Schema) -> models.Model:
    """The model of the config's section `model`.

    Raises:
        InputError: a field has a value that cannot be used.
    """
    return models.build(**model_fields(config, schema))


def model_fields(config: ConfigDict, schema: Schema) -> dict[str, Any]:
    """The arguments of `models.build` that the config's section `model` stands for.

    Raises:
        InputError: a field names a task that is not there, or not of the kind it must be.
    """
    fields = _tuples(config)
    names = [t.name for t in schema.tasks]
    parents = [-1] * len(names)
    for task, parent in fields.pop("parents").items():
        if task not in names or parent not in names:
            raise InputError(
                f"model.parents: {task!r} and {parent!r} must be tasks: they are {names}."
            )
        parents[names.index(task)] = names.index(parent)
        kinds = [schema.tasks[names.index(name)].kind for name in (task, parent)]
        if kinds != ["binary", "binary"]:
            raise InputError(
                f"model.parents: {task!r} and {parent!r} must be binary tasks, as no other has a"
                f" probability: they are of kinds {kinds}."
            )
    fields["parents"] = tuple(parents) if max(parents) >= 0 else ()
    return {"tasks": len(names), **fields}


class Optimizers(NamedTuple):
    """What `config.optim` says: of the dense parameters, and of the tables."""

    dense: optim.Optimizer
    rate: optim.Schedule
    rule: embedding.Rule
    table_rate: optim.Schedule


def make_optimizers(config: ConfigDict, num_steps: int) -> Optimizers:
    """Both optimizers and their learning rates.

    Raises:
        InputError: a field of `config.optim` has a value that cannot be used.
    """
    dense, tables = to_plain(config.optim.dense), to_plain(config.optim.tables)
    scale = dict(batch_size=config.batch_size, num_steps=num_steps)
    # Fields that make the schedule; the others make the optimizer.
    of_rate = inspect.signature(optim.schedule).parameters.keys() - scale.keys()
    with _within("optim.dense"):
        rate = optim.schedule(**scale, **{f: dense.pop(f) for f in of_rate})
        learned = (steps.LOG_VARIANCES,) if config.task_weighting == "uncertainty" else ()
        settings = dense.pop("settings")
        optimizer = optim.dense_optimizer(rate=rate, undecayed=learned, **settings, **dense)
    with _within("optim.tables"):
        table_rate = optim.schedule(**scale, **{f: tables.pop(f) for f in of_rate})
    settings = tables["settings"]
    return Optimizers(optimizer, rate, embedding.make_rule(tables["name"], **settings), table_rate)


def check_config(config: ConfigDict) -> None:
    """Refuses what is wrong whatever the data, before any is read.

    Raises:
        InputError: naming the field of the config, what it must be and what was found.
    """
    configs.check(config)
    packing.check_data_shards(config.batch_size, config.data.shards)
    make_timetable(config, rows=1)
    make_optimizers(config, num_steps=1)
    fields = _tuples(config.model)
    fields.pop("parents")  # names of tasks
    models.build(tasks=1, **fields)


def make_trainee(
    config: ConfigDict,
    layout: Layout,
    mesh: Mesh,
    *,
    num_steps: int,
    room: Mapping[str, float],
) -> steps.Trainee:
    """Everything that `config` says about model, tables and optimizers.

    Args:
        room: of each stack's exchange; see `Embedding`.

    Raises:
        InputError: a field of the config has a value that cannot be used.
    """
    tasks = len(layout.schema.tasks)
    task_weights = tuple(config.task_weights) or (1.0,) * tasks
    if len(task_weights) != tasks:
        raise InputError(
            f"task_weights must have one number a task: found {task_weights}, {tasks} tasks."
        )
    optimizers = make_optimizers(config, num_steps)
    with _within("optim.tables"):
        names = [t.name for t in layout.schema.tables]
        factors = validate.matched("factors", "table", names, to_plain(config.optim.tables.factors))
        for name, factor in factors.items():
            if not isinstance(factor, int | float) or not factor >= 0:
                raise InputError(f"factors: that of {name} must be 0 or more: found {factor!r}.")
    settings = {f: config.embedding[f] for f in ("init_std", "l2", "l2_scope", "clip_norm")}
    return steps.Trainee(
        model=make_model(config.model, layout.schema),
        embedding=embedding.Embedding(
            layout=layout,
            mesh=mesh,
            rule=optimizers.rule,
            room=room,
            rate_factors=factors,
            **settings,
        ),
        optimizer=optimizers.dense,
        rate=optimizers.rate,
        table_rate=optimizers.table_rate,
        kinds=tuple(task.kind for task in layout.schema.tasks),
        task_weights=task_weights,
        learns_task_weights=config.task_weighting == "uncertainty",
        ema_decay=config.ema_decay,
        seed=config.seed,
        skips=config.watch.on_nonfinite == "skip",
    )


@contextlib.contextmanager
def _within(section: str) -> Iterator[None]:
    """Names the section of the config in errors that name only a field."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{section}: {error}") from error
    except TypeError as error:
        raise InputError(f"{section}: a field has the wrong type: {error}.") from error


def _tuples(section: ConfigDict) -> dict[str, Any]:
    plain = to_plain(section)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}


def check_batch(field: str, batch_size: int, group: int, devices: int) -> None:
    """Raises InputError unless batches of this size can be split over so many devices."""
    if batch_size % devices:
        raise InputError(
            f"{field} must divide over all devices: found {field}={batch_size}, {devices} devices."
        )
    if (batch_size // devices) % group:
        raise InputError(
            f"{field}: each device's share must be whole groups of {group} examples, which are"
            f" packed together: found {field}={batch_size} on {devices} devices, a share of"
            f" {batch_size // devices}. Set data.shards to a multiple of {devices}."
        )
