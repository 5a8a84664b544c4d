"""Columns stored in the names of directories, as Hive, Spark and Arrow write them.

    clicks/day=2024-05-01/country=NL/part-0.parquet

has the columns `day` and `country`, with one value each for the whole file.
"""

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

import pyarrow as pa

from jaxrank.data import files

_MISSING = "__HIVE_DEFAULT_PARTITION__"
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")


def _directories(path: str) -> list[str]:
    if not files.is_local(path):
        # Skips the host or bucket, and the query after "?".
        path = path.split("://", 1)[1].partition("/")[2].partition("?")[0]
    return re.split(r"[/\\]", path)[:-1]


def partition_values(path: str) -> dict[str, str | None]:
    """Returns the value of each key in a file's path, in order, None where it is missing.

    A key that occurs twice has no value.
    """
    keys: dict[str, str | None] = {}
    duplicates = set()
    for directory in _directories(path):
        key, sign, text = directory.partition("=")
        if not key or not sign:
            continue
        name = unquote(key)
        if name in keys:
            duplicates.add(name)
        keys[name] = None if text == _MISSING else unquote(text)
    return {name: value for name, value in keys.items() if name not in duplicates}


class Partitions:
    """The keys that occur once in the paths of all files. Other keys are not columns."""

    def __init__(self, paths: Sequence[str]):
        self._values = {path: partition_values(path) for path in paths}
        every = dict.fromkeys(key for values in self._values.values() for key in values)
        shared = [key for key in every if all(key in v for v in self._values.values())]
        self._lacking = {
            key: next(path for path, values in self._values.items() if key not in values)
            for key in every
            if key not in shared
        }
        self._types = {key: _key_type(key, self._values) for key in shared}

    @property
    def hint(self) -> str:
        """Returns a sentence, with a leading space, about keys that are not columns, or ""."""
        return "".join(
            f" {key!r} is a key of some directories, but not, or twice, in the path {path}."
            for key, path in self._lacking.items()
        )

    @property
    def names(self) -> list[str]:
        return list(self._types)

    @property
    def types(self) -> dict[str, str]:
        return {name: str(kind) for name, kind in self._types.items()}

    def values(self, path: str) -> dict[str, str | None]:
        return self._values[path]

    def append(self, batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
        """Returns the batch of a file with a column for each key after the existing columns."""
        for key, kind in self._types.items():
            if key in batch.schema.names:
                continue  # used by no feature, or `check_columns` would have rejected it
            value = pa.scalar(self._values[path][key]).cast(kind)
            batch = batch.append_column(key, pa.repeat(value, batch.num_rows))
        return batch


def _key_type(key: str, values: Mapping[str, Mapping[str, str | None]]) -> pa.DataType:
    """Returns int64 if a key has values and all are integers, else string."""
    texts = {partition[key] for partition in values.values()} - {None}
    whole = all(_is_int64(text) for text in texts if text is not None)
    return pa.int64() if texts and whole else pa.string()


def _is_int64(text: str) -> bool:
    return bool(_WHOLE_NUMBER.fullmatch(text)) and -(2**63) <= int(text) < 2**63
