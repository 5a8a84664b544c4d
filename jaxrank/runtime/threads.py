"""Threads that XLA computes with on a CPU."""

import os


def ensure_several() -> None:
    """On one core, two threads. Before JAX makes its devices.

    One thread adds long sums up in another order than several do, of which any number gives the
    same bits (`models.products`), so a run is the same on any number of cores. Does nothing where
    PJRT_NPROC is set, nor where nobody tells which cores the process may use.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    if cores == 1:
        os.environ.setdefault("PJRT_NPROC", "2")
