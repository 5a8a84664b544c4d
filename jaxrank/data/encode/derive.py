"""Computes the columns of `features.derived` of a chunk. Every reader of raw data calls `derive`.

A derived value is missing where an input is missing, and a ratio also where it divides by 0. A
cross is missing only if all its ids are missing. It is a hash of the raw values of its ids, so it
depends on no vocabulary.
"""

import datetime
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.columns import numbers, read_column, texts
from jaxrank.data.encode.times import seconds
from jaxrank.data.spec.derived import UNITS, DerivedSpec

_NUMBER = "a finite number or empty"
_QUARTER = 900  # seconds
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_FIRST = datetime.datetime(1, 1, 2, tzinfo=datetime.UTC)
_LAST = datetime.datetime(9999, 12, 30, tzinfo=datetime.UTC)
_MISSING_PART = np.int32(-1).tobytes()


def derive(entries: Sequence[DerivedSpec], chunk: Chunk, time_format: str = "") -> Chunk:
    """Returns the chunk with the derived columns behind its own.

    Args:
        time_format: as in `times.seconds`.

    Raises:
        BadRows: an input is not a number, a time or an id.
    """
    result = chunk
    for entry in entries:
        values = _derived(entry, result, time_format)
        batch = result.batch
        columns, names = [*batch.columns, values], [*batch.schema.names, entry.name]
        result = result._replace(batch=pa.RecordBatch.from_arrays(columns, names))
    # Rejected records are reported as they are in the file.
    return result._replace(written=chunk.written or functools.partial(_record, chunk))


def _record(chunk: Chunk, number: int) -> dict[str, Any]:
    """Returns the record with a number as the raw data has it."""
    return chunk.record(int(np.flatnonzero(chunk.rows == number)[0]))


def _derived(entry: DerivedSpec, chunk: Chunk, time_format: str) -> pa.Array:
    columns = [read_column(chunk, name) for name in entry.columns]
    if entry.kind == "cross":
        return _crossed([texts(column) for column in columns])
    if entry.kind in ("hour", "weekday", "age"):
        times = [seconds(column, time_format=time_format) for column in columns]
        if entry.kind == "age":
            return _floats((times[0] - times[1]) / UNITS[entry.unit])
        local = times[0] + _offsets(times[0], entry.time_zone)
        # 1970-01-01 was a Thursday.
        number = local // 3600 % 24 if entry.kind == "hour" else (local // 86_400 + 3) % 7
        return _integers(number, np.isnan(local))
    first, *others = [numbers(column, _NUMBER) for column in columns]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if entry.kind == "ratio":
            ratio = np.where(others[0] == 0, np.nan, first / others[0])
            return _floats(np.where(np.isinf(ratio), np.nan, ratio))
        if entry.kind == "difference":
            return _floats(first - others[0])
        if entry.kind == "log":
            return _floats(np.copysign(np.log1p(np.abs(first)), first))
        edges = np.asarray(entry.boundaries, np.float32)
        bucket = np.searchsorted(edges, first.astype(np.float32), side="right")
    return _integers(bucket, np.isnan(first))


def _floats(values: np.ndarray) -> pa.Array:
    return pa.array(values, pa.float64(), from_pandas=True)  # null for NaN


def _integers(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    return pa.array(np.where(missing, 0, values).astype(np.int64), mask=missing)


def _offsets(times: np.ndarray, zone: datetime.tzinfo) -> np.ndarray:
    """Returns f64[n], the seconds that clocks of a zone are ahead of UTC at times f64[n]."""
    seconds = np.floor(np.nan_to_num(times))
    quarters, index = np.unique(seconds // _QUARTER, return_inverse=True)
    first, last = (
        np.array([_offset(quarter * _QUARTER + second, zone) for quarter in quarters.tolist()])
        for second in (0, _QUARTER - 1)
    )
    offsets = first[index]
    # Clocks change within few quarters of an hour, such as one minute after midnight.
    for i in np.flatnonzero((first != last)[index]).tolist():
        offsets[i] = _offset(seconds[i].item(), zone)
    return offsets


def _offset(seconds: float, zone: datetime.tzinfo) -> float:
    moment = _EPOCH + datetime.timedelta(seconds=seconds)
    # Within a day of the first and the last moment, local times may not exist.
    offset = min(max(moment, _FIRST), _LAST).astimezone(zone).utcoffset()
    return offset.total_seconds() if offset else 0.0


def _crossed(parts: Sequence[pa.Array]) -> pa.Array:
    """Returns 16 hexadecimal digits for each combination of values, null if all are missing.

    They are the xxh3_64 of the parts one after another: the length in bytes as a little-endian
    int32 and the bytes in UTF-8, or only the length -1 if the part is missing.
    """
    encoded = [part.dictionary_encode() for part in parts]
    codes = np.zeros(len(parts[0]), np.int64)
    for part in encoded:
        codes *= len(part.dictionary) + 1
        codes += pc.fill_null(part.indices, len(part.dictionary)).to_numpy()
    _, firsts, index = np.unique(codes, return_index=True, return_inverse=True)
    rows = pa.array(firsts)
    pieces = [[_piece(value) for value in part.take(rows).to_pylist()] for part in parts]
    hashes = [xxhash.xxh3_64_hexdigest(b"".join(row)) for row in zip(*pieces, strict=True)]
    missing = np.logical_and.reduce([p.is_null().to_numpy(zero_copy_only=False) for p in parts])
    values = pa.array(hashes, pa.string()).take(pa.array(index))
    return pc.if_else(pa.array(missing), pa.scalar(None, pa.string()), values)


def _piece(value: str | None) -> bytes:
    if value is None:
        return _MISSING_PART
    data = value.encode()
    return len(data).to_bytes(4, "little") + data
