"""A piece of raw data, as every source of examples yields it."""

from typing import NamedTuple

import pyarrow as pa


class Chunk(NamedTuple):
    """Consecutive records of one file.

    batch: the columns; empty text is missing, as null is.
    file: where they come from, for messages.
    first_row: the user's number of the first record: its line, counted from 1, in a text file,
        its row, counted from 1, in a Parquet file and in generated data.
    """

    batch: pa.RecordBatch
    file: str
    first_row: int
