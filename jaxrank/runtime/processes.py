"""What the processes of a run do together, and what the first does for all.

All run the same program, each on its own devices and its own share of the data; `rendezvous` brings
them together. Process 0 alone prepares data, writes and reports. JAX is imported only where it is
needed, so that the command line can ask for help without it.
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

# For so long JAX waits for the last process to end, and then ends the others by force.
SHUTDOWN_SECONDS = 10
_FAREWELL = 3  # seconds that a process which failed waits for the others to end too; fewer
_SHOWN = 200  # characters of what should be the same
_ROUND = 60  # seconds after which a process that is at work tells the waiting ones that it is


def place() -> tuple[int, int]:
    """(index of this process, number of processes)."""
    import jax

    return jax.process_index(), jax.process_count()


def is_first() -> bool:
    """Whether this is process 0, which prepares, writes and reports for all."""
    return place()[0] == 0


def joined() -> bool:
    """Whether this process is one that JAX brought together with others."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def name() -> str:
    """What to call this process in messages: jaxrank, or jaxrank[2] if it joined others."""
    return f"jaxrank[{place()[0]}]" if joined() else "jaxrank"


def open_devices() -> None:
    """Has JAX open the devices of this machine, if it has not.

    Raises:
        InputError: JAX_PLATFORMS names a platform that is not installed.
        RunError: it cannot be opened, as where another process has it.
    """
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the former without a word
        named = os.environ.get("JAX_PLATFORMS", "")
        text = " ".join(str(error).split()).rstrip(".")
        if named and (not text or "list of known backends" in text):
            raise InputError(
                f"JAX_PLATFORMS: must name a platform that JAX is installed for: found {named!r}"
                f"{text and ': '}{text}."
            ) from error
        raise RunError(
            f"the devices of this machine cannot be opened (JAX_PLATFORMS={named!r}): {text}."
        ) from error


def check_shares() -> None:
    """Raises InputError unless all processes have equally many devices.

    It needs no exchange between them, for none can be made otherwise.
    """
    import jax

    owners = [device.process_index for device in jax.devices()]
    counts = [owners.count(process) for process in range(place()[1])]
    if len(set(counts)) > 1:
        raise InputError(
            f"all processes must have equally many devices: found {counts}, process by process."
        )


def check_devices(mesh: "Mesh", count: int = 0) -> None:
    """Raises InputError unless the devices of the mesh are equal shares of the processes, in order.

    A batch is made of the shares of the processes, one after another.

    Args:
        count: of processes; 0: of those that are here.
    """
    count = count or place()[1]
    owners = [device.process_index for device in mesh.devices.flat]
    share = len(owners) // count
    if owners != [process for process in range(count) for _ in range(share)]:
        raise InputError(
            f"mesh.devices must be an equal share of each process's devices: found {len(owners)}"
            f" devices, which belong to the processes {owners}, of {count}. 0 takes all devices."
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """All processes leave the context together, and with an error if one of them failed in it.

    It goes around what process 0 does alone, or each does with files; an error there would leave
    the others waiting. The context itself must hold no exchange between processes.

    Raises:
        InputError, RunError: what failed here, or that another process failed, and why.
    """
    if place()[1] == 1:
        yield
        return
    done = threading.Event()
    mine: list[Any] = [0, ""]  # status and message of what failed here
    rounds = ThreadPoolExecutor(1).submit(_rounds, done, mine)
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
        mine[:] = getattr(error, "exit_status", RunError.exit_status), str(error)
    done.set()
    told = rounds.result()
    failed = [i for i, (status, _) in enumerate(told) if status]
    if failed and failure is None:
        status, text = told[failed[0]]
        kind = InputError if status == InputError.exit_status else RunError
        failure = kind(f"process {failed[0]} ended: {text}")
    if failure is not None:
        raise failure


def _rounds(done: threading.Event, mine: list[Any]) -> list[list[Any]]:
    """What all processes have to tell when all are done.

    They exchange that some are still at work, for no exchange may take as long as preparing data
    does: Gloo gives up after 30 minutes.
    """
    while True:
        working = not done.wait(_ROUND)
        told = [json.loads(text) for text in _gather(json_files.to_text(None if working else mine))]
        if None not in told:
            return told


def wait() -> None:
    """Returns when all processes have come here."""
    with together():
        pass


def from_first(value: Any) -> Any:
    """The value that process 0 has, in all: for what must not differ, by a bit or a moment.

    Args:
        value: anything that JSON holds; of no matter in other processes.
    """
    return json.loads(_gather(json_files.to_text(value))[0]) if place()[1] > 1 else value


def check_same(what: str, value: str) -> None:
    """Raises InputError in all processes unless `value` is the same in all."""
    if place()[1] == 1:
        return
    digest = hashlib.sha256(value.encode()).hexdigest()
    told = [text.split(" ", 1) for text in _gather(f"{digest} {value[:_SHOWN]}")]
    others = [i for i, (found, _) in enumerate(told) if found != told[0][0]]
    if others:
        shown = ""
        if len(value) <= _SHOWN:
            shown = f": {told[others[0]][1]} and {told[0][1]}"
        raise InputError(
            f"{what} must be the same in all processes: process {others[0]} has others than"
            f" process 0{shown}."
        )


def versions() -> str:
    """Of what decides the numbers that come out of this process."""
    import jax
    import jaxlib
    import numpy as np

    import jaxrank

    named = (jaxrank, jax, jaxlib, np)
    return ", ".join(f"{module.__name__} {module.__version__}" for module in named)


def _gather(text: str) -> list[str]:
    """The texts of all processes, in their order."""
    import numpy as np
    from jax.experimental import multihost_utils

    sent = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(sent)))
    padded = np.zeros(1 << max(10, int(sizes.max() - 1).bit_length()), np.uint8)  # few programs
    padded[: len(sent)] = sent
    found = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(found, sizes, strict=True)]


@contextlib.contextmanager
def lost_told_as_run_error() -> Iterator[None]:
    """Turns what Gloo says when another process has gone into an error in plain words."""
    try:
        yield
    except Exception as error:
        if not joined() or "Gloo" not in str(error):
            raise
        raise RunError(
            "another process has ended or cannot be reached; it tells why, if it could:"
            f" {str(error).splitlines()[0]}"
        ) from error


def leave(status: int, *, at_once: bool) -> None:
    """Ends this process if it failed and had joined others; else only if it is to end at once.

    The orderly end waits for all processes. One that failed alone must not: the others wait for it
    too, and see that it has gone only when it has.
    """
    failed_alone = joined() and status != 0
    if not failed_alone and not at_once:
        return
    if failed_alone:
        import jax

        farewell = threading.Thread(target=jax.distributed.shutdown, daemon=True)
        farewell.start()
        farewell.join(_FAREWELL)
    with warnings.catch_warnings():  # of coroutines that Orbax left where a save failed
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()  # else semaphores of workers that have ended are called leaked
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # who read it may have gone
            stream.flush()
    os._exit(status)
