"""Histograms of the predictions of a task, by label."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxrank.metrics.exact import prediction
from jaxrank.metrics.regression import Floats

_LOGIT_WIDTH = 0.25
_LOGIT_LIMIT = 16.0  # scores outside are in the first or last bin
_BINS = 48  # of tasks that are not binary


def score_histogram(
    outputs: ArrayLike, labels: ArrayLike, weights: ArrayLike, kind: str = "binary"
) -> dict[str, list[float]]:
    """Computes the weight of examples by score.

    Scores of a binary task are logits in bins of width 1/4, without empty bins at the ends. Bins of
    other tasks are of equal width, from the least to the largest prediction or label. Sums are in
    order of the examples, so equal scores give equal bits.

    Args:
        outputs, labels, weights: of all examples, each [n]; see `exact.exact`.
        kind: of the task.

    Returns:
        `edges` of m bins, f[m + 1], and the weight in each bin: of `negative` and `positive` labels
        of a binary task, and of `predicted` values and `labels` of another. All lists are empty if
        no example has a weight above 0.
    """
    x, y, w = (np.asarray(a, np.float64) for a in (outputs, labels, weights))
    x, y, w = (a[w > 0] for a in (x, y, w))
    if kind == "binary":
        edges = np.arange(-_LOGIT_LIMIT, _LOGIT_LIMIT + _LOGIT_WIDTH, _LOGIT_WIDTH)
        sides = {"negative": (x, w * (1 - y)), "positive": (x, w * y)}
    else:
        p = prediction(x, kind)
        edges = _even_edges(np.concatenate([p, y]))
        sides = {"predicted": (p, w), "labels": (y, w)}
    counts = {name: _counts(edges, *side) for name, side in sides.items()}
    filled = np.flatnonzero(sum(counts.values()))
    if not len(filled):
        return {"edges": [], **{name: [] for name in counts}}
    bins = slice(int(filled[0]), int(filled[-1]) + 1)
    shown = {name: heights[bins].tolist() for name, heights in counts.items()}
    return {"edges": edges[bins.start : bins.stop + 1].tolist(), **shown}


def _even_edges(values: Floats) -> Floats:
    if not len(values):
        return np.linspace(0.0, 1.0, _BINS + 1)
    least, largest = values.min(), values.max()
    if least == largest:
        least, largest = least - 0.5, largest + 0.5
    return np.linspace(least, largest, _BINS + 1)


def _counts(edges: Floats, values: Floats, weights: Floats) -> NDArray[np.float64]:
    bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(bins, weights=weights, minlength=len(edges) - 1)
    return counts.astype(np.float64)
