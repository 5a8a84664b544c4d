"""Starts the processes of a self-test one after another, and collects their results.

This process opens no device, so that a device belongs to the process that runs the checks, and a
check that hangs ends at the time limit, which is that of one check. On several hosts each host runs
this program, and all wait for each other between two processes by files in the shared directory.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxrank import json_files, signals
from jaxrank.errors import InputError
from jaxrank.report import Report
from jaxrank.selftest.check import FAIL, NAMES, NOT_APPLICABLE, ON_FILES, Check
from jaxrank.selftest.job import Size

_LOOK = 0.1  # seconds between two looks at the results of a process
_TOGETHER = 120.0  # seconds that a host waits for the others, above the cache of NFS
_SHOWN = 600  # characters of the log of a process that failed


class Result(NamedTuple):
    """The result of a self-test.

    process: index of the process on this host.
    checks: in the order of NAMES.
    seconds: duration.
    """

    process: int
    checks: list[Check]
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [check.name for check in self.checks if check.status == FAIL]


class _Ended(NamedTuple):
    """A process that has ended.

    status: its exit status, None if it was stopped at the time limit.
    lines: of its results; see `process`.
    log: the end of its output.
    """

    status: int | None
    lines: list[dict[str, Any]]
    log: str

    def last(self, key: str) -> Any:
        """Returns the last value of a key among the lines, or None."""
        return next((line[key] for line in reversed(self.lines) if key in line), None)


def selftest(
    workdir: str,
    size: Size,
    *,
    coordinator: str = "",
    num_processes: int | None = None,
    process_id: int | None = None,
    report: Report,
) -> Result:
    """Runs all checks.

    Args:
        workdir: a new directory in it is used, and removed at the end. Empty: one for temporary
            files, which other hosts do not see.
        coordinator, num_processes, process_id: see `rendezvous.join`.
        report: gets lines to print. In processes other than 0 it is not called.

    Raises:
        InputError: the flags of the processes are invalid.
    """
    started = time.monotonic()
    environment = os.environ | _settings(coordinator, num_processes, process_id)
    checks: dict[str, Check] = {}
    with (
        tempfile.TemporaryDirectory(prefix="jaxrank-selftest-") as logs,
        contextlib.ExitStack() as stack,
    ):
        supervisor = _Supervisor(size, environment, Path(logs), report)
        stack.callback(supervisor.remove_folder)  # also after a signal
        first = supervisor.run("checks", workdir)
        index, count = first.last("place") or (process_id or 0, num_processes or 1)
        folder = first.last("folder")
        checks = _checks(first)
        if first.status == 2 and not checks:
            raise InputError(_error(first.log))
        if first.status != 0:
            name = first.last("began") or "processes"
            checks[name] = _broken(name, first, size)
        elif _passed(checks, "shared directory"):
            checks["resume"] = _resume(supervisor, Path(folder), index, count)
        if folder and count > 1:
            _meet(Path(folder), "end", index, count)  # before process 0 removes the directory
    return Result(index, _complete(checks), time.monotonic() - started)


def _settings(
    coordinator: str, num_processes: int | None, process_id: int | None
) -> dict[str, str]:
    """Returns the flags as environment variables, which `rendezvous.join` reads."""
    flags = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": num_processes,
        "JAX_PROCESS_ID": process_id,
    }
    return {name: str(value) for name, value in flags.items() if value not in ("", None)}


class _Supervisor:
    """Starts the processes of this host."""

    def __init__(self, size: Size, environment: dict[str, str], logs: Path, report: Report):
        self.size, self._environment = size, environment
        self._logs, self._report = logs, report
        self._started, self._name = 0, ""
        self._is_first, self._folder = False, ""

    def run(self, role: str, folder: str) -> _Ended:
        """Runs one process to its end, or until it has no result for the time limit."""
        self._started += 1
        results = self._logs / f"{self._started}.jsonl"
        results.touch()
        log = self._logs / f"{self._started}.log"
        size = json_files.to_text(self.size)
        command: list[str | os.PathLike[str]]
        command = [sys.executable, "-m", "jaxrank.selftest.process", role, folder, size, results]
        limit = time.monotonic() + self.size.limit_seconds
        with log.open("wb") as output, results.open(encoding="utf-8") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment,
            )
            lines: list[dict[str, Any]] = []
            with _killed_at_end(process):
                status = process.poll()
                while status is None and time.monotonic() < limit:
                    time.sleep(_LOOK)
                    status = process.poll()
                    new = self._read(file)
                    lines += new
                    limit = time.monotonic() + self.size.limit_seconds if new else limit
            lines += self._read(file)
        text = log.read_text(encoding="utf-8", errors="replace")
        return _Ended(status, lines, text)

    def _read(self, file: Any) -> list[dict[str, Any]]:
        """Reads new lines, and reports each check that process 0 begins or ends."""
        new = [json.loads(line) for line in file]
        for line in new:
            if "place" in line:
                self._is_first = line["place"][0] == 0
            self._folder = line.get("folder", self._folder)
            if not self._is_first:
                continue
            name = line.get("began", self._name)
            if name != self._name:
                self._name = name
                self._report(f"Checking: {name}")
            if "check" in line:
                self._report(f"  {line['check']['status']}: {line['check']['finding']}")
        return new

    def remove_folder(self) -> None:
        """Removes the directory of the self-test, in process 0."""
        if self._folder and self._is_first:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _killed_at_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills a process that still runs at the end of the block, also after a signal."""
    with signals.exit_at_sigterm():
        try:
            yield
        finally:
            process.kill()
            process.wait()


def _checks(ended: _Ended) -> dict[str, Check]:
    checks = [Check(**line["check"]) for line in ended.lines if "check" in line]
    return {check.name: check for check in checks}


def _passed(checks: dict[str, Check], name: str) -> bool:
    return name in checks and checks[name].status != FAIL


def _error(log: str) -> str:
    """Returns the last error in a log."""
    errors = [line for line in log.splitlines() if ": error: " in line]
    return errors[-1].partition(": error: ")[2] if errors else log[-_SHOWN:].strip()


def _broken(name: str, ended: _Ended, size: Size) -> Check:
    """Returns the failed check in which a process ended, or did not end."""
    if ended.status is None:
        advice = (
            "Check that the file system of the workdir answers on every host."
            if name in ON_FILES
            else "Check that all processes run, that nothing else uses the hosts, that all ports"
            " between them are open, and on GPUs what NCCL_DEBUG=INFO reports."
        )
        return Check(name, FAIL, f"no answer for {size.limit_seconds:.0f} s", advice)
    ending = f"signal {-ended.status}" if ended.status < 0 else f"status {ended.status}"
    advice = "Read the message. The other processes may print more."
    if ended.status == -signal.SIGKILL:
        advice += " If memory ran out, the log of the kernel (dmesg) names the process."
    return Check(name, FAIL, f"the process ended with {ending}: {_error(ended.log)}", advice)


def _resume(supervisor: _Supervisor, folder: Path, index: int, count: int) -> Check:
    """Kills and resumes a run, and returns the check that compares it."""
    kills = supervisor.size.kills
    for kill in range(kills):
        _meet(folder, f"kill-{kill}", index, count)
        ended = supervisor.run("killed", str(folder))
        expected = ended.status == -signal.SIGKILL if index == 0 else bool(ended.status)
        if not expected:
            return _broken("resume", ended, supervisor.size)
    _meet(folder, "resume", index, count)
    ended = supervisor.run("resumed", str(folder))
    check = _checks(ended).get("resume")
    return check or _broken("resume", ended, supervisor.size)


def _meet(folder: Path, name: str, index: int, count: int) -> None:
    """Waits until all hosts have come here, or for a limited time."""
    if count == 1:
        return
    with contextlib.suppress(OSError):
        (folder / f"{name}.{index}").touch()
        ended = time.monotonic() + _TOGETHER
        while time.monotonic() < ended:
            present = set(os.listdir(folder))
            if all(f"{name}.{i}" in present for i in range(count)):
                return
            time.sleep(_LOOK)


def _complete(checks: dict[str, Check]) -> list[Check]:
    """Returns all checks. Those that were not run are not applicable."""
    failed = next((name for name in NAMES if name in checks and checks[name].status == FAIL), "")
    why = f"not run, because `{failed}` failed" if failed else "not run"
    return [checks.get(name) or Check(name, NOT_APPLICABLE, why) for name in NAMES]
