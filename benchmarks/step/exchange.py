"""Compares lookup and update on 1, 2, 4 and 8 devices with automatic partitioning.

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python -m benchmarks.step.exchange

The model has 26 id columns over 26 tables of dimension 16, with SGD. Each line has devices, ids,
placement, examples/s, received bytes, rounds, and the time relative to the plain lookup in the same
round of measurements. Plain is `table[ids]` and `table.at[ids].add` on a table that is sharded by
row and partitioned by the compiler.

The received bytes are those that collectives write per device and step, including its own share of
an exchange. They are read from the compiled program, in which an instruction in the loop of further
rounds counts once.
"""

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.harness.arguments import positive, run_main
from jaxrank import mesh as meshes
from jaxrank.aot import checks
from jaxrank.embedding import Embedding, make_row_optimizer
from jaxrank.features import Batch, Categorical, Schema, Table, Task
from jaxrank.layout import Layout, ReplicatedRows, ToStack, layout

DIM, TABLES = 16, 26
RATE = 0.01


def make_layout(rows: int, hot: int) -> Layout:
    """Builds tables of equal size. `hot` rows of each are on every device, -1 for all rows."""
    names = [f"t{i}" for i in range(TABLES)]
    schema = Schema(
        tasks=(Task("click"),),
        dense=(),
        categorical=tuple(Categorical(name, name) for name in names),
        ragged=(),
        tables=tuple(Table(name, rows // TABLES, "integer") for name in names),
    )
    merged = tuple(np.tile(names, max(0, hot)))
    placed = (
        ReplicatedRows(replicated_tables=tuple(names))
        if hot < 0
        else ReplicatedRows(hot_rows=merged, replicated=len(merged))
    )
    return layout(schema, dict.fromkeys(names, DIM), {f"dim{DIM}": placed})


def draw_ids(kind: str, rows: int, size: int, seed: int = 0) -> np.ndarray:
    """Draws ids i32[size, TABLES], uniformly or by a power law of exponent 1.05."""
    rng = np.random.default_rng(seed)
    rows_per_table = rows // TABLES
    if kind == "uniform":
        return rng.integers(0, rows_per_table, (size, TABLES), dtype=np.int32)
    power = -0.05
    u = rng.random((size, TABLES))
    rank = ((rows_per_table + 1.0) ** power * u + (1 - u)) ** (1 / power)
    return np.clip(rank.astype(np.int32) - 1, 0, rows_per_table - 1)


def to_stack(lay: Layout, ids: np.ndarray) -> np.ndarray:
    (stack,) = lay.stacks
    return ToStack.from_stack(stack)(ids, np.arange(TABLES))


class Run:
    """A compiled program of lookup and update, with its state."""

    def __init__(self, step: Any, state: Any, inputs: Any):
        self.step = jax.jit(step, donate_argnums=0).lower(state, *inputs).compile()
        self.bytes = sum(checks.collective_bytes(self.step.as_text() or "").values(), start=0)
        self.state, self.inputs = state, inputs
        self.rounds = 1
        self.seconds()

    def seconds(self) -> float:
        start = time.perf_counter()
        self.state, rounds = self.step(self.state, *self.inputs)
        self.rounds = int(np.max(jax.device_get(rounds)))
        jax.block_until_ready(self.state)
        return time.perf_counter() - start


def plain(mesh: Any, rows: int, ids: np.ndarray) -> Run:
    """Builds gather and scatter on tables sharded by row, partitioned by the compiler."""
    by_row = NamedSharding(mesh, P(meshes.EXAMPLES))
    table = jax.device_put(jnp.ones((-(-rows // 8) * 8, DIM)), by_row)

    def step(table: jax.Array, ids: jax.Array) -> Any:
        vectors = table[ids]
        gradient = vectors * 0.01
        table = table.at[ids.reshape(-1)].add(-RATE * gradient.reshape(-1, DIM))
        return jax.lax.with_sharding_constraint(table, by_row), jnp.int32(1)

    offsets = np.arange(TABLES, dtype=np.int32) * (rows // TABLES)
    return Run(step, table, (meshes.put_batch(ids + offsets, mesh),))


def exchanged(mesh: Any, lay: Layout, ids: np.ndarray, room: float) -> Run:
    """Builds jaxrank's lookup and update, with gradients derived from the vectors."""
    (stack,) = lay.stacks
    embedding = Embedding(
        lay,
        mesh,
        row_optimizer=make_row_optimizer("sgd"),
        room={stack.name: room},
        init_std=0.01,
        l2=0.0,
        l2_scope="read",
        clip_norm=0.0,
    )
    tables = jax.jit(embedding.init)(jax.random.key(0))
    state = tables, embedding.init_scratch()
    specs = embedding.specs()
    state_specs = tuple(
        {name: jax.tree.map(lambda _, n=name: specs[n], part) for name, part in tree.items()}
        for tree in state
    )
    size = len(ids)
    labels = np.zeros((size, 1), np.float32)
    nothing = np.zeros((size, 0), np.float32)
    batch = Batch(nothing, {stack.name: to_stack(lay, ids)}, {}, labels, labels, nothing, nothing)

    def step(state: Any, batch: Batch) -> Any:
        tables, scratch = state
        routes = embedding.route(batch)
        rows = {name: part.rows for name, part in tables.items()}
        vectors, loads = embedding.lookup(rows, routes, batch)
        gradient = jax.tree.map(lambda v: v * 0.01, vectors)
        state = embedding.update(
            tables,
            scratch,
            routes,
            batch,
            gradient,
            learning_rate=jnp.float32(RATE),
            step=jnp.int32(0),
        )
        return state, loads[stack.name].rounds if loads else jnp.int32(1)

    whole = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(state_specs, P(meshes.EXAMPLES)),
        out_specs=(state_specs, P()),
        check_vma=False,
    )
    put = functools.partial(NamedSharding, mesh)
    placed = jax.device_put(
        state, jax.tree.map(put, state_specs, is_leaf=lambda x: isinstance(x, P))
    )
    return Run(whole, placed, (meshes.put_batch(batch, mesh),))


def bucket_room(ids: np.ndarray, devices: int) -> float:
    """Returns the planner's room: mean plus five deviations of a bucket's distinct ids, per id."""
    share = len(ids) // devices
    rows_read = ids[:share] + np.arange(TABLES, dtype=np.int32) * (ids.max() + 1)
    mean = len(np.unique(rows_read)) / devices
    return min(1.0, (mean + 5 * mean**0.5) / rows_read.size)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive, default=2_600_000, help="total of all tables")
    parser.add_argument("--batch-size", type=positive, default=8192)
    parser.add_argument("--devices", type=positive, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=positive, default=7, help="measurements of each")
    args = parser.parse_args()
    small = 26_000  # few enough rows to replicate
    for kind in ("uniform", "power law"):
        for devices in args.devices:
            mesh = meshes.make_mesh(devices=devices)
            ids = draw_ids(kind, args.rows, args.batch_size)
            few = draw_ids(kind, small, args.batch_size)
            room = bucket_room(ids, devices)
            runs = {
                "plain": plain(mesh, args.rows, ids),
                "rows": exchanged(mesh, make_layout(args.rows, 0), ids, room),
                "rows, hot on all": exchanged(mesh, make_layout(args.rows, 50), ids, room),
                "rows, overflow": exchanged(mesh, make_layout(args.rows, 0), ids, room / 4),
                f"plain, {small:,} rows": plain(mesh, small, few),
                f"replicated, {small:,} rows": exchanged(mesh, make_layout(small, -1), few, 1.0),
            }
            seconds: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(args.rounds):
                for name, run in runs.items():
                    seconds[name].append(run.seconds())
            for name, run in runs.items():
                beside = f"plain, {small:,} rows" if f"{small:,}" in name else "plain"
                ratio = np.median(np.array(seconds[name]) / np.array(seconds[beside]))
                print(
                    f"{kind:>9}, {devices} devices, {name:<24}"
                    f" {args.batch_size / np.median(seconds[name]):>11,.0f} examples/s"
                    f" {run.bytes / 2**20:>7.2f} MiB received {run.rounds:>3} rounds"
                    f" {ratio:>6.2f} of plain's time",
                    flush=True,
                )


if __name__ == "__main__":
    run_main(main)
