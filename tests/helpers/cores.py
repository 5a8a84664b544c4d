"""Assigns a share of the cores to each worker of pytest. Import it before threads are started.

Threads of two workers on the same cores wait for each other, and the suite takes a sixth longer.
"""

import os

# The cores of the machine, for tests that need several. Empty if they are unknown.
ALL = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ...; none without workers

if ALL and _WORKER:
    number = int(_WORKER.removeprefix("gw"))
    os.sched_setaffinity(0, ALL[number % len(ALL) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])])
