"""Processes that make batches."""

import contextlib
import functools
import multiprocessing
import re
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import Any

import grain
import numpy as np

from jaxrank import signals
from jaxrank.data.batches.buffers import BufferPool, bytes_of, laid_out, map_arrays
from jaxrank.data.batches.shared_memory import SharedRing
from jaxrank.data.batches.streams import TrainSource
from jaxrank.errors import InputError, RunError
from jaxrank.features import Batch

# One execution runs, one waits for it on the devices, and one is put there.
_LENT = 3
# What ends a process by such a signal.
_WHY = {
    "-7": "a file that it reads was cut short, or its disk failed (SIGBUS)",
    "-9": "it was killed, as where memory is short, of which fewer workers need less",
}
_ENDED = re.compile(r"terminated unexpectedly with exit code (-?\d+)")


def suitable_workers(shards: int, *, cores: int, accelerators: int) -> int:
    """The number of workers that keep the accelerators of a process busy.

    On one H200 with 16 cores a thread made batches at 33% of the rate of the step, and 4 workers at
    96% (`configs/powerlaw.py`). Half of the cores stay for the training process. Without
    accelerators the step itself takes all cores, and workers would take them from it.

    Args:
        shards: of the process; the number of workers divides it.
        cores: that the process may use.
        accelerators: of the process; 0 where it computes on the CPU.

    Returns:
        0 where one worker would be all.
    """
    most = min(4 * accelerators, cores // 2, shards)
    return next((n for n in range(most, 1, -1) if shards % n == 0), 0)


class _InRing:
    """The elements of a source as their numbers; what they are stands in the slots.

    grain would put each array into new shared memory.
    """

    def __init__(self, slots: SharedRing, length: int):
        self._slots, self._length = slots, length

    @functools.cached_property
    def _made(self) -> tuple[TrainSource, Batch]:
        """The source, and what the batch of an execution is like."""
        return self._slots.handed()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> int:
        source, like = self._made
        execution, part = divmod(int(index), source.parts)

        def share(array: np.ndarray) -> np.ndarray:
            """Of the array of an execution, [steps, rows, ...], the rows of this part."""
            rows = array.shape[1] // source.parts
            return array[:, part * rows : (part + 1) * rows]

        batch = laid_out(self._slots.to_fill(execution), like)
        source.fill(int(index), map_arrays(share, batch))
        return int(index)


class WorkerExecutions:
    """An iterator over executions, of which each worker makes a part.

    A batch is lent where the workers made it; its memory is theirs again when nobody holds any of
    its arrays. Of more than `_LENT` that are held at the same time each is a copy.

    Args:
        source: of as many parts as there are workers.
        ahead: executions that are made ahead.
        like: the shapes and dtypes of the batch of an execution.
        memory: for copies.

    Raises:
        RunError: a worker has ended by itself; it comes from `next`.
    """

    def __init__(self, source: TrainSource, ahead: int, like: Batch, memory: BufferPool):
        _check_guarded()
        self._source, self._like, self._memory = source, like, memory
        pieces = ahead + 1 + _LENT
        self._slots = SharedRing(pieces, bytes_of(like), (source, like))
        self._give_back = self._slots.giver()
        self._lent: set[int] = set()
        # Elements are dealt to the workers in turn, and there are as many parts as workers: a
        # worker serves the same shards for ever, and no window is read by two.
        elements = grain.MapDataset.source(_InRing(self._slots, len(source)))
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        workers = grain.MultiprocessingOptions(
            # Room for all: a worker waits for a piece, where it sees whether anybody reads.
            num_workers=source.parts,
            per_worker_buffer_size=pieces,
        )
        self._started = False
        # The one place that holds it, for `_end` to empty.
        self._numbers = [
            iter(elements.to_iter_dataset(options).mp_prefetch(workers, _leave_signals))
        ]
        # Also where nobody closes it, and before grain does so at the end of a program.
        self._end = util.Finalize(self, _end, (self._slots, self._numbers), exitpriority=10)

    def __next__(self) -> Batch:
        # grain starts the workers, by threads of its own, when it is first asked.
        with contextlib.nullcontext() if self._started else signals.held_back():
            for _ in range(self._source.parts):
                execution = self._number() // self._source.parts
        self._started = True
        piece, filled = self._slots.filled(execution)
        if len(self._lent) < _LENT:
            return laid_out(self._lend(piece, filled), self._like)
        copy = self._memory.acquire()
        copy[...] = filled
        self._give_back(piece)
        return laid_out(copy, self._like)

    def _number(self) -> int:
        try:
            return next(self._numbers[0])
        except RuntimeError as error:
            ended = _ENDED.search(str(error))  # as grain says it
            if ended is None:
                raise
            why = _WHY.get(ended[1], "it was killed")
            if not ended[1].startswith("-"):
                why = "it has said why"
            raise RunError(
                f"One of {self._source.parts} input workers (data.num_workers) ended with exit code"
                f" {ended[1]}: {why}. The same command resumes from the newest checkpoint."
            ) from error

    def _lend(self, piece: int, filled: np.ndarray) -> np.ndarray:
        # NumPy's views of views hold the first array of their own kind: this one.
        lent = np.frombuffer(filled.data, np.uint8)
        self._lent.add(piece)
        weakref.finalize(lent, _end_loan, self._lent, self._give_back, piece).atexit = False
        return lent

    def close(self) -> None:
        """Ends the workers."""
        self._end()


def _check_guarded() -> None:
    """Refuses to start processes from one that is being started: it imports its program anew, and
    that would start them again.

    Raises:
        InputError: saying what the program lacks.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            "data.num_workers: a program that reads with workers must do so behind"
            " `if __name__ == '__main__':`, for every worker imports it: found that it does not."
        )


def _leave_signals(_worker: int, _count: int) -> None:
    """Ctrl-C and the like come to all processes of a group; the one that reads decides."""
    signals.release(ignore=True)


def _end_loan(lent: set[int], give_back: Callable[[int], None], piece: int) -> None:
    lent.discard(piece)
    give_back(piece)


def _end(slots: SharedRing, numbers: list[Any]) -> None:
    slots.close()  # or grain would wait for a worker that waits for a piece
    # What is left when the interpreter takes its modules down fails in its `__del__`, and says so.
    numbers.pop().close()
