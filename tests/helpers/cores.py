"""A share of the cores for each worker of pytest: imported before anything that makes threads.

Those of two workers on the same cores wait for one another, and the suite takes a sixth longer.
"""

import os

# Of the machine, for tests of what a run does on several; empty where nobody tells.
ALL = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ...; none without workers

if ALL and _WORKER:
    number = int(_WORKER.removeprefix("gw"))
    os.sched_setaffinity(0, ALL[number % len(ALL) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])])
