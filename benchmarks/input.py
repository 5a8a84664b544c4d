"""Examples a second from a prepared store to ready NumPy batches, on one core.

    taskset -c 0 python benchmarks/input.py

13 floats and 26 ids, with and without 8 ragged lists of mean length 8. The data is generated and
prepared first; each figure is the median of the rounds, after one that fills the page cache.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from jaxrank.data.pipeline import TrainBatches
from jaxrank.data.prepare import prepare
from jaxrank.data.store import open_store
from jaxrank.features import layout

IDS = (100_000,) * 13 + (1_000,) * 13


def prepared(path: Path, rows: int, lists: int):
    source = dict(
        kind="synthetic",
        rows=dict(train=rows),
        seed=1,
        floats=13,
        ids=IDS,
        lists=[dict(rows=50_000, mean_length=8)] * lists,
    )
    features = dict(
        tasks=[dict(name="click", label="click")],
        floats=[dict(columns="f*")],
        ids=[dict(columns=f"c{i}", encoding="integer", rows=n) for i, n in enumerate(IDS)],
        lists=[dict(columns=f"l{i}", encoding="integer", rows=50_000) for i in range(lists)],
    )
    prepare(features, source, path, report=lambda text: None)
    return open_store(path)


def examples_per_second(store, batch_size: int) -> float:
    split = store.split("train")
    steps = split.rows // batch_size
    batches = TrainBatches(
        split,
        layout(store.schema, {t.name: 16 for t in store.schema.tables}),
        batch_size=batch_size,
        steps_per_call=1,
        seed=0,
        shards=8,
        window_blocks=4,
        num_workers=0,
        prefetch_batches=2,
        list_slack=8.0,
        on_overflow="error",
        num_steps=steps,
    )
    start = time.perf_counter()
    for _ in batches:
        pass
    seconds = time.perf_counter() - start
    batches.close()
    return steps * batch_size / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for lists in (8, 0):
            store = prepared(Path(folder) / str(lists), args.rows, lists)
            found = [examples_per_second(store, args.batch_size) for _ in range(args.rounds + 1)]
            print(
                f"{lists} lists: {statistics.median(found[1:]):,.0f} examples/s, batch"
                f" {args.batch_size}, {args.rows:,} rows of"
                f" {store.split('train').bytes / args.rows:.0f} bytes"
            )


if __name__ == "__main__":
    main()
