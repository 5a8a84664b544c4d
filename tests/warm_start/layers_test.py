"""The arrays of an older model that a warm start copies, by their names."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxrank import models
from jaxrank.features import Ragged, Schema, Table, Task
from jaxrank.layout import layout
from jaxrank.step import model_inputs
from jaxrank.warm_start.layers import InputMap

TRANSFORMER = dict(pool="transformer", layers=1)


def run(pool, features=("item", "shop"), pools="history"):
    """Returns a model with one sequence, and its layout."""
    ragged = tuple(
        Ragged(name, name, combiner="none", length=3, sequence="history") for name in features
    )
    tables = tuple(Table(name, 9, "integer") for name in features)
    schema = Schema((Task("click"),), (), (), ragged, tables)
    sequences = {pools: pool} if pool else {}
    model = models.build(tasks=1, cross="none", mlp_units=(), sequences=sequences)
    return model, layout(schema, {table.name: 4 for table in tables})


def arrays(model, its_layout):
    """Returns {name: array} of the pools, with other values in each array."""
    inputs = model_inputs(its_layout)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)[0]
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}
    pools = {name: shape for name, shape in named.items() if name.startswith("sequence")}
    return {name: np.full(shape, 1.0 + i) for i, (name, shape) in enumerate(sorted(pools.items()))}


@pytest.mark.parametrize(
    ("before", "after", "copied"),
    [
        (run(TRANSFORMER), run(TRANSFORMER | dict(layers=2)), lambda name: "block_1" not in name),
        (run(TRANSFORMER | dict(layers=2)), run(TRANSFORMER), lambda name: True),
        (run(TRANSFORMER | dict(positions=False)), run(TRANSFORMER),
         lambda name: "position" not in name),
        (run(dict(pool="learned_query")), run(TRANSFORMER), lambda name: False),
        (run(TRANSFORMER), run(None), lambda name: False),
        (run(TRANSFORMER), run(TRANSFORMER, ("item", "seller")), lambda name: False),
        (run(TRANSFORMER), run(TRANSFORMER, ("shop", "item")), lambda name: False),
        (run(None), run(None, ("seller", "shop")), lambda name: name == "sequence_1/query"),
    ],
    ids=["a layer more", "a layer less", "positions", "another pool", "no pool",
         "feature replaced", "features exchanged", "own queries"],
)  # fmt: skip
def test_arrays_of_a_sequence_are_copied_to_the_arrays_of_their_name(before, after, copied):
    old, new = arrays(*before), arrays(*after)
    model, its_layout = after
    step_spec = SimpleNamespace(model=model, embedding=SimpleNamespace(layout=its_layout))
    inputs = InputMap(*before, step_spec)
    for name, value in new.items():
        was = inputs.old_array(name)
        result = inputs.carried(name, old[was], value) if was in old else None
        expected = old[name] if copied(name) else None
        np.testing.assert_array_equal(result, expected, err_msg=name)


def test_queries_of_features_are_copied_wherever_the_features_are():
    before, after = run(None, ("item", "shop")), run(None, ("shop", "item", "seller"))
    model, its_layout = after
    step_spec = SimpleNamespace(model=model, embedding=SimpleNamespace(layout=its_layout))
    inputs = InputMap(*before, step_spec)
    names = [inputs.old_array(f"sequence_{i}/query") for i in range(3)]
    assert names == ["sequence_1/query", "sequence_0/query", ""]
