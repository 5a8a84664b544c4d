"""Divides the examples of a unit into buckets of whole requests, by the hash of the request."""

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from jaxrank.data.examples import Examples, gather
from jaxrank.data.store.writer import SplitWriter
from jaxrank.errors import InputError

_FLUSHED = 256 << 20  # bytes of examples that wait in memory


class Scatter:
    """Writes the examples of a unit: `buckets` blocks, in order of bucket, several times if needed.

    Args:
        writer: of the temporary blocks.
        column: the column of requests.
        buckets: number of buckets.
        alone: text that is unique to the unit, from which examples without a request get one.
    """

    def __init__(self, writer: SplitWriter, column: str, buckets: int, alone: str):
        self._writer, self._column = writer, column
        self._buckets, self._alone = buckets, alone
        self._pending: list[Examples] = []
        self._bytes, self._rows = 0, 0

    def add(self, piece: Examples) -> None:
        assert piece.kept is not None
        column = piece.kept.column(self._column)
        requests = request_hashes(column, self._column, f"{self._alone} {self._rows}")
        self._pending.append(dataclasses.replace(piece, requests=requests[:, None]))
        self._rows += piece.rows
        self._bytes += _bytes(piece)
        if self._bytes >= _FLUSHED:
            self._flush()

    def _flush(self) -> None:
        parts, self._pending, self._bytes = self._pending, [], 0
        hashes = np.concatenate([p.requests[:, 0] for p in parts if p.requests is not None])
        bucket = bucket_of(hashes, self._buckets)
        order = np.argsort(bucket, kind="stable")
        ends = np.cumsum(np.bincount(bucket, minlength=self._buckets)).tolist()
        for start, stop in zip([0, *ends[:-1]], ends, strict=True):
            self._writer.write(gather(parts, order[start:stop]))

    def finish(self) -> list[dict[str, Any]]:
        if self._pending:
            self._flush()
        self._writer.close()
        return self._writer.files


def bucket_of(hashes: np.ndarray, buckets: int) -> np.ndarray:
    """Returns the bucket of each request, i64[n]. Requests of a bucket have consecutive hashes."""
    high = (hashes.astype(np.int64).view(np.uint64) >> np.uint64(32)).astype(np.int64)
    return high * buckets >> 32


def request_hashes(column: pa.Array, name: str, alone: str) -> np.ndarray:
    """Returns a hash of the request of each example, i64[n]: xxh3_64 of the value as text.

    Of a billion requests, two share a hash with a probability of 3%. They then count as one.

    Args:
        alone: an example without a value is a request of its own, by this text and its number. An
            empty text is no value.

    Raises:
        InputError: the column holds lists or other values that are no text.
    """
    try:
        text = column.cast(pa.string())
    except pa.ArrowException as error:
        raise InputError(
            f"features.group: column {name!r} must hold one value per example: found {column.type}"
            f" ({error})."
        ) from error
    coded = pc.dictionary_encode(text)
    digests = [xxhash.xxh3_64_intdigest(v.encode()) for v in coded.dictionary.to_pylist()]
    missing = pc.fill_null(pc.equal(text, ""), True).to_numpy(zero_copy_only=False)
    codes = coded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    hashes = np.zeros(len(column), np.uint64)
    if digests:
        hashes = np.array(digests, np.uint64)[codes]
    singles = [xxhash.xxh3_64_intdigest(f"{alone} {i}".encode()) for i in np.flatnonzero(missing)]
    hashes[missing] = np.array(singles, np.uint64)
    return hashes.view(np.int64)


def _bytes(examples: Examples) -> int:
    arrays = [getattr(examples, f.name) for f in dataclasses.fields(examples)]
    return sum(array.nbytes for array in arrays if array is not None)
