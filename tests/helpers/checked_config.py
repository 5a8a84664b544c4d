"""A small config with every kind of feature, for a model by its name."""

import tiny

from jaxrank.config import default


def get_config(model="ranker", **fields):
    c = tiny.config()
    with c.unlocked():
        c.model = default(model=model).model
        for name, value in fields.items():
            c.model[name] = value
    c.features.ragged[1] = dict(
        columns="l1", encoding="integer", rows=30, combiner="none", max_length=4
    )
    return c
