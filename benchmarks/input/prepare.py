"""Measures rows/s of preparing a store from Criteo text, both passes, on one core and on all.

    python -m benchmarks.input.prepare ../shared/data/criteo_sample/train.tsv.gz

First repeats the sample to --rows rows in a temporary directory. `cpu` is rows per second of CPU
time, including workers. It estimates the speed of an otherwise idle core.
"""

import argparse
import gzip
import os
import resource
import tempfile
import time
from pathlib import Path

from benchmarks.harness.arguments import positive
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.prepare.runners import Local

FEATURES = dict(
    tasks=[dict(name="click", label="label")],
    dense=[dict(columns="I*", log=True, standardize=True, missing_indicator=True)],
    categorical=[dict(columns="C*", min_count=4)],
)


def processor_seconds() -> float:
    """Returns the CPU time of this process and of the child processes that it has waited for."""
    used = [resource.getrusage(usage) for usage in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sample", help="Criteo's format, gzip")
    parser.add_argument("--rows", type=positive, default=1_000_000)
    parser.add_argument("--rounds", type=positive, default=3)
    args = parser.parse_args()
    with gzip.open(args.sample) as file:
        text = file.read()
    copies = max(1, args.rows // text.count(b"\n"))
    rows = copies * text.count(b"\n")
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.tsv"
        raw.write_bytes(text * copies)
        source = dict(kind="criteo", files=dict(train=str(raw)))
        for workers in (1, len(os.sched_getaffinity(0))):
            for i in range(args.rounds):
                started, used = time.perf_counter(), processor_seconds()
                output = Path(folder) / f"{workers}-{i}"
                prepare(FEATURES, source, output, runner=Local(workers), report=lambda _: None)
                seconds, spent = time.perf_counter() - started, processor_seconds() - used
                print(f"{workers} workers: {rows / seconds:,.0f} rows/s, cpu {rows / spent:,.0f}")


if __name__ == "__main__":
    main()
