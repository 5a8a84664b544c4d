"""Imports the modules of examples/daily, which lie beside each other outside any package."""

import contextlib
import sys

from checkout import ROOT

FOLDER = str(ROOT / "examples" / "daily")


@contextlib.contextmanager
def modules():
    """Yields the modules by their names, and forgets them at the end."""
    names = "generate", "day", "run"
    sys.path.insert(0, FOLDER)
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(FOLDER)
        for name in names:
            sys.modules.pop(name, None)
