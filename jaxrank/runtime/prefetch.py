"""Prefetches batches to the devices."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

# Executions whose batches wait on the devices. While an execution runs, the next one is already
# queued, so the batches after that have the time of a whole execution to be built and transferred.
AHEAD = 1


class DevicePrefetcher:
    """Iterates over batches that a thread builds and transfers ahead of the loop.

    Batches keep their order. An exception in the thread is raised when its batch is requested. The
    thread runs no compiled program and no exchange between processes, so it cannot interleave with
    those of the loop.

        with contextlib.closing(DevicePrefetcher(batches, put)) as feed:
            for batch in feed:
                state, metrics = train(state, batch)

    Args:
        batches: batches on the host. Only the prefetcher may read this iterator until `close`.
        put: transfers a batch from the host to the devices.
        ahead: maximum number of batches on the devices that have not been requested.
    """

    def __init__(self, batches: Iterator[Any], put: Callable[[Any], Any], ahead: int = AHEAD):
        self._batches, self._put = batches, put
        self._thread = ThreadPoolExecutor(1, "feed")
        self._pending: deque[Future[Any]] = deque(
            self._thread.submit(self._make) for _ in range(ahead)
        )

    def _make(self) -> Any:
        return self._put(next(self._batches))

    def __iter__(self) -> "DevicePrefetcher":
        return self

    def __next__(self) -> Any:
        batch = self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._make))
        return batch

    def wait(self, seconds: float) -> bool:
        """Waits up to `seconds` and returns True if the next batch, or its exception, is ready."""
        return bool(wait([self._pending[0]], seconds).done)

    def close(self) -> None:
        """Waits until the thread has ended. Batches that were not requested are dropped."""
        self._thread.shutdown(cancel_futures=True)
        self._pending.clear()
