"""What the combiners divide by: the norms of lists."""

from collections.abc import Sequence

import numpy as np


class Norms:
    """The norms of some lists under their combiners; see `features.Ragged`.

    Args:
        combiners: of each list, "sum", "mean" or "sqrtn".
    """

    def __init__(self, combiners: Sequence[str]):
        self._of = {name: np.array([c == name for c in combiners]) for name in set(combiners)}

    def inverse(self, lengths: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        """One over the norm of each list, f32[n, lists]; 0 where the norm is 0.

        Without weights that of an empty list, which no id has, is any number.

        Args:
            lengths: i32[n, lists].
            weights: f32[total], or None where all are 1.
        """
        if weights is None:
            norms = np.maximum(lengths, 1).astype(np.float32)
            for name, lists in self._of.items():
                if name == "sqrtn":
                    norms[:, lists] = np.sqrt(norms[:, lists], dtype=np.float64)
                elif name == "sum":
                    norms[:, lists] = 1
            return np.divide(np.float32(1), norms, out=norms)
        norms = np.ones(lengths.shape, np.float64)
        for name, lists in self._of.items():
            if name == "mean":
                norms[:, lists] = _sums(weights.astype(np.float64), lengths)[:, lists]
            elif name == "sqrtn":
                norms[:, lists] = np.sqrt(_sums(weights.astype(np.float64) ** 2, lengths)[:, lists])
        inverse = np.zeros(norms.shape, np.float32)
        np.divide(1, norms, out=inverse, where=norms > 0, casting="same_kind")
        return inverse


def _sums(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The sum of each list, f64[n, lists], 0 of an empty one."""
    flat = lengths.reshape(-1)
    sums = np.zeros(len(flat))
    filled = np.flatnonzero(flat)
    if len(filled):
        starts = np.cumsum(flat, dtype=np.int64) - flat
        sums[filled] = np.add.reduceat(values, starts[filled])
    return sums.reshape(lengths.shape)
