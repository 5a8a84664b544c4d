"""Reads Parquet files like a store, without preparation, if no encoder must be fitted to the data.

A block is a run of rows within a row group. Row groups of up to 65,536 rows are best, because each
is read once per epoch. A larger row group is read in full for each of its blocks, because training
reads blocks in random order.
"""

import collections
import dataclasses
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import xxhash
from upath import UPath

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.derive import derive
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.encode.fit import NOTHING, fit_spec
from jaxrank.data.encode.sequences import all_lists, list_columns
from jaxrank.data.examples import Examples
from jaxrank.data.sources.parquet import (
    UNREADABLE,
    ParquetSource,
    not_parquet,
    open_unchanged,
    read_footer,
)
from jaxrank.data.sources.registry import parquet_source
from jaxrank.data.spec.derived import add_derived
from jaxrank.data.spec.entries import CategoricalSpec, RaggedSpec
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import build_schema, resolve
from jaxrank.data.statistics.list_lengths import ListLengths
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.store.reader import Store, StoreSpec
from jaxrank.data.store.split import Split
from jaxrank.errors import InputError

_BLOCK_ROWS = 65_536
_OPEN_FILES = 64
_KEPT_GROUPS = 2
_HINT = "Run `jaxrank prepare`, and set data.direct = False."


class _Place(NamedTuple):
    """Rows [start, stop) of a row group. `first` is the number of its first row in the file, from
    1.
    """

    file: str
    group: int
    first: int
    start: int
    stop: int


class _Uncounted(Statistics):
    """Counts nothing, because blocks are encoded whenever they are read."""

    def add(
        self,
        labels: np.ndarray,
        floats: np.ndarray,
        lengths: np.ndarray,
        weights: np.ndarray | None = None,
        logit_correction: np.ndarray | None = None,
    ) -> None:
        pass

    def add_rows(self, kind: str, feature: int, rows: np.ndarray) -> None:
        pass


class DirectSplit(Split):
    """The examples of Parquet files, in order, with the interface of a split of a store.

    statistics: only `rows` and `list_lengths`. The first access reads all lists.
    """

    has_statistics = False

    def __init__(self, source: ParquetSource, name: str, features: FeatureSpec):
        self._source, self._features = source, features
        named = features.named
        self._columns = [c for c in source.columns(name) if c in named]
        paths = source.split_files(name)
        self._row_groups = {path: source.row_groups[path] for path in paths}
        self._places = [
            place for path in paths for place in _places(path, self._row_groups[path].rows)
        ]
        rows = np.asarray([p.stop - p.start for p in self._places], np.int64)
        super().__init__(name, UPath(paths[0]), rows)
        self._encoder = Encoder(features, {}, {}, _Uncounted(features), types=source.types)
        self._reopen()

    def __getstate__(self) -> dict[str, Any]:
        unpicklable = ("_open", "_groups", "_kept", "_reading")  # local to this process
        return {key: value for key, value in self.__dict__.items() if key not in unpicklable}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reopen()

    def _reopen(self) -> None:
        self._open: dict[str, pa.parquet.ParquetFile] = {}
        self._groups: collections.OrderedDict[tuple[Any, ...], pa.RecordBatch] = (
            collections.OrderedDict()
        )
        self._kept = threading.Lock()  # of the two dictionaries
        self._reading = {path: threading.Lock() for path in self._row_groups}

    @property
    def bytes(self) -> int:
        return sum(max(0, groups.mark.size) for groups in self._row_groups.values())

    @functools.cached_property
    def fingerprint(self) -> str:
        """Returns a hash of the names of the files and their footers."""
        digest = xxhash.xxh3_128()
        for path in self._row_groups:
            name = path.replace("\\", "/").rpartition("/")[2]
            digest.update(repr((name, self._source.partitions.values(path))).encode())
            digest.update(read_footer(path))
        return digest.hexdigest()

    @functools.cached_property
    def statistics(self) -> dict[str, Any]:
        lists = len(self._features.ragged)
        lengths = ListLengths(lists)
        for index in range(len(self._places) if lists else 0):
            lengths.add(self.list_lengths(index))
        return {"rows": self.rows, "list_lengths": lengths.summary()}

    def list_lengths(self, index: int) -> np.ndarray:
        # Weights are not read, because they do not affect the lengths.
        entries = tuple(dataclasses.replace(entry, weights="") for entry in self._features.ragged)
        features = dataclasses.replace(self._features, ragged=entries)
        chunk = self._chunk(self._places[index], list_columns(features))
        columns = [cells.ids.lengths for cells in all_lists(features, chunk)]
        return np.stack([c for c in columns if c is not None], axis=1).astype(np.int32)

    def read_block(self, index: int) -> Examples:
        """Reads block `index`.

        Raises:
            InputError: a value is invalid for its column, or the file cannot be read or has changed
                since it was first opened.
        """
        chunk = self._chunk(self._places[index], self._columns)
        features = self._features
        if features.derived:
            chunk = derive(features.derived, chunk, features.time_format)
        return self._encoder.encode(chunk)

    def _chunk(self, place: _Place, columns: list[str]) -> Chunk:
        rows = place.stop - place.start
        with self._reading[place.file]:
            group = self._group(place, columns)
        batch = self._source.complete(group.slice(place.start, rows), place.file)
        return Chunk(batch, place.file, numbered(place.first + place.start, rows))

    def _group(self, place: _Place, columns: list[str]) -> pa.RecordBatch:
        """Returns all rows of the place's row group. The caller has the lock of its file."""
        key = (place.file, place.group, *columns)
        with self._kept:
            if key in self._groups:
                return self._groups[key]
        stored = [c for c in columns if c not in self._source.partitions.names]
        try:
            table = self._parquet(place.file).read_row_group(place.group, stored)
            table.validate(full=True)
            batch = _one_batch(table)
        except UNREADABLE as error:
            raise not_parquet(place.file, error) from error
        expected = int(self._row_groups[place.file].rows[place.group])
        if batch.num_rows != expected:
            actual = f"{batch.num_rows} rows in row group {place.group}, of {expected}"
            raise not_parquet(place.file, actual)
        with self._kept:
            while len(self._groups) >= _KEPT_GROUPS:
                self._groups.popitem(last=False)
            self._groups[key] = batch
        return batch

    def _parquet(self, path: str) -> pa.parquet.ParquetFile:
        with self._kept:
            if path in self._open:
                return self._open[path]
        opened = open_unchanged(self._row_groups[path].mark)
        with self._kept:
            while len(self._open) >= _OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[path] = opened
        return opened


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    columns = [c.combine_chunks() for c in table.columns]
    whole = [pa.concat_arrays(c.chunks) if isinstance(c, pa.ChunkedArray) else c for c in columns]
    return pa.RecordBatch.from_arrays(whole, schema=table.schema)


def _places(path: str, groups: np.ndarray) -> Iterator[_Place]:
    first = 1
    for group, rows in enumerate(groups.tolist()):
        for start in range(0, rows, _BLOCK_ROWS):
            yield _Place(path, group, first, start, min(start + _BLOCK_ROWS, rows))
        first += rows


def check_kind(kind: str | None) -> None:
    """Rejects sources of kinds other than Parquet."""
    if kind != "parquet":
        raise InputError(
            f"source.kind: must be 'parquet' with data.direct: found {kind!r}. {_HINT}"
        )


def open_direct(features: Mapping[str, Any], source: Mapping[str, Any]) -> Store:
    """Opens Parquet files as the store that `prepare` would write, without writing it.

    Args:
        features, source: the config's sections, accepted by `check_kind`. See
            `prepare.passes.prepare`.

    Raises:
        InputError: an encoder would have to be fitted to the data, or an error of `prepare` before
            it reads records.
    """
    spec = FeatureSpec.from_state(features).stored
    data = parquet_source(source)
    resolved = resolve(spec, add_derived(spec.derived, data.columns(data.splits[0])))
    data.check_columns(resolved.named)
    _check(resolved)
    return Store(
        path=UPath(data.files[0]),
        schema=build_schema(resolved, {}, {}, {}),
        spec=StoreSpec(
            features=spec.to_state(),
            source=dict(source),
            transforms={},
            boundaries={},
            buckets={},
            hash_key="",
        ),
        splits={name: DirectSplit(data, name, resolved) for name in data.splits},
    )


def _check(features: FeatureSpec) -> None:
    """Rejects features that only `prepare` supports."""
    entries: list[CategoricalSpec | RaggedSpec] = [*features.categorical, *features.ragged]
    for entry in entries:
        if entry.encoding == "vocabulary":
            raise InputError(
                f"features: with data.direct, {entry.name!r} must have encoding='integer' or"
                f" 'hash', because values are not counted: found 'vocabulary'. {_HINT}"
            )
    wanted = fit_spec(features, NOTHING)
    if wanted.names:  # an open transform leaves numbers as they are
        raise InputError(
            "features: with data.direct, no feature may be fitted to the data (standardize,"
            f" buckets, as_of): found {', '.join(wanted.names)}. {_HINT}"
        )
    if features.by_day:
        raise InputError(f"features.by_day: must be False with data.direct: found True. {_HINT}")
