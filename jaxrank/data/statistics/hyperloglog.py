"""Counts the distinct rows of columns of ids in constant memory."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrank.data.statistics.array_json import from_text, to_text
from jaxrank.features import PAD

_EXACT = 4096  # smaller rows are marked exactly: small tables, and the hot rows of others
_FEW = 256  # maximum number of larger rows that are stored exactly
_INDEX_BITS = 12
_REGISTERS = 1 << _INDEX_BITS
_RANK_BITS = 64 - _INDEX_BITS
_RANK_MASK = np.uint64((1 << _RANK_BITS) - 1)


class HyperLogLog:
    """Counts the distinct rows of each column.

    Rows below 4,096 are counted exactly, and so are up to 256 larger rows. More of them are
    estimated with a standard error of 1.04 / sqrt(4096) = 1.6%. The state depends only on the set
    of rows, not on their order or frequency.

    References:
        Flajolet et al., HyperLogLog, AofA 2007: the registers.
        Ertl, New Cardinality Estimation Algorithms for HyperLogLog Sketches, 2017 (arXiv
        1702.01284): the estimate, which needs no separate formula for few rows.
    """

    def __init__(self, columns: int):
        self._seen = np.zeros((columns, _EXACT + 1), bool)  # the last column is for all larger rows
        self._few: list[np.ndarray | None] = [np.zeros(0, np.int32)] * columns  # sorted
        # Of all larger rows, including `_few`, so that the result does not depend on when they
        # overflowed.
        self._registers = np.zeros((columns, _REGISTERS), np.uint8)

    def add(self, column: int, rows: np.ndarray) -> None:  # i32[..], PAD is ignored
        self._seen[column][np.minimum(rows, _EXACT)] = True
        large = rows[(rows - np.int32(_EXACT)).view(np.uint32) < np.uint32(PAD - _EXACT)]
        if not len(large):
            return
        self._few[column] = _united(self._few[column], large)
        index, rank = _index_and_rank(large)
        registers = self._registers[column]
        # After the first chunks few ranks increase, and `maximum.at` is slow.
        higher = np.flatnonzero(rank > registers[index])
        np.maximum.at(registers, index[higher], rank[higher])

    def forget(self, column: int, rows: int) -> None:
        """Excludes the column's first `rows` rows, at most 4,096."""
        self._seen[column, :rows] = False

    def merge(self, other: "HyperLogLog") -> None:
        self._seen |= other._seen
        self._few = [_united(*pair) for pair in zip(self._few, other._few, strict=True)]
        np.maximum(self._registers, other._registers, out=self._registers)

    def counts(self) -> np.ndarray:  # i64[columns]
        small = self._seen[:, :_EXACT].sum(axis=1)
        estimates = np.rint(_estimates(self._registers)).astype(np.int64)
        large = [
            many if few is None else len(few)
            for few, many in zip(self._few, estimates.tolist(), strict=True)
        ]
        return small + np.array(large, np.int64)

    def to_state(self) -> dict[str, Any]:
        packed = np.packbits(self._seen[:, :_EXACT], axis=1)
        return {
            "seen": to_text(packed),
            "few": [None if few is None else few.tolist() for few in self._few],
            "registers": to_text(self._registers),
        }

    @classmethod
    def from_state(cls, tree: Mapping[str, Any]) -> "HyperLogLog":
        registers = from_text(tree["registers"])
        result = cls(len(registers))
        result._seen[:, :_EXACT] = np.unpackbits(from_text(tree["seen"]), axis=1)
        result._few = [None if few is None else np.array(few, np.int32) for few in tree["few"]]
        result._registers[:] = registers
        return result


def _united(few: np.ndarray | None, more: np.ndarray | None) -> np.ndarray | None:
    """Returns the sorted union, i32[at most 256], or None if it is larger."""
    if few is None or more is None:
        return None
    both = np.union1d(few, more)
    return both if len(both) <= _FEW else None


def _index_and_rank(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the register, i64[n], and the rank, u8[n], of each row of i32[n].

    The rank is the position of the first set bit of the other bits of the hash, from the highest.
    """
    hashes = rows.astype(np.uint64)
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(32)
    hashes *= np.uint64(0xD6E8FEB86659FD93)
    index = (hashes >> np.uint64(_RANK_BITS)).view(np.int64)
    # The exponent of a float64 is the highest bit, and its 53 bits represent these 52 exactly.
    rest = ((hashes & _RANK_MASK) | np.uint64(1)).view(np.int64).astype(np.float64)
    highest = (rest.view(np.int64) >> 52) - 1023
    return index, (_RANK_BITS - highest).astype(np.uint8)


def _estimates(registers: np.ndarray) -> np.ndarray:  # u8[columns, registers] -> f64[columns]
    empty = (registers == 0).sum(axis=1)
    share = (empty / _REGISTERS)[:, None]
    # Ertl's sigma: share + sum of share^(2^k) 2^(k-1). Later terms vanish, as share <= 4095/4096.
    k = np.arange(1, 25)
    sigma = share[:, 0] + (share ** (2.0**k) * 2.0 ** (k - 1)).sum(axis=1)
    powers = np.exp2(-np.arange(_RANK_BITS + 1.0))
    powers[0] = 0  # an empty register
    filled = powers[registers].sum(axis=1)
    total = _REGISTERS**2 / (2 * np.log(2)) / (filled + _REGISTERS * sigma)
    return np.where(empty == _REGISTERS, 0, total)
