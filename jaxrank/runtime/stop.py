"""Being asked to end: by SIGTERM, as machines that are taken away are told, or by Ctrl-C."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrank import mesh as meshes
from jaxrank.signals import Caught

_APART_SECONDS = 1.0  # from one signal to another; see `signals.end_at_second`


class ShutdownSignal:
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
        self._signals = Caught(_APART_SECONDS)
        self._pending: jax.Array | None = None

    def __enter__(self) -> "ShutdownSignal":
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.close()

    @property
    def caught(self) -> int:
        """The number of the signal that this process got; 0 if none."""
        return self._signals.number

    def asked(self) -> int:
        """The number of the signal; 0 if there was none. The same in all processes."""
        self._signals.listen()
        if jax.process_count() == 1:
            return self.caught
        mine = np.full(len(self._mesh.local_devices), self.caught, np.int32)
        before = self._pending
        self._pending = self._largest(meshes.put_batch(mine, self._mesh))
        return 0 if before is None else int(before)
