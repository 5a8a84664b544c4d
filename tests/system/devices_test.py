"""Neither the number of devices nor the placement of rows changes a result."""

import dataclasses
import functools
from typing import NamedTuple

import embeddings
import examples
import jax
import jax.numpy as jnp
import numpy as np
import own_model  # noqa: F401, registers "own"
import pytest
import tiny
from placed_tables import BATCH, DIMS, SCHEMA, hot_rows
from runs import nothing, records
from sharded import initial_tables, lookup, new_tables, rows_by_table, set_chunk, update
from variants import changed

from jaxrank import mesh as meshes
from jaxrank.build import Builder
from jaxrank.config import default
from jaxrank.features import PAD, Task
from jaxrank.layout import layout
from jaxrank.program import BatchShape, CompiledSteps
from jaxrank.train import train

# What a config changes, by name.
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


class Place(NamedTuple):
    """Devices, placement of rows, relative size of the exchange buffers, and vector layout."""

    devices: int = 1
    replicas: int = 1
    placement: str = "split"
    room: float = 1.0
    platform: str = "cpu"


class Steps(NamedTuple):
    """Training steps from random batches, in floats of some bits."""

    row_optimizer: str
    changes: str
    steps: int
    bits: int = 64


class Run(NamedTuple):
    """A run of `variants`."""

    name: str


class Update(NamedTuple):
    """An update of tables by random gradients."""

    row_optimizer: str


class Case(NamedTuple):
    """A result, a place where it is computed, and the largest difference to that of one device."""

    result: object
    place: Place
    tolerance: float = 0.0


# Each placement and each set of changes is somewhere. "mixed" has rows of all three places: split,
# replicated, and in whole tables. Cases of equal steps share a run on one device. Other tests
# compare all optimizers on several devices. Native code, where there is any, computes in float32.
CASES = [
    Case(Steps("sgd", "own model", 8), Place(4, 2, "mixed", 0.05), 1e-10),
    *(
        pytest.param(Case(Steps(*steps), Place(*place, 0.05), 1e-10), marks=pytest.mark.slow)
        for steps, place in [
            (("rowwise_adagrad", "experts", 40), (4, 1, "mixed")),
            (("lazy_adam", "kinds of tasks", 40), (2, 1, "mixed")),
            (("ftrl", "average", 40), (8, 1, "mixed")),
            (("sgd", "own model", 8), (8, 2, "replicated")),
            (("lazy_adam", "kinds of tasks", 40), (8, 4, "auto")),
        ]
    ),
    Case(Steps("rowwise_adagrad", "batch norm", 1, 32), Place(4, 2, "split", 0.05), 1e-5),
    Case(Run("sequences"), Place(4, 2, "auto"), 1e-3),
    Case(Run("requests"), Place(8, 1, "auto"), 1e-3),
    Case("lookup", Place(1, 1, "hot")),
    Case("lookup", Place(2, 1, "hot")),
    Case("lookup", Place(1, 1, "whole")),
    Case("lookup", Place(2, 1, "whole")),
    Case("first rows", Place(8, 2, "hot")),
    Case(Update("sgd"), Place(8, 1, "dealt", 0.05), 1e-6),
    Case(Update("sgd"), Place(4, 2, "mixed", 0.1, "gpu"), 1e-6),
    Case(Update("rowwise_adagrad"), Place(8, 2, "hot", 0.05, "tpu"), 1e-6),
]


class Results:
    """Computes results, each once."""

    def __init__(self, variants, folder):
        self._variants, self._folder = variants, folder
        self.compute = functools.cache(self._compute)

    def _compute(self, result, place):
        if isinstance(result, Steps):
            with jax.enable_x64(result.bits == 64):
                return trained(*result, place)
        if isinstance(result, Run):
            return self._run(result.name, place)
        with pytest.MonkeyPatch.context() as patch:
            if isinstance(result, Update):
                set_chunk(patch, 32)
                return updated(result.row_optimizer, place)
            set_chunk(patch, 8)
            return {"lookup": looked_up, "first rows": first_rows}[result](place)

    def _run(self, name, place):
        """Metrics of a run, and the loss and the norm of the gradient of each step.

        Parameters are not compared: a bias that no ranking loss sees follows the rounding of its
        gradient.
        """
        if place.devices == 1:
            workdir, result, _ = self._variants.unbroken(name)
        else:
            workdir = self._folder / name
            mesh = {"mesh.devices": place.devices, "mesh.replicas": place.replicas}
            result = train(self._variants.config(name, **mesh), workdir, report=nothing)
        steps = [(line["loss"], line["gradient_norm"]) for line in records(workdir)]
        assert len(steps) == result.step
        return result.metrics, *np.array(steps).T


def trained(row_optimizer, changes, steps, bits, place):
    """All that is trained, the optimizer's state, and metrics of all steps."""
    schema = SCHEMA
    if changes == "kinds of tasks":
        schema = dataclasses.replace(SCHEMA, tasks=KINDS)
    lay = layout(schema, DIMS, hot_rows(place.placement, place.devices))
    mesh = meshes.make_mesh(devices=place.devices, replicas=place.replicas)
    c = changed(tiny.config(batch_size=BATCH), CHANGES[changes])
    c.optim.tables.name = row_optimizer
    c.optim.tables.base_learning_rate = 0.05
    if changes == "own model":
        with c.unlocked():
            c.model = default(model="own").model
        c.model.ids = ("a", "b")
    else:
        c.model.cross_layers = 1
    room = {stack.name: place.room for stack in lay.stacks}
    step_spec = Builder(c, lay.schema).step_spec(lay, mesh, num_steps=1000, room=room)
    program = CompiledSteps(step_spec, mesh, BatchShape(BATCH, 4, {"dim4": 24, "dim8": 24}))
    state = program.init()
    batches = [examples.random_batch(lay, BATCH, seed=i) for i in range(min(steps, 20))]
    stacked = jax.tree.map(lambda *xs: np.stack(xs * (steps // len(xs))), *batches)
    if bits == 64:
        state = jax.device_put(jax.tree.map(widened, state), program.state_sharding)
        stacked = jax.tree.map(widened, stacked)
    batch = meshes.put_batch(stacked, mesh, leading=1)
    state, lines = program.train(state, batch, np.int32(steps))
    if steps > 1 and place.placement == "mixed" and place.devices // place.replicas < 8:
        rounds = max(int(result.rounds.max()) for result in lines.exchange.values())
        assert rounds > 1, "buffers must have been too small for some step"
    tables = rows_by_table(step_spec.embedding, jax.device_get(state.tables))
    average = state.average.params if c.ema_decay else ()
    layers = state.params, state.model_state, state.opt_state, average
    result = jax.device_get((layers, tables, lines.loss, lines.gradient_norm, lines.sums))
    floats = [x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {np.dtype(f"float{bits}")}
    return result


def widened(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x, np.float64) if floating else x


def made(place, **settings):
    devices, replicas, hot, room, platform = place
    return embeddings.make(
        devices=devices, replicas=replicas, hot=hot, room=room, platform=platform, **settings
    )


def looked_up(place):
    """Vectors of lists with many ids, whose sums have other bits in another order."""
    embedding = made(place)
    batch = examples.random_batch(embedding.layout, 128, capacity=96, mean=8.0)
    return jax.device_get(lookup(embedding, new_tables(embedding), batch)[0])


def first_rows(place):
    embedding = made(place)
    return rows_by_table(embedding, initial_tables(embedding))


def updated(row_optimizer, place):
    embedding = made(place, row_optimizer=row_optimizer)
    batch = examples.random_batch(embedding.layout, 32)
    grads = embeddings.random_grads(embedding, batch)
    return rows_by_table(embedding, update(embedding, new_tables(embedding), batch, grads))


def largest_difference(actual, expected):
    """Largest difference of two numbers, relative to the largest number of their array."""

    def difference(f, e):
        f, e = np.asarray(f, np.float64), np.asarray(e, np.float64)
        return np.abs(f - e).max() / max(np.abs(e).max(), 1e-3)

    return np.max(jax.tree.leaves(jax.tree.map(difference, actual, expected)))


@pytest.fixture(scope="module")
def results(variants, shared_programs, tmp_path_factory):
    return Results(variants, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.result}, {tuple(case.place)}")
def test_a_result_is_that_of_one_device_with_all_rows_split(results, case):
    """Other tests compare the results of one device with plain loops and formulas."""
    expected = results.compute(case.result, Place())
    result = results.compute(case.result, case.place)
    assert largest_difference(result, expected) <= case.tolerance


def test_the_batches_of_these_tests_have_edges_padding_empty_and_full_lists():
    lay = layout(SCHEMA, DIMS)
    batches = [examples.random_batch(lay, BATCH, seed=seed) for seed in range(20)]
    ids = np.concatenate([b.ids["dim4"][:, 0] for b in batches])
    assert {0, 699, PAD} <= set(ids.tolist())
    lists = [b.lists["dim4"] for b in batches]
    assert any((x.ids != PAD).all(axis=1).any() for x in lists), "a full group"
    filled = [len(np.unique(s[s != PAD])) for x in lists for s in x.segments]
    assert min(filled) < 4 * 2, "an empty list"
