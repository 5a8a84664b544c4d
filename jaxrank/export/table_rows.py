"""Reads the rows of the tables in a checkpoint on the host, table by table in row order.

Sharded rows are distributed over the whole stored array (`embedding.storage`), so a piece of it has
rows from anywhere in the tables. This is an external sort. Each piece is read once, and its rows
are appended to files, one file per range of rows that fits in memory. Then each file is read and
sorted.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.embedding.storage import LANES, Storage, storage
from jaxrank.layout import Layout, Stack, ToTables

_FILE = 2**27  # bytes of vectors per file


class TableRows(NamedTuple):
    """Consecutive rows of a table, starting at `first`: vectors f32[n, dim]."""

    table: str
    first: int
    vectors: np.ndarray


def table_rows(
    stored: CheckpointReader, layout: Layout, stack: Stack, scratch: Path
) -> Iterator[TableRows]:
    """Yields all rows of the tables of a stack, table by table in row order.

    Needs memory for a few pieces, independent of the number of rows.

    Args:
        stored: the weights of a checkpoint with this layout.
        layout: of the run's tables.
        stack: whose tables are read.
        scratch: an empty directory. It needs as many bytes as the stack's vectors, and is empty
            again after the last row.

    Raises:
        InputError: an array is damaged.
    """
    rows_of = {table.name: table.rows for table in layout.schema.tables}
    counts = np.array([rows_of[name] for name in stack.tables])
    ends = np.cumsum(counts)
    starts = ends - counts
    to_tables = ToTables.from_stack(stack)
    record = np.dtype([("place", np.int64), ("vector", np.float32, (stack.dim,))])
    rows_of_file = max(1, _FILE // (4 * stack.dim))
    for rows, vectors in stored_rows(stored, stack):
        tables, table_row = to_tables(rows)
        _deal(starts[tables] + table_row, vectors, record, rows_of_file, scratch)
    for begin in range(0, stack.rows, rows_of_file):
        file = scratch / str(begin // rows_of_file)
        records = np.fromfile(file, record)
        file.unlink()
        in_order = np.empty((len(records), stack.dim), np.float32)
        in_order[records["place"] - begin] = records["vector"]
        count = len(records)
        del records  # as large as the rows that are yielded
        for name, start, stop in zip(stack.tables, starts.tolist(), ends.tolist(), strict=True):
            first, last = max(start, begin), min(stop, begin + count)
            if first < last:
                yield TableRows(name, first - start, in_order[first - begin : last - begin])


def stored_rows(stored: CheckpointReader, stack: Stack) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields rows i64[n] of a stack and their vectors f32[n, dim], in stored order."""
    replicated, split = storage(stack)
    if replicated:
        yield from _part_rows(stored, replicated, stack.replicated)
    if split:
        for rows, vectors in _part_rows(stored, split, stack.rows - stack.replicated):
            yield rows + stack.replicated, vectors


def _part_rows(
    stored: CheckpointReader, part: Storage, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields rows i64[n] of a part and their vectors, without the padding after `count` rows."""
    for line, lines in stored.pieces(f"rows.{part.name}", max(1, part.width // LANES)):
        vectors = lines.reshape(-1, part.width)[:, : part.dim]
        begin = line * LANES // part.width
        rows = part.row(np.arange(begin, begin + len(vectors), dtype=np.int32)).astype(np.int64)
        yield rows[rows < count], vectors[rows < count]


def _deal(
    places: np.ndarray, vectors: np.ndarray, record: np.dtype, rows_of_file: int, scratch: Path
) -> None:
    """Appends rows to the files of their ranges.

    Args:
        places: i64[n], indices of the rows in the concatenation of the tables.
        vectors: f32[n, dim].
        record: dtype of a row in a file.
        rows_of_file: rows per file.
        scratch: directory of the files.
    """
    files = places // rows_of_file
    by_file = np.argsort(files, kind="stable")
    records = np.empty(len(places), record)
    records["place"], records["vector"] = places[by_file], vectors[by_file]
    numbers, starts = np.unique(files[by_file], return_index=True)
    for number, part in zip(numbers, np.split(records, starts[1:]), strict=True):
        with open(scratch / str(number), "ab") as file:
            part.tofile(file)
