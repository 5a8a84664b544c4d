"""Delimited text, plain or compressed, as chunks of string columns."""

import csv
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data import files
from jaxrank.data.chunk import Chunk, Part, numbered
from jaxrank.data.files import File
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources import lines
from jaxrank.data.sources.delimited import BYTE_ORDER_MARK, CLOSED, TEXT, Delimited, content
from jaxrank.errors import InputError

CRITEO_COLUMNS = (
    "label",
    *(f"I{i}" for i in range(1, 14)),
    *(f"C{i}" for i in range(1, 27)),
)
_PART_BYTES = 1 << 26
_ROWS_PER_CHUNK = 16_384
_MIN_CHUNK_BYTES = 1 << 20
_DELIMITERS = ",;\t|"
_MOST_OF_EMPTY = 64  # bytes of a compressed file that holds nothing
_WHOLE = (0, 1)  # of a file whose size is not known


def empty_file(path: str) -> InputError:
    return InputError(f"{path}: must have at least one row: found none, the file is empty.")


def check_rows(paths_of: Mapping[str, Sequence[str]], without: Collection[str]) -> None:
    """Refuses splits of which all files are `without` rows; who writes in parts may leave some so.

    Raises:
        InputError: naming a file.
    """
    for paths in paths_of.values():
        if all(path in without for path in paths):
            others = ", nor in the other files of its split" if len(paths) > 1 else ""
            raise InputError(f"{paths[0]}: must have at least one row: found none{others}.")


class LineSource:
    """Files of text, plain or compressed, of which each line is a record by itself.

    A file can be cut after any line: parts are ranges of its bytes, and have the lines that begin
    in them. What a line says is up to the subclass, with `columns` and `chunks`.
    """

    def __init__(self, paths_of: Mapping[str, Sequence[str]]):
        self._paths_of = {split: _not_empty(paths) for split, paths in paths_of.items()}

    @property
    def splits(self) -> list[str]:
        return list(self._paths_of)

    @property
    def files(self) -> list[str]:
        return [path for paths in self._paths_of.values() for path in paths]

    @property
    def types(self) -> dict[str, str]:
        return {}

    @property
    def hint(self) -> str:
        return ""

    def check_columns(self, used: Collection[str]) -> None:
        del used  # a line is read as a whole

    def marks(self) -> dict[str, File]:
        return {path: files.describe(path) for path in self.files}

    def parts(self, split: str) -> list[Part]:
        return [
            Part(split, path, start, stop)
            for path in self._paths_of[split]
            for start, stop in _ranges(path)
        ]

    def blocks(self, part: Part) -> Iterator[tuple[bytes, int, bool]]:
        """(whole lines, `Chunk.offset`, whether they begin the file) of a part, in order.

        Raises:
            InputError: as of `lines.blocks`, or the file is empty.
        """
        path, start, stop = part.file, part.start, part.stop
        if (start, stop) == _WHOLE:
            stop = sys.maxsize
        first, offset = True, 0
        for position, block in lines.blocks(
            path, start, stop, rows=_ROWS_PER_CHUNK, smallest=_MIN_CHUNK_BYTES
        ):
            if first and start:
                offset = position
            elif first:
                block = block.removeprefix(BYTE_ORDER_MARK)
            yield block, offset, first and not start
            first = False
        if first and not start:
            raise empty_file(path)


class TextSource(LineSource):
    """Delimited text, plain or compressed; every value is text on one line.

    Values are found by the names in their own file's header; the columns of chunks are in the order
    of the first file's.

    Args:
        delimiter: one ASCII character.
        header: whether each file begins with a line of names, and values may be in quotes; else
            the columns are those of Criteo's files, all of which have a label or none has.
        null_values: what is missing beside the empty value.
        escape: as of `Delimited`.
        columns: names of the columns of files without a line of names, in which values may be in
            quotes as with a header; none: each file has that line.
    """

    def __init__(
        self,
        paths_of: Mapping[str, Sequence[str]],
        delimiter: str,
        *,
        header: bool,
        null_values: Sequence[str] = (),
        escape: str = "",
        columns: Sequence[str] = (),
    ):
        super().__init__(paths_of)
        nulls = tuple(dict.fromkeys(filter(None, null_values)))
        self._format = Delimited(delimiter, header, nulls, escape)
        self._header = header and not columns
        self._columns: list[str] = list(columns)
        self._other_orders: dict[str, list[str]] = {}  # the header by path, where not as the first
        if self._columns:
            for path in self.files:
                lines.first_line(path)  # rejects what is no text
        elif header:
            paths = self.files
            headers = {path: self._read_header(path) for path in paths}
            check_rows(
                self._paths_of, [path for path, (_, has_rows) in headers.items() if not has_rows]
            )
            self._columns = headers[paths[0]][0]
            for path, (names, _) in headers.items():
                check_same_columns(paths[0], self._columns, path, names)
                if names != self._columns:
                    self._other_orders[path] = names
        else:
            self._columns = _criteo_columns(self.files[0])

    def columns(self, split: str) -> list[str]:
        return self._columns

    @property
    def hint(self) -> str:
        if not self._header or not self._columns:
            return ""
        path, names = self.files[0], self._columns
        others = [c for c in _DELIMITERS if c != self._format.delimiter]
        likely = max(others, key=names[0].count)
        if len(names) == 1 and likely in names[0]:
            return (
                f" The first line of {path} is one name, {names[0]!r}: set"
                f" source.delimiter={likely!r}."
            )
        shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        return (
            f" The names are those in the first line of {path}: {shown}. If that line is a record,"
            " name the columns in source.columns."
        )

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        row = 1
        for block, offset, begins in self.blocks(part):
            if begins and self._header:
                block = block[block.index(b"\n") + 1 :]
                row += 1
            count, batch, rows = self._records(block, row, part, offset, rejects)
            if batch.num_rows:
                written = self._written(block, row, part.file) if self._format.null_values else None
                yield Chunk(batch, part.file, rows, offset, written)
            row += count

    def _records(
        self, block: bytes, row: int, part: Part, offset: int, rejects: Rejects
    ) -> tuple[int, pa.RecordBatch, np.ndarray]:
        """(lines, records, their numbers) of whole lines, the first of which has the number `row`.

        Lines that are no records go to `rejects`.
        """
        columns = self._other_orders.get(part.file, self._columns)
        batch = self._format.parse(block, columns)
        if batch is not None:
            headers = self._repeated(batch, columns)
            count, batch = batch.num_rows, self._in_order(batch)
            for i in headers.tolist():
                self._refuse_header(i, batch, row, part, offset, rejects)
            if len(headers):
                keep = np.setdiff1d(np.arange(count), headers)
                return count, batch.take(pa.array(keep)), row + keep
            return count, batch, numbered(row, count)
        lines = [line + b"\n" for line in block.split(b"\n")[:-1]]
        good = []
        for i, line in enumerate(lines):
            after = lines[i + 1] if i + 1 < len(lines) else b""
            fault = self._format.fault(line, after, columns)
            if fault is None:
                good.append(i)
                continue
            rejects.reject(
                **fault._asdict(),
                file=part.file,
                row=row + i,
                record=content(line, "backslashreplace"),
                offset=offset,
            )
        batch = self._format.parse(b"".join(lines[i] for i in good), columns)
        assert batch is not None, f"{part}, from row {row} on: lines without fault are no records"
        headers = self._repeated(batch, columns)
        for i in headers.tolist():
            at = row + good[i] - i
            self._refuse_header(i, self._in_order(batch), at, part, offset, rejects)
        keep = np.setdiff1d(np.arange(batch.num_rows), headers)
        batch = self._in_order(batch).take(pa.array(keep))
        return len(lines), batch, row + np.asarray(good, np.int64)[keep]

    def _repeated(self, batch: pa.RecordBatch, columns: Sequence[str]) -> np.ndarray:
        """i64[m]: the records that are a line of names, as where files were joined by `cat`."""
        if not self._format.quoted or len(columns) < 2:
            return np.zeros(0, np.int64)
        rows: Any = None
        for name in columns:
            names = [name, f"\ufeff{name}"]  # with the mark that a joined file began with
            same = pc.is_in(batch.column(name), value_set=pa.array(names))
            rows = same if rows is None else pc.and_(rows, same)
            if not pc.any(rows).as_py():
                return np.zeros(0, np.int64)
        return np.flatnonzero(pc.fill_null(rows, False).to_numpy(zero_copy_only=False))

    def _refuse_header(
        self, i: int, batch: pa.RecordBatch, row: int, part: Part, offset: int, rejects: Rejects
    ) -> None:
        hint = "" if self._header else " Leave source.columns out where files have that line."
        rejects.reject(
            file=part.file,
            row=row + i,
            column="",
            must="a record",
            found="the header again, the names of the columns",
            hint=hint,
            record=batch.slice(i, 1).to_pylist()[0],
            offset=offset,
        )

    def _written(self, block: bytes, first: int, path: str) -> Callable[[int], dict[str, Any]]:
        """`Chunk.written` of whole lines that have the numbers from `first` on."""
        plain = self._format._replace(null_values=())
        columns = self._other_orders.get(path, self._columns)

        @functools.cache
        def ends() -> np.ndarray:
            return np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1

        def record(number: int) -> dict[str, Any]:
            index = number - first
            start = ends()[index - 1] if index else 0
            batch = plain.parse(block[start : ends()[index]], columns)
            assert batch is not None, f"{path}: a record, and by itself none"
            return self._in_order(batch).to_pylist()[0]

        return record

    def _in_order(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if batch.schema.names == self._columns else batch.select(self._columns)

    def _read_header(self, path: str) -> tuple[list[str], bool]:
        """The names, and whether anything follows them."""
        line, more = lines.first_line(path)
        line = line.removeprefix(BYTE_ORDER_MARK)
        if not more and not line.strip():
            raise empty_file(path)
        where = f"{path}, row 1"
        try:
            names = self._format.cells(content(line, "strict"))
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: must be UTF-8: {error}.") from error
        except csv.Error as error:
            raise InputError(f"{where}: must be {TEXT}: found {error}.") from error
        if not any(names):
            raise InputError(f"{where}: must have the names of the columns: found an empty line.")
        if "\n" in names[-1]:
            raise InputError(f"{where}: must be {CLOSED}: found {names[-1]!r}.")
        for i, name in enumerate(names):
            if name in names[:i]:
                raise InputError(f"{where}: column names must differ: found {name!r} twice.")
        return names, more


def _not_empty(paths: Sequence[str]) -> list[str]:
    """The files that have a byte, unpacked; all if none has, for whoever writes in parts may leave
    some empty."""
    return [path for path in paths if not _is_empty(path)] or list(paths)


def _is_empty(path: str) -> bool:
    size = files.describe(path).size
    return size <= _MOST_OF_EMPTY and lines.first_line(path) == (b"", False)


def _criteo_columns(path: str) -> list[str]:
    """Those of the file's first lines: the data to be scored has no label."""
    without = len(CRITEO_COLUMNS) - 2  # tabs
    has_none = all(line.count(b"\t") == without for line in lines.first_lines(path))
    return list(CRITEO_COLUMNS[1:] if has_none else CRITEO_COLUMNS)


def _ranges(path: str) -> list[tuple[int, int]]:
    size = files.describe(path).size
    if size <= _PART_BYTES or lines.compression(path) or not files.has_ranges(path):
        return [(0, max(size, 1))]
    return [(i, min(i + _PART_BYTES, size)) for i in range(0, size, _PART_BYTES)]


def check_same_columns(first: str, names: Sequence[str], path: str, found: list[str]) -> None:
    missing = [n for n in names if n not in found]
    added = [n for n in found if n not in names]
    if missing or added:
        raise InputError(
            f"{path}: must have the columns of {first}: found missing {missing}, not expected"
            f" {added}."
        )
