"""Sizes the room for the packed lists of a run, from the lengths in the store.

A group is consecutive examples of one shard's stream, which depends on the seed alone. The largest
group of a run is therefore known before the first step, for any order of the data. Logs sorted by
time, user or length have groups that a model of independent examples would not predict.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxrank.data.batches import packing
from jaxrank.data.batches.shuffle_order import Order
from jaxrank.data.store.split import Split
from jaxrank.layout import Layout
from jaxrank.report import Report

# Number of examples that are measured one by one. Most of the time is the permutation of the
# windows: 45 ns per example on one core, so at most 48 s, divided among the cores.
_EXAMINED = 2**30
# Additional cost of a window, in examples.
_WINDOW = 2048
_MUCH_PADDING = 0.4  # fraction of the room for lists from which on a hint is reported


class Room(NamedTuple):
    """The largest group of a run.

    largest: ids of each set of lists, i64[sets].
    mean: average ids per group, f64[sets].
    is_exact: True if a group of the run reaches `largest`, False if it is only an upper bound.
    """

    largest: np.ndarray
    mean: np.ndarray
    is_exact: bool


class ListRoom(NamedTuple):
    """Static shape of the packed lists of a run.

    group: number of examples that are packed together.
    capacities: {stack: ids per group}.
    measured: the measurement. None: capacities follow from averages, because lists may be truncated
        or there are none.
    has_requests: True if groups are packs of requests.
    """

    group: int
    capacities: dict[str, int]
    measured: Room | None
    has_requests: bool = False


def list_room(
    split: Split,
    layout: Layout,
    *,
    batch_size: int,
    steps: int,
    seed: int,
    shards: int,
    window_blocks: int,
    order: str,
    list_slack: float,
    on_overflow: str,
    measured: Room | None = None,
) -> ListRoom:
    """Returns the room for the lists of a run's first `steps`.

    Args:
        measured: the measurement of batches with equal settings. None: measures now.
        split, layout, batch_size, steps, seed, shards, window_blocks, order, list_slack,
            on_overflow: see `TrainBatches`.
    """
    group = packing.group_size(batch_size, shards)
    has_requests = split.pack > 0
    stacks = [stack for stack in layout.stacks if stack.lists]
    if stacks and on_overflow == "error":
        if measured is None:
            line = make_order(
                split, seed=seed, shards=shards, window_blocks=window_blocks, order=order
            )
            places = steps * (batch_size // shards)
            sets = [stack.lists for stack in stacks]
            measured = measure(split, line, sets, places=places, group=group)
        rooms = map(packing.aligned, measured.largest.tolist())
        names = [stack.name for stack in stacks]
        return ListRoom(group, dict(zip(names, rooms, strict=True)), measured, has_requests)
    # Lists of one day may be longer than the average over all days.
    statistics = split.day_statistics if order == "days" else [split.statistics]
    capacities = {
        stack.name: max(packing.capacity(stack, s, group, list_slack) for s in statistics)
        for stack in stacks
    }
    return ListRoom(group, capacities, None, has_requests)


def estimated_room(
    layout: Layout,
    statistics: Mapping[str, Any],
    *,
    batch_size: int,
    shards: int,
    list_slack: float,
    has_requests: bool = False,
) -> ListRoom:
    """Returns the room for lists of which only averages are known; see `packing.capacity`."""
    group = packing.group_size(batch_size, shards)
    capacities = {
        stack.name: packing.capacity(stack, statistics, group, list_slack)
        for stack in layout.stacks
        if stack.lists
    }
    return ListRoom(group, capacities, None, has_requests)


def make_order(split: Split, *, seed: int, shards: int, window_blocks: int, order: str) -> Order:
    """Returns the order of the training examples of a split.

    Raises:
        InputError: a shard would have no examples.
    """
    window = max(1, round(window_blocks * split.rows / max(1, len(split.block_rows))))
    stages = [blocks for _, blocks in split.days] if order == "days" else []
    unit = split.pack or 1
    return Order(
        split.block_rows, seed=seed, shards=shards, window=window, stages=stages, unit=unit
    )


def report_room(room: ListRoom, report: Report) -> None:
    """Reports the capacity of packed lists and the share of padding in it."""
    if room.measured is None:
        return
    kind = "largest group of the run" if room.measured.is_exact else "above that of any group"
    for (name, ids), mean in zip(room.capacities.items(), room.measured.mean, strict=True):
        padding = 1 - mean / ids
        hint = ""
        if padding > _MUCH_PADDING:
            hint = ". A larger data.window_blocks mixes longer and shorter lists and needs less"
        report(
            f"Packed lists of {name}: capacity {ids:,} ids per {room.group} examples ({kind}),"
            f" {padding:.0%} of it padding{hint}"
        )


def measure(
    split: Split, order: Order, sets: Sequence[Sequence[int]], *, places: int, group: int
) -> Room:
    """Measures the groups of the first `places` of every shard's stream.

    The result is exact for runs of up to 2**30 examples over all epochs. Longer runs get the total
    of the `group` longest examples of the split, an upper bound for any order.

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
    """Ids per example of each set, read block by block and cached in the smallest integer type."""

    def __init__(self, split: Split, sets: Sequence[Sequence[int]]):
        self._split, self._sets = split, [list(lists) for lists in sets]
        # threads may read a block twice with equal results
        self._blocks: dict[int, np.ndarray] = {}

    def read(self, block: int) -> np.ndarray:
        """Returns the lengths of a block, an integer[n, sets]."""
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
    """Yields the ids of the groups of a stream, i64[groups, sets], several windows at a time."""
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
    """Returns the total of the longest examples of the split."""
    longest: np.ndarray | None = None
    total: np.ndarray | int = 0
    for block in range(len(split.block_rows)):
        read = lengths.read(block)
        total = total + read.sum(axis=0)
        joined = read if longest is None else np.concatenate([longest, read])
        longest = np.sort(joined, axis=0)[-group:]
    assert longest is not None
    # With fewer examples than a group has, each occurs several times in it.
    repeats = -(-group // max(1, len(longest)))
    mean = np.asarray(total) / split.rows * group
    return Room(longest.sum(axis=0) * repeats, mean, is_exact=False)
