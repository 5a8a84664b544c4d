"""Joins requests into batches, which one thread scores, so that the event loop never waits."""

import asyncio
import collections
import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrank_serving.errors import RequestError
from jaxrank_serving.server.messages import (
    HttpError,
    Response,
    as_http_error,
    internal_error,
    too_many_candidates,
)
from jaxrank_serving.server.metrics import Metrics
from jaxrank_serving.server.model import Encoded, Model
from jaxrank_serving.server.score import Call

_RETRY = ((b"retry-after", b"1"),)


class _Pending:
    """A request that waits for its scores.

    arrived, deadline: time.monotonic() in seconds.
    """

    __slots__ = ("arrived", "call", "deadline", "future", "loop", "model")

    def __init__(self, call: Call, model: Model, deadline: float):
        self.call, self.model, self.deadline = call, model, deadline
        self.arrived = time.monotonic()
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Response] = self.loop.create_future()

    def finish(self, result: Response | HttpError) -> None:
        """Sets the result. May be called in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self.loop.call_soon_threadsafe(_set, self.future, result)


def _set(future: "asyncio.Future[Response]", result: Response | HttpError) -> None:
    if future.done():  # the request has timed out
        return
    if isinstance(result, HttpError):
        future.set_exception(result)
    else:
        future.set_result(result)


class Batcher:
    """A thread that scores requests, and their queue.

    Args:
        max_requests: maximum length of the queue.
        max_candidates: of one request.
        delay_seconds: maximum time that the first request of a batch waits for others.
        metrics: records queue and batches.
        expects: returns True if a request is being received, for which a batch may wait.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_candidates: int,
        delay_seconds: float,
        metrics: Metrics,
        expects: Callable[[], bool],
    ):
        self._max_requests, self._max_candidates = max_requests, max_candidates
        self._delay, self._metrics, self._expects = delay_seconds, metrics, expects
        self._queue: collections.deque[_Pending] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Scores the requests of the queue and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """True if requests are scored."""
        return self._thread.is_alive()

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
        return len(self._queue)

    async def score(self, call: Call, model: Model, deadline: float) -> Response:
        """Returns the response to a request.

        Args:
            call: the request.
            model: the version that scores it.
            deadline: time.monotonic() in seconds after which it is not scored any more.

        Raises:
            HttpError: it is invalid, or the queue is full.
        """
        pending = _Pending(call, model, deadline)
        with self._changed:
            if len(self._queue) >= self._max_requests:
                raise queue_full(self._max_requests)
            self._queue.append(pending)
            self._changed.notify()
        return await pending.future

    def _run(self) -> None:
        while (first := self._take(None)) is not None:
            self._run_batch(first)
            del first  # while the thread waits, nothing keeps an old version in memory

    def _run_batch(self, first: _Pending) -> None:
        batch: list[tuple[_Pending, Encoded]] = []
        try:
            self._fill(first, batch)
            if batch:
                self._score(batch)
        except Exception:  # one batch fails, and the server continues
            traceback.print_exc()
            for pending in {first, *(pending for pending, _ in batch)}:
                pending.finish(internal_error())

    def _take(self, deadline: float | None, model: Model | None = None) -> _Pending | None:
        """Returns the next request.

        Args:
            deadline: time.monotonic() to which it waits, while another request is being received.
                None: it waits until there is one, or until the batcher is closed.
            model: version of the batch; a request for another version stays in the queue.
        """
        with self._changed:
            while not self._queue:
                if deadline is None:
                    if self._closing:
                        return None
                    self._changed.wait()
                    continue
                left = deadline - time.monotonic()
                if left <= 0 or self._closing or not self._expects():
                    return None
                self._changed.wait(left)
            if model is not None and self._queue[0].model is not model:
                return None
            return self._queue.popleft()

    def _fill(self, first: _Pending, batch: list[tuple[_Pending, Encoded]]) -> None:
        """Adds encoded requests to a batch until it is full or its first request has waited."""
        most = first.model.batch_sizes[-1]
        deadline = time.monotonic() + self._delay
        pending: _Pending | None = first
        candidates = 0
        while pending is not None:
            encoded = self._encode(pending)
            if encoded is not None:
                batch.append((pending, encoded))
                candidates += encoded.rows
            if candidates >= most or time.monotonic() >= deadline:
                return
            pending = self._take(deadline, first.model)

    def _encode(self, pending: _Pending) -> Encoded | None:
        """Returns the encoded features, or None if the request has been answered."""
        now = time.monotonic()
        self._metrics.queue_seconds.observe(now - pending.arrived)
        if pending.future.done() or now >= pending.deadline:
            return None  # it is answered when its time is over
        try:
            features = pending.call.features(pending.model, self._max_candidates)
            if features.rows > self._max_candidates:
                raise too_many_candidates(self._max_candidates, features.rows)
            scorer = pending.model.scorer
            if not features.rows:
                empty = scorer.score(features.context, features.candidates)
                pending.finish(pending.call.response(pending.model, empty))
                return None
            return Encoded(*scorer.encode(features.context, features.candidates))
        except HttpError as error:
            pending.finish(error)
        except RequestError as error:
            pending.finish(as_http_error(error))
        except Exception:
            traceback.print_exc()
            pending.finish(internal_error())
        return None

    def _score(self, batch: Sequence[tuple[_Pending, Encoded]]) -> None:
        model = batch[0][0].model
        self._metrics.batch_requests.observe(len(batch))
        self._metrics.batch_candidates.observe(sum(encoded.rows for _, encoded in batch))
        results = model.score([encoded for _, encoded in batch])
        for (pending, _), scores in zip(batch, results, strict=True):
            error = _not_finite(scores)
            pending.finish(error or pending.call.response(model, scores))


def _not_finite(scores: Mapping[str, np.ndarray]) -> HttpError | None:
    """Returns the error of a request with scores that are no numbers, which JSON cannot hold."""
    for name, values in scores.items():
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            return HttpError(
                400,
                f"candidate {bad[0]}, {name}: must have a finite score: found {values[bad[0]]}."
                " A number of the request is too large for the model.",
                "candidates",
            )
    return None


def queue_full(most: int) -> HttpError:
    """Returns the error of a request beyond the limit."""
    return HttpError(
        429,
        f"max_requests: must be at most {most:,} at a time: found that many. Try again later.",
        "max_requests",
        _RETRY,
    )
