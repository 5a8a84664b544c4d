"""Parses lines of delimited values as Arrow columns, and explains why a line is invalid."""

import csv
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

# Bytes that Arrow parses at a time: as much as a core's cache holds. Larger with many columns,
# because each column costs a few microseconds per piece.
_PIECE_BYTES, _PIECE_COLUMNS = 1 << 19, 32
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# bytes that are not UTF-8, as surrogateescape decodes them
_ESCAPED = re.compile("[\udc80-\udcff]")

_SEPARATORS = ",;\t|\x01~^"
TEXT = "delimited text"
CLOSED = "on one line, between two quotes if quoted"
DOUBLED = "delimited text whose quoted values end at their closing quote"
_ESCAPE_HINT = (
    " A quote within a quoted value is written twice, or set source.escape to the letter before it."
)


class Fault(NamedTuple):
    """The reason why a line is invalid. Its fields are arguments of `Rejects.reject`."""

    column: str
    must: str
    actual: str
    hint: str = ""


class Delimited(NamedTuple):
    """The format of delimited lines.

    quoted: True if values may be quoted, as in CSV.
    null_values: texts for missing values, quoted or not, in addition to the empty value.
    escape: the escape character, or "" for doubled quotes.
    """

    delimiter: str
    quoted: bool
    null_values: tuple[str, ...] = ()
    escape: str = ""

    def cells(self, text: str) -> list[str]:
        """Returns the values in a line. The last one ends in a newline if its quote is not closed.

        Raises:
            csv.Error: an unquoted carriage return, or a value too long for the csv module.
        """
        cells: list[str] = []
        kept = 0
        if not self.quoted:
            cells = text.split(self.delimiter)
        else:
            try:
                cells = next(self._reader(text)) or [""]
            except csv.Error:
                if "\r" not in text:
                    raise
            # The csv module treats carriage returns at the end as line ends and removes them.
            kept = sum(cell.count("\r") for cell in cells)
        if kept < text.count("\r"):
            raise csv.Error("a carriage return within the line")
        return cells

    def _reader(self, text: str, *, strict: bool = False) -> Any:
        escape = self.escape or None
        return csv.reader([text + "\n"], delimiter=self.delimiter, escapechar=escape, strict=strict)

    def _continues(self, text: str) -> bool:
        """Returns True if a quoted value of a line continues after its closing quote."""
        try:
            next(self._reader(text, strict=True))
        except csv.Error as error:
            return "expected after" in str(error)
        return False

    def _any_continues(self, block: bytes) -> bool:
        """Returns True if `_continues` is true for any line of a block."""
        letters = np.frombuffer(block, np.uint8)
        at = np.flatnonzero(letters == ord('"'))
        if not len(at):
            return False
        breaks = np.flatnonzero(np.diff(at) > 1)
        order = np.concatenate([[0], breaks + 1])  # of the first quote of each run of quotes
        first, last = at[order], at[np.concatenate([breaks, [len(at) - 1]])]
        line_ends = np.flatnonzero(letters == ord("\n"))
        lines = np.searchsorted(line_ends, first)
        starts = np.concatenate([[0], line_ends + 1])[lines]
        inside = (order - np.searchsorted(at, starts)) % 2 == 1  # a quoted value
        ends = np.frombuffer(f"\r\n{self.delimiter}".encode(), np.uint8)
        before, after = letters[first - 1], letters[np.minimum(last + 1, len(letters) - 1)]
        opens = np.isin(before, ends) | (first == 0)
        # Pairs of quotes stand for one. What is left closes a value, or opens and closes it.
        closes = (last - first + 1) % 2 == inside
        continues = closes & ~np.isin(after, ends) & (last + 1 < len(letters))
        # Quotes in values without quotes, and behind a backslash, are left to the csv module.
        odd = continues | ~(inside | opens) | (before == ord("\\"))
        for index in np.unique(lines[odd]).tolist():
            start = int(line_ends[index - 1]) + 1 if index else 0
            line = block[start : int(line_ends[index])] if index < len(line_ends) else block[start:]
            if self._continues(content(line)):
                return True
        return False

    def parse(self, block: bytes, columns: Sequence[str]) -> pa.RecordBatch | None:
        """Parses whole lines into one record per line. Returns None if and only if a line is
        invalid.

        Values are text, null where missing.
        """
        if not block:
            return pa.RecordBatch.from_pylist([], pa.schema(dict.fromkeys(columns, pa.string())))
        if not _is_utf8(block):
            return None
        if block.startswith(BYTE_ORDER_MARK):
            block = BYTE_ORDER_MARK + block  # the reader drops one mark
        if b"\0" not in block:
            return self._batch(block, columns)
        # Arrow overlooks delimiters and quotes soon after a NUL byte (apache/arrow issue 50481).
        used = block + "".join(self.null_values).encode()
        stand_in = next(c for c in map(chr, range(0xE000, 0x110000)) if c.encode() not in used)
        null_values = tuple(value.replace("\0", stand_in) for value in self.null_values)
        block = block.replace(b"\0", stand_in.encode())
        batch = self._replace(null_values=null_values)._batch(block, columns)
        if batch is None:
            return None
        values = [pc.replace_substring(c, stand_in, "\0") for c in batch.columns]
        return pa.RecordBatch.from_arrays(values, schema=batch.schema)

    def _batch(self, block: bytes, columns: Sequence[str]) -> pa.RecordBatch | None:
        whole = len(block) + 1
        piece = min(_PIECE_BYTES * max(1, len(columns) // _PIECE_COLUMNS), whole)
        quotes = self.quoted and b'"' in block
        if quotes:
            piece = whole  # Arrow may split a piece inside quotes without an error
        table = self._table(block, columns, piece)
        if table is None and piece < whole:  # a line may be longer than a piece
            table = self._table(block, columns, whole)
        if table is None or (quotes and _has_newline(table, block)):
            return None
        if quotes and self._any_continues(block):
            return None
        batch = table.combine_chunks().to_batches()[0]
        return None if _has_empty_row(batch) else batch

    def _table(self, block: bytes, columns: Sequence[str], piece: int) -> pa.Table | None:
        """Parses a block with Arrow, `piece` bytes at a time. Returns None unless each line gives a
        row.
        """
        read = pa.csv.ReadOptions(use_threads=False, block_size=piece, column_names=columns)
        parse = pa.csv.ParseOptions(
            delimiter=self.delimiter,
            quote_char='"' if self.quoted else False,
            escape_char=self.escape or False,
            ignore_empty_lines=False,
        )
        convert = pa.csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()),
            strings_can_be_null=True,
            null_values=["", *self.null_values],
            check_utf8=False,  # slower per value than once for the block
        )
        try:
            table = pa.csv.read_csv(pa.BufferReader(block), read, parse, convert)
        except pa.ArrowInvalid:
            return None
        # Only quotes join lines, and only carriage returns split them.
        plain = b"\r" not in block and not (self.quoted and b'"' in block) and not self.escape
        return table if plain or table.num_rows == block.count(b"\n") else None

    def fault(self, line: bytes, after: bytes, columns: Sequence[str]) -> Fault | None:
        """Explains why a line is invalid. Returns None if and only if `parse` accepts it.

        Args:
            after: the next line.
        """
        text = content(line)
        try:
            cells = self.cells(text)
        except csv.Error as error:
            if self.parse(line, columns) is not None:
                return None  # a value is longer than the csv module accepts
            return Fault("", TEXT, str(error))
        if self.quoted and self._continues(text):
            return Fault("", DOUBLED, repr(text), "" if self.escape else _ESCAPE_HINT)
        if "\n" in cells[-1]:
            column = columns[len(cells) - 1] if len(cells) <= len(columns) else ""
            return Fault(column, CLOSED, repr(cells[-1] + content(after)))
        if len(columns) > 1 and not any(cell and cell not in self.null_values for cell in cells):
            actual = "only missing values" if any(cells) else "an empty line"
            return Fault("", "have a value in some column", actual)
        if len(cells) != len(columns):
            hint = likely_delimiter(text, self.delimiter) if len(cells) == 1 else ""
            hint = hint and f" Set source.delimiter={hint!r} if it separates the columns."
            return Fault("", f"have {len(columns)} columns", str(len(cells)), hint)
        if not _is_utf8(line):
            index = next(i for i, cell in enumerate(cells) if _ESCAPED.search(cell))
            data = cells[index].encode(errors="surrogateescape")
            return Fault(columns[index], "UTF-8", repr(data))
        return None


def likely_delimiter(line: str, delimiter: str) -> str:
    """Returns the letter that probably separates the columns of a line, "" if none does."""
    others = [letter for letter in _SEPARATORS if letter != delimiter]
    likely = max(others, key=line.count)
    return likely if likely in line else ""


def content(line: bytes, errors: str = "surrogateescape") -> str:
    """Returns a line without its line ending."""
    return line.removesuffix(b"\n").removesuffix(b"\r").decode(errors=errors)


def _is_utf8(text: bytes) -> bool:
    if text.isascii():
        return True
    ends = pa.py_buffer(np.array([0, len(text)], np.int32))
    try:
        # Several times as fast as decoding, without a copy.
        pa.StringArray.from_buffers(1, ends, pa.py_buffer(text)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _has_newline(table: pa.Table, block: bytes) -> bool:
    """Returns True if a value spans two lines, for a table with as many rows as the block has
    lines.

    An open quote joins lines and so reduces the rows, with two exceptions. The last value may take
    the end of the last line, or a carriage return in another line may add a row.
    """
    if "\n" in (table.column(-1)[-1].as_py() or ""):
        return True
    if b"\r" not in block:
        return False
    letters = np.frombuffer(block, np.uint8)
    torn = bool(np.any((letters[:-1] == ord("\r")) & (letters[1:] != ord("\n"))))
    return torn and any(pc.any(pc.match_substring(c, "\n")).as_py() for c in table.columns)


def _has_empty_row(batch: pa.RecordBatch) -> bool:
    """Returns True if any record has no values at all. A line of one column may be empty."""
    empty = None
    for column in batch.columns if batch.num_columns > 1 else []:
        if not column.null_count:
            return False
        missing = column.is_null()
        empty = missing if empty is None else pc.and_(empty, missing)
        if not pc.any(empty).as_py():
            return False
    return empty is not None
