"""A new run from the checkpoint of an older one whose data, features or tables may differ.

Rows of tables and what their optimizer knows go with the value that they stand for, layers with the
features that they read; what is new keeps its first values. The schedule of the rates, the place in
the data and what early stopping has seen begin anew.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

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
from jaxrank.warm_start.rows import carry_rows, plan_moves
from jaxrank.workdir import files

_MOST_TOLD = 20  # tables with a line of their own

Rows = dict[str, np.ndarray | str]  # by table: see `same_values`


class _Older(NamedTuple):
    """The run that is started from.

    is_asked_for: whether its step was named.
    is_finished: whether the run has come to its end.
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

    def of_trained(self, average_too: bool) -> tuple[CheckpointReader, str]:
        """Where the weights are to go on from: those that were trained, where the new run has an
        average too, and else those that predicted. Arrays, and what their names begin with."""
        if average_too and self.has_average:
            return self.training, "trained."
        return self.weights, ""


def start(job: Run, source: str, report: Report) -> TrainState:
    """The first state of a run, with what the checkpoint `source` has for it; tells what that is.

    Args:
        source: a workdir, whose checkpoint is that which its run would be judged by; or
            WORKDIR/checkpoints/STEP.

    Raises:
        InputError: there is no such checkpoint, it is damaged, it is of other tasks, or the
            vocabulary of a table is needed that is not there.
    """
    older = _open(source)
    _check_tasks(older, job.schema)
    with processes.together():
        rows = _same_rows(older, job.store)
    state = job.program.init()
    with processes.together():
        state, carried = _with_layers(state, older, job)
        state = _with_tables(state, older, job, rows)
    told = [*_features_told(older, job), *_tables_told(older, job, rows), *_layers_told(carried)]
    if not older.is_asked_for and not older.is_finished:
        told.insert(0, "that run has not come to its end, nor was a step of it named")
    report("\n  ".join([f"Started from {older.name}:", *told]))
    return state


def _open(source: str) -> _Older:
    path = files.directory(source)
    which = ""
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        path, which = path.parent.parent, path.name
    run = evaluate.load_run(path)
    checkpoints = Checkpoints(path, read_only=True)
    step = checkpoints.step(which or run.judged_by)
    if step is None:
        raise InputError(f"--init-from: {path} holds no checkpoint yet.")
    saved = checkpoints.path / str(step)
    sums = checkpoints.saved_checksums(step)
    weights, training = (
        CheckpointReader(saved / part, sums[part]) for part in ("weights", "training")
    )
    finished = files.is_finished(path)
    parts = weights, training
    return _Older(run, step, run.layout(), *parts, bool(which), finished)


def _check_tasks(older: _Older, schema: Schema) -> None:
    before, after = ([(t.name, t.kind) for t in s.tasks] for s in (older.layout.schema, schema))
    if before != after:
        raise InputError(
            f"--init-from: {older.name} must be of the same tasks, {after}: found {before}."
        )


def _same_rows(older: _Older, store: Store) -> Rows:
    def open_old() -> Store:
        try:
            return older.run.data().open()
        except InputError as error:
            raise InputError(
                f"--init-from: the vocabularies of {older.run.directory} are others than those of"
                f" {store.path}, and the data that they are in must be there: {error}"
            ) from error

    before = {table.name: table for table in older.layout.schema.tables}
    return {
        table.name: same_values(before[table.name], table, store, open_old)
        for table in store.schema.tables
        if table.name in before
    }


def _with_layers(state: TrainState, older: _Older, job: Run) -> tuple[TrainState, CarriedLayers]:
    step_spec = job.program.step_spec
    inputs = InputMap(older.run.model(), older.layout, step_spec)
    mine, prefix = older.of_trained(bool(step_spec.ema_decay))
    same_optimizer = older.run.optimizers["dense"] == job.optimizers["dense"]

    def read(name: str) -> np.ndarray:
        if name.startswith("opt_state."):
            return older.training.read(name)
        return mine.read(prefix + name)

    names = [n for n in older.training.names if n.startswith("opt_state.")]
    names += [n.removeprefix(prefix) for n in mine.names if n.startswith(prefix)]
    rates = {
        field: mine.read(f"{prefix}{field}")
        for field in ("bias", "scale")
        if f"{prefix}{field}" in mine
    }
    if not _same_model(older, job):
        names = []
    layers = {f: jax.device_get(getattr(state, f)) for f in ("params", "model_state", "opt_state")}
    carried = carry_layers(layers, inputs, names, read, same_optimizer=same_optimizer)
    steps = older.training.read("earlier") + older.training.read("step")
    # Moments that begin anew are corrected by steps of their own. Not where an average counts by
    # the same steps: it would forget at once what is carried over.
    if (
        step_spec.embedding.row_optimizer.counts_steps
        and not _same_row_optimizer(older, job)
        and not state.average
    ):
        steps = np.zeros_like(steps)
    found = state._replace(
        **{field: _put(tree, getattr(state, field)) for field, tree in carried.layers.items()},
        earlier=_put(steps, state.earlier),
        **{field: _put(values, getattr(state, field)) for field, values in rates.items()},
    )
    if not state.average:
        return found, carried
    del layers["opt_state"]
    names = older.weights.names if _same_model(older, job) else []
    averaged = carry_layers(layers, inputs, names, older.weights.read, same_optimizer=False)
    average = {field: _put(tree, getattr(state, field)) for field, tree in averaged.layers.items()}
    for field in ("bias", "scale"):
        if field in older.weights:
            average[field] = _put(older.weights.read(field), getattr(state, field))
    return found._replace(average=state.average._replace(**average)), carried


def _put(values: Any, like: Any) -> Any:
    """Arrays of the host where those of another tree lie."""
    return jax.tree.map(
        lambda value, array: jax.make_array_from_callback(
            array.shape, array.sharding, lambda index: np.asarray(value)[index]
        ),
        values,
        like,
    )


def _same_model(older: _Older, job: Run) -> bool:
    return older.run.model_name == job.model


def _same_row_optimizer(older: _Older, job: Run) -> bool:
    return older.run.optimizers["tables"] == job.optimizers["tables"]


def _with_tables(state: TrainState, older: _Older, job: Run, rows: Rows) -> TrainState:
    step_spec = job.program.step_spec
    mapped = {name: row for name, row in rows.items() if isinstance(row, np.ndarray)}
    moves = plan_moves(older.layout, step_spec.embedding.layout, mapped)
    mine, prefix = older.of_trained(bool(step_spec.ema_decay))
    same_rule = _same_row_optimizer(older, job)
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
            new = carry_rows(table.rows, part, of_stack, mine, f"{prefix}rows.{{}}")
            tables[part.name] = table._replace(rows=new, slots=slots)
            if averages:
                averages[part.name] = carry_rows(
                    averages[part.name], part, of_stack, older.weights, "rows.{}"
                )
    state = state._replace(tables=tables)
    return state._replace(average=state.average._replace(rows=averages)) if averages else state


def _features_told(older: _Older, job: Run) -> list[str]:
    before, after = (
        [f.name for part in (s.dense, s.categorical, s.ragged) for f in part]
        for s in (older.layout.schema, job.schema)
    )
    told = []
    for what, these, others in (("new", after, before), ("dropped", before, after)):
        names = [name for name in these if name not in others]
        if names:
            told.append(f"features that are {what}: {', '.join(names)}")
    was = {f.name: f for f in older.layout.schema.dense}
    scaled = [f.name for f in job.schema.dense if was.get(f.name, f) != f]
    if scaled:
        told.append(f"floats whose scale is another now, to which layers must adapt: {scaled}")
    return told


def _tables_told(older: _Older, job: Run, rows: Rows) -> list[str]:
    old_dims, new_dims = (
        {name: stack.dim for stack in layout.stacks for name in stack.tables}
        for layout in (older.layout, job.program.step_spec.embedding.layout)
    )
    told, carried = [], []
    total = np.zeros(3, np.int64)
    for table in job.schema.tables:
        row = rows.get(table.name, "it was not there")
        if isinstance(row, np.ndarray) and old_dims[table.name] != new_dims[table.name]:
            row = f"its dimension is {new_dims[table.name]}, was {old_dims[table.name]}"
        if isinstance(row, str):
            told.append(f"table {table.name}: {table.rows:,} rows begin anew, for {row}")
            continue
        kept = int(np.count_nonzero(row != PAD))
        counts = kept, table.rows - kept, len(row) - kept
        total += counts
        if any(counts[1:]):
            carried.append(f"table {table.name}: {_rows_told(*counts)}")
    if len(carried) > _MOST_TOLD:
        more = f"{len(carried) - _MOST_TOLD} more tables with new or dropped rows"
        carried[_MOST_TOLD:] = [more]
    told = [f"rows of tables by value: {_rows_told(*total)}", *carried, *told]
    gone = [t.name for t in older.layout.schema.tables if t.name not in new_dims]
    if gone:
        told.append(f"tables that are dropped: {', '.join(gone)}")
    if not _same_row_optimizer(older, job):
        told.append("the optimizer of tables begins anew, for it is another")
    return told


def _rows_told(kept: int, new: int, dropped: int) -> str:
    return f"{kept:,} carried over, {new:,} new, {dropped:,} dropped"


def _layers_told(carried: CarriedLayers) -> list[str]:
    told = [
        f"layers: {len(carried.whole)} arrays carried over, {len(carried.by_feature)} feature by"
        f" feature, {len(carried.new)} new{': ' if carried.new else ''}{', '.join(carried.new)}"
    ]
    if not carried.optimizer:
        told.append("the optimizer of layers begins anew, for it is another")
    return told
