"""Checks the file system of the workdir: visibility, renames, locks, free space."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jaxrank.atomic import replacing
from jaxrank.data.lock import hold
from jaxrank.report import format_bytes
from jaxrank.runtime import processes
from jaxrank.selftest.check import FAIL, Verdict, passes
from jaxrank.workdir import lock

_CONTENT = 2**16  # bytes of the file that is replaced
_WRITTEN = 2**26  # bytes of the file that measures the rate of writing
_MIN_FREE_BYTES = 2**30  # bytes
_PATIENCE = 90.0  # seconds until a new file must be visible everywhere, above the cache of NFS
_RELEASED = 10.0  # seconds until the lock of a killed process must be free

# Tries to lock a file, prints the result, and keeps the lock until it is killed.
_HOLDER = """
import os, sys, time
from pathlib import Path
from jaxrank.data.lock import hold
path = Path(sys.argv[1])
print("free" if hold(path, lambda: os.open(path, os.O_WRONLY)) else "held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def visible(folder: Path) -> Verdict:
    """Fails unless a file that process 0 writes is visible to all at once, as the lock needs it."""
    path = folder / "token"
    token = f"{os.getpid()} on {socket.gethostname()}"
    if processes.is_first():
        path.write_text(token)
    token = processes.broadcast_value(token)
    started = time.monotonic()
    while (text := _read(path)) != token and time.monotonic() - started < _PATIENCE:
        time.sleep(0.1)
    waited = time.monotonic() - started
    count = processes.place()[1]
    processes.wait()
    if text != token:
        return Verdict(
            FAIL,
            f"{socket.gethostname()} does not see {folder} of process 0",
            "Pass --workdir=DIR on a file system that all hosts mount under the same path, such as"
            " NFS or Lustre.",
        )
    return passes(
        waited < 1.0,
        f"{folder.parent}: {_file_system(folder)}, seen by {count} processes after {waited:.1f} s",
        "Mount it with a shorter cache of attributes (NFS: actimeo=1 or noac).",
    )


def _read(path: Path) -> str:
    try:
        os.listdir(path.parent)  # lets NFS look at the directory again
        return path.read_text()
    except OSError:
        return ""


def _file_system(path: Path) -> str:
    """Returns the type of the file system of a path, such as nfs4."""
    best, kind = "", "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, name, *_ = line.split()
            inside = str(path).startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, name
    return kind


def rename(folder: Path, seconds: float) -> Verdict:
    """Fails if a reader sees a file absent or half written while process 0 replaces it."""
    path = folder / "replaced"
    with processes.together():
        if processes.is_first():
            path.write_bytes(bytes(_CONTENT))
    processes.wait()
    torn: list[str] = []
    ended = time.monotonic() + seconds
    reader = threading.Thread(target=_watch, args=(path, ended, torn))
    reader.start()
    written = 0
    if processes.is_first():
        while time.monotonic() < ended:
            written += 1
            with replacing(path) as partial:
                partial.write_bytes(bytes([written % 256]) * _CONTENT)
    reader.join()
    processes.wait()
    return passes(
        not torn,
        torn[0] if torn else f"whole in all {processes.broadcast_value(written):,} replacements",
        "Use a POSIX file system for the workdir. Checkpoints and configs are complete under their"
        " name only if a rename is atomic.",
    )


def _watch(path: Path, ended: float, torn: list[str]) -> None:
    reads = 0
    while time.monotonic() < ended and not torn:
        try:
            content = path.read_bytes()
        except OSError as error:
            # The file that was open has been replaced on another host.
            if error.errno != errno.ESTALE:
                torn.append(f"after {reads:,} reads the file cannot be read: {error}")
            continue
        reads += 1
        if len(content) != _CONTENT or len(set(content)) != 1:
            torn.append(
                f"after {reads:,} reads the file is torn: {len(content):,} of {_CONTENT:,} bytes,"
                f" {len(set(content))} different"
            )


def locks(folder: Path) -> Verdict:
    """Fails if a second process gets a lock, or a killed process keeps one."""
    with lock.locked(folder / "locked"):
        path = folder / "locked" / ".lock"
        with _holder(path, seconds=0.0) as (_, answer):
            states = processes.gather_values([answer, socket.gethostname()])
    others = [host for state, host in states if state != "held"]
    if others:
        return Verdict(
            FAIL,
            f"a second process on {others[0]} got the lock as well",
            "Mount the file system with locks over all hosts (NFSv4.1, or Lustre with -o flock)."
            " Two runs in one workdir would damage each other's checkpoints.",
        )
    released = 0.0
    with processes.together():
        if processes.is_first():
            released = _seconds_until_released(folder / "kept")
    released = processes.broadcast_value(released)
    return passes(
        released < _RELEASED,
        f"excludes {processes.place()[1]} other processes; that of a killed process is free after"
        f" {released:.1f} s",
        "Use NFSv4.1. With NFSv3 the lock of a lost host remains until WORKDIR/.lock is removed.",
    )


@contextlib.contextmanager
def _holder(path: Path, seconds: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts a process that tries to lock a file, and yields it with its answer."""
    command = [sys.executable, "-c", _HOLDER, str(path), str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def _seconds_until_released(path: Path) -> float:
    """Returns the seconds until the lock of a killed process is free, at most _RELEASED."""
    path.touch()
    with _holder(path, seconds=_RELEASED) as (process, _):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    started = time.monotonic()
    while time.monotonic() - started < _RELEASED:
        descriptor = hold(path, lambda: os.open(path, os.O_WRONLY))
        if descriptor is not None:
            os.close(descriptor)
            return time.monotonic() - started
        time.sleep(0.1)
    return _RELEASED


def space(folder: Path) -> Verdict:
    """Fails if little space is free, and measures the rate at which process 0 writes."""
    free = rate = 0.0
    with processes.together():
        if processes.is_first():
            info = os.statvfs(folder)
            free = float(info.f_bavail) * info.f_frsize
            rate = _write_rate(folder / "written") if free > 2 * _WRITTEN else 0.0
    free, rate = processes.broadcast_value([free, rate])
    return passes(
        free >= _MIN_FREE_BYTES,
        f"{format_bytes(free)} free, written at {format_bytes(rate)}/s",
        f"Free at least {format_bytes(_MIN_FREE_BYTES)}. A run keeps checkpoint.keep + 2"
        " checkpoints; `jaxrank compile` reports the bytes of a state.",
    )


def _write_rate(path: Path) -> float:
    block = os.urandom(2**20)
    started = time.monotonic()
    with path.open("wb") as file:
        for _ in range(_WRITTEN // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.monotonic() - started
    path.unlink()
    return _WRITTEN / seconds
