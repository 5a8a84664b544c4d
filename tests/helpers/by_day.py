"""A store whose training split is partitioned by day, from one table per day."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.reader import Store


def write(
    folder: Path, tables: dict, features: dict, block_size: int, by_day: bool = True
) -> Store:
    """Prepares a file with all days in order. Examples are at noon of their day.

    by_day: False prepares a split without days.
    """
    timed = []
    for day, table in tables.items():
        noon = np.full(len(table), np.datetime64(f"{day}T12:00:00"))
        timed.append(table.append_column("time", pa.array(noon)))
    path = folder / f"by_day_{by_day}.parquet"
    pq.write_table(pa.concat_tables(timed), path)
    return prepare(
        features | dict(time="time", by_day=by_day),
        dict(kind="parquet", files=dict(train=str(path))),
        path.with_suffix(""),
        block_size=block_size,
        report=lambda text: None,
    )
