"""Where raw records come from: files of text or Parquet, or generated data.

A source hands out chunks of a few thousand records as Arrow columns, so its memory does not grow
with the files.
"""

import glob
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.spec import check_keys
from jaxrank.data.text import TextSource, check_same_columns, empty_file
from jaxrank.errors import InputError

_KINDS = ("criteo", "csv", "parquet", "synthetic")
_ROWS_PER_CHUNK = 16_384


class Source(Protocol):
    """Raw records in splits, each of which can be read any number of times."""

    @property
    def splits(self) -> list[str]: ...

    def columns(self, split: str) -> list[str]: ...

    def chunks(self, split: str) -> Iterator[Chunk]: ...


def make_source(source: Mapping[str, Any]) -> Source:
    """The source that the config's section describes.

    Raises:
        InputError: an unknown kind or field, a file that is missing, or headers that differ.
    """
    rest = dict(source)
    kind = rest.pop("kind", None)
    if kind not in _KINDS:
        raise InputError(f"source.kind: must be one of {', '.join(_KINDS)}: found {kind!r}.")
    if kind == "synthetic":
        from jaxrank.data import synthetic  # only where it is asked for

        signature = inspect.signature(synthetic.Source)
        check_keys(rest, list(signature.parameters), f"source (kind={kind!r})")
        try:
            signature.bind(**rest)
        except TypeError as error:
            raise InputError(f"source (kind={kind!r}): {error}.") from error
        generated = synthetic.Source(**rest)
        _check_splits(generated.splits, "source.rows")
        return generated
    known = ["files", "delimiter"] if kind == "csv" else ["files"]
    check_keys(rest, known, f"source (kind={kind!r})")
    files = _files_of_splits(rest.get("files"))
    if kind == "parquet":
        return ParquetSource(files)
    if kind == "criteo":
        return TextSource(files, "\t", header=False)
    delimiter = rest.get("delimiter", ",")
    if not isinstance(delimiter, str) or len(delimiter) != 1:
        raise InputError(f"source.delimiter: must be one character: found {delimiter!r}.")
    return TextSource(files, delimiter, header=True)


def _files_of_splits(section: Any) -> dict[str, list[Path]]:
    if not isinstance(section, Mapping) or not section:
        raise InputError(
            f"source.files: must be a dict of split names and files: found {section!r}."
        )
    _check_splits(section, "source.files")
    return {split: _find_files(value, f"source.files.{split}") for split, value in section.items()}


def _check_splits(names: Iterable[Any], where: str) -> None:
    for split in names:
        # A split is a directory of the store, beside the one of the vocabularies.
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", str(split)) or split == "vocabulary":
            raise InputError(
                f"{where}: the name of a split must be letters, digits, - and _, and not"
                f" 'vocabulary': found {split!r}."
            )


def _find_files(value: Any, where: str) -> list[Path]:
    """The files that a path, a glob, a directory, or a list of those means."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        found = [path for i, v in enumerate(value) for path in _find_files(v, f"{where}[{i}]")]
        if not found:
            raise InputError(f"{where}: must have at least one file: found none.")
        return found
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{where}: must be a path or a list of paths: found {value!r}.")
    path = Path(value)
    if path.is_dir():
        # "_" as in _SUCCESS, which Spark leaves beside the data.
        inside = sorted(p for p in path.iterdir() if p.is_file() and p.name[0] not in "._")
        if not inside:
            raise InputError(
                f"{path}: the directory must hold at least one file whose name does not begin"
                " with '.' or '_': found none."
            )
        return inside
    if path.exists():
        return [path]
    if not glob.has_magic(str(value)):
        raise InputError(f"{path}: no such file or directory.")
    matches = sorted(Path(p) for p in glob.glob(str(value), recursive=True) if Path(p).is_file())
    if not matches:
        raise InputError(f"{value}: this pattern matches no file.")
    return matches


class ParquetSource:
    """Parquet files, all of one schema."""

    def __init__(self, files: Mapping[str, Sequence[Path]]):
        self._files = files
        paths = [path for split in files.values() for path in split]
        self._schema = _parquet_schema(paths[0])
        for path in paths[1:]:
            found = _parquet_schema(path)
            check_same_columns(paths[0], self._schema.names, path, found.names)
            for expected, field in zip(self._schema, found, strict=True):
                if expected.type != field.type:
                    raise InputError(
                        f"{path}, column {field.name}: must be of type {expected.type} as in"
                        f" {paths[0]}: found {field.type}."
                    )

    @property
    def splits(self) -> list[str]:
        return list(self._files)

    def columns(self, split: str) -> list[str]:
        return list(self._schema.names)

    def chunks(self, split: str) -> Iterator[Chunk]:
        for path in self._files[split]:
            row = 1
            try:
                with _open_parquet(path) as file:
                    for batch in file.iter_batches(_ROWS_PER_CHUNK, use_threads=False):
                        yield Chunk(batch, str(path), numbered(row, batch.num_rows))
                        row += batch.num_rows
            except (pa.ArrowException, OSError) as error:
                raise _not_parquet(path, error) from error


def _not_parquet(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: must be a readable Parquet file: found {error}.")


def _open_parquet(path: Path) -> pa.parquet.ParquetFile:
    # Buffering ahead would hold all row groups of the file in memory.
    return pa.parquet.ParquetFile(path, pre_buffer=False, page_checksum_verification=True)


def _parquet_schema(path: Path) -> pa.Schema:
    try:
        with _open_parquet(path) as file:
            if file.metadata.num_rows == 0:
                raise empty_file(path)
            return file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(path, error) from error
