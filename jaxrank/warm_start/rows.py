"""Rows of an older run's tables, and what their optimizer knows, as the first values of new ones.

Old arrays are read from the checkpoint piece by piece and dealt out to where their rows lie now,
whatever the placement and the mesh of either run: a process holds its own share of one new array on
the host, and one piece.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.embedding.storage import LANES, Storage, storage
from jaxrank.features import PAD
from jaxrank.layout import Layout, Stack, ToStack


class Moves(NamedTuple):
    """Rows that lie in one part of an old stack and go to one part of the new one.

    old, new: i32[n] where they lie in the arrays of these parts; `old` rises.
    """

    old_part: Storage
    new_part: Storage
    old: np.ndarray
    new: np.ndarray


def plan_moves(old: Layout, new: Layout, rows: Mapping[str, np.ndarray]) -> dict[str, list[Moves]]:
    """What goes where, by stack.

    Args:
        rows: {table: i32[rows of the old table] the row in the new one, or PAD}; a table that is
            not there, or has another dimension now, stays as it is.
    """
    found = {}
    before = {stack.name: stack for stack in old.stacks}
    for stack in new.stacks:
        if stack.name in before:
            pairs = _pairs(before[stack.name], stack, rows)
            found[stack.name] = list(_moves(before[stack.name], stack, *pairs))
    return found


def _pairs(old: Stack, new: Stack, rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the old stack and of the new one, i32[n] each, that stand for the same value."""
    of, to = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)]
    of_old, to_new = ToStack.of(old), ToStack.of(new)
    for name in set(old.tables) & set(new.tables) & set(rows):
        row = rows[name]
        own = np.flatnonzero(row != PAD).astype(np.int32)
        of.append(of_old(own, old.tables.index(name)))
        to.append(to_new(row[own], new.tables.index(name)))
    return np.concatenate(of), np.concatenate(to)


def _moves(old: Stack, new: Stack, of: np.ndarray, to: np.ndarray) -> Iterator[Moves]:
    for old_part, of_here, old_first in _parts(old, of):
        for new_part, to_here, new_first in _parts(new, to):
            both = of_here & to_here
            if both.any():
                lies = old_part.position(of[both] - old_first)
                goes = new_part.position(to[both] - new_first)
                order = np.argsort(lies)
                yield Moves(old_part, new_part, lies[order], goes[order])


def _parts(stack: Stack, rows: np.ndarray) -> list[tuple[Storage, np.ndarray, np.int32]]:
    """Each part of a stack, which of some rows lie in it, and its first row."""
    replicated, split = storage(stack)
    is_replicated = rows < stack.replicated
    parts = [(replicated, is_replicated, 0), (split, ~is_replicated, stack.replicated)]
    return [(part, here, np.int32(first)) for part, here, first in parts if part is not None]


def carry_rows(
    array: jax.Array, part: Storage, moves: Sequence[Moves], stored: CheckpointReader, name: str
) -> jax.Array:
    """The array of a part, of rows or of a slot, with what was carried over.

    Args:
        array: before the first step; it is deleted where another takes its place.
        moves: of the part's stack.
        name: of the old array, with {} for the old part: "slots.{}.accumulator".

    Raises:
        InputError: the old array is damaged.
    """
    moves = [move for move in moves if move.new_part.name == part.name]
    if not moves:
        return array
    is_wide = array.ndim == 2
    width = part.width if is_wide else 1
    shares = _Shares(array, width)
    array.delete()  # or all tables would be on the devices twice
    for move in moves:
        for first, piece in stored.pieces(name.format(move.old_part.name), max(1, width // LANES)):
            rows = piece.reshape(-1, width)
            begin = first * LANES // width if is_wide else first
            low, high = np.searchsorted(move.old, (begin, begin + len(rows)))
            shares.set(move.new[low:high], rows[move.old[low:high] - begin])
    return shares.array()


class _Shares:
    """What this process has of an array, on the host."""

    def __init__(self, array: jax.Array, width: int):
        self._shape, self._sharding, self._width = array.shape, array.sharding, width
        # Of devices that hold the same rows, one.
        self._shares = {_first(s.index): np.array(s.data) for s in array.addressable_shards}

    def set(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Rows f[n, width] become those at `places` i32[n], where they are this process's."""
        for first, share in self._shares.items():
            own = share.reshape(-1, self._width)
            before = first * (LANES if share.ndim == 2 else 1) // self._width
            at = places.astype(np.int64) - before
            here = (at >= 0) & (at < len(own))
            own[at[here]] = rows[here]

    def array(self) -> jax.Array:
        return jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: self._shares[_first(index)]
        )


def _first(index: tuple[slice, ...] | None) -> int:
    return (index[0].start or 0) if index else 0
