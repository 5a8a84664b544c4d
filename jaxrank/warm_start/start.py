"""Starts a run from the checkpoint of an older one whose data, features or tables may differ.

Table rows and their optimizer state are matched by raw value, layers by the features that they
read. New rows and new inputs keep their initial values. The learning rate schedule, the position in
the data and early stopping restart.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrank.calibration.files import calibration_path
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.data.store.reader import Store
from jaxrank.data.store.same_values import same_values
from jaxrank.errors import InputError
from jaxrank.evaluation import evaluate
from jaxrank.features import PAD, Schema
from jaxrank.layout import Layout
from jaxrank.report import Report
from jaxrank.run import Run
from jaxrank.runtime import processes
from jaxrank.step import TrainState
from jaxrank.warm_start.layers import CarriedLayers, InputMap, carry_layers
from jaxrank.warm_start.pretrained import start_vectors
from jaxrank.warm_start.rows import carry_rows, plan_moves
from jaxrank.workdir import files

_MAX_REPORTED_TABLES = 20  # maximum number of tables that are reported one by one

Rows = dict[str, np.ndarray | str]  # by table: see `same_values`


class _Older(NamedTuple):
    """The older run.

    is_asked_for: True if its step was named.
    is_finished: True if the run has finished.
    """

    run: evaluate.SavedRun
    step: int
    layout: Layout
    weights: CheckpointReader
    training: CheckpointReader
    is_asked_for: bool
    is_finished: bool

    @property
    def name(self) -> str:
        return str(self.run.directory / "checkpoints" / str(self.step))

    @property
    def has_average(self) -> bool:
        return any(name.startswith("trained.") for name in self.training.names)

    def starting_weights(self, average_too: bool) -> tuple[CheckpointReader, str]:
        """Returns the arrays of the weights to start from, and the prefix of their names.

        If both runs have averaged weights, these are the trained weights, else those that predict.
        """
        if average_too and self.has_average:
            return self.training, "trained."
        return self.weights, ""


def start(new_run: Run, source: str, report: Report) -> TrainState:
    """Creates the first state of a run from the checkpoint `source`, and reports what was copied.

    Args:
        new_run: the run that starts.
        source: WORKDIR/checkpoints/STEP, or a workdir. The latter means its best checkpoint if that
            run stops early, and its newest one otherwise.
        report: receives the summary.

    Raises:
        InputError: the checkpoint is absent, damaged or has other tasks, or the vocabulary of a
            table is needed and absent.
    """
    older = _open(source)
    _check_tasks(older, new_run.schema)
    with processes.together():
        rows = _same_rows(older, new_run.store)
    copied = {name: row[row != PAD] for name, row in _copied(older, new_run, rows).items()}
    state = start_vectors(new_run, new_run.program.init(), report, copied)
    with processes.together():
        state, carried = _start_layers(state, older, new_run)
        state = _start_tables(state, older, new_run, rows)
    messages = [
        *_feature_changes(older, new_run),
        *_table_changes(older, new_run, rows),
        *_layer_changes(carried),
    ]
    before, after = older.run.builder.penalty, new_run.builder.penalty
    if before or after:
        change = "as before" if before == after else f"in place of {before or 'none'}"
        messages.append(f"L2 of vectors: {after or 'none'}, {change} (embedding.l2)")
    for task, bias in new_run.builder.initial_bias.items():
        messages.append(f"bias of {task}: {bias} (model.initial_bias)")
    if new_run.builder.has_table_vectors:
        messages.append("pre-trained vectors (embedding.init_from) stay in rows that are new")
    if calibration_path(older.run.directory, older.step).is_file():
        messages.append("its calibration is not copied, because training changes the predictions")
    if not older.is_asked_for and not older.is_finished:
        messages.insert(0, "that run has not finished, and no step of it was named")
    report("\n  ".join([f"Started from {older.name}:", *messages]))
    return state


def parse_source(source: str) -> tuple[Path, str]:
    """Returns the workdir and the step that `--init-from` names. The step may be empty.

    Raises:
        InputError: see `files.directory`.
    """
    path = files.directory(source)
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        return path.parent.parent, path.name
    return path, ""


def _open(source: str) -> _Older:
    path, choice = parse_source(source)
    run = evaluate.load_run(path)
    checkpoints = Checkpoints(path, read_only=True)
    step = checkpoints.step(choice or run.default_checkpoint)
    if step is None:
        raise InputError(
            f"--init-from: {path} must hold a checkpoint: found none. Wait until the run saves one."
        )
    saved = checkpoints.path / str(step)
    sums = checkpoints.saved_checksums(step)
    weights, training = (
        CheckpointReader(saved / part, sums[part]) for part in ("weights", "training")
    )
    finished = files.is_finished(path)
    parts = weights, training
    return _Older(run, step, run.layout(), *parts, bool(choice), finished)


def _check_tasks(older: _Older, schema: Schema) -> None:
    before, after = ([(t.name, t.kind) for t in s.tasks] for s in (older.layout.schema, schema))
    if before != after:
        raise InputError(
            f"--init-from: {older.name} must have the same tasks, {after}: found {before}."
        )


def _same_rows(older: _Older, store: Store) -> Rows:
    def open_old() -> Store:
        try:
            return older.run.data().open()
        except InputError as error:
            raise InputError(
                f"--init-from: {older.run.directory} must have the vocabularies of {store.path}, or"
                f" its own data must exist: {error}"
            ) from error

    before = {table.name: table for table in older.layout.schema.tables}
    return {
        table.name: same_values(before[table.name], table, store, open_old)
        for table in store.schema.tables
        if table.name in before
    }


def _start_layers(
    state: TrainState, older: _Older, new_run: Run
) -> tuple[TrainState, CarriedLayers]:
    step_spec = new_run.program.step_spec
    inputs = InputMap(older.run.builder.model(), older.layout, step_spec)
    stored, prefix = older.starting_weights(bool(step_spec.ema_decay))
    same_optimizer = older.run.builder.optimizers["dense"] == new_run.builder.optimizers["dense"]

    def read(name: str) -> np.ndarray:
        if name.startswith("opt_state."):
            return older.training.read(name)
        return stored.read(prefix + name)

    names = [n for n in older.training.names if n.startswith("opt_state.")]
    names += [n.removeprefix(prefix) for n in stored.names if n.startswith(prefix)]
    rates = {
        field: stored.read(f"{prefix}{field}")
        for field in ("bias", "scale")
        if f"{prefix}{field}" in stored
    }
    bias = rates.get("bias", jax.device_get(state.bias))
    rates["bias"] = new_run.builder.override_bias(bias)
    if not _same_model(older, new_run):
        names = []
    layers = {f: jax.device_get(getattr(state, f)) for f in ("params", "model_state", "opt_state")}
    carried = carry_layers(layers, inputs, names, read, same_optimizer=same_optimizer)
    steps = older.training.read("earlier") + older.training.read("step")
    # Moments that restart need their own step count for the bias correction. This does not hold
    # for runs with averaged weights: the average uses the same count and would forget its start.
    if (
        step_spec.embedding.row_optimizer.counts_steps
        and not _same_row_optimizer(older, new_run)
        and not state.average
    ):
        steps = np.zeros_like(steps)
    new_state = state._replace(
        **{field: _put(tree, getattr(state, field)) for field, tree in carried.layers.items()},
        earlier=_put(steps, state.earlier),
        **{field: _put(values, getattr(state, field)) for field, values in rates.items()},
    )
    if not state.average:
        return new_state, carried
    del layers["opt_state"]
    names = older.weights.names if _same_model(older, new_run) else []
    averaged = carry_layers(layers, inputs, names, older.weights.read, same_optimizer=False)
    average = {field: _put(tree, getattr(state, field)) for field, tree in averaged.layers.items()}
    for field in ("bias", "scale"):
        if field in older.weights:
            average[field] = _put(older.weights.read(field), getattr(state, field))
    bias = jax.device_get(average.get("bias", state.average.bias))
    average["bias"] = _put(new_run.builder.override_bias(bias), state.average.bias)
    return new_state._replace(average=state.average._replace(**average)), carried


def _put(values: Any, template: Any) -> Any:
    """Puts arrays of the host on the devices with the shardings of another tree."""
    return jax.tree.map(
        lambda value, array: jax.make_array_from_callback(
            array.shape, array.sharding, lambda index: np.asarray(value)[index]
        ),
        values,
        template,
    )


def _same_model(older: _Older, new_run: Run) -> bool:
    return older.run.builder.model_name == new_run.builder.model_name


def _same_row_optimizer(older: _Older, new_run: Run) -> bool:
    return older.run.builder.optimizers["tables"] == new_run.builder.optimizers["tables"]


def _start_tables(state: TrainState, older: _Older, new_run: Run, rows: Rows) -> TrainState:
    step_spec = new_run.program.step_spec
    mapped = {name: row for name, row in rows.items() if isinstance(row, np.ndarray)}
    moves = plan_moves(older.layout, step_spec.embedding.layout, mapped)
    stored, prefix = older.starting_weights(bool(step_spec.ema_decay))
    same_rule = _same_row_optimizer(older, new_run)
    tables, averages = dict(state.tables), dict(state.average.rows) if state.average else {}
    for stack, of_stack in moves.items():
        for part in step_spec.embedding.parts[stack]:
            if part is None:
                continue
            table = tables[part.name]
            slots = dict(table.slots)
            if same_rule:
                for slot, array in slots.items():
                    name = f"slots.{{}}.{slot}"
                    slots[slot] = carry_rows(array, part, of_stack, older.training, name)
            new = carry_rows(table.rows, part, of_stack, stored, f"{prefix}rows.{{}}")
            tables[part.name] = table._replace(rows=new, slots=slots)
            if averages:
                averages[part.name] = carry_rows(
                    averages[part.name], part, of_stack, older.weights, "rows.{}"
                )
    state = state._replace(tables=tables)
    return state._replace(average=state.average._replace(rows=averages)) if averages else state


def _feature_changes(older: _Older, new_run: Run) -> list[str]:
    before, after = (
        [f.name for part in (s.dense, s.categorical, s.ragged) for f in part]
        for s in (older.layout.schema, new_run.schema)
    )
    messages = []
    for kind, features, others in (("new", after, before), ("dropped", before, after)):
        names = [name for name in features if name not in others]
        if names:
            messages.append(f"{kind} features: {', '.join(names)}")
    old_dense = {f.name: f for f in older.layout.schema.dense}
    scaled = [f.name for f in new_run.schema.dense if old_dense.get(f.name, f) != f]
    if scaled:
        messages.append(
            f"dense features with another scale, to which layers must adapt: {', '.join(scaled)}"
        )
    return messages


def _dims(older: _Older, new_run: Run) -> list[dict[str, int]]:
    """Returns the dimension of each table of the older run and of the new one."""
    layouts = older.layout, new_run.program.step_spec.embedding.layout
    return [
        {name: stack.dim for stack in layout.stacks for name in stack.tables} for layout in layouts
    ]


def _copied(older: _Older, new_run: Run, rows: Rows) -> dict[str, np.ndarray]:
    """Returns `rows` of the tables whose rows are copied."""
    before, after = _dims(older, new_run)
    return {
        name: row
        for name, row in rows.items()
        if isinstance(row, np.ndarray) and before[name] == after[name]
    }


def _table_changes(older: _Older, new_run: Run, rows: Rows) -> list[str]:
    old_dims, new_dims = _dims(older, new_run)
    copied = _copied(older, new_run, rows)
    messages, carried = [], []
    total = np.zeros(3, np.int64)
    for table in new_run.schema.tables:
        if table.name not in copied:
            why = rows.get(table.name, "new table")
            if not isinstance(why, str):
                why = f"dim {old_dims[table.name]} -> {new_dims[table.name]}"
            messages.append(f"table {table.name}: {table.rows:,} rows reinitialised ({why})")
            continue
        row = copied[table.name]
        kept = int(np.count_nonzero(row != PAD))
        counts = kept, table.rows - kept, len(row) - kept
        total += counts
        if any(counts[1:]):
            carried.append(f"table {table.name}: {_row_counts(*counts)}")
    if len(carried) > _MAX_REPORTED_TABLES:
        more = f"{len(carried) - _MAX_REPORTED_TABLES} more tables with new or dropped rows"
        carried[_MAX_REPORTED_TABLES:] = [more]
    messages = [f"rows of tables by value: {_row_counts(*total)}", *carried, *messages]
    dropped = [t.name for t in older.layout.schema.tables if t.name not in new_dims]
    if dropped:
        messages.append(f"dropped tables: {', '.join(dropped)}")
    if not _same_row_optimizer(older, new_run):
        messages.append("state of the table optimizer reinitialised (another optimizer)")
    return messages


def _row_counts(kept: int, new: int, dropped: int) -> str:
    return f"{kept:,} copied, {new:,} new, {dropped:,} dropped"


def _layer_changes(carried: CarriedLayers) -> list[str]:
    messages = [
        f"layers: {len(carried.whole)} arrays copied, {len(carried.by_feature)} copied feature by"
        f" feature, {len(carried.new)} new{': ' if carried.new else ''}{', '.join(carried.new)}"
    ]
    if not carried.optimizer:
        messages.append("state of the layer optimizer reinitialised (another optimizer)")
    return messages
