"""The index of all vocabularies: (table, value) -> row, in one file that is mapped into memory.

The file has three parts, little-endian:

    u64[values]          xxh3_64 of each value in UTF-8, seeded by the table, in rising order
    u32[2 ** bits + 1]   number of hashes whose first `bits` bits are below each prefix
    i32[values]          the row of each value in its table

The empty text, which stands for a missing value, has the row 0 in each table. A lookup reads the
range of a prefix and bisects it `steps` times. No two values have equal hashes, because the writer
changes the seeds until that holds. A value that is in no vocabulary has the row of another with
probability values / 2^64.
"""

from pathlib import Path

import numpy as np

from jaxrank_serving.errors import BundleError
from jaxrank_serving.signature import Index as Spec


def file_bytes(values: int, bits: int) -> int:
    """Returns the size of the file."""
    return 12 * values + 4 * (2**bits + 1)


def arrays(path: Path, spec: Spec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maps the parts of the file into memory: hashes, prefixes and rows.

    Raises:
        BundleError: the file has another size.
    """
    size = path.stat().st_size
    if size != file_bytes(spec.values, spec.bits):
        raise BundleError(
            f"{path}: must have {file_bytes(spec.values, spec.bits):,} bytes for"
            f" {spec.values:,} values: found {size:,}."
        )
    content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    hashes, prefixes = 8 * spec.values, 4 * (2**spec.bits + 1)
    return (
        content[:hashes].view("<u8"),
        content[hashes : hashes + prefixes].view("<u4"),
        content[hashes + prefixes :].view("<i4"),
    )


class Index:
    """Looks up the rows of values by their hashes. Opening it reads nothing.

    Raises:
        BundleError: the file has another size.
    """

    def __init__(self, path: Path, spec: Spec):
        self._hashes, self._prefixes, self._rows = arrays(path, spec)
        self._steps, self._shift = spec.steps, np.uint64(64 - spec.bits)

    def rows(self, hashes: np.ndarray, absent: int) -> np.ndarray:
        """Returns i64[n], the row of each hash u64[n], or `absent`."""
        if not len(self._hashes):
            return np.full(len(hashes), absent, np.int64)
        place = self._prefixes.take((hashes >> self._shift).view(np.int64)).astype(np.int64)
        # Hashes with later prefixes are larger, so a search needs no upper bound. A search that
        # runs beyond the last hash reads the last one, which is not equal.
        for step in reversed(range(self._steps)):
            half = 1 << step
            is_below = self._hashes.take(place + (half - 1), mode="clip") < hashes
            np.add(place, half, out=place, where=is_below)
        is_equal = self._hashes.take(place, mode="clip") == hashes
        rows = self._rows.take(place, mode="clip").astype(np.int64)
        rows[~is_equal] = absent
        return rows
