"""Units of a preparation: parts of a split that one process works on and that can be repeated."""

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import xxhash

from jaxrank import json_files
from jaxrank.data import files
from jaxrank.data.chunk import Part
from jaxrank.data.sources.registry import Source
from jaxrank.errors import InputError, RunError

_UNIT_BYTES = 64 << 20  # small files are joined up to this size
_GENERATED_BYTES = 8 << 20  # approximate size of a chunk of generated data


@dataclasses.dataclass(frozen=True)
class WorkUnit:
    """Consecutive parts of a split. The result of a unit depends only on its fingerprint.

    index: among the units of the split.
    bytes: approximate bytes to read.
    marks: versions of the files, to detect changes.
    """

    split: str
    index: int
    parts: tuple[Part, ...]
    bytes: int
    marks: tuple[files.File, ...]

    @property
    def name(self) -> str:
        """Returns the name of the unit's results, which is also the prefix of its files."""
        return f"{self.index:05d}-"

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Checks on exit that the files have not changed since the preparation began.

        Raises:
            RunError: a file has changed or is gone. Replaces the error of an invalid record.
        """
        try:
            yield
        except InputError:
            self._check_unchanged()
            raise
        self._check_unchanged()

    def _check_unchanged(self) -> None:
        for mark in self.marks:
            try:
                now = files.describe(mark.path)
            except InputError as error:
                raise RunError(
                    f"{mark.path}: must exist until it has been prepared: {error}"
                ) from error
            if now != mark:
                raise RunError(
                    f"{mark.path}: must not change until it has been prepared: it had"
                    f" {mark.size:,} bytes at the start and now has {now.size:,}."
                )

    def fingerprint(self, *rest: Any) -> str:
        """Returns a hash of the unit and of all else that its result depends on (JSON-able)."""
        parts, marks = map(tuple, self.parts), map(tuple, self.marks)  # hashed as lists, not dicts
        content = [self.split, self.index, [*parts], [*marks], rest]
        text = json_files.to_text(content, sort_keys=True)
        return xxhash.xxh3_128_hexdigest(text.encode())


def make_units(source: Source, split: str, marks: dict[str, files.File]) -> list[WorkUnit]:
    """Divides the parts of a split into units, in order, and joins small files.

    Args:
        marks: as in `Source.marks`.
    """
    parts = source.parts(split)
    of_file = collections.Counter(part.file for part in parts)

    def size(part: Part) -> int:
        if part.file in marks:
            return max(0, marks[part.file].size) // of_file[part.file]
        return (part.stop - part.start) * _GENERATED_BYTES

    groups: list[list[Part]] = []
    open_bytes = _UNIT_BYTES + 1
    for part in parts:
        whole = of_file[part.file] == 1 and part.file in marks
        if not whole or open_bytes + size(part) > _UNIT_BYTES:
            groups.append([])
            open_bytes = 0
        groups[-1].append(part)
        open_bytes += size(part) if whole else _UNIT_BYTES
    return [
        WorkUnit(
            split,
            index,
            tuple(group),
            sum(map(size, group)),
            _select_marks(group, marks),
        )
        for index, group in enumerate(groups)
    ]


def _select_marks(parts: Iterable[Part], marks: dict[str, files.File]) -> tuple[files.File, ...]:
    return tuple(marks[part.file] for part in parts if part.file in marks)
