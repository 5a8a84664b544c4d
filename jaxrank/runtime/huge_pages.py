"""Huge pages for tables in the memory of a CPU."""

import os
import sys

_TUNABLE = "glibc.malloc.hugetlb=1"


def ensure() -> None:
    """Starts this program anew, once, with an allocator that asks for huge pages.

    A step reads rows all over the tables. With pages of 4 KiB most of those reads also miss the
    processor's cache of page addresses: steps took 12 to 22% longer at 20 M rows than at 1 M, and 4
    to 7% longer with huge pages (docs/benchmarks/log/2026-11.md). glibc reads the setting only when
    a process starts, and Linux gives huge pages only where they are asked for.

    Does nothing where GLIBC_TUNABLES is set, whatever to, so that is how to decide otherwise; nor
    outside Linux, nor where the program came from standard input.
    """
    arguments = sys.orig_argv[1:]
    if sys.platform != "linux" or "GLIBC_TUNABLES" in os.environ or arguments[:1] in ([], ["-"]):
        return
    os.environ["GLIBC_TUNABLES"] = _TUNABLE
    os.execv(sys.executable, [sys.executable, *arguments])
