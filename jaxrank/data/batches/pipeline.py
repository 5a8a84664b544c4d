"""Reads a split of a store as the batches of this process, through grain.

Global batch k is a pure function of (seed, k), see `shuffle_order`. It concatenates equal parts
from all shards, and each process reads a contiguous range of shards. The examples of batch k are
therefore the same for any number of processes and workers.
"""

import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import grain
import numpy as np

from jaxrank.data.batches import packing
from jaxrank.data.batches.batcher import Batcher
from jaxrank.data.batches.buffers import BufferPool, add_step_axis, batch_bytes
from jaxrank.data.batches.room import Room, list_room, make_order
from jaxrank.data.batches.streams import EvaluationSource, Reader, Shard, TrainSource
from jaxrank.data.batches.workers import WorkerExecutions
from jaxrank.data.examples import Examples
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.features import MAX_GROUP, Batch
from jaxrank.layout import Layout
from jaxrank.run_schedule import execution_end

_EVALUATION_BLOCKS = 8  # blocks kept for the next batch, as memory maps


def _process_shares(shards: int, process: tuple[int, int]) -> range:
    """Returns the shards that this process reads."""
    index, count = process
    if shards % count:
        raise InputError(
            "data.shards: must be a multiple of the number of processes: found"
            f" data.shards={shards}, {count} processes."
        )
    return range(index * shards // count, (index + 1) * shards // count)


def _let_grain_read_its_flags() -> None:
    # grain parses its own flags with absl when it starts workers, which raises in a program that
    # parses none. Marking them as parsed gives them their defaults and leaves other flags alone.
    # absl.flags comes from grain's import because only cli.py may import it.
    flags = sys.modules["absl.flags"].FLAGS
    if not flags.is_parsed():
        for name in flags:
            if name.startswith("grain_"):
                flags[name].present = max(1, flags[name].present)


def _iterate(source: Any, ahead: int) -> Any:
    """Returns an iterator over the source's elements in order. A thread prefetches if `ahead` > 0.

    One thread only: with two to four, which contend for the interpreter lock, an input of lists was
    0.67 to 0.86 times as fast. Use worker processes where one thread is too slow.
    """
    _let_grain_read_its_flags()
    options = grain.ReadOptions(num_threads=min(1, ahead), prefetch_buffer_size=ahead)
    return iter(grain.MapDataset.source(source).to_iter_dataset(options))


class TrainBatches:
    """Iterates over this process's part of shuffled training batches, endless up to num_steps.

    Each `next` returns a Batch whose arrays have a leading axis of `steps_per_execution`
    consecutive steps. Where `run_schedule.execution_end` allows fewer steps, the last one is
    repeated to fill the axis. Batches are always full and may span two epochs.

    Memory: a window for each shard of this process, plus its source blocks where they are
    compressed. With workers, also a few executions beyond the prefetched ones, in shared memory.

        batches = TrainBatches(store.split("train"), layout, batch_size=8192, ...)
        for batch in batches:
            state, metrics = train_step(state, batch)

    Args:
        split: the training split, in packs if a loss compares the examples of requests.
        layout: of the store's schema.
        batch_size: examples of the global batch.
        steps_per_execution: number of batches per execution.
        seed: of the order.
        shards: number of streams that contribute equally to the global batch. A multiple of the
            number of processes, and independent of it.
        window_blocks: number of average blocks that are permuted together.
        num_workers: number of reader processes. 0: a thread of this process reads.
        prefetch_batches: number of prefetched batches. With 0 and no workers, each batch is made on
            request.
        list_slack: capacity for lists that may be truncated, in standard deviations. See
            `packing.capacity`.
        on_overflow: "error": the capacity fits all lists of the run, see `room.list_room`.
            "truncate": see `packing.Packer`.
        order: "shuffled": all blocks together. "days": one day after another, each shuffled.
        process: index and number of processes.
        first_step: the first step to return.
        num_steps: the step to stop before.
        room_steps: number of first steps whose lists must fit. Lists of later steps are truncated.
            0: all.
        room: the measurement of batches with equal settings, or None to measure now.

    Raises:
        InputError: sizes do not divide each other, or there are fewer examples than shards. `next`
            also raises the errors of reading and packing.
    """

    def __init__(
        self,
        split: Split,
        layout: Layout,
        *,
        batch_size: int,
        steps_per_execution: int,
        seed: int,
        shards: int,
        window_blocks: int,
        num_workers: int,
        prefetch_batches: int,
        list_slack: float,
        on_overflow: str,
        order: str,
        process: tuple[int, int] = (0, 1),
        first_step: int = 0,
        num_steps: int,
        room_steps: int = 0,
        room: Room | None = None,
    ):
        if order == "days" and not split.days:
            raise InputError(
                f"data.order: 'days' must have a split that is stored by day: {split.path} is not."
            )
        shares = _process_shares(shards, process)
        if len(shares) % max(1, num_workers):
            raise InputError(
                "data.num_workers: must divide the shards of a process: found"
                f" data.num_workers={num_workers}, data.shards={shards} on {process[1]} processes."
            )
        line = make_order(split, seed=seed, shards=shards, window_blocks=window_blocks, order=order)
        self._share = batch_size // shards
        self.list_room = list_room(
            split,
            layout,
            batch_size=batch_size,
            steps=room_steps or num_steps,
            list_slack=list_slack,
            on_overflow=on_overflow,
            seed=seed,
            shards=shards,
            window_blocks=window_blocks,
            order=order,
            measured=room,
        )
        self.group, self.capacities = self.list_room.group, self.list_room.capacities
        self.has_requests = self.list_room.has_requests
        if split.pack not in (0, self.group):
            raise ValueError(f"packs must have {self.group} examples: found {split.pack}.")
        self.room_steps = room_steps
        if room_steps:
            on_overflow = "truncate"
        self._ahead = -(-prefetch_batches // steps_per_execution)
        self._streams = [Shard(Reader(split, kept=1), line, shard) for shard in shares]
        # The first batch with an example of each day, or of all where they are shuffled together.
        self.first_steps = [place // self._share for place in line.first_places()]
        self.batcher = Batcher(layout, self.group, self.capacities, on_overflow)
        self._logit_correction = layout.schema.logit_correction_columns
        self._steps_per_execution, self._num_steps = steps_per_execution, num_steps
        self.num_workers = num_workers
        self._shapes = self._part_shapes(1)
        self._memory = BufferPool(batch_bytes(self._shapes), kept=self._ahead + 1)
        self._executions: Any = None
        self.position = first_step
        self._reading = threading.RLock()  # concurrent threads each get executions of their own

    def __iter__(self) -> "TrainBatches":
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Pickles the position as well: a copy continues from the same step."""
        return {k: v for k, v in self.__dict__.items() if k != "_reading"} | {"_executions": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reading=threading.RLock())

    def __next__(self) -> Batch:
        with self._reading:
            if self.position >= self._num_steps:
                self.close()
                raise StopIteration
            if self._executions is None:
                self._executions = self._start()
            try:
                batch = next(self._executions)
            except BaseException:
                self.close()  # The workers are no longer in step: the next execution restarts them.
                raise
            self.position = execution_end(self.position, self._num_steps, self._steps_per_execution)
            return batch

    def _start(self) -> Any:
        if self.num_workers:
            _let_grain_read_its_flags()
            return WorkerExecutions(self.source(), max(1, self._ahead), self._shapes, self._memory)
        return _iterate(self.source(), self._ahead)

    def source(
        self, fill_step: Callable[[Batch, list[Examples]], None] | None = None
    ) -> TrainSource:
        """Returns a random-access source of the remaining batches.

        Args:
            fill_step: replaces `Batcher.fill`, which makes the batch of a step from examples.
        """
        parts = max(1, self.num_workers)
        return TrainSource(
            self._streams,
            self._share,
            parts,
            range(self.position, self._num_steps),
            self._steps_per_execution,
            fill_step or self.batcher.fill,
            self._part_shapes(parts),
            self._memory,
        )

    def _part_shapes(self, parts: int) -> Batch:
        """Returns the shapes and dtypes of one of the equal parts of an execution."""
        rows = self._share * len(self._streams) // parts
        shapes = self.batcher.shapes(rows, self._logit_correction, self.has_requests)
        return add_step_axis(shapes, self._steps_per_execution)

    def seek(self, step: int) -> None:
        """Moves to a step without reading the batches before it."""
        with self._reading:
            self.close()
            self.position = step

    def close(self) -> None:
        """Stops threads and workers once a pending execution of another thread has arrived.

        The next call of `next` starts them again.
        """
        with self._reading:
            if self._executions is not None:
                self._executions.close()
                self._executions = None


class EvaluationBatches:
    """Iterates once over a split in stored order and yields (Batch, rows).

    Global batch k is the stored examples [k B, (k + 1) B). The last batch is filled up with
    examples of weight 0, and `rows` counts the real examples of the global batch. All processes see
    the same number of batches. Lists are never truncated.

    A split of a store with other vocabularies than the layout's is read through a `View`.

    Args: as in `TrainBatches`. `layout` is the model's. `shards` is the number of equal parts of a
    batch, each a multiple of MAX_GROUP examples, that processes and devices take.

    Raises:
        InputError: batch_size is not a multiple of MAX_GROUP * shards, shards is not a multiple of
            the number of processes, or the split is empty.
    """

    def __init__(
        self,
        split: Split,
        layout: Layout,
        *,
        batch_size: int,
        shards: int = 1,
        process: tuple[int, int] = (0, 1),
        prefetch_batches: int = 2,
    ):
        shares = _process_shares(shards, process)
        if batch_size % (MAX_GROUP * shards):
            raise InputError(
                f"batch_size of an evaluation must be a multiple of {MAX_GROUP} * shards: found"
                f" batch_size={batch_size}, shards={shards}. The next larger one is"
                f" {-(-batch_size // (MAX_GROUP * shards)) * MAX_GROUP * shards}."
            )
        if not split.rows:
            raise InputError(f"{split.path}: must have examples to evaluate: found none.")
        # The run length that `bound` assumes.
        self.group = MAX_GROUP
        self.capacities = {
            stack.name: packing.bound(stack, split.statistics)
            for stack in layout.stacks
            if stack.lists
        }
        self._batch_size, self._rows = batch_size, split.rows
        share = batch_size // shards
        self._source = EvaluationSource(
            Reader(split, kept=_EVALUATION_BLOCKS),
            np.cumsum(split.block_rows),
            batch_size,
            (shares.start * share, shares.stop * share),
            Batcher(layout, self.group, self.capacities, "error"),
        )
        self._prefetch = prefetch_batches

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Generator[tuple[Batch, int], None, None]:
        elements = _iterate(self._source, self._prefetch)
        try:
            for index, batch in enumerate(elements):
                yield batch, min(self._batch_size, self._rows - index * self._batch_size)
        finally:
            elements.close()
