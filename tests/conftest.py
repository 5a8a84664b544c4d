"""Settings for the whole suite: eight CPU devices, and rank promotion is an error."""

import collections
import gc
import os
import signal
from pathlib import Path

import cores  # noqa: F401  # first, because it limits threads
import jax
import pytest
import quick_compile
import tiny
from checkout import ROOT
from sharing import share_programs
from variants import Variants

from jaxrank.data.prepare.passes import prepare

# If a shell starts the suite in the background, the suite and its child processes ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# JAX reads this when it opens its devices below. Processes that tests start compile with the
# settings of users, unless they set the same flags.
XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = f"{XLA_FLAGS} {quick_compile.XLA_FLAGS}"

# Also for processes that tests start. Otherwise libtpu, which some tests need, looks for a TPU.
os.environ["JAX_PLATFORMS"] = "cpu"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Equal programs are compiled once for all tests, workers and runs on one machine.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
# Processes that tests start have their own cache, because they compile with other flags.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "jax_processes")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
# Tests start hundreds of processes, and each would compile the bytecode of jaxrank again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
SHARED_DATA = ROOT.parent / "shared" / "data"


assert jax.device_count() == 8
# Imported objects are never garbage, and collecting over them takes half a second each time.
gc.freeze()
gc.set_threshold(200_000, 50, 1000)
os.environ["XLA_FLAGS"] = XLA_FLAGS


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Returns the folder of public data that may not be redistributed, see CONTRIBUTING.md."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the public data sets are not beside this checkout")
    return SHARED_DATA


@pytest.fixture(scope="session")
def store(tiny_store):
    """The folder of the store of `tiny.config()`. Tests must not change it."""
    return tiny_store


@pytest.fixture(scope="session")
def tiny_store(tmp_path_factory):
    """The default store, for modules that define another `store`."""
    path, c = tmp_path_factory.mktemp("data") / "store", tiny.config()
    prepare(c.features.to_dict(), c.source.to_dict(), path, block_size=512, report=lambda _: None)
    return path


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """The folder of an exported model, see `bundles`. Tests must not change it."""
    import bundles  # which imports what few tests need

    return bundles.export_to(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="session")
def variants(tiny_store, tmp_path_factory):
    """Uninterrupted runs of every kind. Tests must not change them."""
    return Variants(tmp_path_factory.mktemp("variants"), tiny_store)


@pytest.fixture(scope="module")
def _programs():
    return {}


@pytest.fixture
def shared_programs(_programs, monkeypatch):
    """Lets equal runs of a module share their programs. Not for tests that change programs."""
    share_programs(monkeypatch, _programs)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Drops the programs of a finished module: they take a third of a worker's memory."""
    yield
    jax.clear_caches()


def pytest_collection_modifyitems(items):
    """Runs the longest tests first, so that all workers end at about the same time."""
    minutes = ("test_dcnv2_on_movielens", "test_the_main_job")
    items.sort(key=lambda i: (not i.name.startswith(minutes), i.get_closest_marker("slow") is None))


def pytest_addoption(parser):
    parser.addoption("--cpu-seconds", metavar="FILE", help="write CPU seconds per test file there")


def _cpu_seconds():
    """Returns the CPU time of this process and of the child processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


_spent = collections.defaultdict(lambda: [0.0, 0.0, 0])  # test file: CPU seconds, seconds, tests
_last = _cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    global _last
    report = yield
    report.cpu_seconds, _last = _cpu_seconds() - _last, _cpu_seconds()
    return report


def pytest_runtest_logreport(report):
    spent = _spent[report.nodeid.partition("::")[0]]
    spent[0] += report.cpu_seconds
    spent[1] += report.duration
    spent[2] += report.when == "call"


def pytest_terminal_summary(config):
    file = config.getoption("--cpu-seconds")
    if not file or "PYTEST_XDIST_WORKER" in os.environ:
        return
    lines = ["| file | CPU s | s | tests |", "| --- | ---: | ---: | ---: |"]
    every = [*_spent.items(), ("all", [sum(each) for each in zip(*_spent.values(), strict=True)])]
    for name, (cpu, seconds, tests) in sorted(every, key=lambda item: -item[1][0]):
        lines.append(f"| {name} | {cpu:.1f} | {seconds:.1f} | {tests} |")
    Path(file).write_text("\n".join(lines) + "\n")
