"""What the statistics of a split cost, for each example and each id, on one core.

    taskset -c 0 python benchmarks/counting.py

Chunks of 16,384 examples: 13 floats, 26 ids over tables of Criteo's sizes, and 8 lists of mean
length 8. Beside it np.unique of the same ids, the first step of an exact count of different rows.
Each figure is processor time, the least of the rounds, after the first chunks.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
from counts import positive

from jaxrank.data.spec.features import FeatureSpec, FloatSpec, IdSpec, ListSpec, TaskSpec
from jaxrank.data.statistics.split import Statistics

CHUNK = 16_384
# Rows of C1 to C26, of Criteo's display advertising data.
ROWS = (
    *(1_461, 583, 10_131_227, 2_202_608, 306, 24, 12_518, 634, 4, 93_146, 5_684, 8_351_593, 3_195),
    *(28, 14_993, 5_461_306, 11, 5_653, 2_173, 4, 7_046_547, 18, 16, 286_181, 105, 142_572),
)
LISTS = 8
IDS = {
    "uniform": lambda random, rows: random.integers(0, rows, CHUNK),
    "zipf 1.2": lambda random, rows: np.minimum(random.zipf(1.2, CHUNK), rows) - 1,
    "200 large": lambda random, rows: random.integers(0, 200, CHUNK) * 10_007 + 5_000,
}


def least(rounds: int, function: Callable[[], object]) -> float:
    """Microseconds an example."""
    found = []
    for _ in range(rounds):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return min(found) / CHUNK * 1e6


def measured(draw: Callable[[np.random.Generator, int], np.ndarray], rounds: int) -> str:
    features = FeatureSpec(
        tasks=(TaskSpec("click", label="click"),),
        floats=tuple(FloatSpec((f"x{i}",)) for i in range(13)),
        ids=tuple(IdSpec((f"c{i}",)) for i in range(len(ROWS))),
        lists=tuple(ListSpec((f"l{i}",)) for i in range(LISTS)),
    )
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (CHUNK, 1)).astype(np.float32)
    floats = np.asfortranarray(random.normal(size=(CHUNK, 13)))
    lengths = random.poisson(8, (CHUNK, LISTS)).astype(np.int32)
    ids = np.stack([draw(random, rows) for rows in ROWS], axis=1).astype(np.int32)
    lists = [random.integers(0, 10**6, n).astype(np.int32) for n in lengths.sum(axis=0)]
    statistics = Statistics(features)

    def count_ids() -> None:
        for i in range(len(ROWS)):
            statistics.add_rows("ids", i, ids[:, i : i + 1])

    def count_lists() -> None:
        for i, rows in enumerate(lists):
            statistics.add_rows("lists", i, rows)

    def unique() -> None:
        for i in range(len(ROWS)):
            np.unique(ids[:, i])

    add = least(rounds, lambda: statistics.add(labels, floats, lengths))
    of_ids, of_lists, of_unique = (least(rounds, f) for f in (count_ids, count_lists, unique))
    per_id = sum(map(len, lists)) / CHUNK
    return (
        f"labels, floats and lengths {add:.2f} us an example; {len(ROWS)} ids {of_ids:.2f}"
        f" ({of_ids / len(ROWS):.4f} an id, np.unique {of_unique / len(ROWS):.4f});"
        f" {per_id:.0f} ids of lists {of_lists:.2f} ({of_lists / per_id:.4f} an id);"
        f" together {add + of_ids + of_lists:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=30)
    rounds = parser.parse_args().rounds
    for name, draw in IDS.items():
        print(f"{name}: {measured(draw, rounds)}")


if __name__ == "__main__":
    main()
