"""Signals that ask a program to end: SIGTERM and SIGINT (Ctrl-C).

`Caught` records signals, `end_at_second` ends the program at the second one, `exit_at_sigterm`
makes SIGTERM an exception, and `held_back` delays signals while processes start. This module
imports neither NumPy nor JAX. `__main__` has a handler of its own for Ctrl-C while this module and
others are imported.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from multiprocessing import resource_tracker
from types import FrameType

_RAISED_AGAIN_AFTER = 0.02  # seconds
_IN_NATIVE_IMPORT = ("create_module", "exec_module")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def end_at_second(apart_seconds: float = 0.0) -> Iterator[None]:
    """Ends the program immediately at a second signal within the block, with status 128 + signal.

    It works even while the main thread compiles or waits for a device, when Python runs no
    handlers. It counts those of SIGNALS that have a handler in Python. For the main thread only.

    Args:
        apart_seconds: signals within this time after the first count as the same signal. A service
            manager may signal a launcher and its programs, and the launcher signals them again.
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


@contextlib.contextmanager
def exit_at_sigterm() -> Iterator[None]:
    """Raises SystemExit at SIGTERM within the block, so that its `finally` clauses are executed."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _End:
    """A handler that ends the program after a report. Forked processes end silently."""

    def __init__(self, report: Callable[[int], object]):
        self._report, self._process, self._started = report, os.getpid(), threading.Lock()

    def __call__(self, number: int, _: FrameType | None) -> None:
        if not self._started.acquire(blocking=False):
            return  # the other thread ends the program
        try:
            if os.getpid() == self._process:
                self._report(128 + number)
        finally:
            os._exit(128 + number)


@contextlib.contextmanager
def end_at_sigterm(report: Callable[[int], object]) -> Iterator[None]:
    """Ends the program at SIGTERM within the block, with status 128 + signal, after a report.

    Nothing is raised, because modules in C++ may abort the program. Within `end_at_second` it works
    even while the main thread compiles.

    Args:
        report: receives the status.
    """
    before = signal.signal(signal.SIGTERM, _End(report))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _count(reader: socket.socket, apart_seconds: float) -> None:
    """Reads signal numbers, which the interpreter writes even while the main thread is busy."""
    first: float | None = None
    with reader:
        while received := reader.recv(1):
            if received[0] not in SIGNALS:
                continue
            now = time.monotonic()
            if first is not None and now - first >= apart_seconds:
                os._exit(128 + received[0])
            handler = signal.getsignal(received[0])
            if isinstance(handler, _End):
                handler(received[0], None)
            first = now if first is None else first


@contextlib.contextmanager
def reraise_interrupt() -> Iterator[None]:
    """Raises a KeyboardInterrupt that was dropped within the block again in the main thread.

    Python drops exceptions in callbacks of the garbage collector, for example the callback of JAX.
    If the main thread is in such a callback again, the exception is raised once more. Other dropped
    exceptions are reported as before.
    """
    before = sys.unraisablehook
    main = threading.main_thread().ident

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            before(unraisable)
            return
        # Later, because exceptions in this hook are dropped too.
        timer = threading.Timer(_RAISED_AGAIN_AFTER, _interrupt, (main,))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextlib.contextmanager
def not_in_native_imports() -> Iterator[None]:
    """Delays a KeyboardInterrupt within the block while a native module is initialised.

    Such modules import others, and one written in C++ aborts the program if that raises. For the
    main thread only.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if _is_native_import(frame):
            # Another signal, because `end_at_second` would count this one as another Ctrl-C.
            signal.setitimer(signal.ITIMER_REAL, _RAISED_AGAIN_AFTER)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handler)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _is_native_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in _IN_NATIVE_IMPORT and isinstance(
            frame.f_locals.get("self"), ExtensionFileLoader
        ):
            return True
        frame = frame.f_back
    return False


def _interrupt(thread: int) -> None:
    # Not by a signal, because `end_at_second` would count it as another one.
    raised = ctypes.py_object(KeyboardInterrupt)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


class Caught:
    """Catches signals from `listen` to `close`. A second one ends the program.

    Args:
        apart_seconds: see `end_at_second`.

    Attributes:
        number: number of the first signal; 0 before a signal arrives.
    """

    def __init__(self, apart_seconds: float):
        self.number = 0
        self._apart_seconds = apart_seconds
        self._listening: contextlib.ExitStack | None = None

    def listen(self) -> None:
        """Starts to catch signals. Has no effect outside the main thread."""
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
    """Delays signals to this thread and to new processes, which must call `release`.

    Ctrl-C reaches all processes of a group. A new process that it ends during its imports prints a
    traceback, and its parent may wait forever for it to read its input. Signals to this process are
    handled at the end of the block, or by other threads as before.
    """
    resource_tracker.ensure_running()  # otherwise the first process starts it and unblocks signals
    is_main = threading.current_thread() is threading.main_thread()
    with _kept() if is_main else contextlib.nullcontext():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Delays signals that other threads receive until the end of the block."""
    came: list[int] = []
    handlers = {n: signal.getsignal(n) for n in SIGNALS}
    try:
        with contextlib.ExitStack() as stack:
            for number, handler in handlers.items():
                if handler is not None:  # None cannot be restored: it was not set from Python
                    signal.signal(number, lambda number, _: came.append(number))
                    stack.callback(signal.signal, number, handler)
            yield
    finally:
        for again in came:
            handler = handlers[signal.Signals(again)]
            if callable(handler):  # not raised again, because it would be counted twice
                handler(again, None)
            else:
                signal.raise_signal(again)


def release(*, ignore: bool) -> None:
    """Unblocks signals in a process that was started within `held_back`.

    Args:
        ignore: whether signals are ignored, including delayed ones. Otherwise they end the process
            silently.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if ignore else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
