"""Reads delimited text, plain or compressed, as chunks of string columns."""

import csv
import functools
import re
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
from jaxrank.data.sources import lines, table_formats
from jaxrank.data.sources.delimited import (
    BYTE_ORDER_MARK,
    CLOSED,
    TEXT,
    Delimited,
    content,
    likely_delimiter,
)
from jaxrank.data.sources.partitions import partition_values
from jaxrank.errors import InputError

CRITEO_COLUMNS = (
    "label",
    *(f"I{i}" for i in range(1, 14)),
    *(f"C{i}" for i in range(1, 27)),
)
_CRITEO_NUMBERS = 13  # columns of numbers
_NAME = re.compile(r"[^\W\d]\w*")
_PART_BYTES = 1 << 26
_ROWS_PER_CHUNK = 16_384
_MIN_CHUNK_BYTES = 1 << 20
_MAX_EMPTY_FILE_BYTES = 64  # maximum bytes of a compressed empty file
_WHOLE = (0, 1)  # range of a file whose size is unknown


def empty_file(path: str) -> InputError:
    return InputError(f"{path}: must have at least one row: found none, the file is empty.")


def check_rows(paths_of: Mapping[str, Sequence[str]], excluded: Collection[str]) -> None:
    """Rejects splits all of whose files are `excluded`, which have no rows.

    Raises:
        InputError: names a file.
    """
    for paths in paths_of.values():
        if all(path in excluded for path in paths):
            others = ", nor in the other files of its split" if len(paths) > 1 else ""
            raise InputError(f"{paths[0]}: must have at least one row: found none{others}.")


class LineSource:
    """Text files, plain or compressed, with one record per line.

    A file can be split after any line: parts are ranges of bytes, and contain the lines that begin
    in them. Subclasses parse the lines in `columns` and `chunks`.
    """

    def __init__(self, paths_of: Mapping[str, Sequence[str]]):
        table_formats.check_plain([path for paths in paths_of.values() for path in paths])
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
        del used  # a line is always read as a whole

    def marks(self) -> dict[str, File]:
        return {path: files.describe(path) for path in self.files}

    def parts(self, split: str) -> list[Part]:
        return [
            Part(split, path, start, stop)
            for path in self._paths_of[split]
            for start, stop in _ranges(path)
        ]

    def blocks(self, part: Part) -> Iterator[tuple[bytes, int, bool]]:
        """Yields (whole lines, `Chunk.offset`, True at the beginning of the file) of a part, in
        order.

        Raises:
            InputError: as in `lines.blocks`, or the file is empty.
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
    """Delimited text, plain or compressed. Every value is text on one line.

    Values are assigned by the names in their own file's header. The columns of chunks have the
    order of the first file.

    Args:
        delimiter: one ASCII character.
        header: True if each file begins with a line of names, and values may be quoted. Otherwise
            the columns are those of Criteo's files, all with a label or all without.
        null_values: texts for missing values in addition to the empty value.
        escape: as in `Delimited`.
        columns: names of the columns of files without a header, in which values may be quoted.
            Empty: each file has a header.
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
        if not self._header:
            for path in self.files:
                line, _ = lines.first_line(path)  # rejects files that are not text
                if not columns:
                    _check_criteo(path, content(line, "replace"))
        # the header by path, where its order differs from the first
        self._other_orders: dict[str, list[str]] = {}
        if self._header:
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
        elif not columns:
            self._columns = _criteo_columns(self.files[0])

    def columns(self, split: str) -> list[str]:
        return self._columns

    @property
    def hint(self) -> str:
        if not self._header or not self._columns:
            return ""
        path, names = self.files[0], self._columns
        likely = likely_delimiter(names[0], self._format.delimiter)
        if len(names) == 1 and likely:
            return (
                f" The first line of {path} is one name, {names[0]!r}: set"
                f" source.delimiter={likely!r}."
            )
        if keys := [key for key in partition_values(path) if key not in names]:
            return (
                f" The key {keys[0]!r} in the names of directories becomes a column only with"
                " source.kind='parquet': write it into the files."
            )
        shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        return (
            f" The names are those in the first line of {path}: {shown}. If that line is a record,"
            " name the columns in source.columns."
        )

    def chunks(self, part: Part, rejects: Rejects) -> Iterator[Chunk]:
        row = 1
        for block, offset, is_start in self.blocks(part):
            if is_start and self._header:
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
        """Parses whole lines, the first of which has the number `row`.

        Invalid lines go to `rejects`.

        Returns:
            The number of lines, the records, and the line number of each record.
        """
        columns = self._other_orders.get(part.file, self._columns)
        batch = self._format.parse(block, columns)
        if batch is not None:
            headers = self._repeated(batch, columns)
            count, batch = batch.num_rows, self._order_columns(batch)
            for i in headers.tolist():
                self._reject_header(i, batch, row, part, offset, rejects)
            if len(headers):
                keep = np.setdiff1d(np.arange(count), headers)
                return count, batch.take(pa.array(keep)), row + keep
            return count, batch, numbered(row, count)
        lines = [line + b"\n" for line in block.split(b"\n")[:-1]]
        faults = {}
        for i, line in enumerate(lines):
            after = lines[i + 1] if i + 1 < len(lines) else b""
            if (fault := self._format.fault(line, after, columns)) is not None:
                faults[i] = fault
        good = [i for i in range(len(lines)) if i not in faults]
        batch = self._format.parse(b"".join(lines[i] for i in good), columns)
        assert batch is not None, f"{part}, from row {row} on: valid lines must be records"
        headers = self._repeated(batch, columns).tolist()
        batch = self._order_columns(batch)
        places = {good[i]: i for i in headers}
        for i in sorted([*faults, *places]):
            if i in places:
                at = row + i - places[i]
                self._reject_header(places[i], batch, at, part, offset, rejects)
                continue
            rejects.reject(
                **faults[i]._asdict(),
                file=part.file,
                row=row + i,
                record=content(lines[i], "backslashreplace"),
                offset=offset,
            )
        keep = np.setdiff1d(np.arange(batch.num_rows), headers)
        batch = batch.take(pa.array(keep))
        return len(lines), batch, row + np.asarray(good, np.int64)[keep]

    def _repeated(self, batch: pa.RecordBatch, columns: Sequence[str]) -> np.ndarray:
        """Returns i64[m], the records that repeat the header, as in files joined by `cat`.

        The names may be in another order, in another case, or between spaces. The name of a single
        column may be a value in another case, so it counts only as it is.
        """
        if not self._format.quoted:
            return np.zeros(0, np.int64)
        if len(columns) == 1:
            same = pc.fill_null(pc.equal(batch.column(columns[0]), columns[0]), False)
            return np.flatnonzero(same.to_numpy(zero_copy_only=False))
        names = pa.array(sorted({way for name in columns for way in _spellings(name)}))
        rows: Any = None
        for name in columns:
            same = pc.is_in(batch.column(name), value_set=names)
            rows = same if rows is None else pc.and_(rows, same)
            if not pc.any(rows).as_py():
                return np.zeros(0, np.int64)
        candidates = np.flatnonzero(pc.fill_null(rows, False).to_numpy(zero_copy_only=False))
        cells = [batch.column(n).take(pa.array(candidates)).to_pylist() for n in columns]
        records = zip(*cells, strict=True)
        header = sorted(map(_plain_name, columns))
        same_names = [sorted(map(_plain_name, record)) == header for record in records]
        return candidates[np.array(same_names, bool)]

    def _reject_header(
        self, i: int, batch: pa.RecordBatch, row: int, part: Part, offset: int, rejects: Rejects
    ) -> None:
        hint = "" if self._header else " Leave source.columns out where files have that line."
        rejects.reject(
            file=part.file,
            row=row + i,
            column="",
            must="a record",
            actual="a repeated header",
            hint=hint,
            record=batch.slice(i, 1).to_pylist()[0],
            offset=offset,
        )

    def _written(self, block: bytes, first: int, path: str) -> Callable[[int], dict[str, Any]]:
        """Returns `Chunk.written` for whole lines with the numbers from `first` on."""
        plain = self._format._replace(null_values=())
        columns = self._other_orders.get(path, self._columns)

        @functools.cache
        def ends() -> np.ndarray:
            return np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1

        def record(number: int) -> dict[str, Any]:
            index = number - first
            start = ends()[index - 1] if index else 0
            batch = plain.parse(block[start : ends()[index]], columns)
            assert batch is not None, f"{path}: a valid line must be a record on its own"
            return self._order_columns(batch).to_pylist()[0]

        return record

    def _order_columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch if batch.schema.names == self._columns else batch.select(self._columns)

    def _read_header(self, path: str) -> tuple[list[str], bool]:
        """Returns the names in the header, and True if anything follows it."""
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


def _spellings(name: str) -> set[str]:
    """Returns a name in several cases, between spaces, and behind the mark of a joined file."""
    cases = {name, name.lower(), name.upper(), name.title()}
    spaced = cases | {f" {way}" for way in cases} | {f"{way} " for way in cases}
    return spaced | {f"\ufeff{way}" for way in spaced}


def _plain_name(cell: str) -> str:
    return cell.removeprefix("\ufeff").strip().lower()


def _not_empty(paths: Sequence[str]) -> list[str]:
    """Returns the files with content after decompression, or all files if there are none.

    A writer of parts may leave some of them empty.
    """
    return [path for path in paths if not _is_empty(path)] or list(paths)


def _is_empty(path: str) -> bool:
    if files.describe(path).size > _MAX_EMPTY_FILE_BYTES:
        return False
    line, more = lines.first_line(path)
    return not more and not line.removeprefix(BYTE_ORDER_MARK)


def _criteo_columns(path: str) -> list[str]:
    """Returns the Criteo columns of a file by its first lines. Data to be scored has no label."""
    excluded = len(CRITEO_COLUMNS) - 2  # number of tabs
    has_none = all(line.count(b"\t") == excluded for line in lines.first_lines(path))
    return list(CRITEO_COLUMNS[1:] if has_none else CRITEO_COLUMNS)


def _check_criteo(path: str, line: str) -> None:
    """Rejects a first line of names or with commas, which Criteo's files do not have."""
    cells = [cell.strip() for cell in line.removeprefix("\ufeff").split("\t")]
    if len(cells) == 1 and line.count(",") >= len(CRITEO_COLUMNS) - 2:
        raise InputError(
            f"{path}, row 1: must have tabs between its columns, as Criteo's files have: found"
            " commas. Set source.kind='csv', with source.columns where there is no header."
        )
    has_label = len(cells) == len(CRITEO_COLUMNS)
    if not has_label and len(cells) != len(CRITEO_COLUMNS) - 1:
        return
    numbers = cells[: _CRITEO_NUMBERS + has_label]
    if len(set(numbers)) == len(numbers) and all(map(_NAME.fullmatch, numbers)):
        raise InputError(
            f"{path}, row 1: must be a record, because Criteo's files have no header: found the"
            f" names {', '.join(map(repr, numbers[:3]))}, ... Set source.kind='csv' and"
            " source.delimiter='\\t' to read the names, or remove the line."
        )


def _ranges(path: str) -> list[tuple[int, int]]:
    size = files.describe(path).size
    if size <= _PART_BYTES or lines.compression(path) or not files.has_ranges(path):
        return [(0, max(size, 1))]
    return [(i, min(i + _PART_BYTES, size)) for i in range(0, size, _PART_BYTES)]


def check_same_columns(first: str, names: Sequence[str], path: str, actual: list[str]) -> None:
    missing = [n for n in names if n not in actual]
    added = [n for n in actual if n not in names]
    if missing or added:
        raise InputError(
            f"{path}: must have the columns of {first}: found missing {missing}, additional"
            f" {added}."
        )
