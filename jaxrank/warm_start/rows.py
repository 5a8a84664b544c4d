"""Initialises table rows and their optimizer state from an older run.

Old arrays are read from the checkpoint in pieces, and their rows are copied to their new positions.
The placement and the mesh of the two runs may differ. A process holds its share of one new array
and one piece on the host.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.embedding.storage import LANES, Storage, storage
from jaxrank.features import PAD
from jaxrank.layout import Layout, Stack, ToStack


class Moves(NamedTuple):
    """Rows that are copied from one part of an old stack to one part of the new one.

    old, new: i32[n], positions of the rows in the arrays of these parts. `old` is ascending.
    """

    old_part: Storage
    new_part: Storage
    old: np.ndarray
    new: np.ndarray


def plan_moves(old: Layout, new: Layout, rows: Mapping[str, np.ndarray]) -> dict[str, list[Moves]]:
    """Plans the copies of rows, by stack.

    Args:
        old: layout of the older run.
        new: layout of the new run.
        rows: {table: i32[rows of the old table], the row in the new table, or PAD}. Tables that are
            absent here or have another dimension keep their initial values.
    """
    moves = {}
    before = {stack.name: stack for stack in old.stacks}
    for stack in new.stacks:
        if stack.name in before:
            pairs = _pairs(before[stack.name], stack, rows)
            moves[stack.name] = list(_moves(before[stack.name], stack, *pairs))
    return moves


def _pairs(old: Stack, new: Stack, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of the old stack and of the new one, i32[n] each, with the same raw value."""
    old_rows, new_rows = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    old_index, new_index = ToStack.from_stack(old), ToStack.from_stack(new)
    for name in set(old.tables) & set(new.tables) & set(rows):
        row = rows[name]
        kept = np.flatnonzero(row != PAD).astype(np.int32)
        old_rows.append(old_index(kept, old.tables.index(name)))
        new_rows.append(new_index(row[kept], new.tables.index(name)))
    return np.concatenate(old_rows), np.concatenate(new_rows)


def _moves(old: Stack, new: Stack, old_rows: np.ndarray, new_rows: np.ndarray) -> Iterator[Moves]:
    for old_part, in_old, old_first in local_rows(old, old_rows):
        for new_part, in_new, new_first in local_rows(new, new_rows):
            both = in_old & in_new
            if both.any():
                old_positions = old_part.position(old_rows[both] - old_first)
                new_positions = new_part.position(new_rows[both] - new_first)
                order = np.argsort(old_positions)
                yield Moves(old_part, new_part, old_positions[order], new_positions[order])


def local_rows(stack: Stack, rows: np.ndarray) -> list[tuple[Storage, np.ndarray, np.int32]]:
    """Returns each part of a stack, a mask of the rows that it contains, and its first row."""
    replicated, split = storage(stack)
    is_replicated = rows < stack.replicated
    parts = [(replicated, is_replicated, 0), (split, ~is_replicated, stack.replicated)]
    return [
        (part, is_inside, np.int32(first)) for part, is_inside, first in parts if part is not None
    ]


def carry_rows(
    array: jax.Array, part: Storage, moves: Sequence[Moves], stored: CheckpointReader, name: str
) -> jax.Array:
    """Copies old rows into the array of a part, which holds rows or an optimizer slot.

    Args:
        array: before the first step. It is deleted if rows are copied.
        part: of the new stack.
        moves: of the part's stack.
        stored: the checkpoint of the older run.
        name: of the old array, with {} for the old part: "slots.{}.accumulator".

    Raises:
        InputError: the old array is damaged.
    """
    moves = [move for move in moves if move.new_part.name == part.name]
    if not moves:
        return array
    is_wide = array.ndim == 2
    width = part.width if is_wide else 1
    shares = Shares(array, width)
    array.delete()  # otherwise all tables would be on the devices twice
    for move in moves:
        for first, piece in stored.pieces(name.format(move.old_part.name), max(1, width // LANES)):
            rows = piece.reshape(-1, width)
            begin = first * LANES // width if is_wide else first
            low, high = np.searchsorted(move.old, (begin, begin + len(rows)))
            shares.set(move.new[low:high], rows[move.old[low:high] - begin])
    return shares.array()


class Shares:
    """The share of this process of an array, on the host."""

    def __init__(self, array: jax.Array, width: int):
        self._shape, self._sharding, self._width = array.shape, array.sharding, width
        # One copy of rows that several devices hold.
        self._shares = {_first(s.index): np.array(s.data) for s in array.addressable_shards}

    def set(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Writes rows f[n, width] to `places` i32[n]. Rows of other processes are ignored."""
        for first, share in self._shares.items():
            share_rows = share.reshape(-1, self._width)
            before = first * (LANES if share.ndim == 2 else 1) // self._width
            at = places.astype(np.int64) - before
            is_local = (at >= 0) & (at < len(share_rows))
            share_rows[at[is_local]] = rows[is_local]

    def copy(self) -> "Shares":
        copied = copy.copy(self)
        copied._shares = {first: share.copy() for first, share in self._shares.items()}
        return copied

    def array(self) -> jax.Array:
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self._shares[_first(index)]
        )


def _first(index: tuple[slice, ...] | None) -> int:
    return (index[0].start or 0) if index else 0
