"""Raw text with histories, some of whose events are of the future, and a config that reads it."""

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from ml_collections import ConfigDict

from jaxrank.config import default

ROWS = {"train": 512, "valid": 200}
FIRST = 1_700_000_000
POOLS = {
    "target_attention": dict(
        candidate={"seen": "item", "seen_kind": "kind"}, mlp_units=(6, 4), packed_length=2.0
    ),
    "transformer": dict(layers=2),
    "mean": {},
    "learned_query": {},
}


def write(folder):
    """Writes raw text of two splits. The oldest event is first, and one in eight is too late."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, count in ROWS.items():
        lengths = rng.integers(0, 7, count)
        time = FIRST + np.arange(count) * 60
        items = [rng.integers(0, 30, n) for n in lengths]
        whens = []
        for n, now in zip(lengths, time, strict=True):
            ages = np.sort(rng.integers(1, 10**6, n))[::-1]
            late = ages[-1:] * 0 if rng.random() < 0.5 else ages[-1:]
            whens.append(now - np.concatenate([ages[:-1], late]))

        def text(lists):
            return ["|".join(map(str, part)) for part in lists]

        item = rng.integers(0, 30, count)
        columns = {
            "item": [f"i{i}" for i in item],
            "kind": [f"k{i % 5}" for i in item],
            "seen": text([[f"i{i}" for i in part] for part in items]),
            "seen_kind": text([[f"k{i % 5}" for i in part] for part in items]),
            "seen_when": text(whens),
            "time": list(map(str, time)),
            "f0": list(map(str, rng.normal(size=count).round(3))),
            "click": list(map(str, rng.integers(0, 2, count))),
        }
        pacsv.write_csv(pa.table(columns), folder / f"{split}.csv")
    return folder


def config(folder, pool="target_attention", **fields):
    c = default()
    files = {split: str(folder / f"{split}.csv") for split in ROWS}
    c.source = ConfigDict(dict(kind="csv", files=files))
    c.features.tasks = [dict(name="click", label="click")]
    c.features.time = "time"
    c.features.dense = [dict(columns="f0")]
    c.features.categorical = [dict(columns="item"), dict(columns="kind")]
    events = dict(combiner="none", max_length=4, on_overlong="truncate")
    c.features.ragged = [
        dict(columns="seen", table="item", **events),
        dict(columns="seen_kind", table="kind", **events),
    ]
    c.features.sequences = [
        dict(
            name="history",
            columns=["seen", "seen_kind"],
            time="seen_when",
            order="oldest_first",
            ages=True,
        )
    ]
    c.model.sequences = ConfigDict({"history": dict(pool=pool, **POOLS[pool])})
    c.model.cross_layers, c.model.mlp_units = 1, (8,)
    c.batch_size, c.num_steps, c.steps_per_execution, c.data.shards = 64, 16, 4, 8
    c.embedding.dim, c.embedding.dims = 4, ConfigDict({"kind": 2})
    c.mesh.devices = 1
    for field, value in fields.items():
        c[field] = value
    return c
