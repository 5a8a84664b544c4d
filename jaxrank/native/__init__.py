"""C++ code for CPU, which reads and updates rows of tables and computes dense layers.

XLA on CPU gathers and scatters on one thread and waits for memory at every row. Its products use
less of the processor's speed, and the other operations of a layer go through memory several times.
docs/benchmarks/log/cpu.md has the times. The code uses all threads of XLA's pool, and results
do not depend on their number. See `embedding.backends.cpu_rows` and `models.native_layers`.

The code is compiled for the processor when a program first needs it. It is cached in
`$XDG_CACHE_HOME/jaxrank` or `~/.cache/jaxrank`. Without a compiler, or if JAXRANK_NATIVE is 0, XLA
does the work.
"""

import concurrent.futures
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path

import jax
import jaxlib
from jax import monitoring

from jaxrank.atomic import replacing

_FOLDER = Path(__file__).parent
# The same bits as XLA's scatter: products are rounded before they are added.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")
COMPILERS = ("c++", "g++", "clang++")  # tried in this order if CXX is not set
_FUNCTIONS = {
    "rows": ("Take", "Add", "SumById", "RowwiseAdagrad"),
    "layers": ("Layer", "LayerGradient"),
}
_SECONDS = 120  # limit for compiling each file


def missing() -> str:
    """Returns the reason why XLA must do the work, or "". The first call may compile the code."""
    return _loaded()[0]


def has_layers() -> bool:
    """Returns True if layers are available, which need AVX2 or AVX-512."""
    return "layers" in _loaded()[1]


@functools.cache
def _loaded() -> tuple[str, set[str]]:
    """Returns (the reason why nothing is available, the names of available libraries)."""
    if os.environ.get("JAXRANK_NATIVE") == "0":
        return "JAXRANK_NATIVE is 0", set()
    started = time.perf_counter()
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            libraries = dict(zip(_FUNCTIONS, pool.map(_library, _FUNCTIONS), strict=True))
        return "", {name for name, path in libraries.items() if _register(name, path)}
    except _NotThere as reason:
        return str(reason), set()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the C++ code could not be compiled or loaded: {error}", set()
    finally:
        seconds = time.perf_counter() - started
        monitoring.record_event_duration_secs("/jaxrank/compile/native", seconds)


class _NotThere(Exception):
    pass


def _register(name: str, path: Path) -> bool:
    """Registers the functions with XLA. False if the processor does not support them."""
    library = ctypes.CDLL(str(path))
    for function in (f"Jaxrank{f}" for f in _FUNCTIONS[name]):
        if not hasattr(library, function):
            return False
        handler = jax.ffi.pycapsule(getattr(library, function))
        jax.ffi.register_ffi_target(function, handler, platform="cpu")
    return True


def cache_directory() -> Path:
    """Returns the user's cache directory for code compiled on this host."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrank"


def _library(name: str) -> Path:
    """Compiles a source file, or returns the compiled code from the cache."""
    source = _FOLDER / f"{name}.cc"
    sources = [path.read_bytes() for path in (source, *sorted(_FOLDER.glob("*.h")))]
    made_of = (*sources, *_FLAGS, jaxlib.__version__, processor())
    key = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    cache = cache_directory()
    path = cache / f"{name}-{key}.so"
    if path.exists():
        return path
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), "")
    if not compiler:
        raise _NotThere("no C++ compiler was found")
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path, unique=True) as partial:  # other processes may compile it too
        command = [*compiler.split(), *_FLAGS, "-I", jax.ffi.include_dir(), str(source)]
        done = subprocess.run(
            [*command, "-o", str(partial)], capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode:
            errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise _NotThere(f"{compiler} could not compile {source.name}: {errors[0]}")
    return path


def processor() -> str:
    """Describes the processor. Compiled code is reused only where this text is equal."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return f"{platform.machine()} {platform.processor()} {features[:1]}"
