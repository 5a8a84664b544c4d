"""Reads and writes single rows of a stored array, in the way that suits the platform.

CPU and GPU view f[k, 128] as f[rows, width] for nothing. A row is written by a scatter that sets
what was read plus the change: with a scatter that adds, nothing in the program says that an array
is read before it is written, and XLA:CPU copies the whole of it in every step.

TPU gathers lines of 128, of which it selects the part that a row is, and adds changes that are zero
in all other parts of their line: any view of another width is a copy of the table in every step.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrank.embedding.storage import LANES
from jaxrank.features import PAD


def _line_and_part(row: jax.Array, per_line: int) -> tuple[jax.Array, jax.Array]:
    return jnp.where(row == PAD, PAD, row // per_line), row % per_line


def _lines(row: jax.Array, lines: int) -> jax.Array:
    """i32[m * lines]: the lines of rows that take several."""
    every = row[:, None] * lines + jnp.arange(lines, dtype=jnp.int32)[None, :]
    return jnp.where(row[:, None] == PAD, PAD, every).reshape(-1)


def read(array: jax.Array, row: jax.Array, width: int, *, by_line: bool) -> jax.Array:
    """f[m, width] or, of an array with one number a row, f[m]: the rows i32[m], zero for PAD.

    Args:
        array: f[rows * width / 128, 128], or f[rows].
        by_line: as TPU does it.
    """
    if array.ndim == 1:
        return array.at[row].get(mode="fill", fill_value=0)
    if not by_line:
        return array.reshape(-1, width).at[row].get(mode="fill", fill_value=0)
    if width >= LANES:
        lines = array.at[_lines(row, width // LANES)].get(mode="fill", fill_value=0)
        return lines.reshape(-1, width)
    per_line = LANES // width
    line, part = _line_and_part(row, per_line)
    lines = array.at[line].get(mode="fill", fill_value=0)
    found = lines[:, :width]
    for i in range(1, per_line):
        here = lines[:, i * width : (i + 1) * width]
        found = jnp.where((part == i)[:, None], here, found)
    return found


def write(
    array: jax.Array, row: jax.Array, found: Any, change: jax.Array, *, by_line: bool
) -> jax.Array:
    """The array with `change` f[m, width] or f[m] added to rows i32[m], each of which occurs once.

    Args:
        found: what `read` gave for these rows.
    """
    if by_line and array.ndim == 1:
        return array.at[row].add(change, mode="drop")
    if array.ndim == 1:
        return array.at[row].set(found + change, mode="drop")
    width = change.shape[1]
    if not by_line:
        view = array.reshape(-1, width)
        return view.at[row].set(found + change, mode="drop").reshape(array.shape)
    if width >= LANES:
        return array.at[_lines(row, width // LANES)].add(change.reshape(-1, LANES), mode="drop")
    per_line = LANES // width
    line, part = _line_and_part(row, per_line)
    of_lane = jnp.arange(LANES, dtype=jnp.int32)[None, :] // width
    placed = jnp.where(of_lane == part[:, None], jnp.tile(change, (1, per_line)), 0)
    return array.at[line].add(placed, mode="drop")
