"""Checksums of arrays, computed on the devices that hold them.

A checksum is the sum over all elements of a hash of the element's bits and position, modulo 2^32.
A change of a single element is always detected. Any other damage is missed with a probability of
2^-32. The sum does not depend on the sharding, so one device can check what eight devices saved.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

_CHUNK = 2**20  # elements hashed at a time, at least one row: bounds the memory


def checksums(tree: Any) -> dict[str, int]:
    """Computes the checksum of every array of a tree, by its path. Reads each array once.

    Args:
        tree: arrays of any dtype, replicated or sharded along their first axis.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    values = jax.device_get([_checksum(array) for _, array in leaves])
    return {
        jax.tree_util.keystr(path): int(value)
        for (path, _), value in zip(leaves, values, strict=True)
    }


def host_checksum(rows: np.ndarray, first: int = 0) -> int:
    """Computes on the host the contribution of some rows to the checksum of their array.

    The sum of the contributions of all rows, modulo 2^32, is the checksum of the array.

    Args:
        rows: consecutive rows of the array.
        first: index of their first row in the array.
    """
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


def differing(expected: dict[str, int], actual: dict[str, int]) -> list[str]:
    """Returns the paths that are missing on one side or whose checksums differ."""
    every = {*expected, *actual}
    return sorted(path for path in every if expected.get(path) != actual.get(path))


def _checksum(array: Any) -> jax.Array:  # u32[]
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding):
        return _mesh_checksums(sharding.mesh, sharding.spec)(array)
    return _array_checksum(jnp.asarray(array))


@functools.cache
def _mesh_checksums(mesh: Mesh, spec: P) -> Any:
    axis = spec[0] if len(spec) else None
    if any(name is not None for name in spec[1:]):
        raise ValueError(f"arrays must be sharded along their first axis only: found {spec}")

    def device_checksums(array: jax.Array) -> jax.Array:
        if axis is None:
            return _share_checksum(array, 0)
        return jax.lax.psum(_share_checksum(array, jax.lax.axis_index(axis) * array.shape[0]), axis)

    return jax.jit(
        jax.shard_map(device_checksums, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False)
    )


def _share_checksum(array: jax.Array, first: Any) -> jax.Array:
    """Computes the contribution of the rows that begin at row `first` of the whole array."""
    if not array.size:
        return jnp.zeros((), jnp.uint32)
    rows = array.reshape(array.shape[0] if array.ndim else 1, -1)
    count, width = rows.shape
    size = min(count, max(1, _CHUNK // width))

    def add_chunk(i: jax.Array, total: jax.Array) -> jax.Array:
        # The last chunk starts earlier so that it is full. Rows of the chunk before are masked.
        begin = jnp.minimum(i * size, count - size)
        bits = _bits(jax.lax.dynamic_slice_in_dim(rows, begin, size)).reshape(size, -1)
        row = begin + jnp.arange(size, dtype=jnp.int32)
        place = (first + row).astype(jnp.uint32) * np.uint32(bits.shape[1])
        place = place[:, None] + jnp.arange(bits.shape[1], dtype=jnp.uint32)[None, :]
        mixed = _mixed(bits + place * np.uint32(0x9E3779B1))
        return total + jnp.sum(jnp.where((row >= i * size)[:, None], mixed, 0), dtype=jnp.uint32)

    return jax.lax.fori_loop(0, -(-count // size), add_chunk, jnp.zeros((), jnp.uint32))


@jax.jit
def _array_checksum(array: jax.Array) -> jax.Array:
    return _share_checksum(array, 0)


def _mixed(x: Any) -> Any:
    """lowbias32: a bijection of u32 in which every output bit depends on every input bit.

    Accepts arrays of NumPy and of JAX.

    References:
        Wellons, Prospecting for Hash Functions, nullprogram.com, 2018.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def _bits(array: jax.Array) -> jax.Array:
    """Returns the bits of an array as u32 of the same shape. 64-bit dtypes get a last axis of 2."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    size = array.dtype.itemsize
    if size >= 4:
        return jax.lax.bitcast_convert_type(array, jnp.uint32)
    return jax.lax.bitcast_convert_type(array, f"uint{8 * size}").astype(jnp.uint32)
