"""How well examples that are stored sorted are mixed, against a permutation of all of them.

    python benchmarks/shuffle.py

Sorted data is the worst case: a stored block is all of one label, or of one moment. Of each setting
of data.shards and data.window_blocks:

- label: variance of the positive share of a batch, over that of a random batch; data sorted by
  label. 1 is perfect.
- range, distance: of the places in the stored order (0 to 1) that a batch's examples have: how much
  of it they cover, and the Kolmogorov-Smirnov distance from uniform, over that of a random batch.
- next: correlation of the mean place of a batch with that of the next one. 0 is perfect.
- by label, by time: what it costs: logloss of a logistic model on held-out examples after one pass,
  in thousandths above that of the same model after a pass over a permutation of all; of data sorted
  by label, and of data sorted by time whose click rate and effects of ids drift. Mean and standard
  deviation over the seeds, the noise of two permutations included.
- held: examples in memory, of all shards, two windows each.

The order is that of the training pipeline, which `data.order.Order` alone decides.
"""

import argparse
from collections.abc import Callable, Iterable

import numpy as np
from counts import positive

from jaxrank.data.batches.shuffle_order import Order

_POSITIVES = 0.25
_IDS = (20_000, 2_000, 200)  # values of each id column, by a power law
_SETTINGS = [(s, w) for s in (8, 32) for w in (1, 4, 16)]


def mixed(
    rows: int, block: int, shards: int, window_blocks: int, batch: int, seed: int
) -> np.ndarray:
    """i64[batches, batch]: the stored examples of each batch of one pass."""
    sizes = np.full(rows // block, block)
    order = Order(sizes, seed=seed, shards=shards, window=window_blocks * block)
    streams = []
    for shard in range(shards):
        lo, hi = order.piece(shard)
        stream = []
        for run in order.runs(shard, 0, hi - lo):
            spans, permutation = order.window(shard, run.turn, run.window)
            stored = [np.arange(s.start, s.stop) + s.block * block for s in spans]
            stream.append(np.concatenate(stored)[permutation])
        streams.append(np.concatenate(stream))
    share = batch // shards
    steps = min(map(len, streams)) // share
    cut = np.stack([stream[: steps * share].reshape(steps, share) for stream in streams], axis=1)
    return cut.reshape(steps, batch)


def permuted(rows: int, batch: int, seed: int) -> np.ndarray:
    steps = rows // batch
    return np.random.default_rng(seed).permutation(rows)[: steps * batch].reshape(steps, batch)


def label_ratio(batches: np.ndarray, rows: int) -> float:
    positive = (batches < _POSITIVES * rows).mean(axis=1)
    return positive.var() / (_POSITIVES * (1 - _POSITIVES) / batches.shape[1])


def places(batches: np.ndarray, rows: int) -> tuple[float, float, float]:
    """Range, Kolmogorov-Smirnov distance, and correlation with the next batch."""
    place = np.sort((batches + 0.5) / rows, axis=1)
    n = place.shape[1]
    above = (np.arange(1, n + 1) / n - place).max(axis=1)
    below = (place - np.arange(n) / n).max(axis=1)
    mean = place.mean(axis=1)
    following = float(np.corrcoef(mean[:-1], mean[1:])[0, 1])
    return float((place[:, -1] - place[:, 0]).mean()), np.maximum(above, below).mean(), following


class Clicks:
    """Generated examples in order of time: ids i64[n, columns] and labels f64[n]."""

    def __init__(self, rows: int, seed: int):
        random = np.random.default_rng([seed, 1])
        columns = [(n * random.random(rows) ** 3).astype(np.int64) for n in _IDS]
        time = np.arange(rows) / rows
        start = [random.normal(0, 0.6, n) for n in _IDS]
        end = [random.normal(0, 0.6, n) for n in _IDS]
        logit = -1.2 + 1.0 * (time - 0.5)
        for ids, a, b in zip(columns, start, end, strict=True):
            logit += (1 - time) * a[ids] + time * b[ids]
        self.ids = np.stack(columns, axis=1) + np.cumsum([0, *_IDS[:-1]])
        self.labels = (random.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float64)
        self.held_out = random.random(rows) < 0.1  # of all times


def logloss(clicks: Clicks, batches: Iterable[np.ndarray], rate: float) -> float:
    """Of held-out examples, after one pass of AdaGrad over the batches of other examples."""
    weights, squares = np.zeros(sum(_IDS) + 1), np.full(sum(_IDS) + 1, 0.1)
    bias = sum(_IDS)
    for batch in batches:
        ids, labels = clicks.ids[batch], clicks.labels[batch]
        logit = weights[ids].sum(axis=1) + weights[bias]
        error = (1 / (1 + np.exp(-logit)) - labels) / len(batch)
        gradient = np.bincount(ids.ravel(), np.repeat(error, ids.shape[1]), minlength=len(weights))
        gradient[bias] = error.sum()
        gradient *= len(batch) ** 0.5  # so that the rate is of about one for any batch
        squares += gradient**2
        weights -= rate * gradient / np.sqrt(squares)
    ids, labels = clicks.ids[clicks.held_out], clicks.labels[clicks.held_out]
    logit = weights[ids].sum(axis=1) + weights[bias]
    return float((np.logaddexp(0, logit) - labels * logit).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positive, default=4_000_000)
    parser.add_argument("--block", type=positive, default=8192)
    parser.add_argument("--batch", type=positive, default=4096)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument("--rate", type=float, default=0.1)
    args = parser.parse_args()
    rows = args.rows // args.block * args.block
    least = max(shards for shards, _ in _SETTINGS) * args.block
    if rows < least:
        parser.error(f"--rows: must be at least {least:,}, a block a shard: found {args.rows:,}")

    trainings = []
    for seed in range(args.seeds):
        clicks = Clicks(round(rows * 1.12), seed)
        trained = np.flatnonzero(~clicks.held_out)[:rows]
        by_label = trained[np.argsort(clicks.labels[trained], kind="stable")]
        trainings.append((seed, clicks, {"label": by_label, "time": trained}))
    base = {}
    for seed, clicks, orders in trainings:
        batches = permuted(rows, args.batch, 100 + seed)
        base[seed] = logloss(clicks, orders["time"][batches], args.rate)

    print(
        f"{rows:,} examples in {rows // args.block} blocks of {args.block:,}, batches of"
        f" {args.batch:,}; logloss of a permutation {np.mean(list(base.values())):.4f}"
    )
    titles = ("label", "range", "distance", "next", "by label", "", "by time", "", "held")
    print(f"{'shards x blocks':<18}" + "".join(f"{t:>10}" for t in titles))
    _, random_distance, _ = places(permuted(rows, args.batch, 0), rows)

    def tell(name: str, make: Callable[[int], np.ndarray], held: int) -> None:
        batches = make(0)
        spread, distance, following = places(batches, rows)
        text = f"{name:<18}{label_ratio(batches, rows):>10.2f}{spread:>10.4f}"
        text += f"{distance / random_distance:>10.2f}{following:>10.2f}"
        for sort in ("label", "time"):
            cost = [
                1000 * (logloss(clicks, orders[sort][make(seed)], args.rate) - base[seed])
                for seed, clicks, orders in trainings
            ]
            deviation = f"+-{np.std(cost, ddof=1):.2f}" if len(cost) > 1 else ""
            text += f"{np.mean(cost):>10.2f}{deviation:>10}"
        print(text + f"{held:>10,}", flush=True)

    tell("permutation", lambda seed: permuted(rows, args.batch, seed), rows)
    for shards, blocks in _SETTINGS:

        def make(seed: int, shards: int = shards, blocks: int = blocks) -> np.ndarray:
            return mixed(rows, args.block, shards, blocks, args.batch, seed)

        tell(f"{shards} x {blocks}", make, min(rows, 2 * shards * blocks * args.block))
    stored = np.arange(rows // args.batch * args.batch).reshape(-1, args.batch)
    tell("as stored", lambda seed: stored, args.batch)


if __name__ == "__main__":
    main()
