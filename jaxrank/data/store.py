"""The store: prepared examples on disk, as blocks of columns, with a manifest.

    STORE/manifest.json               written last, so a store without it is not a store
    STORE/vocabulary/<table>.arrow    values (string) and counts (int64) in row order
    STORE/<split>/00000.arrow         an Arrow IPC file; a record batch is a block of examples

A block holds the features of up to `block_size` examples as a few matrices (fixed-size lists in
Arrow's terms), so a thousand features cost no more to read than one of the same bytes, and reading
is a memory map without a copy. Each block's bytes have a checksum in the manifest. Any Arrow reader
opens these files.
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

import jaxrank
from jaxrank.data.lock import empty_directory, lock_directory
from jaxrank.data.vocabulary import checksum, read_file, write_file
from jaxrank.errors import InputError
from jaxrank.features import RESERVED_ROWS, Schema, Table

FORMAT_VERSION = 1
_BLOCKS_PER_FILE = 64
_OPEN_FILES = 64  # of a split; each is a memory map, and a process may have only so many

# The matrices of a block: name, dtype and which count of the schema is its number of columns.
_MATRICES = {
    "floats": np.float32,
    "ids": np.int32,
    "list_lengths": np.int32,
    "labels": np.float32,
    "weights": np.float32,
    "truth": np.float32,
}


class Block(NamedTuple):
    """n consecutive examples.

    floats: f32[n, floats], transformed, nothing missing.
    ids: i32[n, id columns] rows of each column's table, or PAD.
    list_lengths: i32[n, lists].
    list_values: i32[total] rows of each list's table, example by example and within an example
        list by list.
    list_weights: f32[total], or None where no list is weighted.
    labels: f32[n, tasks] 0, 1, or NaN where unknown.
    weights: f32[n, tasks] finite, not negative; None where no task is weighted.
    truth: f32[n, tasks] the planted probability of each label, NaN where the task has none; None
        where no task has one.
    kept: the columns that are passed through to predictions, of any Arrow types.
    """

    floats: np.ndarray
    ids: np.ndarray
    list_lengths: np.ndarray
    list_values: np.ndarray
    list_weights: np.ndarray | None
    labels: np.ndarray
    weights: np.ndarray | None
    truth: np.ndarray | None
    kept: pa.RecordBatch

    @property
    def rows(self) -> int:
        return len(self.labels)


def concatenate(blocks: Sequence[Block]) -> Block:
    """One block of all examples, in order."""
    if len(blocks) == 1:
        return blocks[0]

    def joined(name: str) -> Any:
        arrays = [getattr(b, name) for b in blocks]
        return None if arrays[0] is None else np.concatenate(arrays)

    arrays = {name: joined(name) for name in Block._fields if name != "kept"}
    kept = pa.Table.from_batches([b.kept for b in blocks]).combine_chunks()
    batches = kept.to_batches()
    return Block(**arrays, kept=batches[0] if batches else blocks[0].kept)


def slice_block(block: Block, start: int, stop: int) -> Block:
    """The examples [start, stop), without a copy."""
    per_example = block.list_lengths.sum(axis=1, dtype=np.int64)
    first = int(per_example[:start].sum())
    last = first + int(per_example[start:stop].sum())

    def cut(array: np.ndarray | None, lo: int, hi: int) -> Any:
        return None if array is None else array[lo:hi]

    return Block(
        floats=block.floats[start:stop],
        ids=block.ids[start:stop],
        list_lengths=block.list_lengths[start:stop],
        list_values=block.list_values[first:last],
        list_weights=cut(block.list_weights, first, last),
        labels=block.labels[start:stop],
        weights=cut(block.weights, start, stop),
        truth=cut(block.truth, start, stop),
        kept=block.kept.slice(start, stop - start),
    )


def _to_arrow(block: Block) -> pa.RecordBatch:
    columns: dict[str, pa.Array] = {}
    for name in _MATRICES:
        matrix = getattr(block, name)
        if matrix is not None:
            values = pa.array(np.ascontiguousarray(matrix).reshape(-1))
            # A matrix without columns cannot be told from one without rows; it is left out.
            if matrix.shape[1]:
                columns[name] = pa.FixedSizeListArray.from_arrays(values, matrix.shape[1])
    if block.list_lengths.shape[1]:
        ends = np.cumsum(block.list_lengths.sum(axis=1, dtype=np.int64))
        offsets = pa.array(np.concatenate([[0], ends]), pa.int64())
        columns["list_values"] = pa.LargeListArray.from_arrays(offsets, pa.array(block.list_values))
        if block.list_weights is not None:
            columns["list_weights"] = pa.LargeListArray.from_arrays(
                offsets, pa.array(block.list_weights)
            )
    for name in block.kept.schema.names:
        columns[f"kept.{name}"] = block.kept.column(name)
    return pa.RecordBatch.from_pydict(columns)


def _from_arrow(batch: pa.RecordBatch) -> Block:
    rows = batch.num_rows
    names = set(batch.schema.names)

    def matrix(name: str) -> np.ndarray:
        if name not in names:
            return np.zeros((rows, 0), _MATRICES[name])
        column = batch.column(name)
        return column.flatten().to_numpy(zero_copy_only=True).reshape(rows, column.type.list_size)

    def values(name: str, dtype: type) -> np.ndarray:
        if name not in names:
            return np.zeros(0, dtype)
        return batch.column(name).flatten().to_numpy(zero_copy_only=True)

    kept = {n.removeprefix("kept."): batch.column(n) for n in batch.schema.names if "kept." in n}
    return Block(
        floats=matrix("floats"),
        ids=matrix("ids"),
        list_lengths=matrix("list_lengths"),
        list_values=values("list_values", np.int32),
        list_weights=values("list_weights", np.float32) if "list_weights" in names else None,
        labels=matrix("labels"),
        weights=matrix("weights") if "weights" in names else None,
        truth=matrix("truth") if "truth" in names else None,
        kept=pa.RecordBatch.from_pydict(kept),
    )


def _block_checksum(batch: pa.RecordBatch) -> str:
    """Of all the values of a block, whatever file they lie in."""
    digest = xxhash.xxh3_64()
    for column in batch.columns:
        for buffer in column.buffers():
            if buffer is not None:
                digest.update(buffer)
    return digest.hexdigest()


def _checked_file(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A file's entry of the manifest, with the keys that it must have and no others."""
    blocks = [{key: block[key] for key in ("rows", "checksum")} for block in entry["blocks"]]
    return {"name": entry["name"], "bytes": entry["bytes"], "blocks": blocks}


class Split:
    """The examples of one split of a store, in their stored order."""

    def __init__(self, store: Path, name: str, entry: Mapping[str, Any]):
        self.path = store / name
        self.name = name
        self.statistics: dict[str, Any] = entry["statistics"]
        self._files: list[dict[str, Any]] = [_checked_file(f) for f in entry["files"]]
        sizes = [b["rows"] for f in self._files for b in f["blocks"]]
        self.block_rows = np.asarray(sizes, np.int64)
        self._where = [(f, i) for f in self._files for i in range(len(f["blocks"]))]
        self._readers: dict[str, pa.ipc.RecordBatchFileReader] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_readers": {}}  # memory maps do not travel to input workers

    @property
    def rows(self) -> int:
        return int(self.block_rows.sum())

    @property
    def bytes(self) -> int:
        return sum(f["bytes"] for f in self._files)

    @property
    def fingerprint(self) -> str:
        """Of the bytes of all blocks in order: data that was prepared anew has another one."""
        digest = xxhash.xxh3_128()
        for file in self._files:
            for block in file["blocks"]:
                digest.update(f"{block['rows']} {block['checksum']}\n".encode())
        return digest.hexdigest()

    def _reader(self, entry: Mapping[str, Any]) -> pa.ipc.RecordBatchFileReader:
        name = entry["name"]
        if name not in self._readers:
            path = self.path / name
            if not path.is_file():
                raise InputError(f"{path}: this file of the store is missing.")
            found = path.stat().st_size
            if found != entry["bytes"]:
                raise InputError(
                    f"{path}: must have {entry['bytes']} bytes as the manifest says: found {found}."
                )
            while len(self._readers) >= _OPEN_FILES:
                # The map is closed when no block needs it any more.
                del self._readers[next(iter(self._readers))]
            try:
                self._readers[name] = pa.ipc.open_file(pa.memory_map(str(path)))
            except (pa.ArrowInvalid, OSError) as error:
                raise InputError(f"{path}: not a readable Arrow file: {error}.") from error
        return self._readers[name]

    def read_block(self, index: int) -> Block:
        """Block `index`, checked against its checksum.

        Raises:
            InputError: the file is missing or its bytes are not those that were written.
        """
        entry, position = self._where[index]
        expected = entry["blocks"][position]["checksum"]
        reader = self._reader(entry)
        try:
            batch = reader.get_batch(position)
            found = _block_checksum(batch)
        except (pa.ArrowException, OSError, ValueError) as error:
            found = f"unreadable, {error}"
        if found != expected:
            raise InputError(
                f"{self.path / entry['name']}: block {position} is corrupt: its checksum must be"
                f" {expected}, found {found}. Prepare the data again."
            )
        return _from_arrow(batch)

    def blocks(self) -> Iterator[Block]:
        return (self.read_block(i) for i in range(len(self.block_rows)))


@dataclasses.dataclass(frozen=True)
class Store:
    """A complete store; `open_store` makes it."""

    path: Path
    schema: Schema
    spec: dict[str, Any]  # the config's `features`, as they were when it was prepared
    splits: dict[str, Split]

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise InputError(f"{self.path}: has no split {name!r}, only {sorted(self.splits)}.")
        return self.splits[name]

    def vocabulary(self, table: str) -> tuple[list[str], np.ndarray]:
        """A table's values in row order (behind the reserved rows), and counts i64[values].

        Raises:
            InputError: the table has none, or its file is missing or not the one that was written.
        """
        expected = self._table(table)
        if expected is None or expected.encoding != "vocabulary":
            raise InputError(
                f"{self.path}: must have a table {table!r} with encoding='vocabulary': found"
                f" {expected or [t.name for t in self.schema.tables]}."
            )
        path = self.path / "vocabulary" / f"{table}.arrow"
        content = read_file(path)
        found = checksum(content["value"])
        if found != expected.checksum:
            raise InputError(
                f"{path}: is corrupt: its checksum must be {expected.checksum}, found {found}."
                " Prepare the data again."
            )
        return content["value"].to_pylist(), content["count"].to_numpy()

    def extends(self, schema_table: Table) -> bool:
        """Whether rows of `schema_table` mean the same in this store.

        So it is where the store's table of that name is equal, or grew from it: a vocabulary whose
        first values are those of `schema_table`.

        Raises:
            InputError: as of `vocabulary`.
        """
        mine = self._table(schema_table.name)
        if mine is None or mine == schema_table:
            return mine is not None
        if not mine.encoding == schema_table.encoding == "vocabulary":
            return False
        if mine.rows < schema_table.rows:
            return False
        values, _ = self.vocabulary(mine.name)
        first = pa.array(values[: schema_table.rows - RESERVED_ROWS], pa.string())
        return checksum(first) == schema_table.checksum

    def _table(self, name: str) -> Table | None:
        return next((t for t in self.schema.tables if t.name == name), None)


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a complete store lies there."""
    return (Path(path) / "manifest.json").is_file()


def open_store(path: str | os.PathLike[str]) -> Store:
    """The store at `path`.

    Raises:
        InputError: nothing is there, it is not complete, its manifest is damaged, or another
            version wrote it.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such store.")
    if not is_store(path):
        raise InputError(
            f"{path}: not a complete store, it has no manifest.json. Run `jaxrank prepare`."
        )
    file = path / "manifest.json"
    try:
        manifest = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file}: not readable as JSON: {error}.") from error
    try:
        return _of_manifest(path, manifest)
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


def _of_manifest(path: Path, manifest: Any) -> Store:
    if not isinstance(manifest, dict):
        raise InputError(
            f"{path / 'manifest.json'}: must be a dict with a key 'format_version': found"
            f" {type(manifest).__name__}. Prepare the data again."
        )
    found = manifest["format_version"]
    if found != FORMAT_VERSION:
        raise InputError(
            f"{path}: the store's format version must be {FORMAT_VERSION}, found {found}"
            f" (written by jaxrank {manifest.get('jaxrank_version')}). Prepare the data again."
        )
    return Store(
        path=path,
        schema=Schema.from_json(manifest["schema"]),
        spec=dict(manifest["spec"]),
        splits={name: Split(path, name, s) for name, s in manifest["splits"].items()},
    )


class SplitWriter:
    """Writes the blocks of one split; `StoreWriter.split` makes it."""

    def __init__(self, path: Path):
        self.path = path
        path.mkdir()
        self.files: list[dict[str, Any]] = []
        self._sink: pa.ipc.RecordBatchFileWriter | None = None

    def write(self, block: Block) -> None:
        batch = _to_arrow(block)
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
                block["checksum"] = _block_checksum(reader.get_batch(i))


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
