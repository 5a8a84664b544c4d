"""Decodes many messages of protocol buffers at once with NumPy.

A message is a sequence of fields. Each has a tag and either a length with that many bytes, or a
varint: seven bits per byte, the lowest first, where all bytes but the last are 128 or more. See
https://protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrank.data.ragged import ranges

_LENGTH_BYTES = 5  # maximum bytes of a length
_PADDING = 32  # zeros after the data, so that reads ahead need no bounds check


# Tags of the length-delimited fields 1 and 2.
FIRST, SECOND = 0x0A, 0x12


class Spans(NamedTuple):
    """The ranges [start, stop) of the data, i64 of one shape. 0 and 0 for an empty range."""

    start: np.ndarray
    stop: np.ndarray

    @property
    def size(self) -> np.ndarray:
        return self.stop - self.start


class WireData:
    """Concatenated bytes, followed by zeros."""

    def __init__(self, pieces: Sequence[bytes]):
        self.array = np.zeros(_PADDING, np.uint8)
        self.append(pieces)

    def append(self, pieces: Sequence[bytes]) -> Spans:
        """Appends pieces and returns their spans."""
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        end = len(self.array) - _PADDING
        added = np.frombuffer(b"".join([*pieces, bytes(_PADDING)]), np.uint8)
        self.array = np.concatenate([self.array[:end], added]) if end else added
        stops = end + np.cumsum(sizes)
        return Spans(stops - sizes, stops)


def fields(data: np.ndarray, at: np.ndarray, tag: int) -> Spans:
    """Returns the content of the field at each position. stop is -1 where the tag differs."""
    place = at + 1
    length = np.zeros(len(at), np.int64)
    more = np.ones(len(at), bool)
    for i in range(_LENGTH_BYTES):
        byte = data[place]
        length += np.where(more, (byte & 0x7F).astype(np.int64) << 7 * i, 0)
        place += more
        more &= byte >= 0x80
        if not more.any():
            break
    stop = place + length
    holds = (data[at] == tag) & ~more & (stop <= len(data) - _PADDING)
    return Spans(place, np.where(holds, stop, -1))


class Names:
    """Maps names to columns by all bytes of the name, eight at a time."""

    def __init__(self, names: Sequence[str]):
        data = WireData([])
        spans = data.append([name.encode() for name in names])
        self._sizes = spans.size
        self._count = max(1, -(-int(spans.size.max()) // 8))
        words = self._words(data.array, spans)
        hashes = _hashes(words)
        assert len(set(hashes.tolist())) == len(names)
        self._order = np.argsort(hashes)
        self._sorted, self._name_words = hashes[self._order], words

    def _words(self, data: np.ndarray, spans: Spans) -> np.ndarray:  # u64[n, count]
        every = np.ndarray(len(data) - 7, np.dtype("<u8"), data, strides=(1,))
        result = np.empty((len(spans.start), self._count), np.uint64)
        for i in range(self._count):
            place = np.minimum(spans.start + 8 * i, len(every) - 1)
            size = np.clip(spans.size - 8 * i, 0, 8)
            unwanted = (64 - 8 * np.maximum(size, 1)).astype(np.uint64)
            kept = np.uint64(2**64 - 1) >> unwanted
            result[:, i] = np.where(size > 0, every[place] & kept, np.uint64(0))
        return result

    def columns(self, data: np.ndarray, keys: Spans) -> np.ndarray:
        """Returns the column of each key, i64[n], or -1 for an unknown name."""
        words = self._words(data, keys)
        hashes = _hashes(words)
        place = np.minimum(np.searchsorted(self._sorted, hashes), len(self._order) - 1)
        column = self._order[place]
        same = (self._sizes[column] == keys.size) & (self._name_words[column] == words).all(axis=1)
        return np.where(same, column, -1)


def _hashes(words: np.ndarray) -> np.ndarray:  # u64[n, count] -> u64[n]
    result = np.zeros(len(words), np.uint64)
    for word in words.T:
        result = (result ^ word) * np.uint64(0x9E3779B97F4A7C15)
        result ^= result >> np.uint64(32)
    return result


def gather(data: np.ndarray, spans: Spans) -> np.ndarray:
    """Concatenates the bytes of all spans."""
    return data[ranges(spans.start, spans.size)]


def varints(raw: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decodes varints in runs of bytes.

    Bits beyond the 64th are dropped, as protobuf does.

    Args:
        raw: u8[sum of sizes], the concatenated runs. The last byte of each is below 128.
        sizes: i64[runs].

    Returns:
        The numbers i64[total], the number of varints in each run, and which runs are invalid.
    """
    last = np.flatnonzero(raw < 0x80)
    first = np.concatenate([[0], last + 1])[:-1]
    width = last - first + 1
    ends = np.cumsum(sizes)
    counts = np.diff(np.searchsorted(last, ends), prepend=0)
    wrong = np.zeros(len(sizes), bool)
    wrong[np.searchsorted(ends, first[width > 10], side="right")] = True
    result = np.zeros(len(last), np.uint64)
    for i in range(min(10, int(width.max(initial=0)))):
        byte = raw[np.minimum(first + i, last)].astype(np.uint64) & np.uint64(0x7F)
        result |= np.where(i < width, byte << np.uint64(7 * i), np.uint64(0))
    return result.view(np.int64), counts, wrong
