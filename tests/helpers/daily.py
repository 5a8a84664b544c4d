"""A store by day, and the config of a run with progressive validation."""

import by_day
import numpy as np
import pyarrow as pa
from ml_collections import ConfigDict

from jaxrank.config import default

# The last day is not used for training.
ROWS = {
    "2024-05-01": 700,
    "2024-05-02": 650,
    "2024-05-04": 530,
    "2024-05-05": 640,
    "2024-05-06": 700,
    "2024-05-09": 300,
}
DAYS = list(ROWS)
USERS = 20
CALL = 128  # examples
FEATURES = dict(
    tasks=[dict(name="click", label="label", truth="p")],
    dense=[dict(columns="row", standardize=False)],
    categorical=[dict(columns="user", encoding="integer", rows=USERS)],
    ragged=[dict(columns="seen", encoding="integer", rows=USERS)],
)


def table(number, first):
    """Returns the examples of a day. Each day another half of users clicks, with longer lists."""
    rows = ROWS[DAYS[number]]
    random = np.random.default_rng(number)
    user = random.integers(0, USERS, rows)
    label = (user < USERS // 2) == (number % 2 == 0)
    return pa.table(
        {
            "label": label.astype(np.int8),
            "p": np.where(label, 0.9, 0.1),
            # Identifies rows in the test. Too small to affect training.
            "row": np.arange(first, first + rows) * np.float32(2**-20),
            "user": user,
            "seen": pa.array(list(random.integers(0, USERS, (rows, 4 * number)))),
        }
    )


def prepared(folder):
    firsts = np.cumsum([0, *ROWS.values()])
    tables = {day: table(number, firsts[number]) for number, day in enumerate(DAYS)}
    return by_day.write(folder, tables, FEATURES, block_size=100)


def config(store, **changes):
    c = default()
    c.features = ConfigDict(FEATURES | dict(time="time", by_day=True))
    c.data.store = str(store.path)
    c.data.train = f"train/{DAYS[0]}:{DAYS[-2]}"
    c.data.order = "days"
    c.data.valid = "next_day"
    c.data.window_blocks = 1
    c.batch_size = 64
    c.steps_per_execution = 2
    c.log_every_steps = 2
    c.num_epochs = 1.0
    c.eval.batch_size = 512
    c.embedding.dim = 4
    c.model.mlp_units = (8,)
    c.optim.tables.name = "sgd"
    c.optim.tables.base_learning_rate = 20.0
    c.optim.dense.base_learning_rate = 0.02
    c.mesh.devices = 1
    for field, value in changes.items():
        section, _, name = field.rpartition("__")
        (c[section] if section else c)[name] = value
    return c
