"""Delimited text, plain or gzip, as chunks of string columns."""

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from jaxrank.data import files, lines
from jaxrank.data.chunk import Chunk, Part, numbered
from jaxrank.data.rejects import Rejects
from jaxrank.errors import InputError

CRITEO_COLUMNS = (
    "label",
    *(f"I{i}" for i in range(1, 14)),
    *(f"C{i}" for i in range(1, 27)),
)
_PART_BYTES = 1 << 26
_ROWS_PER_CHUNK = 16_384
_MIN_CHUNK_BYTES = 1 << 20
# What Arrow parses at a time: as much as a core's cache holds, but more where the columns are more
# than that, as each costs a few microseconds.
_PIECE_BYTES, _PIECE_COLUMNS = 1 << 19, 32
_WHOLE = (0, 1)  # of a file whose size is not known
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CLOSED = "on one line, between two quotes if quoted"
_ESCAPED = re.compile("[\\udc80-\\udcff]")  # bytes that are not UTF-8, as surrogateescape has them
_TEXT = "delimited text"


class _Fault(NamedTuple):
    """As of `Rejects.refuse`."""

    column: str
    must: str
    found: str


def empty_file(path: str) -> InputError:
    return InputError(f"{path}: must have at least one row: found none, the file is empty.")


class TextSource:
    """Delimited text, plain or gzip; every value is text on one line.

    Each line is a record by itself, so a file can be cut after any: parts are ranges of its bytes,
    and have the lines that begin in them.

    Args:
        delimiter: one ASCII character.
        header: whether each file begins with a line of names, and values may be in quotes; else
            the columns are those of Criteo's files.
    """

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
        return [
            Part(split, path, start, stop)
            for path in self._paths_of[split]
            for start, stop in _ranges(path)
        ]

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        path, start, stop = part.file, part.start, part.stop
        if (start, stop) == _WHOLE:
            stop = sys.maxsize
        first, offset, row = True, 0, 1
        for position, block in lines.blocks(
            path, start, stop, rows=_ROWS_PER_CHUNK, smallest=_MIN_CHUNK_BYTES
        ):
            if first and start:
                offset = position
            elif first:
                block = block.removeprefix(_BYTE_ORDER_MARK)
                if self._header:
                    block = block[block.index(b"\n") + 1 :]
                    row += 1
            first = False
            count = block.count(b"\n")
            batch, rows = self._records(block, numbered(row, count), part, offset, rejects)
            if batch.num_rows:
                yield Chunk(batch, path, rows, offset)
            row += count
        if first and not start:
            raise empty_file(path)

    def _records(
        self, block: bytes, rows: np.ndarray, part: Part, offset: int, rejects: Rejects
    ) -> tuple[pa.RecordBatch, np.ndarray]:
        """Those of whole lines, and their numbers; lines that are none go to `rejects`."""
        batch = self._parse(block, len(rows))
        if batch is not None:
            return batch, rows
        found = [line + b"\n" for line in block.split(b"\n")[:-1]]
        good = []
        for i, line in enumerate(found):
            fault = self._fault(line, *found[i + 1 : i + 2])
            if fault is None:
                good.append(i)
                continue
            rejects.refuse(
                **fault._asdict(),
                file=part.file,
                row=int(rows[i]),
                record=_content(line, "backslashreplace"),
                offset=offset,
            )
        batch = self._parse(b"".join(found[i] for i in good), len(good))
        assert batch is not None, f"{part}, row {rows[0]}: lines without a fault are no records"
        return batch, rows[good]

    def _parse(self, block: bytes, count: int) -> pa.RecordBatch | None:
        """A record for each of `count` lines; None where some line is none.

        It is None for a block exactly if it is None for some line of it.
        """
        if not count:
            return pa.RecordBatch.from_pylist(
                [], pa.schema(dict.fromkeys(self._columns, pa.string()))
            )
        if not _is_utf8(block):
            return None
        if block.startswith(_BYTE_ORDER_MARK):
            block = _BYTE_ORDER_MARK + block  # the reader drops one
        whole = len(block) + 1
        piece = min(_PIECE_BYTES * max(1, len(self._columns) // _PIECE_COLUMNS), whole)
        table = self._table(block, count, piece)
        if table is None and piece < whole:  # a line may be longer than a piece
            table = self._table(block, count, whole)
        # An open quote joins lines, so that rows are fewer, or takes the end of the last one.
        if table is None or "\n" in (table.column(-1)[-1].as_py() or ""):
            return None
        # A carriage return within a line makes one row more.
        torn = b"\r" in block and block.count(b"\r") != block.count(b"\r\n")
        if torn and _has_newline(table):
            return None
        batch = table.combine_chunks().to_batches()[0]
        return None if _has_empty_row(batch) else batch

    def _table(self, block: bytes, count: int, piece: int) -> pa.Table | None:
        """What Arrow finds in a block, `piece` bytes at a time; None if not `count` rows."""
        read = pa.csv.ReadOptions(use_threads=False, block_size=piece, column_names=self._columns)
        parse = pa.csv.ParseOptions(
            delimiter=self._delimiter,
            quote_char='"' if self._header else False,
            ignore_empty_lines=False,
        )
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(self._columns, pa.string()),
            strings_can_be_null=True,
            null_values=[""],
            check_utf8=False,  # of each value: slower than of the block
        )
        try:
            table = pa.csv.read_csv(pa.BufferReader(block), read, parse, convert)
        except pa.ArrowInvalid:
            return None
        return table if table.num_rows == count else None

    def _fault(self, line: bytes, after: bytes = b"") -> _Fault | None:
        """What is wrong with a line; None exactly if `_parse` takes it. `after` is the next."""
        text, columns = _content(line), self._columns
        try:
            cells = self._cells(text)
        except csv.Error as error:
            if self._parse(line, 1) is not None:
                return None  # a value is longer than the csv module takes
            return _Fault("", _TEXT, str(error))
        if "\n" in cells[-1]:
            column = columns[len(cells) - 1] if len(cells) <= len(columns) else ""
            return _Fault(column, _CLOSED, repr(cells[-1] + _content(after)))
        if len(columns) > 1 and not any(cells):
            return _Fault("", "have a value in some column", "an empty line")
        if len(cells) != len(columns):
            return _Fault("", f"have {len(columns)} columns", str(len(cells)))
        if not _is_utf8(line):
            index = next(i for i, cell in enumerate(cells) if _ESCAPED.search(cell))
            data = cells[index].encode(errors="surrogateescape")
            return _Fault(columns[index], "UTF-8", repr(data))
        return None

    def _cells(self, text: str) -> list[str]:
        """The values in a line; the last ends in a newline where its quote is not closed.

        Raises:
            csv.Error: a carriage return, not in quotes, or a value too long for the csv module.
        """
        cells: list[str] = []
        quoted = 0
        if not self._header:
            cells = text.split(self._delimiter)
        else:
            try:
                cells = next(csv.reader([text + "\n"], delimiter=self._delimiter)) or [""]
            except csv.Error:
                if "\r" not in text:
                    raise
            # The csv module takes some at the end for those of lines, and leaves them out.
            quoted = sum(cell.count("\r") for cell in cells)
        if quoted < text.count("\r"):
            raise csv.Error("a carriage return within the line")
        return cells

    def _read_header(self, path: str) -> list[str]:
        line, more = lines.first_line(path)
        line = line.removeprefix(_BYTE_ORDER_MARK)
        if not more and not line.strip():
            raise empty_file(path)
        where = f"{path}, row 1"
        try:
            names = self._cells(_content(line, "strict"))
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: must be UTF-8: {error}.") from error
        except csv.Error as error:
            raise InputError(f"{where}: must be {_TEXT}: found {error}.") from error
        if not any(names):
            raise InputError(f"{where}: must have the names of the columns: found an empty line.")
        if "\n" in names[-1]:
            raise InputError(f"{where}: must be {_CLOSED}: found {names[-1]!r}.")
        for i, name in enumerate(names):
            if name in names[:i]:
                raise InputError(f"{where}: column names must differ: found {name!r} twice.")
        if not more:
            raise empty_file(path)
        return names


def _ranges(path: str) -> list[tuple[int, int]]:
    size = files.describe(path).size
    if size <= _PART_BYTES or lines.is_gzip(path) or not files.has_ranges(path):
        return [(0, max(size, 1))]
    return [(i, min(i + _PART_BYTES, size)) for i in range(0, size, _PART_BYTES)]


def _content(line: bytes, errors: str = "surrogateescape") -> str:
    """A line without its end."""
    return line.removesuffix(b"\n").removesuffix(b"\r").decode(errors=errors)


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    ends = pa.py_buffer(np.array([0, len(text)], np.int32))
    try:
        # Several times as fast as to decode it, and makes no copy.
        pa.StringArray.from_buffers(1, ends, pa.py_buffer(text)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _has_newline(table: pa.Table) -> bool:
    return any(pc.any(pc.match_substring(c, "\n")).as_py() for c in table.columns)


def _has_empty_row(batch: pa.RecordBatch) -> bool:
    """Whether some record has no value at all; a line of one column may be empty."""
    empty = None
    for column in batch.columns if batch.num_columns > 1 else []:
        if not column.null_count:
            return False
        missing = column.is_null()
        empty = missing if empty is None else pc.and_(empty, missing)
        if not pc.any(empty).as_py():
            return False
    return empty is not None


def check_same_columns(first: str, names: Sequence[str], path: str, found: list[str]) -> None:
    if list(names) == found:
        return
    missing = [n for n in names if n not in found]
    added = [n for n in found if n not in names]
    what = "the same columns in another order"
    if missing or added:
        what = f"missing {missing}, not expected {added}"
    raise InputError(f"{path}: must have the columns of {first}: found {what}.")
