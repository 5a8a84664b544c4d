"""A live line on the terminal while a run trains."""

import math
import shutil
import sys
import time
from typing import TextIO

UPDATE_SECONDS = 0.25


class Progress:
    """A live line on standard error with steps, speed, loss and time left.

    Nothing is printed if `quiet` is set or if standard error is not a terminal.
    """

    def __init__(self, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._live = not quiet and self._stream.isatty()
        self._shown = -math.inf
        self._first: tuple[float, int] | None = None

    def update(self, step: int, num_steps: int, examples_per_second: float, loss: float) -> None:
        """Prints the line, at most four times per second and always for the last step."""
        if not self._live:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = (now, step)
        if now - self._shown < UPDATE_SECONDS and step < num_steps:
            return
        self._shown = now
        line = (
            f"step {step:,}/{num_steps:,} ({step / num_steps:.0%})"
            f"  {examples_per_second:,.0f} examples/s  loss {loss:.5f}"
            f"  {self._left(now, step, num_steps)}"
        )
        width = shutil.get_terminal_size().columns
        # A line as wide as the terminal would wrap, and the next one could not overwrite it.
        self._write(f"\r\x1b[K{line[: width - 1]}")

    def clear(self) -> None:
        """Removes the line, so that other output can be printed in its place."""
        if self._live and self._shown > -math.inf:
            self._write("\r\x1b[K")
            self._shown = -math.inf

    def close(self) -> None:
        """Removes the line."""
        self.clear()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._live = False  # the terminal was closed, and the run continues

    def _left(self, now: float, step: int, num_steps: int) -> str:
        start, first = self._first or (now, step)
        if step <= first:
            return "-:--:-- left"
        seconds = round((now - start) / (step - first) * (num_steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"
