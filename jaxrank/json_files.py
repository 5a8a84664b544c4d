"""Reads and writes JSON, with errors that name the file and checksums of the content.

`to_text` makes every JSON text that jaxrank writes. This module imports neither NumPy nor JAX.
"""

import dataclasses
import datetime
import decimal
import json
import math
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xxhash import xxh3_64_hexdigest

from jaxrank.atomic import replacing
from jaxrank.errors import InputError

if TYPE_CHECKING:
    from upath import UPath

NonFinite = Literal["number", "null", "text"]

_NON_FINITE: dict[str, Callable[[float], Any]] = {
    "number": float,  # NaN, Infinity: Python reads them back, other programs do not
    "null": lambda _: None,
    "text": str,  # "nan", "inf", "-inf"
}
# Types that are written as `str` formats them.
_TEXTS = (
    bytes,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
)


def plain(value: Any, non_finite: NonFinite = "number") -> Any:
    """Returns the value as dicts, lists, texts, numbers, booleans and None.

    A NamedTuple or dataclass becomes a dict of its fields. NumPy and JAX arrays and scalars become
    lists and numbers, and paths, dates, times, decimals and bytes become text.

    Args:
        non_finite: what NaN and infinite numbers become.

    Raises:
        TypeError: the value cannot be converted.
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _NON_FINITE[non_finite](value)
    if isinstance(value, Mapping):
        return {key: plain(inside, non_finite) for key, inside in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(getattr(value, name), non_finite) for name in value._fields}
    if isinstance(value, list | tuple):
        return [plain(inside, non_finite) for inside in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name), non_finite) for name in names}
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy and JAX
        return plain(value.tolist(), non_finite)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, _TEXTS):
        return str(value)
    raise TypeError(f"must be a value that JSON can hold: found {type(value).__name__}: {value!r}.")


def to_text(
    value: Any,
    *,
    non_finite: NonFinite = "number",
    indent: int | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns the value as JSON text.

    Args:
        value, non_finite: see `plain`.
        indent: spaces per level; None: one line.
        sort_keys: whether keys are sorted, so that equal values have equal text.
    """
    return json.dumps(plain(value, non_finite), indent=indent, sort_keys=sort_keys)


def write(path: Path, value: Any, *, indent: int | None = 1, sync: bool = False) -> None:
    """Writes the value to a file that is complete whenever it exists; see `atomic.replacing`."""
    with replacing(path, sync=sync) as partial:
        partial.write_text(to_text(value, indent=indent) + "\n")


def read(path: "Path | UPath", hint: str = "") -> dict[str, Any]:
    """Reads the JSON object in a file.

    Args:
        hint: a sentence for the errors, with a space in front, or empty.

    Raises:
        InputError: the file cannot be read, or holds no JSON object.
    """
    return _parsed(path, _content(path, hint), hint)


def _content(path: "Path | UPath", hint: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}.{hint}") from error


def _parsed(path: "Path | UPath", content: bytes, hint: str) -> dict[str, Any]:
    try:
        tree = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON: {error}.{hint}") from error
    if not isinstance(tree, dict):
        raise InputError(
            f"{path}: must hold a JSON object, as jaxrank wrote it: found {repr(tree)[:80]}.{hint}"
        )
    return tree


class Seal(NamedTuple):
    """Checksum of a JSON object, stored as its last value: xxh3_64 in hexadecimal digits.

    Without it, a flipped bit on a disk may go unnoticed, because the content may still be valid.

    key: key of the checksum.
    of_bytes: True for a checksum of the preceding bytes, as `to_text` writes them. A large file is
        then checked without encoding it again. False for a checksum of the text with sorted keys,
        for a file that another library formats.
    hint: a sentence for the errors, with a space in front.
    """

    key: str
    of_bytes: bool
    hint: str

    def add(self, value: Any) -> dict[str, Any]:
        """Returns the object as plain data with its checksum, which replaces an earlier one."""
        tree = plain(value)
        tree.pop(self.key, None)
        return tree | {self.key: xxh3_64_hexdigest(self._content(tree).encode())}

    def to_text(self, value: Any) -> str:
        """Returns the text of a sealed file, one value per line."""
        tree = plain(value)
        tree.pop(self.key, None)
        content = self._content(tree)
        return content + self._mark + xxh3_64_hexdigest(content.encode()) + _END

    def read(
        self, path: "Path | UPath", check: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> dict[str, Any]:
        """Reads a sealed object, without its checksum.

        Args:
            check: raises if the object has a version that may be sealed in another way.

        Raises:
            InputError: see `json_files.read`, or the object has changed since it was sealed.
        """
        content = _content(path, self.hint)
        tree = _parsed(path, content, self.hint)
        check(tree)
        if self.key not in tree:
            raise InputError(
                f"{path}: must have the key {self.key!r}: found an object without it.{self.hint}"
            )
        checksum = tree.pop(self.key)
        if self.of_bytes:
            body, mark, end = content.rpartition(self._mark.encode())
            must = xxh3_64_hexdigest(body)
            is_whole = bool(mark) and end.decode() == must + _END
        else:
            must = xxh3_64_hexdigest(self._content(tree).encode())
            is_whole = checksum == must
        if not is_whole:
            raise InputError(
                f"{path}: is corrupt: its {self.key} must be {must}, found {checksum!r}.{self.hint}"
            )
        return tree

    @property
    def _mark(self) -> str:
        return f',\n "{self.key}": "'

    def _content(self, tree: Mapping[str, Any]) -> str:
        """Returns the text that the checksum covers."""
        if self.of_bytes:
            return json.dumps(tree, indent=1).removesuffix("\n}")
        return json.dumps(tree, sort_keys=True)


_END = '"\n}\n'
