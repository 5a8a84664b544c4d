"""Eight CPU devices and no silent broadcasting, for the whole suite."""

from pathlib import Path

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    assert jax.device_count() == 8


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public data that may not be redistributed; see CONTRIBUTING.md."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the public data sets are not beside this checkout")
    return SHARED_DATA
