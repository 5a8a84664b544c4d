"""Delimited text, plain or gzip, as chunks of string columns."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jaxrank.data import files
from jaxrank.data.chunk import Chunk, Part, numbered
from jaxrank.data.rejects import Rejects
from jaxrank.errors import InputError

CRITEO_COLUMNS = (
    "label",
    *(f"I{i}" for i in range(1, 14)),
    *(f"C{i}" for i in range(1, 27)),
)
_ROWS_PER_CHUNK = 16_384  # sets how much is read at a time
_MIN_CHUNK_BYTES = 1 << 20
_MAX_CHUNK_BYTES = 1 << 27
_GZIP_MAGIC = b"\x1f\x8b"


def empty_file(path: str) -> InputError:
    return InputError(f"{path}: must have at least one row: found none, the file is empty.")


class TextSource:
    """Delimited text, plain or gzip; every value is text."""

    def __init__(self, paths_of: Mapping[str, Sequence[str]], delimiter: str, *, header: bool):
        self._paths_of = paths_of
        self._delimiter = delimiter
        self._header = header
        self._columns = list(CRITEO_COLUMNS)
        if header:
            paths = self.files
            self._columns = self._read_header(paths[0])
            for path in paths[1:]:
                check_same_columns(paths[0], self._columns, path, self._read_header(path))

    @property
    def splits(self) -> list[str]:
        return list(self._paths_of)

    @property
    def files(self) -> list[str]:
        return [path for paths in self._paths_of.values() for path in paths]

    def columns(self, split: str) -> list[str]:
        return self._columns

    def parts(self, split: str) -> list[Part]:
        return [Part(split, path, 0, 1) for path in self._paths_of[split]]

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        del rejects
        return self._chunks_of_file(part.file)

    def _read_header(self, path: str) -> list[str]:
        line = b"".join(_first_lines(path, 1))
        if not line.strip():
            raise empty_file(path)
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}, row 1: must be UTF-8: {error}.") from error
        names = next(csv.reader([text.rstrip("\r\n")], delimiter=self._delimiter))
        for i, name in enumerate(names):
            if name in names[:i]:
                raise InputError(f"{path}, row 1: column names must differ: found {name!r} twice.")
        return names

    def _reader(self, path: str, stream: pa.NativeFile) -> pa.csv.CSVStreamingReader:
        sample = max((len(line) for line in _first_lines(path, 5)), default=0)
        chunk_bytes = min(max(sample * _ROWS_PER_CHUNK, _MIN_CHUNK_BYTES), _MAX_CHUNK_BYTES)
        return pa.csv.open_csv(
            stream,
            read_options=pa.csv.ReadOptions(
                use_threads=False,  # with threads, errors come without the row
                block_size=chunk_bytes,
                column_names=self._columns,
                skip_rows=int(self._header),
            ),
            parse_options=pa.csv.ParseOptions(
                delimiter=self._delimiter,
                quote_char='"' if self._header else False,
                ignore_empty_lines=False,
            ),
            convert_options=pa.csv.ConvertOptions(
                column_types=dict.fromkeys(self._columns, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
            ),
        )

    def _chunks_of_file(self, path: str) -> Iterator[Chunk]:
        row = first_row = 1 + self._header
        try:
            with _open_text(path) as stream:
                if len(_first_lines(path, first_row)) < first_row:
                    raise empty_file(path)
                for batch in self._reader(path, stream):
                    chunk = Chunk(batch, path, numbered(row, batch.num_rows))
                    self._check_lines(chunk)
                    if batch.num_rows:
                        yield chunk
                    row += batch.num_rows
        except pa.ArrowInvalid as error:
            raise _parse_error(path, row, self._columns, str(error)) from error
        except (OSError, EOFError) as error:
            raise _unreadable(path, error) from error
        if row == first_row:
            raise empty_file(path)

    def _check_lines(self, chunk: Chunk) -> None:
        """Refuses what would put rows and lines out of step, or make an example of nothing."""
        batch = chunk.batch
        if self._header:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                data = column.buffers()[2]
                # `in` would copy; find on a memory view's bytes is one memchr.
                if data is not None and b"\n" in memoryview(data).tobytes():
                    broken = pc.match_substring(column, "\n").fill_null(False)
                    if pc.any(broken).as_py():
                        index = pc.index(broken, True).as_py()
                        raise InputError(
                            f"{chunk.file}, row {chunk.rows[index]}, column {name}: must be"
                            f" on one line: found {column[index].as_py()!r}."
                        )
        # The reader makes a row of nulls of an empty line.
        blank = batch.column(0).is_null() if batch.num_columns > 1 else None
        for column in batch.columns[1:]:
            if blank is None or not pc.any(blank).as_py():
                return
            blank = pc.and_(blank, column.is_null())
        if blank is not None and pc.any(blank).as_py():
            index = pc.index(blank, True).as_py()
            raise InputError(
                f"{chunk.file}, row {chunk.rows[index]}: must have a value in some column:"
                " found an empty line."
            )


def _open_text(path: str) -> pa.NativeFile:
    raw = files.open_input(path)
    magic = raw.read(2)
    raw.seek(0)
    if magic == _GZIP_MAGIC:
        return pa.CompressedInputStream(raw, "gzip")
    if magic and path.endswith(".gz"):
        raise InputError(f"{path}: must be gzip, as its name says: found {magic!r} at its start.")
    return raw


def _first_lines(path: str, count: int) -> list[bytes]:
    """Up to `count` lines from the file's start; none of an empty file."""
    text = b""
    try:
        with _open_text(path) as stream:
            while text.count(b"\n") < count and (part := stream.read(1 << 16)):
                text += part
    except (OSError, EOFError) as error:
        raise _unreadable(path, error) from error
    return text.splitlines(keepends=True)[:count]


def _unreadable(path: str, error: Exception) -> InputError:
    return InputError(f"{path}: must be readable to its end: found {error}.")


def _parse_error(path: str, row: int, columns: Sequence[str], message: str) -> InputError:
    """An error of the CSV reader in this project's terms; `row` is the first of the bad chunk."""
    at = re.search(r"Row #(\d+)", message)
    where = f"row {at[1]}" if at else f"at or after row {row}"
    if counts := re.search(r"Expected (\d+) columns, got (\d+)", message):
        return InputError(f"{path}, {where}: must have {counts[1]} columns: found {counts[2]}.")
    if "UTF8" in message and (at := re.search(r"column #(\d+)", message)):
        name = columns[int(at[1])]
        return InputError(f"{path}, {where}, column {name}: must be UTF-8: found other bytes.")
    if "out of sync" in message:
        return InputError(
            f"{path}, {where}: a value must be on one line, between two quotes if quoted: found"
            " one that is not closed."
        )
    return InputError(f"{path}, {where}: must be delimited text: found {message}.")


def check_same_columns(first: str, names: Sequence[str], path: str, found: list[str]) -> None:
    if list(names) == found:
        return
    missing = [n for n in names if n not in found]
    added = [n for n in found if n not in names]
    what = "the same columns in another order"
    if missing or added:
        what = f"missing {missing}, not expected {added}"
    raise InputError(f"{path}: must have the columns of {first}: found {what}.")
