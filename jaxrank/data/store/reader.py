"""Reads a store: prepared examples on disk, as blocks of columns, with a manifest.

    STORE/manifest.json               written last, so a directory without it is not a store
    STORE/vocabulary/<table>.arrow    value (string), count (int64) and last_day (int32, since
                                      1970) in row order
    STORE/vocabulary/<table>.waiting  the same of ids without a row, in order of values
    STORE/<split>/00000-00000.arrow   an Arrow IPC file; a record batch is a block of examples
    STORE/<split>/<day>/...           if the split is partitioned by day
    STORE/rejected.jsonl              raw records that were skipped, if any

A block holds the features of up to `block_size` examples as a few matrices (fixed-size lists in
Arrow's terms). Reading a thousand features therefore costs no more than one of the same size, and
uses a memory map without a copy. The manifest has a checksum of each block, of the values and
counts of each vocabulary, and of itself. Any Arrow reader opens these files.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from upath import UPath

from jaxrank import validate
from jaxrank.data import files
from jaxrank.data.statistics.admission import TableHistory
from jaxrank.data.statistics.vocabulary import checksum, counts_checksum, read_file
from jaxrank.data.store import manifest
from jaxrank.data.store.split import Split
from jaxrank.data.store.stored_split import StoredSplit
from jaxrank.data.store.view import View, ViewedSplit
from jaxrank.errors import InputError
from jaxrank.features import RESERVED_ROWS, Schema, Table

_SPLIT = re.compile(r"[A-Za-z0-9][\w-]*(/\d{4}-\d\d-\d\d)?")


class StoreSpec(NamedTuple):
    """The specification of a store, as plain data.

    features: `FeatureSpec.to_state` of the config's section.
    source: the config's section, unchanged.
    transforms: mean and deviation of each standardised float.
    boundaries: those fitted for each feature with `buckets`.
    buckets: requested number of buckets. There may be fewer boundaries.
    hash_key: fingerprint of the key for raw values, or "" if there is none.
    """

    features: dict[str, Any]
    source: dict[str, Any]
    transforms: dict[str, list[float]]
    boundaries: dict[str, list[float]]
    buckets: dict[str, int]
    hash_key: str


@dataclasses.dataclass(frozen=True)
class Store:
    """A complete store, returned by `open_store`."""

    path: UPath
    schema: Schema
    spec: StoreSpec
    splits: dict[str, Split]  # of a split that is partitioned by day, each day
    entries: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the manifest, by split
    # Checksums of the counts of the vocabularies.
    counts: dict[str, str] = dataclasses.field(default_factory=dict)
    view: View | None = None  # of the splits
    histories: dict[str, Any] = dataclasses.field(default_factory=dict)  # see `history`
    # Versions of the source files, with absolute paths. Empty in stores of earlier versions.
    marks: tuple[files.File, ...] = ()

    def split(
        self, name: str, field: str = "split", statistics: dict[str, Any] | None = None
    ) -> Split:
        """Returns a split "train", a day "train/2024-05-01", or days "train/2024-05-01:2024-05-07".

        Args:
            field: the config field of the name, for messages.
            statistics: of the returned split. None: those of the store.

        Raises:
            InputError: there is no such split or day.
        """
        if name not in self.splits:
            chosen = self._days(name, field)
        elif statistics is None:
            return self.splits[name]
        else:
            chosen = [name]
        entries = {n: self.entries[n] for n in chosen}
        if self.view is None:
            return StoredSplit(self.path, name, entries, statistics)
        return ViewedSplit(StoredSplit(self.path, name, entries), self.view, statistics)

    def selected(self, schema: Schema) -> "Store":
        """Returns the store with only the features and tables of a part of its schema."""
        if schema == self.schema:
            return self
        return dataclasses.replace(self.viewed(View(self.schema, schema)), schema=schema)

    def viewed(self, view: View) -> "Store":
        """Returns the store with splits as a model reads them through a view."""
        splits: dict[str, Split] = {n: ViewedSplit(s, view) for n, s in self.splits.items()}
        return dataclasses.replace(self, splits=splits, view=view)

    def _days(self, name: str, field: str) -> list[str]:
        """Returns the names of the days that a name selects."""
        kind, _, days = name.partition("/")
        names = sorted(n for n in self.splits if n.startswith(f"{kind}/"))
        if not names:
            raise no_split(self.path, name, self.splits, field)
        first, _, last = days.partition(":")
        chosen = [n for n in names if (first or "0") <= n.partition("/")[2] <= (last or "9")]
        if not chosen or (days and ":" not in days):
            raise InputError(
                f"{field}: must name days of {kind!r} in {self.path}, which has those from"
                f" {names[0].partition('/')[2]} to {names[-1].partition('/')[2]}: found {days!r}."
            )
        return chosen

    def vocabulary(self, table: str) -> tuple[list[str], np.ndarray]:
        """Returns a table's values in row order (after the reserved rows), and counts i64[values].

        Raises:
            InputError: the table has no vocabulary, or its file is missing or corrupt.
        """
        content = self._vocabulary(table)
        return content["value"].to_pylist(), content["count"].to_numpy()

    def values(self, table: str) -> pa.ChunkedArray:
        """Returns the values of `vocabulary` as Arrow strings, which take less memory than
        Python's.

        Raises:
            InputError: as in `vocabulary`.
        """
        return self._vocabulary(table)["value"]

    def _vocabulary(self, table: str) -> pa.Table:
        expected = self.table(table)
        if expected is None or expected.encoding != "vocabulary":
            raise InputError(
                f"{self.path}: must have a table {table!r} with encoding='vocabulary': found"
                f" {expected or [t.name for t in self.schema.tables]}."
            )
        path = self.path / "vocabulary" / f"{table}.arrow"
        content = read_file(path)
        for must, actual in (
            (expected.checksum, checksum(content["value"])),
            (self.counts.get(table), counts_checksum(content["count"].to_numpy())),
        ):
            _check_same(path, must, actual)
        return content

    def history(self, table: str) -> TableHistory | None:
        """Returns what the store remembers beside the vocabulary of a table.

        None if a version before format 5 wrote the store.

        Raises:
            InputError: a file is missing or corrupt.
        """
        entry = self.histories.get(table)
        if entry is None:
            return None
        folder = self.path / "vocabulary"
        last_days = read_file(folder / f"{table}.arrow")["last_day"].to_numpy()
        waiting = read_file(folder / f"{table}.waiting")
        history = TableHistory.from_state(entry, last_days, waiting)
        actual = history.to_state()
        for name, field in (("arrow", "last_days"), ("waiting", "waiting")):
            _check_same(folder / f"{table}.{name}", entry[field], actual[field])
        return history

    def extends(self, schema_table: Table) -> bool:
        """Returns True if rows of `schema_table` have the same meaning in this store.

        This holds if the store's table of that name is equal or an extension: a vocabulary that
        begins with the values of `schema_table`.

        Raises:
            InputError: as in `vocabulary`.
        """
        table = self.table(schema_table.name)
        if table is None or table == schema_table:
            return table is not None
        if not table.encoding == schema_table.encoding == "vocabulary":
            return False
        if table.rows < schema_table.rows:
            return False
        first = self.values(table.name).slice(0, schema_table.rows - RESERVED_ROWS)
        return checksum(first) == schema_table.checksum

    def table(self, name: str) -> Table | None:
        """Returns the table of that name, or None."""
        return next((t for t in self.schema.tables if t.name == name), None)


def _check_same(path: UPath, must: str | None, actual: str) -> None:
    if actual != must:
        raise InputError(
            f"{path}: is corrupt: its checksum must be {must}, found {actual}. Prepare the data"
            " again."
        )


def no_split(path: files.AnyPath, name: str, splits: Iterable[str], field: str) -> InputError:
    """Returns the error for a store that does not have the split that `field` names."""
    hint = " Set it to '' to train without evaluation." if field == "data.valid" else ""
    return InputError(
        f"{field}: must be a split of {path}, one of {sorted(splits)}: found {name!r}.{hint}"
    )


def is_store(path: files.AnyPath) -> bool:
    """Returns True if the path is a complete store."""
    return (files.to_path(path) / "manifest.json").is_file()


def open_store(path: files.AnyPath) -> Store:
    """Opens the store at `path`.

    Raises:
        InputError: the path is missing or incomplete, or its manifest is corrupt or of another
            version.
    """
    store = files.to_path(path)
    if not is_store(store):  # checked first, because some web servers have no directories
        if not store.exists():
            hint = "" if files.is_local(store) else " Check that its server is reachable."
            raise InputError(f"{store}: no such store.{hint}")
        raise InputError(
            f"{store}: not a complete store, it has no manifest.json. Run `jaxrank prepare`."
        )
    file = store / "manifest.json"
    try:
        return _read_manifest(store, manifest.read(file))
    except KeyError as error:
        raise InputError(
            f"{file}: must have the key {error}: found a manifest without it. Prepare the data"
            " again."
        ) from error
    except (TypeError, AttributeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{file}: must be a manifest of a store: {error}. Prepare the data again."
        ) from error


def _read_manifest(path: UPath, tree: dict[str, Any]) -> Store:
    entries = tree["splits"]
    for name in entries:
        if not _SPLIT.fullmatch(name):
            raise ValueError(f"the name of a split must be a name, or a name and a day: {name!r}")
    spec = StoreSpec(*(tree["spec"][key] for key in StoreSpec._fields))
    schema = validate.parse(Schema, tree["schema"], f"{path / 'manifest.json'}: schema")
    for table in schema.tables:
        if "/" in table.name:  # it is used as a file name
            raise ValueError(f"the name of a table must be one without '/': {table.name!r}")
    return Store(
        path=path,
        schema=schema,
        spec=spec,
        splits={name: StoredSplit(path, name, {name: entry}) for name, entry in entries.items()},
        entries=dict(entries),
        counts=dict(tree["counts"]),
        histories=dict(tree["history"]),
        marks=tuple(files.File(*mark) for mark in tree.get("source_files", [])),
    )
