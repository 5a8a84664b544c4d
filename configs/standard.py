"""The standard model of a large ads ranker: 1,000 features of which 200 are ragged, two tasks.

jaxrank train --config=configs/standard.py:small --workdir=/tmp/standard

PLE over DCN-V2, 424 M parameters in 700 tables, global batches of 131,072, as Snap describes its
own (Training Large-Scale Recommendation Models with TPUs, Snap Engineering, 2022). `small` has the
same features and layers on a thousandth of the rows and small batches, for a machine with two
cores; without it the model is for accelerators.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from jaxrank.config import default


class Tables(NamedTuple):
    """A group of equal tables: number, rows per table, and mean ids per list (0: single ids)."""

    count: int
    rows: int
    mean_length: float = 0


# Few large tables and many small ones.
IDS = (Tables(10, 1_000_000), Tables(40, 100_000), Tables(150, 10_000), Tables(300, 1_000))
LISTS = (Tables(20, 500_000, 8), Tables(80, 20_000, 4), Tables(100, 1_000, 3))
FLOATS = 300
LARGE = 100_000  # rows of a table from which its vectors are longer


def get_config(size: str = ""):
    """`size`: "small", or "" for the whole model."""
    return ranker(size, features=1.0, dims=(8, 16), width=1, cross_layers=3)


def ranker(size: str, *, features: float, dims: tuple[int, int], width: int, cross_layers: int):
    """A config of this family.

    features: times those above.
    dims: of small tables and of large ones.
    width: times the layers of the standard model.
    """
    if size not in ("", "small"):
        raise ValueError(f"the size must be 'small' or left out: found {size!r}")
    small = size == "small"
    ids = [t for group in IDS for t in [group] * round(group.count * features)]
    lists = [t for group in LISTS for t in [group] * round(group.count * features)]

    def rows(table: Tables) -> int:
        return max(10, table.rows // 1000) if small else table.rows

    c = default()
    c.source = ConfigDict(
        dict(
            kind="synthetic",
            rows=dict(train=65_536, valid=8_192) if small else dict(train=2**27, valid=2**20),
            seed=1,
            dense=round(FLOATS * features),
            missing=0.1,
            categorical=[rows(t) for t in ids],
            exponent=1.05,
            ragged=[dict(rows=rows(t), mean_length=t.mean_length, weighted=False) for t in lists],
        )
    )
    c.features.tasks = [
        dict(name="click", label="click", truth="p_click"),
        dict(name="conversion", label="conversion", truth="p_conversion"),
    ]
    c.features.dense = [dict(columns="f*", standardize=True)]
    c.features.categorical = [
        dict(columns=f"c{i}", encoding="integer", rows=rows(t)) for i, t in enumerate(ids)
    ]
    c.features.ragged = [
        dict(columns=f"l{i}", encoding="integer", rows=rows(t)) for i, t in enumerate(lists)
    ]
    c.embedding.dim = dims[0]
    large = [f"c{i}" for i, t in enumerate(ids) if t.rows >= LARGE]
    large += [f"l{i}" for i, t in enumerate(lists) if t.rows >= LARGE]
    c.embedding.dims = ConfigDict(dict.fromkeys(large, dims[1]))

    c.model.cross = "dcn_v2_low_rank"
    c.model.cross_layers = cross_layers
    c.model.cross_rank = 256 * width
    c.model.mlp_units = (1024 * width,)
    c.model.multitask = "ple"
    c.model.expert_mlp_units = (256 * width,)
    c.model.task_mlp_units = (128 * width,)
    c.model.precision = "bfloat16"

    c.batch_size = 512 if small else 131_072
    c.num_epochs = 1.0
    # A step is long, and memory holds the batches of three calls.
    c.steps_per_execution = 4 if small else 2
    c.log_every_steps = 16
    c.eval.batch_size = 2048 if small else 131_072
    return c
