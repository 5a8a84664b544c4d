"""Compiled programs of a run: the only module with jit, shardings and donation.

Training, evaluation and the tools that measure or inspect the step use the same programs.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrank import base_rates
from jaxrank import mesh as meshes
from jaxrank import step as steps
from jaxrank.base_rates import BaseRates
from jaxrank.embedding import Lookup
from jaxrank.errors import InputError
from jaxrank.features import Batch
from jaxrank.layout import Layout, ids_of_device, make_batch
from jaxrank.metrics import sums as metrics
from jaxrank.models import Model
from jaxrank.runtime import processes

# Platforms on which the host waits for the device before each step of a loop with a dynamic number
# of steps (XLA's WhileThunk). On CPU such a loop takes 1.00 times as long as a scan.
_COUNTS_ON_HOST = ("gpu",)


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The static shape of a batch.

    batch_size: examples over all devices.
    group: examples whose lists are packed together.
    capacities: {stack: ids in a group}.
    requests: whether groups are packs of requests.
    """

    batch_size: int
    group: int
    capacities: dict[str, int]
    requests: bool = False

    def struct(self, layout: Layout, leading: tuple[int, ...] = ()) -> Batch:
        """Returns the batch as jax.ShapeDtypeStruct."""

        def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((*leading, *shape), dtype)

        logit_correction = layout.schema.logit_correction_columns
        sizes = (self.batch_size, self.group, self.capacities)
        return make_batch(array, layout, *sizes, logit_correction, self.requests)


class Predictor:
    """The program that predicts with one model on one mesh. Evaluation needs nothing else.

    predict: (Weights, batch) -> (logits, labels, weights), each f32[B, tasks] of the whole batch on
        every device. Logits and weights are over all traffic. Accepts any batch shape.
    weights_shape, weights_sharding: of `Weights`.

    Args:
        parents: of the tasks; see `outputs.joint_logits`.
        learns_task_weights: whether the parameters include learned weights of tasks.

    Raises:
        InputError: on CPU, `native` is available in some processes only, so that programs differ.
    """

    def __init__(
        self,
        model: Model,
        embedding: Lookup,
        *,
        parents: tuple[int, ...],
        learns_task_weights: bool,
    ):
        self.model, self.embedding = model, embedding
        self.mesh = mesh = embedding.mesh
        if embedding.is_on_cpu:
            backend = "native code" if embedding.is_native else "XLA, as with JAXRANK_NATIVE=0"
            processes.check_same("what works on rows and layers", backend)
        self.weights_shape = steps.weights_shape(
            model, embedding.layout, learns_task_weights=learns_task_weights
        )
        specs = jax.tree.map(lambda _: P(), self.weights_shape)._replace(rows=embedding.specs())
        self.weights_specs: steps.Weights = specs
        self.weights_sharding: steps.Weights = _shardings(mesh, specs)
        eval_step = functools.partial(steps.eval_step, model, embedding, parents)
        score = _shard_map(mesh, eval_step, (specs, P(meshes.EXAMPLES)), P(meshes.EXAMPLES))
        self.predict = jax.jit(
            lambda weights, batch: (
                score(weights, batch),
                batch.labels,
                metrics.traffic_weights(batch.weights, batch.labels, batch.logit_correction),
            ),
            in_shardings=(self.weights_sharding, meshes.example_sharding(mesh)),
            out_shardings=meshes.replicated(mesh),
            compiler_options=self.compiler_options,
        )

    @property
    def layout(self) -> Layout:
        return self.embedding.layout

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA's options for programs that run the model and the exchange."""
        options = self.model.compiler_options(meshes.platform(self.mesh))
        return options | meshes.exchange_options(self.mesh)


class CompiledSteps:
    """The programs of one `StepSpec` on one mesh.

    init: (BaseRates) -> TrainState, sharded. Without base rates they are neutral.
    train: (state, batches with a leading axis of steps, number of steps i32[]) -> (state,
        StepMetrics with that axis). Batches beyond that number must be valid. They have no effect,
        and their metrics are undefined. The state is donated: its tables are updated in place.
    predictor: predicts with the weights of a state.
    moments: (Weights, batch, step) -> (statistics of batch norm, number of examples that count) of
        one training batch, on every device; see `batch_statistics`.
    largest: numbers [devices] -> the largest, on every device.

    Raises:
        InputError: see `Predictor`.
    """

    def __init__(self, step_spec: steps.StepSpec, mesh: Mesh, shape: BatchShape):
        self.step_spec = step_spec
        self.mesh = mesh
        self.shape = shape
        self.predictor = Predictor(
            step_spec.model,
            step_spec.embedding,
            parents=step_spec.parents,
            learns_task_weights=step_spec.learns_task_weights,
        )
        init = functools.partial(steps.init_state, step_spec)
        self._neutral = base_rates.neutral(len(step_spec.kinds))
        self.state_shape: steps.TrainState = jax.eval_shape(init, self._neutral)
        specs = self._specs(self.state_shape)
        self.state_sharding: steps.TrainState = _shardings(mesh, specs)
        self._init = jax.jit(init, out_shardings=self.state_sharding)
        self.train = jax.jit(
            _shard_map(mesh, self._train, (specs, P(None, meshes.EXAMPLES), P()), (specs, P())),
            donate_argnums=0,
            in_shardings=(
                self.state_sharding,
                meshes.example_sharding(mesh, leading=1),
                meshes.replicated(mesh),
            ),
            out_shardings=(self.state_sharding, meshes.replicated(mesh)),
            compiler_options=self.predictor.compiler_options | step_spec.embedding.update_options,
        )
        predictor, replicated = self.predictor, meshes.replicated(mesh)
        moments = functools.partial(steps.batch_moments, step_spec)
        self.moments = jax.jit(
            _shard_map(mesh, moments, (predictor.weights_specs, P(meshes.EXAMPLES), P()), P()),
            in_shardings=(predictor.weights_sharding, meshes.example_sharding(mesh), replicated),
            out_shardings=replicated,
            compiler_options=predictor.compiler_options,
        )
        self._finite = jax.jit(
            lambda weights: jnp.all(
                jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(weights)])
            )
        )

        self.largest = jax.jit(jnp.max, out_shardings=meshes.replicated(mesh))

    def init(self, rates: BaseRates | None = None) -> steps.TrainState:
        return self._init(rates or self._neutral)

    def blank(self) -> steps.TrainState:
        """Returns the shapes of a state, to restore a checkpoint, with real scratch arrays."""
        scratch = jax.jit(
            self.step_spec.embedding.init_scratch, out_shardings=self.state_sharding.scratch
        )
        return self.state_shape._replace(scratch=scratch())

    @functools.cached_property
    def has_moments(self) -> bool:
        """True if the model has batch normalisation."""
        batch = self.shape.struct(self.predictor.layout)
        shapes, _ = jax.eval_shape(self.moments, self.predictor.weights_shape, batch, jnp.int32(0))
        return bool(jax.tree.leaves(shapes))

    def is_finite(self, weights: steps.Weights) -> bool:
        """Returns True if all weights that predict are finite. Reads all tables once."""
        return bool(self._finite(weights))

    @functools.cached_property
    def buffers(self) -> dict[str, int]:
        """{stack: number of ids per exchange buffer}, for the stacks whose rows are exchanged."""
        embedding = self.step_spec.embedding
        if not embedding.exchanges:
            return {}
        ids = ids_of_device(embedding.layout, self.shape.struct(embedding.layout), self.mesh.size)
        return {
            name: embedding.exchange(name, ids[name]).capacity
            for name, parts in embedding.parts.items()
            if parts.split and ids[name]
        }

    def _specs(self, state: steps.TrainState) -> steps.TrainState:
        """Returns the partition of each array of a state over the mesh."""
        of_part = self.step_spec.embedding.specs()
        specs = jax.tree.map(lambda _: P(), state)._replace(
            tables={
                name: jax.tree.map(lambda _, name=name: of_part[name], table)
                for name, table in state.tables.items()
            },
            scratch={name: of_part[name] for name in state.scratch},
        )
        if state.average:
            rows = {name: of_part[name] for name in state.average.rows}
            specs = specs._replace(average=specs.average._replace(rows=rows))
        return specs

    def _train(self, state: steps.TrainState, batches: Batch, count: jax.Array) -> Any:
        step = functools.partial(steps.train_step, self.step_spec)
        # The last execution of a run may be shorter, and uses the same program.
        if meshes.platform(self.mesh) in _COUNTS_ON_HOST:
            state, metrics = _masked_steps(step, state, batches, count)
        else:
            state, metrics = _first_steps(step, state, batches, count)
        return steps.averaged(self.step_spec, state, metrics.skipped, count), metrics


def _first_steps(step: Any, state: Any, batches: Batch, count: jax.Array) -> tuple[Any, Any]:
    """Executes a step for each of the first `count` batches. The other metrics are 0."""

    def batch(i: Any) -> Batch:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)

    def body(i: Any, carry: Any) -> Any:
        state, metrics = carry
        state, values = step(state, batch(i))
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=0)
        return state, jax.tree.map(put, metrics, values)

    length = batches.labels.shape[0]
    shapes = jax.eval_shape(step, state, batch(0))[1]
    metrics = jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), shapes)
    return jax.lax.fori_loop(0, count, body, (state, metrics))


def _masked_steps(step: Any, state: Any, batches: Batch, count: jax.Array) -> tuple[Any, Any]:
    """Same result as `_first_steps`, by a scan over all batches in which the others are masked."""
    indices = jnp.arange(batches.labels.shape[0], dtype=jnp.int32)
    return jax.lax.scan(
        lambda state, x: step(state, x[1], is_due=x[0] < count), state, (indices, batches)
    )


def _shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


def _shard_map(mesh: Mesh, function: Any, in_specs: Any, out_specs: Any) -> Any:
    """Runs the program of one device on all devices of a mesh."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def check_batch(field: str, batch_size: int, group: int, devices: int) -> None:
    """Raises InputError unless batches of this size can be split over this number of devices."""
    if batch_size % devices:
        raise InputError(
            f"{field}: must be a multiple of the number of devices: found {field}={batch_size},"
            f" {devices} devices."
        )
    if (batch_size // devices) % group:
        raise InputError(
            f"{field}: each device's share must be whole groups of {group} examples, which are"
            f" packed together: found {field}={batch_size} on {devices} devices, a share of"
            f" {batch_size // devices}. Set data.shards to a multiple of {devices}."
        )
