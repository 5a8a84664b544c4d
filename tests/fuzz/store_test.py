"""A randomly damaged store is read correctly, or raises an InputError that names the file.

There must be no other exception, no other numbers, no crash and no endless loop.
"""

import json
import os
import subprocess
import sys

from checkout import HELPERS, ROOT
from fuzzing import CASES

DAMAGES = {"tree", "path", "bytes", "cut", "empty", "missing", "swap"}


def damaged_stores(count, directory):
    """Returns {"read" or "rejected": {damage: count}}, computed in a separate process."""
    done = subprocess.run(
        [sys.executable, "store_mutations.py", "0", str(count), str(directory)],
        cwd=HELPERS,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"case {lines[-1:]}: {done.stderr}"
    assert lines[:-1] == [str(i) for i in range(count)]
    return json.loads(lines[-1])


def test_a_damaged_store_is_read_as_it_was_written_or_rejected(tmp_path):
    result = damaged_stores(CASES, tmp_path)
    assert sum(result["read"].values()) + sum(result["rejected"].values()) == CASES
    assert set(result["rejected"]) == DAMAGES
    # A byte between two columns is unused, and two equal files may be swapped.
    assert set(result["read"]) <= {"bytes", "swap"}
