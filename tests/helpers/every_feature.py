"""Raw text of two splits with every kind of feature, and a config that reads it."""

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from ml_collections import ConfigDict

from jaxrank.config import default


def write(folder):
    """Writes raw text of two splits. The second has values that the first does not have."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", 1000), ("valid", 300)):

        def some(letter, most, count=count):
            chosen = np.minimum(rng.zipf(1.2, count), most)
            return ["" if i % 7 == 3 else f"{letter}{n}" for i, n in enumerate(chosen)]

        def several(letter, most, numbers):
            return ["|".join(f"{letter}{i}" for i in rng.integers(0, most, n)) for n in numbers]

        tags = rng.poisson(2, count)
        columns = {
            "user": some("u", 600 if split == "train" else 900),
            "item": some("i", 400),
            "pair": several("p", 20, [2 * (i % 5 > 0) for i in range(count)]),
            "code": some("x", 300),
            "number": ["" if n == 3 else str(n) for n in rng.integers(0, 45, count)],
            "age": ["" if n == 30 else str(n) for n in rng.integers(18, 80, count)],
            "seen": several("i", 400, rng.integers(0, 4, count)),
            "tags": several("t", 12, tags),
            "tag_weights": ["|".join(map(str, rng.random(n).round(2))) for n in tags],
            "f0": ["" if i % 9 == 4 else str(x) for i, x in enumerate(rng.normal(3, 2, count))],
            "f1": list(map(str, rng.normal(0, 50, count).round(3))),
            "click": list(map(str, rng.integers(0, 2, count))),
            "buy": list(map(str, rng.integers(0, 2, count))),
        }
        pacsv.write_csv(pa.table(columns), folder / f"{split}.csv")
    return folder


def config(folder, **fields):
    c = default()
    files = {split: str(folder / f"{split}.csv") for split in ("train", "valid")}
    c.source = ConfigDict(dict(kind="csv", files=files))
    c.features.tasks = [dict(name="click", label="click"), dict(name="buy", label="buy")]
    c.features.dense = [
        dict(columns="f0", standardize=True, missing_indicator=True),
        dict(columns="f*1", log=True),
    ]
    c.features.categorical = [
        dict(columns="us*"),
        dict(columns="item", min_count=2),
        dict(columns="pair", length=2, separator="|"),
        dict(columns="code", encoding="hash", rows=40, salt="salt"),
        dict(columns="number", encoding="integer", rows=40, on_bad_id="oov"),
        dict(columns="age", encoding="bucket", buckets=5),
    ]
    c.features.ragged = [
        dict(columns="seen", table="item", min_count=2),
        dict(columns="tags", weights="tag_weights", combiner="sqrtn"),
    ]
    c.batch_size, c.num_steps, c.steps_per_execution, c.data.shards = 256, 16, 4, 8
    c.ema_decay = 0.9
    c.embedding.dim = 4
    c.embedding.dims = ConfigDict({"pair": 3, "age": 5})
    c.embedding.placements = ConfigDict({"item": "rows", "code": "replicated"})
    c.model.mlp_units, c.model.structure, c.model.norm = (8,), "parallel", "batch"
    for field, value in fields.items():
        c[field] = value
    return c
