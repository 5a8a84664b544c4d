"""Writes a store, so that one that was interrupted is not one."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

import jaxrank
from jaxrank.data.block import Block, block_checksum, to_arrow
from jaxrank.data.lock import empty_directory, lock_directory
from jaxrank.data.store import FORMAT_VERSION, Store, open_store
from jaxrank.data.vocabulary import write_file
from jaxrank.errors import InputError
from jaxrank.features import Schema

_BLOCKS_PER_FILE = 64


class SplitWriter:
    """Writes the blocks of one split; `StoreWriter.split` makes it."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir()
        self.files: list[dict[str, Any]] = []
        self._sink: pa.ipc.RecordBatchFileWriter | None = None

    def write(self, block: Block) -> None:
        batch = to_arrow(block)
        if self._sink is None:
            name = f"{len(self.files):05d}.arrow"
            self.files.append({"name": name, "blocks": []})
            self._sink = pa.ipc.new_file(str(self.path / name), batch.schema)
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
        self._sink.close()
        self._sink = None
        entry = self.files[-1]
        path = self.path / entry["name"]
        entry["bytes"] = path.stat().st_size
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            for i, block in enumerate(entry["blocks"]):
                block["checksum"] = block_checksum(reader.get_batch(i))


class StoreWriter:
    """Writes a store under a temporary name; `finish` gives it its own, and only then is it one.

    Used as a context manager: on any error, or if `finish` was not called, nothing is left. One
    that was killed leaves its temporary directory, which the next one empties and uses.

    Raises:
        InputError: something lies at `path` already, or another process is writing it.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._check_free()
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._splits: dict[str, tuple[SplitWriter, dict[str, Any]]] = {}
        self._lock = -1  # a descriptor of the directory, which holds the lock while it is open
        self._finished = False

    def __enter__(self) -> "StoreWriter":
        lock = lock_directory(self._partial)
        if lock is None:
            raise InputError(
                f"{self.path}: must be written by one process at a time: another process is writing"
                " this store. Wait for it, or choose another output."
            )
        self._lock = lock
        try:
            self._check_free()  # another process may have finished it since
            empty_directory(self._partial)
            (self._partial / "vocabulary").mkdir()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for writer, _statistics in self._splits.values():
            with contextlib.suppress(OSError, pa.ArrowException):
                writer.close()
        if not self._finished:  # the name may be another process's by then
            shutil.rmtree(self._partial, ignore_errors=True)
        os.close(self._lock)

    def _check_free(self) -> None:
        if self.path.exists():
            raise InputError(f"{self.path}: must not exist yet, a store is never overwritten.")

    def split(self, name: str, statistics: dict[str, Any]) -> SplitWriter:
        """A writer for one split; `statistics` may be filled until `finish`."""
        writer = SplitWriter(self._partial / name)
        self._splits[name] = (writer, statistics)
        return writer

    def write_vocabulary(self, table: str, values: Sequence[str], counts: Sequence[int]) -> None:
        write_file(self._partial / "vocabulary" / f"{table}.arrow", values, counts)

    def finish(self, schema: Schema, spec: Mapping[str, Any]) -> Store:
        """Writes the manifest and moves the store to its place."""
        splits = {}
        for name, (writer, statistics) in self._splits.items():
            writer.close()
            splits[name] = {"statistics": statistics, "files": writer.files}
        manifest = {
            "format_version": FORMAT_VERSION,
            "jaxrank_version": jaxrank.__version__,
            "schema": schema.to_json(),
            "spec": spec,
            "splits": splits,
        }
        target = self._partial / "manifest.json"
        with open(target, "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self._partial, self.path)
        self._finished = True
        return open_store(self.path)
