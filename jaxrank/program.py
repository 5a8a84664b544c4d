"""The compiled programs of a run: the one place with jit, shardings and donation.

Training, evaluation and everything that measures or inspects the step use these, so what is
measured is what runs.
"""

import contextlib
import dataclasses
import fnmatch
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrank import embedding, models, optim
from jaxrank import mesh as meshes
from jaxrank import step as steps
from jaxrank.config import to_plain
from jaxrank.errors import InputError
from jaxrank.features import PAD, Batch, Layout, Lists, Schema, layout

# Fields of config.optim.dense and .tables that make the schedule; the others make the optimizer.
_RATE_FIELDS = (
    "base_rate",
    "base_batch",
    "scaling",
    "warmup_steps",
    "decay",
    "decay_steps",
    "final_fraction",
    "power",
)


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
        schema, size = layout.schema, self.batch_size
        groups = size // self.group

        def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leading, *shape), dtype)

        def packed(capacity: int) -> Lists:
            shape = (groups, capacity)
            return Lists(
                array(jnp.int32, *shape), array(jnp.int32, *shape), array(jnp.float32, *shape)
            )

        return Batch(
            floats=array(jnp.float32, size, len(schema.floats)),
            ids={
                s.name: array(jnp.int32, size, len(s.columns)) for s in layout.stacks if s.columns
            },
            lists={s.name: packed(self.capacities[s.name]) for s in layout.stacks if s.lists},
            labels=array(jnp.float32, size, len(schema.tasks)),
            weights=array(jnp.float32, size, len(schema.tasks)),
            dropped=array(jnp.int32, groups, len(schema.lists)),
        )

    def empty(self, layout: Layout) -> Batch:
        """A batch on the host in which every id is PAD and every weight 0."""
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.struct(layout))
        pad = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, PAD))
        lists = {n: Lists(pad(p.ids), pad(p.segments), p.weights) for n, p in zeros.lists.items()}
        return zeros._replace(ids=pad(zeros.ids), lists=lists)


class Program:
    """The programs of one trainee on one mesh.

    init: () -> TrainState, placed.
    train: (state, batches with a leading axis of steps) -> (state, StepMetrics with that axis).
        The state given is donated: its tables are updated in place.
    predict: (Weights, batch) -> (logits, labels, weights), each f32[B, tasks] of the whole batch on
        every device. Takes any batch shape.
    """

    def __init__(self, trainee: steps.Trainee, mesh: Mesh, shape: BatchShape):
        self.trainee = trainee
        self.mesh = mesh
        self.shape = shape
        init = functools.partial(steps.init_state, trainee)
        batch = shape.struct(trainee.embedding.layout)
        self.state_shape: steps.TrainState = jax.eval_shape(init, batch)
        self.state_sharding = self._placed(self.state_shape)
        self._init = jax.jit(
            lambda: init(shape.empty(trainee.embedding.layout)), out_shardings=self.state_sharding
        )
        self.train = jax.jit(
            self._train,
            donate_argnums=0,
            in_shardings=(self.state_sharding, meshes.by_example(mesh, leading=1)),
            out_shardings=(self.state_sharding, meshes.replicated(mesh)),
        )
        self.predict = jax.jit(
            lambda weights, batch: (
                steps.eval_step(trainee, weights, batch),
                batch.labels,
                batch.weights,
            ),
            in_shardings=(steps.weights_of(self.state_sharding), meshes.by_example(mesh)),
            out_shardings=meshes.replicated(mesh),
        )

        self._finite = jax.jit(
            lambda weights: jnp.all(
                jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(weights)])
            )
        )

    def init(self) -> steps.TrainState:
        return self._init()

    def is_finite(self, weights: steps.Weights) -> bool:
        """Whether every number that predicts is finite; reads all tables once."""
        return bool(self._finite(weights))

    def _placed(self, state: steps.TrainState) -> steps.TrainState:
        everywhere = meshes.replicated(self.mesh)
        split = self.trainee.embedding.sharding()
        placed = jax.tree.map(lambda _: everywhere, state)
        return placed._replace(
            tables=jax.tree.map(lambda _: split, state.tables),
            scratch=jax.tree.map(lambda _: split, state.scratch),
        )

    def _train(self, state: steps.TrainState, batches: Batch) -> Any:
        return jax.lax.scan(functools.partial(steps.train_step, self.trainee), state, batches)


def make_layout(schema: Schema, config: ConfigDict) -> Layout:
    """Stacks the tables of `schema` by their dimensions in `config.embedding`.

    Raises:
        InputError: a pattern of `dims` matches no table, or a dimension is not positive.
    """
    names = [t.name for t in schema.tables]
    dim_of = dict.fromkeys(names, config.dim)
    for pattern, dim in to_plain(config.dims).items():
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise InputError(
                f"embedding.dims: {pattern!r} must match a table: the tables are {names[:20]}."
            )
        dim_of |= dict.fromkeys(matched, dim)
    wrong = {n: dim for n, dim in dim_of.items() if not isinstance(dim, int) or dim < 1}
    if wrong:
        raise InputError(f"embedding.dim must be a whole number of at least 1: found {wrong}.")
    return layout(schema, dim_of)


def make_trainee(
    config: ConfigDict, layout: Layout, mesh: Mesh, *, num_steps: int
) -> steps.Trainee:
    """Everything that `config` says about model, tables and optimizers.

    Raises:
        InputError: a field of the config has a value that cannot be used.
    """
    tasks = len(layout.schema.tasks)
    task_weights = tuple(config.task_weights) or (1.0,) * tasks
    if len(task_weights) != tasks:
        raise InputError(
            f"task_weights must have one number a task: found {task_weights}, {tasks} tasks."
        )
    dense, tables = to_plain(config.optim.dense), to_plain(config.optim.tables)
    scale = dict(batch_size=config.batch_size, num_steps=num_steps)
    with _within("optim.dense"):
        rate = optim.schedule(**scale, **{f: dense.pop(f) for f in _RATE_FIELDS})
        optimizer = optim.dense_optimizer(rate=rate, **dense.pop("settings"), **dense)
    with _within("optim.tables"):
        table_rate = optim.schedule(**scale, **{f: tables.pop(f) for f in _RATE_FIELDS})
    settings = {f: config.embedding[f] for f in ("init_std", "l2", "l2_scope", "clip_norm")}
    return steps.Trainee(
        model=models.build(tasks=tasks, **_tuples(config.model)),
        embedding=embedding.Embedding(
            layout=layout,
            mesh=mesh,
            rule=embedding.make_rule(tables.pop("name"), **tables.pop("settings"), **tables),
            **settings,
        ),
        optimizer=optimizer,
        rate=rate,
        table_rate=table_rate,
        task_weights=task_weights,
        seed=config.seed,
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


def check_batch(field: str, batch_size: int, group: int, mesh: Mesh) -> None:
    """Raises InputError unless batches of this size can be split over the mesh."""
    if batch_size % mesh.size:
        raise InputError(
            f"{field} must divide over all devices: got {field}={batch_size}, {mesh.size} devices."
        )
    if (batch_size // mesh.size) % group:
        raise InputError(
            f"{field}: each device's share must be whole groups of {group} examples, which are"
            f" packed together: got {field}={batch_size} on {mesh.size} devices, a share of"
            f" {batch_size // mesh.size}. Set data.shards to a multiple of {mesh.size}."
        )
