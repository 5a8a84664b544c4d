"""Raw records in pieces, as every source of examples yields them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa


class Part(NamedTuple):
    """A part of a split that is prepared independently, possibly by another process.

    split: the split that contains it.
    file: a path or URL, or a placeholder for generated data.
    start, stop: range of the file in the source's units: bytes of text, row groups of Parquet,
        chunks of generated data. 0 and 1 if a file cannot be divided.
    """

    split: str
    file: str
    start: int
    stop: int


class Chunk(NamedTuple):
    """Consecutive records of one file.

    batch: the columns. Empty text is missing, as null is.
    file: origin of the records, for messages.
    rows: i64[n], the number of each record in the file, counted from 1: the line in a text file,
        the row in other files and in generated data.
    offset: bytes of a text file before the lines that `rows` counts. Counting those lines takes as
        long as reading them, so `Rejects` does it only before it reports a number.
    written: maps the number of a record to its content in the file, if `batch` has null for some
        texts.
    """

    batch: pa.RecordBatch
    file: str
    rows: np.ndarray
    offset: int = 0
    written: Callable[[int], dict[str, Any]] | None = None

    def record(self, row: int) -> dict[str, Any]:
        """Returns the record at this index as the file has it, for messages."""
        if self.written is not None:
            return self.written(int(self.rows[row]))
        return self.batch.slice(row, 1).to_pylist()[0]

    def drop_records(self, rows: np.ndarray) -> "Chunk":
        """Returns the chunk without the records at the indices i64[m]."""
        keep = np.ones(self.batch.num_rows, bool)
        keep[rows] = False
        return self._replace(batch=self.batch.filter(pa.array(keep)), rows=self.rows[keep])


def numbered(first: int, count: int) -> np.ndarray:
    """Returns i64[count]: first, first + 1, ..."""
    return np.arange(first, first + count, dtype=np.int64)
