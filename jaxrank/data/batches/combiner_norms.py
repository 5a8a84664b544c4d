"""Norms of lists, by which the combiners divide."""

from collections.abc import Sequence

import numpy as np

# The reciprocal is finite in float32.
_MIN_NORM = 1e-38


class Norms:
    """Computes the norms of the lists of a group of examples. See `features.Ragged` for the
    combiners.

    Args:
        combiners: "sum", "mean" or "sqrtn" for each list of an example.
        group: number of examples.
    """

    def __init__(self, combiners: Sequence[str], group: int):
        self._of = {name: np.tile([c == name for c in combiners], group) for name in set(combiners)}

    def inverse(
        self, lengths: np.ndarray, lists: np.ndarray, weights: np.ndarray | None
    ) -> np.ndarray:
        """Returns the reciprocal of the norm of each list, f32[lists of the group].

        The result is finite where the norm is 0, which means no ids or only weights of 0.

        Args:
            lengths: i32[lists of the group].
            lists: i64[total], the list that each id belongs to.
            weights: f32[total], or None where all are 1.
        """
        norms: np.ndarray | None = None
        for name, chosen in self._of.items():
            of_all = _norms(name, lengths, lists, weights)
            norms = of_all if norms is None else np.where(chosen, of_all, norms)
        assert norms is not None
        np.maximum(norms, _MIN_NORM, out=norms)
        return np.divide(1, norms, out=norms).astype(np.float32, copy=False)


def _norms(
    combiner: str, lengths: np.ndarray, lists: np.ndarray, weights: np.ndarray | None
) -> np.ndarray:
    """Returns the norm of every list under one combiner, f32 or f64[lists]."""
    if combiner == "sum":
        return np.ones(len(lengths), np.float32)
    squared = combiner == "sqrtn"
    if weights is None:
        norms: np.ndarray = lengths.astype(np.float32)
    else:
        summed = weights.astype(np.float64) ** 2 if squared else weights
        sums = np.bincount(lists, summed, minlength=len(lengths))
        norms = sums.astype(np.float64, copy=False)  # NumPy returns integers if there are no ids
    return np.sqrt(norms, out=norms) if squared else norms
