"""A small generated store and a config that trains on it within seconds."""

from ml_collections import ConfigDict

from jaxrank.config import default

IDS = (300, 40)


def config(**changes):
    """Returns a config with two tasks, floats, ids, lists with and without weights, batch 128."""
    c = default()
    c.source = ConfigDict(
        dict(
            kind="synthetic",
            rows=dict(train=6000, valid=1000),
            seed=3,
            dense=3,
            categorical=IDS,
            ragged=[dict(rows=60, mean_length=3), dict(rows=30, mean_length=2, weighted=True)],
        )
    )
    c.features.tasks = [
        dict(name="click", label="click", truth="p_click"),
        dict(name="conversion", label="conversion", truth="p_conversion"),
    ]
    c.features.dense = [dict(columns="f*", standardize=True, missing_indicator=True)]
    c.features.categorical = [
        dict(columns="c0", encoding="integer", rows=IDS[0]),
        dict(columns="c1", encoding="integer", rows=IDS[1]),
    ]
    c.features.ragged = [
        dict(columns="l0", encoding="integer", rows=60, combiner="sqrtn"),
        dict(columns="l1", encoding="integer", rows=30, weights="l1_weight"),
    ]
    c.features.keep = ["c1", "p_click"]
    c.batch_size = 128
    c.num_steps = 16
    c.steps_per_execution = 2
    c.log_every_steps = 4
    c.eval.every_steps = 8
    c.eval.batch_size = 512
    c.embedding.dim = 8
    c.model.name, c.model.mlp_units = "ranker", (16,)
    # What the ranker has anyway, for tests that make parts of a run without its data.
    c.optim.tables.name = "rowwise_adagrad"
    for section, rate in ((c.optim.dense, 0.001), (c.optim.tables, 0.05)):
        section.base_learning_rate, section.base_batch, section.decay = rate, 4096, "constant"
    c.mesh.devices = 1
    with c.unlocked():
        c.update(changes)
    return c
