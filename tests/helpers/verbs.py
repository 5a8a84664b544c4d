"""Runs verbs in a separate process with the compiler settings of users, for longer runs."""

import json
import os
import subprocess
import sys


def run(*args, devices=1, cores=None):
    """Runs a verb and returns its JSON result. cores: indices of the cores that it may use."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    command = [sys.executable, "-m", "jaxrank", *map(str, args), "--json"]
    result = subprocess.run(
        command,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: cores and os.sched_setaffinity(0, cores),
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
