"""Runners of the units of a preparation: this process, local processes, or Apache Beam."""

import concurrent.futures
import multiprocessing
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.synchronize import Event
from typing import Any, Protocol

from jaxrank import signals
from jaxrank.data import guard
from jaxrank.data.prepare.settings import PrepareSettings
from jaxrank.data.prepare.units import WorkUnit
from jaxrank.errors import InputError, RunError

# Starting processes takes as long as preparing about this much.
_FEW_BYTES = 64 << 20


class Runner(Protocol):
    """Calls function(settings, unit, *arguments) for all units. Results are the files that it
    writes.
    """

    def run(
        self,
        function: Callable[..., None],
        settings: PrepareSettings,
        units: Sequence[WorkUnit],
        *arguments: Any,
    ) -> None:
        """Raises the error of the first unit that failed."""
        ...


class Local:
    """Processes of this machine.

    Args:
        workers: number of processes. 0: one per core. Small data is processed in this process.
    """

    def __init__(self, workers: int = 0):
        if workers < 0:
            raise InputError(f"--workers: must be 0 or more: found {workers}.")
        self._workers = workers or len(os.sched_getaffinity(0))

    def run(
        self,
        function: Callable[..., None],
        settings: PrepareSettings,
        units: Sequence[WorkUnit],
        *arguments: Any,
    ) -> None:
        workers = min(self._workers, len(units))
        if workers == 1 or sum(unit.bytes for unit in units) < _FEW_BYTES:
            for unit in units:
                function(settings, unit, *arguments)
            return
        guard.check("workers of prepare")
        # Not forked, because JAX may have started threads.
        context = multiprocessing.get_context("spawn")
        started = context.Event()
        with concurrent.futures.ProcessPoolExecutor(
            workers, context, _begin_work, (started,)
        ) as pool:
            try:
                with signals.held_back():
                    futures = [pool.submit(function, settings, unit, *arguments) for unit in units]
                for future in futures:
                    future.result()
            except BrokenProcessPool as error:
                why = (
                    "was killed, probably because memory ran out. Use fewer --workers."
                    if started.is_set()
                    else f"could not start, see its error above: {guard.REMEDY}."
                )
                raise RunError(f"one of {workers} worker processes of prepare {why}") from error
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def _begin_work(started: Event) -> None:
    """Initialises a worker: signals end it silently."""
    started.set()
    signals.release(ignore=False)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # otherwise it would wait for work forever


def make_runner(name: str, workers: int = 0, options: Sequence[str] = ()) -> Runner:
    """Returns the runner of that name: "local", or one of Apache Beam's, such as "DirectRunner".

    Args:
        workers: number of processes of the local runner.
        options: of Beam's pipeline, such as "--project=...".

    Raises:
        InputError: Beam is not installed, or the number of workers is invalid.
    """
    if name == "local":
        if options:
            raise InputError(f"--runner-option: must be of a Beam runner: found {list(options)}.")
        return Local(workers)
    from jaxrank.data.prepare.beam import Beam  # an optional dependency

    return Beam(name, options)
