"""Asynchronous training, simulated exactly and deterministically on one device.

W workers share the state of a parameter server. A worker pulls the dense parameters and the vectors
of its batch, computes gradients at these values, pushes them, and pulls for its next batch. The
server applies each push to its current state, which other workers have changed in the meantime. The
staleness of a push is the number of pushes between it and its pull.

A schedule decides which worker pushes next. It is the only source of asynchrony, so a run is a pure
function of its config, the number of workers and the schedule's seed. With one worker it equals
synchronous training to the bit.

Not modelled: reads of half-written rows, network delays beyond the schedule, lost workers and the
ownership of shards. Layers and tables are stale alike, the learning rate is that of the server's
step, and dropout and the statistics of batch norm are those of the pull.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxrank import mesh as meshes
from jaxrank import step as steps
from jaxrank.errors import InputError
from jaxrank.features import Batch
from jaxrank.program import CompiledSteps


class InFlight(NamedTuple):
    """Pulled values and the batch of each worker, in W + 1 places along a leading axis.

    One place is free. A pull writes there, not to the place that its push reads: otherwise XLA
    would copy the batches of all workers in every step.
    """

    pulled: steps.Pulled
    batch: Batch


def worker_order(seed: int, workers: int, pushes: int) -> np.ndarray:
    """Returns the worker of each push, i32[pushes].

    Push k is by a random worker, so workers take exponentially distributed times with equal means.
    It depends on the seed and k only. The last pushes, one per worker, are in a random order: their
    workers have no further batch.
    """
    last = min(workers, pushes)
    order = np.random.default_rng([seed, 0]).integers(0, workers, pushes - last)
    end = np.random.default_rng([seed, 1]).permutation(last)
    return np.concatenate([order, end]).astype(np.int32)


def places(order: np.ndarray, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place that each push reads, and the place that the pull after it writes.

    At the start worker w is in place w, and the last place is free.
    """
    of_worker, free = list(range(workers)), workers
    read, write = np.empty_like(order), np.empty_like(order)
    for i, worker in enumerate(order):
        read[i], write[i] = of_worker[worker], free
        of_worker[worker], free = free, of_worker[worker]
    return read, write


class AsynchronousSteps:
    """The programs of asynchronous training with the step of `CompiledSteps`.

    fill: (state, in_flight, batches [K, ...], first worker, start, stop) -> in_flight. Workers pull
        for the batches from `start` to `stop`, without a push.
    train: (state, in_flight, batches [K, ...], read i32[K], write i32[K], start, stop) -> (state,
        in_flight, (StepMetrics, staleness i32[K])). For each batch from `start` to `stop`, the
        worker in place `read` pushes and then pulls for that batch into place `write`; see
        `places`. Other metrics are undefined.
    average: (state, skipped bool[K], count) -> state; see `step.averaged`.

    `state` and `in_flight` are donated.

    Raises:
        InputError: the mesh has several devices.
    """

    def __init__(self, program: CompiledSteps, workers: int):
        self._program, self._workers = program, workers
        self._step_spec, mesh = program.step_spec, program.mesh
        if mesh.size > 1:
            raise InputError(
                "mesh.devices: must be 1 for asynchronous training, which is simulated on one"
                f" device: found {mesh.size} devices."
            )
        options = program.predictor.compiler_options | self._step_spec.embedding.update_options
        on_device = functools.partial(
            jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        jit = functools.partial(jax.jit, compiler_options=options)
        self.fill = jit(on_device(self._fill), donate_argnums=1)
        self.train = jit(on_device(self._train), donate_argnums=(0, 1))
        self.average = jit(
            on_device(functools.partial(steps.averaged, self._step_spec)), donate_argnums=0
        )

    def empty(self, state: steps.TrainState, batches: Batch) -> InFlight:
        """Returns an `InFlight` of zeros, for batches with a leading axis of steps."""

        def pulled(state: steps.TrainState, batches: Batch) -> InFlight:
            batch = _take(batches, 0)
            return InFlight(self._pull(state, batch), batch)

        on_device = jax.shard_map(
            pulled, mesh=self._program.mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        shapes = jax.eval_shape(on_device, state, batches)
        sharding = meshes.replicated(self._program.mesh)
        return jax.tree.map(
            lambda x: jnp.zeros((self._workers + 1, *x.shape), x.dtype, device=sharding), shapes
        )

    def _pull(self, state: steps.TrainState, batch: Batch) -> steps.Pulled:
        routes = self._step_spec.embedding.route(batch)
        return steps.pull(self._step_spec, state, routes, batch)[0]

    def _fill(
        self,
        state: steps.TrainState,
        in_flight: InFlight,
        batches: Batch,
        first: jax.Array,
        start: jax.Array,
        stop: jax.Array,
    ) -> InFlight:
        def body(i: Any, in_flight: InFlight) -> InFlight:
            batch = _take(batches, i)
            return _put(in_flight, first + i - start, InFlight(self._pull(state, batch), batch))

        return jax.lax.fori_loop(start, stop, body, in_flight)

    def _train(
        self,
        state: steps.TrainState,
        in_flight: InFlight,
        batches: Batch,
        read: jax.Array,
        write: jax.Array,
        start: jax.Array,
        stop: jax.Array,
    ) -> Any:
        def body(i: Any, carry: Any) -> Any:
            state, in_flight, metrics = carry
            batch = _take(batches, i)
            waiting = _put(in_flight.batch, write[i], batch)
            worker = InFlight(_take(in_flight.pulled, read[i]), _take(waiting, read[i]))
            state, values = self._pushed(state, worker)
            pulled = _put(in_flight.pulled, write[i], self._pull(state, batch))
            return state, InFlight(pulled, waiting), _put(metrics, i, values)

        shapes = jax.eval_shape(lambda s, w: self._pushed(s, _take(w, 0))[1], state, in_flight)
        metrics = jax.tree.map(lambda x: jnp.zeros((*read.shape, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(start, stop, body, (state, in_flight, metrics))

    def _pushed(self, state: steps.TrainState, worker: InFlight) -> tuple[steps.TrainState, Any]:
        """Returns the state after a push, and its metrics with its staleness."""
        routes = self._step_spec.embedding.route(worker.batch)
        gradients = steps.compute_gradients(self._step_spec, worker.pulled, worker.batch)
        new, metrics = steps.push(self._step_spec, state, routes, worker.batch, gradients, {})
        return new, (metrics, state.step - worker.pulled.step)


def _take(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _put(tree: Any, index: Any, values: Any) -> Any:
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
    return jax.tree.map(put, tree, values)
