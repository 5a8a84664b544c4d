"""Writes the rows of a stack in logical order as float32, bfloat16, or int8 with a factor per row.

A last row of zeros is read where there is no id.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxrank.export.table_rows import TableRows

_MAX_INT8 = 127  # of int8


def quantised(vectors: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns f32[n, dim] as stored, and the factor of each row f32[n] for int8.

    int8: each row is divided by its factor, the largest absolute value / 127.
    """
    if dtype == "float32":
        return vectors.astype("<f4", copy=False), None
    if dtype == "bfloat16":
        return vectors.astype(jnp.bfloat16).view(np.uint16), None
    scales = np.abs(vectors).max(axis=1, initial=0) / np.float32(_MAX_INT8)
    divisors = np.where(scales > 0, scales, 1)[:, None]
    return np.rint(vectors / divisors).astype(np.int8), scales.astype("<f4")


def restored(vectors: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the vectors f32[n, dim] that are read where these are stored."""
    stored, scales = quantised(vectors, dtype)
    if dtype == "bfloat16":
        return stored.view(jnp.bfloat16).astype(np.float32)
    return stored if scales is None else stored * scales[:, None]


def write_stack(
    rows: Iterable[TableRows], dim: int, dtype: str, path: Path, scales_path: Path
) -> None:
    """Writes the rows of all tables of a stack. The second file is written for int8 only."""
    with open(path, "wb") as file, open(scales_path, "wb") as scales_file:
        zeros = TableRows("", 0, np.zeros((1, dim), np.float32))
        for part in itertools.chain(rows, [zeros]):
            stored, scales = quantised(part.vectors, dtype)
            stored.tofile(file)
            if scales is not None:
                scales.tofile(scales_file)
    if dtype != "int8":
        scales_path.unlink()
