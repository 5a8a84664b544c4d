"""Rows of tables -> rows of their stack, checked: the last that happens to an id on the host."""

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from jaxrank.errors import InputError
from jaxrank.features import PAD
from jaxrank.layout import Layout, Stack, ToStack

# NumPy adds a row to each of a matrix in half the time where rows are long, so as many examples are
# one row to it as have about this many ids together (26 columns: 68 us became 30 us).
_WIDE = 8192


class StackRows:
    """Maps the rows that some columns hold, each of one table, to the rows of the stack.

    As `layout.ToStack` says, with the arrays for each column ready; PAD stays PAD. What is neither
    a row of its table nor PAD is refused.

    Made once for a layout, for hot rows may be many; it travels to input workers.

    Args:
        features: the name of each column's feature.
        tables: which of the stack's tables each column reads.
        examples: how many examples the `places` of `values` count; 0 where it is not called.
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
        # For each column of each example, so that one index finds what belongs to a value.
        index = np.tile(np.asarray(tables, np.intp), self._examples)
        self._to_stack = ToStack.of(stack)
        self._first, self._hot = self._to_stack.first[index], self._to_stack.hot[index]
        # Without hot rows all rows of a table move by the same number.
        self._offsets = None if stack.hot else self._to_stack.step[index]
        self._limits = np.tile(np.asarray(self._rows, np.uint32), self._examples)
        self._pads = np.full(len(index), PAD, np.uint32)  # NumPy is slow with a scalar

    def matrix(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """i32[n, columns] of the tables -> i32[n, columns] of the stack.

        Args:
            out: where to; may be `rows`.

        Raises:
            InputError: a row that its table does not have; names feature, table and example.
        """
        out = np.empty_like(rows) if out is None else out
        width = len(self._features) * math.gcd(len(rows), self._examples)
        wide, moved = rows.reshape(-1, width), out.reshape(-1, width)

        def place(i: int) -> tuple[int, int]:
            return divmod(i, len(self._features))

        outside = wide.view(np.uint32) >= self._limits[:width]  # negative ones are large here
        any_outside = self._check(wide, outside, place)
        if self._offsets is not None:
            np.add(wide, self._offsets[:width], out=moved)
        else:
            first, hot = self._first[:width], self._hot[:width]
            for i in range(0, len(wide), 4):  # so few stay in the cache from step to step
                part = wide[i : i + 4]
                np.add(part, self._to_stack.steps(part, first, hot), out=moved[i : i + 4])
        if any_outside:
            # What came of PAD is PAD or more as an unsigned number. Where a fifth of the ids is
            # missing, this is 20 times as fast as np.copyto with a mask.
            bits = moved.view(np.uint32)
            np.minimum(bits, self._pads[:width], out=bits)
        return out

    def values(self, rows: np.ndarray, places: np.ndarray, start: int, out: np.ndarray) -> None:
        """i32[m] rows of the tables -> `out` i32[m], rows of the stack.

        Args:
            places: i64[m], `example * columns + column` of each row.
            start: the number of example 0, for messages.

        Raises:
            InputError: as of `matrix`.
        """

        def place(i: int) -> tuple[int, int]:
            example, column = divmod(int(places[i]), len(self._features))
            return start + example, column

        bits = rows.view(np.uint32)
        outside = None
        if len(bits) and bits.max() >= self._least:  # PAD, or a row that only larger tables have
            # `out` is free until the end. With "raise", take would make a copy first; "wrap" is
            # faster than "clip".
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
        """Whether any row is outside its table; refuses those that are not PAD.

        Args:
            place: flat index -> example and column.
        """
        count = np.count_nonzero(outside)
        if count and count != np.count_nonzero(rows == PAD):  # PAD is outside of every table
            wrong = int(np.flatnonzero(outside & (rows != PAD))[0])
            example, column = place(wrong)
            self._refuse(example, column, int(rows.reshape(-1)[wrong]))
        return bool(count)

    def _refuse(self, example: int, column: int, found: int) -> NoReturn:
        rows = self._rows[column]
        raise InputError(
            f"Example {example} of the batch: ids of the feature {self._features[column]!r} must be"
            f" rows of the table {self._tables[column]!r}, 0 to {rows - 1} (rows={rows}), or PAD:"
            f" found {found}. `jaxrank prepare` writes no such ids: prepare the data again."
        )


def _side_by_side(columns: int) -> int:
    """Examples that NumPy meets as one row: a power of two, which divides most batches."""
    return 1 << (max(1, _WIDE // columns).bit_length() - 1)
