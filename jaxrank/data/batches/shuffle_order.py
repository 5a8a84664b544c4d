"""The order of training examples: a pure function of the seed, whatever machines read them.

The blocks of a split form one stage, or several consecutive stages such as days. The blocks of a
stage are permuted and laid end to end. This line of N examples is cut into `shards` contiguous
pieces. Shard v reads its piece of each stage in order. After the last stage it starts again with
new permutations, without end.

Within a piece, windows of several blocks' length are permuted. A shard's stream is therefore random
block by block over the stage, and example by example within a window. A batch takes an equal share
of every shard's stream, and so mixes `shards` windows.

Every example occurs exactly once in each pass of the streams. Pieces differ by at most one example,
and so do the places where the streams finish a stage. Two stages therefore meet in at most one
batch. All other batches contain one stage, in order.

Where examples are in packs (see `packs`), packs take the place of examples in all of this. Places
still count examples.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrank.errors import InputError

# Purposes of a random stream, so that no two draws share a stream.
_BLOCKS, _WINDOW = 0, 1


class Run(NamedTuple):
    """The places [start, stop) of one permuted window of a shard.

    turn: number of stages that the streams have finished. Equals the epoch if there is one stage.
    """

    turn: int
    window: int
    start: int
    stop: int


class Span(NamedTuple):
    """The examples [start, stop) of a stored block."""

    block: int
    start: int
    stop: int


class Order:
    """The streams of all shards of a split.

    Args:
        block_rows: i64[blocks] examples of each stored block.
        seed: a nonnegative integer.
        shards: number of streams.
        window: number of examples permuted together.
        stages: number of consecutive blocks of each stage. Empty: all blocks form one stage.
        unit: number of consecutive examples that stay together. It divides `block_rows` and all
            places.

    Raises:
        InputError: a shard would have no examples.
    """

    def __init__(
        self,
        block_rows: np.ndarray,
        *,
        seed: int,
        shards: int,
        window: int,
        stages: Sequence[int] = (),
        unit: int = 1,
    ):
        self.rows, self._unit = int(block_rows.sum()), unit
        block_rows, window = block_rows // unit, max(1, window // unit)
        units = int(block_rows.sum())
        if units < shards:
            of_units = "examples" if unit == 1 else f"packs of {unit} examples"
            raise InputError(
                f"data.shards: must be at most the number of {of_units}: found {shards} shards"
                f" and {units:,} {of_units}. Lower data.shards, or prepare more examples."
            )
        if stages and sum(stages) != len(block_rows):
            raise ValueError(f"stages must hold all {len(block_rows)} blocks: found {stages}.")
        self.seed, self.shards, self._window = seed, shards, window
        self._block_rows = block_rows
        ends = np.cumsum(stages or [len(block_rows)])
        self._stages = [slice(*bounds) for bounds in zip([0, *ends[:-1]], ends, strict=True)]
        self._pieces = _cut([int(block_rows[stage].sum()) for stage in self._stages], shards)
        # i64[stages, shards], positions in a stream
        self._ends = np.cumsum(np.diff(self._pieces), axis=0)
        self._lines: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def window_rows(self) -> int:
        """Number of examples that are permuted together."""
        return self._window * self._unit

    def piece(self, shard: int, turn: int = 0) -> tuple[int, int]:
        """Returns the places [start, stop) of a turn's line that a shard reads."""
        start, stop = self._piece(shard, turn)
        return start * self._unit, stop * self._unit

    # All private methods count units.

    def _piece(self, shard: int, turn: int) -> tuple[int, int]:
        start, stop = self._pieces[turn % len(self._stages), shard : shard + 2]
        return int(start), int(stop)

    def first_places(self) -> list[int]:
        """Returns the place at which each stage is first read, in the first pass of the streams."""
        starts = self._ends - np.diff(self._pieces)
        reads = np.diff(self._pieces) > 0
        return (np.where(reads, starts, self.rows).min(axis=1) * self._unit).tolist()

    def _first_window(self, shard: int) -> int:
        # Staggered, because otherwise all shards would need their next window for the same batch.
        return self._window - self._window * shard // self.shards

    def _window_bounds(self, shard: int, turn: int, window: int) -> tuple[int, int]:
        """Returns the places [start, stop) of a window within its piece."""
        start, stop = self._piece(shard, turn)
        first = self._first_window(shard)
        begin = 0 if window == 0 else first + (window - 1) * self._window
        return begin, min(first + window * self._window, stop - start)

    def _turn(self, shard: int, place: int) -> tuple[int, int]:
        """Returns the turn that contains a place of a shard's stream, and the place within its
        piece.
        """
        ends = self._ends[:, shard]
        passes, place = divmod(place, int(ends[-1]))
        # The first stage that ends after `place`, which skips empty pieces.
        stage = int(np.searchsorted(ends, place, side="right"))
        begin = int(ends[stage - 1]) if stage else 0
        return passes * len(ends) + stage, place - begin

    def runs(self, shard: int, start: int, stop: int) -> list[Run]:
        """Splits the places [start, stop) of a shard's stream by window."""
        first, unit = self._first_window(shard), self._unit
        start, stop = start // unit, stop // unit
        runs = []
        while start < stop:
            turn, place = self._turn(shard, start)
            window = 0 if place < first else 1 + (place - first) // self._window
            begin, end = self._window_bounds(shard, turn, window)
            count = min(stop - start, end - place)
            within = place - begin
            runs.append(Run(turn, window, within * unit, (within + count) * unit))
            start += count
        return runs

    def _line(self, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the permuted blocks of a turn and where each ends on the line."""
        lines = self._lines  # replaced but never mutated, so threads need no lock
        if turn not in lines:
            random = np.random.default_rng([self.seed, _BLOCKS, turn])
            stage = self._stages[turn % len(self._stages)]
            blocks = stage.start + random.permutation(stage.stop - stage.start)
            newest = dict(list(lines.items())[-1:])
            lines = newest | {turn: (blocks, np.cumsum(self._block_rows[blocks]))}
            self._lines = lines
        return lines[turn]

    def window(self, shard: int, turn: int, window: int) -> tuple[list[Span], np.ndarray]:
        """Returns the spans of a window in stored order, and its permutation i64[n]."""
        blocks, ends = self._line(turn)
        begin, end = self._window_bounds(shard, turn, window)
        lo, _ = self._piece(shard, turn)
        spans = []
        place = lo + begin
        # The first block that ends after `place`, which skips empty blocks.
        index = int(np.searchsorted(ends, place, side="right"))
        while place < lo + end:
            block_start = int(ends[index] - self._block_rows[blocks[index]])
            stop = min(int(ends[index]), lo + end)
            if stop > place:
                span = (place - block_start, stop - block_start)
                spans.append(Span(int(blocks[index]), *(p * self._unit for p in span)))
            place = max(place, stop)
            index += 1
        random = np.random.default_rng([self.seed, _WINDOW, turn, shard, window])
        permutation = random.permutation(end - begin)
        if self._unit > 1:
            each = permutation[:, None] * self._unit + np.arange(self._unit)
            permutation = each.reshape(-1)
        return spans, permutation


def _cut(rows: Sequence[int], shards: int) -> np.ndarray:
    """Returns the boundaries of the pieces of each stage's line, i64[stages, shards + 1].

    After every stage the numbers of examples that the shards have read differ by at most one.
    """
    ends, previous = [], np.zeros(shards, np.int64)
    for stage_rows, total in zip(rows, np.cumsum(rows), strict=True):
        counts = np.diff(np.arange(shards + 1) * total // shards)
        # fewer examples than shards: give one to some of the shards that are behind
        if (counts < previous).any():
            counts = previous.copy()
            counts[np.flatnonzero(previous == previous.min())[:stage_rows]] += 1
        ends.append(np.cumsum(np.append(0, counts - previous)))
        previous = counts
    return np.stack(ends)
