"""Checks rows of tables and maps them to rows of their stack, the last host step of an id."""

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from jaxrank.errors import InputError
from jaxrank.features import PAD
from jaxrank.layout import Layout, Stack, ToStack

# NumPy adds a row vector to a matrix in half the time where rows are long. Several examples with
# about this many ids together are therefore treated as one row (26 columns: 68 us became 30 us).
_WIDE = 8192


class StackRows:
    """Maps the rows in some columns, each of one table, to rows of the stack.

    Follows `layout.ToStack`, with precomputed arrays for each column. PAD stays PAD. Any other
    value that is not a row of its table is rejected.

    Built once per layout, because there may be many hot rows, and sent to input workers.

    Args:
        features: the name of each column's feature.
        tables: the index within the stack of each column's table.
        examples: maximum number of examples in the `places` of `values`. 0 if it is not called.
    """

    def __init__(
        self,
        layout: Layout,
        stack: Stack,
        features: Sequence[str],
        tables: Sequence[int],
        examples: int = 0,
    ):
        rows_of = {table.name: table.rows for table in layout.schema.tables}
        self._features = list(features)
        self._tables = [stack.tables[t] for t in tables]
        self._rows = [rows_of[name] for name in self._tables]
        self._least = min(self._rows)
        self._examples = examples or _side_by_side(len(self._tables))
        # For each column of each example, so that one index leads to the properties of a value.
        index = np.tile(np.asarray(tables, np.intp), self._examples)
        self._to_stack = ToStack.from_stack(stack)
        self._first, self._hot = self._to_stack.first[index], self._to_stack.hot[index]
        # Without hot rows all rows of a table move by the same number.
        self._offsets = None if stack.hot else self._to_stack.step[index]
        self._limits = np.tile(np.asarray(self._rows, np.uint32), self._examples)
        # an array, because NumPy is slow with a scalar
        self._pads = np.full(len(index), PAD, np.uint32)

    def matrix(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Maps i32[n, columns] rows of the tables to i32[n, columns] rows of the stack.

        Args:
            out: the output array, which may be `rows`.

        Raises:
            InputError: a row is out of range of its table. Names feature, table and example.
        """
        out = np.empty_like(rows) if out is None else out
        width = len(self._features) * math.gcd(len(rows), self._examples)
        wide, moved = rows.reshape(-1, width), out.reshape(-1, width)

        def place(i: int) -> tuple[int, int]:
            return divmod(i, len(self._features))

        outside = wide.view(np.uint32) >= self._limits[:width]  # negative rows are large here
        any_outside = self._check(wide, outside, place)
        if self._offsets is not None:
            np.add(wide, self._offsets[:width], out=moved)
        else:
            first, hot = self._first[:width], self._hot[:width]
            for i in range(0, len(wide), 4):  # small enough to stay in the cache between steps
                part = wide[i : i + 4]
                np.add(part, self._to_stack.steps(part, first, hot), out=moved[i : i + 4])
        if any_outside:
            # PAD plus any offset is PAD or more as an unsigned number. If a fifth of the ids is
            # missing, this is 20 times as fast as np.copyto with a mask.
            bits = moved.view(np.uint32)
            np.minimum(bits, self._pads[:width], out=bits)
        return out

    def values(self, rows: np.ndarray, places: np.ndarray, start: int, out: np.ndarray) -> None:
        """Maps i32[m] rows of the tables to `out` i32[m], rows of the stack.

        Args:
            places: i64[m], `example * columns + column` of each row.
            start: the number of example 0, for messages.

        Raises:
            InputError: as in `matrix`.
        """

        def place(i: int) -> tuple[int, int]:
            example, column = divmod(int(places[i]), len(self._features))
            return start + example, column

        bits = rows.view(np.uint32)
        outside = None
        if len(bits) and bits.max() >= self._least:  # PAD, or a row that only larger tables have
            # `out` is free until the end. "raise" would make take copy first, and "wrap" is faster
            # than "clip".
            limits = self._limits.take(places, out=out.view(np.uint32), mode="wrap")
            outside = bits >= limits
            outside = outside if self._check(rows, outside, place) else None
        if self._offsets is not None:
            self._offsets.take(places, out=out, mode="wrap")
            out += rows
        else:
            first = self._first.take(places, mode="wrap")
            hot = self._hot.take(places, out=out, mode="wrap")
            np.add(rows, self._to_stack.steps(rows, first, hot), out=out)
        if outside is not None:
            np.copyto(out, PAD, where=outside)

    def _check(
        self, rows: np.ndarray, outside: np.ndarray, place: Callable[[int], tuple[int, int]]
    ) -> bool:
        """Returns True if any row is PAD, and raises if any other row is out of range.

        Args:
            place: maps a flat index to example and column.
        """
        count = np.count_nonzero(outside)
        if count and count != np.count_nonzero(rows == PAD):  # PAD is out of range of every table
            wrong = int(np.flatnonzero(outside & (rows != PAD))[0])
            example, column = place(wrong)
            self._reject(example, column, int(rows.reshape(-1)[wrong]))
        return bool(count)

    def _reject(self, example: int, column: int, row: int) -> NoReturn:
        rows = self._rows[column]
        raise InputError(
            f"Example {example} of the batch: ids of the feature {self._features[column]!r} must be"
            f" rows of the table {self._tables[column]!r}, 0 to {rows - 1} (rows={rows}), or PAD:"
            f" found {row}. `jaxrank prepare` writes no such ids: prepare the data again."
        )


def _side_by_side(columns: int) -> int:
    """Returns the number of examples that form one row for NumPy, a power of two, which divides
    most batches.
    """
    return 1 << (max(1, _WIDE // columns).bit_length() - 1)
