"""What becomes of raw records that cannot be used: they stop the preparation, or are set aside."""

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
    """Records of a chunk that hold what they may not.

    Args:
        chunk: that they are in.
        rows: i64[m] their places in the chunk, at least one.
        column: of the first; empty where it is the record as a whole.
        must: what must hold, as "a finite number or empty".
        found: what the first has instead, as text.
        hint: a sentence that follows, with a space in front, or empty.
    """

    def __init__(
        self, chunk: Chunk, rows: np.ndarray, column: str, must: str, found: str, hint: str = ""
    ):
        self.rows, self.column, self.must, self.found, self.hint = rows, column, must, found, hint
        super().__init__(_message(chunk.file, int(chunk.rows[rows[0]]), column, must, found, hint))

    def __reduce__(self) -> tuple[type[InputError], tuple[str]]:
        return InputError, (str(self),)  # to other processes without the chunk


def _message(file: str, row: int, column: str, must: str, found: str, hint: str) -> str:
    where = f", column {column}" if column else ""
    verb = "" if must.startswith(("have ", "be ", "not ")) else "be "
    return f"{file}, row {row}{where}: must {verb}{must}: found {found}.{hint}"


class Rejects:
    """Decides about records that cannot be used, and keeps those that are skipped.

    Args:
        policy: "error": the first stops the preparation; "skip": they are counted and kept.
        limit: how many may be skipped.
        pseudonymise: makes of a value what a file outside the raw data may show; none: the value.

    Attributes:
        count: records skipped so far.
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
        self._before: tuple[str, int, int] = ("", 0, 0)  # file, offset, and lines before it

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
        found: str,
        hint: str = "",
        record: Any,
        offset: int = 0,
    ) -> None:
        """Skips one record.

        Args:
            file, row, offset: as of `Chunk`.
            column, must, found, hint: as of `BadRows`; of a bad line that has no columns, "".
            record: the whole record: {column: value}, or the text of a line that has no columns.

        Raises:
            InputError: the policy is "error", or more than `limit` were skipped; names the place.
        """
        if self._before[:2] != (file, offset):  # once for all of a part
            self._before = file, offset, _lines_before(file, offset)
        row += self._before[2]
        if self.policy == "error":
            raise InputError(_message(file, row, column, must, found, hint))
        if self._pseudonymise is not None:
            record, found = _pseudonymised(record, self._pseudonymise), "a value that is not shown"
        entry = dict(file=file, row=row, column=column, must=must, found=found, record=record)
        self.lines.append(json_files.to_text(entry, non_finite="text"))
        if self.count > self.limit:
            raise InputError(
                f"at most {self.limit:,} records may be skipped (--max-rejected): found more. The"
                f" last: {_message(file, row, column, must, found, hint)}"
            )

    def attempt(
        self, chunk: Chunk, function: Callable[[Chunk], Result]
    ) -> tuple[Chunk, Result | None]:
        """function(chunk) of what can be used, and that chunk; None where nothing is left.

        Raises:
            InputError: as of `reject`.
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
                        found=bad.found if row == bad.rows[0] else _shown(record, bad.column),
                        hint=bad.hint,
                        record=record,
                        offset=chunk.offset,
                    )
                chunk = chunk.without(bad.rows)
        return chunk, None


def missing_text(chunk: Chunk, row: int, column: str) -> str:
    """What a message says of a value that is missing: the text that stands for it, if any."""
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


def _lines_before(file: str, offset: int) -> int:
    """Lines in the first `offset` bytes of an uncompressed file."""
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
