"""Batches on the devices before the step asks for them."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

# Executions whose batches wait on the devices. While an execution runs the next one is in the queue
# already, so one more has the time of a whole execution to be made and put there.
AHEAD = 1


class DevicePrefetcher:
    """An iterator over batches that a thread takes and puts on the devices ahead of the loop.

    The order is that of `batches`, and what taking or putting a batch raises is raised where that
    batch was due. The thread runs no program and no exchange between processes, so it cannot come
    between those of the loop.

        with contextlib.closing(DevicePrefetcher(batches, put)) as feed:
            for batch in feed:
                state, told = train(state, batch)

    Args:
        batches: on the host; nobody else may take from it before `close`.
        put: a batch on the host -> on the devices.
        ahead: batches on the devices at most that were not asked for yet.
    """

    def __init__(self, batches: Iterator[Any], put: Callable[[Any], Any], ahead: int = AHEAD):
        self._batches, self._put = batches, put
        self._thread = ThreadPoolExecutor(1, "feed")
        self._made: deque[Future[Any]] = deque(
            self._thread.submit(self._make) for _ in range(ahead)
        )

    def _make(self) -> Any:
        return self._put(next(self._batches))

    def __iter__(self) -> "DevicePrefetcher":
        return self

    def __next__(self) -> Any:
        batch = self._made.popleft().result()
        self._made.append(self._thread.submit(self._make))
        return batch

    def wait(self, seconds: float) -> bool:
        """Whether the next batch, or what it raised, is there after so many seconds at most."""
        return bool(wait([self._made[0]], seconds).done)

    def close(self) -> None:
        """Returns when the thread has ended; what it made and nobody asked for is lost."""
        self._thread.shutdown(cancel_futures=True)
        self._made.clear()
