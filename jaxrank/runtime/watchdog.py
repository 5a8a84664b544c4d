"""Telling where a run stands that does not go on."""

import faulthandler
import sys
import threading
import time
import traceback

_STDERR = 2  # the file descriptor
_LOOKS = 4  # in the time after which a run hangs


class Watchdog:
    """Writes the stacks of all threads to standard error when `alive` was not called for long.

    Again after as long, and the run goes on: what it waits for may still come. A thread of Python
    does it, for which the others stand still; where none can run, since something holds the
    interpreter, faulthandler does after twice the time. It is no first choice: it reads stacks that
    may change, and to do so in a run that is well after all has ended one.

        with Watchdog(1800) as watch:
            while ...:
                watch.alive()

    Args:
        seconds: from one call of `alive` to the next; 0: nothing is watched.
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
                self._tell()
                self.alive()
        faulthandler.cancel_dump_traceback_later()

    def _tell(self) -> None:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        lines = [f"jaxrank: nothing has ended for {self._seconds:g} s; where all threads stand:\n"]
        for thread, frame in sys._current_frames().items():
            lines += [f"Thread {names.get(thread, thread)}:\n", *traceback.format_stack(frame)]
        sys.stderr.write("".join(lines))
        sys.stderr.flush()
