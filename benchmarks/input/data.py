"""Prepared data of three shapes for benchmarks of the input pipeline."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.reader import Store, is_store, open_store

TABLES = (100_000,) * 13 + (1_000,) * 13
LIST_ROWS, MEAN_LENGTH = 50_000, 8
FLOATS = 13


class Shape(NamedTuple):
    """The categorical features of an example.

    hotness: ids per column.
    lists: number of ragged features.
    rows: examples per requested example.
    """

    hotness: Sequence[int]
    lists: int
    rows: float = 1.0

    @property
    def ids(self) -> int:
        """Mean number of ids per example."""
        return sum(self.hotness) + self.lists * MEAN_LENGTH


SHAPES = {
    "lists": Shape((1,) * 26, 8),
    "criteo": Shape((1,) * 26, 0),
    # The DCN-V2 of MLPerf Training.
    "mlperf": Shape(
        (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1), 0, 0.3
    ),
}


def prepared(folder: Path, name: str, million_rows: float) -> Store:
    """Opens the store of a shape, and prepares it first if it is absent."""
    rows = int(million_rows * SHAPES[name].rows * 1e6)
    path = folder / f"{name}-{rows}"
    if not is_store(path):
        make = _multi_hot if name == "mlperf" else _synthetic
        make(path, SHAPES[name], rows)
    return open_store(path)


def _synthetic(path: Path, shape: Shape, rows: int) -> None:
    source = dict(
        kind="synthetic",
        rows=dict(train=rows),
        seed=1,
        dense=FLOATS,
        categorical=TABLES,
        ragged=[dict(rows=LIST_ROWS, mean_length=MEAN_LENGTH)] * shape.lists,
    )
    lists = [dict(columns=f"l{i}", encoding="integer", rows=LIST_ROWS) for i in range(shape.lists)]
    prepare(_features(shape) | dict(ragged=lists), source, path, report=_nothing)


def _features(shape: Shape) -> dict:
    ids = [
        dict(columns=f"c{i}", encoding="integer", rows=rows, length=length)
        for i, (rows, length) in enumerate(zip(TABLES, shape.hotness, strict=True))
    ]
    return dict(
        tasks=[dict(name="click", label="click")],
        dense=[dict(columns="f*")],
        categorical=ids,
        ragged=[],
    )


def _multi_hot(path: Path, shape: Shape, rows: int) -> None:
    """Prepares a store with a fixed number of ids per column, drawn by a power law."""
    rng = np.random.default_rng(1)
    columns: dict[str, object] = {"click": rng.integers(0, 2, rows).astype(np.int8)}
    for i in range(FLOATS):
        columns[f"f{i}"] = rng.standard_normal(rows, np.float32)
    for i, (size, length) in enumerate(zip(TABLES, shape.hotness, strict=True)):
        ids = np.minimum(size ** rng.random(rows * length), size - 1).astype(np.int32)
        ends = np.arange(rows + 1, dtype=np.int32) * length
        columns[f"c{i}"] = ids if length == 1 else pa.ListArray.from_arrays(ends, ids)
    raw = path.with_suffix(".parquet")
    pq.write_table(pa.table(columns), raw, row_group_size=65_536)
    prepare(
        _features(shape), dict(kind="parquet", files=dict(train=str(raw))), path, report=_nothing
    )
    raw.unlink()


def _nothing(text: str) -> None:
    del text
