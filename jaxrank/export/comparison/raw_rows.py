"""Raw rows of a run's data, and the same rows as preparation encodes them."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.chunk import Chunk
from jaxrank.data.encode.derive import derive
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.examples import Examples, cut, join
from jaxrank.data.keyed_hash import Pseudonymise
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.registry import Source, make_source
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.statistics.vocabulary import Vocabulary
from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError
from jaxrank.evaluation.evaluate import SavedRun
from jaxrank.export.signature import derived_columns, raw_columns
from jaxrank.features import RESERVED_ROWS, UNKNOWN_ROW

_SLICE = 1 << 20  # values of a vocabulary compared at once


class RawRows(NamedTuple):
    """Raw rows: columns as in the files, and their encoded examples."""

    batch: pa.RecordBatch
    examples: Examples


class _StoredVocabulary(Vocabulary):
    """Looks up few values in a vocabulary that may be larger than memory."""

    def __init__(self, values: pa.ChunkedArray):
        super().__init__(pa.array([], pa.string()), np.zeros(0, np.int64))
        self._all = values

    def lookup(self, values: Iterable[str], count: int) -> np.ndarray:
        wanted = pa.array(list(values), pa.string())
        rows = np.full(count, UNKNOWN_ROW, np.int32)
        for start in range(0, len(self._all), _SLICE):
            part = self._all.slice(start, _SLICE)
            matches = pc.index_in(part, value_set=wanted)
            place = np.flatnonzero(matches.is_valid().to_numpy())
            matched = matches.drop_null().to_numpy()
            rows[matched] = RESERVED_ROWS + start + place
        return rows


def raw_rows(
    run: SavedRun,
    store: Store,
    spec: FeatureSpec,
    count: int,
    pseudonymise: Pseudonymise | None,
) -> RawRows:
    """Reads the first `count` valid rows of the run's validation split, or else of its training
    split. Returns fewer if it has fewer.

    Args:
        spec: resolved.
        pseudonymise: of a store with keyed hashes.

    Raises:
        InputError: the raw data cannot be read.
    """
    # Sequences compare the times of events with the time of the example.
    time = spec.time if any(sequence.time for sequence in spec.sequences) else ""
    features = dataclasses.replace(
        spec.without_labels(), keep=(), time=time, group="", by_day=False, derived=()
    )
    derived = derived_columns(spec)
    columns = raw_columns(spec)
    try:
        source = make_source(store.spec.source, columns)
    except InputError as error:
        hint = "A bundle is compared with raw rows of the run's data. --format=files needs none."
        raise InputError(f"{error} {hint}") from error
    data = run.builder.data
    split = (data.valid or data.train).partition("/")[0]
    if split not in source.splits:
        split = source.splits[-1]
    vocabularies: dict[str, Vocabulary] = {
        table.name: _StoredVocabulary(run.values(table, store))
        for table in run.schema.tables
        if table.encoding == "vocabulary"
    }
    encoder = Encoder(
        features,
        vocabularies,
        {name: (mean, std) for name, (mean, std) in store.spec.transforms.items()},
        Statistics(features),
        boundaries={name: np.asarray(edges) for name, edges in store.spec.boundaries.items()},
        pseudonymise=pseudonymise,
    )

    def encoded(chunk: Chunk) -> Examples:
        return encoder.encode(derive(derived, chunk, spec.time_format) if derived else chunk)

    batches: list[pa.RecordBatch] = []
    parts: list[Examples] = []
    for valid, examples in _valid_rows(source, split, encoded, count):
        batch = valid.batch.select(columns)
        if batches and batch.schema != batches[0].schema:  # files may differ in their types
            break
        batches.append(batch)
        parts.append(examples)
        if sum(part.rows for part in parts) >= count:
            break
    if not parts:
        raise InputError(
            f"split {split} of the run's raw data must have a valid row to compare predictions"
            " with: found none."
        )
    rows = pa.Table.from_batches(batches).combine_chunks().to_batches()[0].slice(0, count)
    return RawRows(rows, cut(join(parts), 0, rows.num_rows))


def _valid_rows(
    source: Source, split: str, encode: Callable[[Chunk], Examples], count: int
) -> Iterator[tuple[Chunk, Examples]]:
    """Yields the valid rows of a split and their examples, at most `count` at a time."""
    rejects = Rejects("skip", limit=10**9)
    for part in source.parts(split):
        for chunk in source.chunks(part, rejects):
            for start in range(0, chunk.batch.num_rows, count):
                rows = chunk.rows[start : start + count]
                piece = Chunk(chunk.batch.slice(start, count), chunk.file, rows)
                valid, examples = rejects.attempt(piece, encode)
                if examples is not None:
                    yield valid, examples
