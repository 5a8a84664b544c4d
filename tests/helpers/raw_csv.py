"""Raw data whose values differ from one folder to the next, and a config that trains on it."""

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
from ml_collections import ConfigDict

from jaxrank.config import default

ROWS = 1024


def write(folder, seed, *, values=40, drop=(), without=(), rows=ROWS):
    """Writes files of raw data. The seed determines the values and their frequencies.

    drop: columns that are absent.
    without: columns that are empty in the validation file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    of_user = np.random.default_rng(7).normal(size=200)
    for split, count in (("train", rows), ("valid", 256)):
        order = rng.permutation(200)[:values]
        user = order[np.minimum(rng.zipf(1.3, count) - 1, values - 1)]

        def several(letter, most, number, rng=rng):
            return "|".join(f"{letter}{i}" for i in rng.integers(0, most, number))

        columns = {
            "user": [f"u{i}" for i in user],
            "item": [f"i{i}" for i in rng.integers(0, 25, count)],
            "tags": [several("t", 9, n) for n in rng.poisson(2, count)],
            "seen": [several("i", 25, n) for n in rng.integers(0, 4, count)],
            "f0": rng.normal(size=count).round(3).astype(str),
            "f1": rng.normal(size=count).round(3).astype(str),
            "click": (rng.random(count) < 1 / (1 + np.exp(-of_user[user]))).astype(int).astype(str),
        }
        if split == "valid":
            columns |= {name: [""] * count for name in without}
        for name in drop:
            del columns[name]
        pacsv.write_csv(pa.table(columns), folder / f"{split}.csv")
    return folder


def config(folder, *, ids=("user", "item"), floats=("f0", "f1"), lists=("tags", "seen"), **changes):
    c = default()
    c.source = ConfigDict(
        dict(kind="csv", files={s: str(folder / f"{s}.csv") for s in ("train", "valid")})
    )
    c.features.tasks = [dict(name="click", label="click")]
    c.features.dense = [dict(columns=name) for name in floats]
    c.features.categorical = [dict(columns=name) for name in ids]
    c.features.ragged = [
        dict(columns=name, separator="|")
        | (dict(combiner="none", max_length=3, table="item") if name == "seen" else {})
        for name in lists
    ]
    c.batch_size = 64
    c.num_steps = 16
    c.steps_per_execution = 4
    c.embedding.dim = 4
    c.embedding.dims = ConfigDict({"tags": 8}) if "tags" in lists else ConfigDict()
    c.model.mlp_units = (8,)
    c.mesh.devices = 1
    with c.unlocked():
        for path, value in changes.items():
            *parts, last = path.split("__")
            section = c
            for part in parts:
                section = section[part]
            section[last] = value
    return c
