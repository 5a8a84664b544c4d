"""Starting worker processes, which get the signals of their group too."""

import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

from jaxrank.errors import InputError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Meanwhile signals wait: for this thread, and for processes it starts until each `decide`s.

    The like of Ctrl-C comes to all processes of a group. A new one that it ends while it still
    imports prints where it stood, and whoever started it may wait for ever for it to read what it
    was sent. What comes for this process is handled at the end, or by other threads as before.
    """
    resource_tracker.ensure_running()  # else the first process starts it, which ends the hold
    is_main = threading.current_thread() is threading.main_thread()
    with _kept() if is_main else contextlib.nullcontext():
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Signals that other threads get for this one are handled at the end."""
    came: list[int] = []
    handlers = {n: signal.getsignal(n) for n in _SIGNALS}
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


def check_guarded() -> None:
    """Refuses to start processes from one that is being started: it imports its program anew, and
    that would start them again.

    Raises:
        InputError: saying what the program lacks.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            "data.num_workers: a program that reads with workers must do so behind"
            " `if __name__ == '__main__':`, for every worker imports it: found that it does not."
        )


def decide(action: signal.Handlers) -> None:
    """What signals do to a process that was started while they were held back, also those that
    wait: nothing, SIG_IGN, or end it without a word, SIG_DFL."""
    for number in _SIGNALS:
        signal.signal(number, action)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
