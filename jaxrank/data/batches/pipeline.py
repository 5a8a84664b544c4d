"""A split of a store -> the batches of this process, through grain.

Global batch k is a pure function of (seed, k); see `shuffle_order`. It is the shares of all shards,
one after another, and a process serves a contiguous part of the shards: so the same examples make
batch k whether one process reads or sixteen do, and with any number of workers.
"""

import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import grain
import numpy as np

from jaxrank.data.batches import packing
from jaxrank.data.batches.batcher import Batcher
from jaxrank.data.batches.buffers import BufferPool, bytes_of, with_steps
from jaxrank.data.batches.room import Room, measure
from jaxrank.data.batches.shuffle_order import Order
from jaxrank.data.batches.streams import EvaluationSource, Reader, Shard, TrainSource
from jaxrank.data.batches.workers import WorkerExecutions
from jaxrank.data.examples import Examples, Known
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError
from jaxrank.features import MAX_GROUP, Batch
from jaxrank.layout import Layout
from jaxrank.run_schedule import execution_end

_EVALUATION_BLOCKS = 8  # kept for the next batch; they are memory maps


def _process_shares(shards: int, process: tuple[int, int]) -> range:
    """The shards that this process serves."""
    index, count = process
    if shards % count:
        raise InputError(
            "data.shards must be a multiple of the number of processes: found"
            f" data.shards={shards}, {count} processes."
        )
    return range(index * shards // count, (index + 1) * shards // count)


def _let_grain_read_its_flags() -> None:
    # grain asks absl for its own flags when it starts workers, which raises in a program that
    # parses none. Marked as set, they read as their defaults; others' flags are not touched.
    # absl.flags is taken from grain's import, for only cli.py may import it.
    flags = sys.modules["absl.flags"].FLAGS
    if not flags.is_parsed():
        for name in flags:
            if name.startswith("grain_"):
                flags[name].present = max(1, flags[name].present)


def _iterate(source: Any, ahead: int) -> Any:
    """An iterator over the source's elements in order, made ahead by a thread if any are.

    By one: with two to four, which wait for each other's hold of the interpreter, an input of lists
    was 0.67 to 0.86 times as fast. What one thread cannot do is for processes.
    """
    _let_grain_read_its_flags()
    options = grain.ReadOptions(num_threads=min(1, ahead), prefetch_buffer_size=ahead)
    return iter(grain.MapDataset.source(source).to_iter_dataset(options))


class TrainBatches:
    """An iterator over this process's share of shuffled training batches, endless up to num_steps.

    Each call of `next` gives a Batch whose arrays have a leading axis of `steps_per_execution`
    consecutive steps; of fewer where `run_schedule.execution_end` says so, with the last one
    repeated
    behind them. Batches are always full and may straddle epochs. Memory: a window for
    each shard of this process, with what it is gathered from where blocks are compressed; with
    workers also a few executions beyond those made ahead, in shared memory.

        batches = TrainBatches(store.split("train"), layout, batch_size=8192, ...)
        for batch in batches:
            state, metrics = train_step(state, batch)

    Args:
        split: what to train on.
        layout: of the store's schema.
        batch_size: examples of the global batch.
        steps_per_execution: batches of an execution.
        seed: of the order.
        shards: streams that the global batch takes equal shares from, whatever the number of
            processes, which divides it.
        window_blocks: average blocks that are permuted together.
        num_workers: processes that read; 0: a thread of this process does.
        prefetch_batches: batches made ahead; 0 and no workers: each is made when it is asked for.
        list_slack: room for lists that may be cut, in standard deviations; see `packing.capacity`.
        on_overflow: "error": all lists of the run have room, see `room.measure`; or "truncate", see
            `packing.Packer`.
        order: "shuffled": all blocks together; "days": one day after another, each shuffled.
        process: index and number of processes.
        first_step: the first step to serve.
        num_steps: the step to end before.
        room_steps: the first steps, whose lists must have room; those of others are cut. 0: all.
        room: measured already, by batches with equal settings; None: measured now.

    Raises:
        InputError: sizes that do not divide each other, fewer examples than shards; from `next`
            also what reading and packing raise.
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
        order: str = "shuffled",
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
                "data.num_workers must divide the shards of a process: found"
                f" data.num_workers={num_workers}, data.shards={shards} on {process[1]} processes."
            )
        window = max(1, round(window_blocks * split.rows / max(1, len(split.block_rows))))
        stages = [blocks for _, blocks in split.days] if order == "days" else []
        line = Order(split.block_rows, seed=seed, shards=shards, window=window, stages=stages)
        self.group = packing.group_size(batch_size, shards)
        self._share = batch_size // shards
        stacks = [stack for stack in layout.stacks if stack.lists]
        self.room = room
        if stacks and on_overflow == "error":
            places = (room_steps or num_steps) * self._share
            sets = [stack.lists for stack in stacks]
            self.room = room or measure(split, line, sets, places=places, group=self.group)
            rooms = map(packing.aligned, self.room.largest.tolist())
            self.capacities = dict(zip([stack.name for stack in stacks], rooms, strict=True))
        else:
            # On one day lists may be longer than on average over all.
            statistics = split.day_statistics if order == "days" else [split.statistics]
            self.capacities = {
                stack.name: max(
                    packing.capacity(stack, s, self.group, list_slack) for s in statistics
                )
                for stack in stacks
            }
        self.room_steps = room_steps
        if room_steps:
            on_overflow = "truncate"
        self._ahead = -(-prefetch_batches // steps_per_execution)
        self._streams = [Shard(Reader(split, kept=1), line, shard) for shard in shares]
        # The first batch with an example of each day; of all, where they are shuffled together.
        self.first_steps = [place // self._share for place in line.first_places()]
        self.batcher = Batcher(layout, self.group, self.capacities, on_overflow)
        self._logit_correction = layout.schema.logit_correction_columns
        self._steps_per_execution, self._num_steps = steps_per_execution, num_steps
        self.num_workers = num_workers
        self._like = self._execution_like(1)
        self._memory = BufferPool(bytes_of(self._like), kept=self._ahead + 1)
        self._executions: Any = None
        self.position = first_step
        self._reading = threading.RLock()  # of several threads each gets executions of its own

    def __iter__(self) -> "TrainBatches":
        return self

    def __getstate__(self) -> dict[str, Any]:
        """A copy goes on from here by itself."""
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
                self.close()  # workers are no longer in step: the next execution starts them again
                raise
            self.position = execution_end(self.position, self._num_steps, self._steps_per_execution)
            return batch

    def _start(self) -> Any:
        if self.num_workers:
            _let_grain_read_its_flags()
            return WorkerExecutions(self.source(), max(1, self._ahead), self._like, self._memory)
        return _iterate(self.source(), self._ahead)

    def source(
        self, fill_step: Callable[[Batch, list[Examples]], None] | None = None
    ) -> TrainSource:
        """What the batches from here on are made of, at random access.

        Args:
            fill_step: in place of `Batcher.fill`, which makes the batch of a step of examples.
        """
        parts = max(1, self.num_workers)
        return TrainSource(
            self._streams,
            self._share,
            parts,
            range(self.position, self._num_steps),
            self._steps_per_execution,
            fill_step or self.batcher.fill,
            self._execution_like(parts),
            self._memory,
        )

    def _execution_like(self, parts: int) -> Batch:
        """The shapes and dtypes of one of the equal parts of an execution."""
        rows = self._share * len(self._streams) // parts
        return with_steps(
            self.batcher.like(rows, self._logit_correction), self._steps_per_execution
        )

    def seek(self, step: int) -> None:
        """Goes on at a step, at once: no batch before it is made."""
        with self._reading:
            self.close()
            self.position = step

    def close(self) -> None:
        """Ends threads and workers, when an execution that another thread waits for is there; the
        next `next` starts them again."""
        with self._reading:
            if self._executions is not None:
                self._executions.close()
                self._executions = None


class EvaluationBatches:
    """One pass over a split in stored order: yields (Batch, rows).

    Global batch k is the stored examples [k B, (k + 1) B); the last one is filled up with
    examples of weight 0. `rows` counts the examples of the global batch that are real. All
    processes see the same number of batches. Nothing is cut from lists.

    A split of a store that was prepared later, with grown vocabularies, has rows that the layout's
    tables do not have; they read as UNKNOWN_ROW. See `Store.extends`.

    Args: as of `TrainBatches`; `layout` is the model's, and `shards` are the equal parts of a batch
        that processes and devices take, each of whole runs of MAX_GROUP examples.

    Raises:
        InputError: batch_size is no multiple of MAX_GROUP * shards, or shards none of the number of
            processes; an empty split.
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
            raise InputError(f"{split.path}: must have examples to evaluate, found none.")
        # The runs that `bound` rests on.
        self.group = MAX_GROUP
        self.capacities = {
            stack.name: packing.bound(stack, split.statistics)
            for stack in layout.stacks
            if stack.lists
        }
        self._batch_size, self._rows = batch_size, split.rows
        share = batch_size // shards
        self._source = EvaluationSource(
            Reader(split, kept=_EVALUATION_BLOCKS, known=Known(layout.schema)),
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
