"""What jaxrank does on CPU by code in C++: work on rows of tables, and dense layers.

XLA on CPU gathers and scatters on one thread and waits for memory at every row, its products do not
come as near to what the processor can, and what a layer does besides goes through memory again and
again; docs/benchmarks/log/2026-11.md has the times. All
threads of XLA's pool work, and the results do not depend on how many there are. See
`embedding.backends.cpu_rows` and `models.native_layers`.

The code is compiled for the processor when a program first needs it, and kept for the next in
`$XDG_CACHE_HOME/jaxrank` or `~/.cache/jaxrank`. Without a compiler, or where JAXRANK_NATIVE is 0,
XLA does the work.
"""

import concurrent.futures
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import jax
import jaxlib

from jaxrank.atomic import replacing

_FOLDER = Path(__file__).parent
# The same bits as XLA's scatter: a product is rounded before it is added.
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")
COMPILERS = ("c++", "g++", "clang++")  # that are looked for where CXX names none
_FUNCTIONS = {
    "rows": ("Take", "Add", "SumById", "RowwiseAdagrad"),
    "layers": ("Layer", "LayerGradient"),
}
_SECONDS = 120  # in which each must be compiled


def missing() -> str:
    """Why XLA must do the work: "" if it need not. The first call may compile, for some seconds."""
    return _loaded()[0]


def has_layers() -> bool:
    """Whether layers are there besides, which need AVX2 or AVX-512."""
    return "layers" in _loaded()[1]


@functools.cache
def _loaded() -> tuple[str, set[str]]:
    """(why nothing is, what is)."""
    if os.environ.get("JAXRANK_NATIVE") == "0":
        return "JAXRANK_NATIVE is 0", set()
    try:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            libraries = dict(zip(_FUNCTIONS, pool.map(_library, _FUNCTIONS), strict=True))
        return "", {name for name, path in libraries.items() if _register(name, path)}
    except _NotThere as reason:
        return str(reason), set()
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"its code in C++ could not be compiled or loaded: {error}", set()


class _NotThere(Exception):
    pass


def _register(name: str, path: Path) -> bool:
    """Makes the functions known to XLA, if they are there for this processor."""
    library = ctypes.CDLL(str(path))
    for function in (f"Jaxrank{f}" for f in _FUNCTIONS[name]):
        if not hasattr(library, function):
            return False
        handler = jax.ffi.pycapsule(getattr(library, function))
        jax.ffi.register_ffi_target(function, handler, platform="cpu")
    return True


def cache_directory() -> Path:
    """The directory of the user for what is compiled on this host."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrank"


def _library(name: str) -> Path:
    """The compiled code, from the cache if it is there."""
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
    with replacing(path, unique=True) as partial:  # other processes may compile it, too
        command = [*compiler.split(), *_FLAGS, "-I", jax.ffi.include_dir(), str(source)]
        done = subprocess.run(
            [*command, "-o", str(partial)], capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode:
            told = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise _NotThere(f"{compiler} could not compile {source.name}: {told[0]}")
    return path


def processor() -> str:
    """What code that is compiled for this processor must find on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return f"{platform.machine()} {platform.processor()} {features[:1]}"
