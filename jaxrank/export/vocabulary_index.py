"""Writes the index of all vocabularies; `jaxrank_serving.index` describes the file.

An external sort: hashes are appended to files by their first bits, and each file is sorted in
memory. Memory does not grow with the number of values.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from jaxrank.errors import RunError
from jaxrank.features import MISSING_ROW, RESERVED_ROWS

_SLICE = 1 << 16  # values hashed at once
_IN_MEMORY = 1 << 22  # values sorted at once, about
_MAX_BITS = 24
_ATTEMPTS = 20
_RECORD = np.dtype([("hash", "<u8"), ("row", "<i4")])


class Written(NamedTuple):
    """Result of `write_index`.

    values, bits, steps: see `jaxrank_serving.signature.Index`.
    seeds: of the hashes of each table.
    """

    values: int
    bits: int
    steps: int
    seeds: dict[str, int]


class _CollisionError(Exception):
    """Two values have equal hashes."""


def write_index(
    vocabularies: Sequence[tuple[str, pa.ChunkedArray]], path: Path, scratch: Path
) -> Written:
    """Writes the index of the values of tables, which have the rows after the reserved ones.

    Args:
        vocabularies: name and values in row order of each table. The index also has the empty text
            of each, with the row of missing values.
        path: of the file.
        scratch: an empty directory, which is empty again at the end.
    """
    total = sum(1 + len(values) for _, values in vocabularies)
    bits = min(_MAX_BITS, max(1, (total // 2).bit_length() - 1))
    for attempt in range(_ATTEMPTS):
        seeds = {name: hash_seed(name, attempt) for name, _ in vocabularies}
        try:
            steps = _write(_records(vocabularies, seeds), total, bits, path, scratch)
        except _CollisionError:
            continue
        return Written(total, bits, steps, seeds)
    raise RunError(
        f"{path}: {total:,} values must have different hashes for some of {_ATTEMPTS} seeds: found"
        " equal ones for each. Check the vocabulary for repeated values."
    )


def hash_seed(table: str, attempt: int) -> int:
    """Returns the seed of a table's hashes, below 2^63."""
    return xxhash.xxh3_64_intdigest(f"{attempt}/{table}".encode()) >> 1


def _records(
    vocabularies: Iterable[tuple[str, pa.ChunkedArray]], seeds: dict[str, int]
) -> Iterator[np.ndarray]:
    for name, values in vocabularies:
        empty = xxhash.xxh3_64_intdigest(b"", seeds[name])
        yield np.array([(empty, MISSING_ROW)], _RECORD)
        for start in range(0, len(values), _SLICE):
            part = values.slice(start, _SLICE).cast(pa.binary()).to_pylist()
            records = np.empty(len(part), _RECORD)
            digests = map(xxhash.xxh3_64_intdigest, part, itertools.repeat(seeds[name]))
            records["hash"] = np.fromiter(digests, np.uint64, len(part))
            first = RESERVED_ROWS + start
            records["row"] = np.arange(first, first + len(part), dtype=np.int32)
            yield records


def _write(records: Iterable[np.ndarray], total: int, bits: int, path: Path, scratch: Path) -> int:
    """Writes the file and returns the number of bisection steps."""
    files = max(0, (total - 1) // _IN_MEMORY).bit_length()
    for part in records:
        numbers = _first_bits(part["hash"], files)
        order = np.argsort(numbers, kind="stable")
        distinct, starts = np.unique(numbers[order], return_index=True)
        for number, piece in zip(distinct, np.split(part[order], starts[1:]), strict=True):
            with open(scratch / f"{number}.part", "ab") as file:
                piece.tofile(file)
    counts = np.zeros(2**bits, np.int64)
    with open(path, "wb") as hashes_file, open(scratch / "rows", "wb") as rows_file:
        for number in range(2**files):
            part_path = scratch / f"{number}.part"
            if not part_path.exists():
                continue
            part = np.fromfile(part_path, _RECORD)
            part_path.unlink()
            part = part[np.argsort(part["hash"], kind="stable")]
            if (part["hash"][1:] == part["hash"][:-1]).any():
                _clear(scratch)
                raise _CollisionError
            prefixes, sizes = np.unique(_first_bits(part["hash"], bits), return_counts=True)
            counts[prefixes] += sizes
            part["hash"].copy().tofile(hashes_file)
            part["row"].copy().tofile(rows_file)
    with open(path, "ab") as file, open(scratch / "rows", "rb") as rows_file:
        np.concatenate([[0], np.cumsum(counts)]).astype("<u4").tofile(file)
        while content := rows_file.read(1 << 22):
            file.write(content)
    _clear(scratch)
    return int(counts.max(initial=0)).bit_length()


def _first_bits(hashes: np.ndarray, bits: int) -> np.ndarray:
    if not bits:
        return np.zeros(len(hashes), np.int64)
    return (hashes >> np.uint64(64 - bits)).astype(np.int64)


def _clear(scratch: Path) -> None:
    for file in scratch.iterdir():
        file.unlink()
