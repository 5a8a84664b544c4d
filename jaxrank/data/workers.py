"""Processes that make batches."""

from multiprocessing import util
from typing import Any

import grain

from jaxrank.data.memory import Memory, arrays_of, bytes_of, laid_out
from jaxrank.data.slots import Slots
from jaxrank.data.streams import TrainSource
from jaxrank.features import Batch


class _InSlots:
    """The elements of a source as their numbers; what they are stands in the slots.

    grain would put each array into new shared memory.
    """

    def __init__(self, source: TrainSource, slots: Slots):
        self._source, self._slots = source, slots

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> int:
        call, part = divmod(int(index), self._source.parts)
        piece = self._slots.to_fill(part, call)
        self._source.fill(int(index), laid_out(piece, self._source.like))
        return int(index)


class WorkerCalls:
    """An iterator over calls, of which each worker makes a part.

    Args:
        source: of as many parts as there are workers.
        ahead: calls that are made ahead.
        like: the shapes and dtypes of the batch of a call.
        memory: for the batches of calls.
    """

    def __init__(self, source: TrainSource, ahead: int, like: Batch, memory: Memory):
        self._source, self._like, self._memory = source, like, memory
        self._slots = Slots(source.parts, ahead + 1, bytes_of(source.like))
        # Elements are dealt to the workers in turn, and there are as many parts as workers: a
        # worker serves the same shards for ever, and no window is read by two.
        elements = grain.MapDataset.source(_InSlots(source, self._slots))
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        workers = grain.MultiprocessingOptions(
            num_workers=source.parts, per_worker_buffer_size=ahead + 1
        )
        # The one place that holds it, for `_end` to empty.
        self._numbers = [iter(elements.to_iter_dataset(options).mp_prefetch(workers))]
        # Also where nobody closes it, and before grain does so at the end of a program.
        self._end = util.Finalize(self, _end, (self._slots, self._numbers), exitpriority=10)

    def __next__(self) -> Batch:
        batch = laid_out(self._memory.lend(), self._like)
        for part in range(self._source.parts):
            call = next(self._numbers[0]) // self._source.parts
            with self._slots.filled(part, call) as piece:
                self._copy(piece, batch, part)
        return batch

    def _copy(self, piece: Any, batch: Batch, part: int) -> None:
        made = laid_out(piece, self._source.like)
        for to, array in zip(arrays_of(batch), arrays_of(made), strict=True):
            rows = array.shape[1]
            to[:, part * rows : (part + 1) * rows] = array

    def close(self) -> None:
        """Ends the workers."""
        self._end()


def _end(slots: Slots, numbers: list[Any]) -> None:
    slots.close()  # or grain would wait for a worker that waits for a piece
    # What is left when the interpreter takes its modules down fails in its `__del__`, and says so.
    numbers.pop().close()
