"""Where this checkout and the tests' helpers lie, for those and for processes that tests start."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests" / "helpers"
TINY = str(HELPERS / "tiny_config.py")
