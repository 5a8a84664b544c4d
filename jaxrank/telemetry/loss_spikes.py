"""Losses that stand out."""

import math
from typing import Any

import numpy as np

_DECAY = 0.99  # of mean and variance, a step
_FIRST = 100  # steps of which none is judged
_DEVIATION = 1.4826  # that of a normal distribution, in median absolute deviations


class LossSpikeDetector:
    """How far each loss is above those before it.

    Mean and variance are exponentially weighted, over about a hundred steps, and a spike moves them
    no further than the limit would have. They begin with the median of the first hundred losses and
    how far these are from it, also in the median, so that one of them hides no later spike.

    Args:
        limit: deviations above the mean from which on a loss is a spike; 0: none is.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self._first: list[float] = []
        self._mean, self._variance = 0.0, 0.0

    def to_state(self) -> dict[str, Any]:
        """What a checkpoint must hold, as JSON."""
        return {"first": list(self._first), "mean": self._mean, "variance": self._variance}

    @classmethod
    def from_state(cls, state: dict[str, Any], limit: float) -> "LossSpikeDetector":
        """Continues from a state."""
        spikes = cls(limit)
        spikes._first, spikes._mean = list(state["first"]), state["mean"]
        spikes._variance = state["variance"]
        return spikes

    def above(self, loss: float) -> float:
        """Deviations that a loss is above the mean, if it is a spike; else 0. It counts as seen."""
        if len(self._first) < _FIRST:
            self._first.append(loss)
            if len(self._first) == _FIRST:
                self._mean = float(np.median(self._first))
                distance = float(np.median(np.abs(np.array(self._first) - self._mean)))
                self._variance = (_DEVIATION * distance) ** 2
            return 0.0
        distance = loss - self._mean
        deviation = math.sqrt(self._variance)
        is_spike = self.limit > 0 and 0 < self.limit * deviation < distance
        found = distance / deviation if is_spike else 0.0
        if is_spike:
            distance = self.limit * deviation
        self._mean += (1 - _DECAY) * distance
        self._variance = _DECAY * (self._variance + (1 - _DECAY) * distance * distance)
        return found
