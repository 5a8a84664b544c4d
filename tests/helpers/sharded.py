"""Runs the per-device functions of `Embedding` on the whole mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from examples import stack_rows
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrank import config as configs
from jaxrank import mesh as meshes
from jaxrank.embedding import Embedding, logical_rows
from jaxrank.embedding.backends import tpu, xla
from jaxrank.embedding.storage import TableState

_SETTINGS = ("init_std", "l2", "l2_scope", "clip_norm")
# Compiled once per embedding. The entry holds the embedding, so that its id is not reused.
_COMPILED: dict = {}


@functools.cache
def embedding_class(platform):
    """Returns `Embedding` with the backend of a platform, on any devices.

    Settings have the defaults of the config.

    platform: "gpu" uses XLA only, "gpu-kernel" uses the kernel of `gpu_kernel`.
    """
    name, _, kernel = platform.partition("-")

    def vector_layout(self, stack):
        result = Embedding.vector_layout(self, stack)
        return dataclasses.replace(result, interpret=True) if kernel else result

    def start(self, *args, **settings):
        of_config = {name: getattr(configs.Embedding, name) for name in _SETTINGS}
        Embedding.__init__(self, *args, **{**of_config, **settings})

    members = {"platform": name, "has_kernel": bool(kernel), "vector_layout": vector_layout}
    members["__init__"] = start
    return type(f"On{platform}", (Embedding,), members)


def set_chunk(monkeypatch, count):
    """Sets the number of vectors that both vector layouts move at a time."""
    for vector_layout in (tpu, xla):
        monkeypatch.setattr(vector_layout, "CHUNK", count)


def compiled(embedding, name, function):
    """Returns `jax.jit(function)`, the same one for each call with this embedding and name."""
    return _COMPILED.setdefault((id(embedding), name), (embedding, jax.jit(function)))[1]


def shard_mapped(embedding, function, in_specs, out_specs):
    mapped = jax.shard_map(
        function, mesh=embedding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return compiled(embedding, function.__name__, mapped)


def partition_specs(embedding, tables):
    of_part = embedding.specs()
    return {n: jax.tree.map(lambda _, n=n: of_part[n], t) for n, t in tables.items()}


def placed(embedding, tables):
    """Puts arrays of stacks on the mesh with their shardings."""
    specs = partition_specs(embedding, tables)
    put = functools.partial(NamedSharding, embedding.mesh)
    return jax.device_put(tables, jax.tree.map(put, specs, is_leaf=lambda x: isinstance(x, P)))


def initial_tables(embedding, seed=0):
    """Runs `Embedding.init`, which takes as long to compile as an update."""
    return compiled(embedding, "init", embedding.init)(jax.random.key(seed))


def new_tables(embedding, seed=0):
    """Draws tables on the host. Values depend on table and row alone, as in `init`."""
    tables = {}
    rows_of_table = {t.name: t.rows for t in embedding.layout.schema.tables}
    for stack in embedding.layout.stacks:
        rows = np.zeros((stack.rows, stack.dim), np.float32)
        for name in stack.tables:
            rng = np.random.default_rng([seed, *name.encode()])
            values = rng.normal(size=(rows_of_table[name], stack.dim), scale=embedding.init_std)
            rows[stack_rows(stack, name, np.arange(len(values)))] = values
        for part in filter(None, embedding.parts[stack.name]):
            part_rows = np.split(rows, [stack.replicated])[int(part.is_split)]
            stored = np.zeros((part.rows, part.width), np.float32)
            position = part.position(np.arange(len(part_rows), dtype=np.int32))
            stored[position, : part.dim] = part_rows
            slots = {
                slot: np.full(part.shape if wide else part.rows, value, np.float32)
                for slot, (wide, value) in embedding.row_optimizer.slots.items()
            }
            tables[part.name] = TableState(stored.reshape(part.shape), slots)
    return placed(embedding, tables)


def table_rows(tables):
    return {name: table.rows for name, table in tables.items()}


def lookup(embedding: Embedding, tables, batch):
    """Looks up a whole batch. Returns vectors, and the exchange stats as arrays [devices]."""

    def look_up(rows, batch):
        vectors, exchange_stats = embedding.lookup(rows, embedding.route(batch), batch)
        return vectors, jax.tree.map(lambda x: x[None], exchange_stats)

    tables = placed(embedding, tables)
    rows = table_rows(tables)
    run = shard_mapped(
        embedding,
        look_up,
        (partition_specs(embedding, rows), P(meshes.EXAMPLES)),
        P(meshes.EXAMPLES),
    )
    return run(rows, meshes.put_batch(batch, embedding.mesh))


def squared_norm(embedding: Embedding, batch, grads):
    """Returns the sum of squares of the summed gradients of all rows."""

    def compute_norm(batch, grads):
        return embedding.squared_norm(embedding.route(batch), batch, grads)

    run = shard_mapped(embedding, compute_norm, (P(meshes.EXAMPLES),) * 2, P())
    return run(*(meshes.put_batch(x, embedding.mesh) for x in (batch, grads)))


def update(embedding: Embedding, tables, batch, grads, learning_rate=0.1, step=0, applies=None):
    """Returns the tables after one step."""

    def change(tables, scratch, batch, grads, learning_rate, step, applies):
        routes = embedding.route(batch)
        more = dict(learning_rate=learning_rate, step=step, applies=applies)
        return embedding.update(tables, scratch, routes, batch, grads, **more)

    tables = placed(embedding, tables)
    scratch = placed(embedding, embedding.init_scratch())
    table_specs, scratch_specs = (
        partition_specs(embedding, tables),
        partition_specs(embedding, scratch),
    )
    by_example = P(meshes.EXAMPLES)
    run = shard_mapped(
        embedding,
        change,
        (table_specs, scratch_specs, by_example, by_example, P(), P(), P()),
        (table_specs, scratch_specs),
    )
    batch, grads = (meshes.put_batch(x, embedding.mesh) for x in (batch, grads))
    applies = None if applies is None else jnp.asarray(applies)
    return run(tables, scratch, batch, grads, jnp.asarray(learning_rate), jnp.int32(step), applies)[
        0
    ]


def logical(embedding: Embedding, tables):
    """Returns rows and slots of each stack in row order: {stack: (rows, {slot: array})}."""
    result = {}
    for stack in embedding.layout.stacks:
        parts = {p.name: tables[p.name] for p in embedding.parts[stack.name] if p}
        slots = {}
        for name, first in next(iter(parts.values())).slots.items():
            array = logical_rows({n: p.slots[name] for n, p in parts.items()}, stack)
            slots[name] = array if first.ndim == 2 else array[:, 0]
        result[stack.name] = (logical_rows(table_rows(parts), stack), slots)
    return result


def rows_by_table(embedding: Embedding, tables):
    """Returns the rows of each table in order, for any placement: {table: f[rows, dim]}."""
    result = {}
    rows_of_table = {t.name: t.rows for t in embedding.layout.schema.tables}
    for stack in embedding.layout.stacks:
        rows = logical(embedding, tables)[stack.name][0]
        for name in stack.tables:
            result[name] = rows[stack_rows(stack, name, np.arange(rows_of_table[name]))]
    return result
