"""Coordination of the processes of a run.

All processes run the same program, each on its own devices and its share of the data. `rendezvous`
connects them. Only process 0 prepares data, writes files and reports. JAX is imported inside the
functions that use it, so that `--help` works without it.
"""

import contextlib
import gc
import hashlib
import json
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from jaxrank import json_files
from jaxrank.errors import InputError, RunError

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Seconds that JAX waits for the last process to end before it kills the others.
SHUTDOWN_SECONDS = 10
_FAREWELL = 3  # seconds that a failed process waits for the others to end, below the limit of JAX
_SHOWN = 200  # characters of a value that must be the same, in an error
_ROUND = 60  # seconds after which a busy process signals the waiting ones that it is alive


def place() -> tuple[int, int]:
    """Returns the index of this process and the number of processes."""
    import jax

    return jax.process_index(), jax.process_count()


def is_first() -> bool:
    """Returns True in process 0, which prepares, writes and reports for all."""
    return place()[0] == 0


def joined() -> bool:
    """Returns True if JAX has connected this process to others."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def name() -> str:
    """Returns the name of this process in messages: jaxrank, or jaxrank[2] if it joined others."""
    return f"jaxrank[{place()[0]}]" if joined() else "jaxrank"


def open_devices() -> None:
    """Opens the devices of this machine in JAX, if they are not open.

    Raises:
        InputError: JAX_PLATFORMS names a platform that is not installed.
        RunError: the devices cannot be opened, for example because another process uses them.
    """
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # AssertionError has no text
        named = os.environ.get("JAX_PLATFORMS", "")
        text = " ".join(str(error).split()).rstrip(".")
        if named and (not text or "list of known backends" in text):
            raise InputError(
                f"JAX_PLATFORMS: must name an installed platform of JAX: found {named!r}"
                f"{text and ': '}{text}."
            ) from error
        raise RunError(
            f"the devices of this machine cannot be opened (JAX_PLATFORMS={named!r}): {text}."
        ) from error


def check_shares() -> None:
    """Raises InputError unless all processes have the same number of devices.

    Exchanges nothing between processes, because an exchange requires equal numbers of devices.
    """
    import jax

    owners = [device.process_index for device in jax.devices()]
    counts = [owners.count(process) for process in range(place()[1])]
    if len(set(counts)) > 1:
        raise InputError(
            "all processes must have the same number of devices: found"
            f" {counts}, one number per process."
        )


def check_devices(mesh: "Mesh", count: int = 0) -> None:
    """Raises InputError unless the mesh takes equally many devices of each process, in order.

    A batch is the concatenation of the shares of the processes.

    Args:
        mesh: the mesh to check.
        count: number of processes. 0: the number of this run.
    """
    count = count or place()[1]
    owners = [device.process_index for device in mesh.devices.flat]
    share = len(owners) // count
    if owners != [process for process in range(count) for _ in range(share)]:
        raise InputError(
            f"mesh.devices: must take equally many devices of each process: found {len(owners)}"
            f" devices, which belong to processes {owners} of {count}. Set it to 0 to use all"
            " devices."
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Synchronises the processes at the end of a context, and raises in all if one failed.

    Use it around work that only process 0 does, or that each process does with files. Without it,
    an error there would leave the others waiting. The context itself must not exchange anything
    between processes.

    Raises:
        InputError, RunError: the error of this process, or the message of another one that failed.
    """
    if place()[1] == 1:
        yield
        return
    done = threading.Event()
    status_and_text: list[Any] = [0, ""]  # exit status and message of a failure in this process
    rounds = ThreadPoolExecutor(1).submit(_rounds, done, status_and_text)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
        status_and_text[:] = getattr(error, "exit_status", RunError.exit_status), str(error)
    done.set()
    statuses = rounds.result()
    failed = [i for i, (status, _) in enumerate(statuses) if status]
    if failed and failure is None:
        status, text = statuses[failed[0]]
        kind = InputError if status == InputError.exit_status else RunError
        failure = kind(f"process {failed[0]} ended: {text}")
    if failure is not None:
        raise failure


def _rounds(done: threading.Event, status: list[Any]) -> list[list[Any]]:
    """Returns the status and the message of every process when all are done.

    Until then, they exchange every minute that some are busy. A single exchange cannot last as long
    as preparing data, because Gloo times out after 30 minutes.
    """
    while True:
        working = not done.wait(_ROUND)
        statuses = [
            json.loads(text) for text in _gather(json_files.to_text(None if working else status))
        ]
        if None not in statuses:
            return statuses


def wait() -> None:
    """Waits until all processes have called it."""
    with together():
        pass


def broadcast_value(value: Any) -> Any:
    """Returns the value of process 0 in all processes, so that it cannot differ between them.

    Args:
        value: any JSON value. It is ignored in other processes.
    """
    return json.loads(_gather(json_files.to_text(value))[0]) if place()[1] > 1 else value


def gather_values(value: Any) -> list[Any]:
    """Returns the values of all processes, in the order of processes.

    Args:
        value: any JSON value.
    """
    text = json_files.to_text(value)
    return [json.loads(text) for text in (_gather(text) if place()[1] > 1 else [text])]


def check_same(name: str, value: str) -> None:
    """Raises InputError in all processes unless `value` is the same in all."""
    if place()[1] == 1:
        return
    digest = hashlib.sha256(value.encode()).hexdigest()
    digests = [text.split(" ", 1) for text in _gather(f"{digest} {value[:_SHOWN]}")]
    others = [i for i, (other_digest, _) in enumerate(digests) if other_digest != digests[0][0]]
    if others:
        shown = ""
        if len(value) <= _SHOWN:
            shown = f": {digests[others[0]][1]} and {digests[0][1]}"
        raise InputError(
            f"{name} must be the same in all processes: process {others[0]} differs from"
            f" process 0{shown}. Start all processes with the same version, config and files."
        )


def versions() -> str:
    """Returns the versions of the packages that determine the results of this process."""
    import jax
    import jaxlib
    import numpy as np

    import jaxrank

    named = (jaxrank, jax, jaxlib, np)
    return ", ".join(f"{module.__name__} {module.__version__}" for module in named)


def _gather(text: str) -> list[str]:
    """Returns the texts of all processes, in the order of processes."""
    import numpy as np
    from jax.experimental import multihost_utils

    sent = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(sent)))
    padded = np.zeros(
        1 << max(10, int(sizes.max() - 1).bit_length()), np.uint8
    )  # compiles few programs
    padded[: len(sent)] = sent
    gathered = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(gathered, sizes, strict=True)]


@contextlib.contextmanager
def peer_loss_as_run_error() -> Iterator[None]:
    """Converts Gloo's exception for a lost process to a RunError with a clear message."""
    try:
        yield
    except Exception as error:
        if not joined() or "Gloo" not in str(error):
            raise
        raise RunError(
            "another process has ended or cannot be reached. See its output for the cause:"
            f" {str(error).splitlines()[0]}"
        ) from error


def leave(status: int, *, at_once: bool) -> None:
    """Exits this process at once if it failed and had joined others, or if `at_once` is True.

    The regular exit waits for all processes. A process that failed alone must not wait, because the
    others wait for it and notice only its exit.
    """
    failed_alone = joined() and status != 0
    if not failed_alone and not at_once:
        return
    if failed_alone:
        import jax

        farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        farewell.start()
        farewell.join(_FAREWELL)
    with warnings.catch_warnings():  # about coroutines that Orbax leaves after a failed save
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()  # otherwise semaphores of ended workers are reported as leaked
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader of a pipe may have exited
            stream.flush()
    os._exit(status)
