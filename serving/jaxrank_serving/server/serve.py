"""The process of the server: its socket, its signals, and uvicorn."""

import contextlib
import gc
import os
import signal
import socket
import sys
from asyncio import Transport
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jaxrank_serving.server.app import App
from jaxrank_serving.server.settings import Settings, SettingsError

_BACKLOG = 2048
_IDLE_SECONDS = 60  # after which a connection without a request is closed
_HEADER_SECONDS = 5
_MAX_HEADER_BYTES = 64 << 10
# A thread that scores gives way to the event loop after this time. Python's default is 5 ms.
_SWITCH_SECONDS = 0.0005


class _Protocol(HttpToolsProtocol):
    """Closes connections whose headers do not arrive in time, or are too long."""

    _header_bytes = 0
    _in_headers = True

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._close_later()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._header_bytes, self._in_headers = 0, True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        self._header_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_headers and self._header_bytes > _MAX_HEADER_BYTES:
            self.send_400_response(f"The headers must have at most {_MAX_HEADER_BYTES} bytes.")
        elif self.cycle is None or self.cycle.response_complete:
            # The rest of the headers, or of a body that has been rejected.
            self._close_later()

    def _close_later(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            _HEADER_SECONDS, self.timeout_keep_alive_handler
        )


class _Server(uvicorn.Server):
    """Returns after a signal, where uvicorn raises it again, and reports it."""

    report: Callable[[str], None]
    app: App

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        handlers = {n: signal.signal(n, self.handle_exit) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        name, active = signal.Signals(sig).name, self.app.active
        self.report(f"Received {name}: finishing {active} requests. Send it again to stop now.")
        self.should_exit = True


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        raise SettingsError(
            f"--host, --port: must be free to listen on: {settings.host}:{settings.port}:"
            f" found {error}."
        ) from error


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def serve(settings: Settings, report: Callable[[str], None] = _print) -> None:
    """Serves a bundle until SIGTERM or Ctrl-C, and then finishes the requests in work.

    Args:
        settings: of the server.
        report: called with messages.

    Raises:
        SettingsError: the address cannot be listened on.
        BundleError: no version could be loaded.
    """
    with _listen(settings) as listener:
        app = App(settings, report)
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="error",  # otherwise each invalid request is a line
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=settings.timeout_ms // 1000 + 5,
        )
        server = _Server(config)
        server.report, server.app = report, app
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.collect()
        gc.freeze()  # imported objects and the model are never garbage
        host, port, *_ = listener.getsockname()
        where: Any = f"[{host}]" if ":" in host else host
        report(f"Serving {settings.name} at http://{where}:{port}")
        server.run(sockets=[listener])
