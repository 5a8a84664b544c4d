"""A task of each kind, from CSV files with labels that depend on the features."""

import numpy as np
import pyarrow as pa
import pyarrow.csv

from jaxrank.config import default
from jaxrank.data.prepare.passes import prepare

KINDS = {"visits": "count", "click": "binary", "price": "real"}
MAIN = {"visits": "deviance", "click": "logloss", "price": "squared_error"}
TASKS = [dict(name=name, label=name, kind=kind) for name, kind in KINDS.items()]
TASKS[2]["weight"] = "w"
ITEMS = 20
ROWS = {"train": 8000, "valid": 1500}


def planted(rows, seed):
    """Returns labels that depend on two floats and an item. A tenth of each is empty."""
    r = np.random.default_rng(seed)
    a, b, item = r.normal(size=rows), r.normal(size=rows), r.integers(0, ITEMS, rows)
    of_item = np.linspace(-0.6, 0.6, ITEMS)[item]
    labels = {
        "visits": r.poisson(np.exp(0.3 + 0.6 * b + of_item)),
        "click": (r.random(rows) < 1 / (1 + np.exp(0.5 - 1.5 * a - of_item))).astype(int),
        "price": np.round(2 + 1.5 * a - b + 0.3 * r.normal(size=rows), 3),
    }
    masked = {n: pa.array(v, mask=r.random(rows) < 0.1) for n, v in labels.items()}
    columns = {"a": a, "b": b, "item": item, "w": np.round(r.random(rows), 2)}
    return pa.table(masked | columns)


def prepared(path):
    """Writes CSV files and prepares a store from them, in one folder."""
    for seed, (name, rows) in enumerate(ROWS.items()):
        pa.csv.write_csv(planted(rows, seed), path / f"{name}.csv")
    c = config(path)
    sections = c.features.to_dict(), c.source.to_dict()
    prepare(*sections, path / "store", block_size=1000, report=lambda _: None)
    return path / "store"


def config(path, **changes):
    c = default()
    with c.unlocked():
        c.source = dict(kind="csv", files={n: str(path / f"{n}.csv") for n in ROWS})
    c.features.tasks = TASKS
    c.features.dense = [dict(columns=["a", "b"])]
    c.features.categorical = [dict(columns="item", encoding="integer", rows=ITEMS)]
    c.data.store = str(path / "store")
    c.batch_size = 128
    c.num_steps = 192
    c.steps_per_execution = 8
    c.eval.every_steps = 96
    c.eval.batch_size = 512
    c.embedding.dim = 4
    c.model.mlp_units = (16,)
    c.optim.dense.base_learning_rate = 0.01
    c.optim.dense.warmup_steps = 0
    c.mesh.devices = 1
    c.update(changes)
    return c
