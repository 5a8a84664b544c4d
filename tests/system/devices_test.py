"""The number of devices does not change the model."""

import functools

import examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from sharded import by_table

from jaxrank import mesh as meshes
from jaxrank.build import make_trainee
from jaxrank.features import PAD, Categorical, Dense, Ragged, Schema, Table, Task
from jaxrank.layout import Hot, layout
from jaxrank.placement import planner
from jaxrank.placement.traffic import TableReads, Traffic
from jaxrank.program import BatchShape, Program

SCHEMA = Schema(
    tasks=(Task("click"), Task("conversion")),
    floats=(Dense("f0"), Dense("f1")),
    ids=(Categorical("a", "ta"), Categorical("b", "tb"), Categorical("c", "tc", length=2)),
    lists=(
        Ragged("sum", "ta", "sum"),
        Ragged("mean", "ta", "mean", weighted=True),
        Ragged("sqrtn", "tc", "sqrtn", weighted=True),
        Ragged("sequence", "tb", "none", length=3),
    ),
    tables=(Table("ta", 700, "integer"), Table("tb", 9, "integer"), Table("tc", 60, "integer")),
)
DIMS = {"ta": 4, "tb": 4, "tc": 8}
PLACEMENTS = {
    "rows": {},
    "replicated": {"dim4": Hot(whole=("ta", "tb")), "dim8": Hot(whole=("tc",))},
    "mixed": {"dim4": Hot(("tb",), ("ta",) * 9, 4), "dim8": Hot((), ("tc", "tc"), 0)},
}
BATCH = 32
# Row optimizer, placement, devices, replicas: all pairs of the first two, each on all meshes.
CASES = [
    ("sgd", "rows", 8, 1),
    ("sgd", "replicated", 2, 1),
    ("sgd", "mixed", 4, 2),
    ("sgd", "auto", 8, 2),
    ("adagrad", "rows", 4, 1),
    ("adagrad", "replicated", 8, 1),
    ("adagrad", "mixed", 8, 4),
    ("adagrad", "auto", 2, 1),
    ("rowwise_adagrad", "rows", 2, 1),
    ("rowwise_adagrad", "replicated", 8, 2),
    ("rowwise_adagrad", "mixed", 4, 1),
    ("rowwise_adagrad", "auto", 8, 1),
    ("lazy_adam", "rows", 8, 2),
    ("lazy_adam", "replicated", 4, 2),
    ("lazy_adam", "mixed", 8, 1),
    ("lazy_adam", "auto", 4, 1),
    ("ftrl", "rows", 4, 2),
    ("ftrl", "replicated", 4, 1),
    ("ftrl", "mixed", 2, 1),
    ("ftrl", "auto", 8, 4),
]


def hot_of(placement, devices):
    """What a config's placement makes of these tables; "auto" asks the planner."""
    if placement != "auto":
        return PLACEMENTS[placement]
    # As often as a power law of 40 reads an example would read each row.
    reads = {
        t.name: TableReads(
            np.arange(t.rows, dtype=np.int32), 4000 // (1 + np.arange(t.rows, dtype=np.int64))
        )
        for t in SCHEMA.tables
    }
    hot = planner.make_plan(
        SCHEMA,
        DIMS,
        Traffic(1000, reads, np.arange(1), {}),
        devices=devices,
        share=BATCH // devices,
        placement_of={t.name: "auto" for t in SCHEMA.tables},
    ).hot
    assert any(found.whole for found in hot.values())
    assert any(0 < found.replicated < len(found.merged) for found in hot.values())
    return hot


@functools.cache
def trained(rule, placement, devices, replicas, *, steps, wide):
    """Parameters, running statistics, tables and last losses; in float64 if `wide`."""
    lay = layout(SCHEMA, DIMS, hot_of(placement, devices))
    mesh = meshes.make_mesh(devices=devices, replicas=replicas)
    c = tiny.config(batch_size=BATCH)
    c.optim.tables.name = rule
    c.optim.tables.base_rate = 0.05
    c.model.cross_layers = 1
    c.model.norm = "batch"
    c.model.dropout = 0.1
    c.embedding.l2 = 0.01
    # Buffers that are too small for some batches, so that there are rounds.
    room = {stack.name: 0.05 for stack in lay.stacks}
    trainee = make_trainee(c, lay, mesh, num_steps=1000, room=room)
    program = Program(trainee, mesh, BatchShape(BATCH, 4, {"dim4": 24, "dim8": 24}))
    state = program.init()
    if wide:
        state = jax.device_put(jax.tree.map(widened, state), program.state_sharding)
    batches = [examples.random_batch(lay, BATCH, seed=i) for i in range(min(steps, 20))]
    stacked = jax.tree.map(lambda *xs: np.stack(xs * (steps // len(xs))), *batches)
    if wide:
        stacked = jax.tree.map(widened, stacked)
    state, told = program.train(state, meshes.put_batch(stacked, mesh, leading=1))
    tables = by_table(trainee.embedding, jax.device_get(state.tables))
    rounds = max([int(found.rounds.max()) for found in told.exchange.values()], default=1)
    return jax.device_get((state.params, state.model_state, tables, told.loss)), rounds


def widened(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x, np.float64) if floating else x


def largest_difference(found, expected):
    """Of any number, over the largest of its array."""
    return max(
        np.abs(np.asarray(f, np.float64) - e).max() / max(np.abs(e).max(), 1e-3)
        for f, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "placement", "devices", "replicas"), CASES)
def test_a_hundred_steps_give_the_same_model_in_float64(rule, placement, devices, replicas):
    settings = dict(steps=100, wide=True)
    with jax.enable_x64(True):
        expected, _ = trained(rule, "rows", 1, 1, **settings)
        found, rounds = trained(rule, placement, devices, replicas, **settings)
    assert all(x.dtype == np.float64 for x in jax.tree.leaves(found))
    if placement in ("rows", "mixed") and devices // replicas < 8:
        assert rounds > 1, "buffers must have been too small for some step"
    assert largest_difference(found, expected) < 1e-10


@pytest.mark.parametrize(("rule", "placement", "devices", "replicas"), CASES[1::4])
def test_one_step_gives_the_same_model_in_float32(rule, placement, devices, replicas):
    settings = dict(steps=1, wide=False)
    expected, _ = trained(rule, "rows", 1, 1, **settings)
    found, _ = trained(rule, placement, devices, replicas, **settings)
    assert largest_difference(found, expected) < 1e-5


def test_the_batches_of_these_tests_have_edges_padding_empty_and_full_lists():
    lay = layout(SCHEMA, DIMS)
    batches = [examples.random_batch(lay, BATCH, seed=seed) for seed in range(20)]
    ids = np.concatenate([b.ids["dim4"][:, 0] for b in batches])
    assert {0, 699, PAD} <= set(ids.tolist())
    lists = [b.lists["dim4"] for b in batches]
    assert any((x.ids != PAD).all(axis=1).any() for x in lists), "a full group"
    filled = [len(np.unique(s[s != PAD])) for x in lists for s in x.segments]
    assert min(filled) < 4 * 2, "an empty list"
