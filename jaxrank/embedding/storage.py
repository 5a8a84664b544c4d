"""How the rows of a stack lie in memory and over the devices.

A stack is stored as f[rows * width / 128, 128], where width is the dimension, padded to a divisor
or a multiple of 128. The TPU compiler keeps such an array as it is; a plain [rows, 16] it copies or
pads in every step. On CPU and GPU the view [rows, width] is free.

Row r lies at position (r mod G) * (rows / G) + r // G, with G = 1024 whatever the number of
devices. Tables are ordered by falling frequency, so neighbours in frequency go to different
devices, which hold contiguous blocks, and the stored array is the same for any number of them.
In NumPy, the logical rows are
`stored.reshape(G, rows // G, width).swapaxes(0, 1).reshape(rows, width)[:, :dim]`.
"""

import dataclasses

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
        position = (row % GROUPS) * (self.rows // GROUPS) + row // GROUPS
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
    return by_group.swapaxes(0, 1).reshape(shape.rows, shape.width)[: stack.rows, : stack.dim]
