"""Lines of delimited values as Arrow columns: how they are parsed, and what is wrong with them."""

import csv
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

# What Arrow parses at a time: as much as a core's cache holds, but more where the columns are more
# than that, as each costs a few microseconds.
_PIECE_BYTES, _PIECE_COLUMNS = 1 << 19, 32
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ESCAPED = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as surrogateescape has them

TEXT = "delimited text"
CLOSED = "on one line, between two quotes if quoted"


DOUBLED = "delimited text whose quoted values end at their closing quote"
_ESCAPE_HINT = (
    " A quote within a quoted value is written twice, or set source.escape to the letter before it."
)


class Fault(NamedTuple):
    """What is wrong with a line, as of `Rejects.reject`."""

    column: str
    must: str
    found: str
    hint: str = ""


class Delimited(NamedTuple):
    """How lines are divided into values.

    quoted: whether values may be in quotes, as in CSV.
    null_values: what is missing beside the empty value, in quotes or not.
    escape: the letter before one that counts as itself; empty: none, and quotes are doubled.
    """

    delimiter: str
    quoted: bool
    null_values: tuple[str, ...] = ()
    escape: str = ""

    def cells(self, text: str) -> list[str]:
        """The values in a line; the last ends in a newline where its quote is not closed.

        Raises:
            csv.Error: a carriage return, not in quotes, or a value too long for the csv module.
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
            # The csv module takes some at the end for those of lines, and leaves them out.
            kept = sum(cell.count("\r") for cell in cells)
        if kept < text.count("\r"):
            raise csv.Error("a carriage return within the line")
        return cells

    def _reader(self, text: str, *, strict: bool = False) -> Any:
        escape = self.escape or None
        return csv.reader([text + "\n"], delimiter=self.delimiter, escapechar=escape, strict=strict)

    def _goes_on(self, text: str) -> bool:
        """Returns True if a quoted value of a line goes on after its closing quote."""
        try:
            next(self._reader(text, strict=True))
        except csv.Error as error:
            return "expected after" in str(error)
        return False

    def _any_goes_on(self, block: bytes) -> bool:
        """Returns True if `_goes_on` holds of some line of a block."""
        letters = np.frombuffer(block, np.uint8)
        at = np.flatnonzero(letters == ord('"'))
        ends = np.frombuffer(f'"\r\n{self.delimiter}'.encode(), np.uint8)
        before = letters[np.maximum(at - 1, 0)]
        after = letters[np.minimum(at + 1, len(letters) - 1)]
        # A quote that neither opens nor closes a value, or stands behind a backslash.
        odd = (~np.isin(after, ends) & ~np.isin(before, ends) & (at > 0)) | (before == ord("\\"))
        line_ends = np.flatnonzero(letters == ord("\n"))
        for index in np.unique(np.searchsorted(line_ends, at[odd])).tolist():
            start = int(line_ends[index - 1]) + 1 if index else 0
            line = block[start : int(line_ends[index])] if index < len(line_ends) else block[start:]
            if self._goes_on(content(line)):
                return True
        return False

    def parse(self, block: bytes, columns: Sequence[str]) -> pa.RecordBatch | None:
        """A record for each of some whole lines; None exactly if one of them is no record.

        Values are text, null where missing.
        """
        if not block:
            return pa.RecordBatch.from_pylist([], pa.schema(dict.fromkeys(columns, pa.string())))
        if not _is_utf8(block):
            return None
        if block.startswith(BYTE_ORDER_MARK):
            block = BYTE_ORDER_MARK + block  # the reader drops one
        if b"\0" not in block:
            return self._batch(block, columns)
        # Arrow overlooks delimiters and quotes soon after it (apache/arrow issue 50481).
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
            piece = whole  # Arrow may end a piece within quotes, and not notice
        table = self._table(block, columns, piece)
        if table is None and piece < whole:  # a line may be longer than a piece
            table = self._table(block, columns, whole)
        if table is None or (quotes and _has_newline(table, block)):
            return None
        if quotes and self._any_goes_on(block):
            return None
        batch = table.combine_chunks().to_batches()[0]
        return None if _has_empty_row(batch) else batch

    def _table(self, block: bytes, columns: Sequence[str], piece: int) -> pa.Table | None:
        """What Arrow finds in a block, `piece` bytes at a time; None if not a row for each line."""
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
            check_utf8=False,  # of each value: slower than of the block
        )
        try:
            table = pa.csv.read_csv(pa.BufferReader(block), read, parse, convert)
        except pa.ArrowInvalid:
            return None
        # Only quotes join lines, and only carriage returns divide them.
        plain = b"\r" not in block and not (self.quoted and b'"' in block) and not self.escape
        return table if plain or table.num_rows == block.count(b"\n") else None

    def fault(self, line: bytes, after: bytes, columns: Sequence[str]) -> Fault | None:
        """What is wrong with a line; None exactly if `parse` takes it. `after` is the next."""
        text = content(line)
        try:
            cells = self.cells(text)
        except csv.Error as error:
            if self.parse(line, columns) is not None:
                return None  # a value is longer than the csv module takes
            return Fault("", TEXT, str(error))
        if self.quoted and self._goes_on(text):
            return Fault("", DOUBLED, repr(text), "" if self.escape else _ESCAPE_HINT)
        if "\n" in cells[-1]:
            column = columns[len(cells) - 1] if len(cells) <= len(columns) else ""
            return Fault(column, CLOSED, repr(cells[-1] + content(after)))
        if len(columns) > 1 and not any(cell and cell not in self.null_values for cell in cells):
            actual = "only missing values" if any(cells) else "an empty line"
            return Fault("", "have a value in some column", actual)
        if len(cells) != len(columns):
            return Fault("", f"have {len(columns)} columns", str(len(cells)))
        if not _is_utf8(line):
            index = next(i for i, cell in enumerate(cells) if _ESCAPED.search(cell))
            data = cells[index].encode(errors="surrogateescape")
            return Fault(columns[index], "UTF-8", repr(data))
        return None


def content(line: bytes, errors: str = "surrogateescape") -> str:
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


def _has_newline(table: pa.Table, block: bytes) -> bool:
    """Whether a value is over two lines, of a table of as many rows as the block has lines.

    An open quote joins lines, so that rows are fewer, but for two cases: the last value takes the
    end of the last line, or a carriage return within another line makes one row more.
    """
    if "\n" in (table.column(-1)[-1].as_py() or ""):
        return True
    if b"\r" not in block:
        return False
    letters = np.frombuffer(block, np.uint8)
    torn = bool(np.any((letters[:-1] == ord("\r")) & (letters[1:] != ord("\n"))))
    return torn and any(pc.any(pc.match_substring(c, "\n")).as_py() for c in table.columns)


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
