"""Processor time of predictions of files by a bundle, over predictions of the same rows in a store.

    jaxrank prepare --config=new.py --output=/tmp/new --vocabularies=/tmp/criteo/data --unlabelled
    python -m benchmarks.serving.predict --workdir=/tmp/criteo --data=/tmp/new --split=new \\
        --bundle=/tmp/ads --input new.tsv new.parquet

The two take turns in one process. The time of a store includes restoring and compiling the model,
and the time of a bundle includes opening it and encoding the rows. Prints the median, its ratio to
that of the store, and the largest difference of a prediction.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from benchmarks.harness.arguments import positive, run_main
from jaxrank.evaluation import evaluate
from jaxrank.export.predict import predict_bundle


def predictions(path: Path) -> np.ndarray:
    """Returns f64[rows, tasks] of a file of predictions."""
    table = pq.read_table(path)
    names = [name for name in table.schema.names if name.startswith("predicted_")]
    return np.stack([table[name].to_numpy() for name in names], axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workdir", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", required=True)
    parser.add_argument("--bundle", required=True)
    parser.add_argument("--input", nargs="+", required=True)
    parser.add_argument("--rounds", type=positive, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "store.parquet"

        def of_store() -> None:
            evaluate.predict(args.workdir, data=args.data, split=args.split, output=str(stored))

        def of_bundle(path: str, output: Path) -> Callable[[], None]:
            def run() -> None:
                predict_bundle(args.bundle, inputs=path, output=str(output), report=lambda _: None)

            return run

        outputs = [Path(folder) / f"{i}.parquet" for i in range(len(args.input))]
        functions = [of_store, *map(of_bundle, args.input, outputs)]
        times = np.empty((args.rounds + 1, len(functions)))  # the first round is a warm-up
        for row in times:
            for i, function in enumerate(functions):
                start = time.process_time()
                function()
                row[i] = time.process_time() - start
        expected = predictions(stored)
        medians = 1e6 * np.median(times[1:], axis=0) / len(expected)
        print(f"store: {medians[0]:.1f} us per row, {len(expected):,} rows")
        for path, output, median in zip(args.input, outputs, medians[1:], strict=True):
            difference = np.abs(predictions(output) - expected).max()
            print(f"{path}: {median:.1f} us = {median / medians[0]:.2f} x store; {difference:.1g}")


if __name__ == "__main__":
    run_main(main)
