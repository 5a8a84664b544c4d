"""The cores of this process, and the number of threads that XLA uses on a CPU."""

import os


def available_cores() -> int:
    """Returns the number of cores that this process may use. 0: unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


def ensure_several() -> None:
    """Sets two threads on a machine with one core. Call it before JAX opens its devices.

    A single thread adds long sums in another order than several threads do. Any number of two or
    more gives the same bits (`models.products`), so a run is the same on any number of cores.

    Does nothing if PJRT_NPROC is set, or if the available cores are unknown.
    """
    if available_cores() == 1:
        os.environ.setdefault("PJRT_NPROC", "2")
