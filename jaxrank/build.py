"""The builder: it makes the model, the optimizers and the step that a config describes."""

import dataclasses
import fnmatch
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import embedding, models, optim, run_schedule, task_losses, validate
from jaxrank import layout as layouts
from jaxrank import mesh as meshes
from jaxrank import step as steps
from jaxrank.base_rates import BaseRates, base_rates, neutral
from jaxrank.config_files import to_plain
from jaxrank.data.batches import packing
from jaxrank.data.batches.packs import pack_requests
from jaxrank.data.batches.room import ListRoom, estimated_room, list_room, report_room
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.store.split import Split
from jaxrank.data.vectors.read import VectorFiles, open_vectors
from jaxrank.data.vectors.rows import ENCODINGS
from jaxrank.errors import InputError
from jaxrank.features import MAX_GROUP, Schema, Task
from jaxrank.layout import Layout, ReplicatedRows
from jaxrank.metrics.early_stopping import Ranked, check_metric, monitored_tasks
from jaxrank.models.registry import DEFAULT, find_module
from jaxrank.outputs import idle_tasks
from jaxrank.program import Predictor
from jaxrank.report import Report
from jaxrank.run_schedule import RunSchedule

# Smaller packs hold few requests of several examples, so a loss of requests trains little.
MIN_PACK = 16
_EVEN_SHARE = 64  # a multiple of it has a divisor of 64 or more


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
    seed: int
    lists: ListRoom


@dataclasses.dataclass(frozen=True, eq=False)
class Builder:
    """Makes the parts of a run from its config and the schema of its data.

    Others get these parts, or sections as typed objects. They store the config, and pass it on.
    A factory raises InputError if a field that it reads has an invalid value.

    config: with a value in every field that the parts read.
    schema: of the data. Its tables may have any number of rows until they are laid out.
    """

    config: ConfigDict
    schema: Schema

    @property
    def batch_size(self) -> int:
        """Examples per step over all devices."""
        return self.config.batch_size

    @property
    def data(self) -> configs.Data:
        """The section `data`."""
        return _typed(configs.Data, self.config.data)

    @property
    def eval(self) -> configs.Eval:
        """The section `eval`."""
        return _typed(configs.Eval, self.config.eval)

    @property
    def watch(self) -> configs.Watch:
        """The section `watch`."""
        return _typed(configs.Watch, self.config.watch)

    @property
    def features(self) -> FeatureSpec:
        """The section `features`, parsed."""
        return FeatureSpec.from_state(to_plain(self.config.features))

    # The model

    @property
    def model_fields(self) -> dict[str, Any]:
        """The fields and the name of the model that the section `model` describes."""
        fields = {
            k: tuple(v) if isinstance(v, list) else v
            for k, v in to_plain(self.config.model).items()
        }
        fields["name"] = fields.get("name") or DEFAULT
        for field in ("parents", "initial_bias"):
            del fields[field]
        return fields

    @property
    def model_name(self) -> str:
        """The name of the registered model."""
        return self.model_fields["name"]

    def model(self) -> models.Model:
        """Builds the model."""
        return models.build(tasks=len(self.schema.tasks), **self.model_fields)

    @property
    def parents(self) -> tuple[int, ...]:
        """The index of each task's parent as `model.parents` sets it; see `joint_logits`.

        Raises:
            InputError: a task or parent does not exist, is not binary, or is its own ancestor.
        """
        tasks = self.schema.tasks
        names = [t.name for t in tasks]
        parents = [-1] * len(names)
        for task, parent in to_plain(self.config.model.parents).items():
            if task not in names or parent not in names:
                raise InputError(
                    f"model.parents: {task!r} and {parent!r} must be tasks: found tasks {names}."
                )
            parents[names.index(task)] = names.index(parent)
            kinds = [tasks[names.index(name)].kind for name in (task, parent)]
            if kinds != ["binary", "binary"]:
                raise InputError(
                    f"model.parents: {task!r} and {parent!r} must be binary tasks, because only"
                    f" these have a probability: found the kinds {kinds}."
                )
        _check_ancestors(parents, names)
        return tuple(parents) if max(parents) >= 0 else ()

    @property
    def initial_bias(self) -> dict[str, float]:
        """The field `model.initial_bias`, by task."""
        return to_plain(self.config.model.initial_bias)

    def base_rates(self, statistics: Mapping[str, Any] | None) -> BaseRates:
        """Returns the base rates that a run starts from.

        Args:
            statistics: of the training labels, with `traffic`; None: there are none.

        Raises:
            InputError: `initial_bias` has a name that is not a task.
        """
        rates = neutral(len(self.schema.tasks))
        if statistics is not None:
            rates = base_rates(self.schema.tasks, self.parents, statistics)
        return rates._replace(bias=self.override_bias(rates.bias))

    def override_bias(self, bias: np.ndarray) -> np.ndarray:
        """Returns f[T] biases with those of `initial_bias` in place of others.

        Raises:
            InputError: `initial_bias` has a name that is not a task.
        """
        bias = np.array(bias)
        names = [task.name for task in self.schema.tasks]
        for task, value in self.initial_bias.items():
            if task not in names:
                raise InputError(
                    f"model.initial_bias: {task!r} must be a task: found tasks {names}."
                )
            bias[names.index(task)] = value
        return bias

    # Tables

    @property
    def dims(self) -> dict[str, int]:
        """The dimension of each table, as the section `embedding` sets it.

        Raises:
            InputError: a pattern of `dims` matches no table.
        """
        section = self.config.embedding
        return dict.fromkeys(self._tables, section.dim) | self._by_table(
            "embedding.dims", section.dims
        )

    @property
    def placements(self) -> dict[str, str]:
        """The placement that `embedding.placements` requests, by pattern."""
        return to_plain(self.config.embedding.placements)

    @property
    def _tables(self) -> list[str]:
        return [t.name for t in self.schema.tables]

    def _by_table(self, field: str, patterns: ConfigDict) -> dict[str, Any]:
        return validate.matched(field, "table", self._tables, to_plain(patterns))

    @property
    def penalty(self) -> str:
        """The L2 of vectors as text, such as "0.003 on whole tables". Empty: there is none."""
        e = self.config.embedding
        values = [f"{e.l2:g}"] if e.l2 else []
        values += [f"{l2:g} of {tables}" for tables, l2 in to_plain(e.l2s).items()]
        scope = "whole tables" if e.l2_scope == "table" else "the rows that a batch reads"
        return f"{', '.join(values)} on {scope}" if values else ""

    @property
    def _table_values(self) -> dict[str, Any]:
        """The values of tables that patterns select: `lr_multipliers` and `l2s`."""
        factors = self.config.optim.tables.lr_multipliers
        return {
            "lr_multipliers": self._by_table("optim.tables.lr_multipliers", factors),
            "l2s": self._by_table("embedding.l2s", self.config.embedding.l2s),
        }

    def layout(self, hot: Mapping[str, ReplicatedRows] | None = None) -> Layout:
        """Lays out the tables. See `layout.layout` for `hot`."""
        return layouts.layout(self.schema, self.dims, hot)

    @property
    def has_table_vectors(self) -> bool:
        """True if tables start from pre-trained vectors."""
        return bool(self.config.embedding.init_from)

    def open_table_vectors(self) -> dict[str, VectorFiles]:
        """Opens the files of `embedding.init_from`, by table. Reads the first vector of each.

        Raises:
            InputError: a pattern matches no table, a table or the model cannot start from vectors,
                or a file is invalid or has vectors of another dimension.
        """
        field = "embedding.init_from"
        paths, name = self._by_table(field, self.config.embedding.init_from), self.config.model.name
        module = find_module(name)
        if paths and getattr(module, "has_weights_in_rows", False):
            raise InputError(
                f"{field}: must be empty for model.name={name!r}, because the first numbers of its"
                f" rows are weights of the tasks: found {paths}."
            )
        encodings, dims = {t.name: t.encoding for t in self.schema.tables}, self.dims
        opened = {}
        for name, path in paths.items():
            if encodings[name] not in ENCODINGS:
                raise InputError(
                    f"{field}: the table {name!r} must have one of the encodings"
                    f" {', '.join(ENCODINGS)}, whose rows stand for values: found"
                    f" {encodings[name]!r}."
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

    # Tasks and metrics

    @property
    def losses(self) -> dict[str, str]:
        """{task: name of its loss} for the tasks in the section `task_losses`."""
        entries = to_plain(self.config.task_losses)
        return {task: task_losses.loss_name(entry) for task, entry in entries.items()}

    @property
    def ranked(self) -> tuple[str, ...]:
        """The names of the tasks that are trained by ranking alone."""
        return task_losses.request_tasks(to_plain(self.config.task_losses), alone=True)

    @property
    def has_request_loss(self) -> bool:
        """True if a loss compares the examples of a request.

        Only such a loss needs packs. They leave out negatives of large requests, so that they would
        bias the predictions of any other loss.
        """
        return bool(task_losses.request_tasks(to_plain(self.config.task_losses)))

    @property
    def _task_weights(self) -> tuple[float, ...]:
        tasks = len(self.schema.tasks)
        weights = tuple(self.config.task_weights) or (1.0,) * tasks
        if len(weights) != tasks:
            raise InputError(
                f"task_weights: must have one number per task: found {weights}, {tasks} tasks."
            )
        return weights

    @property
    def learns_task_weights(self) -> bool:
        """True if the run learns the weights of its tasks."""
        return self.config.task_weighting == "uncertainty"

    def untrained(self, unlabelled: Collection[str] = ()) -> tuple[str, ...]:
        """Returns the names of the tasks that the loss ignores.

        Args:
            unlabelled: tasks whose labels have no weight; see `scoring.unlabelled_tasks`.
        """
        tasks = self.schema.tasks
        weights = [
            0.0 if task.name in unlabelled else weight
            for task, weight in zip(tasks, self._task_weights, strict=True)
        ]
        return tuple(tasks[i].name for i in idle_tasks(weights, self.parents))

    def trained_tasks(self) -> list[Task]:
        """Returns the tasks that are trained."""
        idle = self.untrained()
        return [task for task in self.schema.tasks if task.name not in idle]

    def ranked_metrics(self, group: str) -> Ranked:
        """Returns the metrics of requests that a run can monitor.

        Args:
            group: the column `features.group` of the data. Empty: it has no requests.
        """
        return Ranked(self.config.eval.top_k if group else 0, self.ranked)

    def watched_metric(self, group: str = "") -> str:
        """Returns the "task/metric" that selects the best checkpoint.

        Args:
            group: see `ranked_metrics`.

        Raises:
            InputError: no metric has that name, or its task is not trained.
        """
        idle, tasks, weights = self.untrained(), self.trained_tasks(), self._task_weights
        if not tasks:
            raise InputError(
                "task_weights: must have a number above 0, so that a task is trained: found"
                f" {weights}."
            )
        ranked = self.ranked_metrics(group)
        asked = self.config.eval.metric
        default = check_metric(tasks, "", ranked)
        name = check_metric(self.schema.tasks, asked or default, ranked)
        if monitored_tasks(self.schema.tasks, name, ranked) != (name.rpartition("/")[0],):
            return check_metric(tasks, name, ranked)  # a mean is over the tasks that are trained
        if name.rpartition("/")[0] in idle:
            raise InputError(
                f"eval.metric: must be of a task that is trained: found {name!r}, whose weight in"
                f" task_weights {weights} is 0."
            )
        return name

    # The step

    @property
    def optimizers(self) -> dict[str, str]:
        """The names of the optimizers of "dense" parameters and of "tables"."""
        return {part: self.config.optim[part].name for part in ("dense", "tables")}

    def _make_optimizers(
        self, num_steps: int
    ) -> tuple[optim.Optimizer, optim.Schedule, embedding.RowOptimizer, optim.Schedule]:
        """Builds the optimizers of dense parameters and of tables, each with its learning rate."""
        # Checked here too, because the config of an existing run is read from its directory.
        section = validate.parse(configs.Optim, self.config.optim, "optim")
        dense, tables = section.dense, section.tables
        scale = dict(batch_size=self.config.batch_size, num_steps=num_steps)
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
            undecayed=(steps.LOG_VARIANCES,) if self.learns_task_weights else (),
            lr_multipliers=dense.lr_multipliers,
        )
        return optimizer, learning_rate, tables.settings.row_optimizer(), table_learning_rate

    def step_spec(
        self, layout: Layout, mesh: Mesh, *, num_steps: int, room: Mapping[str, float]
    ) -> steps.StepSpec:
        """Builds the step: model, tables and optimizers.

        Args:
            layout: of the tables of the schema.
            room: of each stack's exchange; see `Embedding`.
        """
        config, tasks = self.config, self.schema.tasks
        optimizer, learning_rate, row_optimizer, table_learning_rate = self._make_optimizers(
            num_steps
        )
        settings = {f: config.embedding[f] for f in ("init_std", "l2", "l2_scope", "clip_norm")}
        dense = config.optim.dense
        return steps.StepSpec(
            model=self.model(),
            embedding=embedding.Embedding(
                layout=layout,
                mesh=mesh,
                row_optimizer=row_optimizer,
                room=room,
                **self._table_values,
                **settings,
            ),
            optimizer=optimizer,
            learning_rate=learning_rate,
            table_learning_rate=table_learning_rate,
            kinds=tuple(task.kind for task in tasks),
            task_losses=task_losses.select_losses(to_plain(config.task_losses), tasks),
            parents=self.parents,
            task_weights=self._task_weights,
            learns_task_weights=self.learns_task_weights,
            ema_decay=config.ema_decay,
            seed=config.seed,
            skips=config.watch.on_nonfinite == "skip",
            clip_norm=dense.clip_norm if dense.clip_scope == "all" else 0.0,
        )

    def predictor(self, layout: Layout, mesh: Mesh, *, room: Mapping[str, float]) -> Predictor:
        """Builds the program that predicts with the weights of a run, without any optimizer.

        Args:
            room: of each stack's exchange; see `Lookup`.
        """
        return Predictor(
            self.model(),
            embedding.Lookup(layout, mesh, room),
            parents=self.parents,
            learns_task_weights=self.learns_task_weights,
        )

    def weights_shape(self, layout: Layout) -> steps.Weights:
        """Returns the shapes of the weights that predict, without any device."""
        return steps.weights_shape(
            self.model(), layout, learns_task_weights=self.learns_task_weights
        )

    # Length, batches and their room

    def run_schedule(self, rows: int) -> RunSchedule:
        """Returns the steps at which a run on `rows` examples evaluates, saves and logs."""
        scale = ("batch_size", "steps_per_execution", "num_steps", "num_epochs", "log_every_steps")
        return run_schedule.make_run_schedule(
            rows=rows,
            **{field: self.config[field] for field in scale},
            eval_every_steps=self.config.eval.every_steps,
            save_every_steps=self.config.checkpoint.every_steps,
            valid=self.config.data.valid,
            order=self.config.data.order,
        )

    def pack(self, split: Split) -> Split:
        """Returns a training split in packs if it has requests and a loss compares their examples.

        See `batches.packs`.
        """
        if not self.has_request_loss:
            return split
        pack = packing.group_size(self.config.batch_size, self.config.data.shards)
        return pack_requests(split, pack, self.config.seed)

    def check_requests(self, split: Split) -> None:
        """Checks that a training split has the requests that losses compare.

        Args:
            split: see `pack`.

        Raises:
            InputError: it has none, or its packs are smaller than MIN_PACK.
        """
        losses = to_plain(self.config.task_losses)
        batch_size, shards = self.config.batch_size, self.config.data.shards
        for task in task_losses.request_tasks(losses):
            if not split.pack:
                name = task_losses.loss_name(losses[task])
                raise InputError(
                    f"task_losses.{task}: {name!r} must have requests to compare the examples of:"
                    f" found none in {split.path}. Set features.group and prepare the data again,"
                    " without data.direct."
                )
            if split.pack < MIN_PACK:
                share = max(1, round(batch_size / shards / _EVEN_SHARE)) * _EVEN_SHARE
                raise InputError(
                    f"batch_size: batch_size / data.shards must have a divisor from {MIN_PACK} to"
                    f" {MAX_GROUP}, so that the loss of task_losses.{task} can compare the examples"
                    f" of a pack: found batch_size={batch_size}, data.shards={shards}, packs of"
                    f" {split.pack}. Set batch_size={share * shards}."
                )

    def list_room(self, split: Split, steps: int) -> ListRoom:
        """Returns the room for the packed lists of a run's first `steps` of a stored split."""
        fields = ("shards", "window_blocks", "order", "list_slack", "on_overflow")
        return list_room(
            split,
            self.layout(),
            batch_size=self.config.batch_size,
            steps=steps,
            seed=self.config.seed,
            **{name: self.config.data[name] for name in fields},
        )

    def plan_list_room(
        self, split: Split | None, list_lengths: Mapping[str, Any], report: Report
    ) -> ListRoom:
        """Returns the room for packed lists that a run allocates, and reports it.

        Args:
            split: the stored training split. None: there is no store, and the room is estimated.
            list_lengths: of a sample; see `room.estimated_room`.
        """
        data = self.config.data
        if split is not None:
            packed = self.pack(split)
            lists = self.list_room(packed, self.run_schedule(packed.rows).num_steps)
            report_room(lists, report)
            return lists
        lists = estimated_room(
            self.layout(),
            {"list_lengths": list_lengths},
            batch_size=self.config.batch_size,
            shards=data.shards,
            list_slack=data.list_slack,
            has_requests=self.has_request_loss,
        )
        for name, ids in lists.capacities.items():
            report(
                f"Packed lists of {name}: capacity {ids:,} ids per {lists.group} examples,"
                f" estimated from a sample: the mean plus {data.list_slack:g} standard deviations."
                " Training measures the largest group in its store"
            )
        return lists

    def workload(self, lists: ListRoom) -> Workload:
        """Builds the input of `placement`."""
        section = self.config.embedding
        single = meshes.make_mesh(devices=1)
        return Workload(
            dim_of=self.dims,
            step_spec=self.step_spec(self.layout(), single, num_steps=1, room={}),
            placement=section.placement,
            placements=self.placements,
            slack=section.exchange_slack,
            capacity=section.exchange_capacity,
            batch_size=self.config.batch_size,
            steps_per_execution=self.config.steps_per_execution,
            seed=self.config.seed,
            lists=lists,
        )

    # Variants of the config

    def resized(self, batch_size: int, schema: Schema | None = None) -> "Builder":
        """Returns the builder of a run with another batch size. It is not checked.

        Args:
            schema: with tables of other sizes. None: the same schema.
        """
        config = self.config.copy_and_resolve_references()
        config.batch_size = batch_size
        return Builder(config, schema or self.schema)

    def without_evaluation(self) -> "Builder":
        """Returns the builder of a run that evaluates nothing."""
        config = self.config.copy_and_resolve_references()
        config.data.valid = ""
        config.eval.early_stopping_patience = config.eval.reduce_lr_patience = 0
        return dataclasses.replace(self, config=config)

    # Checks before data is prepared

    def check_names(self, *, traces: bool = False) -> None:
        """Checks names of tasks, tables and parameters, and counts, against the schema.

        Needs no data, and builds no step. Only names of parameters are known to a model alone: it
        is traced if `optim.dense.lr_multipliers` has any.

        Args:
            traces: trace the model anyway, for its own rules on dimensions and features.

        Raises:
            InputError: naming the field.
        """
        dims = self.dims
        self._table_values  # noqa: B018  raises
        models.check(tasks=len(self.schema.tasks), **self.model_fields)
        task_losses.select_losses(to_plain(self.config.task_losses), self.schema.tasks)
        self.watched_metric(self.config.features.get("group", ""))
        self.base_rates(None)
        self._by_table("embedding.placements", self.config.embedding.placements)
        multipliers = to_plain(self.config.optim.dense.lr_multipliers)
        if traces or multipliers:
            shapes = self.weights_shape(layouts.layout(self.schema, dims))
            optim.match_multipliers(shapes.params, multipliers)

    def check_fields_by_feature(self) -> None:
        """Checks names of features in the model's `fields_by_feature` of a new run.

        A run that resumes or inherits its model may have names of features that are gone. A feature
        that `features.skip` names need not be there.

        Raises:
            InputError: naming the field, with the nearest feature.
        """
        features = [f.name for f in self.schema.categorical] + [f.name for f in self.schema.ragged]
        skipped = self.config.features.get("skip", ())
        patterns = [skipped] if isinstance(skipped, str) else list(skipped)
        module = find_module(self.config.model.name)
        for field in getattr(module, "fields_by_feature", ()):
            for name in self.config.model[field]:
                if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                    validate.check_choice(f"model.{field}", name, features)


def _typed(kind: Any, section: ConfigDict) -> Any:
    """Returns a section as its dataclass. The config of an older run is not checked again."""
    return kind(**{field.name: section[field.name] for field in dataclasses.fields(kind)})


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
