"""The share of 95% intervals that contain the expected metric, on generated clustered data.

    python -m benchmarks.quality.interval_coverage

Examples come from users, whose taste moves all of their labels, and who differ in their number of
examples. Two models know part of each taste. The expected metrics are those of a million examples
of other users.
"""

import argparse
from typing import NamedTuple

import numpy as np

from jaxrank.metrics import exact, intervals

METRICS = ("logloss", "auc", "calibration")


class Examples(NamedTuple):
    """Examples of some users: logits of two models, labels and the number of the user, each [n]."""

    first: np.ndarray
    second: np.ndarray
    labels: np.ndarray
    users: np.ndarray


def generate(users: int, seed: int, mean_examples: float = 10) -> Examples:
    """Generates examples of users, `mean_examples` on average."""
    r = np.random.default_rng(seed)
    counts = 1 + r.geometric(1 / (mean_examples - 1), users)
    user = np.repeat(np.arange(users), counts)
    taste, known, bias = r.normal(0, 1.0, users), r.normal(0, 0.5, users), r.normal(0, 0.3, users)
    item = r.normal(0, 0.7, len(user))
    logit = -2 + taste[user] + item
    labels = (r.random(len(user)) < 1 / (1 + np.exp(-logit))).astype(np.float64)
    first = -2 + 0.6 * taste[user] + known[user] + item
    second = -2 + 0.7 * taste[user] + bias[user] + item + r.normal(0, 0.2, len(user))
    return Examples(first, second, labels, user)


def coverage(users: int, repetitions: int, *, is_clustered: bool = True) -> dict[str, float]:
    """Returns the share of intervals of each metric, and of each difference, with the expectation.

    Args:
        users: of each data set.
        repetitions: data sets.
        is_clustered: False: the intervals take examples as independent.
    """
    expected = _metrics(generate(100_000, seed=0))
    hits = dict.fromkeys(expected, 0)
    for seed in range(1, repetitions + 1):
        examples = generate(users, seed)
        values, widths = _metrics(examples), _half_widths(examples, is_clustered)
        for name, value in values.items():
            hits[name] += abs(value - expected[name]) <= widths[name]
    return {name: hit / repetitions for name, hit in hits.items()}


def _metrics(examples: Examples) -> dict[str, float]:
    ones = np.ones(len(examples.labels))
    first, second = (
        exact.exact(logits, examples.labels, ones) for logits in (examples.first, examples.second)
    )
    alone = {name: first[name] for name in METRICS}
    return alone | {f"difference of {name}": second[name] - first[name] for name in METRICS}


def _half_widths(examples: Examples, is_clustered: bool) -> dict[str, float]:
    ones = np.ones(len(examples.labels))
    first, second = (
        intervals.influences(logits, examples.labels, ones)
        for logits in (examples.first, examples.second)
    )
    clusters = examples.users if is_clustered else None
    alone = intervals.half_widths(first, ones, clusters=clusters)
    paired = intervals.half_widths(second, ones, first, clusters)
    widths = {name: alone[name] for name in METRICS}
    return widths | {f"difference of {name}": paired[name] for name in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=4000)
    parser.add_argument("--users", type=int, nargs="+", default=[20, 100, 1000])
    args = parser.parse_args()
    for users in args.users:
        for is_clustered in (True, False):
            shares = coverage(users, args.repetitions, is_clustered=is_clustered)
            method = "clustered" if is_clustered else "independent"
            listed = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
            print(f"{users} users, {method}: {listed}", flush=True)


if __name__ == "__main__":
    main()
