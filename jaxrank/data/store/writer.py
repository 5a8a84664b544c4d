"""Writes a store, so that one that was interrupted is not one."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from upath import UPath

import jaxrank
from jaxrank.data import files
from jaxrank.data.examples import Examples
from jaxrank.data.lock import new_directory, remove_empty_directories
from jaxrank.data.statistics.vocabulary import counts_checksum, write_file
from jaxrank.data.store import manifest
from jaxrank.data.store.block import block_checksum, to_arrow
from jaxrank.data.store.reader import Store, StoreSpec, open_store
from jaxrank.errors import InputError, RunError
from jaxrank.features import Schema

_BLOCKS_PER_FILE = 64
SCRATCH = "_units"  # a directory of what is kept while a store is made; no split has such a name
_REJECTED = "rejected.jsonl"
# Names of the files that an attempt leaves.
_OF_A_STORE = re.compile(
    rf"vocabulary/[^/]+\.arrow|\w[\w-]*(/\d{{4}}-\d\d-\d\d)?/\d{{5,}}-\d{{5,}}\.arrow|{_REJECTED}"
)


class SplitWriter:
    """Writes consecutive blocks of a split.

    Args:
        path: the directory of the split; made if need be.
        prefix: of the names of its files.
        compression: of the blocks' buffers, one of `validate.COMPRESSIONS`.

    Attributes:
        files: what the manifest holds of each file, once it is closed.
    """

    def __init__(self, path: UPath, prefix: str = "", compression: str = ""):
        self.path, self._prefix = path, prefix
        path.mkdir(parents=True, exist_ok=True)
        self.files: list[dict[str, Any]] = []
        self._options = pa.ipc.IpcWriteOptions(compression=compression or None)
        self._file: Any = None
        self._sink: pa.ipc.RecordBatchFileWriter | None = None

    def write(self, examples: Examples) -> None:
        """Writes them as one block."""
        batch = to_arrow(examples)
        if self._sink is None:
            name = f"{self._prefix}{len(self.files):05d}.arrow"
            self.files.append({"name": name, "blocks": []})
            self._file = (self.path / name).open("wb")
            self._sink = pa.ipc.new_file(self._file, batch.schema, options=self._options)
        self._sink.write_batch(batch)
        blocks = self.files[-1]["blocks"]
        # The bytes are hashed as a reader meets them, so what the writer did to them (padding,
        # trimmed buffers) is no difference.
        blocks.append({"rows": batch.num_rows, "checksum": ""})
        if len(blocks) == _BLOCKS_PER_FILE:
            self.close()

    def close(self) -> None:
        """Ends the file in hand and takes the checksums of its blocks."""
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
    """Writes a store under a temporary name; `finish` gives it its own, and only then is it one.

    A store at a URL is written in its place, as renaming a directory is a copy there; it is one
    when its manifest is there, which is written last.

    Used as a context manager: on any error, or if `finish` was not called, nothing is left unless
    `keep`. One that was killed leaves its temporary directory, in which the next one goes on. What
    others left there and is no part of this store is removed before it becomes one.

    Args:
        path: of the store.

    Attributes:
        work: the temporary directory.
        keep: whether it stays on an error; at first if another left what can be gone on with.

    Raises:
        InputError: something lies at `path` already, or another process is writing it.
    """

    def __init__(self, path: files.AnyPath):
        self.path = files.path_of(path)
        self._local = files.is_local(str(path))
        self.keep = False
        self._check_free()
        self.work = self.path
        self._splits: dict[str, dict[str, Any]] = {}
        self._counts: dict[str, str] = {}
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
            self.work = files.path_of(stack.enter_context(work))
            self.keep = (self.work / SCRATCH).is_dir()
            (self.work / "vocabulary").mkdir(exist_ok=True)
            self._directory = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._directory.close()

    def _check_free(self) -> None:
        # A link to nothing is there, too: a directory cannot be moved over it.
        taken = (
            os.path.lexists(str(self.path))
            if self._local
            else (self.path / "manifest.json").exists()
        )
        if taken:
            raise InputError(f"{self.path}: must not exist yet, a store is never overwritten.")

    def add(self, name: str, files: Sequence[Mapping[str, Any]], statistics: Mapping) -> None:
        """A split whose files `SplitWriter`s have written to the directory `name` of `work`."""
        self._splits[name] = {"statistics": statistics, "files": list(files)}

    def write_vocabulary(self, table: str, values: Sequence[str], counts: Sequence[int]) -> None:
        directory = self.work / "vocabulary"
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / f"{table}.arrow", values, counts)
        self._counts[table] = counts_checksum(counts)

    def write_rejected(self, lines: Sequence[str]) -> None:
        """The records that were left out, each a line of JSON."""
        text = "".join(f"{line}\n" for line in lines)
        files.write_whole(self.work / _REJECTED, text.encode())
        self._has_rejected = True

    def _remove_others(self) -> None:
        """Removes what is no part of the store: what is kept while it is made, and what attempts
        with other options or files have left."""
        files.remove_directory(self.work / SCRATCH)
        written = {f"{name}/{f['name']}" for name, s in self._splits.items() for f in s["files"]}
        written |= {f"vocabulary/{table}.arrow" for table in self._counts}
        written |= {_REJECTED} if self._has_rejected else set()
        for name in files.names_below(self.work):
            # A URL may have files of others below it, among them other stores.
            if name not in written and (self._local or _OF_A_STORE.fullmatch(name)):
                files.remove(self.work / name)
        if self._local:
            remove_empty_directories(Path(str(self.work)))
            (self.work / "vocabulary").mkdir(exist_ok=True)

    def finish(self, schema: Schema, spec: StoreSpec) -> Store:
        """Writes the manifest and moves the store to its place.

        Raises:
            InputError: something else is there by now.
        """
        self._check_free()  # before what has been done is removed
        self._remove_others()
        tree = {
            "format_version": manifest.FORMAT_VERSION,
            "jaxrank_version": jaxrank.__version__,
            "schema": schema,
            "spec": spec,
            "splits": self._splits,
            "counts": self._counts,
        }
        with (self.work / "manifest.json").open("w") as file:
            file.write(manifest.SEAL.to_text(tree))
            if self._local:
                file.flush()
                os.fsync(file.fileno())
        if self._local:
            os.rename(str(self.work), str(self.path))
        return open_store(self.path)
