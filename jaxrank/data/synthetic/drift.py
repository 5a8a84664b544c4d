"""How the planted truth of generated data moves from day to day."""

import numpy as np

from jaxrank.data.synthetic.truth import Rows, Truth

OTHER_SEED = 2**40  # added to the seed, it is that of the effects that are moved to
_STREAM = 3


class Drift:
    """Random walks of the intercept and of the effects of floats, ids, lists and interactions.

    Each effect moves towards another, drawn independently: after t days it is the first plus w(t)
    times the other, where w is a Gaussian walk of `size` a day with straight lines between
    midnights, one for each task and kind of effect. So over a day each kind of effect moves by
    `size` standard deviations of its part of the logits, and the intercept by `size` standard
    deviations of the logits.

    Args:
        size: standard deviations a day.
        days: that there are; the walk of fewer is the beginning of that of more.
        other: truth with the effects that are moved to.
        signal: standard deviation of the logits.
    """

    def __init__(self, seed: int, size: float, days: int, other: Truth, signal: float):
        self._other, self._signal = other, signal
        # One walk more, of the intercept, than there are kinds of effects.
        shape = (days, len(other.kinds) + 1, other.tasks)
        steps = np.random.default_rng([seed, 0, _STREAM]).standard_normal(shape)
        self._walks = np.concatenate([np.zeros((1, *shape[1:])), size * np.cumsum(steps, axis=0)])

    def logits(self, rows: Rows, time: np.ndarray) -> np.ndarray:
        """f64[n, tasks]: what is added to the logits of rows at f64[n] days since the first."""
        moved = self._at(time)
        logits = moved[:, 0] * self._signal
        parts = self._other.parts(rows)
        for i, kind in enumerate(self._other.kinds):
            if kind in parts:
                logits += moved[:, i + 1] * parts[kind]
        return logits

    def _at(self, time: np.ndarray) -> np.ndarray:  # f64[n] -> f64[n, walks, tasks]
        day = np.minimum(time.astype(np.int64), len(self._walks) - 2)
        share = (time - day)[:, None, None]
        return self._walks[day] * (1 - share) + self._walks[day + 1] * share
