"""Drift of the true probabilities of generated data from day to day."""

import numpy as np

from jaxrank.data.synthetic.truth import Rows, Truth

OTHER_SEED = 2**40  # added to the seed for the effects that the drift moves to
_STREAM = 3


class Drift:
    """Random walks of the intercept and of the effects of floats, ids, lists and interactions.

    Each effect moves towards another effect, drawn independently. After t days it is the first one
    plus w(t) times the other one. w is a Gaussian walk with deviation `size` per day, linear
    between midnights, separate for each task and kind of effect. Over a day each kind of effect
    therefore moves by `size` standard deviations of its part of the logits. The intercept moves by
    `size` standard deviations of the logits.

    Args:
        size: standard deviations per day.
        days: number of days. A walk of fewer days is the beginning of a longer one.
        other: truth with the effects to move to.
        signal: standard deviation of the logits.
    """

    def __init__(self, seed: int, size: float, days: int, other: Truth, signal: float):
        self._other, self._signal = other, signal
        # One additional walk for the intercept.
        shape = (days, len(other.kinds) + 1, other.tasks)
        steps = np.random.default_rng([seed, 0, _STREAM]).standard_normal(shape)
        self._walks = np.concatenate([np.zeros((1, *shape[1:])), size * np.cumsum(steps, axis=0)])

    def logits(self, rows: Rows, time: np.ndarray) -> np.ndarray:
        """Returns f64[n, tasks], the change of logits of rows at f64[n] days since the start."""
        moved = self._walk_values(time)
        logits = moved[:, 0] * self._signal
        parts = self._other.parts(rows)
        for i, kind in enumerate(self._other.kinds):
            if kind in parts:
                logits += moved[:, i + 1] * parts[kind]
        return logits

    def _walk_values(self, time: np.ndarray) -> np.ndarray:  # f64[n] -> f64[n, walks, tasks]
        day = np.minimum(time.astype(np.int64), len(self._walks) - 2)
        share = (time - day)[:, None, None]
        return self._walks[day] * (1 - share) + self._walks[day + 1] * share
