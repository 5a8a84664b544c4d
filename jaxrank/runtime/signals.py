"""Signals that ask a program to end: SIGTERM, and SIGINT, which is Ctrl-C."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def end_at_second(apart_seconds: float = 0.0) -> Iterator[None]:
    """Meanwhile a second signal ends the program at once, with 128 and its number as status.

    Also where the main thread compiles or waits for a device and Python runs no handler. Counted
    are those of SIGNALS that have a handler in Python. For the main thread only.

    Args:
        apart_seconds: from the first signal, within which others are the same one: as of a service
            manager that tells a launcher and its programs, where the launcher tells them, too.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=_count, args=(reader, apart_seconds), daemon=True).start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()


def _count(reader: socket.socket, apart_seconds: float) -> None:
    """Reads the numbers of signals that came, which are written there at once, whatever the main
    thread does."""
    first: float | None = None
    with reader:
        while found := reader.recv(1):
            if found[0] not in SIGNALS:
                continue
            now = time.monotonic()
            if first is not None and now - first >= apart_seconds:
                os._exit(128 + found[0])
            first = now if first is None else first
