"""Huge pages for tables in the memory of a CPU."""

import os
import sys

_TUNABLE = "glibc.malloc.hugetlb=1"


def ensure() -> None:
    """Restarts this program once with an allocator that requests huge pages.

    A step reads random rows of the tables. With pages of 4 KiB, most of these reads also miss the
    TLB: steps took 12 to 22% longer at 20 M rows than at 1 M. With huge pages they took 4 to 7%
    longer (docs/benchmarks/log/tables.md). glibc reads the setting only when a process starts, and
    Linux uses huge pages only where a program requests them.

    Does nothing outside Linux, or if the program was read from standard input. Set GLIBC_TUNABLES
    to any value to disable it.
    """
    arguments = sys.orig_argv[1:]
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or arguments[:1] in ([], ["-"]):
        return
    os.environ["GLIBC_TUNABLES"] = _TUNABLE
    os.execv(sys.executable, [sys.executable, *arguments])
