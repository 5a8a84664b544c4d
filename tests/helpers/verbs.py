"""Verbs in a process of their own, compiled as users have it: for trainings of minutes."""

import json
import os
import subprocess
import sys


def run(*args, devices=1, cores=None):
    """The JSON object that a verb ends with; cores: the numbers of those that it may use."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, "-m", "jaxrank", *map(str, args), "--json"]
    found = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: cores and os.sched_setaffinity(0, cores),
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])
