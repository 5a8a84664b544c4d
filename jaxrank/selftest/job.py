"""The small job that the self-test trains, and how much of it."""

from typing import NamedTuple

from ml_collections import ConfigDict

from jaxrank.config import default

_TABLES = (100_000, 20_000, 5_000, 1_000, 200, 50)  # rows
_LISTS = (20_000, 500)


class Size(NamedTuple):
    """The amount of work of a self-test.

    rows: training examples.
    batch_per_device: examples per device and step; on few devices the batch is `least_batch`.
    tables: number of tables of single ids.
    executions: executions in which n devices are compared with one.
    steps: of the run that is killed. It saves at every sixth of them.
    kills: number of times that the run is killed.
    seconds: of each measurement of a rate.
    exchange_bytes: bytes per device of the measured exchanges.
    each_device: compare every device by itself, not only the first of each process.
    limit_seconds: time without a result after which a process counts as hanging.
    """

    rows: int = 200_000
    batch_per_device: int = 256
    least_batch: int = 2048
    tables: int = len(_TABLES)
    executions: int = 4
    steps: int = 48
    kills: int = 1
    seconds: float = 3.0
    exchange_bytes: int = 2**24
    each_device: bool = False
    limit_seconds: float = 600.0


FULL = Size(
    rows=2_000_000,
    batch_per_device=2048,
    least_batch=16_384,
    executions=16,
    steps=240,
    kills=4,
    seconds=20.0,
    exchange_bytes=2**26,
    each_device=True,
    limit_seconds=3600.0,
)


def config(size: Size, devices: int, processes: int) -> ConfigDict:
    """Returns a config with dense, categorical and ragged features and two tasks.

    Args:
        devices, processes: their number on these machines.
    """
    tables = _TABLES[: size.tables]
    c = default()
    c.source = ConfigDict(
        dict(
            kind="synthetic",
            rows=dict(train=size.rows, valid=max(1000, size.rows // 50)),
            seed=1,
            dense=8,
            missing=0.1,
            categorical=list(tables),
            exponent=1.05,
            ragged=[
                dict(rows=_LISTS[0], mean_length=4, weighted=False),
                dict(rows=_LISTS[1], mean_length=3, weighted=True),
            ],
        )
    )
    c.features.tasks = [
        dict(name="click", label="click", truth="p_click"),
        dict(name="conversion", label="conversion", truth="p_conversion"),
    ]
    c.features.dense = [dict(columns="f*", standardize=True, missing_indicator=True)]
    c.features.categorical = [
        dict(columns=f"c{i}", encoding="integer", rows=rows) for i, rows in enumerate(tables)
    ]
    c.features.ragged = [
        dict(columns="l0", encoding="integer", rows=_LISTS[0], combiner="mean"),
        dict(columns="l1", encoding="integer", rows=_LISTS[1], weights="l1_weight"),
    ]
    streams = max(8, devices, processes)
    streams += -streams % max(devices, processes)
    c.data.shards = streams
    c.batch_size = -(-max(size.least_batch, size.batch_per_device * devices) // streams) * streams
    c.steps_per_execution = 4
    c.num_steps = size.steps
    c.log_every_steps = 4
    c.eval.every_steps = c.checkpoint.every_steps = size.steps // 6
    c.eval.batch_size = 512 * devices
    c.embedding.dim = 16
    # Half of the tables are split over the devices, so that they exchange rows.
    c.embedding.placements = ConfigDict({"c0": "rows", "c1": "rows", "l0": "rows"})
    c.model.name, c.model.mlp_units = "ranker", (64, 32)
    c.optim.tables.name = "rowwise_adagrad"
    for section, rate in ((c.optim.dense, 0.002), (c.optim.tables, 0.05)):
        section.base_learning_rate, section.base_batch, section.decay = rate, 4096, "constant"
    return c
