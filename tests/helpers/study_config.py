"""A config whose runs are quick to trace, for studies of many runs: one task, no lists."""

import tiny


def get_config():
    c = tiny.config(num_steps=8, batch_size=64, steps_per_execution=4)
    c.features.tasks = c.features.tasks[:1]
    c.features.ragged = []
    c.features.keep = []
    c.source.ragged = []
    c.source.rows = dict(train=1024, valid=256)
    c.model.mlp_units = (4,)
    c.model.cross_layers = 1
    return c
