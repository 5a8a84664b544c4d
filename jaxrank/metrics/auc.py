"""The area under the ROC curve, by weight, in float64."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def auc_of_examples(score: Floats, y: Floats, w: Floats) -> float:
    """AUC of scores, labels in [0, 1] and weights, each f64[n]; NaN with one class only."""
    if np.isnan(score).any():
        return float("nan")
    order = np.argsort(score)
    score = score[order]
    if not len(score):
        return float("nan")
    starts = np.flatnonzero(np.append(True, score[1:] != score[:-1]))
    positives = np.add.reduceat((w * y)[order], starts)
    negatives = np.add.reduceat((w * (1 - y))[order], starts)
    return auc_of_groups(positives, negatives)


def auc_of_groups(positives: Floats, negatives: Floats) -> float:
    """AUC of examples tied within groups, by weight in each, groups in order of prediction."""
    below = np.cumsum(negatives) - negatives
    won = (positives * (below + negatives / 2)).sum()
    pairs = positives.sum() * negatives.sum()
    return float(won / pairs) if pairs > 0 else float("nan")
