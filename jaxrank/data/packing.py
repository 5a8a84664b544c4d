"""Ragged lists of consecutive examples -> `Lists` of static shape, and what that shape must be."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrank.data.stack_rows import StackRows
from jaxrank.errors import InputError
from jaxrank.features import MAX_GROUP, PAD, Layout, Lists, Stack

# A capacity is a multiple of this: the width of a vector register row on TPU.
_ALIGNMENT = 128


def check_shards(batch_size: int, shards: int) -> None:
    """Raises InputError unless a batch can be taken from `shards` streams in equal shares."""
    for field, value in (("batch_size", batch_size), ("data.shards", shards)):
        if value < 1:
            raise InputError(f"{field}: must be 1 or more: found {value!r}.")
    if batch_size % shards:
        raise InputError(
            f"batch_size must be a multiple of data.shards: got batch_size={batch_size},"
            f" data.shards={shards}."
        )


def group_size(batch_size: int, shards: int) -> int:
    """How many consecutive examples of a training batch are packed together.

    The most, up to MAX_GROUP, that divide one of the `shards` equal shares of the batch; so
    whatever the number of devices and processes. Large groups need less room for padding.

    Raises:
        InputError: the shares are not equal.
    """
    check_shards(batch_size, shards)
    share = batch_size // shards
    return next(size for size in range(min(share, MAX_GROUP), 0, -1) if share % size == 0)


def _aligned(count: float) -> int:
    return _ALIGNMENT * max(1, math.ceil(count / _ALIGNMENT))


def capacity(stack: Stack, statistics: Mapping[str, Any], group: int, slack: float = 8.0) -> int:
    """Ids to make room for in a group of `group` shuffled examples.

    The mean of a group's total and `slack` standard deviations, from `list_lengths` of a split's
    statistics (`mean [lists]`, `covariance [lists, lists]`, `max_per_example [lists]`); never
    more than a group can have.
    """
    lengths = statistics["list_lengths"]
    lists = list(stack.lists)
    mean = float(np.asarray(lengths["mean"], np.float64)[lists].sum())
    covariance = np.asarray(lengths["covariance"], np.float64)
    covariance = covariance.reshape(len(lengths["mean"]), -1)
    deviation = math.sqrt(max(0.0, float(covariance[np.ix_(lists, lists)].sum())))
    most = int(np.asarray(lengths["max_per_example"], np.int64)[lists].sum())
    return _aligned(min(group * mean + slack * math.sqrt(group) * deviation, group * most))


def bound(stack: Stack, statistics: Mapping[str, Any]) -> int:
    """Ids that no run of up to MAX_GROUP stored examples exceeds, for passes in stored order.

    From `list_lengths` of a split's statistics: `max_total_per_run [lists]`, the largest sum over
    such a run wherever it begins, and `max_per_example [lists]`.
    """
    lengths, lists = statistics["list_lengths"], list(stack.lists)
    by_run = int(np.asarray(lengths["max_total_per_run"], np.int64)[lists].sum())
    by_example = int(np.asarray(lengths["max_per_example"], np.int64)[lists].sum())
    return _aligned(min(by_run, MAX_GROUP * by_example))


class Packer:
    """Packs the combined lists of batches of one layout; those under "none" are left out.

    An id that is PAD takes a place and counts in its list's norm; its vector is zero.

    Args:
        layout: of the schema whose lists these are.
        group: examples packed together.
        capacities: ids of a group by stack, for each stack that has lists.
        overflow: "error", or "truncate": the longest lists of the group lose their last ids, one
            at a time, until the rest fits.
    """

    def __init__(
        self, layout: Layout, group: int, capacities: Mapping[str, int], overflow: str = "error"
    ):
        self._layout, self._group, self._overflow = layout, group, overflow
        self._capacities = dict(capacities)
        names = [f.name for f in layout.schema.lists]
        self._rows = {
            stack.name: StackRows(
                layout, stack, [names[i] for i in stack.lists], stack.list_tables, group
            )
            for stack in layout.stacks
            if stack.lists
        }

    def __call__(
        self, lengths: np.ndarray, values: np.ndarray, weights: np.ndarray | None
    ) -> tuple[dict[str, Lists], np.ndarray]:
        """The lists of n examples by stack, and how many ids were cut, i32[groups, lists].

        Args:
            lengths: i32[n, lists]; the group divides n.
            values: i32[total] rows of each list's table, or PAD, example by example and within an
                example list by list.
            weights: f32[total], or None where no list is weighted. Those of a list that is not
                weighted are not read.

        Raises:
            InputError: a group does not fit and `overflow` is "error"; an id is no row of its
                table.
        """
        group = self._group
        groups = len(lengths) // group
        dropped = np.zeros((groups, lengths.shape[1]), np.int32)
        packed = {}
        for stack in self._layout.stacks:
            if not stack.lists:
                continue
            part, ids, id_weights = select(stack.lists, lengths, values, weights)
            id_weights = _own_weights(self._layout, stack, part, id_weights)
            room = self._capacities[stack.name]
            totals = part.reshape(groups, -1).sum(axis=1, dtype=np.int64)
            if (totals > room).any():
                if self._overflow != "truncate":
                    raise InputError(_overflow_message(self._layout, stack, part, group, room))
                kept = _truncated(part.reshape(groups, -1), room).reshape(part.shape)
                cut = (part - kept).reshape(groups, group, -1).sum(axis=1, dtype=np.int32)
                dropped[:, list(stack.lists)] = cut
                keep = _first_of_each(part, kept)
                ids, part = ids[keep], kept
                id_weights = None if id_weights is None else id_weights[keep]
            packed[stack.name] = self._packed(stack, part, ids, id_weights, room)
        return packed, dropped

    def _packed(
        self,
        stack: Stack,
        lengths: np.ndarray,
        ids: np.ndarray,
        weights: np.ndarray | None,
        room: int,
    ) -> Lists:
        inverse = _inverse_norms(self._layout, stack, lengths, weights)
        by_group = lengths.reshape(len(lengths) // self._group, -1)  # i32[groups, lists of a group]
        inverse = inverse.reshape(by_group.shape)
        shape = (len(by_group), room)
        out = Lists(
            ids=np.full(shape, PAD, np.int32),
            segments=np.full(shape, PAD, np.int32),
            weights=np.zeros(shape, np.float32),
        )
        numbers = np.arange(by_group.shape[1])
        stop = 0
        for g, group_lengths in enumerate(by_group):
            # The list that each id belongs to, then all by it and straight to its place. A group
            # stays in the cache: 1.2 times as fast as one np.repeat for all of them.
            lists = np.repeat(numbers, group_lengths)
            total = len(lists)
            mine = slice(stop, stop + total)
            self._rows[stack.name].values(ids[mine], lists, g * self._group, out.ids[g, :total])
            out.segments[g, :total] = lists
            factors = out.weights[g, :total]
            inverse[g].take(lists, out=factors, mode="clip")  # "raise" would make a copy first
            if weights is not None:
                factors *= weights[mine]
            stop += total
        return out


def select(
    lists: Sequence[int], lengths: np.ndarray, values: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Lengths i32[n, len(lists)], ids and weights of these lists only; `lists` rises."""
    if len(lists) == lengths.shape[1]:
        return lengths, values, weights
    # An index for each value that is wanted, or a mask of all values: 250 and 1070 us where 1 of 8
    # lists is wanted (64 values an example), 1280 and 1300 us where 6 are.
    few = 2 * len(lists) <= lengths.shape[1]
    where = _index_of(lists, lengths) if few else _mask_of(lists, lengths)
    return lengths.take(lists, axis=1), values[where], None if weights is None else weights[where]


def _index_of(lists: Sequence[int], lengths: np.ndarray) -> np.ndarray:  # i64[values wanted]
    flat = lengths.reshape(-1)
    starts = (np.cumsum(flat, dtype=np.int64) - flat).reshape(lengths.shape)
    wanted = lengths.take(lists, axis=1).reshape(-1)
    new_starts = np.cumsum(wanted, dtype=np.int64) - wanted
    index = np.repeat(starts.take(lists, axis=1).reshape(-1) - new_starts, wanted)
    index += np.arange(len(index))
    return index


def _mask_of(lists: Sequence[int], lengths: np.ndarray) -> np.ndarray:  # bool[values]
    chosen = np.zeros(lengths.shape[1], bool)
    chosen[list(lists)] = True
    return np.repeat(np.tile(chosen, len(lengths)), lengths.reshape(-1))


def _own_weights(
    layout: Layout, stack: Stack, lengths: np.ndarray, weights: np.ndarray | None
) -> np.ndarray | None:
    """f32[total], 1 in lists that are not weighted; None where no list of the stack is."""
    weighted = np.array([layout.schema.lists[i].weighted for i in stack.lists])
    if weights is None or not weighted.any():
        return None
    if weighted.all():
        return weights
    mask = np.repeat(np.tile(weighted, len(lengths)), lengths.reshape(-1))
    return np.where(mask, weights, np.float32(1))


def _inverse_norms(
    layout: Layout, stack: Stack, lengths: np.ndarray, weights: np.ndarray | None
) -> np.ndarray:
    """One over the combiner's norm of each list, f32[n * lists]; 0 where the norm is 0."""
    combiners = np.array([layout.schema.lists[i].combiner for i in stack.lists])
    norms = np.ones(lengths.shape, np.float32 if weights is None else np.float64)
    for combiner, power in (("mean", 1), ("sqrtn", 2)):
        columns = combiners == combiner
        if not columns.any():
            continue
        if weights is None:
            sums = lengths
        else:
            sums = _sums(weights.astype(np.float64) ** power, lengths.reshape(-1))
            sums = sums.reshape(lengths.shape)
        norms[:, columns] = sums[:, columns] if power == 1 else np.sqrt(sums[:, columns])
    inverse = np.zeros(norms.shape, np.float32)
    np.divide(1, norms, out=inverse, where=norms > 0, casting="same_kind")
    return inverse.reshape(-1)


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The sum of each list, f64[lists of all examples], 0 of an empty one."""
    sums = np.zeros(len(lengths))
    filled = np.flatnonzero(lengths)
    if len(filled):
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        sums[filled] = np.add.reduceat(values, starts[filled])
    return sums


def _truncated(lengths: np.ndarray, room: int) -> np.ndarray:
    """i32[groups, lists of a group] -> the same, cut so that each row's sum is at most `room`.

    What remains when the longest list loses one id at a time, the later of equally long ones
    first: all are cut to one level, and the first few keep one more.
    """
    kept = lengths.copy()
    for row in kept:
        if row.sum(dtype=np.int64) <= room:
            continue
        level, above = 0, int(row.max())  # the largest level that fits lies in [level, above)
        while above - level > 1:
            middle = (level + above) // 2
            fits = np.minimum(row, middle).sum(dtype=np.int64) <= room
            level, above = (middle, above) if fits else (level, middle)
        longer = np.flatnonzero(row > level)
        np.minimum(row, level, out=row)
        row[longer[: room - int(row.sum(dtype=np.int64))]] += 1
    return kept


def _first_of_each(lengths: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """bool[total]: whether an id is among the first `kept` of its list."""
    flat = lengths.reshape(-1)
    starts = np.cumsum(flat, dtype=np.int64) - flat
    position = np.arange(int(flat.sum(dtype=np.int64))) - np.repeat(starts, flat)
    return position < np.repeat(kept.reshape(-1), flat)


def _overflow_message(
    layout: Layout, stack: Stack, lengths: np.ndarray, group: int, room: int
) -> str:
    by_list = lengths.reshape(len(lengths) // group, group, -1).sum(axis=1, dtype=np.int64)
    worst = by_list[by_list.sum(axis=1).argmax()]
    order = np.argsort(-worst, kind="stable")[:3]
    names = [f"{layout.schema.lists[stack.lists[i]].name} ({worst[i]} ids)" for i in order]
    return (
        f"The lists of stack {stack.name} must fit: {group} examples packed together have"
        f" {worst.sum()} ids and there is room for {room}. Longest: {', '.join(names)}."
        " Set data.list_slack larger, or data.on_overflow='truncate' to cut the longest lists."
    )
