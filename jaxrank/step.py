"""The state of a run and the mathematics of one step: pure functions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrank import losses, metrics
from jaxrank.embedding import Embedding, StackState
from jaxrank.features import Batch
from jaxrank.models import Model


class TrainState(NamedTuple):
    """Everything that a step reads and writes.

    step: i32[], steps done.
    params: of the model, equal on every device.
    model_state: statistics of batch norm, or {}.
    opt_state: of the optimizer of `params`.
    tables: {stack: StackState}, split by row.
    rate_factor: f32[], scales both learning rates; lowered when the metric stops improving.
    scratch: see `Embedding.init_scratch`; not part of a checkpoint.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    tables: dict[str, StackState]
    rate_factor: jax.Array
    scratch: dict[str, jax.Array]


class Weights(NamedTuple):
    """The part of the state that predicts. rows: {stack: f[rows * width / 128, 128]}."""

    params: Any
    model_state: Any
    rows: dict[str, jax.Array]


def weights_of(state: TrainState) -> Weights:
    rows = {name: table.rows for name, table in state.tables.items()}
    return Weights(state.params, state.model_state, rows)


class StepMetrics(NamedTuple):
    """What one step tells.

    loss: f32[], the weighted sum of the tasks' losses, which is what is minimised.
    sums: metrics.Sums of the batch before the update.
    rate, table_rate: f32[], learning rates of the step.
    gradient_norm: f32[], of the model's parameters, before clipping.
    dropped: i32[lists], list ids cut from the batch.
    """

    loss: jax.Array
    sums: metrics.Sums
    rate: jax.Array
    table_rate: jax.Array
    gradient_norm: jax.Array
    dropped: jax.Array


class Trainee(NamedTuple):
    """What is trained, and how: the static half of a step, whose other half is the state.

    rate, table_rate: functions of the step.
    task_weights: the weight of each task's loss in the sum.
    seed: of the model's random numbers.
    """

    model: Model
    embedding: Embedding
    optimizer: optax.GradientTransformation
    rate: optax.Schedule
    table_rate: optax.Schedule
    task_weights: tuple[float, ...]
    seed: int


def flat_vectors(trainee: Trainee, vectors: Any) -> tuple[jax.Array, ...]:
    """Looked-up vectors in the order in which the model takes them."""
    stacks = trainee.embedding.layout.stacks
    return tuple(
        vectors[stack.name][kind]
        for stack in stacks
        for kind in ("ids", "lists")
        if kind in vectors[stack.name]
    )


def init_state(trainee: Trainee, batch: Batch) -> TrainState:
    """The state before the first step; of `batch` only the shapes matter."""
    key = jax.random.key(trainee.seed)
    tables = trainee.embedding.init(jax.random.fold_in(key, 0))
    rows = {name: table.rows for name, table in tables.items()}
    vectors = jax.eval_shape(trainee.embedding.lookup, rows, batch)
    zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), vectors)
    params, model_state = trainee.model.init(
        jax.random.fold_in(key, 1),
        jnp.zeros((1, *batch.floats.shape[1:]), jnp.float32),
        flat_vectors(trainee, zeros),
    )
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        model_state=model_state,
        opt_state=trainee.optimizer.init(params),
        tables=tables,
        rate_factor=jnp.ones((), jnp.float32),
        scratch=trainee.embedding.init_scratch(),
    )


def train_step(trainee: Trainee, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """Forward, backward, the dense update and the update of the rows read."""
    vectors = trainee.embedding.lookup(weights_of(state).rows, batch)
    task_weights = jnp.asarray(trainee.task_weights, batch.labels.dtype)
    key = jax.random.fold_in(jax.random.key(trainee.seed), state.step)

    def loss_of(params, vectors):
        logits, model_state = trainee.model.apply(
            params,
            state.model_state,
            batch.floats,
            flat_vectors(trainee, vectors),
            train=True,
            key=key,
        )
        total, _ = losses.weighted_loss(logits, batch.labels, batch.weights, task_weights)
        return total, (logits, model_state)

    (loss, (logits, model_state)), (grads, vector_grads) = jax.value_and_grad(
        loss_of, argnums=(0, 1), has_aux=True
    )(state.params, vectors)

    updates, opt_state = trainee.optimizer.update(grads, state.opt_state, state.params)
    updates = jax.tree.map(lambda u: u * state.rate_factor.astype(u.dtype), updates)
    table_rate = trainee.table_rate(state.step) * state.rate_factor
    tables, scratch = trainee.embedding.update(
        state.tables, state.scratch, batch, vector_grads, rate=table_rate, step=state.step
    )
    told = StepMetrics(
        loss=loss,
        sums=metrics.batch_sums(logits, batch.labels, batch.weights),
        rate=trainee.rate(state.step) * state.rate_factor,
        table_rate=table_rate,
        gradient_norm=optax.tree.norm(grads),
        dropped=jnp.sum(batch.dropped, axis=0),
    )
    new = TrainState(
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        model_state=model_state,
        opt_state=opt_state,
        tables=tables,
        rate_factor=state.rate_factor,
        scratch=scratch,
    )
    return new, told


def eval_step(trainee: Trainee, weights: Weights, batch: Batch) -> jax.Array:
    """f32[B, tasks]: the logits of a batch."""
    vectors = trainee.embedding.lookup(weights.rows, batch)
    logits, _ = trainee.model.apply(
        weights.params,
        weights.model_state,
        batch.floats,
        flat_vectors(trainee, vectors),
        train=False,
        key=None,
    )
    return logits
