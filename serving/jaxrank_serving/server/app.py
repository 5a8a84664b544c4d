"""The ASGI application: routes, limits, health and metrics."""

import asyncio
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jaxrank_serving
from jaxrank_serving.server import inference, metrics
from jaxrank_serving.server.batcher import Batcher, queue_full
from jaxrank_serving.server.messages import (
    HttpError,
    Receive,
    Response,
    Send,
    error_response,
    header,
    internal_error,
    json_response,
    read_body,
    respond,
)
from jaxrank_serving.server.model import Model, load_model
from jaxrank_serving.server.repository import BusyError, Repository
from jaxrank_serving.server.score import Call, ScoreCall
from jaxrank_serving.server.settings import Settings

_EXTENSIONS = ["binary_tensor_data", "model_repository"]


class App:
    """The application of one model. Loads it when it is created.

    Args:
        settings: of the server.
        report: called with messages about versions.

    Raises:
        BundleError: no version could be loaded.
    """

    def __init__(self, settings: Settings, report: Callable[[str], None] = print):
        self._settings = settings
        hash_key = settings.hash_key()

        def load(path: Any, verify: bool) -> Model:
            return load_model(
                path,
                settings.name,
                settings.batch_sizes,
                threads=settings.threads,
                hash_key=hash_key,
                verify=verify,
            )

        self.repository = Repository(settings.bundle, load, report, verify=not settings.skip_verify)
        self.metrics = metrics.Metrics()
        self._active = self._receiving = 0
        self._batcher = Batcher(
            max_requests=settings.max_requests,
            max_candidates=settings.max_candidates,
            delay_seconds=settings.batch_delay_us / 1e6,
            metrics=self.metrics,
            expects=lambda: self._receiving > 0,
        )
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        self._add_metrics()

    def _add_metrics(self) -> None:
        add, repository = self.metrics.add, self.repository
        add("jaxrank_active_requests", lambda: self._active)
        add("jaxrank_queue_requests", lambda: self._batcher.waiting)
        add("jaxrank_loads", lambda: repository.loads)
        add("jaxrank_load_failures", lambda: repository.failures)
        self.metrics.add_model(lambda: repository.model)

    def start(self) -> None:
        """Starts the threads that score and that look for newer versions."""
        self._batcher.start()
        if self._settings.reload_seconds:
            self._watcher.start()

    def close(self) -> None:
        """Scores what waits, and ends the threads."""
        self._stopped.set()
        self._batcher.close()

    @property
    def active(self) -> int:
        """Number of requests in work."""
        return self._active

    def _watch(self) -> None:
        while not self._stopped.wait(self._settings.reload_seconds):
            try:
                self.repository.refresh()
            except BusyError:
                continue
            except Exception:  # the next check may succeed
                traceback.print_exc()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answers one request, or follows the life of the server."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        started = time.monotonic()
        endpoint = "other"
        try:
            endpoint, respond_to = self._route(scope)
            response = await respond_to(scope, receive, started)
        except HttpError as error:
            response = error_response(error)
        except Exception:
            traceback.print_exc()
            response = error_response(internal_error())
        self.metrics.requests.labels(endpoint, response.status).inc()
        if endpoint in ("score", "infer"):
            self.metrics.seconds.labels(endpoint).observe(time.monotonic() - started)
        await respond(send, response)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Follows the life of the server: starts and ends the threads."""
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                await asyncio.to_thread(self.close)
                await send({"type": "lifespan.shutdown.complete"})
                return

    def _route(self, scope: dict[str, Any]) -> tuple[str, Callable[..., Any]]:
        """Returns the name of an endpoint, and the coroutine that answers it."""
        path = scope["path"].removeprefix("/").removesuffix("/").split("/")
        match path:
            case ["v1", "score"]:
                return _checked(scope, "POST", "score", self._score)
            case ["v2", "models", name, "infer"]:
                self._check_model(name)
                return _checked(scope, "POST", "infer", self._infer)
            case ["v2", "models", name, "versions", version, "infer"]:
                self._check_model(name, version)
                return _checked(scope, "POST", "infer", self._infer)
            case ["v2", "repository", "models", name, "load"]:
                self._check_model(name)
                return _checked(scope, "POST", "load", self._load)
            case ["v2", "repository", "index"]:
                return _checked(scope, "POST", "index", self._index)
            case ["metrics"]:
                return _checked(scope, "GET", "metrics", self._metrics)
        tree = self._document(path)
        if tree is None:
            raise HttpError(404, f"path: must be one of the API's: found {scope['path']!r:.200}.")
        is_unready = tree in ({"ready": False}, {"live": False})

        async def document(*_: Any) -> Response:
            return json_response(tree, 503 if is_unready else 200)

        return _checked(scope, "GET", "health" if path[1:2] == ["health"] else "model", document)

    def _document(self, path: list[str]) -> dict[str, Any] | None:
        """Returns the answer of an endpoint that has no body, or None if there is none."""
        ready = self._batcher.is_alive and not self._stopped.is_set()
        match path:
            case ["v2"]:
                version = jaxrank_serving.__version__
                return {"name": "jaxrank", "version": version, "extensions": _EXTENSIONS}
            case ["v2", "health", "live"]:
                return {"live": self._batcher.is_alive}
            case ["v2", "health", "ready"]:
                return {"ready": ready}
            case ["v2", "models", name] | ["v2", "models", name, "versions", _]:
                self._check_model(name, *path[4:])
                return inference.metadata(self.repository.model)
            case ["v2", "models", name, "ready"] | ["v2", "models", name, "versions", _, "ready"]:
                self._check_model(name, *path[4:5])
                return {"name": name, "ready": True} if ready else {"ready": False}
        return None

    def _check_model(self, name: str, version: str | None = None) -> None:
        model = self.repository.model
        if name != model.name:
            raise HttpError(404, f"model: must be {model.name!r}: found {name!r:.80}.", "model")
        if version not in (None, model.version):
            raise HttpError(
                404, f"version: must be {model.version!r}: found {version!r:.80}.", "version"
            )

    async def _score(self, scope: dict[str, Any], receive: Receive, started: float) -> Response:
        return await self._scored(scope, receive, started, ScoreCall)

    async def _infer(self, scope: dict[str, Any], receive: Receive, started: float) -> Response:
        length = header(scope["headers"], inference.HEADER_LENGTH)
        return await self._scored(
            scope, receive, started, lambda body: inference.InferCall(body, length)
        )

    async def _scored(
        self,
        scope: dict[str, Any],
        receive: Receive,
        started: float,
        make_call: Callable[[bytes], Call],
    ) -> Response:
        """Reads a request and returns its scores, within the limits of the server."""
        settings, model = self._settings, self.repository.model
        if self._active >= settings.max_requests:
            raise queue_full(settings.max_requests)
        deadline = started + settings.timeout_ms / 1e3
        self._active += 1
        body = None
        try:
            # time.monotonic is the clock of the event loop.
            async with asyncio.timeout_at(deadline):
                self._receiving += 1
                try:
                    body = await read_body(scope["headers"], receive, settings.max_body_bytes)
                finally:
                    self._receiving -= 1
                return await self._batcher.score(make_call(body), model, deadline)
        except TimeoutError as error:
            if body is None:
                must = f"body: must be complete after {settings.timeout_ms:,} ms: found a part."
                raise HttpError(408, must, "body", ((b"connection", b"close"),)) from error
            must = "timeout_ms: must be at least the time of a request: found more than"
            raise HttpError(504, f"{must} {settings.timeout_ms:,} ms.", "timeout_ms") from error
        finally:
            self._active -= 1

    async def _load(self, scope: dict[str, Any], receive: Receive, started: float) -> Response:
        """Loads a newer version now, if there is one."""
        try:
            result = await asyncio.to_thread(self.repository.refresh)
        except BusyError as error:
            text = (
                "load: must run once at a time: found another check in progress. Try again later."
            )
            raise HttpError(429, text, "load", ((b"retry-after", b"1"),)) from error
        tree = {
            "name": self._settings.name,
            "version": self.repository.model.version,
            "loaded": result.loaded,
        }
        if result.errors:
            return json_response({"error": " ".join(result.errors), **tree}, 409)
        return json_response(tree)

    async def _index(self, *_: Any) -> Response:
        """Lists the loaded version, and versions that could not be loaded."""
        name, version = self._settings.name, self.repository.model.version
        ready = {"name": name, "version": version, "state": "READY"}
        failed = {"name": name, "version": "", "state": "UNAVAILABLE"}
        return json_response([ready, *(failed | {"reason": e} for e in self.repository.errors)])

    async def _metrics(self, *_: Any) -> Response:
        return Response(200, self.metrics.text(), metrics.CONTENT_TYPE)


def _checked(
    scope: dict[str, Any], method: str, endpoint: str, answer: Callable[..., Any]
) -> tuple[str, Callable[..., Any]]:
    """Returns the endpoint and its coroutine.

    Raises:
        HttpError: the request has another method.
    """
    allowed = ("GET", "HEAD") if method == "GET" else (method,)
    if scope["method"] not in allowed:
        raise HttpError(
            405,
            f"method: must be {method}: found {scope['method']!r:.20}.",
            "method",
            ((b"allow", ", ".join(allowed).encode()),),
        )
    return endpoint, answer
