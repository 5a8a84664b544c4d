"""Where the tables lie: those of one dimension make a stack, whose rows are the rows of its tables.

NumPy only, as in `features`: the input workers import this module.
"""

import collections
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrank.features import Batch, Schema, Table


class Hot(NamedTuple):
    """Which rows of a stack are kept on every device, and which are dealt out by frequency.

    A table's hot rows are its first ones, the most frequent. Those of all tables are merged by
    falling frequency: neighbours in the stack go to different devices, so each device gets the same
    share of every frequency.

    whole: tables of which every device keeps all rows.
    merged: the table (its name) of each hot row of the others, from the most frequent; the n-th
        time that a table occurs stands for its row n.
    replicated: how many of `merged`, from the first, every device keeps.
    """

    whole: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    replicated: int = 0

    def to_json(self) -> dict[str, Any]:
        """`merged` as runs of one table: [name, length]."""
        runs = [[name, len(list(run))] for name, run in itertools.groupby(self.merged)]
        return {"whole": list(self.whole), "merged": runs, "replicated": self.replicated}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> "Hot":
        merged = itertools.chain.from_iterable([name] * count for name, count in tree["merged"])
        return cls(tuple(tree["whole"]), tuple(merged), tree["replicated"])


@dataclasses.dataclass(frozen=True)
class Stack:
    """All tables of one dimension: the unit of storage and of lookup.

    Its rows are, in this order, the tables that every device keeps whole; the merged hot rows of
    the others (see `Hot`); and the rest of each of the others, one table after another.

    name: "dim16".
    dim: length of a vector.
    tables: names, in order.
    offsets: row r of a table is row `r + offset` of the stack, unless it is a hot row.
    rows: of all tables together.
    replicated: how many rows, from the first, every device keeps. The others are split.
    hot_start: the stack's row at which the merged hot rows begin.
    hot: the table (index in `tables`) of each merged hot row.
    columns: which columns of the id matrix read this stack.
    column_tables: the table (index in `tables`) that each of `columns` reads.
    lists: which entries of `Schema.lists` read this stack and are combined.
    list_tables: the table that each of `lists` reads.
    sequences: which entries of `Schema.lists` read this stack and are not combined.
    sequence_tables: the table that each of `sequences` reads.
    sequence_lengths: places of each of `sequences`.
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
        """Columns of `Batch.ids` of this stack."""
        return len(self.columns) + sum(self.sequence_lengths)

    def segments(self) -> list[tuple[int, int, int]]:
        """(first row of the stack, table, its offset) of each run of rows of one table, in order.

        The merged hot rows stand between the runs of whole tables and those of the others.
        """
        found = []
        hot_rows = collections.Counter(self.hot)
        for i, offset in enumerate(self.offsets):
            found.append((offset + hot_rows[i], i, offset))
        return sorted(found)

    def hot_rows(self) -> list[np.ndarray]:
        """For each table the stack's rows of its hot rows 0, 1, ..., i32[hot rows of the table]."""
        by_table = np.asarray(self.hot, np.int32)
        return [
            np.flatnonzero(by_table == i).astype(np.int32) + np.int32(self.hot_start)
            for i in range(len(self.tables))
        ]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which stack each table of a schema lies in."""

    schema: Schema
    stacks: tuple[Stack, ...]


def stack_name(dim: int) -> str:
    return f"dim{dim}"


def layout(
    schema: Schema, dim_of: Mapping[str, int], hot: Mapping[str, Hot] | None = None
) -> Layout:
    """The layout of a schema's tables.

    Args:
        dim_of: the dimension of each table by name.
        hot: by name of the stack; nothing is hot in a stack that is not there.
    """
    stacks = []
    for dim in sorted(set(dim_of.values())):
        tables = [t for t in schema.tables if dim_of[t.name] == dim]
        stacks.append(_stack(schema, dim, tables, (hot or {}).get(stack_name(dim), Hot())))
    return Layout(schema=schema, stacks=tuple(stacks))


def _stack(schema: Schema, dim: int, tables: list[Table], hot: Hot) -> Stack:
    index = {t.name: i for i, t in enumerate(tables)}
    offsets = [0] * len(tables)
    at = 0
    for table in tables:
        if table.name in hot.whole:
            offsets[index[table.name]] = at
            at += table.rows
    hot_start = at
    merged = [index[name] for name in hot.merged]
    hot_rows = collections.Counter(merged)
    at += len(merged)
    for i, table in enumerate(tables):
        if table.name not in hot.whole:
            offsets[i] = at - hot_rows[i]
            at += table.rows - hot_rows[i]
    column_tables = [f.table for f in schema.ids for _ in range(f.length)]
    columns = [i for i, name in enumerate(column_tables) if name in index]
    lists = [i for i, f in enumerate(schema.lists) if f.table in index and f.combiner != "none"]
    sequences = [i for i, f in enumerate(schema.lists) if f.table in index and f.combiner == "none"]
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
        list_tables=tuple(index[schema.lists[i].table] for i in lists),
        sequences=tuple(sequences),
        sequence_tables=tuple(index[schema.lists[i].table] for i in sequences),
        sequence_lengths=tuple(schema.lists[i].length for i in sequences),
    )


def ids_of_device(layout: Layout, batch: Batch, devices: int) -> dict[str, int]:
    """By stack, ids that a device has in its share of a batch, PAD included."""
    found = {}
    for stack in layout.stacks:
        count = batch.ids[stack.name].size if stack.name in batch.ids else 0
        if stack.name in batch.lists:
            count += batch.lists[stack.name].ids.size
        found[stack.name] = count // devices
    return found
