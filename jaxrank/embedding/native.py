"""Reads rows of tables and adds up their gradients on CPU, by code in C++ (`native.cc`).

XLA on CPU gathers and scatters on one thread, and waits for memory at every row. Here all threads
of its pool work, and ask for rows before they need them; docs/measurements.md has the times. The
code is compiled when a program first needs it, and kept for the next in `$XDG_CACHE_HOME/jaxrank`
or `~/.cache/jaxrank`. Without a compiler, or where JAXRANK_NATIVE is 0, XLA does the work; vectors
and sums are then the same to the bit.

Vectors are float32. Where an id or an index is PAD, nothing is read or added.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jaxrank.embedding.per_id import PerId

_SOURCE = Path(__file__).with_name("native.cc")
# The same bits as XLA's scatter: a product is rounded before it is added.
_FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-w")
COMPILERS = ("c++", "g++", "clang++")  # that are looked for where CXX names none
_FUNCTIONS = ("Take", "Add", "SumById")
_SECONDS = 120  # in which it must be compiled


@functools.cache
def missing() -> str:
    """Why XLA must do the work: "" if it need not. The first call may compile, for some seconds."""
    if os.environ.get("JAXRANK_NATIVE") == "0":
        return "JAXRANK_NATIVE is 0"
    try:
        library = ctypes.CDLL(str(_library()))
    except _NotThere as reason:
        return str(reason)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"{_SOURCE.name} could not be compiled or loaded: {error}"
    for function in _FUNCTIONS:
        handler = jax.ffi.pycapsule(getattr(library, f"Jaxrank{function}"))
        jax.ffi.register_ffi_target(f"Jaxrank{function}", handler, platform="cpu")
    return ""


class _NotThere(Exception):
    pass


def _library() -> Path:
    """The compiled code, from the cache if it is there."""
    source = _SOURCE.read_bytes()
    made_of = (source, " ".join(_FLAGS), jaxlib.__version__, platform.machine())
    name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxrank"
    path = cache / f"native-{name}.so"
    if path.exists():
        return path
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), "")
    if not compiler:
        raise _NotThere("no C++ compiler was found")
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, temporary = tempfile.mkstemp(dir=cache, suffix=".so")
    os.close(descriptor)
    try:
        command = [*compiler.split(), *_FLAGS, "-I", jax.ffi.include_dir(), str(_SOURCE)]
        done = subprocess.run(
            [*command, "-o", temporary], capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode:
            told = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise _NotThere(f"{compiler} could not compile {_SOURCE.name}: {told[0]}")
        os.replace(temporary, path)  # whole or not at all, whoever else compiles it
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def take(source: jax.Array, index: jax.Array) -> jax.Array:
    """f32[k, width] or f32[k]: rows of f32[rows, width] or f32[rows] at i32[k]; zero for PAD."""
    if source.ndim == 1:
        return take(source[:, None], index)[:, 0]
    out = jax.ShapeDtypeStruct((index.shape[0], source.shape[1]), source.dtype)
    return jax.ffi.ffi_call("JaxrankTake", out)(source, index)


def add(block: jax.Array, at: jax.Array, vectors: PerId, *, rising: bool = False) -> jax.Array:
    """f32[n, dim]: the block with a vector for each id added at i32[ids], in the order of ids.

    Args:
        rising: `at` is so, with PAD behind the last.
    """
    if not vectors.count:
        return block
    out = jax.ShapeDtypeStruct(block.shape, block.dtype)
    call = jax.ffi.ffi_call("JaxrankAdd", out, input_output_aliases={0: 0})
    return call(block, at, *_operands(vectors), rising=rising)


def sum_by_id(
    ids: jax.Array, grads: Sequence[PerId], rows: int, dim: int
) -> tuple[jax.Array, jax.Array]:
    """Each id i32[n] below `rows` once, not rising, with PAD behind the last; and the sums of their
    gradients f32[n, dim] in the order of ids, of which those behind the last can be anything."""
    count = ids.shape[0]
    outs = (
        jax.ShapeDtypeStruct((count,), jnp.int32),
        jax.ShapeDtypeStruct((count, dim), jnp.float32),
        jax.ShapeDtypeStruct((5 * count,), jnp.int32),  # memory to work in
    )
    pieces = [operand for piece in grads if piece.count for operand in _operands(piece)]
    unique, sums, _ = jax.ffi.ffi_call("JaxrankSumById", outs)(ids, *pieces, rows=np.int64(rows))
    return unique, sums


def _operands(vectors: PerId) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(vectors, index, scale), which are empty where there are none."""
    index = jnp.zeros(0, jnp.int32) if vectors.index is None else vectors.index
    scale = jnp.zeros(0, jnp.float32) if vectors.scale is None else vectors.scale
    return vectors.source, index, scale
