"""Reads columns of lists: single columns, or the lists of a sequence event by event."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.cells import ListElements, is_padding, list_elements
from jaxrank.data.encode.columns import Column, elements, read_column
from jaxrank.data.encode.times import seconds
from jaxrank.data.ragged import positions
from jaxrank.data.rejects import BadRows
from jaxrank.data.spec.entries import RaggedSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.sequences import AGE_ROWS, OLDEST_FIRST, SequenceSpec

_MUST_EMPTY = "a list without empty ids"


class _Events(NamedTuple):
    """Events of the sequences of a chunk.

    columns: the ids of each feature.
    lengths: i64[n], number of events of each example.
    times: f64[events] in seconds, if the sequence has times.
    """

    columns: dict[str, Column]
    lengths: np.ndarray
    times: np.ndarray | None = None

    @property
    def owner(self) -> np.ndarray:
        """The example of each event, i64[events]."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def take(self, index: np.ndarray) -> "_Events":
        """Returns the events at i64[m] `index`, whose examples must not fall."""
        lengths = np.bincount(self.owner[index], minlength=len(self.lengths))
        columns = {
            name: column._replace(values=column.values.take(pa.array(index)), lengths=lengths)
            for name, column in self.columns.items()
        }
        times = None if self.times is None else self.times[index]
        return _Events(columns, lengths, times)

    def select(self, keep: np.ndarray) -> "_Events":
        """Returns the events where bool[events] `keep` is True."""
        return self if keep.all() else self.take(np.flatnonzero(keep))


def all_lists(features: FeatureSpec, chunk: Chunk) -> list[ListElements]:
    """Returns the elements of each of `features.ragged`, in order.

    Lists of a sequence have equal lengths and begin with the newest event.

    Raises:
        InputError: a list is invalid, or lists of a sequence do not fit together.
    """
    entries = {entry.name: entry for entry in features.ragged}
    aligned: dict[str, ListElements] = {}
    for sequence in features.sequences:
        members = [entries[name] for name in sequence.features if name in entries]
        if members:
            aligned |= _sequence(sequence, members, features, chunk)
    return [
        aligned[entry.name] if entry.name in aligned else list_elements(entry, chunk)
        for entry in features.ragged
    ]


def list_columns(features: FeatureSpec) -> list[str]:
    """Returns the raw columns that `all_lists` reads, without weight columns."""
    computed = {sequence.age for sequence in features.sequences}
    names = [entry.name for entry in features.ragged if entry.name not in computed]
    for sequence in features.sequences:
        names += [*sequence.columns, *([sequence.time, features.time] if sequence.time else [])]
    return list(dict.fromkeys(names))


def _sequence(
    sequence: SequenceSpec, members: Sequence[RaggedSpec], features: FeatureSpec, chunk: Chunk
) -> dict[str, ListElements]:
    """Returns the elements of the ragged features of a sequence."""
    by_name = {entry.name: entry for entry in members if entry.name != sequence.age}
    raw = {
        name: elements(read_column(chunk, name), entry.separator, brackets=entry.brackets)
        for name, entry in by_name.items()
    }
    if sequence.time:
        entry = members[0]
        times = elements(
            read_column(chunk, sequence.time), entry.separator, brackets=entry.brackets
        )
        raw[sequence.time] = times
    events = _without_padding(_aligned(raw, chunk), by_name)
    late = np.zeros(len(events.lengths), np.int64)
    moments = None
    if sequence.time:
        moments = seconds(read_column(chunk, features.time), False, features.time_format)
        events = _timed(sequence, events, features.time_format)
        assert events.times is not None
        is_late = events.times >= moments[events.owner]
        late = np.bincount(events.owner[is_late], minlength=len(late))
        events = events.select(~is_late)
    events = _newest_first(sequence, events)
    whole = events.lengths
    events = _truncated(members[0], events, chunk)
    counts = dict(
        truncated=int((whole - events.lengths).sum()),
        truncated_lists=int((whole > events.lengths).sum()),
        late=int(late.sum()),
        late_lists=int((late > 0).sum()),
    )
    columns = events.columns
    if moments is not None and events.times is not None:
        ages = pa.array(age_rows(moments[events.owner] - events.times))
        columns[sequence.age] = Column(ages, sequence.age, chunk, events.lengths)
    return {entry.name: ListElements(columns[entry.name], None, **counts) for entry in members}


def age_rows(ages: np.ndarray) -> np.ndarray:
    """Maps f64[n] seconds above 0 to i32[n] rows: floor(log2(1 + age)), at most the last row."""
    return np.minimum(np.frexp(1 + ages)[1] - 1, AGE_ROWS - 1).astype(np.int32)


def _aligned(raw: Mapping[str, Column], chunk: Chunk) -> _Events:
    """Returns the events of columns whose lists must have equal lengths."""
    (first, column), *others = raw.items()
    assert column.lengths is not None
    for name, other in others:
        assert other.lengths is not None
        differ = np.flatnonzero(other.lengths != column.lengths)
        if len(differ):
            must = f"have as many values as {first}, which is part of the same sequence"
            row = differ[0]
            actual = f"{other.lengths[row]} and {column.lengths[row]}"
            raise BadRows(chunk, differ, name, must, actual)
    return _Events(dict(raw), column.lengths)


def _without_padding(events: _Events, entries: Mapping[str, RaggedSpec]) -> _Events:
    """Drops the events of which an id is padding, and rejects empty ids of others."""
    padding = np.zeros(int(events.lengths.sum()), bool)
    for name, entry in entries.items():
        if entry.padding:
            padding |= is_padding(events.columns[name].values, entry.padding)
    events = events.select(~padding)
    for name in entries:
        column = events.columns[name]
        if column.values.null_count:
            empty = column.values.is_null().to_numpy(zero_copy_only=False)
            hint = " Set padding=[''] to leave events with empty ids out."
            column.reject(np.flatnonzero(empty), _MUST_EMPTY, hint)
    return events


def _timed(sequence: SequenceSpec, events: _Events, time_format: str) -> _Events:
    """Reads the times of events, which must be in the declared order."""
    columns = dict(events.columns)
    column = columns.pop(sequence.time)
    times = seconds(column, False, time_format)
    steps = np.diff(times) if sequence.order == OLDEST_FIRST else -np.diff(times)
    wrong = np.flatnonzero((steps < 0) & (np.diff(events.owner) == 0))
    if len(wrong):
        must = f"a list of times in the order {sequence.order!r} of the sequence {sequence.name!r}"
        column.reject(wrong + 1, must)
    return _Events(columns, events.lengths, times)


def _newest_first(sequence: SequenceSpec, events: _Events) -> _Events:
    if sequence.order != OLDEST_FIRST:
        return events
    ends = np.repeat(np.cumsum(events.lengths), events.lengths)
    return events.take(ends - 1 - positions(events.lengths))


def _truncated(entry: RaggedSpec, events: _Events, chunk: Chunk) -> _Events:
    """Keeps the newest `max_length` events of each example, or rejects longer histories."""
    overlong = np.flatnonzero(events.lengths > entry.max_length)
    if not len(overlong):
        return events
    if entry.on_overlong == "error":
        must = f"have at most max_length={entry.max_length} ids"
        hint = " Raise max_length, or set on_overlong='truncate'."
        raise BadRows(chunk, overlong, entry.name, must, str(events.lengths[overlong[0]]), hint)
    return events.select(positions(events.lengths) < entry.max_length)
