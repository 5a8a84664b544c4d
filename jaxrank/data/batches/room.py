"""The room that the packed lists of a run need, from the lengths that the store holds.

A group is consecutive examples of one shard's stream, which depends on the seed alone. The largest
group of a run is therefore known before the first step, whatever the order of the data: a log
sorted by time, user or length has groups that no distribution of independent examples allows for.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from jaxrank.data.batches.shuffle_order import Order
from jaxrank.data.store.split import Split

# Examples that are looked at one by one. Most of the time is the permutation of the windows: 45 ns
# per example on one core, so 48 s at most, shared by the cores.
_EXAMINED = 2**30
# What a window costs besides, in examples.
_WINDOW = 2048


class Room(NamedTuple):
    """The largest group of a run.

    largest: ids of each set of lists, i64[sets].
    mean: ids of a group on average, f64[sets].
    is_exact: whether a group of the run is as large; else none is larger.
    """

    largest: np.ndarray
    mean: np.ndarray
    is_exact: bool


def measure(
    split: Split, order: Order, sets: Sequence[Sequence[int]], *, places: int, group: int
) -> Room:
    """Measures the groups of the first `places` of every shard's stream.

    The result is exact for runs of up to 2**30 examples, all epochs together. Longer runs get the
    total of the `group` longest examples of the split, which no order can exceed.

    Args:
        sets: the lists that are packed together, as numbers of the schema's lists.
        places: of each stream, a multiple of `group`.
        group: examples of a group.
    """
    lengths = _Lengths(split, sets)
    windows = order.shards * places / min(order.window_rows, order.rows / order.shards)
    if order.shards * places + _WINDOW * windows > _EXAMINED:
        return _bound(split, lengths, group)

    def shard(number: int) -> tuple[np.ndarray, np.ndarray]:
        largest = np.zeros(len(sets), np.int64)
        total = np.zeros(len(sets), np.int64)
        for totals in _groups(order, lengths, number, places, group):
            np.maximum(largest, totals.max(axis=0), out=largest)
            total += totals.sum(axis=0)
        return largest, total

    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(min(order.shards, cores)) as threads:
        shards = list(threads.map(shard, range(order.shards)))
    groups = order.shards * (places // group)
    return Room(
        largest=np.max([largest for largest, _ in shards], axis=0),
        mean=np.sum([total for _, total in shards], axis=0) / groups,
        is_exact=True,
    )


class _Lengths:
    """Ids per example of each set, a block at a time, kept in as few bytes as hold them."""

    def __init__(self, split: Split, sets: Sequence[Sequence[int]]):
        self._split, self._sets = split, [list(lists) for lists in sets]
        self._blocks: dict[int, np.ndarray] = {}  # threads may read a block twice, and get the same

    def read(self, block: int) -> np.ndarray:
        """The lengths of a block, an integer[n, sets]."""
        lengths = self._split.list_lengths(block)
        totals = [lengths[:, lists].sum(axis=1, dtype=np.int64) for lists in self._sets]
        return np.stack(totals, axis=1)

    def kept(self, block: int) -> np.ndarray:
        if block not in self._blocks:
            totals = self.read(block)
            self._blocks[block] = totals.astype(np.min_scalar_type(totals.max(initial=0)))
        return self._blocks[block]


def _groups(
    order: Order, lengths: _Lengths, shard: int, places: int, group: int
) -> Iterator[np.ndarray]:
    """Ids of the groups of a stream, i64[groups, sets], some windows at a time."""
    pending: list[np.ndarray] = []
    count = 0
    for run in order.runs(shard, 0, places):
        spans, permutation = order.window(shard, run.turn, run.window)
        stored = np.concatenate([lengths.kept(b)[start:stop] for b, start, stop in spans])
        pending.append(stored.take(permutation[run.start : run.stop], axis=0))
        count += len(pending[-1])
        if count >= group:
            joined = np.concatenate(pending)
            whole = count // group * group
            sums = joined[:whole].reshape(whole // group, group, -1)
            yield sums.sum(axis=1, dtype=np.int64)
            pending, count = [joined[whole:]], count - whole


def _bound(split: Split, lengths: _Lengths, group: int) -> Room:
    """The total of the longest examples of the split."""
    longest: np.ndarray | None = None
    total: np.ndarray | int = 0
    for block in range(len(split.block_rows)):
        read = lengths.read(block)
        total = total + read.sum(axis=0)
        joined = read if longest is None else np.concatenate([longest, read])
        longest = np.sort(joined, axis=0)[-group:]
    assert longest is not None
    # Of fewer examples than a group each occurs several times in it.
    repeats = -(-group // max(1, len(longest)))
    mean = np.asarray(total) / split.rows * group
    return Room(longest.sum(axis=0) * repeats, mean, is_exact=False)
