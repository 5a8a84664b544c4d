"""The tables of a bundle, mapped into memory: rows as float32, bfloat16, or int8 with a factor."""

from typing import Any

import numpy as np

from jaxrank_serving.bundle import Bundle
from jaxrank_serving.errors import BundleError
from jaxrank_serving.signature import Stack

DTYPES: dict[str, Any] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
}


class StackRows:
    """Reads rows of a stack as float32. Opening it reads nothing.

    Raises:
        BundleError: a file has another size.
    """

    def __init__(self, bundle: Bundle, stack: Stack):
        if stack.dtype not in DTYPES:
            raise BundleError(
                f"{bundle.path}: tables must have one of the dtypes {', '.join(DTYPES)}: found"
                f" {stack.dtype!r}."
            )
        self._dtype = stack.dtype
        shape = (stack.rows + 1, stack.dim)
        self._rows = _mapped(bundle, stack.file, DTYPES[stack.dtype], shape)
        self._scales = None
        if stack.dtype == "int8":
            self._scales = _mapped(bundle, stack.scales, np.dtype("<f4"), shape[:1])

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns f32[..., dim] of the rows i64[...], which are in range."""
        stored = self._rows.take(rows, axis=0, mode="clip")
        if self._dtype == "float32":
            return stored
        if self._dtype == "bfloat16":
            bits = stored.astype(np.uint32)
            bits <<= np.uint32(16)
            return bits.view(np.float32)
        assert self._scales is not None
        vectors = stored.astype(np.float32)
        vectors *= self._scales.take(rows, mode="clip")[..., None]
        return vectors


def _mapped(bundle: Bundle, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    path = bundle.file(name)
    expected, size = dtype.itemsize * int(np.prod(shape)), bundle.files[name][0]
    if size != expected:
        raise BundleError(f"{path}: must have {expected:,} bytes, {shape}: found {size:,}.")
    return np.memmap(path, dtype, "r", shape=shape).view(np.ndarray)
