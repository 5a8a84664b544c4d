"""Reads and writes single rows of a stored array, in the way that suits the platform.

CPU and GPU view f[k, 128] as f[rows, width] for nothing. A row is written by a scatter that sets
what was read plus the change: with a scatter that adds, nothing in the program says that an array
is read before it is written, and XLA:CPU copies the whole of it in every step.

TPU gathers lines of 128, of which it selects the part that a row is, and adds changes that are zero
in all other parts of their line: any view of another width is a copy of the table in every step.
Lines are many times what is read of them, so they are made for a chunk of the rows at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrank.embedding.storage import LANES
from jaxrank.features import PAD

# Rows whose lines are there at the same time, on TPU: 4 MiB.
CHUNK = 8192


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

    def of_chunk(row: jax.Array) -> jax.Array:  # i32[k] -> f[width, k]
        line, part = _line_and_part(row, LANES // width)
        lines = array.at[line].get(mode="fill", fill_value=0)
        # One number of each sum is not zero, so the product is exact. Its result has one row of a
        # table beside the other; those of slices would take a whole line each.
        lane = jnp.arange(LANES, dtype=jnp.int32)
        fold = (lane[:, None] % width == jnp.arange(width)[None, :]).astype(array.dtype)
        mine = jnp.where((lane // width)[None, :] == part[:, None], lines, 0)
        return jnp.einsum("lw,kl->wk", fold, mine, precision=jax.lax.Precision.HIGHEST)

    found = jax.lax.map(of_chunk, _chunks(row, PAD))  # f[chunks, width, k]
    return found.swapaxes(1, 2).reshape(-1, width)[: row.shape[0]]


def _chunks(array: jax.Array, filling: Any) -> jax.Array:
    """f[m, ...] -> f[chunks, k, ...], k at most `CHUNK`."""
    size = min(CHUNK, max(1, array.shape[0]))
    padding = [(0, -array.shape[0] % size)] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, padding, constant_values=filling).reshape(-1, size, *array.shape[1:])


def write(
    array: jax.Array, row: jax.Array, found: Any, change: jax.Array, *, by_line: bool
) -> jax.Array:
    """The array with `change` f[m, width] or f[m] added to rows i32[m], each of which occurs once.

    Args:
        row: where `by_line`, rising, PAD behind the last.
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

    def add(array: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        row, change = chunk
        line, part = _line_and_part(row, per_line)
        of_lane = jnp.arange(LANES, dtype=jnp.int32)[None, :] // width
        placed = jnp.where(of_lane == part[:, None], jnp.tile(change, (1, per_line)), 0)
        return array.at[line].add(placed, mode="drop", indices_are_sorted=True), None

    return jax.lax.scan(add, array, (_chunks(row, PAD), _chunks(change, 0)))[0]
