"""The layout of tables: tables of one dimension form a stack, which has the rows of its tables.

NumPy only, like `features`, because the input workers import this module.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrank.features import PAD, Batch, Lists, Schema, Table


class ReplicatedRows(NamedTuple):
    """The rows of a stack that are replicated, and those that are distributed by frequency.

    The hot rows of a table are its first rows, the most frequent ones. Hot rows of all tables are
    merged by falling frequency. Neighbours in the stack go to different devices, so each device
    gets the same share of every frequency.

    replicated_tables: tables whose rows are all replicated.
    hot_rows: for each hot row of the other tables, from the most frequent, the name of its table.
        The n-th occurrence of a table stands for its row n.
    replicated: number of `hot_rows`, from the first, that are replicated.
    """

    replicated_tables: tuple[str, ...] = ()
    hot_rows: tuple[str, ...] = ()
    replicated: int = 0

    def to_state(self) -> dict[str, Any]:
        """Converts the rows for a checkpoint, `hot_rows` as runs of one table: [name, length]."""
        runs = [[name, len(list(run))] for name, run in itertools.groupby(self.hot_rows)]
        return {
            "replicated_tables": list(self.replicated_tables),
            "hot_rows": runs,
            "replicated": self.replicated,
        }

    @classmethod
    def from_state(cls, tree: Mapping[str, Any]) -> "ReplicatedRows":
        merged = itertools.chain.from_iterable([name] * count for name, count in tree["hot_rows"])
        return cls(tuple(tree["replicated_tables"]), tuple(merged), tree["replicated"])


@dataclasses.dataclass(frozen=True)
class Stack:
    """All tables of one dimension, which are stored and looked up together.

    Its rows are, in this order: the tables that are replicated whole; the merged hot rows of the
    others (see `ReplicatedRows`); the rest of each of the others, one table after another.

    name: such as "dim16".
    dim: length of a vector.
    tables: names, in order.
    offsets: row r of a table is row `r + offset` of the stack, unless it is a hot row.
    rows: number of rows of all tables.
    replicated: number of rows, from the first, that are replicated. The others are split.
    hot_start: the first of the merged hot rows.
    hot: the table (index in `tables`) of each merged hot row.
    columns: columns of the id matrix that read this stack.
    column_tables: the table (index in `tables`) that each of `columns` reads.
    lists: entries of `Schema.ragged` that read this stack and are combined.
    list_tables: the table that each of `lists` reads.
    sequences: entries of `Schema.ragged` that read this stack and are not combined.
    sequence_tables: the table that each of `sequences` reads.
    sequence_lengths: number of places of each of `sequences`.
    """

    name: str
    dim: int
    tables: tuple[str, ...]
    offsets: tuple[int, ...]
    rows: int
    replicated: int
    hot_start: int
    hot: tuple[int, ...]
    columns: tuple[int, ...]
    column_tables: tuple[int, ...]
    lists: tuple[int, ...]
    list_tables: tuple[int, ...]
    sequences: tuple[int, ...]
    sequence_tables: tuple[int, ...]
    sequence_lengths: tuple[int, ...]

    @property
    def places(self) -> int:
        """Number of columns of `Batch.ids` of this stack."""
        return len(self.columns) + sum(self.sequence_lengths)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The stacks of a schema's tables."""

    schema: Schema
    stacks: tuple[Stack, ...]


class ToStack(NamedTuple):
    """Maps rows of a stack's tables to rows of the stack, by adding a step to each.

    Build it once for many calls, because it sorts the hot rows.

    step: i32[hot rows + tables], by table: one step per hot row, then one for all its other rows.
    first: i32[tables], the first index of each table in `step`.
    hot: i32[tables], number of hot rows of each table.
    """

    step: np.ndarray
    first: np.ndarray
    hot: np.ndarray

    @classmethod
    def from_stack(cls, stack: Stack) -> "ToStack":
        tables, rows, hot = _hot_rows(stack)
        first = np.cumsum(hot + 1, dtype=np.int32) - hot - 1
        step = np.empty(len(tables) + len(hot), np.int32)
        step[first + hot] = np.asarray(stack.offsets, np.int32)
        step[first[tables] + rows] = stack.hot_start + np.arange(len(tables)) - rows
        return cls(step, first, hot)

    def steps(self, rows: np.ndarray, first: np.ndarray, hot: np.ndarray) -> np.ndarray:
        """Returns the steps to add to rows, i32 of their shape. Any value for rows out of range.

        Args:
            rows: i32[..], rows of tables.
            first, hot: i32, of the table of each row. They broadcast to `rows`.
        """
        index = np.minimum(rows, hot)
        index += first
        return self.step.take(index, mode="clip")

    def __call__(self, rows: np.ndarray, tables: np.ndarray | int) -> np.ndarray:
        """Maps to rows of the stack, i32 of the shape of `rows`. PAD stays PAD.

        Args:
            rows: i32[..], rows of tables, or PAD.
            tables: the table (index in `Stack.tables`) of each row. Broadcasts to `rows`.
        """
        stack_rows = rows + self.steps(rows, self.first[tables], self.hot[tables])
        np.copyto(stack_rows, PAD, where=rows == PAD)
        return stack_rows


class ToTables(NamedTuple):
    """Maps rows of a stack to their tables and the rows in them.

    The rows are runs of one table each, with the merged hot rows somewhere between them.

    starts: i32[tables], the first row of each run in the stack, rising.
    tables: i32[tables], the table (index in `Stack.tables`) of each run.
    offsets: i32[tables], the number to subtract from the rows of each run.
    hot_start: the first of the merged hot rows in the stack.
    hot_tables, hot_rows: i32[hot rows], the table of each hot row, and its row in it.
    """

    starts: np.ndarray
    tables: np.ndarray
    offsets: np.ndarray
    hot_start: int
    hot_tables: np.ndarray
    hot_rows: np.ndarray

    @classmethod
    def from_stack(cls, stack: Stack) -> "ToTables":
        hot_tables, hot_rows, counts = _hot_rows(stack)
        offsets = np.asarray(stack.offsets, np.int32)
        starts = offsets + counts
        # A table whose rows are all hot has an empty run, which begins where the next run begins.
        tables = np.argsort(starts, kind="stable").astype(np.int32)
        return cls(starts[tables], tables, offsets[tables], stack.hot_start, hot_tables, hot_rows)

    def __call__(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Maps rows of the stack to their tables i32[n] and the rows in them.

        Args:
            rows: integers [n], not PAD. Rows in the tables have the same type.
        """
        run = np.searchsorted(self.starts, rows, side="right") - 1
        tables, table_rows = self.tables[run], rows - self.offsets[run]
        place = rows - self.hot_start
        is_hot = (place >= 0) & (place < len(self.hot_rows))
        tables[is_hot] = self.hot_tables[place[is_hot]]
        table_rows[is_hot] = self.hot_rows[place[is_hot]]
        return tables, table_rows


def _hot_rows(stack: Stack) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the table of each merged hot row and its row in it, i32[hot rows], and the number of
    hot rows of each table, i32[tables]."""
    tables = np.asarray(stack.hot, np.int32)
    counts = np.bincount(tables, minlength=len(stack.tables)).astype(np.int32)
    firsts = np.cumsum(counts) - counts
    by_table = np.argsort(tables, kind="stable")
    rows = np.empty_like(tables)
    rows[by_table] = np.arange(len(tables)) - firsts[tables[by_table]]
    return tables, rows, counts


def stack_name(dim: int) -> str:
    return f"dim{dim}"


def layout(
    schema: Schema, dim_of: Mapping[str, int], hot: Mapping[str, ReplicatedRows] | None = None
) -> Layout:
    """Builds the layout of a schema's tables.

    Args:
        dim_of: {table: dimension}.
        hot: {stack: its rows}. A stack that is absent has no hot rows.
    """
    stacks = []
    for dim in sorted(set(dim_of.values())):
        tables = [t for t in schema.tables if dim_of[t.name] == dim]
        stacks.append(
            _stack(schema, dim, tables, (hot or {}).get(stack_name(dim), ReplicatedRows()))
        )
    return Layout(schema=schema, stacks=tuple(stacks))


def _stack(schema: Schema, dim: int, tables: list[Table], hot: ReplicatedRows) -> Stack:
    index = {t.name: i for i, t in enumerate(tables)}
    offsets = [0] * len(tables)
    at = 0
    for table in tables:
        if table.name in hot.replicated_tables:
            offsets[index[table.name]] = at
            at += table.rows
    hot_start = at
    merged = [index[name] for name in hot.hot_rows]
    hot_rows = collections.Counter(merged)
    at += len(merged)
    for i, table in enumerate(tables):
        if table.name not in hot.replicated_tables:
            offsets[i] = at - hot_rows[i]
            at += table.rows - hot_rows[i]
    column_tables = [f.table for f in schema.id_columns]
    columns = [i for i, name in enumerate(column_tables) if name in index]
    lists = [i for i, f in enumerate(schema.ragged) if f.table in index and f.combiner != "none"]
    sequences = [
        i for i, f in enumerate(schema.ragged) if f.table in index and f.combiner == "none"
    ]
    return Stack(
        name=stack_name(dim),
        dim=dim,
        tables=tuple(index),
        offsets=tuple(offsets),
        rows=at,
        replicated=hot_start + hot.replicated,
        hot_start=hot_start,
        hot=tuple(merged),
        columns=tuple(columns),
        column_tables=tuple(index[column_tables[i]] for i in columns),
        lists=tuple(lists),
        list_tables=tuple(index[schema.ragged[i].table] for i in lists),
        sequences=tuple(sequences),
        sequence_tables=tuple(index[schema.ragged[i].table] for i in sequences),
        sequence_lengths=tuple(schema.ragged[i].length for i in sequences),
    )


def ids_of_device(layout: Layout, batch: Batch, devices: int) -> dict[str, int]:
    """Returns {stack: number of ids in a device's share of a batch, with PAD}."""
    counts = {}
    for stack in layout.stacks:
        count = batch.ids[stack.name].size if stack.name in batch.ids else 0
        if stack.name in batch.lists:
            count += batch.lists[stack.name].ids.size
        counts[stack.name] = count // devices
    return counts


def make_batch(
    make: Callable[[tuple[int, ...], type], Any],
    layout: Layout,
    rows: int,
    group: int,
    capacities: Mapping[str, int],
    logit_correction: int,
    requests: bool = False,
) -> Batch:
    """Builds a batch by calling `make` with the shape and dtype of each of its arrays.

    Args:
        rows: number of examples.
        group: number of examples whose lists are packed together.
        capacities: {stack: ids per group}.
        logit_correction: number of columns of `Batch.logit_correction`.
        requests: whether examples have requests.
    """
    schema, groups = layout.schema, rows // group

    def packed(capacity: int) -> Lists:
        shape = (groups, capacity)
        return Lists(make(shape, np.int32), make(shape, np.int32), make(shape, np.float32))

    return Batch(
        dense=make((rows, len(schema.dense)), np.float32),
        ids={s.name: make((rows, s.places), np.int32) for s in layout.stacks if s.places},
        lists={s.name: packed(capacities[s.name]) for s in layout.stacks if s.lists},
        labels=make((rows, len(schema.tasks)), np.float32),
        weights=make((rows, len(schema.tasks)), np.float32),
        dropped=make((groups, len(schema.ragged)), np.int32),
        logit_correction=make((rows, logit_correction), np.float32),
        requests=make((rows,), np.int32) if requests else (),
    )
