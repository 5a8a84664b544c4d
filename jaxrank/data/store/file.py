"""A file of a store. Blocks are verified when they are read."""

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from upath import UPath

from jaxrank.data import files
from jaxrank.data.examples import Examples
from jaxrank.data.store.block import block_checksum, from_arrow
from jaxrank.errors import InputError

COLUMNS = ("list_lengths", "requests")  # that are also read without the others


class Readers:
    """The readers of open files by name, at most `limit`. The one that was opened first is closed
    first.
    """

    def __init__(self, limit: int):
        self._limit, self._lock = limit, threading.Lock()
        self._readers: dict[str, pa.ipc.RecordBatchFileReader] = {}

    def get(self, name: str) -> pa.ipc.RecordBatchFileReader | None:
        return self._readers.get(name)

    def add(self, name: str, reader: pa.ipc.RecordBatchFileReader) -> None:
        with self._lock:
            while len(self._readers) >= self._limit:
                # The memory map is closed when no block references it any more.
                del self._readers[next(iter(self._readers))]
            self._readers[name] = reader

    def remove(self, name: str) -> None:
        with self._lock:
            self._readers.pop(name, None)


class StoredFile:
    """One file of a split, read by one thread at a time.

    Arrow does not guarantee that two threads can use one file reader at the same time.

    Args:
        path: of the file.
        entry: of the manifest.
        readers: those of all files of the split.
    """

    def __init__(self, path: UPath, entry: Mapping[str, Any], readers: Readers):
        self._path, self._entry, self._readers = path, entry, readers
        self._lock = threading.Lock()
        self._status: tuple[int, ...] | None = None
        self._verified: set[int] = set()

    def read_block(self, position: int) -> Examples:
        """Reads block `position` of the file. See `Split.read_block`."""
        with self._lock:
            return self._read_block(position)

    def matrix(self, position: int, column: str) -> np.ndarray | None:
        """Returns one matrix of a block, unverified, or None if it is absent or unreadable.

        Args:
            column: one of `COLUMNS`.
        """
        with self._lock:
            self._reader()  # raises if the file is missing or has changed
            name = f"{self._entry['name']}: {column}"
            try:
                reader = self._readers.get(name)
                if reader is None:
                    reader = self._open([column])
                    self._readers.add(name, reader)
                batch = reader.get_batch(position)
                batch.validate()
                matrix: np.ndarray | None = getattr(from_arrow(batch), column)
                return matrix
            except (pa.ArrowException, OSError, ValueError):
                return None

    def _read_block(self, position: int) -> Examples:
        expected = self._entry["blocks"][position]["checksum"]
        reader = self._reader()
        try:
            batch = reader.get_batch(position)
            if position in self._verified:
                return from_arrow(batch)
            batch.validate()  # buffers shorter than their arrays would crash the process
            actual = block_checksum(batch)
        except (pa.ArrowException, OSError, ValueError) as error:
            actual = f"unreadable, {error}"
        if actual != expected:
            raise InputError(
                f"{self._path}: block {position} is corrupt: its checksum must be"
                f" {expected}, found {actual}. Prepare the data again."
            )
        self._verified.add(position)
        return from_arrow(batch)

    def _reader(self) -> pa.ipc.RecordBatchFileReader:
        name = self._entry["name"]
        status = _status(str(self._path))
        if status and status != self._status:
            # Reading a memory map past the end of a truncated file would crash the process.
            self._readers.remove(name)
            for column in COLUMNS:
                self._readers.remove(f"{name}: {column}")
            self._verified.clear()
            self._status = status
        reader = self._readers.get(name)
        if reader is None:
            reader = self._open()
            self._readers.add(name, reader)
        return reader

    def _open(self, columns: Sequence[str] = ()) -> pa.ipc.RecordBatchFileReader:
        """Returns a reader of the given columns, or of all columns."""
        path = self._path
        if not path.is_file():
            raise InputError(f"{path}: this file of the store is missing. Prepare the data again.")
        size = path.stat().st_size
        if size != self._entry["bytes"]:
            raise InputError(
                f"{path}: must have {self._entry['bytes']} bytes as the manifest says: found"
                f" {size}."
            )
        try:
            local = files.is_local(str(path))
            file = pa.memory_map(str(path)) if local else files.open_input(str(path))
            reader = pa.ipc.open_file(file)
            if not columns:
                return reader
            fields = [reader.schema.get_field_index(column) for column in columns]
            return pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=fields))
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path}: not a readable Arrow file: {error}.") from error


def _status(path: str) -> tuple[int, ...] | None:
    """Returns properties that change with a local file, or None if there is no local file."""
    if not files.is_local(path):
        return None
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
