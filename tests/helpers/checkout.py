"""Paths of this checkout and of the helpers, for tests and the processes that they start."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "helpers"
TINY = str(HELPERS / "tiny_config.py")
