"""Being asked to end: by SIGTERM, as machines that are taken away are told, or by Ctrl-C."""

import signal
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

    From the first call of `asked` to the end of the context signals are caught; the second one does
    what it did before. Of several processes all must call `asked`, at the same steps: they learn of
    a signal together, one call later than the one that got it, and wait for nothing.

        with Stop(program.largest, program.mesh) as stop:
            while ...:
                state, told = program.train(state, batch)
                if stop.asked():
                    break

    Args:
        largest: numbers i32[devices], split over the devices of all processes -> the largest, i32[]
            on every device.
    """

    def __init__(self, largest: Callable[[Any], jax.Array], mesh: Mesh):
        self._largest, self._mesh = largest, mesh
        self._number = 0
        self._before: dict[int, Any] = {}
        self._pending: jax.Array | None = None

    def __enter__(self) -> "Stop":
        return self

    def __exit__(self, *_: object) -> None:
        self._leave_signals()

    def asked(self) -> int:
        """The number of the signal; 0 if there was none. The same in all processes."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._before and not self._number:
            self._before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        if jax.process_count() == 1:
            return self._number
        mine = np.full(len(self._mesh.local_devices), self._number, np.int32)
        before = self._pending
        self._pending = self._largest(meshes.put_batch(mine, self._mesh))
        return 0 if before is None else int(before)

    def _catch(self, number: int, _: FrameType | None) -> None:
        self._number = number
        self._leave_signals()

    def _leave_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
