"""Measures the step on a CPU, of jaxrank and of other trainers, against the machine's limit.

    pip install torch==2.13.0 && pip install --no-deps fbgemm-gpu-cpu==1.8.0  # after `bench`
    python -m benchmarks.step.cpu --shape criteo --rounds 5 --seconds 6
    python -m benchmarks.step.cpu --shape lists --rounds 5 --seconds 6

Each program trains the model of `data.py` in turn on the same examples, in batches in memory.
`cpu_peers.py` describes the other trainers. The floor of a step is the time of its matrix products
at the best rate of all programs `products`, plus the time of the tables' bytes at the rate of a
copy. These bytes are:

- per id: one vector read
- per id column and list of an example: one vector written and its gradient read
- per distinct row: the row and its sum of squares read and written

`tables` is the lookup, the gradient of each row and its exact update, without a model.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.harness.arguments import positive
from benchmarks.harness.in_turn import Program, Round, serve
from benchmarks.step import data, programs
from benchmarks.step.data import BATCH
from jaxrank.runtime import huge_pages

HERE = Path(__file__).resolve().parent
OURS = ("jaxrank", "jaxrank_bfloat16", "jaxrank_tables")
LIMITS = (
    "products", "products_numpy", "products_torch", "products_jaxrank", "products_bfloat16",
    "products_torch_bfloat16", "products_jaxrank_bfloat16", "copy",
)  # fmt: skip
PEERS = (
    "fbgemm", "fbgemm_bfloat16", "fbgemm_tables", "torch", "torch_bfloat16", "torch_dense",
    "tensorflow", "tensorflow_bfloat16", "fuxictr",
)  # fmt: skip
COPIED = 2**28  # bytes that a copy reads and writes, each


def build_run(shape: str, folder: Path, precision: str):
    """Builds the run, and the batches of executions on the device."""
    import jax

    from jaxrank import mesh as meshes
    from jaxrank import run as jobs

    if shape == data.MAIN_JOB:
        config = data.main_job(precision)
    else:
        path = folder / "raw.parquet"
        data.write_parquet(path, data.raw(shape, data.BATCHES * BATCH))
        config = data.config(shape, path, precision)
    job = jobs.build(config, folder / "run", report=lambda text: None)
    executions = data.BATCHES // config.steps_per_execution
    batches = [meshes.put_batch(next(job.batches), job.program.mesh, 1) for _ in range(executions)]
    job.batches.close()
    return job, jax.block_until_ready(batches)


def steps(shape: str, folder: Path, precision: str) -> Iterator[int]:
    import jax

    job, batches = build_run(shape, folder, precision)
    state = job.program.init()
    examples = job.steps_per_execution * job.program.shape.batch_size
    while True:
        for batch in batches:
            state, metrics = job.program.train(state, batch, np.int32(job.steps_per_execution))
            jax.block_until_ready(metrics)
            yield examples


def tables(shape: str, folder: Path) -> Iterator[int]:
    job, batches = build_run(shape, folder, "highest")
    for _ in programs.tables(job.program, batches):
        yield job.steps_per_execution * job.program.shape.batch_size


def products(shape: str, dtype: str, precision: str = "") -> Iterator[int]:
    for _ in programs.products(data.products(shape), BATCH, dtype, precision):
        yield programs.STEPS * BATCH


def products_numpy(shape: str) -> Iterator[int]:
    rng = np.random.default_rng(0)
    operands = []
    for a, b in data.products(shape):
        x, kernel, grad = (
            rng.normal(size=size).astype(np.float32) for size in ((BATCH, a), (a, b), (BATCH, b))
        )
        for first, second in ((x, kernel), (grad, kernel.T), (x.T, grad)):
            out = np.empty((first.shape[0], second.shape[1]), np.float32)
            operands.append((first, second, out))
    while True:
        for first, second, out in operands:
            np.matmul(first, second, out=out)
        yield BATCH


def products_torch(shape: str, bfloat16: bool) -> Iterator[int]:
    import torch

    dtype = torch.bfloat16 if bfloat16 else torch.float32

    operands = []
    for a, b in data.products(shape):
        x, kernel, grad = (
            torch.randn(*size).to(dtype) for size in ((BATCH, a), (a, b), (BATCH, b))
        )
        operands += [(x, kernel), (grad, kernel.T), (x.T, grad)]
    while True:
        for first, second in operands:
            first @ second
        yield BATCH


def make_program(name: str, shape: str, folder: Path) -> Callable[[], Iterator[int]]:
    return {
        "jaxrank": lambda: steps(shape, folder, "highest"),
        "jaxrank_bfloat16": lambda: steps(shape, folder, "bfloat16"),
        "jaxrank_tables": lambda: tables(shape, folder),
        "products": lambda: products(shape, "float32"),
        "products_bfloat16": lambda: products(shape, "bfloat16"),
        "products_jaxrank": lambda: products(shape, "float32", "highest"),
        "products_jaxrank_bfloat16": lambda: products(shape, "float32", "bfloat16"),
        "products_numpy": lambda: products_numpy(shape),
        "products_torch": lambda: products_torch(shape, bfloat16=False),
        "products_torch_bfloat16": lambda: products_torch(shape, bfloat16=True),
        "copy": lambda: programs.copy(COPIED),  # counts a byte as an example
    }[name]


def table_bytes(shape: str) -> float:
    """Returns the bytes of lookup and update of a batch, see the module docstring."""
    examples, vector = data.raw(shape, BATCH), 4 * data.DIM
    ids, values = data.merge_tables(examples)
    different = len(np.unique(ids)) + len(np.unique(values))
    moved = ids.size + values.size + 2 * (ids.size + examples.lengths.size)
    return float(vector * moved + 2 * (vector + 4) * different)


def report(shape: str, rounds: dict[str, list[Round]]) -> None:
    rate = {
        name: statistics.median(r.examples / r.seconds for r in results)
        for name, results in rounds.items()
    }
    print(f"{shape}: examples/s, medians of {len(next(iter(rounds.values())))} rounds")
    for name, results in rounds.items():
        if name != "copy":
            each = [r.examples / r.seconds for r in results]
            print(
                f"  {name:24s}{rate[name]:10,.0f}   {min(each):,.0f} to {max(each):,.0f};"
                f" {results[-1].private:,} MiB"
            )
    if shape == data.MAIN_JOB:
        return
    flops = BATCH * 6 * sum(a * b for a, b in data.products(shape))
    if "copy" in rate:
        seconds = table_bytes(shape) / rate["copy"]
        print(f"  a copy: {rate['copy'] / 1e9:.1f} GB/s; the tables' bytes {seconds * 1e3:.2f} ms")
    for suffix in ("", "_bfloat16"):
        ours, numeric = rate.get("jaxrank" + suffix), suffix[1:] or "float32"
        limits = [
            rate[name]
            for name in LIMITS
            if name in rate and name != "copy" and name.endswith("bfloat16") == bool(suffix)
        ]
        if ours and limits and "copy" in rate:
            floor = BATCH / max(limits) + seconds
            print(
                f"  {numeric}: products at {flops / BATCH * max(limits) / 1e9:.0f} GFLOP/s at"
                f" best; floor {floor * 1e3:.1f} ms, jaxrank {BATCH / ours * 1e3:.1f} ms:"
                f" {floor * ours / BATCH:.1%} of it"
            )
        peers = {
            name: rate[name]
            for name in PEERS
            if name in rate
            and name.endswith("bfloat16") == bool(suffix)
            and not name.endswith("tables")
        }
        for name, theirs in sorted(peers.items(), key=lambda item: -item[1]):
            if not ours:
                continue
            ratios = [
                (a.examples / a.seconds) / (b.examples / b.seconds)
                for a, b in zip(rounds["jaxrank" + suffix], rounds[name], strict=True)
            ]
            print(
                f"  {numeric}: {ours / theirs:.2f} times {name}"
                f" ({min(ratios):.2f} to {max(ratios):.2f} by round)"
            )
    if "jaxrank_tables" in rate and "fbgemm_tables" in rate:
        each = [1e3 * BATCH / rate[name] for name in ("jaxrank_tables", "fbgemm_tables")]
        print(
            f"  tables: jaxrank {each[0]:.2f} ms, fbgemm {each[1]:.2f} ms: {each[0] / each[1]:.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[*data.SHAPES, data.MAIN_JOB], default="criteo")
    parser.add_argument(
        "--programs", nargs="+", choices=[*OURS, *LIMITS, *PEERS], default=[*OURS, *LIMITS, *PEERS]
    )
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--program", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        huge_pages.ensure()
        with tempfile.TemporaryDirectory() as folder:
            serve(
                make_program(args.program, args.shape, Path(folder)), warm=4 * data.BATCHES * BATCH
            )
        return
    if args.shape == data.MAIN_JOB and not set(args.programs) <= set(OURS):
        parser.error(f"--programs: must be of {' '.join(OURS)} for --shape={args.shape}")
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        started: dict[str, Program] = {}
        for name in args.programs:
            script, flag = ("cpu_peers.py", [name]) if name in PEERS else (
                "cpu.py", ["--program", name])  # fmt: skip
            program = Program([HERE / script, *flag, "--shape", args.shape], cores)
            if program.unavailable:
                print(f"{name}: {program.unavailable}", file=sys.stderr)
                continue
            started[name] = stack.enter_context(contextlib.closing(program))
        if not started:
            raise SystemExit("At least one program must be installed: found none.")
        rounds: dict[str, list[Round]] = {name: [] for name in started}
        for _ in range(args.rounds):
            for name, program in started.items():
                rounds[name].append(program.round(args.seconds))
        report(args.shape, rounds)


if __name__ == "__main__":
    main()
