"""Random-access elements for grain, from which one process's part of a batch is made.

Each element is a pure function of its index. Cached blocks and permuted windows only speed up reads
in approximate order. They are not sent to input workers.
"""

import collections
import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrank.data import examples as ex
from jaxrank.data.batches.buffers import BufferPool, batch_arrays, batch_views, map_arrays
from jaxrank.data.batches.shuffle_order import Order, Run
from jaxrank.data.examples import Examples
from jaxrank.data.store.split import Split
from jaxrank.features import Batch
from jaxrank.run_schedule import execution_end


class Reader:
    """Reads examples of a split. Concurrent calls are serialised.

    Args:
        kept: number of blocks that are kept for the next execution.
    """

    def __init__(self, split: Split, kept: int):
        self._split, self._kept = split, kept
        self._blocks: collections.OrderedDict[int, Examples] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"split": self._split, "kept": self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, block: int, start: int, stop: int) -> Examples:
        with self._lock:
            if block not in self._blocks:
                while len(self._blocks) >= self._kept:
                    self._blocks.popitem(last=False)
                examples = self._split.read_block(block)
                self._blocks[block] = dataclasses.replace(examples, truth=None, kept=None)
            block_examples = self._blocks[block]
        return ex.cut(block_examples, start, stop)


class Shard:
    """Random access to the stream of one shard, fast for reads in order.

    Caches the last permuted window.
    """

    def __init__(self, reader: Reader, order: Order, shard: int):
        self._reader, self._order, self._shard = reader, order, shard
        self._last: tuple[tuple[int, int], Examples] | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"reader": self._reader, "order": self._order, "shard": self._shard}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def read(self, start: int, stop: int) -> list[Examples]:
        """Returns the places [start, stop) of the stream, in one or more parts."""
        pieces = []
        for run in self._order.runs(self._shard, start, stop):
            with self._lock:
                window = self._permuted(run)
            pieces.append(ex.cut(window, run.start, run.stop))
        return pieces

    def _permuted(self, run: Run) -> Examples:
        key = (run.turn, run.window)
        if self._last is None or self._last[0] != key:
            self._last = None  # frees its memory before the next window is allocated
            spans, order = self._order.window(self._shard, *key)
            self._last = key, ex.gather([self._reader.read(*span) for span in spans], order)
        return self._last[1]


class TrainSource:
    """Element i: part `i % parts` of this process's share of execution `first + i // parts`.

    An execution is a number of consecutive steps. Its arrays are [steps_per_execution, rows of the
    part, ...]. Executions end where `run_schedule.execution_end` says. Shorter ones repeat their
    last batch.

    Args:
        shards: of this process. A part is an equal share of them.
        share: examples per shard and step.
        parts: number of parts of a step, each of the same number of shards.
        steps: the steps to return.
        steps_per_execution: steps of a full execution.
        fill_step: makes the batch of a step from examples, as `Batcher.fill` does.
        shapes: the shapes and dtypes of an element.
        memory: buffers for elements.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        share: int,
        parts: int,
        steps: range,
        steps_per_execution: int,
        fill_step: Callable[[Batch, list[Examples]], None],
        shapes: Batch,
        memory: BufferPool,
    ):
        self._shards, self._share, self.parts = shards, share, parts
        self._steps, self._steps_per_execution = steps, steps_per_execution
        self._fill_step, self._memory = fill_step, memory
        self._first = steps.start // steps_per_execution
        self.shapes = shapes

    def __len__(self) -> int:
        if not self._steps:
            return 0
        return ((self._steps.stop - 1) // self._steps_per_execution - self._first + 1) * self.parts

    def __getitem__(self, index: Any) -> Batch:
        batch = batch_views(self._memory.acquire(), self.shapes)
        self.fill(int(index), batch)
        return batch

    def fill(self, index: int, batch: Batch) -> None:
        """Writes element `index` to existing arrays."""
        execution, part = divmod(index, self.parts)
        shards = len(self._shards) // self.parts
        begin = max(self._steps.start, (self._first + execution) * self._steps_per_execution)
        count = execution_end(begin, self._steps.stop, self._steps_per_execution) - begin
        for i in range(count):
            start = (begin + i) * self._share
            pieces: list[Examples] = []
            for shard in self._shards[part * shards : (part + 1) * shards]:
                pieces += shard.read(start, start + self._share)
            self._fill_step(map_arrays(lambda array, i=i: array[i], batch), pieces)
        for array in batch_arrays(batch):
            array[count:] = array[count - 1]


class EvaluationSource:
    """Element k: this process's rows of global batch k, in stored order."""

    def __init__(
        self,
        reader: Reader,
        ends: np.ndarray,
        batch_size: int,
        share: tuple[int, int],
        batch: Callable[..., Batch],
    ):
        self._reader, self._ends, self._batch_size = reader, ends, batch_size
        self._share, self._batch = share, batch

    def __len__(self) -> int:
        return math.ceil(int(self._ends[-1]) / self._batch_size)

    def __getitem__(self, index: Any) -> Batch:
        offset = int(index) * self._batch_size
        start, stop = offset + self._share[0], offset + self._share[1]
        # The last batch may extend past the last example, and some processes may have none of it.
        rows = int(self._ends[-1])
        block = int(np.searchsorted(self._ends, min(start, rows - 1), side="right"))
        pieces = []
        while start < min(stop, rows):
            begin = int(self._ends[block - 1]) if block else 0
            end = min(int(self._ends[block]), stop)
            if end > start:
                pieces.append(self._reader.read(block, start - begin, end - begin))
            start = max(start, end)
            block += 1
        if start < stop:
            last = self._reader.read(len(self._ends) - 1, 0, 0)
            pieces.append(ex.blank(last, stop - start))
        return self._batch(*pieces)
