"""Tensors of the Open Inference Protocol, in JSON and binary."""

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrank_serving.server.messages import HttpError

BYTES = "BYTES"
# Of fixed-size elements; little-endian in binary.
DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype("?"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
}
_LENGTH = struct.Struct("<I")
_MAX_DIMENSIONS, _MAX_SIZE = 8, 2**20


class Tensor(NamedTuple):
    """A tensor with its elements in row-major order.

    values: bool, int, float or text; None where a value is missing: null in JSON, NaN in binary.
    """

    name: str
    shape: tuple[int, ...]
    values: list[Any]


class Field:
    """A field of a request, which errors name."""

    def __init__(self, name: str):
        self.name = name

    def inside(self, name: str) -> "Field":
        """Returns a field of this field."""
        return Field(f"{self.name}.{name}")

    def error(self, must: str, value: Any) -> HttpError:
        """Returns the error of an invalid value."""
        return HttpError(400, f"{self.name}: must be {must}: found {value!r:.80}.", self.name)


def read_shape(value: Any, field: Field) -> tuple[int, ...]:
    """Returns a shape.

    Raises:
        HttpError: it is no list of sizes.
    """
    is_shape = isinstance(value, list) and 0 < len(value) <= _MAX_DIMENSIONS
    if not is_shape or not all(type(size) is int and 0 <= size <= _MAX_SIZE for size in value):
        must = f"a list of 1 to {_MAX_DIMENSIONS} sizes of at most {_MAX_SIZE:,}"
        raise field.error(must, value)
    return tuple(value)


def read_json(data: Any, datatype: str, shape: tuple[int, ...], field: Field) -> list[Any]:
    """Returns the values of a tensor in JSON, whose data is flat or nested by the shape.

    Raises:
        HttpError: the data does not match the shape or the datatype.
    """
    if not isinstance(data, list):
        raise field.error("a list", data)
    values = data
    if any(type(value) is list for value in data):
        values = _flat(data, shape, field)
    count = math.prod(shape)
    if len(values) != count:
        raise field.error(f"{count:,} values, the shape is {list(shape)}", len(values))
    check = _check(datatype)
    for i, value in enumerate(values):
        if value is not None and not check(value):
            raise Field(f"{field.name}[{i}]").error(f"of datatype {datatype}, or null", value)
    return values


def _flat(data: list[Any], shape: tuple[int, ...], field: Field) -> list[Any]:
    """Flattens nested data."""
    values = data
    for i, size in enumerate(shape):
        if i == 0:
            if len(data) != size:
                raise field.error(f"nested as the shape {list(shape)}", data)
            continue
        if not all(type(part) is list and len(part) == size for part in values):
            raise field.error(f"nested as the shape {list(shape)}", data)
        values = [value for part in values for value in part]
    return values


def _check(datatype: str) -> Callable[[Any], bool]:
    """Returns a function that is True for JSON values of a datatype."""
    if datatype == BYTES:
        return lambda value: type(value) is str
    if datatype == "BOOL":
        return lambda value: type(value) is bool
    if datatype.startswith("FP"):
        return lambda value: type(value) in (int, float)
    limits = np.iinfo(DTYPES[datatype])
    low, high = int(limits.min), int(limits.max)
    return lambda value: type(value) is int and low <= value <= high


def read_binary(data: bytes, datatype: str, shape: tuple[int, ...], field: Field) -> list[Any]:
    """Returns the values of a binary tensor.

    Raises:
        HttpError: the data does not match the shape or the datatype.
    """
    if datatype == BYTES:
        return _texts(data, math.prod(shape), field)
    dtype = DTYPES[datatype]
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise field.error(f"{expected:,} bytes, {list(shape)} of {datatype}", len(data))
    if datatype == "BOOL":
        return (np.frombuffer(data, np.uint8) != 0).tolist()
    array = np.frombuffer(data, dtype)
    values = array.tolist()
    if datatype.startswith("FP"):
        for i in np.flatnonzero(np.isnan(array)).tolist():
            values[i] = None
    return values


def _texts(data: bytes, count: int, field: Field) -> list[str]:
    """Reads elements of 4 bytes of length and the text in UTF-8."""
    values, start = [], 0
    for i in range(count):
        if start + 4 > len(data):
            raise field.error(f"{count:,} texts with their lengths", f"{i:,}")
        end = start + 4 + _LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            raise field.error(f"within its bytes; text {i:,} ends at {end:,}", len(data))
        try:
            values.append(data[start + 4 : end].decode())
        except UnicodeDecodeError as error:
            raise Field(f"{field.name}[{i}]").error("text in UTF-8", data[start:end]) from error
        start = end
    if start != len(data):
        raise field.error(f"{start:,} bytes, as its texts take", len(data))
    return values
