"""Lists of a request that are aligned event by event, by the rules of training.

`jaxrank.data.encode.sequences` has the same rules for columns of raw data.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxrank_serving.derived.times import seconds
from jaxrank_serving.errors import RequestError
from jaxrank_serving.lists import Lists, find_overlong, is_empty, is_padding, positions
from jaxrank_serving.signature import Column, Events, Ragged
from jaxrank_serving.values import Cells, elements

AGE_ROWS = 32
_MUST_TIME = "a time, as events must be before it"


class _Aligned(NamedTuple):
    """Events of n histories, or of the one of the context.

    ids: of each feature, with the history of each event.
    lengths: i64[n], number of events of each history.
    times: f64[events] in seconds, if the sequence has times.
    """

    ids: dict[str, Cells]
    lengths: np.ndarray
    times: np.ndarray | None = None

    @property
    def owner(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def take(self, index: np.ndarray) -> "_Aligned":
        """Returns the events at i64[m] `index`, whose histories must not fall."""
        places = index.tolist()
        rows = self.owner[index]
        ids = {
            name: cells._replace(values=[cells.values[i] for i in places], rows=rows)
            for name, cells in self.ids.items()
        }
        lengths = np.bincount(rows, minlength=len(self.lengths))
        return _Aligned(ids, lengths, None if self.times is None else self.times[index])

    def select(self, keep: np.ndarray) -> "_Aligned":
        return self if keep.all() else self.take(np.flatnonzero(keep))


def sequence_lists(
    sequence: Events,
    entries: Sequence[Ragged],
    columns: Mapping[str, Cells],
    time_format: str,
) -> dict[str, Lists]:
    """Returns the lists of the features of a sequence, the newest event first.

    Args:
        entries: the features of the sequence that the model reads.
        columns: values of the request.
        time_format: of numbers in columns of times.

    Raises:
        RequestError: lists do not fit together, or the request has no time.
    """
    by_name = {entry.name: entry for entry in entries if entry.name != sequence.age}
    events = _read(sequence, entries[0], by_name, columns)
    events = _without_padding(events, by_name)
    moments = None
    if sequence.time:
        moments = _moments(sequence, events, columns, time_format)
        events = _timed(sequence, events, time_format)
        assert events.times is not None
        events = events.select(events.times < moments[events.owner])
    if sequence.order == "oldest_first":
        ends = np.repeat(np.cumsum(events.lengths), events.lengths)
        events = events.take(ends - 1 - positions(events.lengths))
    whole = events.lengths
    is_context = columns[sequence.time or entries[0].name].is_context
    events = _truncated(entries[0], events, is_context)
    is_cut = whole > events.lengths
    cut = (int((whole - events.lengths).sum()), int(is_cut.sum()))
    ids = dict(events.ids)
    if moments is not None and events.times is not None:
        ages = np.frexp(1 + moments[events.owner] - events.times)[1] - 1
        column = Column(sequence.age, "int32", True, "any", True, None, False)
        rows = np.minimum(ages, AGE_ROWS - 1).tolist()
        ids[sequence.age] = Cells(rows, column, is_context, events.owner)
    return {e.name: Lists(ids[e.name], events.lengths, None, *cut) for e in entries}


def _read(
    sequence: Events,
    entry: Ragged,
    entries: Mapping[str, Ragged],
    columns: Mapping[str, Cells],
) -> _Aligned:
    """Reads the lists, which must be given in one place and have equal lengths."""
    names = [*entries, *([sequence.time] if sequence.time else [])]
    ids: dict[str, Cells] = {}
    lengths: dict[str, np.ndarray] = {}
    for name in names:
        read = entries.get(name, entry)
        ids[name], lengths[name] = elements(columns[name], read.separator, read.brackets)
        if columns[name].is_context != columns[names[0]].is_context:
            must = f"given where {names[0]} is, in the context or with each candidate"
            raise RequestError(name, None, must, "in the other place")
        differ = np.flatnonzero(lengths[name] != lengths[names[0]])
        if len(differ):
            row = int(differ[0])
            must = f"as many values as {names[0]} has, {lengths[names[0]][row]}"
            place = None if columns[name].is_context else row
            raise RequestError(name, place, must, str(lengths[name][row]))
    return _Aligned(ids, lengths[names[0]])


def _without_padding(events: _Aligned, entries: Mapping[str, Ragged]) -> _Aligned:
    """Drops the events of which an id is padding, and rejects empty ids of others."""
    padding = np.zeros(int(events.lengths.sum()), bool)
    for name, entry in entries.items():
        if entry.padding:
            cells = events.ids[name]
            padding |= [is_padding(entry, value, cells.column.type) for value in cells.values]
    events = events.select(~padding)
    for name in entries:
        for i, value in enumerate(events.ids[name].values):
            if is_empty(value):
                events.ids[name].reject(i, "a list without empty ids")
    return events


def _moments(
    sequence: Events, events: _Aligned, columns: Mapping[str, Cells], time_format: str
) -> np.ndarray:
    """Returns the time of the request for each history, f64[n]."""
    cells = columns[sequence.example_time]
    moments = seconds(cells, time_format)
    missing = np.flatnonzero(np.isnan(moments))
    if len(missing):
        cells.reject(int(missing[0]), _MUST_TIME)
    if columns[sequence.time].is_context and not cells.is_context:
        must = f"given in the context, as {sequence.time} is"
        raise RequestError(sequence.example_time, None, must, "with the candidates")
    return np.broadcast_to(moments, events.lengths.shape)


def _timed(sequence: Events, events: _Aligned, time_format: str) -> _Aligned:
    """Reads the times of events, which must be in the declared order."""
    ids = dict(events.ids)
    cells = ids.pop(sequence.time)
    times = seconds(cells, time_format)
    missing = np.flatnonzero(np.isnan(times))
    if len(missing):
        cells.reject(int(missing[0]), "a list of times")
    steps = np.diff(times) if sequence.order == "oldest_first" else -np.diff(times)
    wrong = np.flatnonzero((steps < 0) & (np.diff(events.owner) == 0))
    if len(wrong):
        cells.reject(int(wrong[0]) + 1, f"a list of times in the order {sequence.order!r}")
    return _Aligned(ids, events.lengths, times)


def _truncated(entry: Ragged, events: _Aligned, is_context: bool) -> _Aligned:
    """Keeps the newest `max_length` events of each history, or rejects longer ones."""
    if not find_overlong(entry, events.lengths, is_context).any():
        return events
    return events.select(positions(events.lengths) < entry.max_length)
