"""Checksums of arrays, made on the devices where they are.

The sum over all elements of a hash of the element's bits and place, modulo 2^32. One element that
is not what it was always shows; any other damage with a chance of all but 2^-32. The sum is the
same however the array is split, so what eight devices saved one can check.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_CHUNK = 2**20  # elements that are hashed at a time, or a row: what memory this takes


def checksums(tree: Any) -> dict[str, int]:
    """Of every array of a tree, by its path. Reads all of them once.

    Args:
        tree: of arrays of any dtype, on every device or split along their first axis.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    found = jax.device_get([_checksum(array) for _, array in leaves])
    return {
        jax.tree_util.keystr(path): int(value)
        for (path, _), value in zip(leaves, found, strict=True)
    }


def of_host(rows: np.ndarray, first: int = 0) -> int:
    """The part of an array's checksum that rows of it have which begin at row `first`; the sum of
    all parts modulo 2^32 is the checksum of the array. On the host."""
    if not rows.size:
        return 0
    count = rows.shape[0] if rows.ndim else 1
    if rows.dtype == bool or rows.dtype.itemsize < 4:
        bits = rows.view(f"uint{8 * rows.dtype.itemsize}").astype(np.uint32)
    else:
        bits = np.ascontiguousarray(rows).reshape(count, -1).view(np.uint32)
    bits = bits.reshape(count, -1)
    total = 0
    size = max(1, _CHUNK // bits.shape[1])
    for begin in range(0, count, size):
        part = bits[begin : begin + size]
        place = np.arange(part.size, dtype=np.uint32).reshape(part.shape)
        place += np.uint32((first + begin) * bits.shape[1] % 2**32)
        mixed = _mixed(part + place * np.uint32(0x9E3779B1))
        total += int(np.sum(mixed, dtype=np.uint64))
    return total % 2**32


def differing(expected: dict[str, int], found: dict[str, int]) -> list[str]:
    """The paths that are not in both, or differ."""
    every = {*expected, *found}
    return sorted(path for path in every if expected.get(path) != found.get(path))


def _checksum(array: Any) -> jax.Array:  # u32[]
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return _of_mesh(sharding.mesh, sharding.spec)(array)
    return _of_one(jnp.asarray(array))


@functools.cache
def _of_mesh(mesh: Mesh, spec: P) -> Any:
    axis = spec[0] if len(spec) else None
    if any(name is not None for name in spec[1:]):
        raise ValueError(f"arrays must be split along their first axis only: found {spec}")

    def device_checksums(array: jax.Array) -> jax.Array:
        if axis is None:
            return _of_share(array, 0)
        return jax.lax.psum(_of_share(array, jax.lax.axis_index(axis) * array.shape[0]), axis)

    return jax.jit(
        jax.shard_map(device_checksums, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    )


def _of_share(array: jax.Array, first: Any) -> jax.Array:
    """The sum over rows of an array that begin at row `first` of the whole."""
    if not array.size:
        return jnp.zeros((), jnp.uint32)
    rows = array.reshape(array.shape[0] if array.ndim else 1, -1)
    count, width = rows.shape
    size = min(count, max(1, _CHUNK // width))

    def of_chunk(i: jax.Array, total: jax.Array) -> jax.Array:
        # The last chunk begins earlier, to be whole; what was in the one before is left out.
        begin = jnp.minimum(i * size, count - size)
        bits = _bits(jax.lax.dynamic_slice_in_dim(rows, begin, size)).reshape(size, -1)
        row = begin + jnp.arange(size, dtype=jnp.int32)
        place = (first + row).astype(jnp.uint32) * np.uint32(bits.shape[1])
        place = place[:, None] + jnp.arange(bits.shape[1], dtype=jnp.uint32)[None, :]
        mixed = _mixed(bits + place * np.uint32(0x9E3779B1))
        return total + jnp.sum(jnp.where((row >= i * size)[:, None], mixed, 0), dtype=jnp.uint32)

    return jax.lax.fori_loop(0, -(-count // size), of_chunk, jnp.zeros((), jnp.uint32))


@jax.jit
def _of_one(array: jax.Array) -> jax.Array:
    return _of_share(array, 0)


def _mixed(x: Any) -> Any:
    """A bijection of u32, of NumPy or JAX, in which every bit depends on all others: lowbias32.

    References:
        Wellons, Prospecting for Hash Functions, nullprogram.com, 2018.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _bits(array: jax.Array) -> jax.Array:
    """u32 of the shape of the array, of 64-bit numbers with an axis of 2 behind."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    size = array.dtype.itemsize
    if size >= 4:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, f"uint{8 * size}").astype(jnp.uint32)
