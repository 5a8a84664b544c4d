"""Counts the rows that data reads. The placement of tables is planned and tested with them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrank.data import examples as ex
from jaxrank.data.examples import Examples
from jaxrank.data.ragged import list_starts, places_of_lists, positions, ranges
from jaxrank.data.spec.entries import CategoricalSpec, RaggedSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import build_schema, resolve
from jaxrank.data.spec.skip import drop_features, restricted
from jaxrank.data.statistics.list_lengths import ListLengths
from jaxrank.data.store.split import Split
from jaxrank.data.synthetic.source import ListOfIds, SyntheticSource
from jaxrank.errors import InputError
from jaxrank.features import PAD, Schema

# Maximum ids of a sample: with more than 512 ids per example it has fewer examples.
_SAMPLE_IDS = 2**27

# Examples of a sample. A row that one of 128 devices reads in 9 of 10 steps, at a global batch of
# 131,072, occurs about 600 times in them, so its frequency is known within 4%.
SAMPLE = 262_144


class Reads(Protocol):
    """Source of the ids and lists of examples, in parts that can be read in any order.

    schema: of the examples.
    part_rows: i64[parts], number of examples of each part.
    """

    schema: Schema
    part_rows: np.ndarray

    def read(self, part: int) -> Examples:
        """Reads the examples of one part, without floats, labels and weights."""
        ...


class TableReads(NamedTuple):
    """Number of reads of the rows of a table by a sample.

    rows: i32[n], the rows that it reads, rising.
    counts: i64[n], the number of reads of each.
    """

    rows: np.ndarray
    counts: np.ndarray


class Traffic(NamedTuple):
    """The reads of a sample of examples.

    examples: number of examples of the sample.
    tables: by name, of every table of the schema.
    parts: the parts of the data that the sample consists of.
    list_lengths: of the sample, as in a split's statistics, see `packing.capacity`.
    """

    examples: int
    tables: dict[str, TableReads]
    parts: np.ndarray
    list_lengths: dict[str, Any]

    @property
    def ids_per_example(self) -> float:
        return sum(int(read.counts.sum()) for read in self.tables.values()) / self.examples


class StoredReads:
    """Reads a split of a store. A part is a block."""

    def __init__(self, split: Split, schema: Schema):
        self.schema = schema
        self.part_rows = split.block_rows
        self._split = split

    def read(self, part: int) -> Examples:
        block = self._split.read_block(part)
        return _examples(block.ids, block.list_lengths, block.list_values)


class GeneratedReads:
    """Reads generated data without a store. A part is a chunk.

    Args:
        source: the generator.
        split: the name of its split.
        features: the config's section. Without a store only `integer` encoding can be read.

    Raises:
        InputError: a feature needs a store, or the split is unknown.
    """

    def __init__(self, source: SyntheticSource, split: str, features: Mapping[str, Any]):
        if split not in source.splits:
            raise InputError(f"data.train: must be one of {source.splits}: found {split!r}.")
        if not source.chunk_rows(split):
            raise InputError(f"source.rows.{split}: must be at least 1 to be read: found 0.")
        spec = resolve(FeatureSpec.from_state(features), source.columns(split))
        transforms = {f.name: (0.0, 1.0) for f in spec.dense}  # floats are not read
        self.schema = drop_features(build_schema(spec, {}, {}, transforms), spec.skip)
        spec = restricted(spec, self.schema)
        self.part_rows = np.asarray(source.chunk_rows(split), np.int64)
        self._source, self._split, self._spec = source, split, spec
        _check_generated(spec, source.chunk_ids(split, 0))

    def read(self, part: int) -> Examples:
        columns = self._source.chunk_ids(self._split, part)
        rows_of = {table.name: table.rows for table in self._spec.tables}
        entries: list[CategoricalSpec | RaggedSpec] = [*self._spec.categorical, *self._spec.ragged]
        for entry in entries:
            most = int(columns[entry.name].values.max(initial=-1))
            if most >= rows_of[entry.table]:
                raise InputError(
                    f"synthetic:{self._split}, column {entry.name}: must be a row of the table"
                    f" {entry.table!r}, 0 to {rows_of[entry.table] - 1}, to be read without a"
                    f" store: found {most}."
                )
        ids = [columns[entry.name].values for entry in self._spec.categorical]
        shape = (int(self.part_rows[part]), 0)
        matrix = np.stack(ids, axis=1) if ids else np.zeros(shape, np.int32)
        lists = [_first(columns[e.name], e.max_length or int(PAD)) for e in self._spec.ragged]
        lengths = [column.lengths for column in lists]
        return _examples(
            np.where(matrix < 0, PAD, matrix),
            np.stack(lengths, axis=1).astype(np.int32) if lengths else np.zeros(shape, np.int32),
            _interleaved(lists),
        )


def _check_generated(spec: FeatureSpec, columns: Mapping[str, ListOfIds]) -> None:
    entries: list[CategoricalSpec | RaggedSpec] = [*spec.categorical, *spec.ragged]
    for entry in entries:
        if entry.encoding != "integer" or entry.name not in columns:
            raise InputError(
                f"features: the column {entry.name!r} must hold generated row numbers"
                " (encoding='integer') to be read without a store: found"
                f" encoding={entry.encoding!r}. Run `jaxrank prepare` first, and set data.store."
            )
        if isinstance(entry, CategoricalSpec) and entry.length != 1:
            raise InputError(
                f"features: the generated column {entry.name!r} must have length=1: found"
                f" {entry.length}."
            )


def _first(column: ListOfIds, length: int) -> ListOfIds:
    """Cuts each list to its first `length` ids."""
    if column.lengths.max(initial=0) <= length:
        return column
    values = column.values[positions(column.lengths) < length]
    return ListOfIds(np.minimum(column.lengths, length), values)


def _interleaved(lists: list[ListOfIds]) -> np.ndarray:
    """Orders the values i32[total] by example, and within an example by list."""
    values = np.empty(sum(len(entry.values) for entry in lists), np.int32)
    if lists:
        lengths = np.stack([entry.lengths for entry in lists], axis=1)
        for entry, places in zip(lists, places_of_lists(lengths), strict=True):
            values[places] = entry.values
    return values


def _examples(ids: np.ndarray, lengths: np.ndarray, values: np.ndarray) -> Examples:
    nothing = np.zeros((len(ids), 0), np.float32)
    return Examples(
        dense=nothing,
        ids=ids,
        list_lengths=lengths,
        list_values=values,
        list_weights=None,
        labels=nothing,
    )


def rows_read(examples: Examples, schema: Schema) -> list[np.ndarray]:
    """Returns the rows i32[..] that each feature reads, without PAD: id columns, then lists.

    A list that is not combined reads its places only.
    """
    columns = [examples.ids[:, i] for i in range(examples.ids.shape[1])]
    columns += [column.values for column in lists_read(examples, schema)]
    return [rows[rows != PAD] for rows in columns]


def lists_read(examples: Examples, schema: Schema) -> list[ListOfIds]:
    """Returns the lists of each feature as a model reads them.

    Lists that are not combined are cut to their number of places.
    """
    starts = list_starts(examples.list_lengths)
    columns = []
    for i, entry in enumerate(schema.ragged):
        lengths = examples.list_lengths[:, i].astype(np.int64)
        if entry.combiner == "none":
            lengths = np.minimum(lengths, entry.length)
        columns.append(ListOfIds(lengths, examples.list_values[ranges(starts[:, i], lengths)]))
    return columns


def feature_tables(schema: Schema) -> list[str]:
    """Returns the table of each feature in the order of `rows_read`."""
    return [f.table for f in schema.id_columns] + [f.table for f in schema.ragged]


def measure(reads: Reads, examples: int = SAMPLE) -> Traffic:
    """Counts the reads of about `examples` examples, in parts that are evenly spread over the data.

    Data with very many ids per example gets a smaller sample.
    """
    rows = reads.part_rows
    first = reads.read(0)
    examples = min(
        examples, _SAMPLE_IDS * first.rows // max(1, first.ids.size + first.list_values.size)
    )
    count = min(len(rows), math.ceil(examples / max(1.0, float(rows.mean()))))
    parts = np.unique(np.linspace(0, len(rows) - 1, count).round().astype(np.int64))
    tables = feature_tables(reads.schema)
    reads_of: dict[str, list[TableReads]] = {table.name: [] for table in reads.schema.tables}
    lengths = ListLengths(len(reads.schema.ragged))
    for part in parts.tolist():
        piece = reads.read(part)
        lengths.add(piece.list_lengths)
        for table, read in zip(tables, rows_read(piece, reads.schema), strict=True):
            reads_of[table].append(TableReads(*np.unique(read, return_counts=True)))
    return Traffic(
        examples=int(rows[parts].sum()),
        tables={name: _merged(pieces) for name, pieces in reads_of.items()},
        parts=parts,
        list_lengths=lengths.summary(),
    )


def _merged(pieces: list[TableReads]) -> TableReads:
    if not pieces:
        return TableReads(np.zeros(0, np.int32), np.zeros(0, np.int64))
    rows, place = np.unique(np.concatenate([p.rows for p in pieces]), return_inverse=True)
    counts = np.zeros(len(rows), np.int64)
    np.add.at(counts, place, np.concatenate([p.counts for p in pieces]))
    return TableReads(rows, counts)


def batches(reads: Reads, batch_size: int, excluded: np.ndarray, seed: int) -> Iterator[Examples]:
    """Yields shuffled batches without end. The order of parts is random.

    Args:
        excluded: parts to leave out, unless the others have fewer examples than a batch.
    """
    random = np.random.default_rng([seed, len(reads.part_rows)])
    every = np.arange(len(reads.part_rows))
    others = np.setdiff1d(every, excluded)
    chosen = others if reads.part_rows[others].sum() >= batch_size else every
    pending: list[Examples] = []
    while True:
        for part in random.permutation(chosen).tolist():
            pending.append(reads.read(part))
            while sum(piece.rows for piece in pending) >= batch_size:
                joined = ex.join(pending)
                yield ex.permute(ex.cut(joined, 0, batch_size), random.permutation(batch_size))
                pending = [ex.cut(joined, batch_size, joined.rows)]
