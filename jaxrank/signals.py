"""Signals that ask a program to end: SIGTERM, and SIGINT, which is Ctrl-C.

A program ends at the second one (`end_at_second`), `Caught` only records them, and processes start
while they are `held_back`. It imports neither NumPy nor JAX.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from types import FrameType

_RAISED_AGAIN_AFTER = 0.02  # seconds
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
        while received := reader.recv(1):
            if received[0] not in SIGNALS:
                continue
            now = time.monotonic()
            if first is not None and now - first >= apart_seconds:
                os._exit(128 + received[0])
            first = now if first is None else first


@contextlib.contextmanager
def raised_again() -> Iterator[None]:
    """Meanwhile a KeyboardInterrupt that was dropped is raised again in the main thread.

    Python drops what is raised in callbacks, as of the garbage collector, where JAX has one. Where
    the main thread is in such a callback again, it is raised once more. Other errors that are
    dropped are reported as before.
    """
    before = sys.unraisablehook
    main = threading.main_thread().ident

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        # Later, as what is raised in this hook is dropped, too.
        timer = threading.Timer(_RAISED_AGAIN_AFTER, _interrupt, (main,))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _interrupt(thread: int) -> None:
    # Not by a signal: who counts signals has counted the one that came.
    raised = ctypes.py_object(KeyboardInterrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


class Caught:
    """Catches signals from `listen` to `close`; a second one ends the program.

    Args:
        apart_seconds: as of `end_at_second`.

    Attributes:
        number: of the first signal that came; 0 if none did.
    """

    def __init__(self, apart_seconds: float):
        self.number = 0
        self._apart_seconds = apart_seconds
        self._listening: contextlib.ExitStack | None = None

    def listen(self) -> None:
        """Catches signals from now on. Does nothing in other threads than the main one."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or self._listening is not None:
            return
        self._listening = contextlib.ExitStack()
        self._listening.enter_context(end_at_second(self._apart_seconds))
        for number in SIGNALS:
            before = signal.signal(number, self._catch)
            self._listening.callback(signal.signal, number, before)

    def _catch(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number

    def close(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Meanwhile signals wait: for this thread, and for processes it starts until each `release`s.

    The like of Ctrl-C comes to all processes of a group. A new one that it ends while it still
    imports prints where it stood, and whoever started it may wait for ever for it to read what it
    was sent. What comes for this process is handled at the end, or by other threads as before.
    """
    resource_tracker.ensure_running()  # else the first process starts it, which ends the hold
    is_main = threading.current_thread() is threading.main_thread()
    with _kept() if is_main else contextlib.nullcontext():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Signals that other threads get for this one are handled at the end."""
    came: list[int] = []
    handlers = {n: signal.getsignal(n) for n in SIGNALS}
    try:
        with contextlib.ExitStack() as stack:
            for number, handler in handlers.items():
                if handler is not None:  # which nobody could put back
                    signal.signal(number, lambda number, _: came.append(number))
                    stack.callback(signal.signal, number, handler)
            yield
    finally:
        for again in came:
            handler = handlers[signal.Signals(again)]
            if callable(handler):  # not raised once more: who counts signals has counted it
                handler(again, None)
            else:
                signal.raise_signal(again)


def release(*, ignore: bool) -> None:
    """Lets signals through in a process that was started while they were held back.

    Args:
        ignore: whether they do nothing, also those that wait; else they end the process without a
            word.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if ignore else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
