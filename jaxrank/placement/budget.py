"""What a placement costs: bytes in the memory of a device, and bytes between devices in a step.

Devices are alike: each has an equal share of the split rows and of the batch, and all of the rest.
What the compiler adds (fusions undone, padding of small arrays, the program itself) is not counted.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxrank.embedding import RowOptimizer
from jaxrank.embedding.storage import Storage, padded_width, storage
from jaxrank.features import Batch
from jaxrank.layout import Layout, Stack, ids_of_device
from jaxrank.report import format_bytes
from jaxrank.runtime.prefetch import AHEAD

_NUMBER = 4  # bytes of a float32 and of an int32


class DensePart(NamedTuple):
    """The dense part of a model, in bytes.

    parameters: of the layers; their gradients take as much.
    state: of the optimizer, and statistics of batch norm.
    activations: outputs of the operations of a forward pass, of one example. They are kept for the
        backward pass; of what the compiler fuses they are more than is kept.
    """

    parameters: int
    state: int
    activations: int


class Bytes(NamedTuple):
    """In the memory of one device.

    tables: its rows, split and replicated, padded as they are stored.
    accumulators: of the row optimizer; and the average of the rows, where one is kept.
    buffers: of the exchange, see `_buffers`; and gradients of all rows of what is updated whole.
    vectors: what its ids read, the gradients of that, and their sums for each different id.
    dense: parameters, gradients and the optimizer's state.
    activations: of its share of a batch.
    batches: of the execution that runs, of the next one, and of those that are put there ahead.
    """

    tables: int
    accumulators: int
    buffers: int
    vectors: int
    dense: int
    activations: int
    batches: int

    @property
    def total(self) -> int:
        return sum(self)


class Partition(NamedTuple):
    """The mesh and the exchange. capacities: ids of a buffer, of each stack with split rows."""

    replicas: int
    shards: int
    capacities: Mapping[str, int]

    @property
    def devices(self) -> int:
        return self.replicas * self.shards


def device_bytes(
    layout: Layout,
    row_optimizer: RowOptimizer,
    partition: Partition,
    batch: Batch,
    dense: DensePart,
    *,
    steps_per_execution: int,
    updates_whole_tables: bool,
    averages: bool = False,
) -> Bytes:
    """The bytes in the memory of one device.

    Args:
        batch: of one step over all devices; only the shapes matter.
        updates_whole_tables: whether a step changes all rows; see `embedding.l2_scope`.
        averages: whether an average of the weights is kept; see `step.averaged`.
    """
    tables = accumulators = buffers = vectors = 0
    ids = ids_of_device(layout, batch, partition.devices)
    share = batch.labels.shape[0] // partition.devices
    for stack in layout.stacks:
        for part in storage(stack):
            if part is None:
                continue
            rows = part.rows // partition.shards if part.is_split else part.rows
            tables += rows * part.width * _NUMBER
            accumulators += rows * (
                _slot_bytes(row_optimizer, part) + averages * part.width * _NUMBER
            )
            if updates_whole_tables or not part.is_split:
                buffers += rows * (part.dim + 1) * _NUMBER  # and how often each is read
        buffers += _buffers(stack, partition)
        combined = 2 * share * len(stack.lists) * stack.dim
        vectors += (3 * ids[stack.name] * stack.dim + combined) * _NUMBER
    numbers = sum(array.size for array in jax.tree.leaves(batch))
    return Bytes(
        tables=tables,
        accumulators=accumulators,
        buffers=buffers,
        vectors=vectors,
        dense=(2 + averages) * dense.parameters + dense.state,
        activations=dense.activations * share,
        batches=(2 + AHEAD) * steps_per_execution * numbers * _NUMBER // partition.devices,
    )


def row_bytes(row_optimizer: RowOptimizer, dim: int) -> int:
    """Bytes of a row with its accumulators."""
    width = padded_width(dim)
    return width * _NUMBER + _slot_bytes(row_optimizer, Storage("", dim, width, 0, False))


def _slot_bytes(row_optimizer: RowOptimizer, part: Storage) -> int:  # of one row
    return sum((part.width if wide else 1) * _NUMBER for wide, _ in row_optimizer.slots.values())


def _places(stack: Stack, partition: Partition) -> int:
    """Ids in all buffers of a device in one direction; 0 where nothing travels."""
    return partition.shards * partition.capacities.get(stack.name, 0)


def _buffers(stack: Stack, partition: Partition) -> int:
    """Bytes of the buffers of one stack in an exchange, on one device.

    These have places for all owners, each of an id, of a vector and of a gradient, sent and
    received; and at the owner, for each place and replica, of an id and a gradient gathered, and of
    a gradient summed.
    """
    sent_and_received = 2 * (1 + 2 * stack.dim)
    at_owner = partition.replicas * (1 + 2 * stack.dim)
    return _places(stack, partition) * (sent_and_received + at_owner) * _NUMBER


def exchanged(layout: Layout, partition: Partition, dense: DensePart) -> int:
    """Bytes that one device sends in a step, in one round of the exchange.

    To the other owners an id and a gradient for each place of the buffers, and to those that asked
    a vector; to the other replicas an id and a gradient for each place. What is summed over all
    devices, the gradients of the model and of the replicated rows (with a count of reads for each),
    moves twice, but for the part that is the device's own.
    """
    others = (partition.shards - 1) / partition.shards
    count = 0.0
    summed = dense.parameters
    for stack in layout.stacks:
        places = _places(stack, partition) * _NUMBER
        count += others * places * (1 + 2 * stack.dim)
        count += (partition.replicas - 1) * places * (1 + stack.dim)
        summed += stack.replicated * (stack.dim + 1) * _NUMBER
    return round(count + 2 * (partition.devices - 1) / partition.devices * summed)


def shortage(needed: Bytes, memory: int) -> str:
    """Says by how much the bytes of a device do not fit into its memory; empty where they do."""
    over = needed.total - memory
    if over <= 0:
        return ""
    return (
        f"a device must not need more than its memory of {format_bytes(memory)}: found"
        f" {format_bytes(needed.total)}, {format_bytes(over)} too much."
    )
