"""Small schemas and random batches for tests, and the expected lookups in NumPy."""

import collections

import numpy as np

from jaxrank.features import PAD, Batch, Categorical, Dense, Lists, Ragged, Schema, Table, Task
from jaxrank.layout import Layout, ReplicatedRows, Stack, layout


def small_schema(rows: int = 50) -> Schema:
    """Returns a schema of three floats, three id columns over two tables, and two lists.

    One list shares a table with the columns.
    """
    return Schema(
        tasks=(Task("click"), Task("conversion")),
        dense=(Dense("f0"), Dense("f1"), Dense("f2")),
        categorical=(Categorical("a", "ta"), Categorical("b", "tb"), Categorical("c", "ta")),
        ragged=(Ragged("la", "ta", "mean"), Ragged("lc", "tc", "sqrtn", weighted=True)),
        tables=(
            Table("ta", rows, "integer"),
            Table("tb", 7, "integer"),
            Table("tc", 31, "integer"),
        ),
    )


def small_layout(
    dims: dict[str, int] | None = None, rows: int = 50, hot: dict[str, ReplicatedRows] | None = None
) -> Layout:
    return layout(small_schema(rows), dims or {"ta": 8, "tb": 8, "tc": 8}, hot)


def rows_in_order(rows: dict[str, int], hot: ReplicatedRows) -> list[tuple[str, int]]:
    """Lists (table, row) of each row of a stack: replicated tables, hot rows, then the rest.

    Args:
        rows: of each table of the stack, in order.
    """
    order = [(t, r) for t in rows if t in hot.replicated_tables for r in range(rows[t])]
    met: collections.Counter[str] = collections.Counter()
    for table in hot.hot_rows:
        order.append((table, met[table]))
        met[table] += 1
    rest = [t for t in rows if t not in hot.replicated_tables]
    return order + [(t, r) for t in rest for r in range(met[t], rows[t])]


def stack_rows(stack: Stack, table: str, rows: np.ndarray) -> np.ndarray:
    """Maps rows of a table to rows of its stack, one by one."""
    index = stack.tables.index(table)
    hot = [stack.hot_start + i for i, t in enumerate(stack.hot) if t == index]
    return np.array([hot[r] if r < len(hot) else r + stack.offsets[index] for r in rows], np.int32)


def random_batch(
    lay: Layout, size: int, seed: int = 0, group: int = 4, capacity: int = 24, mean: float = 2.0
) -> Batch:
    """Draws a batch with PAD, the first and last row of each table, duplicates and empty lists."""
    rng = np.random.default_rng(seed)
    rows_of = {t.name: t.rows for t in lay.schema.tables}
    ids, lists = {}, {}
    for stack in lay.stacks:
        tables = [f.table for f in lay.schema.id_columns]
        columns = []
        for column in stack.columns:
            rows = rows_of[tables[column]]
            values = stack_rows(
                stack, tables[column], np.minimum(rng.zipf(1.3, size) - 1, rows - 1)
            )
            columns.append(np.where(rng.random(size) < 0.1, PAD, values))
        for number, length in zip(stack.sequences, stack.sequence_lengths, strict=True):
            table = lay.schema.ragged[number].table
            lengths = rng.integers(0, length + 1, size)
            for place in range(length):
                values = stack_rows(stack, table, rng.integers(0, rows_of[table], size))
                columns.append(np.where(place < lengths, values, PAD))
        if columns:
            ids[stack.name] = np.stack(columns, axis=1).astype(np.int32)
        if stack.lists:
            lists[stack.name] = _random_lists(lay, stack, size, group, capacity, mean, rng)
    labels = (rng.random((size, len(lay.schema.tasks))) < 0.4).astype(np.float32)
    weights = (rng.random(labels.shape) < 0.8).astype(np.float32)
    return Batch(
        dense=rng.normal(size=(size, len(lay.schema.dense))).astype(np.float32),
        ids=ids,
        lists=lists,
        labels=labels * (weights > 0),
        weights=weights,
        dropped=np.zeros((size // group, len(lay.schema.ragged)), np.int32),
        logit_correction=np.zeros((size, 0), np.float32),
    )


def _random_lists(lay, stack, size, group, capacity, mean, rng) -> Lists:
    groups = size // group
    ids = np.full((groups, capacity), PAD, np.int32)
    segments = np.full((groups, capacity), PAD, np.int32)
    weights = np.zeros((groups, capacity), np.float32)
    rows_of = {t.name: t.rows for t in lay.schema.tables}
    for g in range(groups):
        at = 0
        for example in range(group):
            for i, number in enumerate(stack.lists):
                length = min(rng.poisson(mean), capacity - at)
                table = lay.schema.ragged[number].table
                values = rng.integers(0, rows_of[table], length)
                ids[g, at : at + length] = stack_rows(stack, table, values)
                segments[g, at : at + length] = example * len(stack.lists) + i
                weights[g, at : at + length] = rng.random(length) + 0.5
                if lay.schema.ragged[number].has_plain_sums:
                    weights[g, at : at + length] = 1
                at += length
    return Lists(ids, segments, weights)


def lookup_vectors(tables: dict[str, np.ndarray], lay: Layout, batch: Batch) -> dict:
    """Computes the expected `Embedding.lookup` of logical tables f[rows, dim] with simple loops."""
    result = {}
    for stack in lay.stacks:
        table, dim = tables[stack.name], stack.dim
        out = result[stack.name] = {}
        if stack.name in batch.ids:
            ids = batch.ids[stack.name]
            out["ids"] = np.zeros((*ids.shape, dim), table.dtype)
            for index in np.ndindex(ids.shape):
                if ids[index] != PAD:
                    out["ids"][index] = table[ids[index]]
        if stack.name in batch.lists:
            lists = batch.lists[stack.name]
            size, count = len(batch.labels), len(stack.lists)
            flat = np.zeros((size * count, dim), table.dtype)
            per_group = size * count // len(lists.ids)
            for g, k in np.ndindex(lists.ids.shape):
                if lists.ids[g, k] != PAD:
                    row = table[lists.ids[g, k]] * lists.weights[g, k]
                    flat[g * per_group + lists.segments[g, k]] += row
            out["lists"] = flat.reshape(size, count, dim)
    return result


def row_gradients(lay: Layout, batch: Batch, grads: dict) -> dict[str, np.ndarray]:
    """Computes the dense gradient f[rows, dim] of each stack with simple loops."""
    result = {}
    for stack in lay.stacks:
        total = np.zeros((stack.rows, stack.dim))
        if stack.name in batch.ids:
            ids = batch.ids[stack.name]
            for index in np.ndindex(ids.shape):
                if ids[index] != PAD:
                    total[ids[index]] += grads[stack.name]["ids"][index]
        if stack.name in batch.lists:
            lists = batch.lists[stack.name]
            flat = np.asarray(grads[stack.name]["lists"]).reshape(-1, stack.dim)
            per_group = len(flat) // len(lists.ids)
            for g, k in np.ndindex(lists.ids.shape):
                if lists.ids[g, k] != PAD:
                    gradient = flat[g * per_group + lists.segments[g, k]] * lists.weights[g, k]
                    total[lists.ids[g, k]] += gradient
        result[stack.name] = total
    return result
