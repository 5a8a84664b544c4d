"""The tables of a production model: 26 tables of 10 to 40 million rows, read by a power law.

    jaxrank plan --config=configs/powerlaw.py --topology=v3-128 --config.source.exponent=1.5

Twelve seconds on one CPU core, for 100 batches. Rows served by the busiest device over the mean:
1.010 on 32 devices and 1.024 on 128 at exponent 1.05; 1.022 and 1.044 at exponent 1.5.
"""

from ml_collections import ConfigDict

from jaxrank.config import default

TABLES = 26
MIN_ROWS, MAX_ROWS = 10, 40_000_000  # rows


def table_rows():
    """Rows of each table, in a geometric row."""
    ratio = (MAX_ROWS / MIN_ROWS) ** (1 / (TABLES - 1))
    return [round(MIN_ROWS * ratio**i) for i in range(TABLES)]


def get_config():
    c = default()
    rows = table_rows()
    c.source = ConfigDict(
        dict(
            kind="synthetic",
            rows=dict(train=16_777_216, valid=262_144),
            seed=1,
            dense=13,
            categorical=rows,
            exponent=1.05,
        )
    )
    c.features.tasks = [dict(name="click", label="click", truth="p_click")]
    c.features.dense = [dict(columns="f*", standardize=True, missing_indicator=True)]
    c.features.categorical = [
        dict(columns=f"c{i}", encoding="integer", rows=count) for i, count in enumerate(rows)
    ]
    c.batch_size = 131_072
    c.num_epochs = 1.0
    c.embedding.dim = 16
    c.model.name = "ranker"
    return c
