"""Reads files of pre-trained vectors: Parquet, or text in the format of word2vec.

A Parquet file has a column of values and a column of lists of numbers. A line of text has a value
and its numbers, with a space or a tab between them. The first line may hold the number of vectors
and their width.
"""

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from jaxrank.data import files
from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.columns import Column, elements, is_list, numbers, read_column
from jaxrank.data.rejects import BadRows
from jaxrank.data.sources import lines, table_formats
from jaxrank.data.sources.parquet import UNREADABLE, not_parquet, open_unchanged
from jaxrank.errors import InputError

_ROWS = 1 << 18  # vectors that are read together
_TEXT_BYTES = 1 << 22  # minimum bytes of text that are parsed together
_PARQUET = b"PAR1"
_TRAILING = re.compile(rb"[ \t]\r?(\n|$)")  # spaces and tabs at the end of a line
_MAX_NUMBER = float(np.finfo(np.float32).max)
_VALUE, _VECTOR = "value", "vector"  # columns, if a Parquet file has more than two


class Vectors(NamedTuple):
    """Vectors of a file, in order.

    values: the raw values, n of them.
    vectors: f32[n, width], finite.
    """

    values: Column
    vectors: np.ndarray


@dataclasses.dataclass(frozen=True)
class VectorFiles:
    """Files of pre-trained vectors of one width. `open_vectors` creates it.

    path: as in the config.
    files: its files, in order.
    width: numbers in a vector.
    """

    path: str
    files: tuple[str, ...]
    width: int

    def batches(self) -> Iterator[Vectors]:
        """Yields all vectors.

        Raises:
            InputError: a file is invalid. Names file and row.
        """
        for path in self.files:
            if _is_parquet(path):
                yield from _parquet_batches(path, self.width)
            else:
                yield from _TextFile(path).batches(self.width)


def open_vectors(path: str, where: str) -> VectorFiles:
    """Opens a file of pre-trained vectors, a glob or a directory of them.

    Reads the first vector only.

    Args:
        path: path or URL.
        where: the field of the config, for messages.

    Raises:
        InputError: there is no file, or the first one is invalid or has no vectors.
    """
    files.check_named(path, where)
    try:
        paths = files.find(path)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    # A directory may be a table whose log says which files are current.
    if _is_parquet(paths[0]):
        paths = table_formats.current(paths)
    else:
        table_formats.check_plain(paths)
    first = paths[0]
    width = _parquet_width(first) if _is_parquet(first) else _TextFile(first).width
    return VectorFiles(path, tuple(paths), width)


def _is_parquet(path: str) -> bool:
    with files.open_input(path) as file:
        return bytes(file.read(len(_PARQUET))) == _PARQUET


# Parquet.


def _parquet_columns(schema: pa.Schema, path: str) -> tuple[str, str]:
    """Returns the names of the column of values and of the column of vectors."""
    names = schema.names
    if _VALUE in names and _VECTOR in names:
        return _VALUE, _VECTOR
    lists = [name for name in names if is_list(schema.field(name).type)]
    if len(names) == 2 and len(lists) == 1:
        return next(name for name in names if name not in lists), lists[0]
    shown = ", ".join(f"{field.name} ({field.type})" for field in schema)
    raise InputError(
        f"{path}: must have the columns {_VALUE!r} and {_VECTOR!r}, or only two columns, of values"
        f" and of lists of numbers: found {shown}."
    )


def _parquet_width(path: str) -> int:
    for _, vectors, _ in _parquet_chunks(path, 1):
        assert vectors.lengths is not None
        if vectors.lengths[0] < 1:
            raise BadRows(vectors.chunk, np.zeros(1, int), vectors.name, "have a number", "none")
        return int(vectors.lengths[0])
    raise InputError(f"{path}: must have at least one vector: found none.")


def _parquet_chunks(path: str, rows: int) -> Iterator[tuple[Chunk, Column, str]]:
    """Yields chunks with their column of vectors and the name of the column of values."""
    try:
        with open_unchanged(files.describe(path)) as file:
            value, vector = _parquet_columns(file.schema_arrow, path)
            first = 1
            for batch in file.iter_batches(rows, columns=[value, vector], use_threads=False):
                chunk = Chunk(batch, path, numbered(first, batch.num_rows))
                first += batch.num_rows
                if batch.num_rows:
                    yield chunk, elements(read_column(chunk, vector), "", "a vector", "read"), value
    except UNREADABLE as error:
        raise not_parquet(path, error) from error


def _parquet_batches(path: str, width: int) -> Iterator[Vectors]:
    for chunk, column, value in _parquet_chunks(path, _ROWS):
        assert column.lengths is not None
        bad = np.flatnonzero(column.lengths != width)
        if len(bad):
            must = f"have {width} numbers, as the first vector"
            raise BadRows(chunk, bad, column.name, must, str(column.lengths[bad[0]]))
        flat = numbers(column, "a number in the range of float32", _is_float32, missing=False)
        vectors = flat.reshape(-1, width).astype(np.float32)
        yield Vectors(read_column(chunk, value), vectors)


def _is_float32(values: np.ndarray) -> np.ndarray:
    return np.abs(values) <= _MAX_NUMBER


# Text.


class _TextFile:
    """A text file of vectors.

    Raises:
        InputError: it is no text, or its first line is no vector.
    """

    def __init__(self, path: str):
        self.path = path
        line, has_more = lines.first_line(path)
        header = line.split()
        self._has_header = has_more and len(header) == 2 and all(w.isdigit() for w in header)
        self._count = int(header[0]) if self._has_header else -1
        if self._has_header:
            line = [*lines.first_lines(path), b""][1]
        self._separator = b"\t" if b"\t" in line.strip() else b" "
        self.width = int(header[1]) if self._has_header else len(self._words(line)) - 1
        if self.width < 1:
            actual = f"{line[:80].decode(errors='replace')!r}" if line else "an empty line"
            raise InputError(
                f"{path}, row 1: must be a value and its numbers, with spaces or tabs between them,"
                f" or the file must be Parquet: found {actual}."
            )

    def batches(self, width: int) -> Iterator[Vectors]:
        """Yields all vectors, which have `width` numbers."""
        size = files.describe(self.path).size
        stop = sys.maxsize if size < 0 else size
        row, count = 1, 0
        blocks = lines.blocks(self.path, 0, stop, rows=_ROWS, smallest=_TEXT_BYTES)
        for position, block in blocks:
            text = block
            if position == 0 and self._has_header:
                text = block.partition(b"\n")[2]
                row += 1
            if text.strip():
                batch = self._parsed(text, row, width)
                count += len(batch.vectors)
                yield batch
            row += text.count(b"\n")
        if self._count not in (-1, count):
            raise InputError(
                f"{self.path}: must have {self._count:,} vectors, as its first line says: found"
                f" {count:,}."
            )

    def _words(self, line: bytes) -> list[bytes]:
        return line.strip().split(self._separator)

    def _parsed(self, text: bytes, first: int, width: int) -> Vectors:
        """Parses whole lines, of which the first one is the line `first` of the file."""
        if _TRAILING.search(text):  # the original word2vec ends lines with a space
            text = b"\n".join(line.rstrip() for line in text.split(b"\n"))
        names = [str(i) for i in range(width)]
        kinds = {_VALUE: pa.string()} | dict.fromkeys(names, pa.float32())
        try:
            table = pyarrow.csv.read_csv(
                pa.BufferReader(text),
                pyarrow.csv.ReadOptions(
                    column_names=[_VALUE, *names], use_threads=False, block_size=len(text) + 1
                ),
                pyarrow.csv.ParseOptions(delimiter=self._separator.decode(), quote_char=False),
                pyarrow.csv.ConvertOptions(
                    column_types=kinds, null_values=[], strings_can_be_null=False
                ),
            ).combine_chunks()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            self._reject(text, first, width, error)
        vectors = np.stack([table[name].to_numpy() for name in names], axis=1)
        if not np.isfinite(vectors).all():
            self._reject(text, first, width, None)
        batch = table.select([_VALUE]).to_batches()[0]
        rows = numbered(first, len(batch))
        if len(batch) != text.count(b"\n"):  # with empty lines
            rows = np.array([n for n, _ in _numbered_lines(text, first)], np.int64)
        return Vectors(read_column(Chunk(batch, self.path, rows), _VALUE), vectors)

    def _reject(self, text: bytes, first: int, width: int, error: Exception | None) -> NoReturn:
        """Raises InputError for the first invalid line."""
        shown = "tabs" if self._separator == b"\t" else "spaces"
        must = f"must be a value and {width} finite numbers, with {shown} between them"
        for row, line in _numbered_lines(text, first):
            words = self._words(line)
            actual = _fault(words, width)
            if actual:
                raise InputError(f"{self.path}, row {row}: {must}: found {actual}.")
        raise InputError(f"{self.path}, from row {first} on: {must}: found {error}.")


def _numbered_lines(text: bytes, first: int) -> list[tuple[int, bytes]]:
    """Returns the lines with content, with their numbers."""
    return [(n, line) for n, line in enumerate(text.split(b"\n"), first) if line.strip()]


def _fault(words: list[bytes], width: int) -> str:
    """Describes what is invalid in the words of a line, "" if nothing is."""
    if len(words) != width + 1:
        return f"{len(words)} words"
    for word in words[1:]:
        try:
            number = float(word)
        except ValueError:
            return repr(word.decode(errors="replace"))
        if not abs(number) <= _MAX_NUMBER or math.isnan(number):
            return repr(word.decode())
    try:
        words[0].decode()
    except UnicodeDecodeError:
        return f"{words[0]!r}, which is not UTF-8"
    return ""
