"""Asynchronous training against the synchronous step, and against NumPy."""

import dataclasses
import functools
import re

import examples
import flax
import flax.linen as nn
import jax
import numpy as np
import pytest
import tiny
from runs import final_state, nothing, run, store_config

from jaxrank import mesh as meshes
from jaxrank.build import Builder
from jaxrank.config import default
from jaxrank.embedding import logical_rows
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation.report import flatten_metrics
from jaxrank.models import Inputs, register
from jaxrank.models.tower import BatchNorm
from jaxrank.program import BatchShape, CompiledSteps
from jaxrank.step import Pulled, compute_gradients
from jaxrank.studies.execution import train_asynchronous
from jaxrank.studies.execution.asynchronous import AsynchronousSteps, places, worker_order

pytestmark = pytest.mark.usefixtures("shared_programs")
RATE, TABLE_RATE = 0.01, 0.05
WARMUP = 8  # steps


@register("one_layer")
class OneLayer(nn.Module):
    tasks: int
    width: int = 5
    dropout: float = 0.0  # with batch norm, if it is not 0

    @nn.compact
    def __call__(self, inputs: Inputs, train: bool) -> jax.Array:
        x = nn.relu(nn.Dense(self.width, name="hidden")(inputs.features))
        if self.dropout:
            x = BatchNorm(0.9, name="norm")(x, inputs.share, train=train)
            x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.tasks, name="head")(x)


def set_rates(config):
    config.optim.dense.base_learning_rate, config.optim.tables.base_learning_rate = RATE, TABLE_RATE
    for section in (config.optim.dense, config.optim.tables):
        section.scaling, section.warmup_steps = "none", WARMUP
    return config


@dataclasses.dataclass
class Server:
    """Adam for the layers and row-wise AdaGrad for the table, in float64, with all state.

    params: by the path of each.
    statistics: of batch norm.
    """

    params: dict
    rows: np.ndarray
    statistics: dict
    step: int = 0

    def __post_init__(self):
        self.mean = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.square = {k: np.zeros_like(v) for k, v in self.params.items()}
        self.accumulator = np.full(len(self.rows), 0.1)

    def push(self, grads, row_grads, read, statistics):
        self.step += 1
        self.statistics = statistics  # of the pull, and moved by its batch
        rise = min(1, self.step / WARMUP)  # by the server's step, not the step of the pull
        for name, grad in grads.items():
            self.mean[name] = 0.9 * self.mean[name] + 0.1 * grad
            self.square[name] = 0.999 * self.square[name] + 0.001 * grad**2
            mean = self.mean[name] / (1 - 0.9**self.step)
            square = self.square[name] / (1 - 0.999**self.step)
            self.params[name] = self.params[name] - rise * RATE * mean / (np.sqrt(square) + 1e-8)
        self.accumulator[read] += (row_grads[read] ** 2).mean(axis=1)
        scale = 1 / np.sqrt(self.accumulator[read] + 1e-7)
        self.rows[read] -= rise * TABLE_RATE * row_grads[read] * scale[:, None]


def gradients(pulled, batch):
    """The gradients of `OneLayer` by hand: of the parameters and of the looked-up vectors."""
    params, vectors = pulled.params, pulled.vectors
    (name,) = vectors
    size = len(batch.labels)
    shapes = [vectors[name][kind].shape for kind in ("ids", "lists")]
    flat = [vectors[name][kind].reshape(size, -1) for kind in ("ids", "lists")]
    x = np.concatenate([batch.dense, *flat], axis=1)
    before = x @ params["hidden", "kernel"] + params["hidden", "bias"]
    hidden = np.maximum(before, 0)
    logits = hidden @ params["head", "kernel"] + params["head", "bias"]
    error = (1 / (1 + np.exp(-logits)) - batch.labels) * batch.weights / batch.weights.sum(0)
    of_hidden = error @ params["head", "kernel"].T * (before > 0)
    of_x = of_hidden @ params["hidden", "kernel"].T
    grads = {
        ("hidden", "kernel"): x.T @ of_hidden,
        ("hidden", "bias"): of_hidden.sum(0),
        ("head", "kernel"): hidden.T @ error,
        ("head", "bias"): error.sum(0),
    }
    ids, lists = np.split(of_x[:, batch.dense.shape[1] :], [flat[0].shape[1]], axis=1)
    return grads, {name: {"ids": ids.reshape(shapes[0]), "lists": lists.reshape(shapes[1])}}, {}


def gradients_of_step(step_spec):
    """`gradients` by the synchronous step, for a model whose step and statistics matter."""
    compute = jax.jit(
        jax.shard_map(
            functools.partial(compute_gradients, step_spec),
            mesh=step_spec.embedding.mesh,
            in_specs=jax.sharding.PartitionSpec(),
            out_specs=jax.sharding.PartitionSpec(),
            check_vma=False,
        )
    )

    def of_pulled(pulled, batch):
        params = flax.traverse_util.unflatten_dict(pulled.params)
        single = jax.tree.map(np.float32, (params, pulled.model_state, pulled.vectors))
        zero = np.zeros(len(batch.labels[0]), np.float32)
        arrays = Pulled(np.int32(pulled.step), *single[:2], zero, zero + 1, single[2])
        result = jax.device_get(compute(arrays, batch))
        grads = flax.traverse_util.flatten_dict(result.dense)
        return grads, result.vectors, result.model_state

    return of_pulled


def simulated(server, lay, batches, order, workers, gradients):
    """Asynchronous training from its definition. Returns the staleness of each push."""
    (stack,) = lay.stacks
    waiting, held, staleness = list(batches), {}, []

    def pull(worker):
        if waiting:
            batch = waiting.pop(0)
            vectors = examples.lookup_vectors({stack.name: server.rows}, lay, batch)
            pulled = server.step, dict(server.params), server.statistics, None, None, vectors
            held[worker] = Pulled(*pulled), batch

    for worker in range(workers):
        pull(worker)
    for worker in order:
        pulled, batch = held.pop(worker)
        staleness.append(server.step - pulled.step)
        grads, vector_grads, statistics = gradients(pulled, batch)
        row_grads = examples.row_gradients(lay, batch, vector_grads)[stack.name]
        ones = jax.tree.map(np.ones_like, vector_grads)
        read = examples.row_gradients(lay, batch, ones)[stack.name].any(axis=1)
        server.push(grads, row_grads, read, statistics)
        pull(worker)
    return staleness


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["plain", "dropout and batch norm"])
def test_asynchronous_training_equals_a_simulation_in_numpy(dropout):
    steps, size, workers = 12, 32, 3
    c = set_rates(tiny.config(batch_size=size))
    with c.unlocked():
        c.model = default("one_layer").model
    c.model.dropout = dropout
    lay, mesh = examples.small_layout(), meshes.make_mesh(devices=1)
    step_spec = Builder(c, lay.schema).step_spec(lay, mesh, num_steps=steps, room={"dim8": 1.0})
    program = CompiledSteps(step_spec, mesh, BatchShape(size, 8, {"dim8": 40}))
    batches = [examples.random_batch(lay, size, seed=i, group=8, capacity=40) for i in range(steps)]
    asynchronous, state = AsynchronousSteps(program, workers), program.init()

    (stack,) = lay.stacks
    rows = logical_rows({n: t.rows for n, t in state.tables.items()}, stack).astype(np.float64)
    params, statistics = jax.device_get((state.params, state.model_state))
    server = Server(
        jax.tree.map(np.float64, flax.traverse_util.flatten_dict(params)), rows, statistics
    )
    order = worker_order(7, workers, steps)
    by_hand = gradients_of_step(step_spec) if dropout else gradients
    staleness = simulated(server, lay, batches, order, workers, by_hand)
    assert max(staleness) > 2

    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    in_flight = asynchronous.empty(state, stacked)
    in_flight = asynchronous.fill(state, in_flight, stacked, 0, 0, workers)
    by_event = [np.pad(of_pushes, (workers, 0)) for of_pushes in places(order, workers)]
    read_write = [of_events[:steps] for of_events in by_event]
    limits = np.int32(workers), np.int32(steps)
    inputs = state, in_flight, stacked, *read_write, *limits
    train = asynchronous.train.lower(*inputs).compile()
    copied = set(re.findall(r"= \w+\[([\d,]*)\]\S* copy\(", train.as_text()))
    waiting = {",".join(map(str, x.shape)) for x in jax.tree.leaves(in_flight.batch) if x.size}
    assert not copied & waiting, copied & waiting  # of all workers in every step
    state, in_flight, (_, actual) = train(*inputs)
    assert list(actual[workers:]) == staleness[: steps - workers]
    read_write = [np.resize(of_events[steps:], steps) for of_events in by_event]
    limits = np.int32(0), np.int32(workers)
    state, _, (_, actual) = train(state, in_flight, stacked, *read_write, *limits)
    assert list(actual[:workers]) == staleness[-workers:]

    actual = flax.traverse_util.flatten_dict(state.params)
    for name, expected in server.params.items():
        np.testing.assert_allclose(actual[name], expected, 1e-4, 1e-5, err_msg=name)
    assert jax.tree.leaves(state.model_state) or not dropout
    near = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(near, state.model_state, server.statistics)
    rows = logical_rows({n: t.rows for n, t in state.tables.items()}, stack)
    np.testing.assert_allclose(rows, server.rows, 1e-4, 1e-5)
    slots = logical_rows({n: t.slots["accumulator"] for n, t in state.tables.items()}, stack)
    np.testing.assert_allclose(slots[:, 0], server.accumulator, 1e-4, 1e-6)


def trained(store, workdir, workers, schedule_seed=0, **changes):
    config = store_config(store, **changes)
    settings = dict(workers=workers, schedule_seed=schedule_seed)
    return train_asynchronous.train(config, workdir, report=nothing, **settings)


def test_one_worker_is_synchronous_training_to_the_bit(store, tmp_path):
    """Covers all settings that depend on the step or earlier batches, and a shorter last call."""
    changes = dict(num_steps=15, ema_decay=0.9)
    model = tiny.config().model
    model.dropout, model.norm = 0.1, "batch"
    changes["model"] = model
    result = run(store, tmp_path / "synchronous", **changes)
    expected = final_state(store, tmp_path / "synchronous", **changes)
    actual = trained(store, tmp_path / "asynchronous", 1, **changes)
    assert not actual.staleness.any()
    assert actual.metrics == flatten_metrics(result.metrics)
    state = jax.device_get(actual.state._replace(scratch={}))
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_the_schedule_decides_everything_else(store, tmp_path):
    first, again, other = (
        trained(store, tmp_path / str(i), 5, seed) for i, seed in enumerate((1, 1, 2))
    )
    assert len(first.staleness) == 16
    assert first.metrics == again.metrics
    assert first.metrics != other.metrics
    summary = train_asynchronous.staleness_summary(first.staleness)
    assert summary["mean"] == pytest.approx(first.staleness.mean())
    assert sum(summary["histogram"]) == 16
    assert len(summary["histogram"]) == summary["max"] + 1
    assert worker_order(1, 5, 100)[:40].tolist() == worker_order(1, 5, 60)[:40].tolist()
    assert sorted(worker_order(1, 5, 16)[-5:]) == list(range(5))


@pytest.mark.parametrize(
    ("workers", "devices", "message"),
    [
        (17, 1, r"at most the number of steps, which is 16: found 17"),
        (2, 2, r"mesh.devices: must be 1 for asynchronous .* found 2 devices"),
    ],
)
def test_what_cannot_be_simulated_is_rejected(store, tmp_path, workers, devices, message):
    config = store_config(store)
    config.mesh.devices = devices
    with pytest.raises(InputError, match=message):
        train_asynchronous.train(config, tmp_path, workers=workers, schedule_seed=0, report=nothing)


def test_a_loss_that_is_not_finite_fails_the_run(store, tmp_path):
    config = store_config(store)
    config.optim.dense.base_learning_rate = 1e30
    config.model.mlp_units = (16, 16)
    with pytest.raises(RunError, match=r"the loss must be finite: found (nan|inf) at push"):
        train_asynchronous.train(config, tmp_path, workers=2, schedule_seed=0, report=nothing)
