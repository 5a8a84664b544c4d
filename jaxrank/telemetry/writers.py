"""Writes metrics to TensorBoard and to metrics.jsonl.

Only this module imports tensorboardX. Only process 0 writes.
"""

import json
import os
import struct
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from jaxrank import json_files, renames
from jaxrank.atomic import replacing
from jaxrank.errors import InputError
from jaxrank.runtime import processes

FLUSH_RECORDS = 1000
FLUSH_SECONDS = 5.0
KINDS = ("train", "valid")  # of the records of a run
_LABELS = {"step", "kind", "day", "seconds"}


class Writer:
    """Writes records of metrics by step to `workdir`/metrics.jsonl and `workdir`/tensorboard.

    A writer is opened at the step from which a run starts or resumes. It drops the records after
    that step, so that every step occurs once. Records are buffered. They are flushed by the first
    record that is written 5 seconds after the last flush, and after 1,000 records. Call `flush`
    before saving a checkpoint: otherwise a killed run that resumes from it lacks the records since
    the last flush.

    A line of metrics.jsonl is {"step": 20, "kind": "train", "seconds": 1.5, "loss": 0.69, ...}.
    Numbers that JSON does not have (NaN, infinity) are null. "day" follows "kind" if a day is set.
    "seconds" is the time that the programs of the run have spent up to this record. A run that
    resumes continues from the last record that it keeps, so the time between two programs does not
    count.

    Each kind is a run of TensorBoard, with equal tags: "loss" of the run "train". A number is
    written once it has changed, because a constant one needs no chart.

        with Writer(workdir, start_step=0) as writer:
            writer.write(20, {"loss": 0.69})

    Args:
        workdir: of the run. It is created if it does not exist.
        start_step: the last step whose records are kept.
        kinds: of records that are written.
        started: when the program was started, by `time.perf_counter`. None: now.

    Raises:
        InputError: a line of metrics.jsonl before the last is not a record.
    """

    def __init__(
        self,
        workdir: str | os.PathLike[str],
        start_step: int,
        *,
        kinds: Sequence[str] = KINDS,
        started: float | None = None,
    ) -> None:
        folder = Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        self._runs = {kind: _Scalars() for kind in kinds}
        self._started = time.perf_counter() if started is None else started
        self._started -= _truncate(path, start_step, self._runs)
        self._file = path.open("a", encoding="utf-8")
        self._start_step = start_step
        for kind, run in self._runs.items():
            run.events = _open_events(folder / "tensorboard" / kind, start_step)
        if any((folder / "tensorboard").glob("events.*")):  # of a version with a single run
            _open_events(folder / "tensorboard", start_step).close()
        self._pending: list[tuple[float, int, dict[str, Any], dict[str, Any]]] = []
        self._flushed = time.time()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(
        self, step: int, values: Mapping[str, float], kind: str = "train", day: str = ""
    ) -> None:
        """Adds a record of Python or NumPy numbers by name. None and NaN become null."""
        if _LABELS & set(values):
            names = ", ".join(sorted(_LABELS))
            raise ValueError(f"values cannot be called {names}: found {sorted(values)}.")
        now = time.time()
        labels: dict[str, Any] = {"kind": kind, "day": day} if day else {"kind": kind}
        labels["seconds"] = round(time.perf_counter() - self._started, 3)
        self._pending.append((now, int(step), labels, json_files.plain(values)))
        if len(self._pending) >= FLUSH_RECORDS or now - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def text(self, name: str, text: str) -> None:
        """Writes Markdown to TensorBoard's Text tab at the first step of the run."""
        self._first_run.write(time.time(), self._start_step, summary.text(name, text))

    def image(self, step: int, name: str, png: bytes, kind: str = "valid") -> None:
        """Writes a picture to TensorBoard's Images tab."""
        picture = Summary(value=[Summary.Value(tag=name, image=_image(png))])
        self._runs[kind].write(time.time(), step, picture)

    def hparams(
        self, values: Mapping[str, float | str], metrics: Iterable[str], kind: str = "valid"
    ) -> None:
        """Writes the fields of a config, and the tags to compare runs by, to the HParams tab."""
        for shown in summary.hparams(dict(values), dict.fromkeys(metrics))[:2]:
            self._runs[kind].write(time.time(), self._start_step, shown)

    @property
    def _first_run(self) -> "_Scalars":
        return next(iter(self._runs.values()))

    def flush(self) -> None:
        """Writes all buffered records to the files."""
        for now, step, labels, values in self._pending:
            record = {"step": step} | labels | values
            self._file.write(json_files.to_text(record, non_finite="null") + "\n")
            self._runs[labels["kind"]].add(now, step, values)
        self._pending.clear()
        self._file.flush()
        for run in self._runs.values():
            run.flush()
        self._flushed = time.time()

    def close(self) -> None:
        """Flushes and closes the files. A second call has no effect."""
        if not self._file.closed:
            self.flush()
            self._file.close()
            constant = {name for run in self._runs.values() for name in run.constant()}
            for run in self._runs.values():
                run.close(constant)


class _Scalars:
    """Writes the scalars of one run of TensorBoard that have changed since their first record.

    events: of the run.
    """

    def __init__(self) -> None:
        self.events: EventsWriter
        # By name: the time, step and value of the first and the last record that are held back.
        self._held: dict[str, list[tuple[float, int, Any]]] = {}
        self._varied: set[str] = set()

    def recall(self, record: Mapping[str, Any]) -> None:
        """Notes a record that an earlier program wrote."""
        values = {name: value for name, value in record.items() if name not in _LABELS}
        self._changed(time.time(), record["step"], values)

    def add(self, now: float, step: int, values: Mapping[str, Any]) -> None:
        """Writes the values that have changed since their first record, in one event.

        One event for all numbers of a record costs half as much as one per number.
        """
        shown, released = self._changed(now, step, values)
        for name, held in released.items():
            self._release(name, held)
        if shown:
            self.write(now, step, _scalars(shown))

    def _changed(
        self, now: float, step: int, values: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, list[tuple[float, int, Any]]]]:
        """Returns the values to write, and the earlier ones that were held back so far."""
        shown, released = {}, {}
        for name, value in values.items():
            if value is None:
                continue
            if name not in self._varied:
                held = self._held.get(name, [])
                if not held or _is_equal(held[0][2], value):
                    self._held[name] = [*held[:1], (now, step, value)]
                    continue
                self._varied.add(name)
                released[name] = self._held.pop(name)
            shown[name] = value
        return shown, released

    def _release(self, name: str, held: Iterable[tuple[float, int, Any]]) -> None:
        for written, step, value in held:
            self.write(written, step, _scalars({name: value}))

    def write(self, now: float, step: int, shown: Summary) -> None:
        self.events.write_event(Event(wall_time=now, step=step, summary=shown))

    def flush(self) -> None:
        self.events.flush()

    def constant(self) -> set[str]:
        """Returns the numbers that are known to be the same in several records."""
        same = {name: held[0][2] for name, held in self._held.items() if len(held) > 1}
        return {name for name, value in same.items() if value == value}  # NaN is no number

    def close(self, constant: Container[str]) -> None:
        """Closes the file, after the numbers that have a single record.

        Args:
            constant: numbers that have no chart in another run, and so none here.
        """
        for name, held in self._held.items():
            if len(held) == 1 and name not in constant:
                self._release(name, held)
        self.events.close()


def _is_equal(a: Any, b: Any) -> bool:
    return a == b or (a != a and b != b)


def _scalars(values: Mapping[str, Any]) -> Summary:
    return Summary(value=[Summary.Value(tag=n, simple_value=v) for n, v in values.items()])


def _image(png: bytes) -> Any:
    width, height = struct.unpack(">II", png[16:24])
    return Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=png)


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

    def image(self, step: int, name: str, png: bytes, kind: str = "valid") -> None:
        pass

    def hparams(
        self, values: Mapping[str, float | str], metrics: Iterable[str], kind: str = "valid"
    ) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_writer(
    workdir: str | os.PathLike[str],
    start_step: int,
    *,
    kinds: Sequence[str] = KINDS,
    started: float | None = None,
) -> Writer:
    """Opens a `Writer` in process 0 and a no-op writer in the others.

    Raises:
        InputError: as `Writer`, in all processes.
    """
    with processes.together():
        if not processes.is_first():
            return _Nowhere()
        return Writer(workdir, start_step, kinds=kinds, started=started)


def _open_events(folder: Path, start_step: int) -> EventsWriter:
    """Opens a new event file whose first event drops all steps after `start_step` in TensorBoard.

    tensorboardX's SummaryWriter is not used: it sends each event through a queue to a thread, and
    its `flush` does not wait for that thread.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads files in the order of their names. Without this suffix, names differ only in
    # the second at which a run started.
    events = EventsWriter(str(folder / "events"), filename_suffix=f".{start_step:012d}")
    start = SessionLog(status=SessionLog.START)
    events.write_event(Event(wall_time=time.time(), step=start_step + 1, session_log=start))
    return events


def _truncate(path: Path, start_step: int, runs: Mapping[str, _Scalars]) -> float:
    """Drops the records after `start_step`, and an incomplete last line of a killed run.

    Kept records go to the run of their kind. Metrics of an earlier version are rewritten under
    their new names, so that each is one series. Returns the seconds of the last record.
    """
    if not path.exists():
        return 0.0
    lines = path.read_bytes().splitlines(keepends=True)
    kept, seconds = [], 0.0
    for number, line in enumerate(lines, start=1):
        try:
            stored = json.loads(line)
            step = stored["step"]
            record = renames.record(stored)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise InputError(
                f"every line of {path} must be a JSON object with a step:"
                f" found {line[:80]!r} in line {number}. Move the file away to continue without it."
            ) from error
        if step <= start_step and line.endswith(b"\n"):
            is_same = record == stored
            kept.append(line if is_same else (json_files.to_text(record) + "\n").encode())
            seconds = record.get("seconds", seconds)
            if run := runs.get(record.get("kind", "")):
                run.recall(record)
    if kept != lines:
        with replacing(path, sync=True) as partial:
            partial.write_bytes(b"".join(kept))
    return seconds
