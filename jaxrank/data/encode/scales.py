"""Chooses the transform of dense features for which the config leaves it open."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrank.data.encode.encoder import log_transform
from jaxrank.data.statistics.split import Moments

# Deviations from the mean: where a number is farther, most others are close together.
_LONG_TAIL = 10
# Maximum distance from the mean in deviations: a rare number must not dominate a batch.
_MAX_DEVIATIONS = 30
_MAX_NAMED = 10


class Scale(NamedTuple):
    """The transform of a dense feature: (x - mean) / std, of x or of its log."""

    log: bool
    mean: float
    std: float


class OpenScales:
    """Moments of the numbers of features and of their logs, to choose transforms from."""

    def __init__(self, names: Iterable[str]):
        self._names = tuple(names)
        self._raw, self._logs = Moments(len(self._names)), Moments(len(self._names))

    def add(self, raw: np.ndarray) -> None:
        """Adds f64[n, features], NaN where missing."""
        self._raw.add(raw)
        self._logs.add(log_transform(raw, np.ones(len(self._names), bool)))

    def merge(self, other: "OpenScales") -> None:
        self._raw.merge(other._raw)
        self._logs.merge(other._logs)

    def to_state(self) -> list[Any]:
        return [self._raw.to_state(), self._logs.to_state()]

    @classmethod
    def from_state(cls, names: Iterable[str], state: list[Any]) -> "OpenScales":
        scales = cls(names)
        scales._raw, scales._logs = map(Moments.from_state, state)
        return scales

    def choose(self) -> dict[str, Scale]:
        """Returns the transform of each feature.

        It is standardised. Of a feature with a long tail, such as a price or a count, the log is,
        if that halves the tail.
        """
        raw_tails, log_tails = _tails(self._raw), _tails(self._logs)
        chosen = {}
        for i, name in enumerate(self._names):
            log = bool(raw_tails[i] > _LONG_TAIL and log_tails[i] < raw_tails[i] / 2)
            moments, tails = (self._logs, log_tails) if log else (self._raw, raw_tails)
            factor = max(1.0, float(tails[i]) / _MAX_DEVIATIONS)
            chosen[name] = Scale(log, float(moments.mean[i]), float(moments.std[i]) * factor)
        return chosen


def _tails(moments: Moments) -> np.ndarray:
    """Returns the largest distance from the mean in deviations, f64[features], 0 if all equal."""
    std = moments.std
    far = np.maximum(moments.max - moments.mean, moments.mean - moments.min)
    return np.divide(far, std, out=np.zeros_like(std), where=std > 0)


def line(chosen: Mapping[str, Scale]) -> str:
    """Returns a sentence on chosen transforms."""
    texts = [
        f"{name} ({'log, ' * scale.log}mean {scale.mean:.4g}, std {scale.std:.4g})"
        for name, scale in chosen.items()
    ]
    more = len(texts) - _MAX_NAMED
    if more > 0:
        texts[_MAX_NAMED:] = [f"and {more} more"]
    return (
        f"Dense features are scaled, as features.dense leaves it open: {', '.join(texts)}. Set"
        " standardize=False to keep raw numbers, or True to have no log added."
    )
