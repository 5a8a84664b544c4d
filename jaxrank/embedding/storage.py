"""How the rows of a stack lie in memory and over the devices.

A stack is stored as f[rows * width / 128, 128], where width is the dimension, padded to a divisor
or a multiple of 128. The TPU compiler keeps such an array as it is; a plain [rows, 16] it copies or
pads in every step. On CPU and GPU the view [rows, width] is free.

Split row r lies at `group(r) * (rows / G) + r // G`, with G = 1024 groups whatever the number of
devices, which hold contiguous blocks of groups; so the stored array is the same for any number of
them. `group` deals rows out: of any n consecutive rows that begin at a multiple of n, each of n
devices gets one, which of them by a hash. So rows next to each other in frequency, or a fixed
stride apart, are spread, and no device gets the more frequent half of every deal.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.errors import InputError
from jaxrank.features import PAD, Stack

GROUPS = 1024
LANES = 128


def padded_width(dim: int) -> int:
    """The least divisor of 128, or else multiple of it, that is at least `dim`."""
    if dim >= LANES:
        return -(-dim // LANES) * LANES
    return 1 << (dim - 1).bit_length()


_SCRAMBLE = (0x6C50B47C, 0xB82F1E52, 0xC7AFE638, 0x8D22F6E6)


def group(row: Any) -> Any:
    """The group i32[...] of split rows i32[...], of NumPy or JAX: a scrambled radical inverse.

    Bit k of a row, counted from the lowest, is bit 9 - k of its group, flipped by a hash of the
    higher bits: Owen's nested scrambling of the van der Corput sequence.

    References:
        Laine and Karras, Stratified Sampling for Stochastic Transparency, EGSR 2011 (the hash).
    """
    x = row.astype(np.uint32)
    low = x & np.uint32(GROUPS - 1)
    reverse = low & np.uint32(0)
    for bit in range(10):
        reverse = (reverse << np.uint32(1)) | ((low >> np.uint32(bit)) & np.uint32(1))
    high = (x >> np.uint32(10)) * np.uint32(0x9E3779B1)
    high = high ^ (high >> np.uint32(15))
    # Multiplied by even numbers, a bit depends on those below it only.
    x = (reverse << np.uint32(22)) | (high >> np.uint32(10))
    for factor in _SCRAMBLE:
        x = x ^ (x * np.uint32(factor))
    return (x >> np.uint32(22)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Shape of one stack's arrays.

    rows: stored rows, at least the stack's; a multiple of GROUPS such that each device's share is
        whole in the stored shape.
    """

    name: str
    dim: int
    width: int
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows * self.width // LANES, LANES)

    def position(self, row: jax.Array) -> jax.Array:
        """Where each row lies, i32 of the same shape; PAD stays PAD."""
        position = group(row) * (self.rows // GROUPS) + row // GROUPS
        return jnp.where(row == PAD, PAD, position)

    def view(self, stored: jax.Array) -> jax.Array:
        """f[k, 128] -> f[rows, width], of the whole or of one device's share."""
        return stored.reshape(-1, self.width)


def storage(stack: Stack) -> Storage:
    """The storage of a stack.

    Raises:
        InputError: the stack has more rows than ids can name.
    """
    width = padded_width(stack.dim)
    unit = GROUPS * max(1, LANES // width)
    rows = -(-stack.rows // unit) * unit
    if rows >= int(PAD):
        raise InputError(
            f"tables of dimension {stack.dim} must have fewer than {int(PAD)} rows together:"
            f" found {stack.rows}. Give some of them another dimension in embedding.dims."
        )
    return Storage(name=stack.name, dim=stack.dim, width=width, rows=rows)


def logical_rows(stored: np.ndarray, stack: Stack) -> np.ndarray:
    """A whole stored array -> f[stack.rows, dim] in row order, on the host."""
    shape = storage(stack)
    by_group = np.asarray(stored).reshape(GROUPS, shape.rows // GROUPS, shape.width)
    row = np.arange(stack.rows, dtype=np.int32)
    return by_group[group(row), row // GROUPS, : stack.dim]
