"""Measures step time and memory by the number of table rows.

    python -m benchmarks.step.table_rows --rows 1000000 20000000
    # without huge pages:
    GLIBC_TUNABLES= python -m benchmarks.step.table_rows --rows 1000000 20000000

Memory is measured in one process per size. Times are measured in turn, round by round, so that a
change in the machine's speed affects all sizes. Prints a line per size with the ratio to the first.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.harness.arguments import positive
from benchmarks.harness.checkout import environment
from jaxrank.runtime import huge_pages


def build_program(rows: int, batch_size: int, steps_per_execution: int):
    """Builds a DCN-V2 with 13 floats and 26 ids in one table of `rows` rows, and its batches."""
    import jax

    from jaxrank import defaults
    from jaxrank import mesh as meshes
    from jaxrank.build import Builder
    from jaxrank.config import default
    from jaxrank.features import Batch, Categorical, Dense, Schema, Table, Task
    from jaxrank.layout import layout
    from jaxrank.program import BatchShape, CompiledSteps

    schema = Schema(
        tasks=(Task("click"),),
        dense=tuple(Dense(f"f{i}") for i in range(13)),
        categorical=tuple(Categorical(f"c{i}", "t") for i in range(26)),
        ragged=(),
        tables=(Table("t", rows, "integer"),),
    )
    config = default()
    config.batch_size, config.model.name = batch_size, "ranker"
    config = defaults.choose_unread(config, rows, schema, lambda _: None)
    mesh = meshes.make_mesh(devices=1)
    step_spec = Builder(config, schema).step_spec(
        layout(schema, {"t": 16}), mesh, num_steps=1000, room={}
    )
    program = CompiledSteps(step_spec, mesh, BatchShape(batch_size, 512, {}))
    rng = np.random.default_rng(0)
    shape = (steps_per_execution, batch_size)
    # A bounded power law of exponent 1.05, in descending frequency as in prepared data.
    u = rng.random((*shape, 26))
    ids = np.floor(((float(rows) ** -0.05 - 1) * u + 1) ** -20.0) - 1
    batch = Batch(
        dense=rng.normal(size=(*shape, 13)).astype(np.float32),
        ids={"dim16": ids.astype(np.int32)},
        lists={},
        labels=(rng.random((*shape, 1)) < 0.25).astype(np.float32),
        weights=np.ones((*shape, 1), np.float32),
        dropped=np.zeros((steps_per_execution, batch_size // 512, 0), np.int32),
        logit_correction=np.zeros((*shape, 0), np.float32),
    )
    return program, jax.device_put(batch)


def peak_mib() -> float:
    # Not ru_maxrss, which a child process inherits from its parent.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def measure_memory(args: argparse.Namespace, rows: int) -> None:
    import jax

    program, batch = build_program(rows, args.batch_size, args.steps_per_execution)
    state = program.init()
    state, metrics = program.train(state, batch, np.int32(args.steps_per_execution))
    jax.block_until_ready(metrics)
    state_mib = sum(x.nbytes for x in jax.tree.leaves(state)) / 2**20
    tables = sum(x.nbytes for x in jax.tree.leaves(state.tables)) / 2**20
    print(json.dumps({"peak": peak_mib(), "state": state_mib, "tables": tables}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1_000_000, 20_000_000])
    parser.add_argument("--batch-size", type=positive, default=8192)
    parser.add_argument("--steps-per-execution", type=positive, default=4)
    parser.add_argument("--rounds", type=positive, default=10)
    parser.add_argument("--memory-of", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    huge_pages.ensure()  # as `jaxrank train` does
    if args.memory_of:
        measure_memory(args, args.memory_of)
        return

    import jax

    runs = []
    for rows in args.rows:
        program, batch = build_program(rows, args.batch_size, args.steps_per_execution)
        state, metrics = program.train(program.init(), batch, np.int32(args.steps_per_execution))
        jax.block_until_ready(metrics)
        runs.append([program, state, batch])
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(args.rounds):
        for run, times in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run[1], metrics = run[0].train(run[1], run[2], np.int32(args.steps_per_execution))
            jax.block_until_ready((run[1], metrics))
            times.append((time.perf_counter() - start) / args.steps_per_execution)
    del runs
    first = np.median(seconds[0])
    for rows, times in zip(args.rows, seconds, strict=True):
        command = [sys.executable, __file__, f"--memory-of={rows}"]
        command += [
            f"--batch-size={args.batch_size}",
            f"--steps-per-execution={args.steps_per_execution}",
        ]
        done = subprocess.run(command, capture_output=True, check=True, env=environment())
        record = json.loads(done.stdout)
        print(
            f"{rows:>11,} rows: {np.median(times) * 1e3:7.2f} ms per step,"
            f" {np.median(times) / first:5.3f} of the first;"
            f" {args.batch_size / np.median(times):9,.0f} examples/s; memory: peak"
            f" {record['peak']:,.0f} MiB, tables with accumulators {record['tables']:,.0f},"
            f" all state {record['state']:,.0f}"
        )


if __name__ == "__main__":
    main()
