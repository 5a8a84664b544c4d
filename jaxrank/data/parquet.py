"""Parquet files as chunks of columns."""

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet

from jaxrank.data import files
from jaxrank.data.chunk import Chunk, Part, numbered
from jaxrank.data.rejects import Rejects
from jaxrank.data.text import check_same_columns, empty_file
from jaxrank.errors import InputError

_ROWS_PER_CHUNK = 16_384


class ParquetSource:
    """Parquet files, all of one schema."""

    def __init__(self, paths_of: Mapping[str, Sequence[str]]):
        self._paths_of = paths_of
        paths = self.files
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
        return list(self._paths_of)

    @property
    def files(self) -> list[str]:
        return [path for paths in self._paths_of.values() for path in paths]

    def columns(self, split: str) -> list[str]:
        return list(self._schema.names)

    def parts(self, split: str) -> list[Part]:
        return [Part(split, path, 0, 1) for path in self._paths_of[split]]

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        del rejects
        row = 1
        try:
            with _open_parquet(part.file) as file:
                for batch in file.iter_batches(_ROWS_PER_CHUNK, use_threads=False):
                    yield Chunk(batch, part.file, numbered(row, batch.num_rows))
                    row += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise _not_parquet(part.file, error) from error


def _not_parquet(path: str, error: Exception) -> InputError:
    return InputError(f"{path}: must be a readable Parquet file: found {error}.")


def _open_parquet(path: str) -> pa.parquet.ParquetFile:
    # Buffering ahead would hold all row groups of the file in memory.
    return pa.parquet.ParquetFile(
        files.open_input(path), pre_buffer=False, page_checksum_verification=True
    )


def _parquet_schema(path: str) -> pa.Schema:
    try:
        with _open_parquet(path) as file:
            if file.metadata.num_rows == 0:
                raise empty_file(path)
            return file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(path, error) from error
