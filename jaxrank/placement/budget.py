"""Cost of a placement: bytes in the memory of a device, and bytes sent between devices in a step.

Devices are alike: each has an equal share of the split rows and of the batch, and all other arrays
whole. What the compiler adds is not counted: fusions that it undoes, padding of small arrays, and
the program itself.
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

    parameters: of the layers. Their gradients take the same number of bytes.
    state: optimizer state and statistics of batch norm.
    activations: outputs of the operations of a forward pass, per example. The backward pass needs
        them. The estimate is high, because outputs that the compiler fuses are not stored.
    """

    parameters: int
    state: int
    activations: int


class Bytes(NamedTuple):
    """Bytes in the memory of one device, by kind.

    tables: its rows, split and replicated, padded as they are stored.
    accumulators: state of the row optimizer, and the average of the rows if one is kept.
    buffers: buffers of the exchange (see `_buffers`), and gradients of the parts whose rows all
        change in a step.
    vectors: vectors that its ids read, their gradients, and the sums of each distinct id.
    dense: parameters, gradients and optimizer state.
    activations: of its share of a batch.
    batches: of the current execution, the next one, and those that are prefetched.
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
    """The mesh and the exchange. capacities: {stack with split rows: ids per buffer}."""

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
    """Estimates the bytes in the memory of one device.

    Args:
        batch: the global batch of one step. Only shapes matter.
        updates_whole_tables: True if a step changes all rows, see `embedding.l2_scope`.
        averages: True if an average of the weights is kept, see `step.averaged`.
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
                buffers += rows * (part.dim + 1) * _NUMBER  # and the number of reads of each row
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
    """Returns the bytes of a row with its accumulators."""
    width = padded_width(dim)
    return width * _NUMBER + _slot_bytes(row_optimizer, Storage("", dim, width, 0, False))


def _slot_bytes(row_optimizer: RowOptimizer, part: Storage) -> int:  # per row
    return sum((part.width if wide else 1) * _NUMBER for wide, _ in row_optimizer.slots.values())


def _places(stack: Stack, partition: Partition) -> int:
    """Counts the ids in all buffers of a device in one direction. 0 without an exchange."""
    return partition.shards * partition.capacities.get(stack.name, 0)


def _buffers(stack: Stack, partition: Partition) -> int:
    """Counts the bytes of the exchange buffers of one stack on one device.

    Each place of the buffers holds an id, a vector and a gradient, both to send and to receive.
    The owner also gathers an id and a gradient per place and replica, and sums a gradient for each.
    """
    sent_and_received = 2 * (1 + 2 * stack.dim)
    at_owner = partition.replicas * (1 + 2 * stack.dim)
    return _places(stack, partition) * (sent_and_received + at_owner) * _NUMBER


def exchanged(layout: Layout, partition: Partition, dense: DensePart) -> int:
    """Counts the bytes that one device sends in a step with one round of the exchange.

    For each place of the buffers, the device sends an id and a gradient to the other owners and a
    vector to the devices that requested it. It sends an id and a gradient per place to the other
    replicas. Gradients of the model and of replicated rows, with their number of reads, are summed
    over all devices. They are sent twice, except the device's own part.
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
    """Returns an error text if the bytes of a device exceed its memory, or else an empty text."""
    excess = needed.total - memory
    if excess <= 0:
        return ""
    return (
        f"a device must need at most its memory of {format_bytes(memory)}: found"
        f" {format_bytes(needed.total)}, {format_bytes(excess)} too much."
    )
