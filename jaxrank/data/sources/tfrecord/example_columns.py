"""Converts records of tf.Example to Arrow columns.

The records of a chunk are decoded together: NumPy reads the next feature of all of them at once, in
any order of the features. It supports only the plain encoding that writers use. protobuf reads
records in any other encoding, reports their errors, and re-encodes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from jaxrank.data.ragged import list_starts
from jaxrank.data.sources.tfrecord import tf_example
from jaxrank.data.sources.tfrecord.protobuf_wire import (
    FIRST,
    SECOND,
    Names,
    Spans,
    WireData,
    fields,
    gather,
    varints,
)
from jaxrank.data.sources.tfrecord.tf_example import TAGS, ColumnType, DecodeError

# number of records that protobuf reads in less time than NumPy takes for one of their features
_FEW = 16


class Bad(NamedTuple):
    """The reason why a record is invalid. Its fields are arguments of `Rejects.reject`."""

    place: int  # index of the record in the arguments
    column: str
    must: str
    actual: str
    hint: str = ""


def _find(data: np.ndarray, records: Spans, names: Sequence[str]) -> tuple[Spans, np.ndarray]:
    """Returns the span of each feature of each record, [n, names], and the readable records,
    bool[n].
    """
    shape = (len(records.start), len(names))
    values = Spans(np.zeros(shape, np.int64), np.zeros(shape, np.int64))
    table = Names(names)
    features = fields(data, records.start, FIRST)
    plain = (features.stop == records.stop) | (records.size == 0)
    rows = np.flatnonzero(plain & (records.size > 0))
    at = features.start[rows]
    while True:
        left = at < records.stop[rows]
        rows, at = rows[left], at[left]
        if len(rows) < _FEW:
            plain[rows] = False
            return values, plain
        entry = fields(data, at, FIRST)
        key = fields(data, entry.start, FIRST)
        value = fields(data, key.stop, SECOND)
        whole = (entry.stop > 0) & (entry.stop == value.stop) & (entry.stop <= records.stop[rows])
        plain[rows[~whole]] = False
        column = table.columns(data, key)
        wanted = whole & (column >= 0)
        where = rows[wanted], column[wanted]
        values.start[where], values.stop[where] = value.start[wanted], value.stop[wanted]
        rows, at = rows[whole], entry.stop[whole]


class _Values(NamedTuple):
    """The values of a column, the count per record, and where they are not in plain encoding."""

    values: pa.Array
    counts: np.ndarray
    odd: np.ndarray


def _decode(data: np.ndarray, spans: Spans, kind: str) -> _Values:
    """Decodes features in plain encoding: packed numbers, or at most one value of bytes."""
    body = fields(data, spans.start, TAGS[kind])
    inner = fields(data, body.start, FIRST)
    present = spans.size > 0
    odd = present & (body.stop != spans.stop)
    filled = present & ~odd & (body.size > 0)
    whole = filled & (inner.stop == spans.stop)
    if kind == "float32":
        whole &= inner.size % 4 == 0
    elif kind == "int64":
        whole &= (inner.size > 0) & (data[inner.stop - 1] < 0x80)
    values = Spans(np.where(whole, inner.start, 0), np.where(whole, inner.stop, 0))
    odd |= filled & ~whole
    raw = gather(data, values)
    if kind == "float32":
        return _Values(pa.array(raw.view("<f4")), values.size // 4, odd)
    if kind == "int64":
        numbers, counts, wrong = varints(raw, values.size)
        return _Values(pa.array(numbers), counts, odd | wrong)
    counts = whole.astype(np.int64)
    ends = np.cumsum(values.size[whole])
    offsets = np.concatenate([[0], ends]).astype(np.int64)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(raw)]
    large = pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(ends), buffers)
    return _Values(large.cast(pa.binary()), counts, odd)


def decode_columns(
    records: Sequence[bytes], types: Mapping[str, ColumnType]
) -> tuple[pa.RecordBatch, list[Bad]]:
    """Returns the columns of these types, and the records that do not match them.

    A record with a missing or empty feature has a null value or list. Values of an invalid record
    are undefined.
    """
    names = list(types)
    data = WireData([])
    whole = data.append(records)
    spans, plain = _find(data.array, whole, names)
    bad: list[Bad] = []
    moved: list[tuple[int, int]] = []
    pieces: list[bytes] = []
    for i in np.flatnonzero(~plain).tolist():
        try:
            features = tf_example.parse_features(records[i])
        except DecodeError:
            bad.append(Bad(i, "", "a tf.Example", f"{len(records[i])} invalid bytes"))
            features = {}
        moved += [(i, column) for column in range(len(names))]
        pieces += [features.get(name.encode(), b"") for name in names]
    if moved:
        rows, columns = np.array(moved).T
        spans.start[rows, columns], spans.stop[rows, columns] = data.append(pieces)
    arrays = []
    for column, (name, kind) in enumerate(types.items()):
        places = Spans(spans.start[:, column].copy(), spans.stop[:, column].copy())
        array, invalid = _column(data, places, name, kind)
        arrays.append(array)
        bad += invalid
    return pa.RecordBatch.from_arrays(arrays, names), bad


def _column(
    data: WireData, spans: Spans, name: str, kind: ColumnType
) -> tuple[pa.Array, list[Bad]]:
    if kind.is_list and kind.kind == "bytes":
        return _bytes_lists(data.array, spans, name)
    decoded = _decode(data.array, spans, kind.kind)
    bad: list[Bad] = []
    if decoded.odd.any():
        rows = np.flatnonzero(decoded.odd)
        pieces = []
        for i in rows.tolist():
            values = _judged(data.array, spans, i, name, kind, bad)
            pieces.append(tf_example.plain(kind.kind, values) if values else b"")
        spans.start[rows], spans.stop[rows] = data.append(pieces)
        decoded = _decode(data.array, spans, kind.kind)
        assert not decoded.odd.any()
    starts = list_starts(decoded.counts)
    if kind.is_list:
        return _lists(decoded.values, decoded.counts), bad
    repeated = np.flatnonzero(decoded.counts > 1).tolist()
    bad += [_too_many(i, name, kind, int(decoded.counts[i])) for i in repeated]
    if (decoded.counts == 1).all():
        return decoded.values, bad
    return decoded.values.take(pa.array(starts, mask=decoded.counts == 0)), bad


def _lists(values: pa.Array, counts: np.ndarray) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(counts == 0))


def _bytes_lists(data: np.ndarray, spans: Spans, name: str) -> tuple[pa.Array, list[Bad]]:
    # One record at a time: together, the longest list of a chunk would set the number of passes.
    bad: list[Bad] = []
    kind = ColumnType("bytes", True)
    lists = [_judged(data, spans, i, name, kind, bad) for i in range(len(spans.start))]
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    values = pa.array([value for values in lists for value in values], pa.binary())
    return _lists(values, counts), bad


def _judged(
    data: np.ndarray, spans: Spans, i: int, name: str, kind: ColumnType, bad: list[Bad]
) -> list[Any]:
    """Returns the values of record i's feature as protobuf reads them, or [] if invalid."""
    feature = data[spans.start[i] : spans.stop[i]].tobytes()
    try:
        actual, values = tf_example.parse_values(feature)
    except DecodeError:
        must = "a feature of a tf.Example"
        bad.append(Bad(i, name, must, f"{len(feature)} invalid bytes"))
        return []
    if values and actual != kind.kind:
        hint = f" Set source.columns[{name!r}] to the kind that the data has."
        bad.append(Bad(i, name, f"of kind {kind.kind}", actual, hint))
        return []
    if len(values) > 1 and not kind.is_list:
        bad.append(_too_many(i, name, kind, len(values)))
        return []
    return values


def _too_many(i: int, name: str, kind: ColumnType, count: int) -> Bad:
    hint = f" Set source.columns[{name!r}] to 'list<{kind.kind}>'."
    return Bad(i, name, "have one value or none", f"{count} values", hint)
