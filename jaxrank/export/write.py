"""Exports a trained model to files for other programs.

OUTPUT/export.json             describes the other files, see `description`
OUTPUT/layers.npz              parameters, model state, bias and scale of each task, by their names
                               in the checkpoint
OUTPUT/tables/<table>.parquet  row (int32), vector (float32[dim]) and, for a table with a
                               vocabulary, value (string), in row order
"""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxrank import json_files
from jaxrank.base_rates import neutral
from jaxrank.calibration import files as calibrations
from jaxrank.calibration.maps import Calibration
from jaxrank.checkpoints.manager import Checkpoints, drop_fields, lacking
from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.config_files import to_plain
from jaxrank.data.files import check_parent, is_local
from jaxrank.data.lock import empty_directory, new_directory
from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import evaluate
from jaxrank.evaluation.evaluate import SavedRun
from jaxrank.export.description import recipe
from jaxrank.export.table_rows import TableRows, table_rows
from jaxrank.features import RESERVED_ROWS, Table
from jaxrank.layout import Layout


class Export(NamedTuple):
    """Summary of an export.

    Attributes:
        output: directory of the export.
        step: of the checkpoint.
        tables: number of tables.
        rows: number of rows of all tables.
        parameters: number of parameters outside tables.
        seconds: duration of the export.
        checkpoint: path of the checkpoint.
        worse_than_constant: tasks for which a constant did better in the run's own evaluation.
    """

    output: str
    step: int
    tables: int
    rows: int
    parameters: int
    seconds: float
    checkpoint: str
    worse_than_constant: list[str]


class Source(NamedTuple):
    """A checkpoint to export.

    stored: its weights that predict.
    step: of the checkpoint.
    path: of the checkpoint.
    checkpoints: of the run.
    store: with the run's vocabularies.
    worse_than_constant: see `Export`.
    calibration: of the checkpoint, None if it has none.
    """

    run: evaluate.SavedRun
    layout: Layout
    stored: CheckpointReader
    step: int
    path: str
    checkpoints: Checkpoints
    store: Store
    worse_than_constant: list[str]
    calibration: Calibration | None = None


def open_source(workdir: str, checkpoint: str, data: str) -> Source:
    """Opens a checkpoint of a run, and checks that it matches the run's config and data.

    See `export` for arguments and errors.
    """
    run = evaluate.load_run(workdir)
    checkpoints = Checkpoints(run.directory, read_only=True)
    step, (sums, worse) = checkpoints.read(
        checkpoint,
        lambda step: (checkpoints.saved_checksums(step), checkpoints.worse_than_constant(step)),
    )
    store = run.open_data(data)
    if not data:
        run.check_training_data(store, checkpoints)
    path = checkpoints.directory(step)
    saved = Path(path) / "weights"
    stored = CheckpointReader(saved, sums["weights"])
    with checkpoints.deletion_as_input_error(step):
        shapes = run.weights_shape()
        fields = lacking(stored.names)
        other = stored.unlike(drop_fields(shapes, fields) if fields else shapes)
    if other:
        raise InputError(
            f"{saved}: arrays must match the model of the config:\n  " + "\n  ".join(other)
        )
    calibration = calibrations.load(run.directory, step, sums["weights"])
    return Source(run, run.layout(), stored, step, path, checkpoints, store, worse, calibration)


def export(workdir: str, *, output: str, checkpoint: str = "newest", data: str = "") -> Export:
    """Writes the weights that predict in one checkpoint of a run to the directory `output`.

    For a run with averaged weights these are the averages. The directory appears under its name
    only when it is complete. Tables may be larger than memory, see `table_rows`.

    Args:
        workdir: of the run.
        output: a directory that must not exist.
        checkpoint: "newest", "best" or a step number.
        data: a store with the run's vocabularies, which may have grown. Empty: the run's own data.

    Raises:
        InputError: workdir, checkpoint or data are absent, damaged or do not match, or `output`
            exists.
        RunError: the output cannot be written, or another process is writing it.
    """
    started = time.perf_counter()
    source = open_source(workdir, checkpoint, data)
    run, layout, stored, store = source.run, source.layout, source.stored, source.store
    description: dict[str, Any] = {"checkpoint": source.path, "step": source.step}
    model = {
        "tasks": len(run.schema.tasks),
        **run.builder.model_fields,
        "parents": run.builder.parents,
    }
    if source.calibration:
        maps = {run.schema.tasks[i].name: m.to_state() for i, m in source.calibration.maps.items()}
        by = source.calibration.by
        description["calibration"] = {
            "maps": maps,
            "origin": source.calibration.origin,
            "by": by.to_state() if by else None,
        }
    description |= recipe(
        layout,
        store,
        model=model,
        features=run.builder.features,
        config=to_plain(run.config),
        ranked=run.builder.ranked,
    )
    with (
        written(output) as partial,
        source.checkpoints.deletion_as_input_error(source.step),
    ):
        empty_directory(partial)
        parameters = _write_layers(stored, len(run.schema.tasks), partial / "layers.npz")
        _write_tables(stored, layout, run, store, partial / "tables")
        json_files.write(partial / "export.json", description)
    return Export(
        output=output,
        step=source.step,
        tables=len(run.schema.tables),
        rows=sum(table.rows for table in run.schema.tables),
        parameters=parameters,
        seconds=time.perf_counter() - started,
        checkpoint=source.path,
        worse_than_constant=source.worse_than_constant,
    )


@contextlib.contextmanager
def written(output: str, keep: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Yields a directory that is renamed to `output` if nothing is raised.

    A killed process leaves a hidden directory with its content. The next export to the same output
    gets it.

    Args:
        keep: returns True if the directory is kept after an error, too.
    """
    if not is_local(output):
        raise InputError(f"--output: must be a local path: found {output}.")
    target = Path(output)
    check_free = functools.partial(_check_free, target)
    check_free()
    locked = RunError(f"--output: another process is writing {target}.")
    try:
        with new_directory(target, check_free=check_free, locked=locked, keep=keep) as partial:
            yield partial
            os.rename(partial, target)
    except OSError as error:
        raise RunError(f"{output}: cannot be written: {error}.") from error


def _check_free(target: Path) -> None:
    if os.path.lexists(target):
        raise InputError(f"--output: {target} must not exist. Remove it or name another directory.")
    check_parent(target)


def _write_layers(stored: CheckpointReader, tasks: int, path: Path) -> int:
    """Writes the dense parameters, and returns their number without bias and scale of tasks."""
    names = [n for n in stored.names if not n.startswith(("bias", "scale", "rows."))]
    arrays: dict[str, Any] = {name: stored.read(name) for name in names}
    rates = neutral(tasks)._asdict()  # values for checkpoints of earlier versions
    rates |= {name: stored.read(name) for name in rates if name in stored}
    np.savez(path, **rates, **arrays)
    return sum(array.size for array in arrays.values())


def _write_tables(
    stored: CheckpointReader, layout: Layout, run: SavedRun, store: Store, folder: Path
) -> None:
    tables = {table.name: table for table in layout.schema.tables}
    folder.mkdir()
    scratch = folder / "scratch"
    scratch.mkdir()
    for stack in layout.stacks:
        rows = table_rows(stored, layout, stack, scratch)
        for name, parts in itertools.groupby(rows, key=lambda part: part.table):
            _write_table(folder / f"{name}.parquet", _values(tables[name], run, store), parts)
    scratch.rmdir()


def _values(table: Table, run: SavedRun, store: Store) -> pa.ChunkedArray | None:
    """Returns the raw value of each row of a table, or None without a vocabulary.

    Reserved rows are null.
    """
    if table.encoding != "vocabulary":
        return None
    values = run.values(table, store)
    return pa.chunked_array([pa.nulls(RESERVED_ROWS, pa.string()), *values.chunks])


def _write_table(path: Path, values: pa.ChunkedArray | None, parts: Iterator[TableRows]) -> None:
    with contextlib.ExitStack() as stack:
        sink = None
        for part in parts:
            count, dim = part.vectors.shape
            columns = {"row": pa.array(np.arange(part.first, part.first + count, dtype=np.int32))}
            if values is not None:
                columns["value"] = values.slice(part.first, count)
            flat = pa.array(part.vectors.reshape(-1))
            columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, dim)
            table = pa.table(columns)
            if sink is None:
                # Every value occurs once, so a dictionary would be larger than the column itself.
                sink = stack.enter_context(
                    pq.ParquetWriter(path, table.schema, use_dictionary=False)
                )
            sink.write_table(table)
