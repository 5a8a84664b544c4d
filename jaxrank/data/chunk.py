"""A piece of raw data, as every source of examples yields it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa


class Part(NamedTuple):
    """A piece of a split that is prepared by itself; it travels to other processes.

    split: that it belongs to.
    file: a path or URL, or what stands for it in generated data.
    start, stop: of the file, in the source's own terms: bytes of text, row groups of Parquet,
        chunks of generated data; 0 and 1 where a file cannot be divided.
    """

    split: str
    file: str
    start: int
    stop: int


class Chunk(NamedTuple):
    """Records of one file, in order.

    batch: the columns; empty text is missing, as null is.
    file: where they come from, for messages.
    rows: i64[n], the user's number of each record: its line, counted from 1, in a text file, its
        row, counted from 1, in other files and in generated data.
    offset: bytes of a text file whose lines `rows` does not count, as counting them takes as long
        as reading them. `Rejects` counts them before it tells a number.
    written: (number of a record) -> it as the file has it, where `batch` has null for texts.
    """

    batch: pa.RecordBatch
    file: str
    rows: np.ndarray
    offset: int = 0
    written: Callable[[int], dict[str, Any]] | None = None

    def record(self, row: int) -> dict[str, Any]:
        """The record at this place as the file has it, for people to read."""
        if self.written is not None:
            return self.written(int(self.rows[row]))
        return self.batch.slice(row, 1).to_pylist()[0]

    def without(self, rows: np.ndarray) -> "Chunk":
        """The chunk without the records at these places, i64[m]."""
        keep = np.ones(self.batch.num_rows, bool)
        keep[rows] = False
        return self._replace(batch=self.batch.filter(pa.array(keep)), rows=self.rows[keep])


def numbered(first: int, count: int) -> np.ndarray:
    """i64[count]: first, first + 1, ..."""
    return np.arange(first, first + count, dtype=np.int64)
