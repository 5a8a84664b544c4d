"""The state of a run and the mathematics of one step: pure functions.

A step is the program of one device: it runs in `shard_map` over the mesh of the embedding, with
this device's share of the batch and of the split tables. Sums over all devices are written out.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrank import losses, request_losses
from jaxrank import mesh as meshes
from jaxrank.base_rates import BaseRates
from jaxrank.embedding import Embedding, ExchangeStats, Lookup, Routes, TableState, row_shapes
from jaxrank.features import Batch
from jaxrank.layout import Layout
from jaxrank.metrics import sums as metrics
from jaxrank.models import Inputs, Model, Share
from jaxrank.models.inputs import Columns, Names, Span
from jaxrank.optim import is_schedule
from jaxrank.outputs import outputs
from jaxrank.task_losses import TaskRequestLoss

# Key among the parameters, beside the layers: f32[T], if the weights of tasks are learned.
LOG_VARIANCES = "task_log_variances"

# Scope in the names of the model's operations, forward and backward; see `aot.scaling`.
MODEL_SCOPE = "model"


class TrainState(NamedTuple):
    """Everything that a step reads and writes.

    step: i32[], steps done.
    earlier: i32[], number to add to `step` for moments and averages: steps of the runs that this
        one was started from, minus skipped steps of this run.
    params: of the model, equal on every device.
    model_state: statistics of batch norm, or {}.
    opt_state: of the optimizer of `params`.
    bias, scale: f32[T], the base rate of each task; see `base_rates.BaseRates`. Not trained.
    tables: {part of a stack: TableState}, split by row or on every device.
    lr_multiplier: f32[], scales both learning rates; lowered when the metric stops improving.
    average: Weights, the moving average of all that predicts; see `averaged`. Or {}.
    scratch: see `Embedding.init_scratch`; not part of a checkpoint.
    """

    step: jax.Array
    earlier: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    bias: jax.Array
    scale: jax.Array
    tables: dict[str, TableState]
    lr_multiplier: jax.Array
    average: Any
    scratch: dict[str, jax.Array]


class Weights(NamedTuple):
    """Weights that predict. rows: `TableState.rows` of each part of a stack."""

    params: Any
    model_state: Any
    bias: Any
    scale: Any
    rows: dict[str, jax.Array]


def trained(state: TrainState) -> Weights:
    """Returns the weights that training continues from."""
    rows = {name: table.rows for name, table in state.tables.items()}
    return Weights(state.params, state.model_state, state.bias, state.scale, rows)


def prediction_weights(state: TrainState) -> Weights:
    """Returns the weights that predict: the moving average, if there is one."""
    return state.average or trained(state)


class ExchangeMetrics(NamedTuple):
    """Cost of the exchange of one stack in one step, over all devices.

    rounds: i32[], 1 unless a buffer was too small.
    unique: i32[], number of distinct ids, summed over the devices that read them.
    served: i32[], maximum number of ids that one device serves.
    """

    rounds: jax.Array
    unique: jax.Array
    served: jax.Array


class StepMetrics(NamedTuple):
    """Metrics of one step.

    loss: f32[], the loss that is minimised: the weighted sum of the tasks' losses. With logit
        corrections it is the loss of the examples as they are, not of all traffic.
    learned_weights: f32[T], factors of the tasks' losses. Without columns if weights are not
        learned.
    sums: metrics.Sums of the batch before the update, of all traffic.
    learning_rate, table_learning_rate: f32[], learning rates of the step.
    gradient_norm: f32[], of the model's parameters, before clipping. With `StepSpec.clip_norm` also
        of the rows of tables.
    dropped: i32[lists], number of list ids cut from the batch.
    skipped: bool[], whether the step had no effect because a number was not finite.
    exchange: {stack: ExchangeMetrics}, for the stacks whose rows are exchanged.
    """

    loss: jax.Array
    learned_weights: jax.Array
    sums: metrics.Sums
    learning_rate: jax.Array
    table_learning_rate: jax.Array
    gradient_norm: jax.Array
    dropped: jax.Array
    skipped: jax.Array
    exchange: dict[str, ExchangeMetrics]


class StepSpec(NamedTuple):
    """Static part of a step: the model, the tables and how they are trained.

    learning_rate, table_learning_rate: functions of the step.
    kinds: of the tasks; see `features.Task`.
    task_losses: functions to minimise, one per task; see `task_losses`.
    parents: of the tasks; see `outputs.joint_logits`.
    task_weights: the weight of each task's loss in the sum.
    learns_task_weights: by uncertainty, beside `task_weights`.
    ema_decay: see `averaged`; 0 for no average.
    seed: of the model's random numbers.
    skips: whether a step with a loss or gradient that is not finite is skipped.
    clip_norm: maximum norm of the gradient of dense parameters and rows of tables together. 0: no
        limit.
    """

    model: Model
    embedding: Embedding
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    table_learning_rate: optax.Schedule
    kinds: tuple[str, ...]
    task_losses: tuple[losses.Elementwise, ...]
    parents: tuple[int, ...]
    task_weights: tuple[float, ...]
    learns_task_weights: bool
    ema_decay: float
    seed: int
    skips: bool
    clip_norm: float


def _inputs(
    layout: Layout, dense: Any, vectors: Any, ids: Mapping[str, Any], share: Share
) -> Inputs:
    """Builds the inputs of the model from dense features, vectors and the ids of sequences.

    Accepts arrays of a batch, or their shapes.
    """
    schema = layout.schema
    column_features = [f.name for f in schema.id_columns]
    reads: list[tuple[Any, Any]] = []
    columns: list[Columns] = []
    spans: list[Span] = []
    for stack in layout.stacks:
        stack_vectors = vectors.get(stack.name, {})
        if stack.places:
            if stack.columns:
                names = tuple(column_features[i] for i in stack.columns)
                columns.append(Columns(len(reads), names))
            first = len(stack.columns)
            for i, length in zip(stack.sequences, stack.sequence_lengths, strict=True):
                entry = schema.ragged[i]
                spans.append(Span(entry.name, len(reads), first, length, entry.sequence))
                first += length
            reads.append((stack_vectors["ids"], ids[stack.name] if stack.sequences else None))
        if stack.lists:
            columns.append(Columns(len(reads), tuple(schema.ragged[i].name for i in stack.lists)))
            reads.append((stack_vectors["lists"], None))
    dense_names = tuple(f.name for f in schema.dense)
    return Inputs(Names(dense_names, tuple(columns), tuple(spans)), dense, reads, share)


def model_inputs(layout: Layout) -> Inputs:
    """Returns the inputs of a model for one example, as jax.ShapeDtypeStruct."""

    def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *shape), dtype)

    vectors, ids = {}, {}
    for stack in layout.stacks:
        ids[stack.name] = array(stack.places, dtype=jnp.int32)
        vectors[stack.name] = {
            "ids": array(stack.places, stack.dim),
            "lists": array(len(stack.lists), stack.dim),
        }
    return _inputs(layout, array(len(layout.schema.dense)), vectors, ids, Share())


def input_names(layout: Layout) -> list[tuple[str, str, int, int]]:
    """Returns (kind, feature, place, coordinate) of each column of `models.Inputs.features`."""
    schema = layout.schema
    columns = [(f.name, place) for f in schema.categorical for place in range(f.length)]
    names = [("float", f.name, 0, 0) for f in schema.dense]
    sequences = []
    for stack in layout.stacks:
        coordinates = range(stack.dim)
        names += [("id", *columns[i], c) for i in stack.columns for c in coordinates]
        names += [("list", schema.ragged[i].name, 0, c) for i in stack.lists for c in coordinates]
        sequences += [
            ("sequence", schema.ragged[i].name, 0, c) for i in stack.sequences for c in coordinates
        ]
    return names + sequences


def layers_state(step_spec: StepSpec, key: jax.Array, inputs: Inputs) -> dict[str, Any]:
    """Returns the part of a state without tables: params, model_state and opt_state."""
    learned = len(step_spec.task_weights) if step_spec.learns_task_weights else 0
    params, model_state = _layers(step_spec.model, learned, key, inputs)
    opt_state = step_spec.optimizer.init(params)
    return {"params": params, "model_state": model_state, "opt_state": opt_state}


def _layers(model: Model, learned_weights: int, key: jax.Array, inputs: Inputs) -> tuple[Any, Any]:
    """Returns the initial params and model_state, with a number of learned weights of tasks."""
    params, model_state = model.init(key, inputs)
    if learned_weights:
        params = {**params, LOG_VARIANCES: jnp.zeros(learned_weights)}
    return params, model_state


def weights_shape(model: Model, layout: Layout, *, learns_task_weights: bool) -> Weights:
    """Returns the weights that predict, as jax.ShapeDtypeStruct. They are equal on any mesh."""
    learned = len(layout.schema.tasks) if learns_task_weights else 0
    init = functools.partial(_layers, model, learned)
    params, model_state = jax.eval_shape(
        lambda key: init(key, model_inputs(layout).zeros()), jax.random.key(0)
    )
    bias = jax.ShapeDtypeStruct((len(layout.schema.tasks),), jnp.float32)
    return Weights(params, model_state, bias, bias, row_shapes(layout))


def init_state(step_spec: StepSpec, rates: BaseRates) -> TrainState:
    """Returns the state before the first step, on the whole mesh."""
    key = jax.random.key(step_spec.seed)
    embedding = step_spec.embedding
    inputs = model_inputs(embedding.layout).zeros()
    layers = layers_state(step_spec, jax.random.fold_in(key, 1), inputs)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        earlier=jnp.zeros((), jnp.int32),
        **layers,
        bias=jnp.asarray(rates.bias),
        scale=jnp.asarray(rates.scale),
        tables=embedding.init(jax.random.fold_in(key, 0)),
        lr_multiplier=jnp.ones((), jnp.float32),
        average={},
        scratch=embedding.init_scratch(),
    )
    if not step_spec.ema_decay:
        return state
    return state._replace(average=jax.tree.map(jnp.copy, trained(state)))


class Pulled(NamedTuple):
    """The part of a state that the gradients of a batch depend on, with the vectors of the batch.

    step, params, model_state, bias, scale: of `TrainState`.
    vectors: of the batch; see `Lookup.lookup`.
    """

    step: jax.Array
    params: Any
    model_state: Any
    bias: jax.Array
    scale: jax.Array
    vectors: Any


class Gradients(NamedTuple):
    """Gradients of a batch and results of its forward pass. All but `vectors` are of all devices.

    dense: of the parameters.
    vectors: of `Pulled.vectors`, on the device that read them.
    model_state: the new statistics of batch norm.
    loss, sums, dropped: see `StepMetrics`.
    """

    dense: Any
    vectors: Any
    model_state: Any
    loss: jax.Array
    sums: metrics.Sums
    dropped: jax.Array


def train_step(
    step_spec: StepSpec, state: TrainState, batch: Batch, *, is_due: jax.Array | None = None
) -> tuple[TrainState, StepMetrics]:
    """Computes loss and gradients, and updates the dense parameters and the rows that were read.

    Args:
        is_due: bool[], whether the step belongs to the run. Otherwise it has no effect and its
            metrics are undefined. None: it belongs to the run.
    """
    routes = step_spec.embedding.route(batch)
    pulled, exchange_stats = pull(step_spec, state, routes, batch)
    gradients = compute_gradients(step_spec, pulled, batch)
    return push(step_spec, state, routes, batch, gradients, exchange_stats, is_due=is_due)


def pull(
    step_spec: StepSpec, state: TrainState, routes: Routes, batch: Batch
) -> tuple[Pulled, dict[str, ExchangeStats]]:
    """Returns the values to compute the gradients of a batch with, and the cost of the exchange."""
    vectors, stats = step_spec.embedding.lookup(trained(state).rows, routes, batch)
    pulled = Pulled(state.step, state.params, state.model_state, state.bias, state.scale, vectors)
    return pulled, stats


def compute_gradients(step_spec: StepSpec, pulled: Pulled, batch: Batch) -> Gradients:
    """Computes loss and gradients of a batch at pulled values."""
    embedding = step_spec.embedding
    total = functools.partial(meshes.total, embedding.mesh)
    total_weight, counted = total((batch.weights.sum(0), _counts(batch).sum()))
    make_inputs = functools.partial(_training_inputs, embedding, batch, counted)
    requests = _request_weights(step_spec, batch, total)

    def compute_loss(params, vectors):
        logits, model_state = _training_logits(step_spec, pulled, params, make_inputs(vectors))
        loss = _loss(step_spec, params, pulled.scale, logits, batch, total_weight, requests)
        return loss, (logits, model_state)

    (loss, (logits, model_state)), (grads, vector_grads) = jax.value_and_grad(
        compute_loss, argnums=(0, 1), has_aux=True
    )(pulled.params, pulled.vectors)
    traffic = metrics.traffic_weights(batch.weights, batch.labels, batch.logit_correction)
    sums = metrics.batch_sums(logits, batch.labels, traffic, step_spec.kinds)
    grads, loss, sums, dropped = total((grads, loss, sums, jnp.sum(batch.dropped, axis=0)))
    return Gradients(grads, vector_grads, model_state, loss, sums, dropped)


def push(
    step_spec: StepSpec,
    state: TrainState,
    routes: Routes,
    batch: Batch,
    gradients: Gradients,
    exchange_stats: dict[str, ExchangeStats],
    *,
    is_due: jax.Array | None = None,
) -> tuple[TrainState, StepMetrics]:
    """Applies the gradients of a batch to a state, which may be newer than the pulled values.

    Args:
        routes: of the batch.
        exchange_stats: of the lookup of the batch, for the metrics.
        is_due: see `train_step`.
    """
    gradients, norm = _clipped(step_spec, routes, batch, gradients)
    applies, skipped = _applies(step_spec, gradients, norm, is_due)
    updates, opt_state = step_spec.optimizer.update(gradients.dense, state.opt_state, state.params)
    updates = jax.tree.map(lambda u: u * state.lr_multiplier.astype(u.dtype), updates)
    table_learning_rate = step_spec.table_learning_rate(state.step) * state.lr_multiplier
    tables, scratch = step_spec.embedding.update(
        state.tables,
        state.scratch,
        routes,
        batch,
        gradients.vectors,
        learning_rate=table_learning_rate,
        step=state.earlier + state.step,
        applies=applies,
    )
    step_metrics = StepMetrics(
        loss=gradients.loss,
        learned_weights=_learned_weights(step_spec, state.params),
        sums=gradients.sums,
        learning_rate=step_spec.learning_rate(state.step) * state.lr_multiplier,
        table_learning_rate=table_learning_rate,
        gradient_norm=norm,
        dropped=gradients.dropped,
        skipped=skipped,
        exchange=jax.tree.map(
            _total_exchange, exchange_stats, is_leaf=lambda x: isinstance(x, ExchangeStats)
        ),
    )
    layers = optax.apply_updates(state.params, updates), gradients.model_state, opt_state
    params, model_state, opt_state = _applied_layers(state, layers, applies, is_due)
    new = state._replace(
        earlier=state.earlier if applies is None else state.earlier - skipped,
        step=state.step + (1 if is_due is None else is_due),
        params=params,
        model_state=model_state,
        opt_state=opt_state,
        tables=tables,
        scratch=scratch,
    )
    return new, step_metrics


def _clipped(
    step_spec: StepSpec, routes: Routes, batch: Batch, gradients: Gradients
) -> tuple[Gradients, jax.Array]:
    """Returns the gradients, scaled to at most `clip_norm`, and their norm f[] before it.

    The norm of a row is that of its gradient, summed over its reads in the global batch, without
    L2. It is the same on any mesh.
    """
    norm = optax.tree.norm(gradients.dense)
    if not step_spec.clip_norm:
        return gradients, norm
    of_rows = step_spec.embedding.squared_norm(routes, batch, gradients.vectors)
    norm = jnp.sqrt(jnp.square(norm) + of_rows)
    factor = jnp.minimum(1.0, step_spec.clip_norm / jnp.maximum(norm, 1e-12))
    scale = functools.partial(jax.tree.map, lambda g: g * factor.astype(g.dtype))
    return gradients._replace(dense=scale(gradients.dense), vectors=scale(gradients.vectors)), norm


def _applies(
    step_spec: StepSpec, gradients: Gradients, norm: jax.Array, is_due: jax.Array | None
) -> tuple[jax.Array | None, jax.Array]:
    """Returns bool[] whether a step applies its gradients, and bool[] whether it is skipped.

    Args:
        norm: of the gradients, see `_clipped`.
        is_due: see `train_step`. Without it, a step that skips nothing always applies: None.
    """
    if not step_spec.skips:
        return is_due, jnp.zeros((), bool)
    mesh = step_spec.embedding.mesh
    is_finite = _all_finite(mesh, gradients.loss + norm, gradients.vectors)
    if is_due is None:
        return is_finite, ~is_finite
    return is_due & is_finite, is_due & ~is_finite


def _applied_layers(
    state: TrainState, new: tuple[Any, Any, Any], applies: jax.Array | None, is_due: Any
) -> tuple[Any, Any, Any]:
    """Returns the new parameters, statistics and optimizer state, or the old if none applies."""
    if applies is None:
        return new
    old = state.params, state.model_state, state.opt_state
    select = functools.partial(_if_applied, applies, is_due)
    return jax.tree.map(select, new, old, is_leaf=is_schedule)


def _if_applied(applies: jax.Array, is_due: jax.Array | None, new: Any, old: Any) -> Any:
    """Selects `new` or `old`. The schedule advances even when a step is skipped."""
    if is_schedule(new) and is_due is None:
        return new
    chosen = is_due if is_schedule(new) else applies
    return jax.tree.map(functools.partial(jnp.where, chosen), new, old)


def _all_finite(mesh: Mesh, number: jax.Array, vector_grads: Any) -> jax.Array:
    """Returns bool[], True if a number and the sum of squared gradients are finite everywhere."""
    local_sum = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(vector_grads))
    return jnp.isfinite(number) & jnp.isfinite(meshes.total(mesh, local_sum))


def _counts(batch: Batch) -> jax.Array:
    """Returns f[B], 1 for each example that has weight for a task, and 0 for others."""
    return (batch.weights > 0).any(axis=1).astype(batch.weights.dtype)


def _training_inputs(embedding: Lookup, batch: Batch, counted: jax.Array, vectors: Any) -> Inputs:
    """Returns the inputs of the model for this device's share of a training batch.

    Args:
        counted: f[], sum of `_counts` over the global batch.
    """
    mesh = embedding.mesh
    examples = batch.labels.shape[0]
    share = Share(
        first=meshes.device_index(mesh) * examples,
        mean=lambda x: meshes.total(mesh, x) / mesh.size,
        weights=_counts(batch) * (examples * mesh.size / jnp.maximum(counted, 1)),
        counted=counted,
    )
    return _inputs(embedding.layout, batch.dense, vectors, batch.ids, share)


# The requests of a task, the weights f[B] of their examples, and the total of the batch.
RequestWeights: TypeAlias = tuple[request_losses.Requests, jax.Array, jax.Array]


def _request_weights(
    step_spec: StepSpec, batch: Batch, total: Callable[[Any], Any]
) -> dict[int, RequestWeights]:
    """Returns the requests of each task whose loss compares them.

    Args:
        total: sums over all devices.
    """
    weights: dict[int, tuple[request_losses.Requests, jax.Array]] = {}
    for task, loss in enumerate(step_spec.task_losses):
        if isinstance(loss, TaskRequestLoss):
            requests = request_losses.requests_of(batch, task)
            weights[task] = requests, loss.weights(batch.labels[:, task], requests)
    if not weights:
        return {}
    totals = total({task: of_task.sum() for task, (_, of_task) in weights.items()})
    return {task: (*pair, totals[task]) for task, pair in weights.items()}


def _key(seed: int, step: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), step)


def _training_logits(
    step_spec: StepSpec, pulled: Pulled, params: Any, inputs: Inputs
) -> tuple[jax.Array, Any]:
    """Returns the outputs for this device's share of a batch, and the new statistics."""
    with jax.named_scope(MODEL_SCOPE):
        raw, model_state = step_spec.model.apply(
            params, pulled.model_state, inputs, train=True, key=_key(step_spec.seed, pulled.step)
        )
        return outputs(raw, pulled.bias, pulled.scale, step_spec.parents), model_state


def _loss(
    step_spec: StepSpec,
    params: Any,
    scale: jax.Array,
    logits: jax.Array,
    batch: Batch,
    total_weight: jax.Array,
    requests: Mapping[int, RequestWeights],
) -> jax.Array:
    """Returns this device's part of the loss.

    Args:
        scale: f32[T], of `TrainState`. The squared error of a real task is relative to the variance
            of its labels, so that large labels do not outweigh the other tasks.
        total_weight: f32[T], of the whole batch.
        requests: see `_request_weights`.
    """
    task_weights = jnp.asarray(step_spec.task_weights, batch.labels.dtype) / scale**2
    shifted = losses.sampled_logits(logits, batch.logit_correction)
    known = batch.labels, batch.weights
    if not step_spec.learns_task_weights and not requests:
        return losses.weighted_loss(
            shifted, *known, task_weights, total_weight, step_spec.task_losses
        )
    each = losses.per_task(shifted, *known, total_weight, step_spec.task_losses)
    for task, (of_task, weights, total) in requests.items():
        # Candidates of all traffic are compared, so logits are not shifted to the sample.
        outputs = losses.known(logits, batch.weights)[:, task]
        loss = step_spec.task_losses[task]
        assert isinstance(loss, TaskRequestLoss)
        by_example = weights * loss.each(outputs, batch.labels[:, task], of_task)
        each = each.at[task].add(by_example.sum() / jnp.where(total > 0, total, 1))
    if not step_spec.learns_task_weights:
        return (task_weights * each).sum()
    return losses.uncertainty_weighted(
        each, task_weights, params[LOG_VARIANCES], total_weight, step_spec.embedding.mesh.size
    )


def averaged(
    step_spec: StepSpec, state: TrainState, skipped: jax.Array, count: jax.Array
) -> TrainState:
    """Updates the moving average of a state with its weights, after an execution.

    average <- d^steps * average + (1 - d^steps) * weights, d = min(ema_decay, (1 + t) / (10 + t))
    after t steps, including steps of earlier runs. Thus the average of a short run does not depend
    much on initial values. The average is updated once per execution, not once per step, because
    the update reads and writes whole tables.

    Args:
        skipped: bool[steps], True for steps that had no effect. They do not count.
        count: i32[], number of steps.
    """
    if not step_spec.ema_decay:
        return state
    t = (state.earlier + state.step).astype(jnp.float32)
    steps = count - skipped.sum() if step_spec.skips else count
    keep = jnp.minimum(step_spec.ema_decay, (1 + t) / (10 + t)) ** steps

    def mixed(average: jax.Array, new: jax.Array) -> jax.Array:
        return average + (1 - keep).astype(average.dtype) * (new - average)

    return state._replace(average=jax.tree.map(mixed, state.average, trained(state)))


def _learned_weights(step_spec: StepSpec, params: Any) -> jax.Array:
    if not step_spec.learns_task_weights:
        return jnp.zeros(0)
    return jnp.asarray(step_spec.task_weights) * jnp.exp(-params[LOG_VARIANCES])


def _total_exchange(stats: ExchangeStats) -> ExchangeMetrics:
    return ExchangeMetrics(
        rounds=stats.rounds,
        unique=jax.lax.psum(stats.unique, meshes.EXAMPLES),
        served=jax.lax.pmax(stats.served, meshes.EXAMPLES),
    )


def eval_step(
    model: Model, embedding: Lookup, parents: tuple[int, ...], weights: Weights, batch: Batch
) -> jax.Array:
    """Returns the outputs for this device's share of a batch, f32[B, tasks]; see `Task`."""
    vectors, _ = embedding.lookup(weights.rows, embedding.route(batch), batch)
    inputs = _inputs(embedding.layout, batch.dense, vectors, batch.ids, Share())
    with jax.named_scope(MODEL_SCOPE):
        raw, _ = model.apply(weights.params, weights.model_state, inputs, train=False)
        return outputs(raw, weights.bias, weights.scale, parents)


def batch_moments(
    step_spec: StepSpec, weights: Weights, batch: Batch, step: jax.Array
) -> tuple[Any, jax.Array]:
    """Returns the batch-norm statistics of one training batch, and the number of its examples.

    Examples without weight do not count.

    Args:
        step: i32[], step of the batch, which keys dropout as in training.
    """
    embedding = step_spec.embedding
    vectors, _ = embedding.lookup(weights.rows, embedding.route(batch), batch)
    counted = meshes.total(embedding.mesh, _counts(batch).sum())
    inputs = _training_inputs(embedding, batch, counted, vectors)
    key = _key(step_spec.seed, step)
    moments = step_spec.model.moments(weights.params, weights.model_state, inputs, key)
    return moments, counted
