"""Initialises table rows from files of pre-trained vectors (`embedding.init_from`).

A run reads the files once, before its first step. A row without a vector, and the optimizer state
of all rows, keep their initial values.
"""

from collections.abc import Mapping

import numpy as np

from jaxrank.data.vectors.rows import TableVectors
from jaxrank.embedding.storage import Storage
from jaxrank.features import MISSING_ROW
from jaxrank.layout import Stack, ToStack
from jaxrank.placement.traffic import StoredReads, TableReads, measure
from jaxrank.report import Report
from jaxrank.run import Run
from jaxrank.runtime import processes
from jaxrank.step import TrainState
from jaxrank.warm_start.rows import Shares, local_rows
from jaxrank.workdir import files as workdirs


def start_vectors(
    run: Run,
    state: TrainState,
    report: Report,
    copied: Mapping[str, np.ndarray] = {},  # noqa: B006  never changed
) -> TrainState:
    """Returns the first state of a run with the pre-trained vectors of its config.

    Reports the coverage of each table, and writes it to the workdir.

    Args:
        state: before the first step. The rows of tables with vectors are deleted.
        copied: {table: rows that an older run replaces afterwards}, which are not covered.

    Raises:
        InputError: a file is invalid or has no value of its table.
    """
    with processes.together():
        files = run.builder.open_table_vectors()
        tables = {t.name: t for t in run.schema.tables}
        vectors = {
            name: TableVectors(opened, tables[name], run.store) for name, opened in files.items()
        }
        for stack in run.program.step_spec.embedding.layout.stacks:
            if not vectors.keys().isdisjoint(stack.tables):
                state = _fill(state, run, stack, vectors)
    with processes.together():
        if processes.is_first():
            _record(run, vectors, report, copied)
    return state


def _fill(
    state: TrainState, run: Run, stack: Stack, vectors: dict[str, TableVectors]
) -> TrainState:
    """Writes the vectors of a stack's tables into its rows, and into their average."""
    parts = [part for part in run.program.step_spec.embedding.parts[stack.name] if part]
    shares = {part.name: Shares(state.tables[part.name].rows, part.width) for part in parts}
    for name in shares:
        state.tables[name].rows.delete()  # otherwise all rows would be on the devices twice
    to_stack = ToStack.from_stack(stack)
    for number, name in enumerate(stack.tables):
        for rows, values in vectors[name].batches() if name in vectors else ():
            stack_rows = to_stack(rows, number)
            for part, is_inside, first in local_rows(stack, stack_rows):
                positions = part.position(stack_rows[is_inside] - first)
                shares[part.name].set(positions, _padded(values[is_inside], part))
    tables = dict(state.tables)
    for name, share in shares.items():
        tables[name] = tables[name]._replace(rows=share.array())
    state = state._replace(tables=tables)
    if not state.average:
        return state
    averages = dict(state.average.rows)
    for name, share in shares.items():
        averages[name].delete()
        averages[name] = share.copy().array()  # steps change the other array in place
    return state._replace(average=state.average._replace(rows=averages))


def _padded(vectors: np.ndarray, part: Storage) -> np.ndarray:
    """Returns f32[n, width]. Columns beyond the dimension are zero."""
    return np.pad(vectors, ((0, 0), (0, part.width - part.dim)))


def _record(
    run: Run, vectors: dict[str, TableVectors], report: Report, copied: Mapping[str, np.ndarray]
) -> None:
    if not vectors:
        workdirs.save_coverage(run.directory, {})
        return
    reads = measure(StoredReads(run.train_split, run.schema))
    lr_multipliers = run.program.step_spec.embedding.lr_multipliers
    tree = {}
    for name, of_table in vectors.items():
        has_vector = of_table.has_vector.copy()
        has_vector[copied.get(name, [])] = False
        count = int(has_vector.sum())
        covered, lookups = _lookups(of_table, has_vector, reads.tables[name])
        factor = lr_multipliers.get(name, 1.0)
        tree[name] = {
            "path": of_table.files.path,
            "rows": of_table.num_values,
            "covered_rows": count,
            "row_coverage": count / max(of_table.num_values, 1),
            "lookup_coverage": covered / max(lookups, 1),
            "lr_multiplier": factor,
        }
        trained = {0.0: "frozen", 1.0: "trained"}.get(factor, f"learning rate * {factor:g}")
        shared = f"; {of_table.shared:,} values share a row" if of_table.shared else ""
        replaced = int(of_table.has_vector.sum()) - count
        if replaced:
            shared += f"; {replaced:,} more are copied from the older run"
        report(
            f"Pre-trained vectors of table {name}: {of_table.files.path} has"
            f" {count:,} of {of_table.num_values:,} rows ({_percent(count, of_table.num_values)})"
            f" and {_percent(covered, lookups)} of the lookups in {reads.examples:,} training"
            f" examples{shared}; {trained}"
        )
    workdirs.save_coverage(run.directory, tree)


def _lookups(vectors: TableVectors, has_vector: np.ndarray, reads: TableReads) -> tuple[int, int]:
    """Returns the number of lookups of rows with a vector, and of all that are not missing.

    Args:
        has_vector: bool[rows of the table].
    """
    is_value = (vectors.table.encoding == "integer") | (reads.rows != MISSING_ROW)
    covered = int(reads.counts[has_vector[reads.rows]].sum())
    return covered, int(reads.counts[is_value].sum())


def _percent(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%}"
