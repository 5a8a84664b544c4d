"""Parquet files as chunks of columns."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from jaxrank.data import files
from jaxrank.data.chunk import Chunk, Part, numbered
from jaxrank.data.files import File
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.partitions import Partitions
from jaxrank.data.sources.text import check_rows, check_same_columns
from jaxrank.errors import InputError

_ROWS_PER_CHUNK = 16_384
# A part ends with the row group that reaches one of these.
_ROWS_PER_PART = 1_000_000
_BYTES_PER_PART = 128 << 20  # encoded and not yet compressed, as the row groups tell it

# What Arrow raises for a damaged file.
UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)


class RowGroups(NamedTuple):
    """Of each row group of a file, i64[row groups]: its rows, and its bytes uncompressed.

    mark: tells whether the file is still that one.
    """

    mark: files.File
    rows: np.ndarray
    bytes: np.ndarray

    def parts(self) -> Iterator[tuple[int, int]]:
        """[start, stop) of runs of row groups that are each a part."""
        start = rows = size = 0
        for i in range(len(self.rows)):
            rows += int(self.rows[i])
            size += int(self.bytes[i])
            last = i + 1 == len(self.rows)
            if last or rows >= _ROWS_PER_PART or size >= _BYTES_PER_PART:
                yield start, i + 1
                start, rows, size = i + 1, 0, 0


class ParquetSource:
    """Parquet files, with the columns that their directories name; see `check_columns`.

    row_groups: by path.
    partitions: of the paths.

    Args:
        paths_of: by split.
        used: the columns that chunks must have, and no others are read; none: all are.
    """

    def __init__(self, paths_of: Mapping[str, Sequence[str]], used: Collection[str] = ()):
        self._paths_of, self._used = paths_of, used
        paths = self.files
        self.partitions = Partitions(paths)
        described = {path: _described(path) for path in paths}
        self._schemas = {path: schema for path, (schema, _) in described.items()}
        self.row_groups = {path: groups for path, (_, groups) in described.items()}
        check_rows(paths_of, [path for path in paths if not self.row_groups[path].rows.sum()])
        for name in self.partitions.names:
            if name in self._schemas[paths[0]].names:
                raise InputError(
                    f"{paths[0]}, column {name}: must be in the file or in the names of its"
                    " directories: found it in both."
                )

    def check_columns(self, used: Collection[str]) -> None:
        """Refuses files in which columns that are used are not there or are of other types.

        Raises:
            InputError: naming file and column.
        """
        first, *others = self._schemas.items()
        names = [name for name in first[1].names if name in used]
        for path, schema in others:
            check_same_columns(first[0], names, path, [n for n in schema.names if n in used])
            for name in names:
                expected, found = first[1].field(name).type, schema.field(name).type
                if expected != found:
                    raise InputError(
                        f"{path}, column {name}: must be of type {expected} as in {first[0]}: found"
                        f" {found}."
                    )

    @property
    def splits(self) -> list[str]:
        return list(self._paths_of)

    @property
    def files(self) -> list[str]:
        return [path for paths in self._paths_of.values() for path in paths]

    def files_of(self, split: str) -> list[str]:
        return list(self._paths_of[split])

    @property
    def types(self) -> dict[str, str]:
        return self.partitions.types

    def columns(self, split: str) -> list[str]:
        return [*self._schemas[self.files[0]].names, *self.partitions.names]

    def marks(self) -> dict[str, File]:
        return {path: groups.mark for path, groups in self.row_groups.items()}

    def parts(self, split: str) -> list[Part]:
        return [
            Part(split, path, start, stop)
            for path in self._paths_of[split]
            for start, stop in self.row_groups[path].parts()
        ]

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        del rejects  # the values of a file that cannot be read have no rows
        mark, rows, _ = self.row_groups[part.file]
        row = 1 + int(rows[: part.start].sum())
        stop = 1 + int(rows[: part.stop].sum())
        groups = range(part.start, part.stop)
        # Where all that is used is in the names of directories: the rows must be counted.
        used = [name for name in self._schemas[part.file].names if name in self._used] or None
        try:
            with open_unchanged(mark) as file:
                for batch in _batches(file, groups, used):
                    batch.validate(full=True)  # Arrow reads text without a look at its bytes
                    if batch.num_rows:
                        whole = self.partitions.append(batch, part.file)
                        yield Chunk(whole, part.file, numbered(row, batch.num_rows))
                    row += batch.num_rows
        except UNREADABLE as error:
            raise not_parquet(part.file, error) from error
        if row != stop:
            raise not_parquet(part.file, f"row {row - 1} as the last of {stop - 1}")


def _batches(
    file: pa.parquet.ParquetFile, groups: range, used: list[str] | None
) -> Iterator[pa.RecordBatch]:
    """What row groups hold, `_ROWS_PER_CHUNK` rows at a time; of columns `used`, none: of all.

    Each row group has dictionaries of its own, and inside of lists Arrow reads no two as one.
    """
    schema = file.schema_arrow
    nested = any(_holds_dictionaries(schema.field(name).type) for name in used or schema.names)
    for together in ([i] for i in groups) if nested else [list(groups)]:
        yield from file.iter_batches(_ROWS_PER_CHUNK, together, used, use_threads=False)


def _holds_dictionaries(kind: pa.DataType) -> bool:
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    return any(pa.types.is_dictionary(one) or _holds_dictionaries(one) for one in inner)


def not_parquet(path: str, found: Exception | str) -> InputError:
    text = " ".join(str(found).split()).removesuffix(".")
    return InputError(f"{path}: must be a readable Parquet file: found {text}.")


def open_unchanged(mark: files.File) -> pa.parquet.ParquetFile:
    """Opens the file that had this mark.

    Raises:
        InputError: it is another by now.
    """
    if files.describe(mark.path) != mark:
        raise InputError(f"{mark.path}: must not change while it is read: found another file.")
    return _open(mark.path)


def _open(path: str) -> pa.parquet.ParquetFile:
    if not files.has_ranges(path):
        raise InputError(
            f"{path}: Parquet is read in parts, and this server sends only whole files: copy it"
            " first."
        )
    # Buffering ahead would hold all row groups of the file in memory.
    return pa.parquet.ParquetFile(
        files.open_input(path), pre_buffer=False, page_checksum_verification=True
    )


def _described(path: str) -> tuple[pa.Schema, RowGroups]:
    mark = files.describe(path)
    try:
        with _open(path) as file:
            schema, metadata = file.schema_arrow, file.metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    except UNREADABLE as error:
        raise not_parquet(path, error) from error
    rows = np.asarray([group.num_rows for group in groups], np.int64)
    if (rows < 0).any() or rows.sum() != metadata.num_rows:
        found = f"{metadata.num_rows} rows, and row groups of {rows.tolist()}"
        raise not_parquet(path, found)
    for i, name in enumerate(schema.names):
        if name in schema.names[:i]:
            raise InputError(f"{path}: column names must differ: found {name!r} twice.")
    sizes = np.asarray([group.total_byte_size for group in groups], np.int64)
    return schema, RowGroups(mark, rows, sizes)
