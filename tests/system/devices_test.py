"""The number of devices does not change the model."""

import dataclasses
import functools

import examples
import jax
import jax.numpy as jnp
import numpy as np
import own_model  # noqa: F401, registers "own"
import pytest
import tiny
from placed_tables import BATCH, DIMS, SCHEMA, hot_rows
from runs import nothing
from sharded import rows_by_table
from variants import changed

from jaxrank import mesh as meshes
from jaxrank.build import Builder
from jaxrank.config import default
from jaxrank.features import PAD, Task
from jaxrank.layout import layout
from jaxrank.program import BatchShape, CompiledSteps
from jaxrank.train import train

# What a config changes, by name; each is compared with itself on one device.
CHANGES = {
    "batch norm": {"model.norm": "batch", "model.dropout": 0.1},
    # Statistics and random numbers of their own.
    "experts": {
        "model.multitask": "ple",
        "model.experts": 1,
        "model.levels": 1,
        "model.expert_mlp_units": (4,),
        "model.norm": "batch",
        "model.dropout": 0.1,
    },
    "average": {"ema_decay": 0.9, "task_weighting": "uncertainty", "embedding.l2": 0.01},
    "kinds of tasks": {},
    "own model": {},
}
KINDS = (Task("click", "count"), Task("conversion", "real"))
# Row optimizer, placement, devices, replicas, changes. "mixed" has rows of all three places: split,
# replicated, and in whole tables. Each placement and each set of changes is somewhere. Cases of one
# optimizer share a run on one device; other tests compare all optimizers on several devices.
CASES = [
    ("sgd", "mixed", 4, 2, "own model"),
    ("rowwise_adagrad", "mixed", 4, 1, "experts"),
    ("lazy_adam", "mixed", 2, 1, "kinds of tasks"),
    ("ftrl", "mixed", 8, 1, "average"),
    ("sgd", "replicated", 8, 2, "own model"),
    ("lazy_adam", "auto", 8, 4, "kinds of tasks"),
]
# A case, steps, bits of floats, and the largest relative difference.
RUNS = [
    (CASES[0], 8, 64, 1e-10),
    *(
        pytest.param(case, 8 if case[0] == "sgd" else 40, 64, 1e-10, marks=pytest.mark.slow)
        for case in CASES[1:]
    ),
    (("rowwise_adagrad", "rows", 4, 2, "batch norm"), 1, 32, 1e-5),
]


@functools.cache
def trained(row_optimizer, placement, devices, replicas, changes, *, steps, wide):
    """All that is trained, and the last losses; in float64 if `wide`."""
    schema = SCHEMA
    if changes == "kinds of tasks":
        schema = dataclasses.replace(SCHEMA, tasks=KINDS)
    lay = layout(schema, DIMS, hot_rows(placement, devices))
    mesh = meshes.make_mesh(devices=devices, replicas=replicas)
    c = changed(tiny.config(batch_size=BATCH), CHANGES[changes])
    c.optim.tables.name = row_optimizer
    c.optim.tables.base_learning_rate = 0.05
    if changes == "own model":
        with c.unlocked():
            c.model = default(model="own").model
        c.model.ids = ("a", "b")
    else:
        c.model.cross_layers = 1
    # Buffers that are too small for some batches, so that there are rounds.
    room = {stack.name: 0.05 for stack in lay.stacks}
    step_spec = Builder(c, lay.schema).step_spec(lay, mesh, num_steps=1000, room=room)
    program = CompiledSteps(step_spec, mesh, BatchShape(BATCH, 4, {"dim4": 24, "dim8": 24}))
    state = program.init()
    if wide:
        state = jax.device_put(jax.tree.map(widened, state), program.state_sharding)
    batches = [examples.random_batch(lay, BATCH, seed=i) for i in range(min(steps, 20))]
    stacked = jax.tree.map(lambda *xs: np.stack(xs * (steps // len(xs))), *batches)
    if wide:
        stacked = jax.tree.map(widened, stacked)
    batch = meshes.put_batch(stacked, mesh, leading=1)
    state, lines = program.train(state, batch, np.int32(len(stacked.labels)))
    tables = rows_by_table(step_spec.embedding, jax.device_get(state.tables))
    rounds = max([int(result.rounds.max()) for result in lines.exchange.values()], default=1)
    average = state.average.params if c.ema_decay else ()
    return jax.device_get((state.params, state.model_state, average, tables, lines.loss)), rounds


def widened(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x, np.float64) if floating else x


def largest_difference(actual, expected):
    """Largest difference of two numbers, relative to the largest number of their array."""
    return max(
        np.abs(np.asarray(f, np.float64) - e).max() / max(np.abs(e).max(), 1e-3)
        for f, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    )


@pytest.mark.parametrize(("variant", "steps", "bits", "tolerance"), RUNS, ids=str)
def test_many_devices_give_the_model_of_one(variant, steps, bits, tolerance):
    """Native code, where there is any, computes in float32."""
    row_optimizer, placement, devices, replicas, changes = variant
    settings = dict(steps=steps, wide=bits == 64)
    with jax.enable_x64(bits == 64):
        expected, _ = trained(row_optimizer, "rows", 1, 1, changes, **settings)
        result, rounds = trained(row_optimizer, placement, devices, replicas, changes, **settings)
    assert all(x.dtype == f"float{bits}" for x in jax.tree.leaves(result))
    if steps > 1 and placement in ("rows", "mixed") and devices // replicas < 8:
        assert rounds > 1, "buffers must have been too small for some step"
    assert largest_difference(result, expected) < tolerance


def test_the_batches_of_these_tests_have_edges_padding_empty_and_full_lists():
    lay = layout(SCHEMA, DIMS)
    batches = [examples.random_batch(lay, BATCH, seed=seed) for seed in range(20)]
    ids = np.concatenate([b.ids["dim4"][:, 0] for b in batches])
    assert {0, 699, PAD} <= set(ids.tolist())
    lists = [b.lists["dim4"] for b in batches]
    assert any((x.ids != PAD).all(axis=1).any() for x in lists), "a full group"
    filled = [len(np.unique(s[s != PAD])) for x in lists for s in x.segments]
    assert min(filled) < 4 * 2, "an empty list"


@pytest.mark.usefixtures("shared_programs")
@pytest.mark.parametrize("name", ["sequences", "requests"])
def test_a_run_is_the_same_on_more_devices(variants, tmp_path, name):
    """Compares metrics: a bias that no ranking loss sees follows the rounding of its gradient."""
    _, one, _ = variants.unbroken(name)
    four = train(variants.config(name, **{"mesh.devices": 4}), tmp_path, report=nothing)
    assert four.metrics.keys() == one.metrics.keys()
    for task, metrics in four.metrics.items():
        assert metrics == pytest.approx(one.metrics[task], rel=1e-3)
