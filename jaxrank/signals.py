"""Signals that ask a program to end: SIGTERM, and SIGINT, which is Ctrl-C."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def end_at_second() -> Iterator[None]:
    """Meanwhile the second signal ends the program at once, with 128 and its number as status.

    Also where the main thread compiles or waits for a device and Python runs no handler. Counted
    are those of SIGNALS that have a handler in Python. For the main thread only.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    threading.Thread(target=_count, args=(reader,), daemon=True).start()
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()


def _count(reader: socket.socket) -> None:
    """Reads the numbers of signals that came, which are written there at once, whatever the main
    thread does."""
    count = 0
    with reader:
        while found := reader.recv(1):
            count += found[0] in SIGNALS
            if count == 2:
                os._exit(128 + found[0])
