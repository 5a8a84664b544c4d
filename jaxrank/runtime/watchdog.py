"""Reports the stacks of a run that hangs."""

import faulthandler
import sys
import threading
import time
import traceback

_STDERR = 2  # the file descriptor
_LOOKS = 4  # checks within the time after which a run counts as hanging


class Watchdog:
    """Writes the stacks of all threads to standard error when `alive` was not called for too long.

    The report is repeated after each further interval. The run continues, because what it waits for
    may still arrive. A Python thread writes the stacks while it holds the interpreter lock. If
    another thread never releases that lock, faulthandler writes them after twice the time. It is
    only the fallback: it reads stacks that may change, and has crashed a healthy run that way.

        with Watchdog(1800) as watch:
            while ...:
                watch.alive()

    Args:
        seconds: maximum time between two calls of `alive`. 0: disabled.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang watch", daemon=True)

    def __enter__(self) -> "Watchdog":
        self.alive()
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._seconds:
            self._ended.set()
            self._thread.join()

    def alive(self) -> None:
        self._since = time.monotonic()

    def _watch(self) -> None:
        while True:
            faulthandler.dump_traceback_later(2 * self._seconds, repeat=True, file=_STDERR)
            if self._ended.wait(self._seconds / _LOOKS):
                break
            if time.monotonic() - self._since > self._seconds:
                self._report()
                self.alive()
        faulthandler.cancel_dump_traceback_later()

    def _report(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"jaxrank: no progress for {self._seconds:g} s. Stacks of all threads:\n"]
        for thread, frame in sys._current_frames().items():
            lines += [f"Thread {names.get(thread, thread)}:\n", *traceback.format_stack(frame)]
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
