"""Writes a store atomically: an interrupted one is not a store."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from upath import UPath

import jaxrank
from jaxrank.data import files
from jaxrank.data.examples import Examples
from jaxrank.data.lock import new_directory, remove_empty_directories
from jaxrank.data.statistics.admission import Changes, TableHistory
from jaxrank.data.statistics.vocabulary import counts_checksum, write_file
from jaxrank.data.store import manifest
from jaxrank.data.store.block import block_checksum, to_arrow
from jaxrank.data.store.reader import Store, StoreSpec, open_store
from jaxrank.errors import InputError, RunError
from jaxrank.features import Schema

_BLOCKS_PER_FILE = 64
SCRATCH = "_units"  # directory of temporary files while a store is made. No split has such a name
_REJECTED = "rejected.jsonl"
# Names of the files that an attempt writes.
_OF_A_STORE = re.compile(
    rf"vocabulary/[^/]+\.(arrow|waiting)|\w[\w-]*(/\d{{4}}-\d\d-\d\d)?/\d{{5,}}-\d{{5,}}\.arrow|{_REJECTED}"
)


class SplitWriter:
    """Writes consecutive blocks of a split.

    Args:
        path: the directory of the split. Created if needed.
        prefix: of the names of its files.
        compression: of the blocks' buffers, one of `validate.COMPRESSIONS`.

    Attributes:
        files: the manifest entry of each closed file.
    """

    def __init__(self, path: UPath, prefix: str = "", compression: str = ""):
        self.path, self._prefix = path, prefix
        path.mkdir(parents=True, exist_ok=True)
        self.files: list[dict[str, Any]] = []
        self._options = pa.ipc.IpcWriteOptions(compression=compression or None)
        self._file: Any = None
        self._sink: pa.ipc.RecordBatchFileWriter | None = None

    def write(self, examples: Examples) -> None:
        """Writes the examples as one block."""
        batch = to_arrow(examples)
        if self._sink is None:
            name = f"{self._prefix}{len(self.files):05d}.arrow"
            self.files.append({"name": name, "blocks": []})
            self._file = (self.path / name).open("wb")
            self._sink = pa.ipc.new_file(self._file, batch.schema, options=self._options)
        self._sink.write_batch(batch)
        blocks = self.files[-1]["blocks"]
        # Hashes the bytes as a reader sees them. Padding and trimming of buffers by the writer
        # therefore make no difference.
        blocks.append({"rows": batch.num_rows, "checksum": ""})
        if len(blocks) == _BLOCKS_PER_FILE:
            self.close()

    def close(self) -> None:
        """Closes the current file and computes the checksums of its blocks."""
        if self._sink is None:
            return
        sink, self._sink = self._sink, None
        with self._file:
            sink.close()
        entry = self.files[-1]
        path = self.path / entry["name"]
        entry["bytes"] = path.stat().st_size
        with _reading(path) as source:
            reader = pa.ipc.open_file(source)
            for i, block in enumerate(entry["blocks"]):
                block["checksum"] = block_checksum(reader.get_batch(i))


def _reading(path: UPath) -> pa.NativeFile:
    local = files.is_local(str(path))
    return pa.memory_map(str(path)) if local else files.open_input(str(path))


class StoreWriter:
    """Writes a store under a temporary name. `finish` renames it, and makes it complete.

    A store at a URL is written in place, because renaming a directory is a copy there. It is
    complete once its manifest exists, which is written last.

    A context manager: on an error, or without a call of `finish`, the temporary directory is
    removed unless `keep` is True. A killed process leaves its directory, and the next run continues
    in it. Files of other attempts are removed before the store is completed.

    Args:
        path: of the store.

    Attributes:
        work: the temporary directory.
        keep: True if it is kept on an error. Initially True if another run left reusable work.

    Raises:
        InputError: `path` exists, or another process is writing it.
    """

    def __init__(self, path: files.AnyPath):
        self.path = files.to_path(path)
        self._local = files.is_local(str(path))
        self.keep = False
        self._check_free()
        self.work = self.path
        self._splits: dict[str, dict[str, Any]] = {}
        self._counts: dict[str, str] = {}
        self._history: dict[str, dict[str, Any]] = {}
        self._has_rejected = False
        self._directory = contextlib.ExitStack()

    def __enter__(self) -> "StoreWriter":
        if not self._local:
            self.work.mkdir(parents=True, exist_ok=True)
            return self
        locked = RunError(
            f"{self.path}: must be written by one process at a time: another process is writing"
            " this store. Wait for it, or choose another output."
        )
        with contextlib.ExitStack() as stack:
            work = new_directory(
                Path(str(self.path)),
                check_free=self._check_free,
                locked=locked,
                keep=lambda: self.keep,
            )
            self.work = files.to_path(stack.enter_context(work))
            self.keep = (self.work / SCRATCH).is_dir()
            (self.work / "vocabulary").mkdir(exist_ok=True)
            self._directory = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.close()

    def _check_free(self) -> None:
        # A dangling link counts too, because a directory cannot replace it.
        taken = (
            os.path.lexists(str(self.path))
            if self._local
            else (self.path / "manifest.json").exists()
        )
        if taken:
            raise InputError(
                f"{self.path}: must not exist yet, a store is never overwritten."
                " Remove it or name another path."
            )

    def add(self, name: str, files: Sequence[Mapping[str, Any]], statistics: Mapping) -> None:
        """Adds a split whose files `SplitWriter`s have written to directory `name` of `work`."""
        self._splits[name] = {"statistics": statistics, "files": list(files)}

    def write_vocabulary(
        self,
        table: str,
        values: Sequence[str] | pa.Array | pa.ChunkedArray,
        counts: Sequence[int] | np.ndarray,
        history: TableHistory | None = None,
        changes: Changes | None = None,
    ) -> None:
        """Writes the vocabulary of a table.

        Args:
            history: what a later preparation needs beside it. `Store.history` reads it.
            changes: of the vocabulary, for the manifest.
        """
        directory = self.work / "vocabulary"
        directory.mkdir(parents=True, exist_ok=True)
        last_days = history.last_days if history else None
        write_file(directory / f"{table}.arrow", values, counts, last_days)
        self._counts[table] = counts_checksum(counts)
        if history is None:
            return
        waiting = history.waiting
        columns = (waiting[name].to_numpy() for name in ("count", "last_day"))
        write_file(directory / f"{table}.waiting", waiting["value"], *columns)
        self._history[table] = history.to_state()
        if changes is not None:
            self._history[table]["changes"] = changes.to_state()

    def write_rejected(self, lines: Sequence[str]) -> None:
        """Writes the skipped records, one line of JSON each."""
        text = "".join(f"{line}\n" for line in lines)
        files.write_whole(self.work / _REJECTED, text.encode())
        self._has_rejected = True

    def _remove_others(self) -> None:
        """Removes files that are not part of the store.

        These are temporary files, and files of attempts with other options or data.
        """
        files.remove_directory(self.work / SCRATCH)
        written = {f"{name}/{f['name']}" for name, s in self._splits.items() for f in s["files"]}
        written |= {f"vocabulary/{table}.arrow" for table in self._counts}
        written |= {f"vocabulary/{table}.waiting" for table in self._history}
        written |= {_REJECTED} if self._has_rejected else set()
        for name in files.relative_names(self.work):
            # The URL may contain unrelated files, including other stores.
            if name not in written and (self._local or _OF_A_STORE.fullmatch(name)):
                files.remove(self.work / name)
        if self._local:
            remove_empty_directories(Path(str(self.work)))
            (self.work / "vocabulary").mkdir(exist_ok=True)

    def finish(self, schema: Schema, spec: StoreSpec, marks: Sequence[files.File] = ()) -> Store:
        """Writes the manifest and moves the store to its final path.

        Args:
            marks: versions of the source files; see `Store.marks`.

        Raises:
            InputError: the path exists by now.
        """
        self._check_free()  # before the work is removed
        self._remove_others()
        tree = {
            "format_version": manifest.FORMAT_VERSION,
            "jaxrank_version": jaxrank.__version__,
            "schema": schema,
            "spec": spec,
            "splits": self._splits,
            "counts": self._counts,
            "history": self._history,
            "source_files": [list(files.absolute(mark)) for mark in marks],
        }
        with (self.work / "manifest.json").open("w") as file:
            file.write(manifest.SEAL.to_text(tree))
            if self._local:
                file.flush()
                os.fsync(file.fileno())
        if self._local:
            os.rename(str(self.work), str(self.path))
        return open_store(self.path)
