"""Writes metrics to TensorBoard, to metrics.jsonl and to one live line on the terminal.

Only this module imports tensorboardX. Only process 0 writes.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jaxrank import json_files
from jaxrank.atomic import replacing
from jaxrank.errors import InputError
from jaxrank.runtime import processes

FLUSH_RECORDS = 1000
FLUSH_SECONDS = 5.0
UPDATE_SECONDS = 0.25


class Writer:
    """Writes records of metrics by step to `workdir`/metrics.jsonl and `workdir`/tensorboard.

    A writer is opened at the step from which a run starts or resumes. It drops the records after
    that step, so that every step occurs once. Records are buffered. They are flushed by the first
    record that is written 5 seconds after the last flush, and after 1,000 records. Call `flush`
    before saving a checkpoint: otherwise a killed run that resumes from it lacks the records since
    the last flush.

    A line of metrics.jsonl is {"step": 20, "kind": "train", "loss": 0.69, ...}. Numbers that JSON
    does not have (NaN, infinity) are null. "day" follows "kind" if a day is set. In TensorBoard the
    same number is "train/loss".

        with Writer(workdir, start_step=0) as writer:
            writer.write(20, {"loss": 0.69})

    Raises:
        InputError: a line of metrics.jsonl before the last is not a record.
    """

    def __init__(self, workdir: str | os.PathLike[str], start_step: int) -> None:
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _truncate(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        self._start_step = start_step
        self._events = _open_events(folder / "tensorboard", start_step)
        self._pending: list[tuple[float, int, dict[str, str], dict[str, Any]]] = []
        self._flushed = time.time()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self, step: int, values: Mapping[str, float], kind: str = "train", day: str = ""
    ) -> None:
        """Adds a record of Python or NumPy numbers by name. None and NaN become null."""
        if {"step", "kind", "day"} & set(values):
            raise ValueError(f"values cannot be called step, kind or day: found {sorted(values)}.")
        now = time.time()
        labels = {"kind": kind, "day": day} if day else {"kind": kind}
        self._pending.append((now, int(step), labels, json_files.plain(values)))
        if len(self._pending) >= FLUSH_RECORDS or now - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def text(self, name: str, text: str) -> None:
        """Writes Markdown to TensorBoard's Text tab at the first step of the run."""
        shown = summary.text(name, text)
        self._events.write_event(Event(wall_time=time.time(), step=self._start_step, summary=shown))

    def flush(self) -> None:
        """Writes all buffered records to the files."""
        for now, step, labels, values in self._pending:
            record = {"step": step} | labels | values
            self._file.write(json_files.to_text(record, non_finite="null") + "\n")
            # One event for all numbers of a record costs half as much as one per number.
            scalars = [
                Summary.Value(tag=f"{labels['kind']}/{name}", simple_value=value)
                for name, value in values.items()
                if value is not None
            ]
            event = Event(wall_time=now, step=step, summary=Summary(value=scalars))
            self._events.write_event(event)
        self._pending.clear()
        self._file.flush()
        self._events.flush()
        self._flushed = time.time()

    def close(self) -> None:
        """Flushes and closes the files. A second call has no effect."""
        if not self._file.closed:
            self.flush()
            self._file.close()
            self._events.close()


class _Nowhere(Writer):
    """No-op writer for processes other than 0."""

    def __init__(self) -> None:
        pass

    def write(
        self, step: int, values: Mapping[str, float], kind: str = "train", day: str = ""
    ) -> None:
        pass

    def text(self, name: str, text: str) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_writer(workdir: str | os.PathLike[str], start_step: int) -> Writer:
    """Opens a `Writer` in process 0 and a no-op writer in the others.

    Raises:
        InputError: as `Writer`, in all processes.
    """
    with processes.together():
        return Writer(workdir, start_step) if processes.is_first() else _Nowhere()


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


def _open_events(folder: Path, start_step: int) -> EventsWriter:
    """Opens a new event file whose first event drops all steps after `start_step` in TensorBoard.

    tensorboardX's SummaryWriter is not used: it sends each event through a queue to a thread, and
    its `flush` does not wait for that thread.
    """
    folder.mkdir(exist_ok=True)
    # TensorBoard reads files in the order of their names. Without this suffix, names differ only in
    # the second at which a run started.
    events = EventsWriter(str(folder / "events"), filename_suffix=f".{start_step:012d}")
    start = SessionLog(status=SessionLog.START)
    events.write_event(Event(wall_time=time.time(), step=start_step + 1, session_log=start))
    return events


def _truncate(path: Path, start_step: int) -> None:
    """Drops the records after `start_step`, and an incomplete last line of a killed run."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise InputError(
                f"every line of {path} must be a JSON object with a step:"
                f" found {line[:80]!r} in line {number}. Move the file away to continue without it."
            ) from error
        if step <= start_step and line.endswith(b"\n"):
            kept.append(line)
    if len(kept) == len(lines):
        return
    with replacing(path, sync=True) as partial:
        partial.write_bytes(b"".join(kept))
