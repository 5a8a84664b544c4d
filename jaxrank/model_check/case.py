"""A small case of a config: its model and features, small tables and random examples."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import mesh as meshes
from jaxrank.build import Builder
from jaxrank.data.batches import packing
from jaxrank.data.batches.batcher import Batcher
from jaxrank.data.examples import Examples
from jaxrank.features import PAD, Batch, Schema, Task
from jaxrank.layout import Layout
from jaxrank.metrics.registry import check_means
from jaxrank.models import Inputs, Model
from jaxrank.placement import plan
from jaxrank.program import BatchShape, CompiledSteps
from jaxrank.step import model_inputs

DEVICES = 8
BATCH = 16 * DEVICES
STEPS = 2  # per execution
_EXECUTIONS = 4  # of the schedule
_MAX_TABLE_ROWS = 64  # of a table
_MAX_LIST_IDS = 4  # of a list
_REQUEST = 5  # examples of a request


class Case(NamedTuple):
    """A config with small data.

    builder: of the parts of the config, for tables with few rows.
    layout: of these tables, all of them split.
    model: of the config. `builder` builds it again.
    """

    builder: Builder
    layout: Layout
    model: Model

    @property
    def tasks(self) -> int:
        return len(self.layout.schema.tasks)

    def inputs(self, examples: int, seed: int = 0) -> Inputs:
        """Returns random inputs of the model, some places of sequences empty."""
        random = np.random.default_rng(seed)

        def values(shape: jax.ShapeDtypeStruct) -> jax.Array:
            if shape.dtype == jnp.int32:
                return jnp.asarray(np.where(random.random(shape.shape) < 0.7, 0, PAD), jnp.int32)
            return jnp.asarray(random.normal(size=shape.shape), shape.dtype)

        shapes = model_inputs(self.layout).shapes(examples)
        arrays = jax.tree.map(values, (shapes.all_dense, shapes.all_reads))
        return Inputs(shapes.names, *arrays)

    def variables(self) -> tuple[Any, Any]:
        """Returns random parameters, none of them 0, and the initial state of the model."""
        random = np.random.default_rng(1)
        params, state = jax.jit(self.model.init)(jax.random.key(0), self.inputs(1))

        def noise(x: jax.Array) -> jax.Array:
            return jnp.asarray(x + random.normal(size=x.shape, scale=0.3), x.dtype)

        return jax.tree.map(noise, params), state

    def program(self, devices: int | list[Any]) -> CompiledSteps:
        """Builds the programs of the config, with a new model, for CPUs or for given devices."""
        mesh = (
            meshes.make_mesh(devices=devices)
            if isinstance(devices, int)
            else meshes.device_mesh(devices, 1)
        )
        step_spec = self.builder.step_spec(
            self.layout,
            mesh,
            num_steps=STEPS * _EXECUTIONS,
            room={stack.name: 1.0 for stack in self.layout.stacks},
        )
        return CompiledSteps(step_spec, mesh, self._shape)

    @property
    def _shape(self) -> BatchShape:
        group = BATCH // DEVICES
        room = {
            stack.name: packing.aligned(group * _MAX_LIST_IDS * len(stack.lists))
            for stack in self.layout.stacks
            if stack.lists
        }
        return BatchShape(BATCH, group, room, self.builder.has_request_loss)

    def executions(self) -> Iterator[Batch]:
        """Yields batches of random examples for one execution after another, without end."""
        shape = self._shape
        batcher = Batcher(self.layout, shape.group, shape.capacities)
        random = np.random.default_rng(2)
        while True:
            batches = [batcher(_examples(self.layout.schema, random)) for _ in range(STEPS)]
            if shape.requests:
                requests = np.arange(BATCH, dtype=np.int32) % shape.group // _REQUEST
                batches = [batch._replace(requests=requests) for batch in batches]
            yield jax.tree.map(lambda *arrays: np.stack(arrays), *batches)


def make(config: ConfigDict, workdir: str) -> Case:
    """Makes the case of a config, whose schema is that of its store or of generated data.

    Args:
        workdir: of a run, whose store is read if it exists. May be empty.

    Raises:
        InputError: a field is invalid, or there is no data.
    """
    configs.check(config)
    check_means()
    # Choices are not reported, because the case has another size.
    opened = plan.open_data(config, workdir, lambda _: None)
    builder = opened.builder.resized(BATCH, _small(opened.builder.schema))
    return Case(builder, builder.layout(), builder.model())


def _small(schema: Schema) -> Schema:
    """Returns the schema with at most `_MAX_TABLE_ROWS` rows in each table."""
    tables = tuple(dataclasses.replace(t, rows=min(t.rows, _MAX_TABLE_ROWS)) for t in schema.tables)
    return dataclasses.replace(schema, tables=tables)


def _examples(schema: Schema, random: np.random.Generator) -> Examples:
    """Draws the examples of a batch."""
    rows = {table.name: table.rows for table in schema.tables}
    columns = [random.integers(0, rows[f.table], BATCH) for f in schema.id_columns]
    most = [min(f.length or _MAX_LIST_IDS, _MAX_LIST_IDS) for f in schema.ragged]
    lengths = random.integers(0, np.asarray(most, np.int64) + 1, (BATCH, len(most)))
    owners = np.repeat(np.tile(np.arange(len(most)), BATCH), lengths.ravel())
    limits = np.asarray([rows[f.table] for f in schema.ragged], np.int64)
    values = random.integers(0, limits[owners]) if len(owners) else np.zeros(0)
    weighted = any(f.weighted for f in schema.ragged)
    corrections = schema.logit_correction_columns
    return Examples(
        dense=random.normal(size=(BATCH, len(schema.dense))).astype(np.float32),
        ids=np.stack(columns, axis=1).astype(np.int32) if columns else np.zeros((BATCH, 0), "i4"),
        list_lengths=lengths.astype(np.int32),
        list_values=values.astype(np.int32),
        list_weights=random.random(len(values)).astype(np.float32) if weighted else None,
        labels=np.stack([_labels(task, random) for task in schema.tasks], axis=1),
        logit_correction=np.zeros((BATCH, corrections), np.float32) if corrections else None,
    )


_LABELS: Mapping[str, Any] = {
    "binary": lambda random: random.random(BATCH) < 0.4,
    "real": lambda random: random.normal(size=BATCH),
    "count": lambda random: random.poisson(2.0, BATCH),
}


def _labels(task: Task, random: np.random.Generator) -> np.ndarray:
    return np.asarray(_LABELS[task.kind](random), np.float32)
