"""The share of 95% intervals that contain the expected metric, on generated clustered data.

    python -m benchmarks.quality.interval_coverage

Examples come from users, whose taste moves all of their labels. Two models know part of each
taste, and the second has a bias for each user, by which the differences between the models are
skewed. The expected metrics are those of a million examples of other users.
"""

import argparse
from collections.abc import Callable
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


class Case(NamedTuple):
    """Clusters of examples.

    users: number of clusters in a data set.
    sizes: of the clusters, a key of `SIZES`.
    taste: standard deviation of the taste of users.
    bias: standard deviation of the second model's bias.
    """

    users: int
    sizes: str = "unequal"
    taste: float = 1.0
    bias: float = 0.3


# Numbers of examples of each user.
SIZES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "days of 500": lambda r, n: np.full(n, 500),
    "equal": lambda r, n: np.full(n, 30),
    "unequal": lambda r, n: 1 + r.geometric(1 / 9, n),
    "heavy": lambda r, n: np.minimum(1 + (5 * r.pareto(1.5, n)).astype(np.int64), 300),
}
_BIASES = 0.3, 1.2
CASES = tuple(
    Case(users, sizes, 0.5 if sizes == "days of 500" else 1.0, bias)
    for bias in _BIASES
    for users, sizes in (
        (12, "days of 500"), (30, "equal"), (20, "unequal"), (100, "unequal"), (400, "unequal"),
        (100, "heavy"),
    )
)  # fmt: skip


def generate(case: Case, seed: int) -> Examples:
    """Generates the examples of a data set."""
    r = np.random.default_rng(seed)
    users = case.users
    user = np.repeat(np.arange(users), SIZES[case.sizes](r, users))
    taste, known = r.normal(0, case.taste, users), r.normal(0, 0.5, users)
    bias = r.normal(0, case.bias, users)
    item = r.normal(0, 0.7, len(user))
    logit = -2 + taste[user] + item
    labels = (r.random(len(user)) < 1 / (1 + np.exp(-logit))).astype(np.float64)
    first = -2 + 0.6 * taste[user] + known[user] + item
    second = -2 + 0.7 * taste[user] + bias[user] + item + r.normal(0, 0.2, len(user))
    return Examples(first, second, labels, user)


def coverage(
    case: Case, repetitions: int, *, is_clustered: bool = True, examples: int = 1_000_000
) -> dict[str, float]:
    """Returns the share of intervals of each metric, and of each difference, with the expectation.

    Args:
        case: the clusters of each data set.
        repetitions: data sets.
        is_clustered: False: the intervals take examples as independent.
        examples: number of examples of other users, whose metrics are the expected ones.
    """
    mean = len(generate(case._replace(users=1000), seed=0).users) / 1000
    expected = _metrics(generate(case._replace(users=int(examples / mean)), seed=0))
    hits = dict.fromkeys(expected, 0)
    for seed in range(1, repetitions + 1):
        data = generate(case, seed)
        values, margins = _metrics(data), _margins(data, is_clustered)
        for name, value in values.items():
            low, high = margins[name].ends(value)
            hits[name] += low <= expected[name] <= high
    return {name: hit / repetitions for name, hit in hits.items()}


def _metrics(examples: Examples) -> dict[str, float]:
    ones = np.ones(len(examples.labels))
    first, second = (
        exact.exact(logits, examples.labels, ones) for logits in (examples.first, examples.second)
    )
    alone = {name: first[name] for name in METRICS}
    return alone | {f"difference of {name}": second[name] - first[name] for name in METRICS}


def _margins(examples: Examples, is_clustered: bool) -> dict[str, intervals.Margins]:
    ones = np.ones(len(examples.labels))
    clusters = examples.users if is_clustered else None
    first, second = (
        intervals.influences(logits, examples.labels, ones, clusters=clusters)
        for logits in (examples.first, examples.second)
    )
    alone = intervals.margins(first, ones, clusters=clusters)
    paired = intervals.margins(second, ones, first, clusters)
    margins = {name: alone[name] for name in METRICS}
    return margins | {f"difference of {name}": paired[name] for name in METRICS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=2000)
    args = parser.parse_args()
    print(f"| users | bias | {' | '.join(coverage(CASES[1], 1))} |")
    for case, is_clustered in [*((case, True) for case in CASES), (CASES[2], False)]:
        shares = coverage(case, args.repetitions, is_clustered=is_clustered).values()
        name = f"{case.users} {case.sizes}{'' if is_clustered else ', taken as independent'}"
        listed = " | ".join(f"{share:.1%}" for share in shares)
        print(f"| {name} | {case.bias} | {listed} |", flush=True)


if __name__ == "__main__":
    main()
