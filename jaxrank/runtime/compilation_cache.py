"""XLA's persistent compilation cache, in the user's cache directory.

A program that was compiled before is loaded, which takes a fraction of the time. JAX's key of an
entry includes the program, the options, the versions and the kind of accelerator. It lacks the
features of a CPU, so the name of the directory has them.
"""

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrank import atomic, native

_MIN_COMPILATION_SECONDS = 0.05  # seconds of compilation from which on a program is kept
_MAX_CACHE_BYTES = 4 * 2**30  # bytes of the cache, from which on the oldest entries are removed
_TESTED = "reloads"  # file that says whether this processor can load programs that it compiled


def enable() -> None:
    """Enables the persistent cache of JAX, unless the user has configured it.

    Call it after the devices are opened. It has no effect if JAX_COMPILATION_CACHE_DIR is set, or
    on a host that cannot load its own entries (jax issue 38445). Entries are executed, so the
    directory must also be writable and owned by the user.
    """
    import jax

    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen or not jax.config.values["jax_enable_compilation_cache"]:
        return
    folder = directory(jax.default_backend())
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return
        if jax.default_backend() == "cpu" and not _reloads(folder / _TESTED):
            return
        _prune(folder)
    except OSError:
        return
    # Such programs are compiled as if there were no cache.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILATION_SECONDS)


def directory(platform: str) -> Path:
    """Returns the cache directory of a platform for this host and this version of jaxlib."""
    import jaxlib

    name = f"{platform}-{jaxlib.__version__}"
    if platform == "cpu":
        name += f"-{hashlib.sha256(native.processor().encode()).hexdigest()[:16]}"
    return native.cache_directory() / "xla" / name


def _reloads(mark: Path) -> bool:
    """Returns True if this host can load a program that it compiled. Tried once per directory."""
    if not mark.exists():
        with atomic.replacing(mark, unique=True) as part:
            part.write_text("yes" if _reloads_now() else "no")
    return mark.read_text() == "yes"


def _reloads_now() -> bool:
    import jax

    compiled = jax.jit(lambda x: x * 2 + 1).lower(1.0).compile()
    with _without_errors():  # XLA writes why it refuses an entry
        try:
            _deserialized(compiled)
        except Exception:  # whatever it is, there is nothing to be had from the cache
            return False
    return True


def _deserialized(compiled: Any) -> Any:
    """Loads a program as the cache does."""
    import jax

    devices = jax.local_devices()[:1]
    backend = devices[0].client
    serialized = backend.serialize_executable(compiled.runtime_executable())
    return backend.deserialize_executable(serialized, tuple(devices), None)


@contextlib.contextmanager
def _without_errors() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _prune(folder: Path) -> None:
    """Removes the oldest entries until the cache is within its size limit."""
    entries = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may prune, too
            entries.append((path.stat().st_mtime, path.stat().st_size, path))
    size = sum(entry[1] for entry in entries)
    for _, bytes_, path in sorted(entries):
        if size <= _MAX_CACHE_BYTES:
            return
        if path.name != _TESTED:
            path.unlink(missing_ok=True)
            size -= bytes_
