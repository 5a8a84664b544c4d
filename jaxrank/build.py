"""Factories that turn the config into the model, the optimizers and the step."""

import fnmatch
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrank import base_rates, embedding, models, optim, run_schedule, task_losses, validate
from jaxrank import config as configs
from jaxrank import layout as layouts
from jaxrank import mesh as meshes
from jaxrank import step as steps
from jaxrank.config_files import id_patterns, to_plain
from jaxrank.data.batches import packing
from jaxrank.data.batches.packs import pack_requests
from jaxrank.data.batches.room import ListRoom, estimated_room, list_room, report_room
from jaxrank.data.store.split import Split
from jaxrank.data.vectors.read import VectorFiles, open_vectors
from jaxrank.data.vectors.rows import ENCODINGS
from jaxrank.errors import InputError
from jaxrank.features import MAX_GROUP, Schema, Task
from jaxrank.layout import Layout
from jaxrank.metrics.early_stopping import Ranked, check_metric, monitored_tasks
from jaxrank.models.registry import RANKER, find_module
from jaxrank.outputs import idle_tasks
from jaxrank.program import Predictor
from jaxrank.report import Report
from jaxrank.run_schedule import RunSchedule

# Smaller packs hold few requests of several examples, so a loss of requests trains little.
MIN_PACK = 16
_EVEN_SHARE = 64  # a multiple of it has a divisor of 64 or more


def table_dims(schema: Schema, section: ConfigDict) -> dict[str, int]:
    """Returns the dimension of each table of `schema`, according to the section `embedding`.

    Raises:
        InputError: a pattern of `dims` matches no table.
    """
    names = [t.name for t in schema.tables]
    dims = validate.matched("embedding.dims", "table", names, to_plain(section.dims))
    return dict.fromkeys(names, section.dim) | dims


def make_model(model: ConfigDict, schema: Schema) -> models.Model:
    """Builds the model of the config's section `model`.

    Raises:
        InputError: a field has an invalid value.
    """
    return models.build(tasks=len(schema.tasks), **model_fields(model))


def model_fields(model: ConfigDict) -> dict[str, Any]:
    """Returns the fields and the name of the model that the config's section `model` describes."""
    fields = _tuples(model)
    fields["name"] = fields.get("name") or RANKER
    for field in ("parents", "initial_bias"):
        del fields[field]
    return fields


def task_parents(model: ConfigDict, schema: Schema) -> tuple[int, ...]:
    """Returns the index of each task's parent as `model.parents` sets it; see `joint_logits`.

    Raises:
        InputError: a task or parent does not exist, is not binary, or is its own ancestor.
    """
    names = [t.name for t in schema.tasks]
    parents = [-1] * len(names)
    for task, parent in to_plain(model.parents).items():
        if task not in names or parent not in names:
            raise InputError(
                f"model.parents: {task!r} and {parent!r} must be tasks: found tasks {names}."
            )
        parents[names.index(task)] = names.index(parent)
        kinds = [schema.tasks[names.index(name)].kind for name in (task, parent)]
        if kinds != ["binary", "binary"]:
            raise InputError(
                f"model.parents: {task!r} and {parent!r} must be binary tasks, because only"
                f" these have a probability: found the kinds {kinds}."
            )
    _check_ancestors(parents, names)
    return tuple(parents) if max(parents) >= 0 else ()


def _check_ancestors(parents: Sequence[int], names: Sequence[str]) -> None:
    """Raises InputError if a task is its own ancestor. parents: indices, or -1."""
    for task, name in enumerate(names):
        above = parents[task]
        for _ in names:
            above = above if above < 0 else parents[above]
        if above >= 0:
            raise InputError(
                "model.parents: must not form a cycle: found that the parents of task"
                f" {name!r} never end."
            )


def make_optimizers(
    config: ConfigDict, num_steps: int
) -> tuple[optim.Optimizer, optim.Schedule, embedding.RowOptimizer, optim.Schedule]:
    """Builds the optimizers of the dense parameters and of the tables, each with its learning rate.

    Raises:
        InputError: a field of `config.optim` has an invalid value.
    """
    # Checked here too, because the config of an existing run is read from its directory.
    section = validate.parse(configs.Optim, config.optim, "optim")
    dense, tables = section.dense, section.tables
    scale = dict(batch_size=config.batch_size, num_steps=num_steps)
    rate_fields = inspect.signature(optim.schedule).parameters.keys() - scale.keys()
    learning_rate, table_learning_rate = (
        optim.schedule(**scale, **{f: getattr(part, f) for f in rate_fields})
        for part in (dense, tables)
    )
    optimizer = optim.dense_optimizer(
        dense.settings,
        learning_rate=learning_rate,
        clip_norm=0.0 if dense.clip_scope == "all" else dense.clip_norm,  # or the step clips
        weight_decay=dense.weight_decay,
        undecayed=(steps.LOG_VARIANCES,) if config.task_weighting == "uncertainty" else (),
        lr_multipliers=dense.lr_multipliers,
    )
    return optimizer, learning_rate, tables.settings.row_optimizer(), table_learning_rate


def make_run_schedule(config: ConfigDict, rows: int) -> RunSchedule:
    """Returns the steps at which a run on `rows` examples evaluates, saves and logs."""
    scale = ("batch_size", "steps_per_execution", "num_steps", "num_epochs", "log_every_steps")
    return run_schedule.make_run_schedule(
        rows=rows,
        **{field: config[field] for field in scale},
        eval_every_steps=config.eval.every_steps,
        save_every_steps=config.checkpoint.every_steps,
        valid=config.data.valid,
        order=config.data.order,
    )


def make_step_spec(
    config: ConfigDict,
    layout: Layout,
    mesh: Mesh,
    *,
    num_steps: int,
    room: Mapping[str, float],
) -> steps.StepSpec:
    """Builds the step: model, tables and optimizers as `config` describes them.

    Args:
        room: of each stack's exchange; see `Embedding`.

    Raises:
        InputError: a field of the config has an invalid value.
    """
    tasks = len(layout.schema.tasks)
    task_weights = _task_weights(config, tasks)
    optimizer, learning_rate, row_optimizer, table_learning_rate = make_optimizers(
        config, num_steps
    )
    settings = {f: config.embedding[f] for f in ("init_std", "l2", "l2_scope", "clip_norm")}
    dense = config.optim.dense
    return steps.StepSpec(
        model=make_model(config.model, layout.schema),
        embedding=embedding.Embedding(
            layout=layout,
            mesh=mesh,
            row_optimizer=row_optimizer,
            room=room,
            **_table_values(config, layout.schema),
            **settings,
        ),
        optimizer=optimizer,
        learning_rate=learning_rate,
        table_learning_rate=table_learning_rate,
        kinds=tuple(task.kind for task in layout.schema.tasks),
        task_losses=task_losses.select_losses(to_plain(config.task_losses), layout.schema.tasks),
        parents=task_parents(config.model, layout.schema),
        task_weights=task_weights,
        learns_task_weights=config.task_weighting == "uncertainty",
        ema_decay=config.ema_decay,
        seed=config.seed,
        skips=config.watch.on_nonfinite == "skip",
        clip_norm=dense.clip_norm if dense.clip_scope == "all" else 0.0,
    )


def _table_values(config: ConfigDict, schema: Schema) -> dict[str, Any]:
    """Returns the values of tables that patterns select: `lr_multipliers` and `l2s`."""
    names = [t.name for t in schema.tables]
    factors = to_plain(config.optim.tables.lr_multipliers)
    l2s = to_plain(config.embedding.l2s)
    return {
        "lr_multipliers": validate.matched("optim.tables.lr_multipliers", "table", names, factors),
        "l2s": validate.matched("embedding.l2s", "table", names, l2s),
    }


def make_base_rates(
    model: ConfigDict, schema: Schema, statistics: Mapping[str, Any] | None
) -> base_rates.BaseRates:
    """Returns the base rates that a run starts from.

    Args:
        statistics: of the training labels, with `traffic`; None: there are none.

    Raises:
        InputError: `initial_bias` has a name that is not a task.
    """
    rates = base_rates.neutral(len(schema.tasks))
    if statistics is not None:
        rates = base_rates.base_rates(schema.tasks, task_parents(model, schema), statistics)
    return rates._replace(bias=override_bias(rates.bias, model, schema))


def override_bias(bias: np.ndarray, model: ConfigDict, schema: Schema) -> np.ndarray:
    """Returns f[T] biases with those of `initial_bias` in place of others.

    Raises:
        InputError: `initial_bias` has a name that is not a task.
    """
    bias = np.array(bias)
    names = [task.name for task in schema.tasks]
    for task, value in to_plain(model.initial_bias).items():
        if task not in names:
            raise InputError(f"model.initial_bias: {task!r} must be a task: found tasks {names}.")
        bias[names.index(task)] = value
    return bias


def untrained(
    config: ConfigDict, schema: Schema, unlabelled: Collection[str] = ()
) -> tuple[str, ...]:
    """Returns the names of the tasks that the loss ignores.

    Args:
        unlabelled: tasks whose labels have no weight; see `scoring.unlabelled_tasks`.
    """
    weights = [
        0.0 if task.name in unlabelled else weight
        for task, weight in zip(schema.tasks, _task_weights(config, len(schema.tasks)), strict=True)
    ]
    idle = idle_tasks(weights, task_parents(config.model, schema))
    return tuple(schema.tasks[i].name for i in idle)


def _task_weights(config: ConfigDict, tasks: int) -> tuple[float, ...]:
    weights = tuple(config.task_weights) or (1.0,) * tasks
    if len(weights) != tasks:
        raise InputError(
            f"task_weights: must have one number per task: found {weights}, {tasks} tasks."
        )
    return weights


def trained_tasks(config: ConfigDict, schema: Schema) -> list[Task]:
    """Returns the tasks that are trained."""
    idle = untrained(config, schema)
    return [task for task in schema.tasks if task.name not in idle]


def ranked_tasks(section: ConfigDict) -> tuple[str, ...]:
    """Returns the names of the tasks that the section `task_losses` trains by ranking alone."""
    return task_losses.request_tasks(to_plain(section), alone=True)


def loss_names(section: ConfigDict) -> dict[str, str]:
    """Returns {task: name of its loss} for the tasks in the section `task_losses`."""
    return {task: task_losses.loss_name(entry) for task, entry in to_plain(section).items()}


def has_request_loss(section: ConfigDict) -> bool:
    """Returns True if a loss in the section `task_losses` compares the examples of a request.

    Only such a loss needs packs. They leave out negatives of large requests, so that they would
    bias the predictions of any other loss.
    """
    return bool(task_losses.request_tasks(to_plain(section)))


def check_requests(config: ConfigDict, split: Split) -> None:
    """Checks that a training split has the requests that losses compare.

    Args:
        split: see `pack_split`.

    Raises:
        InputError: it has none, or its packs are smaller than MIN_PACK.
    """
    for task in task_losses.request_tasks(to_plain(config.task_losses)):
        if not split.pack:
            name = task_losses.loss_name(config.task_losses[task])
            raise InputError(
                f"task_losses.{task}: {name!r} must have requests to compare the examples of: found"
                f" none in {split.path}. Set features.group and prepare the data again, without"
                " data.direct."
            )
        if split.pack < MIN_PACK:
            shards = config.data.shards
            share = max(1, round(config.batch_size / shards / _EVEN_SHARE)) * _EVEN_SHARE
            raise InputError(
                f"batch_size: batch_size / data.shards must have a divisor from {MIN_PACK} to"
                f" {MAX_GROUP}, so that the loss of task_losses.{task} can compare the examples of"
                f" a pack: found batch_size={config.batch_size}, data.shards={shards}, packs of"
                f" {split.pack}. Set batch_size={share * shards}."
            )


def ranked_metrics(config: ConfigDict, group: str) -> Ranked:
    """Returns the metrics of requests that a run can monitor.

    Args:
        group: the column `features.group` of the data. Empty: it has no requests.
    """
    return Ranked(config.eval.top_k if group else 0, ranked_tasks(config.task_losses))


def check_watched(config: ConfigDict, schema: Schema, group: str) -> None:
    """Checks that a metric has the name of `eval.metric`. See `ranked_metrics` for `group`.

    Raises:
        InputError: no metric has that name.
    """
    check_metric(schema.tasks, config.eval.metric, ranked_metrics(config, group))


def watched_metric(config: ConfigDict, schema: Schema, group: str = "") -> str:
    """Returns the "task/metric" that selects the best checkpoint.

    Args:
        group: see `ranked_metrics`.

    Raises:
        InputError: no metric has that name, or its task is not trained.
    """
    idle = untrained(config, schema)
    tasks = trained_tasks(config, schema)
    if not tasks:
        raise InputError(
            "task_weights: must have a number above 0, so that a task is trained: found"
            f" {tuple(config.task_weights)}."
        )
    ranked = ranked_metrics(config, group)
    default = check_metric(tasks, "", ranked)
    name = check_metric(schema.tasks, config.eval.metric or default, ranked)
    if monitored_tasks(schema.tasks, name, ranked) != (name.rpartition("/")[0],):
        return check_metric(tasks, name, ranked)  # a mean is over the tasks that are trained
    if name.rpartition("/")[0] in idle:
        raise InputError(
            f"eval.metric: must be of a task that is trained: found {name!r}, whose weight in"
            f" task_weights {tuple(config.task_weights)} is 0."
        )
    return name


def check_names(config: ConfigDict, schema: Schema) -> None:
    """Checks names of tasks, tables and parameters, and counts, against the schema.

    Needs no data. The tables of the schema may have any number of rows.

    Raises:
        InputError: naming the field.
    """
    dims = table_dims(schema, config.embedding)
    _table_values(config, schema)
    make_model(config.model, schema)
    task_losses.select_losses(to_plain(config.task_losses), schema.tasks)
    watched_metric(config, schema, config.features.get("group", ""))
    make_base_rates(config.model, schema, None)
    names = [t.name for t in schema.tables]
    placements = to_plain(config.embedding.placements)
    validate.matched("embedding.placements", "table", names, placements)
    if config.optim.dense.lr_multipliers:
        optimizer, *_ = make_optimizers(config, num_steps=1)
        jax.eval_shape(optimizer.init, weights_shape(config, layouts.layout(schema, dims)).params)


def check_scales(config: ConfigDict, schema: Schema) -> None:
    """Checks names of features in `model.scales` of a new run, which a run that resumes keeps.

    A feature that `features` may name, by a pattern or to skip it, need not be in the data: a warm
    start inherits its scale.

    Raises:
        InputError: naming the field, with the nearest feature.
    """
    features = [f.name for f in schema.categorical] + [f.name for f in schema.ragged]
    patterns = id_patterns(config.features)
    if not patterns:  # a store has the features, and a scale may be inherited
        return
    skipped = config.features.get("skip", ())
    patterns += [skipped] if isinstance(skipped, str) else list(skipped)
    for name in config.model.get("scales", ()):  # of a factorization machine
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            validate.check_choice("model.scales", name, features)


def open_table_vectors(config: ConfigDict, schema: Schema) -> dict[str, VectorFiles]:
    """Opens the files of `embedding.init_from`, by table. Reads the first vector of each.

    Raises:
        InputError: a pattern matches no table, a table or the model cannot start from vectors, or
            a file is invalid or has vectors of another dimension.
    """
    field, names = "embedding.init_from", [t.name for t in schema.tables]
    paths = validate.matched(field, "table", names, to_plain(config.embedding.init_from))
    module = find_module(config.model.name or RANKER)
    if paths and getattr(module, "has_weights_in_rows", False):
        raise InputError(
            f"{field}: must be empty for model.name={config.model.name!r}, because the first"
            f" numbers of its rows are weights of the tasks: found {to_plain(paths)}."
        )
    encodings, dims = (
        {t.name: t.encoding for t in schema.tables},
        table_dims(schema, config.embedding),
    )
    opened = {}
    for name, path in paths.items():
        if encodings[name] not in ENCODINGS:
            raise InputError(
                f"{field}: the table {name!r} must have one of the encodings"
                f" {', '.join(ENCODINGS)}, whose rows stand for values: found {encodings[name]!r}."
            )
        opened[name] = open_vectors(path, f"{field}.{name}")
        if opened[name].width != dims[name]:
            actual = f"dim {dims[name]}" if dims[name] else "no dim"
            raise InputError(
                f"{field}: the table {name!r} must have the dim of its vectors,"
                f" {opened[name].width} in {opened[name].files[0]}: found {actual}. Set"
                f" embedding.dims.{name} = {opened[name].width}."
            )
    return opened


def without_evaluation(config: ConfigDict) -> ConfigDict:
    """Returns the config of a run that evaluates nothing."""
    config = config.copy_and_resolve_references()
    config.data.valid = ""
    config.eval.early_stopping_patience = config.eval.reduce_lr_patience = 0
    return config


class Workload(NamedTuple):
    """Parts of a run that the placement of its tables depends on.

    dim_of: {table: the dimension of its vectors}.
    step_spec: built for one device, because optimizers and layers do not depend on the machine.
    placement, placements: fields of `config.embedding`.
    slack, capacity: `embedding.exchange_slack` and `exchange_capacity`.
    lists: room for packed lists.
    """

    dim_of: dict[str, int]
    step_spec: steps.StepSpec
    placement: str
    placements: dict[str, str]
    slack: float
    capacity: int
    batch_size: int
    steps_per_execution: int
    lists: ListRoom


def pack_split(config: ConfigDict, split: Split) -> Split:
    """Returns a training split in packs if it has requests and a loss compares their examples.

    See `batches.packs`.
    """
    if not has_request_loss(config.task_losses):
        return split
    pack = packing.group_size(config.batch_size, config.data.shards)
    return pack_requests(split, pack, config.seed)


def make_list_room(config: ConfigDict, split: Split, schema: Schema, steps: int) -> ListRoom:
    """Returns the room for the packed lists of a run's first `steps` of a stored split."""
    fields = ("shards", "window_blocks", "order", "list_slack", "on_overflow")
    return list_room(
        split,
        layouts.layout(schema, table_dims(schema, config.embedding)),
        batch_size=config.batch_size,
        steps=steps,
        seed=config.seed,
        **{name: config.data[name] for name in fields},
    )


def plan_list_room(
    config: ConfigDict,
    split: Split | None,
    schema: Schema,
    list_lengths: Mapping[str, Any],
    report: Report,
) -> ListRoom:
    """Returns the room for packed lists that a run allocates, and reports it.

    Args:
        split: the stored training split. None: there is no store, and the room is estimated.
        list_lengths: of a sample; see `room.estimated_room`.
    """
    if split is not None:
        packed = pack_split(config, split)
        steps = make_run_schedule(config, packed.rows).num_steps
        lists = make_list_room(config, packed, schema, steps)
        report_room(lists, report)
        return lists
    lists = estimated_room(
        layouts.layout(schema, table_dims(schema, config.embedding)),
        {"list_lengths": list_lengths},
        batch_size=config.batch_size,
        shards=config.data.shards,
        list_slack=config.data.list_slack,
        has_requests=has_request_loss(config.task_losses),
    )
    for name, ids in lists.capacities.items():
        report(
            f"Packed lists of {name}: capacity {ids:,} ids per {lists.group} examples, estimated"
            f" from a sample: the mean plus {config.data.list_slack:g} standard deviations."
            " Training measures the largest group in its store"
        )
    return lists


def make_workload(config: ConfigDict, schema: Schema, lists: ListRoom) -> Workload:
    """Builds the input of `placement`.

    Raises:
        InputError: a field of the config has an invalid value.
    """
    dim_of = table_dims(schema, config.embedding)
    single = meshes.make_mesh(devices=1)
    return Workload(
        dim_of=dim_of,
        step_spec=make_step_spec(
            config, layouts.layout(schema, dim_of), single, num_steps=1, room={}
        ),
        placement=config.embedding.placement,
        placements=to_plain(config.embedding.placements),
        slack=config.embedding.exchange_slack,
        capacity=config.embedding.exchange_capacity,
        batch_size=config.batch_size,
        steps_per_execution=config.steps_per_execution,
        lists=lists,
    )


def make_predictor(
    config: ConfigDict, layout: Layout, mesh: Mesh, *, room: Mapping[str, float]
) -> Predictor:
    """Builds the program that predicts with the weights of a run, without any optimizer.

    Args:
        room: of each stack's exchange; see `Lookup`.

    Raises:
        InputError: a field of `config.model` has an invalid value.
    """
    return Predictor(
        make_model(config.model, layout.schema),
        embedding.Lookup(layout, mesh, room),
        parents=task_parents(config.model, layout.schema),
        learns_task_weights=config.task_weighting == "uncertainty",
    )


def weights_shape(config: ConfigDict, layout: Layout) -> steps.Weights:
    """Returns the shapes of the weights that predict, without any device."""
    return steps.weights_shape(
        make_model(config.model, layout.schema),
        layout,
        learns_task_weights=config.task_weighting == "uncertainty",
    )


def _tuples(section: ConfigDict) -> dict[str, Any]:
    plain = to_plain(section)
    return {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
