"""Writes the difference of two bundles; `jaxrank_serving.delta.parts` describes the files."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrank import json_files
from jaxrank.errors import InputError

if TYPE_CHECKING:
    from jaxrank_serving.bundle import Bundle


class DeltaSize(NamedTuple):
    """Numbers of a delta.

    rows, total_rows: rows that differ, and all rows.
    added, removed: values of vocabularies that are new or have another row, and that have none.
    bytes: of all files.
    """

    rows: int
    total_rows: int
    added: int
    removed: int
    bytes: int


def open_base(path: str, tables: str) -> "Bundle":
    """Opens the bundle that a delta is written for.

    Raises:
        InputError: it is no whole bundle, or its tables have another dtype than `tables`.
    """
    from jaxrank_serving.bundle import open_bundle
    from jaxrank_serving.errors import BundleError

    try:
        base = open_bundle(path)
    except BundleError as error:
        raise InputError(f"--since: {error}") from error
    others = {stack.dtype for stack in base.signature.stacks} - {tables}
    if others:
        raise InputError(
            f"--since: {path}: its tables must be stored as --tables={tables}: found"
            f" {others.pop()}. Name that dtype, or export a whole bundle."
        )
    return base


def write_delta(base: "Bundle", target: "Bundle", folder: Path) -> DeltaSize:
    """Writes what changes one bundle to another into an empty directory.

    Memory does not grow with the bundles.

    Args:
        base, target: whole bundles.
        folder: of the delta.
    """
    from jaxrank_serving import bundle as bundles
    from jaxrank_serving.delta.parts import TARGET, table_files

    (folder / "tables").mkdir()
    shutil.copyfile(target.path / bundles.MANIFEST, folder / TARGET)
    tables = {file.name: file for file in table_files(target.signature)}
    index = target.signature.index.file
    rows = added = removed = 0
    for name, entry in target.files.items():
        if base.files.get(name) == entry:
            continue
        if name in tables:
            changed = _write_rows(base, target, tables[name], folder)
            rows += changed if name == tables[name].stack.file else 0
        elif name == index:
            added, removed = _write_values(base, target, folder / name)
        else:
            shutil.copyfile(target.file(name), folder / name)
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "checksum": bundles.checksum(path),
        }
        for path in paths
    }
    tree = {
        "format": bundles.FORMAT,
        "format_version": bundles.format_version(target.signature),
        "base": base.version,
        "files": files,
    }
    tree["checksum"] = bundles.seal(tree)
    json_files.write(folder / bundles.MANIFEST, tree)
    total = sum(stack.rows for stack in target.signature.stacks)
    return DeltaSize(rows, total, added, removed, sum(path.stat().st_size for path in paths))


def _write_rows(base: "Bundle", target: "Bundle", file: Any, folder: Path) -> int:
    """Writes the rows of a file that differ, and returns their number."""
    from jaxrank_serving.delta.parts import CHANGED, ROWS, base_rows, mapped

    stored, count = mapped(target, file), 0
    with (
        open(folder / (file.name + ROWS), "wb") as rows_out,
        open(folder / (file.name + CHANGED), "wb") as out,
    ):
        for first, before in base_rows(target.signature, file, base):
            after = stored[first : first + len(before)]
            differ = np.flatnonzero((after != before).any(axis=1))
            (first + differ).astype("<i8").tofile(rows_out)
            np.ascontiguousarray(after[differ]).tofile(out)
            count += len(differ)
    return count


def _write_values(base: "Bundle", target: "Bundle", path: Path) -> tuple[int, int]:
    """Writes the values of two indices that differ, and returns their numbers."""
    from jaxrank_serving.delta.parts import ADDED, RECORD, REMOVED, together
    from jaxrank_serving.index import arrays

    spec, old_spec = target.signature.index, base.signature.index
    hashes, _, rows = arrays(target.file(spec.file), spec)
    old_hashes, _, old_rows = arrays(base.file(old_spec.file), old_spec)
    added = removed = 0
    with (
        open(path.with_name(path.name + ADDED), "wb") as added_out,
        open(path.with_name(path.name + REMOVED), "wb") as removed_out,
    ):
        for old, new in together(old_hashes, hashes):
            before, after = old_hashes[old], hashes[new]
            without_row = before[~np.isin(before, after, assume_unique=True)]
            without_row.astype("<u8").tofile(removed_out)
            place = np.searchsorted(before, after)
            is_same = np.zeros(len(after), bool)
            inside = np.flatnonzero(place < len(before))
            is_same[inside] = before[place[inside]] == after[inside]
            is_same[inside] &= old_rows[old][place[inside]] == rows[new][inside]
            records = np.empty(int((~is_same).sum()), RECORD)
            records["hash"], records["row"] = after[~is_same], rows[new][~is_same]
            records.tofile(added_out)
            added, removed = added + len(records), removed + len(without_row)
    return added, removed
