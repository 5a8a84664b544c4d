"""Checksums of arrays, made on the devices where they are.

The sum over all elements of a hash of the element's bits and place, modulo 2^32. One element that
is not what it was always shows; any other damage with a chance of all but 2^-32. The sum is the
same however the array is split, so what eight devices saved one can check.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checksums(tree: Any) -> dict[str, int]:
    """Of every array of a tree, by its path. Reads all of them once."""
    found = jax.device_get(_all(tree))
    paths = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path): int(value) for path, value in paths}


def differing(expected: dict[str, int], found: dict[str, int]) -> list[str]:
    """The paths that are not in both, or differ."""
    every = {*expected, *found}
    return sorted(path for path in every if expected.get(path) != found.get(path))


@jax.jit
def _all(tree: Any) -> Any:
    return jax.tree.map(_checksum, tree)


def _checksum(array: jax.Array) -> jax.Array:  # u32[]
    bits = _bits(array)
    place = jnp.zeros((1,) * bits.ndim, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        shape = [1] * bits.ndim
        shape[axis] = size
        place = place * np.uint32(size) + jnp.arange(size, dtype=jnp.uint32).reshape(shape)
    mixed = _mixed(bits + place * np.uint32(0x9E3779B1))
    return jnp.sum(mixed, dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """A bijection of u32 in which every bit depends on all others: lowbias32.

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
