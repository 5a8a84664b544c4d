"""Losses that stand out."""

import math

_DECAY = 0.99  # of mean and variance, a step
_FEWEST = 100  # steps before any is judged


class Spikes:
    """How far each loss is above those before it.

    Mean and variance are exponentially weighted, over about a hundred steps, and a spike moves them
    no further than the limit would have.

    Args:
        limit: deviations above the mean from which on a loss is a spike; 0: none is.
    """

    def __init__(self, limit: float):
        self._limit = limit
        self._seen, self._mean, self._variance = 0, 0.0, 0.0

    def get_state(self) -> dict[str, float]:
        """What a checkpoint must hold, as JSON."""
        return {"seen": self._seen, "mean": self._mean, "variance": self._variance}

    def set_state(self, state: dict[str, float]) -> None:
        """Goes on from a state."""
        self._seen = int(state["seen"])
        self._mean, self._variance = state["mean"], state["variance"]

    def above(self, loss: float) -> float:
        """Deviations that a loss is above the mean, if it is a spike; else 0. It counts as seen."""
        apart = loss - self._mean
        deviation = math.sqrt(self._variance)
        is_spike = self._limit > 0 and self._seen >= _FEWEST and 0 < self._limit * deviation < apart
        found = apart / deviation if is_spike else 0.0
        if is_spike:
            apart = self._limit * deviation
        # At first the plain mean and variance of what there is.
        weight = max(1 - _DECAY, 1 / (self._seen + 1))
        self._mean += weight * apart
        self._variance = (1 - weight) * (self._variance + weight * apart * apart)
        self._seen += 1
        return found
