"""Rows of tables whose ids are row numbers."""

import numpy as np
import xxhash

from jaxrank_serving.signature import Table
from jaxrank_serving.values import EXACT_BELOW, Cells, row_numbers

MISSING = -1  # a missing row number, which reads the row of zeros
_MAX_INT64 = 2**63 - 1


def integer_rows(cells: Cells, table: Table) -> tuple[np.ndarray, int]:
    """Returns i64[n] rows of the table, MISSING where missing, and the number out of range."""
    values = row_numbers(cells)
    in_data = table.rows - (table.on_bad_id == "oov")
    exact = EXACT_BELOW.get(cells.column.type, in_data)
    is_hashed = table.on_bad_id == "hash" and cells.column.type in EXACT_BELOW
    # A number of more than 64 bits is out of range. The largest stands for it.
    most = _MAX_INT64
    try:
        rows = np.array([most if value is None else value for value in values], np.int64)
    except OverflowError:
        rows = np.array([most if v is None or abs(v) > most else v for v in values], np.int64)
    outside = np.flatnonzero((rows < 0) | (rows >= min(in_data, exact)))
    bad = 0
    for i in outside.tolist():
        value = values[i]
        if value is None:
            rows[i] = MISSING
        elif 0 <= value < in_data or (is_hashed and exact <= abs(value)):
            cells.reject(i, f"a row that {cells.column.type} does not round")
        else:
            bad += 1
            rows[i] = _replaced(cells, i, value, in_data, table)
    return rows, bad


def _replaced(cells: Cells, index: int, value: int, rows: int, table: Table) -> int:
    """Returns the row that replaces a number out of range, as `on_bad_id` says."""
    if table.on_bad_id == "error":
        cells.reject(index, f"a row of the table {table.name!r}, 0 to {rows - 1}, or empty")
    if table.on_bad_id == "oov":
        return rows
    if table.on_bad_id == "clip":
        return 0 if value < 0 else rows - 1
    return xxhash.xxh64_intdigest(str(value).encode()) % rows
