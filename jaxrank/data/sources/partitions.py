"""Columns whose values stand in the names of directories, as Hive, Spark and Arrow write them.

    clicks/day=2024-05-01/country=NL/part-0.parquet

has the columns `day` and `country`, each of one value in the whole file.
"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from jaxrank.data import files
from jaxrank.errors import InputError

_MISSING = "__HIVE_DEFAULT_PARTITION__"
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")


def _directories(path: str) -> list[str]:
    if not files.is_local(path):
        # Neither a host or bucket nor what stands behind "?" is a directory.
        path = path.split("://", 1)[1].partition("/")[2].partition("?")[0]
    return re.split(r"[/\\]", path)[:-1]


def partition_of(path: str) -> dict[str, str | None]:
    """The value of each key of a file's path, in their order; None where it is missing.

    Raises:
        InputError: a key occurs twice.
    """
    found: dict[str, str | None] = {}
    for directory in _directories(path):
        key, sign, text = directory.partition("=")
        if not key or not sign:
            continue
        name = unquote(key)
        if name in found:
            raise InputError(f"{path}: each key must occur once: found {name!r} twice.")
        found[name] = None if text == _MISSING else unquote(text)
    return found


class Partitions:
    """The keys of files, all of which must have the same.

    Raises:
        InputError: they have not.
    """

    def __init__(self, paths: Sequence[str]):
        self._values = {path: partition_of(path) for path in paths}
        first = self._values[paths[0]]
        for path, found in self._values.items():
            if set(found) != set(first):
                raise InputError(
                    f"{path}: its directories must have the keys of {paths[0]}, {list(first)}:"
                    f" found {list(found)}."
                )
        self._types = {key: _type_of(key, self._values) for key in first}

    @property
    def names(self) -> list[str]:
        return list(self._types)

    @property
    def types(self) -> dict[str, str]:
        return {name: str(kind) for name, kind in self._types.items()}

    def values(self, path: str) -> dict[str, str | None]:
        return self._values[path]

    def append(self, batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
        """The batch of a file with a column for each key behind its own."""
        for key, kind in self._types.items():
            value = pa.scalar(self._values[path][key]).cast(kind)
            batch = batch.append_column(key, pa.repeat(value, batch.num_rows))
        return batch


def _type_of(key: str, values: Mapping[str, Mapping[str, str | None]]) -> pa.DataType:
    """int64 where every value of a key, of which there is one, spells a whole number."""
    texts = {found[key] for found in values.values()} - {None}
    whole = all(_is_int64(text) for text in texts if text is not None)
    return pa.int64() if texts and whole else pa.string()


def _is_int64(text: str) -> bool:
    return bool(_WHOLE_NUMBER.fullmatch(text)) and -(2**63) <= int(text) < 2**63
