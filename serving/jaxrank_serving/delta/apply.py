"""Applies a delta that `jaxrank export --since` wrote. `delta.__main__` is the command."""

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrank_serving.bundle import (
    MANIFEST,
    Bundle,
    check_entries,
    check_version,
    checksum,
    open_bundle,
    open_delta,
    seal,
)
from jaxrank_serving.delta.parts import (
    ADDED,
    CHANGED,
    RECORD,
    REMOVED,
    ROWS,
    TARGET,
    TableFile,
    base_rows,
    table_files,
    together,
)
from jaxrank_serving.errors import BundleError
from jaxrank_serving.index import arrays
from jaxrank_serving.signature import Signature, parse, upgraded

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]


def apply_delta(base: str | Path, delta: str | Path, output: str | Path) -> str:
    """Writes the bundle that a delta makes of its base, and returns its version.

    The result is equal to the whole bundle that was exported, bit for bit: all checksums are
    compared. It appears under its name only when it is complete.

    Args:
        base: the bundle that the delta was written for.
        delta: directory of the delta.
        output: a directory that must not exist.

    Raises:
        BundleError: the base is another bundle, or a file is damaged, or `output` exists.
        OSError: the output cannot be written.
    """
    output = Path(output)
    change = open_delta(delta)
    whole = open_bundle(base)
    if change.base != whole.version:
        raise BundleError(
            f"{base}: must be the bundle {change.base}, which {delta} changes: found the bundle"
            f" {whole.version}. Apply the deltas in the order in which they were written."
        )
    change.verify()
    if os.path.lexists(output):
        raise BundleError(
            f"{output}: must not exist: found an existing path. Name another directory."
        )
    content = change.file(TARGET).read_bytes()
    target = _target(change.path / TARGET, content)
    with _partial(output) as partial:
        _write(whole, change, target, partial)
        (partial / MANIFEST).write_bytes(content)
        version = open_bundle(partial).version
        os.rename(partial, output)
    return version


@contextlib.contextmanager
def _partial(output: Path) -> Iterator[Path]:
    """Creates a folder beside the output, and removes it at the end if it is still there.

    The folder is locked meanwhile. One without a lock was left by a process that was killed, and
    is removed.
    """
    for path in output.parent.glob(f".{glob.escape(output.name)}.[0-9]*.delta"):
        with _locked(path) as is_left:
            if is_left:
                shutil.rmtree(path, ignore_errors=True)
    partial = output.with_name(f".{output.name}.{os.getpid()}.delta")
    partial.mkdir(parents=True)
    try:
        with _locked(partial):
            yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Locks a folder. Yields False if another process has locked it, or it cannot be locked."""
    if fcntl is None:
        yield False
        return
    with contextlib.ExitStack() as stack:
        is_locked = False
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        yield is_locked


def _target(path: Path, content: bytes) -> dict[str, Any]:
    """Returns the manifest of the result."""
    try:
        target = json.loads(content)
    except (ValueError, RecursionError):
        target = None
    is_sealed = isinstance(target, dict) and target.get("checksum") == seal(target)
    if not is_sealed:
        raise BundleError(f"{path}: must be a manifest: found other content.")
    check_version(path, target)
    check_entries(path, target)
    return target


def _write(base: Bundle, delta: Any, target: dict[str, Any], folder: Path) -> None:
    """Writes and checks all files of the result but its manifest."""
    signature = _signature(base, delta, target["format_version"])
    tables = {file.name: file for file in table_files(signature)}
    for name, entry in target["files"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in delta.files:
            shutil.copyfile(delta.file(name), path)
        elif name in tables and name + ROWS in delta.files:
            _write_rows(base, delta, signature, tables[name], path)
        elif name == signature.index.file and name + ADDED in delta.files:
            _write_index(base, delta, signature, path)
        else:
            shutil.copyfile(base.file(name), path)
        if path.stat().st_size != entry["bytes"] or checksum(path) != entry["checksum"]:
            raise BundleError(
                f"{delta.path}: {name} must have the checksum {entry['checksum']} after it is"
                f" changed: found another. Verify {base.path}, which may be damaged."
            )


def _signature(base: Bundle, delta: Any, version: int) -> Signature:
    name = "signature.json"
    if name not in delta.files:
        return base.signature
    return parse(upgraded(json.loads(delta.file(name).read_bytes()), version))


def _write_rows(
    base: Bundle, delta: Any, signature: Signature, file: TableFile, path: Path
) -> None:
    rows = _mapped(delta.file(file.name + ROWS), np.dtype("<i8"))
    changed = _mapped(delta.file(file.name + CHANGED), np.dtype((np.uint8, file.row_bytes)))
    written = 0
    with open(path, "wb") as out:
        for first, piece in base_rows(signature, file, base):
            start, stop = np.searchsorted(rows, [first, first + len(piece)])
            places = rows[start:stop] - first
            if start != written or (np.diff(places) <= 0).any() or len(changed) != len(rows):
                break
            piece[places] = changed[start:stop]
            piece.tofile(out)
            written = stop
    if written != len(rows):
        raise BundleError(
            f"{delta.file(file.name + ROWS)}: must have rising numbers of rows, each with a row of"
            f" {file.name + CHANGED}: found others."
        )


def _write_index(base: Bundle, delta: Any, signature: Signature, path: Path) -> None:
    name, bits = signature.index.file, signature.index.bits
    old_hashes, _, old_rows = arrays(base.file(base.signature.index.file), base.signature.index)
    removed = _mapped(delta.file(name + REMOVED), np.dtype("<u8"))
    added = _mapped(delta.file(name + ADDED), RECORD)
    counts = np.zeros(2**bits, np.int64)
    rows_path = path.with_name(f"{path.name}.rows")
    with open(path, "wb") as out, open(rows_path, "wb") as rows_out:
        for old, new in together(old_hashes, added["hash"]):
            before = old_hashes[old]
            ends = before[[0, -1]] if len(before) else np.zeros(2, np.uint64)
            start, stop = (
                np.searchsorted(removed, ends[0]),
                np.searchsorted(removed, ends[1], "right"),
            )
            kept = ~np.isin(before, removed[start:stop])
            kept &= ~np.isin(before, added["hash"][new])
            merged = np.empty(int(kept.sum()) + new.stop - new.start, RECORD)
            merged["hash"] = np.concatenate([before[kept], added["hash"][new]])
            merged["row"] = np.concatenate([old_rows[old][kept], added["row"][new]])
            merged = merged[np.argsort(merged["hash"], kind="stable")]
            prefixes = (merged["hash"] >> np.uint64(64 - bits)).astype(np.int64)
            places, sizes = np.unique(prefixes, return_counts=True)
            counts[places] += sizes
            merged["hash"].copy().tofile(out)
            merged["row"].copy().tofile(rows_out)
        np.concatenate([[0], np.cumsum(counts)]).astype("<u4").tofile(out)
    with open(path, "ab") as out, open(rows_path, "rb") as rows_in:
        shutil.copyfileobj(rows_in, out)
    rows_path.unlink()


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    """Maps a file of rows into memory. Files without rows cannot be mapped."""
    size = path.stat().st_size
    if not size:
        return np.empty(0, dtype)
    if size % dtype.itemsize:
        raise BundleError(
            f"{path}: must have rows of {dtype.itemsize} bytes: found {size:,} bytes."
        )
    content = np.memmap(path, np.uint8, "r").view(np.ndarray)
    return content.view(dtype.base).reshape(-1, *dtype.shape)
