"""Parts of a run, built once from its config: data, programs, checkpoints, monitor."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

from jaxrank import config as configs
from jaxrank import config_files, models, native, opening
from jaxrank import mesh as meshes
from jaxrank.base_rates import BaseRates, short_summary
from jaxrank.build import Builder
from jaxrank.checkpoints.manager import Checkpoints, quieten_libraries
from jaxrank.checkpoints.record import Metric
from jaxrank.data.batches import packing, packs, room, workers
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.data.batches.room import Room
from jaxrank.data.statistics.report import unscaled
from jaxrank.data.store.reader import Store
from jaxrank.data.store.split import Split
from jaxrank.embedding import check_row_shards
from jaxrank.errors import InputError
from jaxrank.evaluation import days
from jaxrank.evaluation import score as scoring
from jaxrank.evaluation.columns import check_column, check_column_name
from jaxrank.evaluation.model_view import check_features
from jaxrank.evaluation.requests import RequestSpec, request_spec
from jaxrank.features import MAX_GROUP, Schema
from jaxrank.layout import Layout, ReplicatedRows
from jaxrank.metrics.early_stopping import Monitor, make_monitor, monitored_tasks
from jaxrank.metrics.registry import check_means, metric_named
from jaxrank.placement import decide
from jaxrank.program import BatchShape, CompiledSteps, check_batch
from jaxrank.report import Report, format_bytes
from jaxrank.run_schedule import NEXT_DAY, RunSchedule
from jaxrank.runtime import processes, threads
from jaxrank.step import TrainState, model_inputs
from jaxrank.telemetry.loss_spikes import LossSpikeDetector
from jaxrank.workdir import files, lock

# Smaller groups of packed lists are mostly padding.
_SMALL_GROUP = 32
_MORE_EPOCHS = 1.05  # ratio to the epochs of the config from which on the rounding is reported
_AUTOMATIC = -1  # value of data.num_workers
_MAX_STEPS = 2**30
_LOOKED_AT = 64  # blocks that are searched for labels of a task with a parent

# Fields of config.data that select the data. The others decide how it is read.
_NOT_OF_BATCHES = ("store", "direct", "compression", "train", "valid")


@dataclasses.dataclass
class History:
    """History of a run, which a checkpoint stores beside the state."""

    monitor: Monitor
    day_scores: days.DayScores
    spikes: LossSpikeDetector

    def to_state(self) -> dict[str, Any]:
        """Converts the history to JSON for a checkpoint."""
        return {
            "monitor": self.monitor.to_state(),
            "days": self.day_scores.to_state(),
            "spikes": self.spikes.to_state(),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], new: "History", report: Report) -> "History":
        """Restores a history from a checkpoint, with the settings of `new`.

        Reports if a new metric or split makes earlier evaluations incomparable.
        """
        monitor = Monitor.from_state(state["monitor"], new.monitor)
        if monitor is new.monitor:
            report(
                f"Evaluations so far were by {state['monitor']['measures']}, from now on by"
                f" {monitor.measures}: the best checkpoint, eval.early_stopping_patience and"
                " eval.reduce_lr_patience start over"
            )
        spikes = LossSpikeDetector.from_state(state["spikes"], new.spikes.limit)
        return cls(monitor, days.DayScores.from_state(state["days"]), spikes)


@dataclasses.dataclass
class Run:
    """All parts of a run.

    Only `batches`, `history` and `checkpoints` change with its steps. `start` and `save` keep them
    consistent with the state.

    builder: made the parts, from the config with a value in every field.
    recent_batches: for `batch_statistics`.
    base_rates: base rates that a new run starts from.
    has_base_rates: whether the base rates come from statistics of the labels.
    requests: how requests are scored.
    untrained: tasks that the loss ignores; see `Builder.untrained`.
    losses: see `Builder.losses`.
    unscaled: dense features with large numbers, see `data.statistics.report.unscaled`.
    """

    builder: Builder
    directory: Path
    steps_per_execution: int
    eval_batch_size: int
    save_every_seconds: float
    run_schedule: RunSchedule
    store: Store
    program: CompiledSteps
    hot: dict[str, ReplicatedRows]
    train_split: Split
    batches: TrainBatches
    recent_batches: TrainBatches
    history: History
    checkpoints: Checkpoints
    base_rates: BaseRates
    has_base_rates: bool
    requests: RequestSpec
    untrained: tuple[str, ...]
    losses: Mapping[str, str]
    unscaled: tuple[str, ...] = ()

    @property
    def config(self) -> ConfigDict:
        """The whole config, to store it."""
        return self.builder.config

    @property
    def schema(self) -> Schema:
        return self.program.step_spec.embedding.layout.schema

    def open_split(self, name: str) -> Split:
        """Opens a split to evaluate."""
        return (
            days.open_day(self.store, name)
            if self.run_schedule.next_days
            else self.store.split(name)
        )

    def first_state(self, report: Report) -> TrainState:
        """Returns the initial state of a run, with its base rates."""
        if not self.has_base_rates:
            why = (
                "has no statistics of labels, because it is read directly"
                if not self.train_split.has_statistics
                else "was prepared by a version that did not count base rates; prepare it again"
            )
            report(
                f"{self.train_split.path}: {why}. Outputs without model.initial_bias start at 0."
            )
        report(f"Initial bias: {short_summary(self.schema.tasks, self.base_rates)}")
        return self.program.init(self.base_rates)

    def start(
        self,
        new: Callable[[], TrainState],
        *,
        allow_config_change: bool,
        allow_older_checkpoint: bool,
        report: Report,
    ) -> TrainState:
        """Returns the state to continue from: the newest checkpoint, or else the result of `new`.

        Raises:
            InputError: the checkpoint is damaged, or was trained with other features, another model
                or other data.
        """
        step = self.checkpoints.step()
        if step is None:
            return new()
        report(f"Resuming after step {step}")
        if allow_older_checkpoint:
            step, state, record = self._newest_whole(step, report)
        else:
            state, record = self._restored(step)
        data = record["data"]
        if data["fingerprint"] != self.train_split.fingerprint and not allow_config_change:
            raise InputError(
                f"{self.train_split.path}: must be the data that the run in {self.directory} was"
                " trained on so far: found other blocks. Use another --workdir, or"
                " --allow-config-change to continue with this data."
            )
        self.batches.seek(step)
        self.history = History.from_state(record, self.history, report)
        return state

    def save(
        self, step: int, state: TrainState, metric: float | None, worse: Iterable[str] = ()
    ) -> None:
        """Saves a checkpoint at `step`.

        Args:
            worse: tasks that are worse than the best constant.

        Raises:
            RunError: the checkpoint cannot be written.
        """
        if metric is not None and math.isnan(metric):
            # Such as an AUC of equal labels. The checkpoint is then never the best one.
            metric = None
        data = {"fingerprint": self.train_split.fingerprint}
        record = {
            "data": data,
            "untrained": list(self.untrained),
            "worse_than_constant": list(worse),
            **self.history.to_state(),
        }
        monitor = self.history.monitor
        measured = Metric(metric, monitor.measures, monitor.higher_is_better)
        self.checkpoints.save(step, state, record, measured)

    def _restored(self, step: int) -> tuple[TrainState, dict[str, Any]]:
        program = self.program
        return self.checkpoints.restore(
            step, program.blank(), program.state_shape, program.state_sharding
        )

    def _newest_whole(self, newest: int, report: Report) -> tuple[int, TrainState, dict[str, Any]]:
        """Restores the newest undamaged checkpoint and moves later ones to WORKDIR/damaged.

        Raises:
            InputError: every checkpoint is damaged. The error describes the newest one.
        """
        damaged: list[int] = []
        first: InputError | None = None
        step: int | None = newest
        while step is not None:
            try:
                state, record = self._restored(step)
            except InputError as error:
                # Only the text, because the exception keeps the restored arrays alive.
                first = first or InputError(str(error))
                damaged.append(step)
                step = self.checkpoints.older(step)
                continue
            for number in damaged:
                moved = self.checkpoints.move_to_damaged(number)
                report(f"Checkpoint {number} is damaged: moved to {moved}")
            if damaged:
                report(f"{first}\nResuming after step {step} instead")
            return step, state, record
        assert first is not None
        raise first


def build(
    config: ConfigDict,
    directory: Path,
    report: Report,
    *,
    inherits_store: bool = False,
    inherits_names: bool = False,
    num_steps: int = 0,
) -> Run:
    """Builds everything that `train` needs, without running a step.

    Args:
        inherits_store: see `inherits` of `opening.locate`.
        inherits_names: whether the model's `fields_by_feature` are from an older run, which may
            have had features that this data lacks.
        num_steps: last step of a run without evaluation, for more steps than in the config with the
            same shapes. 0: the last step of the config.

    Raises:
        InputError: the config does not fit the data or the machine.
    """
    quieten_libraries()
    mesh = meshes.make_mesh(**config.mesh)
    processes.check_devices(mesh)
    check_means()
    check_row_shards(mesh.shape[meshes.SHARD])
    data = open_data(
        config, directory, report, inherits_store=inherits_store, inherits_names=inherits_names
    )
    builder = data.builder.without_evaluation() if num_steps else data.builder
    config = builder.config
    run_schedule = builder.run_schedule(data.packed.rows)
    room_steps = run_schedule.num_steps if num_steps else 0
    if num_steps:
        run_schedule = run_schedule._replace(num_steps=num_steps)
    monitor = _open_monitor(builder, data, report)
    for task in builder.untrained():
        report(f"The weight of {task} in task_weights is 0: this task is not trained")
    _report_epochs(config.num_epochs, run_schedule, data.packed.rows, config.batch_size, report)
    steps = room_steps or run_schedule.num_steps
    placed, room_of_lists = _place_tables(builder, data, mesh, directory, steps, report)
    batches, recent_batches = _open_batches(
        builder.data,
        data.packed,
        placed.layout,
        steps_per_execution=config.steps_per_execution,
        batch_size=config.batch_size,
        seed=config.seed,
        num_steps=run_schedule.num_steps,
        room_steps=room_steps,
        room=room_of_lists,
    )
    _report_batches(batches, config.batch_size, builder.data, report)
    if config.data.valid == NEXT_DAY:
        run_schedule = _schedule_days(builder, data, batches.first_steps, run_schedule)
    step_spec = builder.step_spec(
        placed.layout, mesh, num_steps=run_schedule.num_steps, room=placed.room
    )
    names = [task.name for task in data.store.schema.tasks]
    _check_parents(config_files.to_plain(config.model.parents), data.split, names)
    sizes = (config.batch_size, batches.group, batches.capacities)
    program = CompiledSteps(step_spec, mesh, BatchShape(*sizes, batches.has_requests))
    _check_room(program)
    labels = _label_statistics(data.split, config.data.order, report)
    return Run(
        builder=builder,
        directory=directory,
        steps_per_execution=config.steps_per_execution,
        eval_batch_size=config.eval.batch_size,
        save_every_seconds=60 * config.checkpoint.every_minutes,
        run_schedule=run_schedule,
        store=data.store,
        program=program,
        batches=batches,
        recent_batches=recent_batches,
        hot=placed.hot,
        train_split=data.split,
        history=History(monitor, days.DayScores(), LossSpikeDetector(config.watch.loss_spike)),
        checkpoints=Checkpoints(
            directory,
            keep=config.checkpoint.keep,
            keep_every=config.checkpoint.keep_every_steps,
        ),
        base_rates=builder.base_rates(labels),
        has_base_rates=labels is not None,
        requests=data.requests,
        untrained=builder.untrained(scoring.unlabelled_tasks(data.split)),
        losses=builder.losses,
        unscaled=_unscaled(data),
    )


@contextlib.contextmanager
def build_endless(
    config: ConfigDict,
    directory: Path,
    report: Report,
    *,
    inherits_store: bool = False,
    inherits_names: bool = False,
) -> Iterator[Run]:
    """Builds a run whose batches never end, to measure it. It saves no checkpoints. See `build`."""
    num_steps = _MAX_STEPS // config.steps_per_execution * config.steps_per_execution
    run = build(
        config,
        directory,
        report,
        inherits_store=inherits_store,
        inherits_names=inherits_names,
        num_steps=num_steps,
    )
    try:
        run.checkpoints.close()
        yield run
    finally:
        run.batches.close()


@contextlib.contextmanager
def build_measured(config: ConfigDict, workdir: str | Path, report: Report) -> Iterator[Run]:
    """Builds the endless run that `train` would run, without evaluation.

    Changes nothing of a run in `workdir`, and no other run uses it at the same time.

    Raises:
        InputError: see `build`, or another run uses the workdir.
    """
    directory = files.directory(workdir)
    configs.check(config)
    with lock.locked(directory):
        inherits_names = not opening.names_features(config)
        config = opening.inherit(config, directory)
        with build_endless(
            config, directory, report, inherits_store=True, inherits_names=inherits_names
        ) as run:
            yield run


@dataclasses.dataclass(frozen=True)
class TrainingData:
    """The data that a run is trained on, and how it is scored.

    builder: of the parts that fit the data.
    split, valid: the training split, and the validation split. None: it has none of its own.
    packed: `split` in packs, if a loss compares the examples of requests.
    requests: how requests are scored.
    """

    builder: Builder
    store: Store
    split: Split
    valid: Split | None
    packed: Split
    requests: RequestSpec


def open_data(
    config: ConfigDict,
    directory: Path,
    report: Report,
    *,
    inherits_store: bool,
    inherits_names: bool = False,
) -> TrainingData:
    """Opens the data of a run, prepared first if it is absent; see `opening.open_data`.

    Args:
        inherits_store: see `inherits` of `opening.locate`.
        inherits_names: see `build`.

    Raises:
        InputError: the config does not fit the data.
    """
    check = functools.partial(
        _check_files_and_columns,
        is_new=not files.has_checkpoint(directory),
        checks_features=not inherits_names,
    )
    opened = opening.open_data(config, directory, report, inherits=inherits_store, check=check)
    builder, store, split = opened.builder, opened.store, opened.split
    assert store is not None
    assert split is not None
    requests = request_spec(store, builder.eval.top_k, builder.ranked)
    packed = builder.pack(split)
    builder.check_requests(packed)
    packs.report_packs(packed, report)
    return TrainingData(builder, store, split, opened.valid, packed, requests)


def _open_monitor(builder: Builder, data: TrainingData, report: Report) -> Monitor:
    """Checks that the data can be trained and evaluated on, and makes the monitor.

    Raises:
        InputError: labels are missing, or `eval.metric` is undefined.
    """
    split, section, valid = data.split, builder.eval, builder.data.valid
    evaluated = data.valid or split
    if valid == NEXT_DAY:  # these days belong to the training split, or follow it
        evaluated = data.store.split(builder.data.train.partition("/")[0], "data.valid")
    text = f"{split.fingerprint} {evaluated.fingerprint} {data.store.schema}"
    processes.check_same(f"the data in {data.store.path}", text)
    _check_labels(split, report)
    if section.cluster:
        check_column(data.store, evaluated, section.cluster, "eval.cluster")
    ranked = builder.ranked_metrics(data.requests.column)
    watched = builder.watched_metric(data.requests.column)
    trained = builder.trained_tasks()
    if valid:
        metric = watched.rpartition("/")[2]
        for task in monitored_tasks(trained, watched, ranked):
            _check_metric(section, f"{task}/{metric}", split, evaluated)
        _report_undefined(evaluated, report)
    others = ("every_steps", "batch_size", "cluster", "top_k")
    settings = {k: v for k, v in dataclasses.asdict(section).items() if k not in others}
    of_split = f"{evaluated.name}, {evaluated.fingerprint}" if valid else ""
    return make_monitor(
        trained,
        evaluated_on=NEXT_DAY if valid == NEXT_DAY else of_split,
        ranked=ranked,
        **settings | {"metric": watched},
    )


def _place_tables(
    builder: Builder,
    data: TrainingData,
    mesh: Mesh,
    directory: Path,
    steps: int,
    report: Report,
) -> tuple[decide.Placement, Room | None]:
    """Places the tables of a run, and measures the room for lists of its first `steps`."""
    schema, config = data.store.schema, builder.config
    group = packing.group_size(config.batch_size, config.data.shards)
    check_batch("batch_size", config.batch_size, group, mesh.size)
    kept = _kept_placement(directory, data.store)
    lists = builder.list_room(data.packed, steps)
    placed = decide.decide(
        data.split,
        schema,
        mesh,
        kept,
        dim_of=builder.dims,
        placement=config.embedding.placement,
        placements=builder.placements,
        make_workload=functools.partial(builder.workload, lists),
    )
    for line in placed.messages:
        report(line)
    return placed, lists.measured


def _schedule_days(
    builder: Builder, data: TrainingData, first_steps: list[int], run_schedule: RunSchedule
) -> RunSchedule:
    """Returns the schedule with the days that progressive validation evaluates.

    Args:
        first_steps: see `TrainBatches.first_steps`.
    """
    chosen = days.plan_evaluations(
        data.store,
        data.packed,
        first_steps,
        train=builder.data.train,
        num_steps=run_schedule.num_steps,
        batch_size=builder.config.batch_size,
        steps_per_execution=builder.config.steps_per_execution,
    )
    return run_schedule._replace(next_days=chosen)


def _open_batches(
    data: configs.Data,
    split: Split,
    layout: Layout,
    *,
    steps_per_execution: int,
    **limits: Any,
) -> tuple[TrainBatches, TrainBatches]:
    """Opens `batches` and `recent_batches` of a run. limits: see `make_batches`."""
    batches = make_batches(data, split, layout, steps_per_execution=steps_per_execution, **limits)
    # Read between steps by the training process itself.
    beside = dataclasses.replace(data, num_workers=0, prefetch_batches=0)
    return batches, make_batches(beside, split, layout, steps_per_execution=1, **limits)


def _label_statistics(split: Split, order: str, report: Report) -> Mapping[str, Any] | None:
    """Returns the statistics of the labels that training starts with; None if they are absent.

    With days in order they are statistics of the first day, because later days are not known yet.
    A task without weight on that day has statistics of its first day with weight, as reported.
    """
    if not split.has_statistics:
        return None
    if order != "days":
        return split.statistics if "traffic" in split.statistics else None
    by_day = split.day_statistics
    if not all("traffic" in statistics for statistics in by_day):
        return None
    first = {part: dict(by_day[0][part]) for part in ("tasks", "traffic")}
    for task in by_day[0]["traffic"]:
        weights = (statistics["traffic"][task]["weight"] for statistics in by_day)
        day = next((i for i, weight in enumerate(weights) if weight > 0), 0)
        if day:
            first = {part: first[part] | {task: by_day[day][part][task]} for part in first}
            report(
                f"No label of {task} has a weight on {split.days[0]}: its initial bias is that of"
                f" {split.days[day]}"
            )
    return first


def _unscaled(data: TrainingData) -> tuple[str, ...]:
    """Returns the dense features with large numbers, as far as the store has statistics."""
    if not data.split.has_statistics:
        return ()
    return tuple(unscaled(data.store.schema.dense, data.split.statistics))


def _check_room(program: CompiledSteps) -> None:
    """Rejects tables that do not fit the memory of this machine, if its CPU is the device.

    XLA on CPU waits forever if a program does not fit the memory. Other devices raise an error.
    """
    if meshes.platform(program.mesh) != "cpu":
        return
    per_device = meshes.bytes_on_device(program.state_shape, program.state_sharding)
    needed, total = per_device * len(program.mesh.local_devices), meshes.host_memory()
    if needed > total:
        raise InputError(
            f"tables and layers with their optimizers need {format_bytes(needed)}, which must fit"
            f" the memory of this machine: it has {format_bytes(total)}. `jaxrank plan` shows which"
            " tables are large."
        )


def _report_batches(
    batches: TrainBatches, batch_size: int, data: configs.Data, report: Report
) -> None:
    """Reports room for lists, worker processes, and groups that are small."""
    room.report_room(batches.list_room, report)
    if data.num_workers == _AUTOMATIC and batches.num_workers:
        report(f"{batches.num_workers} processes make batches (data.num_workers)")
    if batches.capacities and batches.group < _SMALL_GROUP:
        report(
            f"batch_size / data.shards = {batch_size // data.shards} has no divisor"
            f" from {_SMALL_GROUP} to {MAX_GROUP}, so lists are packed {batches.group} examples at"
            " a time, with much padding. A larger power of two is best."
        )


def _check_files_and_columns(builder: Builder, *, is_new: bool, checks_features: bool) -> None:
    """Checks what a run reads beside its features, and files of vectors and scales of a new run.

    Raises:
        InputError: see `Builder.open_table_vectors` and `Builder.check_fields_by_feature`.
    """
    if cluster := builder.eval.cluster:
        check_column_name(builder.schema, builder.features, cluster, "eval.cluster")
    if is_new:
        if checks_features:
            builder.check_fields_by_feature()
        builder.open_table_vectors()


def make_batches(
    data: configs.Data,
    split: Split,
    layout: Layout,
    *,
    batch_size: int,
    steps_per_execution: int,
    seed: int,
    num_steps: int,
    room_steps: int = 0,
    room: Room | None = None,
    process: tuple[int, int] | None = None,
) -> TrainBatches:
    """Opens this process's share of the training batches of a split, up to `num_steps`.

    Args:
        data: the config's section.
        process: index of the process and number of processes. None: those of this run.

    Raises:
        InputError: see `TrainBatches`.
    """
    settings = {k: v for k, v in dataclasses.asdict(data).items() if k not in _NOT_OF_BATCHES}
    if settings["num_workers"] == _AUTOMATIC:
        settings["num_workers"] = _suitable_workers(settings["shards"])
    return TrainBatches(
        split,
        layout,
        batch_size=batch_size,
        steps_per_execution=steps_per_execution,
        seed=seed,
        num_steps=num_steps,
        room_steps=room_steps,
        room=room,
        process=process or (jax.process_index(), jax.process_count()),
        **settings,
    )


def _suitable_workers(shards: int) -> int:
    """Returns the number of input workers for the devices of this process."""
    devices = [d for d in jax.local_devices() if d.platform != "cpu"]
    cores = threads.available_cores()
    share = shards // jax.process_count()
    return workers.suitable_workers(share, cores=cores, accelerators=len(devices))


def _kept_placement(directory: Path, store: Store) -> dict[str, ReplicatedRows] | None:
    """Returns the placement of the tables of an existing run, or None for a new one.

    Raises:
        InputError: the run was trained with other features or vocabularies.
    """
    if not files.has_checkpoint(directory):
        return None
    schema = files.load_schema(directory)
    if schema != store.schema:
        check_features(schema, store)
        before, after = (
            [f.name for part in (s.dense, s.categorical, s.ragged) for f in part]
            for s in (schema, store.schema)
        )
        more = [name for name in after if name not in before]
        raise InputError(
            f"{store.path}: its features and vocabularies must be those that the run in"
            f" {directory} started with: found"
            f" {f'also {more}' if more else 'vocabularies that have changed since'}. Use another"
            " --workdir."
        )
    return files.load_placement(directory)


def _report_epochs(
    num_epochs: float, run_schedule: RunSchedule, rows: int, batch_size: int, report: Report
) -> None:
    """Reports a run that is much longer than `num_epochs`, because steps are whole batches.

    A benchmark is longer than that, and says nothing.
    """
    epochs = run_schedule.num_steps * batch_size / rows
    is_rounded = run_schedule.num_steps <= math.ceil(num_epochs * rows / batch_size)
    if num_epochs and is_rounded and epochs > _MORE_EPOCHS * num_epochs:
        report(
            f"num_epochs={num_epochs} is rounded up to {epochs:.2f} epochs of {rows:,} examples:"
            f" a step takes {batch_size:,}. Lower batch_size to come closer"
        )


def _check_labels(split: Split, report: Report) -> None:
    """Rejects data without any label, and reports tasks whose labels are all equal."""
    scoring.check_labelled(split)
    _check_weights(split)
    if not split.has_statistics:
        return
    unlabelled = scoring.unlabelled_tasks(split)
    for name, task in split.statistics["tasks"].items():
        known, positives = task["known"], task["positives"]
        if name in unlabelled:
            report(f"{unlabelled[name]}: this task is not trained")
        elif task.get("kind", "binary") == "binary":
            if positives in (0, known):
                label = 1 if positives else 0
                report(f"All {known:,} labels of {name} are {label} in {split.path}")
        elif task["min"] == task["max"]:
            report(f"All {known:,} labels of {name} are {task['min']:g} in {split.path}")


def _check_weights(split: Split) -> None:
    """Rejects data in which no example with a known label has a weight above 0."""
    if not _has_weights(split):
        if not split.has_statistics:
            raise InputError(
                f"{split.path}: must have labels to train on: found none that is known and has a"
                f" weight above 0, in {split.rows:,} examples."
            )
        raise InputError(
            f"{split.path}: must have weights above 0 to train on: found 0 for all known labels of"
            f" {split.rows:,} examples."
        )


def _has_weights(split: Split) -> bool:
    """Returns True if an example with a known label has a weight above 0."""
    for index in range(len(split.block_rows)):  # in most data the first block ends the search
        block = split.read_block(index)
        known = ~np.isnan(block.labels)
        if (known if block.weights is None else block.weights[known] > 0).any():
            return True
    return False


def _report_undefined(split: Split, report: Report) -> None:
    """Reports the metrics that the labels of an evaluated split leave undefined."""
    if not split.has_statistics:
        return
    tasks, unlabelled = split.statistics["tasks"], scoring.unlabelled_tasks(split)
    for name, task in tasks.items():
        known, positives = task["known"], task["positives"]
        if name in unlabelled:
            report(f"{unlabelled[name]}: its metrics are undefined")
        elif task.get("kind", "binary") == "binary" and positives in (0, known):
            label = 1 if positives else 0
            report(
                f"All {known:,} labels of {name} are {label} in {split.path}: its AUC and"
                " normalised entropy are undefined"
            )
    if len(unlabelled) < len(tasks) and not _has_weights(split):
        report(f"All weights of known labels are 0 in {split.path}: its metrics are undefined")


def _check_metric(section: configs.Eval, name: str, trained_on: Split, split: Split) -> None:
    """Rejects a watched metric of a task without training labels, or undefined in the split."""
    if not (section.metric or section.early_stopping_patience or section.reduce_lr_patience):
        return
    task, _, metric = name.rpartition("/")
    if reason := scoring.unlabelled_tasks(trained_on).get(task):
        raise InputError(
            f"eval.metric: must be of a task that is trained: found {name}. {reason}. Choose"
            " another metric."
        )
    if not split.has_statistics:
        return
    labels = split.statistics["tasks"][task]
    known, positives = labels["known"], labels["positives"]
    is_equal, label = positives in (0, known), 1 if positives else 0
    if labels.get("kind", "binary") != "binary":
        is_equal, label = labels["min"] == labels["max"], labels["min"]
    actual = ""
    if not known:
        actual = "none that is known"
    elif is_equal and metric_named(metric).needs_unequal_labels:
        actual = f"{known:,} labels, all {label:g}"
    if actual:
        raise InputError(
            f"eval.metric: {name} must have labels that differ in split {split.name!r}, or it is"
            f" undefined: found {actual}. Choose another metric or split."
        )


def _check_parents(parents: Mapping[str, str], split: Split, names: list[str]) -> None:
    """Rejects labels from which a task with a parent cannot learn the joint probability."""
    if not parents or not split.has_statistics:
        return
    tasks = split.statistics["tasks"]
    for task, parent in parents.items():
        known, positives = tasks[task]["known"], tasks[parent]["positives"]
        if not known or not known <= positives < tasks[parent]["known"]:
            continue
        if not _has_label_without_parent(split, names.index(task), names.index(parent)):
            raise InputError(
                f"model.parents: labels of {task!r} must be known where {parent!r} is 0, and be 0"
                f" there, because {task!r} predicts both together: found {known:,} known labels in"
                f" {split.path}, where {parent!r} is positive {positives:,} times. Add these"
                " labels, or leave out the parent."
            )


def _has_label_without_parent(split: Split, task: int, parent: int) -> bool:
    """Returns True if the first blocks have a known label of a task whose parent is 0."""
    for index in range(min(_LOOKED_AT, len(split.block_rows))):
        labels = split.read_block(index).labels
        if (~np.isnan(labels[:, task]) & (labels[:, parent] == 0)).any():
            return True
    return False


def describe(run: Run, state: TrainState) -> str:
    """Describes model, tables and data as a short table, with notes on unusual settings."""
    step_spec = run.program.step_spec
    layout, schema, devices = step_spec.embedding.layout, run.schema, run.program.mesh.size
    parts = models.describe(state.params)
    layers = ", ".join(f"{name} {count:,}" for name, count in parts.items())
    in_tables = sum(stack.rows * stack.dim for stack in layout.stacks)
    stored = sum(x.nbytes for x in jax.tree.leaves(state.tables))
    flops = 3 * step_spec.model.flops(model_inputs(layout))
    table = {
        "model": f"{run.builder.model_name}, {sum(parts.values()):,} parameters: {layers}",
        "tables": f"{len(schema.tables)}, {in_tables:,} parameters, {format_bytes(stored)} with"
        " optimizer state",
        "features": f"{len(schema.dense)} dense, {len(schema.categorical)} categorical,"
        f" {len(schema.ragged)} ragged",
        "FLOPs": f"{flops:,} per example in matrix products, forward and backward",
        "examples": f"{run.train_split.rows:,}",
        "steps": f"{run.run_schedule.num_steps:,} of {run.program.shape.batch_size:,} examples",
        "devices": f"{devices} ({jax.default_backend()})",
    }
    monitor = run.history.monitor
    if monitor.measures:
        direction = "highest" if monitor.higher_is_better else "lowest"
        table["best"] = f"{direction} {monitor.task}/{monitor.metric}"
    lines = [f"{name:<11}{value}" for name, value in table.items()]
    if step_spec.embedding.is_on_cpu and not step_spec.embedding.is_native:
        lines.append(f"Table rows and layers are left to XLA, which is slower: {native.missing()}")
    if run.run_schedule.next_days:
        lines.append(
            f"{len(run.train_split.days)} days, one after another;"
            f" {len(run.run_schedule.next_days)}"
            " evaluations, each of a day that no step has seen"
        )
    if step_spec.embedding.l2_scope == "table":
        rows = sum(s.rows for s in layout.stacks)
        lines.append(
            f"embedding.l2_scope is table: every step reads and updates all {rows:,} rows, so its"
            " time grows with them"
        )
    return "\n".join(lines)
