"""Programs that make examples, measured in turn, so that all see the machine as it is."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.checkout import ROOT, environment

_MOST_READY = 100  # batches
_PAUSE = 0.3  # seconds in which threads of the program before spin on


class Round(NamedTuple):
    """What one round of a program came to.

    cpu_seconds: of the process and its workers.
    private, mapped: MiB that they hold, workers included: memory of their own and what they share
        with each other; and pages of files, which others may use and the system may take back.
    """

    examples: int
    seconds: float
    cpu_seconds: float
    private: int
    mapped: int


class Program:
    """Another process, held to some cores, that makes examples when it is told to.

    Args:
        command: of Python; it calls `serve`.
        cores: that it may use.
        checkout: whose packages it imports.
    """

    def __init__(self, command: Sequence[Any], cores: Sequence[int], checkout: Path = ROOT):
        self.told = ""  # what it says instead, if it cannot run
        self._process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(checkout) | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        line = self._line()
        if line != "ready":
            self.told = line
            self.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip() or "failed"

    def round(self, seconds: float) -> Round:
        assert self._process.stdin is not None
        time.sleep(_PAUSE)
        print(seconds, file=self._process.stdin, flush=True)
        line = self._line()
        if line == "failed":
            raise SystemExit(f"{self._process.args!r}: ended in a round")
        return Round(*json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(batches: Callable[[], Iterator[int]], warm: int) -> None:
    """The other end: makes batches for as long as it is asked to.

    Args:
        batches: an endless iterator that makes a batch and gives the number of its examples.
        warm: examples that are made before the first round.
    """
    # A run that is stopped ends its workers too, and leaves no semaphores for Python to warn of.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints goes elsewhere
    try:
        made, times = batches(), [time.perf_counter()]
        while warm > 0:
            warm -= next(made)
            times.append(time.perf_counter())
        # Of the later half: the first waits for compilers.
        half = (len(times) - 1) // 2
        typical = (times[-1] - times[half]) / max(1, len(times) - 1 - half)
    except ImportError as error:
        os.write(out, f"not installed: {error.name}\n".encode())
        return
    os.write(out, b"ready\n")
    for line in sys.stdin:
        _take_what_is_ready(made, typical)
        examples, began, cpu = 0, time.perf_counter(), _cpu_seconds()
        while time.perf_counter() - began < float(line):
            examples += next(made)
        seconds = time.perf_counter() - began
        found = Round(examples, seconds, _cpu_seconds() - cpu, *_memory())
        os.write(out, (json.dumps(found) + "\n").encode())


def _take_what_is_ready(made: Iterator[int], typical: float) -> None:
    """Batches that were made while nobody counted: until one takes half of what one takes on the
    whole, in seconds."""
    for _ in range(_MOST_READY):
        began = time.perf_counter()
        next(made)
        if time.perf_counter() - began > typical / 2:
            return


def _workers() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid]


def _cpu_seconds() -> float:
    stats = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in _workers()]
    ticks = sum(int(stat[11]) + int(stat[12]) for stat in stats)
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def _memory() -> tuple[int, int]:
    shares: dict[str, int] = {"Anon": 0, "Shmem": 0, "File": 0}
    for pid in (os.getpid(), *_workers()):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found = dict(line.split(":") for line in lines)
        for kind in shares:
            size = int(found[f"Rss{kind}"].split()[0]) // 1024
            # What is shared is counted once; the files too, of which all map the same.
            shares[kind] = shares[kind] + size if kind == "Anon" else max(shares[kind], size)
    return shares["Anon"] + shares["Shmem"], shares["File"]
