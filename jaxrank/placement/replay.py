"""Replays batches through a placement in NumPy and counts the ids that each device serves per step.

It uses only the layout and the storage group of each row, and no estimate of the planner.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jaxrank.data.examples import Examples
from jaxrank.embedding.storage import GROUPS, group
from jaxrank.features import PAD
from jaxrank.layout import Layout, Stack, ToStack
from jaxrank.placement.traffic import lists_read


class Replay(NamedTuple):
    """The cost of the batches. A row counts once per device that reads it in a step.

    batches: number of batches.
    lookups: f64[devices], mean number of rows that each device serves per step.
    imbalance: rows served by the busiest device over the mean of all, averaged over the batches.
    largest_imbalance: the same in the worst batch.
    fullest: {stack: ids in the fullest buffer over the mean of all, averaged over the batches}.
    rounds: {stack: mean number of rounds of the exchange per step}. It is the number that the
        fullest buffer needs. With more than one round, the exchange may need more.
    buffer_use: ids sent over places in the buffers, with padding and all rounds. NaN if nothing is
        sent.
    """

    batches: int
    lookups: np.ndarray
    imbalance: float
    largest_imbalance: float
    fullest: dict[str, float]
    rounds: dict[str, float]
    buffer_use: float


def replay(
    layout: Layout,
    batches: Iterable[Examples],
    *,
    replicas: int,
    shards: int,
    capacities: Mapping[str, int],
) -> Replay:
    """Replays batches. Every device takes an equal share of each batch, in order.

    Args:
        layout: gives the replicated rows and the order of the others.
        batches: only their ids and lists are read.
        replicas, shards: of the mesh.
        capacities: {stack whose rows travel: ids per buffer}.
    """
    served: list[np.ndarray] = []
    fullest: dict[str, list[float]] = {name: [] for name in capacities}
    rounds: dict[str, list[int]] = {name: [] for name in capacities}
    sent = places = 0
    for batch in batches:
        served.append(np.zeros((replicas, shards), np.int64))
        for stack in layout.stacks:
            counts = buckets(layout, stack, batch, replicas, shards)
            served[-1] += counts.sum(axis=1)
            if stack.name not in capacities:
                continue
            room = capacities[stack.name]
            rounds[stack.name].append(max(1, math.ceil(int(counts.max()) / room)))
            fullest[stack.name].append(_largest_over_mean(counts))
            sent += int(counts.sum())
            places += counts.size * room * rounds[stack.name][-1]
    imbalances = [_largest_over_mean(rows_served) for rows_served in served]
    return Replay(
        batches=len(served),
        lookups=np.mean(served, axis=0).reshape(-1),
        imbalance=float(np.mean(imbalances)),
        largest_imbalance=max(imbalances),
        fullest={name: float(np.mean(served_ids)) for name, served_ids in fullest.items()},
        rounds={name: float(np.mean(served_ids)) for name, served_ids in rounds.items()},
        buffer_use=sent / places if places else math.nan,
    )


def _largest_over_mean(counts: np.ndarray) -> float:
    mean = float(counts.mean())
    return float(counts.max()) / mean if mean else 1.0


def buckets(
    layout: Layout, stack: Stack, batch: Examples, replicas: int, shards: int
) -> np.ndarray:
    """Counts the distinct split rows that each device requests from each owner.

    Returns i64[replicas, shards, shards].
    """
    counts = np.empty((replicas * shards, shards), np.int64)
    for device, rows in enumerate(_rows_of_devices(layout, stack, batch, replicas * shards)):
        rows.sort()
        rows = rows[np.searchsorted(rows, stack.replicated) : np.searchsorted(rows, PAD)]
        different = rows[np.flatnonzero(np.diff(rows, prepend=np.int32(-1)))]
        owner = group(different - np.int32(stack.replicated)) * shards // GROUPS
        counts[device] = np.bincount(owner, minlength=shards)
    return counts.reshape(replicas, shards, shards)


def _rows_of_devices(
    layout: Layout, stack: Stack, batch: Examples, devices: int
) -> Iterator[np.ndarray]:
    """Yields the stack rows i32[..] that each device's share reads, with duplicates and PAD."""
    to_stack = ToStack.from_stack(stack)
    share = batch.rows // devices
    column_tables = np.asarray(stack.column_tables, np.intp)
    every = lists_read(batch, layout.schema)
    tables = (*stack.list_tables, *stack.sequence_tables)
    lists = [every[i] for i in (*stack.lists, *stack.sequences)]
    ends = [np.cumsum(column.lengths.reshape(devices, -1).sum(axis=1)) for column in lists]
    for device in range(devices):
        ids = batch.ids[device * share : (device + 1) * share].take(stack.columns, axis=1)
        parts = [to_stack(ids, column_tables).reshape(-1)]
        for column, table, end in zip(lists, tables, ends, strict=True):
            begin = end[device - 1] if device else 0
            parts.append(to_stack(column.values[begin : end[device]], table))
        yield np.concatenate(parts)
