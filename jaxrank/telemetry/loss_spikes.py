"""Detection of loss spikes."""

import math
from typing import Any

import numpy as np

_DECAY = 0.99  # of mean and variance, per step
_FIRST = 100  # steps before the first loss is checked
_DEVIATION = 1.4826  # standard deviation of a normal distribution, in median absolute deviations


class LossSpikeDetector:
    """Measures how far each loss is above the running mean.

    Mean and variance are exponentially weighted over about a hundred steps. A spike is clipped to
    the limit before it is added. They start with the median and the median absolute deviation of
    the first hundred losses, so that a spike among those does not hide later ones.

    Args:
        limit: standard deviations above the mean from which a loss is a spike. 0: none is.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self._first: list[float] = []
        self._mean, self._variance = 0.0, 0.0

    def to_state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON."""
        return {"first": list(self._first), "mean": self._mean, "variance": self._variance}

    @classmethod
    def from_state(cls, state: dict[str, Any], limit: float) -> "LossSpikeDetector":
        """Creates a detector that continues from a state."""
        spikes = cls(limit)
        spikes._first, spikes._mean = list(state["first"]), state["mean"]
        spikes._variance = state["variance"]
        return spikes

    def add_loss(self, loss: float) -> float:
        """Adds a loss, and returns its standard deviations above the mean, 0 if it is no spike."""
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
        deviations = distance / deviation if is_spike else 0.0
        if is_spike:
            distance = self.limit * deviation
        self._mean += (1 - _DECAY) * distance
        self._variance = _DECAY * (self._variance + (1 - _DECAY) * distance * distance)
        return deviations
