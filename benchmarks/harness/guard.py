"""Compares the speed of the step in this checkout with that in another one.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.harness.guard --before=/tmp/before --shape criteo
    python -m benchmarks.harness.guard --before=/tmp/before --shape criteo --program=jaxrank_tables

Each checkout runs its own benchmark of the step (`SCRIPTS`), so that modules may move between the
two. Both train the same model in turn on the same batches in memory, and the order changes with
every round. Prints the ratio of this checkout's examples/s to the other's: the median of the rounds
and a bootstrap interval of 95%. A change is faster if the interval is above 1. It is not slower if
the median is at least 0.98 or the interval reaches above 1. Exit status 1 if it is slower.

The shape `quickstart` needs a checkout of 02ae7b0 or later as `--before`.
"""

import argparse
import contextlib
import functools
import os
import sys
from pathlib import Path

import numpy as np

from benchmarks.harness.arguments import at_least
from benchmarks.harness.checkout import ROOT
from benchmarks.harness.in_turn import Program
from benchmarks.step import cpu, data

NO_SLOWER = 0.98  # of the other checkout's rate
# Paths of the benchmark in checkouts, the newest first.
SCRIPTS = ("benchmarks/step/cpu.py", "benchmarks/cpu_step.py")


def interval(ratios: np.ndarray) -> tuple[float, float]:
    """Returns the 95% bootstrap interval of the median."""
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return float(low), float(high)


def benchmark_script(checkout: Path) -> Path:
    """Returns the benchmark of the step in a checkout.

    Raises:
        SystemExit: there is none, with status 2.
    """
    for script in SCRIPTS:
        if (checkout / script).is_file():
            return checkout / script
    print(f"--before: must be a checkout with {SCRIPTS[0]}: found {checkout}.", file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="another checkout")
    parser.add_argument("--shape", choices=[*data.SHAPES, data.MAIN_JOB], default="criteo")
    parser.add_argument("--program", choices=cpu.OURS, default="jaxrank")
    # The median of fewer rounds has no 95% interval.
    parser.add_argument("--rounds", type=functools.partial(at_least, 6), default=12)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each of the two in a round")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    flags = ["--program", args.program, "--shape", args.shape]
    checkouts = [args.before.resolve(), ROOT]
    commands = [[benchmark_script(checkout), *flags] for checkout in checkouts]
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(contextlib.closing(Program(command, cores, checkout)))
            for command, checkout in zip(commands, checkouts, strict=True)
        ]
        for program in both:
            if program.unavailable:
                raise SystemExit(program.unavailable)
        ratios = []
        for number in range(args.rounds):
            rates = [0.0, 0.0]
            for side in (0, 1) if number % 2 else (1, 0):
                result = both[side].round(args.seconds)
                rates[side] = result.examples / result.seconds
            ratios.append(rates[1] / rates[0])
            print(
                f"before {rates[0]:,.0f} examples/s, now {rates[1]:,.0f}: {ratios[-1]:.3f}",
                flush=True,
            )
    low, high = interval(np.array(ratios))
    median = float(np.median(ratios))
    print(f"now / before: {median:.3f} ({low:.3f} to {high:.3f})")
    raise SystemExit(int(median < NO_SLOWER and high < 1))


if __name__ == "__main__":
    main()
