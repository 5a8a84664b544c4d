"""JSON text of any value, and files of it that are complete and name themselves in errors.

Every JSON text that jaxrank writes comes from `to_text`. It imports neither NumPy nor JAX.
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
from typing import TYPE_CHECKING, Any, Literal

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
# Written as `str` gives them.
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
        TypeError: there is no such form of the value.
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
    if hasattr(value, "tolist"):  # of NumPy or JAX
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
        value, non_finite: as of `plain`.
        indent: spaces per level; None: one line.
        sort_keys: whether keys are sorted, as for text that is hashed or compared.
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
