"""Training, evaluation and predictions on Parquet as it is, without a store."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from jaxrank.config_files import to_plain
from jaxrank.data.prepare.passes import prepare
from jaxrank.evaluation import evaluate
from jaxrank.train import train

pytestmark = pytest.mark.usefixtures("shared_programs")


def write_parquet(path, rows, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 5, rows)
    items = random.integers(0, 40, rows).astype(np.int32)
    x = random.normal(size=rows).astype(np.float32)
    columns = {
        "click": (random.random(rows) < 0.1 + 0.8 * (x > 0)).astype(np.int8),
        "x": x,
        "item": items,
        "seen": [random.integers(0, 40, n).tolist() for n in lengths],
    }
    pq.write_table(pa.table(columns), path, row_group_size=4096)


def make_config(tmp_path, **data):
    config = tiny.config()
    with config.unlocked():
        config.source = dict(
            kind="parquet",
            files={name: str(tmp_path / f"{name}.parquet") for name in ("train", "valid")},
        )
        config.features.tasks = [dict(name="click", label="click")]
        config.features.dense = [dict(columns="x", standardize=False)]
        config.features.categorical = [dict(columns="item", encoding="integer", rows=40)]
        config.features.ragged = [dict(columns="seen", encoding="integer", rows=40, table="item")]
        config.features.keep = ["item"]
        config.embedding.dims = {}
        config.task_weights = ()
        config.eval.metric = ""
        config.data.update(data)
        config.num_steps = 64
        config.optim.dense.base_learning_rate = 0.05
        # Data that is read directly has no statistics of labels.
        config.model.initial_bias = dict(click=0.0)
    return config


def test_a_run_on_parquet_is_that_on_a_store_of_the_same_blocks(tmp_path):
    for seed, (name, rows) in enumerate((("train", 20_000), ("valid", 3_000))):
        write_parquet(tmp_path / f"{name}.parquet", rows, seed)
    direct = make_config(tmp_path, direct=True)
    prepare(
        to_plain(direct.features), to_plain(direct.source), tmp_path / "store",
        block_size=4096, report=lambda _: None,
    )  # fmt: skip
    stored = make_config(tmp_path, store=str(tmp_path / "store"))
    result = train(direct, tmp_path / "a", report=lambda _: None, quiet=True)
    expected = train(stored, tmp_path / "b", report=lambda _: None, quiet=True)
    assert result.metrics == expected.metrics
    assert result.metrics["click"]["auc"] > 0.6
    assert not (tmp_path / "a" / "data").exists()

    again = evaluate.evaluate(str(tmp_path / "a"))
    assert again.metrics == result.metrics
    which = dict(checkpoint="newest", data="", split="")
    evaluate.predict(str(tmp_path / "a"), output=str(tmp_path / "p.parquet"), **which)
    raw = pq.read_table(tmp_path / "valid.parquet")
    predictions = pq.read_table(tmp_path / "p.parquet")
    assert predictions["item"].to_pylist() == raw["item"].to_pylist()
    assert predictions["label_click"].to_pylist() == raw["click"].to_pylist()
