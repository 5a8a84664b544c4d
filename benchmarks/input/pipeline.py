"""Measures examples/s from prepared data to NumPy batches, for jaxrank and other loaders.

    python -m benchmarks.input.pipeline

There are three shapes, all shuffled and with 13 floats. `lists` has 26 ids and 8 ragged lists of
mean length 8. `criteo` has 26 ids. `mlperf` has 214 ids in 26 columns, as in MLPerf's DCN-V2. Data
is generated and prepared first, and read from the page cache. --data keeps it for the next call.

Each row of the table is a process that is pinned to one core or to the stated number of cores. All
produce batches in turn, for --seconds in each of --rounds. Results are medians of the rounds.

- per core: examples per second of CPU time, including workers. It estimates the speed of an
  otherwise idle core.
- ours: the first row's value of `per core` divided by that of the row, round by round.
- MiB: private memory, including memory shared with workers, and file pages.

The rows of benchmarks/input/peers.py are other loaders. Loaders that are not installed are marked.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.arguments import positive, run_main
from benchmarks.harness.in_turn import Program, Round, serve
from benchmarks.input.data import SHAPES, prepared
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.layout import layout

PEERS = ("grain", "torch", "torch_batches", "tf_tfrecord", "tf_slices", "tf_gather")
SETTINGS = dict(steps_per_execution=1, window_blocks=4, num_workers=0, prefetch_batches=2)


class Row(NamedTuple):
    """A row of the table: its name, its settings or its peer, and its number of cores."""

    name: str
    settings: dict[str, int] | str
    cores: int = 1


OURS = (
    Row("jaxrank", {}),
    Row("  window of 1 block", dict(window_blocks=1)),
    Row("  window of 16 blocks", dict(window_blocks=16)),
    Row("  8 steps per execution", dict(steps_per_execution=8, prefetch_batches=16)),
    Row("  no threads", dict(prefetch_batches=0)),
    Row("  2 threads, 2 cores", dict(prefetch_batches=2), 2),
    Row("  1 worker, 2 cores", dict(num_workers=1, prefetch_batches=8), 2),
    Row("  2 workers, 2 cores", dict(num_workers=2, prefetch_batches=8), 2),
    Row("  4 workers, 4 cores", dict(num_workers=4, prefetch_batches=8), 4),
    Row("  8 workers, 8 cores", dict(num_workers=8, prefetch_batches=8), 8),
)


def batches(path: Path, batch_size: int, settings: dict[str, int]) -> Iterator[int]:
    store = open_store(path)
    options: dict[str, Any] = SETTINGS | settings
    loader = TrainBatches(
        store.split("train"),
        layout(store.schema, {t.name: 16 for t in store.schema.tables}),
        batch_size=batch_size,
        seed=0,
        shards=8,
        list_slack=8.0,
        on_overflow="truncate",
        order="shuffled",
        num_steps=options["steps_per_execution"] * 10**9,
        **options,
    )
    return (batch_size * options["steps_per_execution"] for _ in loader)


def measure(args: argparse.Namespace, shape: str, store: Path) -> None:
    """Measures one shape and prints its rows."""
    cores = sorted(os.sched_getaffinity(0))
    rows = [row for row in OURS if row.cores <= len(cores)]
    rows += [Row(name, name) for name in ([] if args.without_peers else PEERS)]
    programs = [_start(row, args, store, cores[: row.cores]) for row in rows]
    if programs[0].unavailable:
        raise SystemExit(f"{rows[0].name}, the reference of all others: {programs[0].unavailable}")
    results: list[list[Round]] = [[] for _ in rows]
    for _ in range(args.rounds):
        for program, rounds in zip(programs, results, strict=True):
            if not program.unavailable:
                rounds.append(program.round(args.seconds))
    ids = SHAPES[shape].ids
    print(f"\n{shape}: {ids} ids per example, batches of {args.batch_size}")
    print(f"{'':22}{'examples/s':>13}{'ids/s':>15}{'per core':>13}{'ours':>8}{'MiB':>13}")
    for row, program, rounds in zip(rows, programs, results, strict=True):
        if program.unavailable:
            print(f"{row.name:22}{program.unavailable:>13}")
            continue
        program.close()
        _print(row.name, rounds, results[0], ids)


def _start(row: Row, args: argparse.Namespace, store: Path, cores: list[int]) -> Program:
    script = Path(__file__)
    if isinstance(row.settings, str):
        command: list[Any] = [script.with_name("peers.py"), row.settings, store]
    else:
        command = [script, "--serve", store]
        command += [f"{name}={value}" for name, value in row.settings.items()]
    return Program([*command, "--batch-size", args.batch_size], cores)


def _print(name: str, rounds: list[Round], ours: list[Round], ids: int) -> None:
    rate = statistics.median(r.examples / r.seconds for r in rounds)
    cpu = statistics.median(r.examples / r.cpu_seconds for r in rounds)
    ratio = statistics.median(
        (o.examples / o.cpu_seconds) / (r.examples / r.cpu_seconds)
        for o, r in zip(ours, rounds, strict=True)
    )
    private, mapped = max(r.private for r in rounds), max(r.mapped for r in rounds)
    print(
        f"{name:22}{rate:13,.0f}{ids * rate:15,.0f}{cpu:13,.0f}{ratio:8.2f}{private:7} +{mapped:4}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--million-rows", type=float, default=1.0)
    parser.add_argument("--batch-size", type=positive, default=8192)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="per row and round")
    parser.add_argument("--data", default="", help="folder in which prepared data is kept")
    parser.add_argument("--without-peers", action="store_true")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("settings", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        settings = {name: int(value) for name, value in (s.split("=") for s in args.settings)}
        path = Path(args.serve)
        rows = open_store(path).split("train").rows
        serve(lambda: batches(path, args.batch_size, settings), rows)
        return
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            store = prepared(Path(args.data or folder), shape, args.million_rows)
            if (rows := store.split("train").rows) < args.batch_size:
                raise InputError(
                    f"--million-rows: must give a batch of {args.batch_size}: found {rows:,} rows."
                )
            measure(args, shape, Path(str(store.path)))


if __name__ == "__main__":
    run_main(main)
