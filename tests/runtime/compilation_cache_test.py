"""Programs that were compiled before are loaded, and nothing is said where they cannot be."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import pytest
from checkout import ROOT

from jaxrank.runtime import compilation_cache

SCRIPT = """
    import json, sys
    from pathlib import Path
    import jax
    from jaxrank.runtime import compilation_cache

    hits = []
    jax.monitoring.register_event_listener(
        lambda name, **_: hits.append(name) if name.endswith("/cache_hits") else None
    )
    jax.devices()
    compilation_cache._MIN_COMPILATION_SECONDS = 0.0
    compilation_cache.enable()
    folder = Path(jax.config.jax_compilation_cache_dir)

    def result():
        jax.clear_caches()
        before = len(hits)
        value = float(jax.jit(lambda x: (x * x).sum())(jax.numpy.arange(4.0)))
        return value, len(hits) - before

    results = [result(), result()]
    entries = list(folder.glob("*-cache"))
    for entry in entries:
        entry.write_bytes(b"no entry")
    results.append(result())
    print(json.dumps([str(folder), len(entries), results]))
"""


def test_programs_are_kept_and_what_cannot_be_loaded_is_compiled_in_silence(tmp_path):
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env.pop("JAX_COMPILATION_CACHE_DIR")
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    folder, entries, results = json.loads(done.stdout)
    assert folder == str(compilation_cache.directory("cpu")).replace(
        str(compilation_cache.native.cache_directory()), str(tmp_path / "jaxrank")
    )
    assert entries
    values, hits = zip(*results, strict=True)
    assert values == (14.0, 14.0, 14.0)
    assert hits[1] > hits[0] == hits[2] == 0


@pytest.fixture
def undecided(tmp_path, monkeypatch):
    """The cache as if the user had not chosen one; the folder where it would be."""
    before = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield compilation_cache.directory("cpu")
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])


def test_the_directory_that_the_user_chose_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir == before
    assert not list(tmp_path.iterdir())


def test_a_host_that_cannot_load_its_entries_has_no_cache(undecided, monkeypatch):
    def reject(*_):
        os.write(2, b"Target machine feature +prefer-no-gather is not supported")
        raise RuntimeError

    monkeypatch.setattr(compilation_cache, "_deserialized", reject)
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir is None
    assert [path.name for path in undecided.iterdir()] == ["reloads"]


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_directory_that_others_write_is_not_used(undecided, mode):
    undecided.mkdir(parents=True)
    undecided.chmod(mode)
    compilation_cache.enable()
    assert jax.config.jax_compilation_cache_dir is None


def test_the_cache_of_a_cpu_is_of_one_kind_of_processor(monkeypatch):
    current = compilation_cache.directory("cpu")
    monkeypatch.setattr(compilation_cache.native, "processor", lambda: "another")
    assert compilation_cache.directory("cpu") != current
    assert compilation_cache.directory("cpu").parent == current.parent


def test_the_entries_that_were_written_first_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(compilation_cache, "_MAX_CACHE_BYTES", 250)
    for number, name in enumerate(("reloads", "a", "c", "b")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (number, number))
    compilation_cache._prune(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"reloads", "b"}
