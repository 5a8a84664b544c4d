"""Handles invalid raw records: they stop the preparation, or are skipped and recorded."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from jaxrank import json_files
from jaxrank.data import files
from jaxrank.data.chunk import Chunk
from jaxrank.data.keyed_hash import Pseudonymise
from jaxrank.errors import InputError

Result = TypeVar("Result")

_COUNT_AT_ONCE = 1 << 24


class BadRows(InputError):
    """Records of a chunk with invalid content.

    Args:
        chunk: the chunk that contains them.
        rows: i64[m] their indices in the chunk, at least one.
        column: of the first record, or "" if the whole record is invalid.
        must: requirement, such as "a finite number or empty".
        actual: actual content of the first record, as text.
        hint: a sentence to append, with a leading space, or "".
    """

    def __init__(
        self, chunk: Chunk, rows: np.ndarray, column: str, must: str, actual: str, hint: str = ""
    ):
        self.rows, self.column, self.must, self.actual, self.hint = rows, column, must, actual, hint
        super().__init__(_message(chunk.file, int(chunk.rows[rows[0]]), column, must, actual, hint))

    def __reduce__(self) -> tuple[type[InputError], tuple[str]]:
        return InputError, (str(self),)  # pickles without the chunk


def _message(file: str, row: int, column: str, must: str, actual: str, hint: str) -> str:
    where = f", column {column}" if column else ""
    verb = "" if must.startswith(("have ", "be ", "not ")) else "be "
    return f"{file}, row {row}{where}: must {verb}{must}: found {actual}.{hint}"


class Rejects:
    """Raises for invalid records or skips and records them, as the policy says.

    Args:
        policy: "error": the first invalid record stops the preparation. "skip": invalid records are
            counted and recorded.
        limit: maximum number of skipped records.
        pseudonymise: maps a value to the text that may leave the raw data. None: the value itself.

    Attributes:
        count: number of records skipped so far.
        lines: a line of JSON for each: file, row, column, must, found, record.
    """

    def __init__(
        self,
        policy: str = "error",
        limit: int = 0,
        pseudonymise: Pseudonymise | None = None,
    ):
        self.policy, self.limit = policy, limit
        self.lines: list[str] = []
        self._pseudonymise = pseudonymise
        # file, offset, and number of lines before it
        self._before: tuple[str, int, int] = ("", 0, 0)

    @property
    def count(self) -> int:
        return len(self.lines)

    def reject(
        self,
        *,
        file: str,
        row: int,
        column: str,
        must: str,
        actual: str,
        hint: str = "",
        record: Any,
        offset: int = 0,
    ) -> None:
        """Skips one record.

        Args:
            file, row, offset: as in `Chunk`.
            column, must, actual, hint: as in `BadRows`. `column` is "" for a malformed line.
            record: the whole record as {column: value}, or the text of a malformed line.

        Raises:
            InputError: the policy is "error", or more than `limit` records were skipped. Names the
                place.
        """
        if self._before[:2] != (file, offset):  # once per part
            self._before = file, offset, _count_lines(file, offset)
        row += self._before[2]
        if self.policy == "error":
            raise InputError(_message(file, row, column, must, actual, hint))
        shown = actual
        if self._pseudonymise is not None:
            record, shown = _pseudonymised(record, self._pseudonymise), "a value that is not shown"
        entry = dict(file=file, row=row, column=column, must=must, found=shown, record=record)
        self.lines.append(json_files.to_text(entry, non_finite="text"))
        if self.count > self.limit:
            raise InputError(
                f"at most {self.limit:,} records may be skipped (--max-rejected): found more. The"
                f" last: {_message(file, row, column, must, shown, hint)}"
            )

    def attempt(
        self, chunk: Chunk, function: Callable[[Chunk], Result]
    ) -> tuple[Chunk, Result | None]:
        """Applies function to the valid records of a chunk.

        Returns:
            The chunk of the valid records, and the result, or None if no record is valid.

        Raises:
            InputError: as in `reject`.
        """
        while chunk.batch.num_rows:
            try:
                return chunk, function(chunk)
            except BadRows as bad:
                for row in np.unique(bad.rows).tolist():
                    record = chunk.record(row)
                    self.reject(
                        file=chunk.file,
                        row=int(chunk.rows[row]),
                        column=bad.column,
                        must=bad.must,
                        actual=bad.actual if row == bad.rows[0] else _shown(record, bad.column),
                        hint=bad.hint,
                        record=record,
                        offset=chunk.offset,
                    )
                chunk = chunk.drop_records(bad.rows)
        return chunk, None


def missing_text(chunk: Chunk, row: int, column: str) -> str:
    """Describes a missing value for a message, with the text that stands for it, if any."""
    return "an empty value" if chunk.written is None else _shown(chunk.record(row), column)


def _shown(record: Mapping[str, Any], column: str) -> str:
    if column not in record:
        return "another"
    value = record[column]
    return "an empty value" if value is None else repr(value)


def _pseudonymised(record: Any, pseudonymise: Pseudonymise) -> Any:
    if isinstance(record, dict):
        return {key: _pseudonymised(value, pseudonymise) for key, value in record.items()}
    if isinstance(record, list):
        return [_pseudonymised(value, pseudonymise) for value in record]
    return None if record is None else pseudonymise(str(record))


def _count_lines(file: str, offset: int) -> int:
    """Returns the number of lines in the first `offset` bytes of an uncompressed file."""
    lines = 0
    if not offset:
        return 0
    try:
        with files.open_input(file) as stream:
            while offset and (data := stream.read(min(offset, _COUNT_AT_ONCE))):
                lines += data.count(b"\n")
                offset -= len(data)
    except OSError as error:
        raise InputError(f"{file}: must be readable to its end: found {error}.") from error
    return lines
