"""Packs: groups of examples that hold whole requests, and fillers where no request fits.

A pack has as many examples as a group whose lists are packed together, so it never spans two
devices. Packs are filled block by block by a rule that depends on the sizes of the requests alone:
the largest request first, each into the fullest pack that it fits (best fit decreasing, Johnson et
al., SIAM Journal on Computing 3, 1974). Packs are shuffled as examples are without requests.

Fillers have weight 0, no ids and no labels. They change no loss, gradient, metric or statistic.

Of a request with more examples than a pack, the positives are kept first, then others at random.
"""

import collections
import dataclasses
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxrank.data import examples as ex
from jaxrank.data.examples import Examples
from jaxrank.data.ragged import positions
from jaxrank.data.store.split import Split, WrappedSplit
from jaxrank.errors import InputError
from jaxrank.features import MAX_GROUP, PAD
from jaxrank.report import Report

_CUT = 2  # purpose of a random stream; see `shuffle_order`
_FILLER = -1
_LARGER_PACK = (
    " A pack is the largest divisor of batch_size / data.shards up to"
    f" {MAX_GROUP}: a larger one keeps more"
)


class PackedSplit(WrappedSplit):
    """A split of whole requests as packs. Blocks hold the packs of the split's blocks.

    `requests` of its examples are the number of the request within its pack, and PAD in fillers.

    Attributes:
        cut: number of examples that are left out, of requests larger than a pack.
        large: number of such requests.
    """

    def __init__(self, split: Split, pack: int, seed: int):
        self._split = split  # whose requests are measured before anything else is set

        def measured(block: int) -> tuple[int, int, int]:
            sizes = self._sizes(block)
            over = np.maximum(sizes - pack, 0)
            assigned = assign_packs(np.minimum(sizes, pack), pack)
            packs = int(assigned.max(initial=-1)) + 1
            return packs, int(over.sum()), int(np.count_nonzero(over))

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            counts = list(threads.map(measured, range(len(split.block_rows))))
        packs, over, large = np.array(counts, np.int64).reshape(-1, 3).T
        self.cut, self.large = int(over.sum()), int(large.sum())
        super().__init__(split, packs * pack)
        self.pack, self._seed = pack, seed

    @property
    def fillers(self) -> int:
        """Number of fillers."""
        return self.rows - (self._split.rows - self.cut)

    def read_block(self, index: int) -> Examples:
        block = self._split.read_block(index)
        order, requests = self._order(index)
        block = dataclasses.replace(block, truth=None, kept=None)
        filler = np.where(order == _FILLER, block.rows, order)
        packed = ex.gather([block, ex.blank(block, 1)], filler)
        return dataclasses.replace(packed, requests=requests[:, None])

    def list_lengths(self, index: int) -> np.ndarray:
        lengths = self._split.list_lengths(index)
        order, _ = self._order(index)
        return np.where(order[:, None] == _FILLER, 0, lengths.take(order, axis=0, mode="wrap"))

    def requests(self, index: int) -> np.ndarray | None:
        return self._order(index)[1]

    def _sizes(self, index: int) -> np.ndarray:
        requests = self._split.requests(index)
        assert requests is not None
        return np.diff(np.append(ex.request_starts(requests), len(requests)))

    def _order(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the example at each place of the packs of a block, or _FILLER, and its request.

        Both i64[packs * pack].
        """
        sizes = self._sizes(index)
        kept = np.arange(sizes.sum())
        if (sizes > self.pack).any():
            kept = self._cut(index, sizes)
            sizes = np.minimum(sizes, self.pack)
        assigned = assign_packs(sizes, self.pack)
        by_pack = np.argsort(assigned, kind="stable")
        pack, lengths = assigned[by_pack], sizes[by_pack]
        packs = int(pack.max(initial=-1)) + 1
        if packs * self.pack != self.block_rows[index]:
            raise InputError(
                f"{self.path}: block {index} must have the requests that it had at the start: found"
                " others. Prepare the data again."
            )
        # Offsets and numbers of requests within their packs.
        firsts = np.searchsorted(pack, pack, side="left")
        before = np.cumsum(lengths) - lengths
        places = pack * self.pack + before - before[firsts]
        numbers = np.arange(len(pack)) - firsts
        within = positions(lengths)
        targets = np.repeat(places, lengths) + within
        starts = (np.cumsum(sizes) - sizes)[by_pack]
        order = np.full(packs * self.pack, _FILLER, np.int64)
        order[targets] = kept[np.repeat(starts, lengths) + within]
        requests = np.full(packs * self.pack, int(PAD), np.int64)
        requests[targets] = np.repeat(numbers, lengths)
        return order, requests

    def _cut(self, index: int, sizes: np.ndarray) -> np.ndarray:
        """Returns the examples of a block that are kept, ascending."""
        labels = self._split.read_block(index).labels
        is_positive = (np.nan_to_num(labels) > 0).any(axis=1)
        request = np.repeat(np.arange(len(sizes)), sizes)
        drawn = np.random.default_rng([self._seed, _CUT, index]).random(len(request))
        first = np.lexsort((drawn, ~is_positive, request))
        return np.sort(first[positions(sizes) < self.pack])


def pack_requests(split: Split, pack: int, seed: int) -> Split:
    """Returns the packs of a split, or the split itself if it has no requests or is packed.

    Args:
        pack: examples of a pack.
        seed: decides which examples of large requests are left out.
    """
    if split.pack or not len(split.block_rows) or split.requests(0) is None:
        return split
    return PackedSplit(split, pack, seed)


def report_packs(split: Split, report: Report) -> None:
    """Reports the fraction of fillers, and examples that are left out."""
    if not isinstance(split, PackedSplit):
        return
    report(
        f"Requests are packed whole, {split.pack} examples at a time:"
        f" {split.fillers / max(1, split.rows):.2%} of the examples of a batch are fillers"
    )
    if split.cut:
        report(
            f"{split.large:,} requests have more than {split.pack} examples: {split.cut:,} of their"
            " examples are left out, negatives first. No loss is corrected for them, so predictions"
            " of a pointwise loss are too high." + (_LARGER_PACK if split.pack < MAX_GROUP else "")
        )


def assign_packs(sizes: np.ndarray, pack: int) -> np.ndarray:
    """Returns the pack of each request, i64[requests], from 0 without gaps.

    Requests of equal size are interchangeable, so all of one size are assigned together.

    Args:
        sizes: i64[requests], from 1 to `pack`.
        pack: examples of a pack.
    """
    result = np.empty(len(sizes), np.int64)
    by_size = np.argsort(-sizes, kind="stable")
    ordered = sizes[by_size]
    bounds = ex.request_starts(ordered)
    room: dict[int, list[int]] = collections.defaultdict(list)  # free examples -> packs
    packs = 0
    for start, stop in itertools.pairwise([*bounds, len(ordered)]):
        size, waiting = int(ordered[start]), by_size[start:stop]
        for free in [*sorted(f for f in room if f >= size), pack]:
            each = free // size
            count = -(-len(waiting) // each)
            if free == pack:
                chosen = list(range(packs, packs + count))
                packs += count
            else:
                chosen, room[free] = room[free][:count], room[free][count:]
            taken = min(len(waiting), each * len(chosen))
            result[waiting[:taken]] = np.repeat(chosen, each)[:taken]
            waiting = waiting[taken:]
            for i, number in enumerate(chosen):
                used = size * min(each, taken - i * each)
                if used < free:
                    room[free - used].append(number)
            if not len(waiting):
                break
        for free in [f for f in room if not room[f]]:
            del room[free]
    return result
