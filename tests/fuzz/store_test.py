"""Random damage of a store: what was written comes out, or an InputError that names the file.

Nothing else: no other exception, no other numbers, no crash, no end that never comes.
"""

import json
import os
import subprocess
import sys

import pytest
from checkout import HELPERS, ROOT

DAMAGES = {"tree", "path", "bytes", "cut", "empty", "missing", "swap"}


def damaged_stores(count, directory):
    """{"read" or "refused": {damage: how many}}, found in a process of its own."""
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


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_damaged_store_is_read_as_it_was_written_or_refused(tmp_path, count):
    found = damaged_stores(count, tmp_path)
    assert sum(found["read"].values()) + sum(found["refused"].values()) == count
    assert set(found["refused"]) == DAMAGES
    # A byte between two columns is nobody's, and two equal files may change places.
    assert set(found["read"]) <= {"bytes", "swap"}
