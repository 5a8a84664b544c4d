"""The parts of a delta, which both its writer and its reader know.

    DELTA/manifest.json            `base` is the version of the bundle that it changes
    DELTA/target.json              manifest.json of the result
    DELTA/<file>                   as in the result, for files that are written whole
    DELTA/tables/<file>.rows       i64[k], rows of a stack file that differ, in rising order
    DELTA/tables/<file>.changed    those rows as they are stored
    DELTA/vocabularies.bin.removed u64[k], hashes of values without a row, in rising order
    DELTA/vocabularies.bin.added   (u64 hash, i32 row)[k], new values and new rows of old ones

A delta compares rows of the same table and number. So a table may grow or shrink, and a row that
was removed and given to another value is a changed row and a changed value.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxrank_serving.bundle import Bundle
from jaxrank_serving.signature import Signature, Stack
from jaxrank_serving.tables import DTYPES

TARGET = "target.json"
ROWS, CHANGED = ".rows", ".changed"
REMOVED, ADDED = ".removed", ".added"
RECORD = np.dtype([("hash", "<u8"), ("row", "<i4")])
_PIECE = 1 << 24  # bytes of rows at once
_VALUES = 1 << 20  # values of an index at once


class TableFile(NamedTuple):
    """A file with a part of each row of a stack: `row_bytes` of it."""

    name: str
    stack: Stack
    row_bytes: int


def table_files(signature: Signature) -> list[TableFile]:
    """Returns the files with rows: one for each stack, and one for its factors."""
    files = []
    for stack in signature.stacks:
        files.append(TableFile(stack.file, stack, stack.dim * DTYPES[stack.dtype].itemsize))
        if stack.scales:
            files.append(TableFile(stack.scales, stack, np.dtype(np.float32).itemsize))
    return files


def mapped(bundle: Bundle, file: TableFile) -> np.ndarray:
    """Returns the content of a file, u8[rows + 1, row_bytes]."""
    shape = (file.stack.rows + 1, file.row_bytes)
    return np.memmap(bundle.file(file.name), np.uint8, "r", shape=shape)


def base_rows(target: Signature, file: TableFile, base: Bundle) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the rows of a target's file as the base has them: (first row, u8[n, row_bytes]).

    Rows that the base lacks are zeros.
    """
    old_tables = {table.name: table for table in base.signature.tables}
    old_files = {}
    for old in table_files(base.signature):
        is_scales = old.name == old.stack.scales
        old_files[old.stack.name, is_scales] = old
    is_scales = file.name == file.stack.scales
    size = max(1, _PIECE // file.row_bytes)
    tables = [table for table in target.tables if table.stack == file.stack.name]
    for table in sorted(tables, key=lambda table: table.offset):
        before = old_tables.get(table.name)
        source, count = None, 0
        if before is not None and (before.stack, is_scales) in old_files:
            old_file = old_files[before.stack, is_scales]
            if (old_file.stack.dim, old_file.stack.dtype) == (file.stack.dim, file.stack.dtype):
                source, count = mapped(base, old_file), min(before.rows, table.rows)
        for start in range(0, table.rows, size):
            stop = min(start + size, table.rows)
            piece = np.zeros((stop - start, file.row_bytes), np.uint8)
            shared = max(0, min(stop, count) - start)
            if source is not None and before is not None and shared:
                first = before.offset + start
                piece[:shared] = source[first : first + shared]
            yield table.offset + start, piece
    yield file.stack.rows, np.zeros((1, file.row_bytes), np.uint8)


def together(first: np.ndarray, second: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Yields slices of two rising arrays u64[n] that cover the same ranges of hashes."""
    i = j = 0
    while i < len(first) or j < len(second):
        ends = [a[k + _VALUES - 1] for a, k in ((first, i), (second, j)) if k + _VALUES < len(a)]
        if ends:
            last = min(ends)
            stop_i = i + int(np.searchsorted(first[i : i + _VALUES], last, side="right"))
            stop_j = j + int(np.searchsorted(second[j : j + _VALUES], last, side="right"))
        else:
            stop_i, stop_j = len(first), len(second)
        yield slice(i, stop_i), slice(j, stop_j)
        i, j = stop_i, stop_j
