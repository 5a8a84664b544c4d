"""The processes that run the checks on the devices. `supervise` starts them.

    python -m jaxrank.selftest.process ROLE FOLDER SIZE RESULTS

ROLE is one of ROLES, FOLDER the directory of the self-test, SIZE a `Size` as JSON. Each line of the
file RESULTS is a JSON object: {"place": [index, number]}, {"folder": path}, {"began": name of a
check} or {"check": a `Check`}.
"""

import functools
import json
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrank import json_files
from jaxrank import mesh as meshes
from jaxrank.config_files import overridden
from jaxrank.errors import InputError, RunError
from jaxrank.run import build_endless
from jaxrank.runtime import compilation_cache, processes, rendezvous, threads
from jaxrank.selftest import check as checks
from jaxrank.selftest import collectives, devices, file_system, hosts, input_rate, job, resume
from jaxrank.selftest.check import PASS, Check, Verdict
from jaxrank.selftest.job import Size

CHECKS, KILLED, RESUMED = ROLES = ("checks", "killed", "resumed")
_RENAME_SECONDS = 1.0

Emit = Callable[[dict[str, Any]], None]


def make_folder(workdir: str) -> Path:
    """Makes a new directory for all processes, in `workdir` or for temporary files.

    Raises:
        InputError: it cannot be made.
    """
    path = ""
    with processes.together():
        if processes.is_first():
            try:
                if workdir:
                    Path(workdir).mkdir(parents=True, exist_ok=True)
                path = tempfile.mkdtemp(prefix=".selftest-", dir=workdir or None)
            except OSError as error:
                must = "must be a directory that can be written"
                raise InputError(f"--workdir: {workdir} {must}: found {error}.") from error
    return Path(processes.broadcast_value(path))


def check_machines(folder: Path, size: Size, emit: Emit) -> bool:
    """Runs the checks that train nothing. Returns True if all processes share the directory."""
    run = functools.partial(_run, emit)
    run("processes", hosts.describe)
    run("versions", hosts.versions)
    run("native code", hosts.native_code)
    shared = run("shared directory", lambda: file_system.visible(folder), _ON_FILES)
    if shared.status == PASS:
        run("rename", lambda: file_system.rename(folder, _RENAME_SECONDS), _ON_FILES)
        run("lock", lambda: file_system.locks(folder), _ON_FILES)
    run("space", lambda: file_system.space(folder), _ON_FILES)

    mesh = meshes.make_mesh()
    length = size.exchange_bytes, size.seconds / 3
    run("exchange", lambda: collectives.exchange(mesh, *length), _ON_NETWORK)
    run("all-reduce", lambda: collectives.all_reduce(mesh, *length), _ON_NETWORK)
    return shared.status == PASS


def check_training(folder: Path, size: Size, emit: Emit) -> None:
    """Runs the checks that train, and the unbroken run that `resume` compares with."""
    emit({"began": "devices"})
    config = job.config(size, meshes.make_mesh().size, processes.place()[1])
    with build_endless(config, folder, lambda _: None) as built:
        _run(
            emit,
            "devices",
            lambda: devices.check(built, size.executions, each_device=size.each_device),
            _ON_DEVICES,
        )
        _run(emit, "input", lambda: input_rate.check(built, size.seconds))
    emit({"began": "resume"})
    resume.run_unbroken(_config(folder, size), folder)


def _run(emit: Emit, name: str, function: Callable[[], Verdict], advice: str = "") -> Check:
    """Runs one check, and records its beginning and its result."""
    emit({"began": name})
    done = checks.run(name, function, advice or "Report it as an issue with the whole message.")
    emit({"check": done._asdict()})
    return done


_ON_FILES = "Give --workdir a directory on a POSIX file system that every host may write."
_ON_NETWORK = "Open all ports between the hosts, and check that they resolve each other's names."
_ON_DEVICES = "Read the message. `jaxrank plan` and docs/placement.md explain the limits of a mesh."


def _config(folder: Path, size: Size) -> Any:
    config = job.config(size, meshes.make_mesh().size, processes.place()[1])
    return overridden(config, {"data.store": str(folder / devices.STORE)})


def main(role: str, folder: str, size_text: str, results: str) -> None:
    """Runs one role in this process."""
    threads.ensure_several()
    size = Size(**json.loads(size_text))
    with Path(results).open("a", encoding="utf-8") as file:

        def emit(line: dict[str, Any]) -> None:
            file.write(json_files.to_text(line, non_finite="null") + "\n")
            file.flush()

        emit({"began": "processes" if role == CHECKS else "resume"})
        rendezvous.join()
        processes.open_devices()
        processes.check_shares()
        compilation_cache.enable()
        emit({"place": list(processes.place())})
        if role == CHECKS:
            path = make_folder(folder)
            emit({"folder": str(path)})
            try:
                if check_machines(path, size, emit):
                    check_training(path, size, emit)
            except BaseException:
                if processes.is_first():
                    shutil.rmtree(path, ignore_errors=True)
                raise
        elif role == KILLED:
            resume.run_and_kill(_config(Path(folder), size), Path(folder))
        else:
            config = _config(Path(folder), size)
            done = checks.run("resume", lambda: resume.resume(config, Path(folder)), resume.ADVICE)
            emit({"check": done._asdict()})
        processes.wait()


def run(arguments: Sequence[str]) -> int:
    """Calls `main` and returns the exit status. The last line of the output is the error."""
    try:
        with processes.peer_loss_as_run_error():
            main(*arguments)
    except (InputError, RunError) as error:
        text, status = str(error), error.exit_status
    # With any other error too, this process ends at once. The regular exit would wait for the
    # others, until JAX aborts all of them.
    except Exception as error:
        traceback.print_exc()
        text, status = f"{type(error).__name__}: {' '.join(str(error).split())}", 1
    else:
        return 0
    sys.stderr.write(f"{processes.name()}: error: {text}\n")
    return status


if __name__ == "__main__":
    status = run(sys.argv[1:])
    processes.leave(status, at_once=bool(status))
