"""Trains tables of 2 GiB split over 8 CPU devices, and says what each device holds.

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python benchmarks/large_tables.py

26 tables of dimension 16 with power-law ids, row-wise AdaGrad, the hottest rows on every device.
Each device may hold its share of rows and accumulators, the replicated rows, and the buffers that
the compiled program states as temporaries.
"""

import argparse
import resource
import time
from pathlib import Path

import jax
import numpy as np
from counts import positive
from refused import run_main

from jaxrank import config as configs
from jaxrank import mesh as meshes
from jaxrank.build import make_trainee
from jaxrank.features import Batch, Categorical, Dense, Schema, Table, Task
from jaxrank.layout import Hot, ToStack, layout
from jaxrank.program import BatchShape, Program

DIM, TABLES, HOT = 16, 26, 64
EXPONENT = 1.05


def power_law(rng: np.random.Generator, rows: int, shape: tuple[int, ...]) -> np.ndarray:
    power = 1 - EXPONENT
    rank = ((rows + 1.0) ** power * (u := rng.random(shape)) + (1 - u)) ** (1 / power)
    return np.clip(rank.astype(np.int32) - 1, 0, rows - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gibibytes", type=float, default=2.0, help="of all rows")
    parser.add_argument("--batch-size", type=positive, default=8192)
    parser.add_argument("--calls", type=positive, default=5, help="of 4 steps")
    args = parser.parse_args()
    rows = int(args.gibibytes * 2**30 / (4 * DIM)) // TABLES
    names = [f"t{i}" for i in range(TABLES)]
    schema = Schema(
        tasks=(Task("click"),),
        floats=(Dense("f"),),
        ids=tuple(Categorical(name, name) for name in names),
        lists=(),
        tables=tuple(Table(name, rows, "integer") for name in names),
    )
    hot = Hot(merged=tuple(names * HOT), replicated=TABLES * HOT)
    lay = layout(schema, dict.fromkeys(names, DIM), {f"dim{DIM}": hot})
    (stack,) = lay.stacks
    mesh = meshes.make_mesh(devices=8)
    c = configs.default()
    c.batch_size = args.batch_size
    c.model.hidden = (64,)
    trainee = make_trainee(c, lay, mesh, num_steps=10_000, room={stack.name: 1.3 / 8})
    shape = BatchShape(args.batch_size, 32, {})
    program = Program(trainee, mesh, shape)

    to_stack = ToStack.of(stack)

    def batch(seed: int) -> Batch:
        rng = np.random.default_rng(seed)
        ids = to_stack(power_law(rng, rows, (args.batch_size, TABLES)), np.arange(TABLES))
        labels = (rng.random((args.batch_size, 1)) < 0.3).astype(np.float32)
        return Batch(
            floats=rng.normal(size=labels.shape).astype(np.float32),
            ids={stack.name: ids},
            lists={},
            labels=labels,
            weights=np.ones_like(labels),
            dropped=np.zeros((args.batch_size // 32, 0), np.int32),
            shifts=np.zeros((args.batch_size, 0), np.float32),
        )

    stacked = jax.tree.map(lambda *x: np.stack(x), *[batch(i) for i in range(4)])
    batches = meshes.put_batch(stacked, mesh, leading=1)
    step = program.train.lower(program.state_shape, batches).compile()
    state = program.init()
    for _ in range(1 + args.calls):  # the first touches memory that nobody has used yet
        start = time.perf_counter()
        state, told = step(state, batches)
        jax.block_until_ready((state, told))
        seconds = time.perf_counter() - start
    held = dict.fromkeys(range(8), 0)
    for array in jax.tree.leaves((state.tables, state.scratch)):
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    whole = sum(x.nbytes for x in jax.tree.leaves((state.tables, state.scratch)))
    memory = step.memory_analysis()
    assert memory is not None
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**10
    print(
        f"tables, accumulators and scratch: {whole / 2**20:,.0f} MiB in all, an eighth is"
        f" {whole / 8 / 2**20:,.1f}; held by a device: {min(held.values()) / 2**20:,.1f} to"
        f" {max(held.values()) / 2**20:,.1f} MiB"
    )
    print(
        "a device of the compiled step: arguments"
        f" {memory.argument_size_in_bytes / 2**20:,.1f} MiB, of which updated in"
        f" place {memory.alias_size_in_bytes / 2**20:,.1f},"
        f" temporaries {memory.temp_size_in_bytes / 2**20:,.1f} MiB"
    )
    rounds = int(np.max(told.exchange[stack.name].rounds))
    print(
        f"{args.batch_size * 4 / seconds:,.0f} examples/s, {rounds} round(s), peak of the process"
        f" {peak:,.0f} MiB, {resource.getrusage(resource.RUSAGE_SELF).ru_utime:.0f} s of CPU"
    )


if __name__ == "__main__":
    run_main(main)
