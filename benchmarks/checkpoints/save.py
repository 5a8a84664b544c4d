"""Measures the cost of saving a checkpoint: the pause of training, and the memory.

    python -m benchmarks.checkpoints.save --rows 32000000 --folder=/tmp

Trains a model with one table of `--rows` rows of 16 numbers (2 GiB at 32 million) while its
checkpoint is written. Prints the seconds for which `save` blocks training, the seconds until the
checkpoint is on disk, the speed of the steps in between, and the peak of additional memory.
"""

import argparse
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from benchmarks.harness.arguments import positive
from benchmarks.step.table_rows import build_program
from jaxrank.checkpoints.checksums import checksums
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.checkpoints.record import Metric
from jaxrank.step import prediction_weights


class Memory:
    """Measures the peak of this process's resident memory within the context, in MiB."""

    def __enter__(self) -> "Memory":
        self.before = self.most = self.now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def now(self) -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self.most = max(self.most, self.now())


def written(checkpoints: Checkpoints, done: threading.Event) -> None:
    try:
        checkpoints.wait()
    finally:
        done.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positive, default=32_000_000)
    parser.add_argument("--folder", default="", help="for the checkpoint (default: the system's)")
    parser.add_argument("--saves", type=positive, default=3)
    args = parser.parse_args()
    program, batch = build_program(args.rows, 8192, 1)
    state = program.init()

    def step() -> float:
        nonlocal state
        started = time.perf_counter()
        state, metrics = program.train(state, batch, np.int32(1))
        jax.block_until_ready(metrics)
        return time.perf_counter() - started

    for _ in range(3):
        step()
    alone = sorted(step() for _ in range(9))[4]
    checksums(prediction_weights(state))  # compiles it
    folder = Path(tempfile.mkdtemp(dir=args.folder or None))
    checkpoints = Checkpoints(folder, keep=1)
    size = sum(x.nbytes for x in jax.tree.leaves(state._replace(scratch={}))) / 2**20
    print(f"{size:,.0f} MiB of arrays; a step takes {1000 * alone:.0f} ms")
    pool = ThreadPoolExecutor(1)
    try:
        for number in range(args.saves):
            with Memory() as memory:
                started = time.perf_counter()
                checkpoints.save(number, state, {}, Metric(None, "", False))
                pause = time.perf_counter() - started
                done = threading.Event()
                waits = pool.submit(written, checkpoints, done)
                steps = []
                while not done.is_set():
                    steps.append(step())
                waits.result()
                whole = time.perf_counter() - started
            slower = sum(steps) / len(steps) / alone if steps else float("nan")
            print(
                f"save {number}: pause {pause:.2f} s, {100 * pause / whole:.1f}% of the"
                f" {whole:.1f} s until it was on disk; {len(steps)} steps in between, each"
                f" {slower:.2f} times as long as without a save; peak of additional memory"
                f" {memory.most - memory.before:,.0f} MiB",
                flush=True,
            )
    finally:
        checkpoints.close()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
