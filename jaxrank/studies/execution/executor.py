"""Executes the runs of a study in worker processes, and reuses those that have finished."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxrank import json_files
from jaxrank.data.lock import lock_directory
from jaxrank.errors import InputError, RunError, StoppedError
from jaxrank.report import Report
from jaxrank.signals import Caught
from jaxrank.studies.execution.directories import Directories
from jaxrank.studies.execution.worker import LOG, RESULT
from jaxrank.studies.study import RunResult, RunSpec

WORKER = (sys.executable, "-m", "jaxrank.studies.execution.worker")

_POLL = 0.1  # seconds between checks for a signal
_APART_SECONDS = 1.0  # minimum time between two signals, see `signals.end_at_second`
_TAIL = 1500  # characters of the log of a run that crashed


class _Worker:
    """A worker process. It leads its own process group, so that Ctrl-C does not reach it."""

    def __init__(self, command: Sequence[str], devices: int):
        self.devices = devices
        env = {**os.environ, **({"JAX_NUM_CPU_DEVICES": str(devices)} if devices else {})}
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def execute(self, path: Path) -> bool:
        """Executes the run in a directory. Returns False if the process has ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{path}\n")
            self._process.stdin.flush()
        return bool(self._process.stdout.readline())

    def close(self) -> int:
        """Ends the process and its children, and returns its status."""
        status = self._process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe and pipe.close()
        return self._process.returncode if status is None else status


class Executor:
    """Executes runs with up to `jobs` workers. Make it by `opened`."""

    def __init__(
        self, directories: Directories, *, jobs: int, report: Report, worker: Sequence[str]
    ):
        self._directories, self._jobs = directories, jobs
        self._report, self._command = report, worker
        self._workers: list[_Worker] = []  # all of them
        self._idle: list[_Worker] = []
        self._specs: dict[str, RunSpec] = {}
        self._results: dict[str, RunResult] = {}  # of batches that have finished
        self._is_closed = False

    def run(self, specs: Sequence[RunSpec]) -> list[RunResult]:
        """Executes runs and returns their results in the same order. Failed runs are recorded.

        Raises:
            InputError: the directory of a run has the result of another one, or the data of the
                runs cannot be prepared.
            StoppedError: a signal arrived. The same command continues.
        """
        by_name: dict[str, RunSpec] = {}
        for spec in specs:
            if self._specs.setdefault(spec.name, spec) != spec:
                raise ValueError(f"runs of different specs must have different names: {spec.name}")
            by_name[spec.name] = spec
        finished = {name: self._directories.result(spec) for name, spec in by_name.items()}
        results = {name: result for name, result in finished.items() if result is not None}
        new = [spec for name, spec in by_name.items() if name not in results]
        if len(results) > 1:
            self._report(f"{sum(r.is_done for r in results.values())} finished runs are reused")
        if any(map(self._directories.reads_shared_data, new)):
            (prepared,) = self.run([self._directories.preparation()])
            if not prepared.is_done:
                raise InputError(prepared.error)
        for spec in new:
            self._directories.begin(spec)
        if new:
            results |= self._execute(new)
        self._results |= results
        return [results[spec.name] for spec in specs]

    def finished(self, specs: Sequence[RunSpec]) -> list[RunResult]:
        """Returns the results of runs in the same order, without executing any.

        A run that has not finished has failed, by its result.
        """
        return [
            self._results.get(spec.name)
            or self._directories.result(spec)
            or RunResult(spec, "failed", error="not executed, because the study has stopped.")
            for spec in specs
        ]

    def close(self) -> None:
        """Ends all workers."""
        self._is_closed = True
        for worker in self._workers:
            worker.close()

    def _execute(self, specs: Sequence[RunSpec]) -> dict[str, RunResult]:
        waiting: queue.SimpleQueue[RunSpec] = queue.SimpleQueue()
        done: queue.SimpleQueue[RunResult | Exception] = queue.SimpleQueue()
        for spec in specs:
            waiting.put(spec)

        def work() -> None:
            try:
                while True:
                    done.put(self._executed(waiting.get_nowait()))
            except queue.Empty:
                pass
            except Exception as error:  # raised in the main thread
                done.put(error)

        results: dict[str, RunResult] = {}
        started, caught = time.monotonic(), Caught(_APART_SECONDS)
        caught.listen()
        try:
            for _ in range(min(self._jobs, len(specs))):
                threading.Thread(target=work, daemon=True).start()
            for number in range(1, len(specs) + 1):
                result = _wait_result(done, caught)
                results[result.spec.name] = result
                left = (time.monotonic() - started) / number * (len(specs) - number)
                self._report(_progress(result, number, len(specs), left))
        finally:
            caught.close()
        return results

    def _executed(self, spec: RunSpec) -> RunResult:
        """Executes a run in a worker process."""
        path, worker = self._directories.path(spec), self._take(spec.devices)
        started = time.monotonic()
        if worker.execute(path):
            self._idle.append(worker)
        elif self._is_closed:  # the study has been stopped, and nobody waits for the run
            raise RunError(
                f"{spec.name}: interrupted, because the study has stopped. The same command"
                " executes the run again."
            )
        else:
            json_files.write(
                path / RESULT, _crash(path, worker.close(), time.monotonic() - started)
            )
        return self._directories.read(spec)

    def _take(self, devices: int) -> _Worker:
        """Returns an idle worker with this number of devices, or starts one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.devices == devices:
                return worker
            worker.close()
        worker = _Worker(self._command, devices)
        self._workers.append(worker)
        return worker


@contextlib.contextmanager
def opened(
    directories: Directories,
    workdir: Path,
    *,
    jobs: int,
    report: Report,
    worker: Sequence[str] = WORKER,
) -> Iterator[Executor]:
    """Locks the workdir of a study and yields its executor. Ends all workers at the end.

    Args:
        worker: command that starts a worker process; see `worker`.

    Raises:
        InputError: `jobs` is below 1, or the workdir is not writable.
        RunError: another study runs in the workdir.
    """
    if jobs < 1:
        raise InputError(f"--jobs: must be at least 1: found {jobs}.")
    try:
        lock = lock_directory(workdir / "runs")
    except OSError as error:
        raise InputError(f"--workdir: {workdir} must be writable: found {error}.") from error
    if lock is None:
        raise RunError(f"{workdir}: another study runs in this workdir. Wait for it.")
    executor = Executor(directories, jobs=jobs, report=report, worker=worker)
    try:
        yield executor
    finally:
        executor.close()
        os.close(lock)


def _wait_result(done: "queue.SimpleQueue[RunResult | Exception]", caught: Caught) -> RunResult:
    """Waits for the next result, or raises when a signal arrives."""
    while True:
        if caught.number:
            raise StoppedError(
                f"stopped by {signal.Signals(caught.number).name}; the same command reuses the runs"
                " that have finished.",
                caught.number,
            )
        with contextlib.suppress(queue.Empty):
            result = done.get(timeout=_POLL)
            if isinstance(result, Exception):
                raise result
            return result


def _crash(path: Path, status: int, seconds: float) -> dict[str, object]:
    """Returns the record of a run whose process ended."""
    log = path / LOG
    tail = log.read_text(errors="replace")[-_TAIL:].strip() if log.exists() else ""
    error = f"its process ended with status {status}{':' if tail else '.'}\n{tail}".strip()
    return {"status": "failed", "seconds": seconds, "error": error}


def _progress(result: RunResult, number: int, count: int, left: float) -> str:
    """Returns the line of a finished run, such as "seed-3: 12.1 s (4 of 20 of this round)"."""
    text = f"{result.spec.name}: {result.seconds:.1f} s"
    if not result.is_done:
        text = f"{result.spec.name}: failed: {result.error.splitlines()[0]}"
    elif result.metrics:
        name, value = next(iter(result.metrics.items()))
        text += f", {name} {value:.5f}"
    after = f", about {left:.0f} s left" if left < 120 else f", about {left / 60:.0f} min left"
    return f"{text} ({number} of {count} of this round{after if number < count else ''})"
