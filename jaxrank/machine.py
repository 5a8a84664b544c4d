"""What the program asks of a machine's CPUs: huge pages, and sums in the same order everywhere."""

import os
import sys

_TUNABLE = "glibc.malloc.hugetlb=1"
_THREADS = 8


def ensure() -> None:
    """Settles the number of threads, and starts this program anew with huge pages.

    Huge pages: a step reads rows all over the tables. With pages of 4 KiB most of those reads also
    miss the processor's cache of page addresses: steps took 12 to 22% longer at 20 M rows than at
    1 M, and 4 to 7% longer with huge pages (docs/measurements.md). glibc reads the setting only
    when a process starts, and Linux gives huge pages only where they are asked for. Nothing is done
    where GLIBC_TUNABLES is set, whatever to, so that is how to decide otherwise; nor outside Linux,
    nor where the program came from standard input.

    Threads: XLA splits long sums into as many parts as its pool has threads, so on CPU a run's last
    bits depend on it. Where the process may use up to 8 cores it has 8, whatever their number, so
    runs there are equal; where it may use more, as many as these. PJRT_NPROC says otherwise.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    if "PJRT_NPROC" not in os.environ and cores <= _THREADS:
        os.environ["PJRT_NPROC"] = str(_THREADS)
    arguments = sys.orig_argv[1:]
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or arguments[:1] in ([], ["-"]):
        return
    os.environ["GLIBC_TUNABLES"] = _TUNABLE
    os.execv(sys.executable, [sys.executable, *arguments])
