"""Encodes arrays as short text for JSON."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np


def to_text(array: np.ndarray) -> dict[str, Any]:
    """Returns the shape, type, and compressed little-endian bytes of an array."""
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return {
        "dtype": data.dtype.name,
        "shape": list(data.shape),
        # For the registers: 5% larger than level 6, in a fifth of the time.
        "data": base64.b64encode(zlib.compress(data.tobytes(), level=3)).decode(),
    }


def from_text(tree: Mapping[str, Any]) -> np.ndarray:
    """Restores the array as a writable copy.

    Raises:
        ValueError: the text was not written by `to_text`.
    """
    try:
        data = zlib.decompress(base64.b64decode(tree["data"]))
    except zlib.error as error:
        raise ValueError(f"must be compressed bytes in base64: {error}") from error
    stored = np.dtype(tree["dtype"]).newbyteorder("<")
    return np.frombuffer(data, stored).reshape(tree["shape"]).astype(tree["dtype"])
