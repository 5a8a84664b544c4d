"""The order of training examples: a pure function of the seed, not of the machines that read.

In epoch e the blocks of a split are permuted and laid end to end. This line of N examples is cut
into `shards` contiguous pieces; shard v reads its piece of epoch 0, then of epoch 1, and so on
without end. Within a piece, windows of some blocks' length are permuted, so a shard's stream is
random over the split block by block and within a window example by example. A batch takes an equal
share of every shard's stream, and so mixes `shards` windows.

Every example occurs exactly once in each epoch of the shards' streams.
"""

from typing import NamedTuple

import numpy as np

from jaxrank.errors import InputError

# Purposes of a random stream, so that no two draws share one.
_BLOCKS, _WINDOW = 0, 1


class Run(NamedTuple):
    """The places [start, stop) of one permuted window of a shard."""

    epoch: int
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
        seed: not negative.
        shards: number of streams.
        window: examples permuted together.

    Raises:
        InputError: a shard would have no examples.
    """

    def __init__(self, block_rows: np.ndarray, *, seed: int, shards: int, window: int):
        self.rows = int(block_rows.sum())
        if self.rows < shards:
            raise InputError(
                f"data.shards must be at most the number of examples: got {shards} shards"
                f" and {self.rows} examples."
            )
        self.seed, self.shards, self.window_rows = seed, shards, window
        self._block_rows = block_rows
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def piece(self, shard: int) -> tuple[int, int]:
        """The places [start, stop) of an epoch's line that a shard reads."""
        return shard * self.rows // self.shards, (shard + 1) * self.rows // self.shards

    def _first_window(self, shard: int) -> int:
        # Staggered, or all shards would need their next window for the same batch.
        return self.window_rows - self.window_rows * shard // self.shards

    def _window_bounds(self, shard: int, window: int) -> tuple[int, int]:
        """The places [start, stop) of a window within its piece."""
        start, stop = self.piece(shard)
        first = self._first_window(shard)
        begin = 0 if window == 0 else first + (window - 1) * self.window_rows
        return begin, min(first + window * self.window_rows, stop - start)

    def runs(self, shard: int, start: int, stop: int) -> list[Run]:
        """The places [start, stop) of a shard's stream, by window."""
        lo, hi = self.piece(shard)
        first = self._first_window(shard)
        found = []
        while start < stop:
            epoch, place = divmod(start, hi - lo)
            window = 0 if place < first else 1 + (place - first) // self.window_rows
            begin, end = self._window_bounds(shard, window)
            count = min(stop - start, end - place)
            found.append(Run(epoch, window, place - begin, place - begin + count))
            start += count
        return found

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The permuted blocks of an epoch and where each ends on the line."""
        epochs = self._epochs  # replaced and never changed, so threads need no lock
        if epoch not in epochs:
            random = np.random.default_rng([self.seed, _BLOCKS, epoch])
            blocks = random.permutation(len(self._block_rows))
            newest = dict(list(epochs.items())[-1:])
            epochs = newest | {epoch: (blocks, np.cumsum(self._block_rows[blocks]))}
            self._epochs = epochs
        return epochs[epoch]

    def window(self, shard: int, epoch: int, window: int) -> tuple[list[Span], np.ndarray]:
        """What a window holds, in stored order, and the permutation i64[n] of it."""
        blocks, ends = self._epoch(epoch)
        begin, end = self._window_bounds(shard, window)
        lo, _ = self.piece(shard)
        spans = []
        place = lo + begin
        # The first block that ends behind `place`: blocks without examples are passed over.
        index = int(np.searchsorted(ends, place, side="right"))
        while place < lo + end:
            block_start = int(ends[index] - self._block_rows[blocks[index]])
            stop = min(int(ends[index]), lo + end)
            if stop > place:
                spans.append(Span(int(blocks[index]), place - block_start, stop - block_start))
            place = max(place, stop)
            index += 1
        random = np.random.default_rng([self.seed, _WINDOW, epoch, shard, window])
        return spans, random.permutation(end - begin)
