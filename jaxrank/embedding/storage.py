"""The storage of a stack's rows in memory and over devices.

A stack is stored as f[rows * width / 128, 128], where width is the dimension, padded to a divisor
or a multiple of 128. The TPU compiler keeps such an array as it is. It would copy or pad a plain
[rows, 16] in every step. On CPU and GPU the view [rows, width] is free.

Split row r has position `group(r) * (rows / G) + r // G`. G is 1024 storage groups for any number
of devices, and devices hold contiguous blocks of groups. The stored array is therefore the same for
any number of devices.

`group` spreads rows over devices. Of any n consecutive rows that begin at a multiple of n, each of
n devices gets one, chosen by a hash. Rows of similar frequency, or a fixed stride apart, are
therefore spread, and no device always gets the more frequent half.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrank.errors import InputError
from jaxrank.features import PAD
from jaxrank.layout import Stack

GROUPS = 1024
LANES = 128


def padded_width(dim: int) -> int:
    """Computes the smallest divisor of 128, or else multiple of 128, that is at least `dim`."""
    if dim >= LANES:
        return -(-dim // LANES) * LANES
    return 1 << (dim - 1).bit_length()


_SCRAMBLE = (0x6C50B47C, 0xB82F1E52, 0xC7AFE638, 0x8D22F6E6)


def group(row: Any) -> Any:
    """Computes the storage group i32[...] of split rows i32[...], in NumPy or JAX.

    The group is a scrambled radical inverse. Bit k of a row, counted from the lowest, is bit 9 - k
    of its group, flipped by a hash of the higher bits: Owen's nested scrambling of the van der
    Corput sequence.

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
    # Even factors make each bit depend only on the bits below it.
    x = (reverse << np.uint32(22)) | (high >> np.uint32(10))
    for factor in _SCRAMBLE:
        x = x ^ (x * np.uint32(factor))
    return (x >> np.uint32(22)).astype(np.int32)


def split_row(group: Any, block: Any) -> Any:
    """Computes the split row i32[...] with this group and `row // G == block`: inverts `group`."""
    low = (block.astype(np.uint32) * np.uint32(0x9E3779B1)) & np.uint32(0xFFFFFFFF)
    low = (low ^ (low >> np.uint32(15))) >> np.uint32(10)
    # The lower 22 bits do not depend on the bits of the group, which are above them.
    lowest = [low]
    for factor in _SCRAMBLE:
        low = (low ^ (low * np.uint32(factor))) & np.uint32(2**22 - 1)
        lowest.append(low)
    x = (group.astype(np.uint32) << np.uint32(22)) | lowest.pop()
    for factor in reversed(_SCRAMBLE):
        # Inverts x ^ x * factor for an even factor: each iteration fixes one bit, lowest first.
        before = lowest.pop()
        for _ in range(10):
            before = x ^ (before * np.uint32(factor))
        x = before
    row = block.astype(np.uint32) << np.uint32(10)
    for bit in range(10):
        row = row | (((x >> np.uint32(31 - bit)) & np.uint32(1)) << np.uint32(bit))
    return row.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Storage:
    """Shape of the arrays of one part of a stack: its split rows or its replicated ones.

    name: the name of the part, its key in the tables of a state.
    rows: number of stored rows, at least the rows of the part. For split rows it is a multiple of
        GROUPS for which each device's share is whole in the stored shape.
    is_split: True if rows are split over devices. Otherwise every device has all rows, in order.
    """

    name: str
    dim: int
    width: int
    rows: int
    is_split: bool

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows * self.width // LANES, LANES)

    def line(self, position: Any) -> Any:
        """Computes the first line of the row at `position`, in its i32 type."""
        per_line = max(1, LANES // self.width)
        # rows * width would overflow 32 bits for a table of 8 GiB.
        return position // per_line * max(1, self.width // LANES)

    def position(self, row: Any) -> Any:
        """Maps rows of the part to positions, i32 of any shape. PAD stays PAD. NumPy or JAX."""
        if not self.is_split:
            return row
        position = group(row) * (self.rows // GROUPS) + row // GROUPS
        return (np if isinstance(row, np.ndarray) else jnp).where(row == PAD, PAD, position)

    def row(self, position: Any) -> Any:
        """The inverse of `position`."""
        if not self.is_split:
            return position
        xp: Any = np if isinstance(position, np.ndarray) else jnp
        group, block = xp.divmod(position, self.rows // GROUPS)
        return xp.where(position == PAD, PAD, split_row(group, block))


class TableState(NamedTuple):
    """One part of a stack on the devices.

    rows: f[rows * width / 128, 128], see the docstring of this module.
    slots: state of the row optimizer, f[rows * width / 128, 128] or, with one number per row,
        f[rows].
    """

    rows: jax.Array
    slots: dict[str, jax.Array]


class Parts(NamedTuple):
    """The storages of a stack: replicated rows [0, n), then split rows."""

    replicated: Storage | None
    split: Storage | None


def storage(stack: Stack) -> Parts:
    """Computes the storage of a stack.

    Raises:
        InputError: the stack has more rows than i32 ids can address.
    """
    width = padded_width(stack.dim)
    per_line = max(1, LANES // width)
    split_rows = stack.rows - stack.replicated
    parts = Parts(None, None)
    if stack.replicated:
        rows = -(-stack.replicated // per_line) * per_line
        name = f"{stack.name}_replicated"
        parts = parts._replace(replicated=Storage(name, stack.dim, width, rows, False))
    if split_rows:
        unit = GROUPS * per_line
        rows = -(-split_rows // unit) * unit
        parts = parts._replace(split=Storage(stack.name, stack.dim, width, rows, True))
        if stack.replicated + rows >= int(PAD):
            raise InputError(
                f"tables of dimension {stack.dim} must have fewer than {int(PAD)} rows together:"
                f" found {stack.rows}. Set another dimension for some of them in embedding.dims."
            )
    return parts


def logical_rows(arrays: Mapping[str, Any], stack: Stack) -> np.ndarray:
    """Converts stored arrays of rows or of one slot to f[stack.rows, dim], on the host.

    Slots with one number per row become f[stack.rows, 1].
    """
    parts, pieces = storage(stack), []
    if parts.replicated:
        stored = np.asarray(arrays[parts.replicated.name])
        pieces.append(stored.reshape(parts.replicated.rows, -1)[: stack.replicated])
    if parts.split:
        stored = np.asarray(arrays[parts.split.name])
        row = np.arange(stack.rows - stack.replicated, dtype=np.int32)
        by_group = stored.reshape(GROUPS, parts.split.rows // GROUPS, -1)
        pieces.append(by_group[group(row), row // GROUPS])
    return np.concatenate(pieces)[:, : stack.dim]
