"""Being asked to end: by SIGTERM, as machines that are taken away are told, or by Ctrl-C."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrank import mesh as meshes

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Whether any process of a run was asked to end, by which signal.

    From the first call of `asked` to the end of the context signals are caught; the second one ends
    the program at once, also where it waits for a device and Python handles no signal. Of several
    processes all must call `asked`, at the same steps: they learn of a signal together, one call
    later than the one that got it, and wait for nothing.

        with Stop(program.largest, program.mesh) as stop:
            while ...:
                state, told = program.train(state, batch)
                if stop.asked():
                    break

    Args:
        largest: numbers i32[devices], split over the devices of all processes -> the largest, i32[]
            on every device.
        mesh: those devices.
    """

    def __init__(self, largest: Callable[[Any], jax.Array], mesh: Mesh):
        self._largest, self._mesh = largest, mesh
        self._number = 0
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._writer: socket.socket | None = None
        self._pending: jax.Array | None = None

    def __enter__(self) -> "Stop":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._writer.close()
            self._writer = None

    def asked(self) -> int:
        """The number of the signal; 0 if there was none. The same in all processes."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._writer is None:
            self._listen()
        if jax.process_count() == 1:
            return self._number
        mine = np.full(len(self._mesh.local_devices), self._number, np.int32)
        before = self._pending
        self._pending = self._largest(meshes.put_batch(mine, self._mesh))
        return 0 if before is None else int(before)

    def _listen(self) -> None:
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        threading.Thread(target=_end_at_second, args=(reader,), daemon=True).start()
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}

    def _catch(self, number: int, _: FrameType | None) -> None:
        self._number = self._number or number


def _end_at_second(reader: socket.socket) -> None:
    """Reads the numbers of signals that came, which are written there at once, whatever the main
    thread does."""
    count = 0
    with reader:
        while found := reader.recv(1):
            count += found[0] in SIGNALS
            if count == 2:
                os._exit(128 + found[0])
