"""Measures programs that produce examples in turn, so that all run under the same conditions."""

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

_MAX_READY_BATCHES = 100  # batches
_PAUSE = 0.3  # seconds until the threads of the previous program stop spinning


class Round(NamedTuple):
    """Result of one round of a program.

    cpu_seconds: of the process and its workers.
    private: MiB of the process and its workers, including memory that they share.
    mapped: MiB of file pages, which other processes may share and the system may reclaim.
    """

    examples: int
    seconds: float
    cpu_seconds: float
    private: int
    mapped: int


class Program:
    """A process on given cores that produces examples on request.

    Args:
        command: arguments of Python. The program must call `serve`.
        cores: that the process may use.
        checkout: whose packages it imports.
    """

    def __init__(self, command: Sequence[Any], cores: Sequence[int], checkout: Path = ROOT):
        self.unavailable = ""  # reason why the program cannot run, "" if it can
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
            self.unavailable = line
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
    """Produces batches for the requested time, in the process that `Program` starts.

    Args:
        batches: an endless iterator that produces batches and yields their numbers of examples.
        warm: number of examples to produce before the first round.
    """
    # An exception ends the workers too, so that Python does not warn about leaked semaphores.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out = os.dup(1)
    os.dup2(2, 1)  # output of libraries goes to standard error
    try:
        running, times = batches(), [time.perf_counter()]
        while warm > 0:
            warm -= next(running)
            times.append(time.perf_counter())
        # Measured over the second half, because the first one includes compilation.
        half = (len(times) - 1) // 2
        typical = (times[-1] - times[half]) / max(1, len(times) - 1 - half)
    except ImportError as error:
        os.write(out, f"not installed: {error.name}\n".encode())
        return
    os.write(out, b"ready\n")
    for line in sys.stdin:
        _take_what_is_ready(running, typical)
        examples, started, cpu = 0, time.perf_counter(), _cpu_seconds()
        while time.perf_counter() - started < float(line):
            examples += next(running)
        seconds = time.perf_counter() - started
        result = Round(examples, seconds, _cpu_seconds() - cpu, *_memory())
        os.write(out, (json.dumps(result) + "\n").encode())


def _take_what_is_ready(steps: Iterator[int], typical: float) -> None:
    """Drops batches that were prefetched before the round.

    Stops when a batch takes more than half of the typical time, in seconds.
    """
    for _ in range(_MAX_READY_BATCHES):
        started = time.perf_counter()
        next(steps)
        if time.perf_counter() - started > typical / 2:
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
        sizes = dict(line.split(":") for line in lines)
        for kind in shares:
            size = int(sizes[f"Rss{kind}"].split()[0]) // 1024
            # Shared memory and mapped files are counted once, because all map the same.
            shares[kind] = shares[kind] + size if kind == "Anon" else max(shares[kind], size)
    return shares["Anon"] + shares["Shmem"], shares["File"]
