"""Reads arrays of a checkpoint on the host in pieces, because a table may exceed a device's memory.

Orbax is bypassed because it restores whole arrays only. Its files are an OCDBT store with one zarr
array per leaf of the tree, named by the leaf's path with dots.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts

from jaxrank.checkpoints.checksums import host_checksum
from jaxrank.checkpoints.record import OTHER_CHECKPOINT
from jaxrank.errors import InputError


def dotted(path: tuple[Any, ...]) -> str:
    """Returns Orbax's name for a path of `jax.tree_util`: "params.tower.layer_0.kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


class CheckpointReader:
    """Reads the arrays of one part of a checkpoint.

    Args:
        directory: of the part, for example WORKDIR/checkpoints/977/weights.
        checksums: of every array, by `jax.tree_util.keystr` of its path. See `checksums`.
    """

    def __init__(self, directory: Path, checksums: Mapping[str, int]):
        self._directory = directory
        # Writes ".params['tower']['kernel']" and ".opt_state[0].mu" with dots only.
        plain = str.maketrans({"'": None, "[": ".", "]": None})
        self._checksums = {k.translate(plain).lstrip("."): v for k, v in checksums.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._checksums

    @property
    def checksums(self) -> Mapping[str, int]:
        """Returns the checksum of each array, by its dotted name."""
        return self._checksums

    @property
    def names(self) -> list[str]:
        return list(self._checksums)

    def unlike(self, tree: Any) -> list[str]:
        """Lists the arrays that differ from a tree of shapes, one line each.

        Raises:
            InputError: an array cannot be read.
        """
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        wanted = {dotted(path): leaf.shape for path, leaf in leaves}
        lines = []
        for name in sorted({*self.names, *wanted}):
            actual = tuple(self._opened(name).shape) if name in self else "absent"
            expected = wanted.get(name, "absent")
            if actual != expected:
                lines.append(f"{name}: {actual}, by the config {expected}")
        return lines

    def read(self, name: str) -> np.ndarray:
        """Reads a whole array.

        Raises:
            InputError: the array is absent or damaged.
        """
        pieces = [piece for _, piece in self.pieces(name)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def pieces(self, name: str, unit: int = 1) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, rows) of an array, one stored chunk at a time.

        Args:
            name: of the array.
            unit: rows. The size of a piece is the smallest multiple of both the chunk and the unit.

        Raises:
            InputError: as `read`. Damage is reported after the last piece at the latest.
        """
        array = self._opened(name)
        written = array.chunk_layout.read_chunk.shape
        count, step = (array.shape[0], written[0] or 1) if array.ndim and written else (1, 1)
        step = math.lcm(step, unit)
        total = 0
        for first in range(0, max(1, count), step):
            try:
                part = array[first : first + step] if array.ndim else array
                rows = np.asarray(part.read().result())
            except Exception as error:  # TensorStore raises ValueError and other types for damage
                raise self._unreadable(name, error) from error
            total = (total + host_checksum(rows, first)) % 2**32
            yield first, rows
        if total != self._checksums[name]:
            raise InputError(
                f"{self._directory}: the array {name} must have the checksum recorded when it was"
                f" saved, {self._checksums[name]}: found {total}. This checkpoint is damaged."
                f"{OTHER_CHECKPOINT}"
            )

    def _opened(self, name: str) -> ts.TensorStore:
        if name not in self:
            raise InputError(f"{self._directory}: must hold the array {name}: found {self.names}.")
        store = {"driver": "ocdbt", "base": f"file://{self._directory}", "path": f"{name}/"}
        try:
            return ts.open({"driver": "zarr", "kvstore": store}).result()
        except Exception as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: Exception) -> InputError:
        text = " ".join(str(error).split())[:300]
        return InputError(
            f"{self._directory}: the array {name} must be readable: this checkpoint is damaged:"
            f" {text.removesuffix('.')}.{OTHER_CHECKPOINT}"
        )
