"""Settings for the whole suite: eight CPU devices, and rank promotion is an error."""

import collections
import functools
import gc
import json
import os
import signal
from pathlib import Path

import cores  # noqa: F401  # first, because it limits threads
import jax
import pytest
import quick_compile
import tiny
from checkout import ROOT
from declarations import check_verb
from sharing import share_programs
from variants import Variants

from jaxrank import cli
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
# Of a worker, with the programs that it keeps for the next modules.
PROGRAM_BYTES = 5 * 2**29
SHARED_DATA = ROOT.parent / "shared" / "data"


assert jax.device_count() == 8
# Imported objects are never garbage, and collecting over them takes half a second each time.
gc.freeze()
gc.set_threshold(200_000, 50, 1000)
os.environ["XLA_FLAGS"] = XLA_FLAGS


def _checked(verb, function):
    """Returns a verb whose results must be as `jaxrank.records` declares them."""

    @functools.wraps(function)
    def run(args, report):
        if result := function(args, report):
            check_verb(verb, json.loads(cli.json_text(verb, result)))
        return result

    return run


# Every test that runs a verb in this process compares what --json prints with its declaration.
cli._RUN.update({verb: _checked(verb, run) for verb, run in cli._RUN.items()})


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

    return bundles.export_sample(tmp_path_factory.mktemp("bundle"))


@pytest.fixture(scope="session")
def variants(tiny_store, tmp_path_factory):
    """Uninterrupted runs of every kind. Tests must not change them."""
    return Variants(tmp_path_factory.mktemp("variants"), tiny_store)


@pytest.fixture(scope="session")
def _programs():
    return {}


@pytest.fixture(scope="module")
def shared_programs(_programs):
    """Lets equal runs of all modules share their programs. Not for tests that change programs."""
    with pytest.MonkeyPatch.context() as patch:
        share_programs(patch, _programs)
        yield


@pytest.fixture(autouse=True, scope="module")
def _forget_programs(_programs):
    """Drops all programs behind a module, if they take too much of a worker's memory."""
    yield
    if _resident_bytes() > PROGRAM_BYTES:
        _programs.clear()
        jax.clear_caches()


def _resident_bytes():
    """Returns the memory that this process has now. Elsewhere than on Linux it is not known."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return float("inf")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pytest_collection_modifyitems(items):
    """Runs modules with long tests first, so that all workers end at about the same time.

    They stay whole, because the tests of a module share fixtures.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


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
