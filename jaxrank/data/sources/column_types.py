"""Finds a common type for a column whose type differs between files without changing its values."""

import functools
from collections.abc import Collection, Iterable

import pyarrow as pa

from jaxrank.data.encode.columns import is_list, is_text


def common_type(kinds: Iterable[pa.DataType]) -> pa.DataType | None:
    """Returns a type that can represent the values of all these types, or None if there is none.

    A column of nulls is compatible with any type. Integers of all widths and floats are numbers.
    Text, dictionary-encoded or not, is text. With bytes it is bytes.
    """
    result: pa.DataType | None = pa.null()
    for kind in kinds:
        result = None if result is None else _joined(result, kind)
    return result


@functools.cache
def _joined(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if a == b:
        return a
    if pa.types.is_null(a) or pa.types.is_null(b):
        return b if pa.types.is_null(a) else a
    if pa.types.is_dictionary(a) or pa.types.is_dictionary(b):
        return _joined(*(k.value_type if pa.types.is_dictionary(k) else k for k in (a, b)))
    if _every_kind(is_text, a, b):
        return pa.string()
    if _every_kind(_is_bytes_or_text, a, b):
        return pa.binary()  # is read as text
    if _every_kind(_is_number, a, b):
        return _number(a, b)
    if _every_kind(_is_time, a, b):
        return _time(a, b)
    if _every_kind(is_list, a, b):
        inner = _joined(a.value_type, b.value_type)
        return None if inner is None else pa.list_(inner)
    return None


def _every_kind(test: object, *kinds: pa.DataType) -> bool:
    return all(test(kind) for kind in kinds)  # type: ignore[operator]


def _is_bytes_or_text(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or is_text(kind)


def _is_number(kind: pa.DataType) -> bool:
    return (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_boolean(kind)
    )


def _is_time(kind: pa.DataType) -> bool:
    return pa.types.is_timestamp(kind) or pa.types.is_date(kind)


def _is_whole(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_boolean(kind)


def _number(a: pa.DataType, b: pa.DataType) -> pa.DataType | None:
    if not _every_kind(_is_whole, a, b):
        return pa.float64()
    if pa.uint64() in (a, b):  # no type holds these together with signed numbers
        other = b if a == pa.uint64() else a
        return None if pa.types.is_signed_integer(other) else pa.uint64()
    return pa.int64()


def _time(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    if pa.types.is_date(a) and pa.types.is_date(b):
        return pa.date32()
    zones = [kind.tz for kind in (a, b) if pa.types.is_timestamp(kind) and kind.tz]
    return pa.timestamp("us", zones[0] if zones else None)


def is_castable(kind: pa.DataType, common: pa.DataType) -> bool:
    """Returns True if a column is cast to the common type.

    Otherwise it keeps its type, because a float type would round its integers.
    """
    if is_list(kind) and is_list(common):
        return is_castable(kind.value_type, common.value_type)
    return pa.types.is_null(kind) or not pa.types.is_floating(common)


def differing(columns: Iterable[Collection[tuple[str, pa.DataType]]]) -> dict[str, set]:
    """Returns the types of each column, by name, with more than one. `columns` has an entry per
    file.
    """
    kinds: dict[str, set] = {}
    for file in set(map(tuple, columns)):  # few, because most files have the same columns
        for name, kind in file:
            kinds.setdefault(name, set()).add(kind)
    return {name: types for name, types in kinds.items() if len(types) > 1}
