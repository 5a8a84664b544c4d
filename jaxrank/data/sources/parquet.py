"""Reads Parquet files as chunks of columns."""

import contextlib
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jaxrank.data import file_kinds, files
from jaxrank.data.chunk import Chunk, Part, numbered
from jaxrank.data.files import File
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources import column_types, table_formats
from jaxrank.data.sources.partitions import Partitions
from jaxrank.data.sources.text import check_rows, check_same_columns
from jaxrank.errors import InputError

_ROWS_PER_CHUNK = 16_384
# A part ends with the row group that reaches one of these.
_ROWS_PER_PART = 1_000_000
_MAGIC = b"PAR1"
_HEAD = 512  # bytes by which another kind of file is detected
_TAIL = struct.Struct("<I4x")
_BYTES_PER_PART = 128 << 20  # encoded and uncompressed, as in the metadata of row groups

# Errors that Arrow raises for a damaged file.
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


class RowGroups(NamedTuple):
    """Rows and uncompressed bytes of each row group of a file, i64[row groups].

    mark: version of the file, to detect changes.
    """

    mark: files.File
    rows: np.ndarray
    bytes: np.ndarray

    def parts(self) -> Iterator[tuple[int, int]]:
        """Yields the [start, stop) of runs of row groups that form a part each."""
        start = rows = size = 0
        for i in range(len(self.rows)):
            rows += int(self.rows[i])
            size += int(self.bytes[i])
            last = i + 1 == len(self.rows)
            if last or rows >= _ROWS_PER_PART or size >= _BYTES_PER_PART:
                yield start, i + 1
                start, rows, size = i + 1, 0, 0


class ParquetSource:
    """Parquet files, with the columns in the names of their directories. See `check_columns`.

    row_groups: by path.
    partitions: of the paths.

    Args:
        paths_of: by split.
        used: the columns that chunks must have. No others are read. Empty: all.
    """

    def __init__(self, paths_of: Mapping[str, Sequence[str]], used: Collection[str] = ()):
        self._paths_of = {split: _some(table_formats.current(p)) for split, p in paths_of.items()}
        self._used = used
        described = {path: _described(path) for path in self.files}
        has_rows = {path: groups.rows.sum() > 0 for path, (_, groups) in described.items()}
        check_rows(self._paths_of, [path for path, has in has_rows.items() if not has])
        # A file without rows may have been written with other types, or without columns.
        self._paths_of = {
            s: [p for p in paths if has_rows[p]] for s, paths in self._paths_of.items()
        }
        self.partitions = Partitions(self.files)
        self._schemas = {path: described[path][0] for path in self.files}
        self.row_groups = {path: described[path][1] for path in self.files}
        schemas = self._schemas.values()
        kinds = column_types.differing(list(zip(s.names, s.types, strict=True)) for s in schemas)
        common = {name: column_types.common_type(sorted(k, key=str)) for name, k in kinds.items()}
        self._common = {name: kind for name, kind in common.items() if kind is not None}

    def check_columns(self, used: Collection[str]) -> None:
        """Rejects files in which used columns are missing or have incompatible types.

        Raises:
            InputError: names file and column.
        """
        first, *others = self._schemas.items()
        for name in self.partitions.names:
            if name in used and name in first[1].names:
                raise InputError(
                    f"{first[0]}, column {name}: must be in the file or in the names of its"
                    " directories: found in both."
                )
        names = [name for name in first[1].names if name in used]
        for path, schema in others:
            check_same_columns(first[0], names, path, [n for n in schema.names if n in used])
            for name in names:
                expected, actual = first[1].field(name).type, schema.field(name).type
                if expected != actual and name not in self._common:
                    raise InputError(
                        f"{path}, column {name}: must be of type {expected} as in {first[0]}, or of"
                        f" one with the same values: found {actual}. Write the column with one type"
                        " in all files."
                    )

    @property
    def splits(self) -> list[str]:
        return list(self._paths_of)

    @property
    def files(self) -> list[str]:
        return [path for paths in self._paths_of.values() for path in paths]

    def split_files(self, split: str) -> list[str]:
        return list(self._paths_of[split])

    @property
    def types(self) -> dict[str, str]:
        return self.partitions.types | {name: str(kind) for name, kind in self._common.items()}

    @property
    def common_types(self) -> dict[str, pa.DataType]:
        """Returns the common type of each column whose type differs between files, by name."""
        return self._common

    @property
    def hint(self) -> str:
        return self.partitions.hint

    def columns(self, split: str) -> list[str]:
        names = self._schemas[self.files[0]].names
        return [*names, *(name for name in self.partitions.names if name not in names)]

    def marks(self) -> dict[str, File]:
        return {path: groups.mark for path, groups in self.row_groups.items()}

    def parts(self, split: str) -> list[Part]:
        return [
            Part(split, path, start, stop)
            for path in self._paths_of[split]
            for start, stop in self.row_groups[path].parts()
        ]

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        del rejects  # an unreadable file has no rows to reject
        mark, rows, _ = self.row_groups[part.file]
        row = 1 + int(rows[: part.start].sum())
        stop = 1 + int(rows[: part.stop].sum())
        groups = range(part.start, part.stop)
        # If only names of directories are used, the file is read to count the rows.
        used = [name for name in self._schemas[part.file].names if name in self._used] or None
        try:
            with open_unchanged(mark) as file:
                for batch in _batches(file, groups, used):
                    batch.validate(full=True)  # Arrow does not validate text when it reads it
                    if batch.num_rows:
                        whole = self.complete(batch, part.file)
                        yield Chunk(whole, part.file, numbered(row, batch.num_rows))
                    row += batch.num_rows
        except UNREADABLE as error:
            raise not_parquet(part.file, error) from error
        if row != stop:
            raise not_parquet(part.file, f"row {row - 1} as the last of {stop - 1}")

    def complete(self, batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
        """Adds the columns in the directory names to records of a file, and casts to the common
        types.

        Raises:
            ArrowException: a value is out of range of the type that its column has in other files.
        """
        for i, name in enumerate(batch.schema.names):
            column, common = batch.column(i), self._common.get(name)
            if common in (None, column.type) or not column_types.is_castable(column.type, common):
                continue
            batch = batch.set_column(i, name, column.cast(common, safe=False))
        return self.partitions.append(batch, path)


def _some(paths: Sequence[str]) -> list[str]:
    """Returns the files with at least one byte, or all files if there are none."""
    return [path for path in paths if files.describe(path).size != 0] or list(paths)


def _batches(
    file: pa.parquet.ParquetFile, groups: range, used: list[str] | None
) -> Iterator[pa.RecordBatch]:
    """Yields the records of row groups, `_ROWS_PER_CHUNK` rows at a time.

    Each row group has its own dictionaries, and Arrow cannot unify those inside lists.

    Args:
        used: the columns to read. None: all.
    """
    schema = file.schema_arrow
    nested = any(_holds_dictionaries(schema.field(name).type) for name in used or schema.names)
    for together in ([i] for i in groups) if nested else [list(groups)]:
        yield from file.iter_batches(_ROWS_PER_CHUNK, together, used, use_threads=False)


def _holds_dictionaries(kind: pa.DataType) -> bool:
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(pa.types.is_dictionary(part) or _holds_dictionaries(part) for part in inner)


def not_parquet(path: str, actual: Exception | str) -> InputError:
    text = " ".join(str(actual).split()).removesuffix(".")
    with contextlib.suppress(OSError, InputError), files.open_input(path) as file:
        text = file_kinds.not_parquet(bytes(file.read(_HEAD))) or text
    return InputError(f"{path}: must be a readable Parquet file: found {text}.")


def open_unchanged(mark: files.File) -> pa.parquet.ParquetFile:
    """Opens a file and checks that it still has this mark.

    Raises:
        InputError: the file has changed.
    """
    if files.describe(mark.path) != mark:
        raise InputError(f"{mark.path}: must not change while it is read: found another file.")
    return _open(mark.path)


def _open(path: str) -> pa.parquet.ParquetFile:
    if not files.has_ranges(path):
        raise InputError(
            f"{path}: the server must support range requests, by which Parquet is read: it sends"
            " only whole files. Copy the file first."
        )
    file = _parquet_file(path)
    if any(map(_holds_fixed_lists, file.schema_arrow.types)):
        file.close()
        file = _parquet_file(path, metadata=_without_arrow_schema(path))
    return file


def _parquet_file(path: str, **options: Any) -> pa.parquet.ParquetFile:
    # Without buffering, because that would hold all row groups of the file in memory. Timestamps of
    # the year 9999, a common placeholder, overflow the nanoseconds that int96 is read as by
    # default.
    return pa.parquet.ParquetFile(
        files.open_input(path),
        pre_buffer=False,
        page_checksum_verification=True,
        coerce_int96_timestamp_unit="us",
        **options,
    )


def _holds_fixed_lists(kind: pa.DataType) -> bool:
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return pa.types.is_fixed_size_list(kind) or any(map(_holds_fixed_lists, inner))


def _without_arrow_schema(path: str) -> pa.parquet.FileMetaData:
    """Returns the metadata of the file without Arrow's own types.

    Arrow cannot read null in a list of fixed size (apache/arrow issue 35692), but it can read the
    plain list that is stored.
    """
    footer = read_footer(path).replace(b"ARROW:schema", b"ARROW_schema")
    return pa.parquet.read_metadata(pa.BufferReader(_MAGIC + footer))


def read_footer(path: str) -> bytes:
    """Returns the footer of a Parquet file, which ends with its length and a magic number."""
    with files.open_input(path) as file:
        size = file.size()
        file.seek(max(0, size - _TAIL.size))
        length = _TAIL.unpack(file.read(_TAIL.size))[0]
        file.seek(max(0, size - _TAIL.size - length))
        return file.read()


def _described(path: str) -> tuple[pa.Schema, RowGroups]:
    mark = files.describe(path)
    try:
        with _open(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    except UNREADABLE as error:
        raise not_parquet(path, error) from error
    if groups and groups[0].num_columns and (other := groups[0].column(0).file_path):
        raise InputError(
            f"{path}: must hold its rows itself: found a summary of other files, such as {other!r}."
            " Name the directory, of which names that begin with '_' are left out."
        )
    rows = np.asarray([group.num_rows for group in groups], np.int64)
    if (rows < 0).any() or rows.sum() != metadata.num_rows:
        actual = f"{metadata.num_rows} rows, and row groups of {rows.tolist()}"
        raise not_parquet(path, actual)
    for i, name in enumerate(schema.names):
        if name in schema.names[:i]:
            raise InputError(f"{path}: column names must differ: found {name!r} twice.")
    sizes = np.asarray([group.total_byte_size for group in groups], np.int64)
    return schema, RowGroups(mark, rows, sizes)
