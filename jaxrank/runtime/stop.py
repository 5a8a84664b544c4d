"""Handles requests to stop: SIGTERM, which preempted machines receive, and Ctrl-C."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrank import mesh as meshes
from jaxrank.signals import Caught

_APART_SECONDS = 1.0  # minimum time between two signals, see `signals.end_at_second`


class Asked(NamedTuple):
    """Requests that all processes of a run agree on.

    signal: number of a signal that a process received; 0 if none did.
    save: whether process 0 requests a checkpoint, because the last one is too old.
    """

    signal: int = 0
    save: bool = False


class ShutdownSignal:
    """Reports a signal that any process of a run has received.

    Signals are caught from the first call of `asked` to the end of the context. Another signal, a
    second or more after the first, ends the program immediately. It does so even while the program
    waits for a device and Python handles no signals. With several processes, all must call `asked`
    at the same steps. They see the signal together, one call after the process that received it,
    without waiting for each other.

        with ShutdownSignal(program.largest, program.mesh) as stop:
            while ...:
                state, metrics = program.train(state, batch)
                if stop.asked().signal:
                    break

    Args:
        largest: maps i32[devices], sharded over the devices of all processes, to the maximum i32[]
            on every device.
        mesh: the devices of all processes.
    """

    def __init__(self, largest: Callable[[Any], jax.Array], mesh: Mesh):
        self._largest, self._mesh = largest, mesh
        self._signals = Caught(_APART_SECONDS)
        self._pending: jax.Array | None = None

    def __enter__(self) -> "ShutdownSignal":
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()

    @property
    def caught(self) -> int:
        """The number of the signal that this process received, 0 if none."""
        return self._signals.number

    def asked(self, save: bool = False) -> Asked:
        """Returns the signal and the decision to save, the same in all processes.

        Args:
            save: True if a checkpoint is due by time. Only process 0 decides.
        """
        self._signals.listen()
        if jax.process_count() == 1:
            return Asked(self.caught, save)
        # One number for both. Of a signal and a save in different processes the signal is the
        # larger: it ends the run with a save.
        number = 2 * self.caught + (save and jax.process_index() == 0)
        numbers = np.full(len(self._mesh.local_devices), number, np.int32)
        before = self._pending
        self._pending = self._largest(meshes.put_batch(numbers, self._mesh))
        return Asked() if before is None else Asked(int(before) // 2, bool(int(before) % 2))
