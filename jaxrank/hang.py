"""Telling where a run stands that does not go on."""

import faulthandler
import time

_STDERR = 2  # the file descriptor
_PARTS = 4  # of the time, after one of which the clock is set back


class HangWatch:
    """Writes the stacks of all threads to standard error when `alive` was not called for long.

    That is for three quarters of the time, up to the whole of it. Again after as long, and the run
    goes on: what it waits for may still come.

        with HangWatch(1800) as watch:
            while ...:
                watch.alive()

    Args:
        seconds: from one call of `alive` to the next; 0: nothing is watched.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._since = float("-inf")

    def __enter__(self) -> "HangWatch":
        self.alive()
        return self

    def __exit__(self, *_: object) -> None:
        if self._seconds:
            faulthandler.cancel_dump_traceback_later()

    def alive(self) -> None:
        # To set the clock back starts a thread, so not in every call.
        now = time.monotonic()
        if self._seconds and now - self._since > self._seconds / _PARTS:
            self._since = now
            faulthandler.dump_traceback_later(self._seconds, repeat=True, file=_STDERR)
