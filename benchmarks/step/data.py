"""Raw batches and configs for benchmarks of the step, in the shape of Criteo.

The shapes have 13 floats and 26 ids over 8.67 M rows. "lists" also has 8 ragged lists. Ids of every
column follow a power law of exponent 1.05. "quickstart" is the config of the main job with its
generated data.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from benchmarks.harness.checkout import ROOT
from jaxrank.config import default
from jaxrank.config_files import load

# Rows of Criteo's tables, with a limit for the largest ones.
TABLES = (
    1460, 583, 2000000, 1500000, 305, 24, 12517, 633, 3, 93145, 5683, 1800000, 3194, 27, 14992,
    1200000, 10, 5652, 2173, 4, 1600000, 18, 15, 286181, 105, 142572,
)  # fmt: skip
LIST_ROWS, LISTS, MAX_LENGTH, MEAN_LENGTH = 500_000, 8, 30, 8
FLOATS, DIM, HIDDEN, CROSS_LAYERS = 13, 16, (400, 400, 400), 3
BATCH = 8192
BATCHES = 16  # distinct batches, used in turn
SHAPES = {"criteo": 0, "lists": LISTS}
MAIN_JOB = "quickstart"  # has no raw batches for other programs


class Raw(NamedTuple):
    """The examples of a shape.

    floats: f32[n, 13].
    ids: i64[n, 26], each at least 0 and below the rows of its table.
    lengths: i64[n, lists].
    values: i64[sum of lengths], list by list of each example in turn.
    labels: f32[n].
    """

    floats: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    values: np.ndarray
    labels: np.ndarray


def power_law(rng: np.random.Generator, rows: int, size: int | tuple[int, ...]) -> np.ndarray:
    """Draws ids i64[size] below `rows` by a bounded power law of 1.05. Small ids are frequent."""
    u = rng.random(size)
    return (((float(rows) ** -0.05 - 1) * u + 1) ** -20.0).astype(np.int64).clip(1, rows) - 1


def raw(shape: str, examples: int) -> Raw:
    rng = np.random.default_rng(0)
    ids = np.stack([power_law(rng, rows, examples) for rows in TABLES], axis=1)
    lengths = rng.poisson(MEAN_LENGTH, (examples, SHAPES[shape])).clip(0, MAX_LENGTH)
    return Raw(
        floats=rng.normal(size=(examples, FLOATS)).astype(np.float32),
        ids=ids,
        lengths=lengths,
        values=power_law(rng, LIST_ROWS, int(lengths.sum())),
        labels=(rng.random(examples) < 0.25).astype(np.float32),
    )


def merge_tables(data: Raw) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids i64[n, 26] and list values as rows of one table each."""
    examples, lists = data.lengths.shape
    number = np.tile(np.arange(lists), examples).repeat(data.lengths.reshape(-1))
    return data.ids + np.append(0, np.cumsum(TABLES))[:-1], data.values + number * LIST_ROWS


def write_parquet(path: Path, data: Raw) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, pa.Array] = {"click": pa.array(data.labels.astype(np.int8))}
    columns |= {f"f{i}": pa.array(column) for i, column in enumerate(data.floats.T)}
    columns |= {f"c{i}": pa.array(column) for i, column in enumerate(data.ids.T)}
    lists = data.lengths.shape[1]
    ends = np.append(0, data.lengths.reshape(-1).cumsum())
    for i in range(lists):
        starts, stops = ends[:-1][i::lists], ends[1:][i::lists]
        values = np.concatenate([data.values[a:b] for a, b in zip(starts, stops, strict=True)])
        offsets = np.append(0, (stops - starts).cumsum()).astype(np.int32)
        columns[f"l{i}"] = pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
    pq.write_table(pa.table(columns), path)


def config(shape: str, path: Path, precision: str) -> ConfigDict:
    """Returns a config of DCN-V2 with three full cross layers and a tower, on a Parquet file."""
    c = default()
    c.source = ConfigDict(dict(kind="parquet", files=dict(train=str(path))))
    c.data.valid = ""
    c.features.tasks = [dict(name="click", label="click")]
    c.features.dense = [dict(columns="f*")]
    c.features.categorical = [
        dict(columns=f"c{i}", encoding="integer", rows=rows) for i, rows in enumerate(TABLES)
    ]
    c.features.ragged = [
        dict(columns=f"l{i}", encoding="integer", rows=LIST_ROWS, combiner="sum")
        for i in range(SHAPES[shape])
    ]
    c.embedding.dim = DIM
    c.model.cross, c.model.cross_layers, c.model.structure = "dcn_v2", CROSS_LAYERS, "parallel"
    c.model.mlp_units, c.model.precision = HIDDEN, precision
    c.batch_size = BATCH
    c.num_epochs, c.num_steps = 0.0, 2**24
    c.mesh.devices = 1
    return c


def main_job(precision: str) -> ConfigDict:
    """Returns the config of the main job with data for `BATCHES` batches of its size."""
    c = load(ROOT / "configs" / "quickstart.py")
    c.source.rows.train, c.source.rows.valid = BATCHES * c.batch_size, 1000
    c.data.valid, c.model.precision = "", precision
    c.num_epochs, c.num_steps = 0.0, 2**24
    c.mesh.devices = 1
    return c


def products(shape: str) -> list[tuple[int, int]]:
    """Returns (in, out) of every matrix product of that model, except the last one of width 1."""
    width = FLOATS + DIM * (len(TABLES) + SHAPES[shape])
    tower = (width, *HIDDEN)
    return [(width, width)] * CROSS_LAYERS + list(zip(tower, HIDDEN, strict=False))
