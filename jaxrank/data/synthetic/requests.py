"""Generated requests: scattered examples that share an unseen effect on their clicks.

The effect is of the request, such as how attentive its user is. No feature has it, and it changes
no order within a request.
"""

import numpy as np

from jaxrank.data.synthetic.truth import normal_numbers

COLUMN = "request"
_FEATURE = 2**21  # number for hashes; see `truth`


def draw(random: np.random.Generator, n: int, rows: int, size: float) -> np.ndarray:
    """Returns the requests of n examples of a split, i64[n].

    Args:
        rows: examples of the split.
        size: mean number of examples of a request.
    """
    return random.integers(0, max(1, round(rows / size)), n)


def with_effects(
    probabilities: np.ndarray, requests: np.ndarray, seed: int, size: float
) -> np.ndarray:
    """Returns probabilities f64[n, tasks] with the effect of the request on the first task.

    Args:
        requests: i64[n].
        size: standard deviation of the effects, as logits.
    """
    effects = size * normal_numbers(seed, _FEATURE, requests).astype(np.float64)
    click = probabilities[:, 0]
    logits = np.log(click) - np.log1p(-click) + effects
    result = probabilities.copy()
    result[:, 0] = 1 / (1 + np.exp(-logits))
    return result
