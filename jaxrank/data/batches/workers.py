"""Worker processes that make batches."""

import contextlib
import functools
import re
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

import grain
import numpy as np

from jaxrank import signals
from jaxrank.data import guard
from jaxrank.data.batches.buffers import BufferPool, batch_bytes, batch_views, map_arrays
from jaxrank.data.batches.shared_memory import SharedRing
from jaxrank.data.batches.streams import TrainSource
from jaxrank.errors import RunError
from jaxrank.features import Batch

# One execution runs, one is on the devices and waits, and one is being transferred.
_LENT = 3
# Likely reason for each signal that ends a process.
_WHY = {
    "-7": "a file that it reads was cut short, or its disk failed (SIGBUS)",
    "-9": "it was killed, often for lack of memory; fewer workers need less memory",
}
_ENDED = re.compile(r"terminated unexpectedly with exit code (-?\d+)")


def suitable_workers(shards: int, *, cores: int, accelerators: int) -> int:
    """Returns the number of workers that keep the accelerators of a process busy.

    On one H200 with 16 cores a thread made batches at 33% of the rate of the step, and 4 workers at
    96% (`configs/powerlaw.py`). Half of the cores are left to the training process. Without
    accelerators the step itself uses all cores, and workers would compete with it.

    Args:
        shards: of the process, a multiple of the number of workers.
        cores: available to the process.
        accelerators: of the process, or 0 if it computes on the CPU.

    Returns:
        The number of workers, or 0 where it would be 1.
    """
    most = min(4 * accelerators, cores // 2, shards)
    return next((n for n in range(most, 1, -1) if shards % n == 0), 0)


class _InRing:
    """Source whose elements are only their numbers. Their data is stored in the shared ring.

    grain would copy each array into new shared memory.
    """

    def __init__(self, slots: SharedRing, length: int):
        self._slots, self._length = slots, length

    @functools.cached_property
    def _source_and_shapes(self) -> tuple[TrainSource, Batch]:
        """Returns the source, and the shapes of the batch of an execution."""
        return self._slots.handed()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> int:
        source, shapes = self._source_and_shapes
        execution, part = divmod(int(index), source.parts)

        def share(array: np.ndarray) -> np.ndarray:
            """Selects this part's rows from an array of an execution, [steps, rows, ...]."""
            rows = array.shape[1] // source.parts
            return array[:, part * rows : (part + 1) * rows]

        batch = batch_views(self._slots.to_fill(execution), shapes)
        source.fill(int(index), map_arrays(share, batch))
        return int(index)


class WorkerExecutions:
    """Iterates over executions, of which each worker makes a part.

    A batch is a view of the workers' memory, which is reused when no array of it is referenced.
    While more than `_LENT` batches are referenced, further ones are copies.

    Args:
        source: with one part per worker.
        ahead: number of prefetched executions.
        shapes: the shapes and dtypes of the batch of an execution.
        memory: buffers for copies.

    Raises:
        RunError: from `next`, if a worker has died.
    """

    def __init__(self, source: TrainSource, ahead: int, shapes: Batch, memory: BufferPool):
        guard.check("data.num_workers")
        self._source, self._shapes, self._memory = source, shapes, memory
        pieces = ahead + 1 + _LENT
        self._slots = SharedRing(pieces, batch_bytes(shapes), (source, shapes))
        self._give_back = self._slots.giver()
        self._lent: set[int] = set()
        # Elements are assigned to the workers in turn, and there are as many parts as workers. A
        # worker therefore always reads the same shards, and no window is read twice.
        elements = grain.MapDataset.source(_InRing(self._slots, len(source)))
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        workers = grain.MultiprocessingOptions(
            # Unbounded: a worker waits for a free piece, where it also sees whether the reader is
            # alive.
            num_workers=source.parts,
            per_worker_buffer_size=pieces,
        )
        self._started = False
        # The only reference, which `_end` removes.
        self._numbers = [
            iter(elements.to_iter_dataset(options).mp_prefetch(workers, _leave_signals))
        ]
        # Also runs without `close`, and before grain's own cleanup at the end of a program.
        self._end = util.Finalize(self, _end, (self._slots, self._numbers), exitpriority=10)

    def __next__(self) -> Batch:
        # grain starts the workers from its own threads at the first request.
        with contextlib.nullcontext() if self._started else signals.held_back():
            for _ in range(self._source.parts):
                execution = self._number() // self._source.parts
        self._started = True
        piece, filled = self._slots.filled(execution)
        if len(self._lent) < _LENT:
            return batch_views(self._lend(piece, filled), self._shapes)
        copy = self._memory.acquire()
        copy[...] = filled
        self._give_back(piece)
        return batch_views(copy, self._shapes)

    def _number(self) -> int:
        try:
            return next(self._numbers[0])
        except RuntimeError as error:
            ended = _ENDED.search(str(error))  # the format of grain's message
            if ended is None:
                raise
            why = _WHY.get(ended[1], "it was killed")
            if not ended[1].startswith("-"):
                why = "see its error above"
            raise RunError(
                f"One of {self._source.parts} input workers (data.num_workers) ended with exit code"
                f" {ended[1]}: {why}. The same command resumes from the newest checkpoint."
            ) from error

    def _lend(self, piece: int, filled: np.ndarray) -> np.ndarray:
        # Views of views reference the first array of their own type in NumPy: this one.
        lent = np.frombuffer(filled.data, np.uint8)
        self._lent.add(piece)
        weakref.finalize(lent, _end_loan, self._lent, self._give_back, piece).atexit = False
        return lent

    def close(self) -> None:
        """Ends the workers."""
        self._end()


def _leave_signals(_worker: int, _count: int) -> None:
    """Ignores signals such as Ctrl-C, which reach all processes of a group. The reader decides."""
    signals.release(ignore=True)


def _end_loan(lent: set[int], give_back: Callable[[int], None], piece: int) -> None:
    lent.discard(piece)
    give_back(piece)


def _end(slots: SharedRing, numbers: list[Any]) -> None:
    slots.close()  # otherwise grain would wait for a worker that waits for a piece
    # An iterator that survives until interpreter shutdown fails in its `__del__` and prints that.
    numbers.pop().close()
