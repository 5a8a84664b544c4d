"""Rows of the tables in a checkpoint, table by table in their own order, on the host.

Split rows are dealt out over a whole stored array (`embedding.storage`), so the rows of any piece
of it are from all over the tables. Pieces are read once, and their rows written to files, each of
as many rows that follow each other as fit in memory; then each file is read and put in order.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.embedding.storage import LANES, Storage, storage
from jaxrank.layout import Layout, Stack, ToTables

_FILE = 2**27  # bytes of vectors in a file


class TableRows(NamedTuple):
    """Some of a table's rows, `first` and those behind it: f32[n, dim]."""

    table: str
    first: int
    vectors: np.ndarray


def table_rows(
    stored: CheckpointReader, layout: Layout, stack: Stack, scratch: Path
) -> Iterator[TableRows]:
    """All rows of the tables of a stack: table by table, and those of a table in order.

    Takes memory for a few pieces, however many rows there are.

    Args:
        stored: the weights of a checkpoint, of this layout.
        scratch: an empty directory, and empty again behind the last row; in between it takes as
            much as the stack's vectors.

    Raises:
        InputError: an array is damaged.
    """
    rows_of = {table.name: table.rows for table in layout.schema.tables}
    counts = np.array([rows_of[name] for name in stack.tables])
    ends = np.cumsum(counts)
    starts = ends - counts
    to_tables = ToTables.of(stack)
    record = np.dtype([("place", np.int64), ("vector", np.float32, (stack.dim,))])
    rows_of_file = max(1, _FILE // (4 * stack.dim))
    for rows, vectors in _stored_rows(stored, stack):
        tables, own = to_tables(rows)
        _deal(starts[tables] + own, vectors, record, rows_of_file, scratch)
    for begin in range(0, stack.rows, rows_of_file):
        file = scratch / str(begin // rows_of_file)
        records = np.fromfile(file, record)
        file.unlink()
        in_order = np.empty((len(records), stack.dim), np.float32)
        in_order[records["place"] - begin] = records["vector"]
        count = len(records)
        del records  # as large as what is given out
        for name, start, stop in zip(stack.tables, starts.tolist(), ends.tolist(), strict=True):
            first, last = max(start, begin), min(stop, begin + count)
            if first < last:
                yield TableRows(name, first - start, in_order[first - begin : last - begin])


def _stored_rows(stored: CheckpointReader, stack: Stack) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows i64[n] of a stack and their vectors f32[n, dim], as they are stored."""
    replicated, split = storage(stack)
    if replicated:
        yield from _part_rows(stored, replicated, stack.replicated)
    if split:
        for rows, vectors in _part_rows(stored, split, stack.rows - stack.replicated):
            yield rows + stack.replicated, vectors


def _part_rows(
    stored: CheckpointReader, part: Storage, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows i64[n] of a part, of the `count` that are not only there to fill it, and vectors."""
    for line, lines in stored.pieces(f"rows.{part.name}", max(1, part.width // LANES)):
        vectors = lines.reshape(-1, part.width)[:, : part.dim]
        begin = line * LANES // part.width
        rows = part.row(np.arange(begin, begin + len(vectors), dtype=np.int32)).astype(np.int64)
        yield rows[rows < count], vectors[rows < count]


def _deal(
    places: np.ndarray, vectors: np.ndarray, record: np.dtype, rows_of_file: int, scratch: Path
) -> None:
    """Adds rows to the files that they belong to.

    Args:
        places: i64[n] of the rows, where the tables stand one behind the other, each with its rows
            in order.
        vectors: f32[n, dim].
    """
    files = places // rows_of_file
    by_file = np.argsort(files, kind="stable")
    records = np.empty(len(places), record)
    records["place"], records["vector"] = places[by_file], vectors[by_file]
    numbers, starts = np.unique(files[by_file], return_index=True)
    for number, part in zip(numbers, np.split(records, starts[1:]), strict=True):
        with open(scratch / str(number), "ab") as file:
            part.tofile(file)
