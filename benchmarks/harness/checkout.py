"""The checkout that a benchmark belongs to."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def environment(checkout: Path = ROOT) -> dict[str, str]:
    """Returns the environment of a subprocess that imports the packages of a checkout."""
    others = os.environ.get("PYTHONPATH", "")
    path = f"{checkout}{os.pathsep}{others}" if others else str(checkout)
    return os.environ | {"PYTHONPATH": path}
