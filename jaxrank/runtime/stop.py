"""Being asked to end: by SIGTERM, as machines that are taken away are told, or by Ctrl-C."""

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrank import mesh as meshes
from jaxrank.runtime.signals import SIGNALS, end_at_second

_APART_SECONDS = 1.0  # from one signal to another; see `end_at_second`


class Stop:
    """Whether any process of a run was asked to end, by which signal.

    From the first call of `asked` to the end of the context signals are caught; another one, a
    second or more after the first, ends the program at once, also where it waits for a device and
    Python handles no signal. Of several
    processes all must call `asked`, at the same steps: they learn of a signal together, one call
    later than the one that got it, and wait for nothing.

        with Stop(program.largest, program.mesh) as stop:
            while ...:
                state, metrics = program.train(state, batch)
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
        self._listening: contextlib.ExitStack | None = None
        self._pending: jax.Array | None = None

    def __enter__(self) -> "Stop":
        return self

    def __exit__(self, *_: object) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    @property
    def caught(self) -> int:
        """The number of the signal that this process got; 0 if none."""
        return self._number

    def asked(self) -> int:
        """The number of the signal; 0 if there was none. The same in all processes."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._listening is None:
            self._listen()
        if jax.process_count() == 1:
            return self._number
        mine = np.full(len(self._mesh.local_devices), self._number, np.int32)
        before = self._pending
        self._pending = self._largest(meshes.put_batch(mine, self._mesh))
        return 0 if before is None else int(before)

    def _listen(self) -> None:
        self._listening = contextlib.ExitStack()
        self._listening.enter_context(end_at_second(_APART_SECONDS))
        for number in SIGNALS:
            before = signal.signal(number, self._catch)
            self._listening.callback(signal.signal, number, before)

    def _catch(self, number: int, _: FrameType | None) -> None:
        self._number = self._number or number
