"""The trained program on a few examples, with only the rows of tables that they read.

Examples, lookup, exchange and model are the ones of `evaluate`. The tables have only the rows that
the examples read, so memory does not grow with the tables.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import numpy as np

from jaxrank import embedding, models
from jaxrank import layout as layouts
from jaxrank import mesh as meshes
from jaxrank.calibration.maps import Calibration
from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.data.examples import Examples, cut, join
from jaxrank.data.ragged import places_of_lists
from jaxrank.data.store.memory import InMemorySplit
from jaxrank.embedding.storage import storage
from jaxrank.evaluation.score import feature_rows, score
from jaxrank.export.table_rows import stored_rows
from jaxrank.features import MAX_GROUP, PAD, Schema
from jaxrank.layout import Layout, ToTables
from jaxrank.models.fields import SECTIONS
from jaxrank.models.products import PRECISIONS
from jaxrank.program import Predictor
from jaxrank.step import Weights
from jaxrank.validate import field_rules

_MIN_ROWS = 3  # of a small table: the reserved ones and one more
_ROUNDING = ("bfloat16", "mixed_bfloat16")  # precisions that round the factors of products


class Reference:
    """Predicts examples by the trained program.

    Args:
        fields: of the run's model, with its name.
        layout: of the run's tables.
        stored: the weights of a checkpoint.
        weights: the dense parameters of the same checkpoint, see `dense_part.layers`.
        examples: to predict, with rows of the run's tables.
        calibration: of the checkpoint, None if it has none.
        parents, learns_task_weights: see `Predictor`.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        layout: Layout,
        stored: CheckpointReader,
        weights: Weights,
        examples: Examples,
        calibration: Calibration | None = None,
        *,
        parents: Sequence[int],
        learns_task_weights: bool,
    ):
        self._fields, self._weights, self._calibration = fields, weights, calibration
        self._parents, self._learns_task_weights = tuple(parents), learns_task_weights
        rows = _rows_read(layout.schema, examples)
        self._table_rows = None  # before they are numbered again
        if calibration is not None and calibration.by:
            held = InMemorySplit(examples, "exported")
            self._table_rows = feature_rows(held, layout.schema, calibration.by.feature)
        self._vectors = _vectors(stored, layout, rows)
        schema, self._examples = _small(layout.schema, examples, rows)
        dims = {name: stack.dim for stack in layout.stacks for name in stack.tables}
        self._layout = layouts.layout(schema, dims)

    @property
    def rounds(self) -> bool:
        """True if the trained program rounds the factors of products to bfloat16."""
        return rounds_factors(self._fields)

    def logits(
        self,
        change: Callable[[np.ndarray], np.ndarray] = lambda vectors: vectors,
        *,
        exact: bool = True,
    ) -> np.ndarray:
        """Returns the logits f32[n, tasks].

        Args:
            change: maps the vectors f32[n, dim] of tables before they are read.
            exact: whether products are computed at precision "highest".
        """
        fields = dict(self._fields)
        if exact and _has_precisions(fields):
            fields["precision"] = "highest"
        mesh = meshes.make_mesh(devices=1)
        room = {stack.name: 1.0 for stack in self._layout.stacks}
        schema = self._layout.schema
        predictor = Predictor(
            models.build(tasks=len(schema.tasks), **fields),
            embedding.Lookup(self._layout, mesh, room),
            parents=self._parents,
            learns_task_weights=self._learns_task_weights,
        )
        rows: Any = _stored(self._layout, {n: change(v) for n, v in self._vectors.items()})
        weights = jax.device_put(self._weights._replace(rows=rows), predictor.weights_sharding)
        size = min(-(-self._examples.rows // MAX_GROUP), 8) * MAX_GROUP
        held = InMemorySplit(self._examples, "exported")
        calibration = self._calibration, self._table_rows
        with closing(score(predictor, weights, held, size, *calibration)) as scores:
            return np.concatenate([scored.logits for scored in scores])


def rounds_factors(fields: Mapping[str, Any]) -> bool:
    """Returns True if a model with these fields rounds the factors of products to bfloat16."""
    return _has_precisions(fields) and fields["precision"] in _ROUNDING


def _has_precisions(fields: Mapping[str, Any]) -> bool:
    """Returns True if a model has the field `precision` of `models.products`.

    A model of the user's own may give the name to a field of another meaning.
    """
    declared = {f.name: f for f in dataclasses.fields(SECTIONS[fields["name"]])}
    return "precision" in declared and field_rules(declared["precision"]).choices == PRECISIONS


def _parts(schema: Schema, examples: Examples) -> Iterator[tuple[str, Any, Any]]:
    """Yields (table, key, rows): the rows that each id column and each list reads.

    key: the column of the ids, or the places of the values of lists.
    """
    for i, column in enumerate(schema.id_columns):
        yield column.table, i, examples.ids[:, i]
    places = places_of_lists(examples.list_lengths)
    for entry, place in zip(schema.ragged, places, strict=True):
        yield entry.table, place, examples.list_values[place]


def _rows_read(schema: Schema, examples: Examples) -> dict[str, np.ndarray]:
    """Returns {table: the rows that examples read, in order and each once}."""
    read: dict[str, list[np.ndarray]] = {table.name: [] for table in schema.tables}
    for table, _, rows in _parts(schema, examples):
        read[table].append(rows[rows != PAD])
    counts = {table.name: table.rows for table in schema.tables}
    return {
        name: np.unique(np.concatenate([*parts, np.arange(min(_MIN_ROWS, counts[name]))]))
        for name, parts in read.items()
    }


def _small(
    schema: Schema, examples: Examples, rows: dict[str, np.ndarray]
) -> tuple[Schema, Examples]:
    """Returns the schema with only these rows of its tables, and the examples that read them."""
    ids, values = examples.ids.copy(), examples.list_values.copy()
    columns = len(schema.id_columns)
    for number, (table, key, old) in enumerate(_parts(schema, examples)):
        new = np.searchsorted(rows[table], old).astype(np.int32)
        new[old == PAD] = PAD
        if number < columns:
            ids[:, key] = new
        else:
            values[key] = new
    tables = [
        dataclasses.replace(table, rows=len(rows[table.name]), encoding="integer")
        for table in schema.tables
    ]
    return dataclasses.replace(schema, tables=tuple(tables)), dataclasses.replace(
        examples, ids=ids, list_values=values, kept=None
    )


def _vectors(
    stored: CheckpointReader, layout: Layout, wanted: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Reads rows of tables from a checkpoint, {table: f32[n, dim]}."""
    vectors = {}
    for stack in layout.stacks:
        for name in stack.tables:
            vectors[name] = np.zeros((len(wanted[name]), stack.dim), np.float32)
        to_tables = ToTables.from_stack(stack)
        for rows, values in stored_rows(stored, stack):
            tables, table_rows = to_tables(rows)
            for i, name in enumerate(stack.tables):
                in_table = np.flatnonzero(tables == i)
                place = np.searchsorted(wanted[name], table_rows[in_table])
                place = np.minimum(place, len(wanted[name]) - 1)
                is_wanted = wanted[name][place] == table_rows[in_table]
                vectors[name][place[is_wanted]] = values[in_table[is_wanted]]
    return vectors


def _stored(layout: Layout, vectors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rows of tables as a checkpoint has them."""
    arrays = {}
    for stack in layout.stacks:
        _, split = storage(stack)
        assert split is not None
        rows = np.zeros((split.rows, split.width), np.float32)
        logical = np.concatenate([vectors[name] for name in stack.tables])
        positions = split.position(np.arange(len(logical), dtype=np.int32))
        rows[positions, : split.dim] = logical
        arrays[split.name] = rows.reshape(split.shape)
    return arrays


def first_examples(blocks: Iterable[Examples], most: int) -> Examples:
    """Returns the first examples of a split, at most this number. Reads no further blocks."""
    parts, rows = [], 0
    for block in blocks:
        parts.append(block)
        rows += block.rows
        if rows >= most:
            break
    return cut(join(parts), 0, min(most, rows))
