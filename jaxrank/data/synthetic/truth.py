"""True probabilities of the labels of generated data, given the features."""

import functools
import math
import statistics
from typing import NamedTuple

import numpy as np

from jaxrank.data.synthetic.history import History

_TASKS = 2

# Fractions of the logit's variance.
_SHARES = {"floats": 0.5, "ids": 0.3, "lists": 0.12, "interactions": 0.08}
# The rank at which the effect of an id has half its variance.
_HALF_RANK = 20
_FIRST_LIST = 2**20  # feature numbers for hashes: id columns from 0, lists from here


class Rows(NamedTuple):
    """Drawn features of n rows.

    floats: f32[n, floats], 0 where missing.
    missing: bool[n, floats].
    ids: i32[n, ids], -1 where null.
    lists: (lengths i64[n], values i32[total], weights f32[total] or None) for each.
    history: or None.
    """

    floats: np.ndarray
    missing: np.ndarray
    ids: np.ndarray
    lists: list[tuple[np.ndarray, np.ndarray, np.ndarray | None]]
    history: History | None = None


@functools.cache
def _normal_quantiles() -> np.ndarray:
    """Returns f32[2**16], which maps 16 uniform bits to a normal number."""
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 2**16) for i in range(2**16)], np.float32)


def _hash(seed: int, feature: int, ids: np.ndarray) -> np.ndarray:
    """Returns 64 random bits per id, u64[n] (the finaliser of SplitMix64, Steele et al., 2014)."""
    start = (seed * 0x9E3779B97F4A7C15 + (feature + 1) * 0xD1B54A32D192ED03) % 2**64
    bits = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(start)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= bits >> np.uint64(shift)
        bits *= np.uint64(factor)
    bits ^= bits >> np.uint64(31)
    return bits


def normal_numbers(seed: int, feature: int, ids: np.ndarray) -> np.ndarray:
    """Returns a normal number for each id of a feature, f32[n]."""
    return _normal_quantiles()[_hash(seed, feature, ids) >> np.uint64(48)]


def _shrink(ids: np.ndarray) -> np.ndarray:
    """Returns f32[n], the size of an id's effects. 0 for a null."""
    size = 1 / np.sqrt(1 + np.maximum(ids, 0) / np.float32(_HALF_RANK))
    return np.where(ids < 0, 0, size).astype(np.float32)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


class Truth:
    """Label probabilities as a function of the features.

    tasks: number of labels.
    kinds: of effects that drift, terms of the logits. The similarity of candidate and history does
        not drift.
    """

    tasks = _TASKS
    kinds = tuple(_SHARES)

    def __init__(self, seed: int, floats: int, ids: tuple[int, ...], lists: int):
        self._seed = seed
        self._ids = ids
        random = np.random.default_rng([seed, 0, 0])
        self._float_weights = self._correlated(random, floats)
        # Small vocabularies have more weight, because they can be learned from fewer examples.
        self._id_weights = np.array([1 / (1 + math.log10(n)) ** 2 for n in ids], np.float32)
        self._list_weights = self._correlated(random, lists)
        self._pair_weights = self._correlated(random, 8)
        self._by_size = [int(i) for i in np.argsort(np.asarray(ids), kind="stable")]
        # Set by `calibrate`.
        self._centers: dict[str, np.ndarray] = {}
        self._scales: dict[str, np.ndarray] = {}
        self._intercepts = np.zeros(_TASKS)
        self._list_size = 1.0

    @staticmethod
    def _correlated(random: np.random.Generator, count: int) -> np.ndarray:
        """Returns f32[count, tasks] of size about 1, with correlation 0.6 between the tasks."""
        first = random.choice([-1.0, 1.0], count) * random.uniform(0.6, 1.4, count)
        second = random.choice([-1.0, 1.0], count) * random.uniform(0.6, 1.4, count)
        return np.stack([first, 0.6 * first + 0.8 * second], axis=1).astype(np.float32)

    def _normals(self, feature: int, ids: np.ndarray, fields: tuple[int, ...]) -> np.ndarray:
        """Returns f32[n, fields], random numbers of each id that shrink with its rank."""
        bits = _hash(self._seed, feature, ids)
        table, size = _normal_quantiles(), _shrink(ids)
        effects = np.empty((len(ids), len(fields)), np.float32)
        for i, field in enumerate(fields):
            index = (bits >> np.uint64(16 * field)) & np.uint64(0xFFFF)
            effects[:, i] = table[index.astype(np.int64)] * size
        return effects

    def _groups(self, rows: Rows) -> dict[str, np.ndarray]:
        """Returns the terms of the logits, f32[n, tasks] each, before scaling."""
        shape = (len(rows.floats), _TASKS)
        groups = {}
        if rows.floats.shape[1]:
            groups["floats"] = _float_effects(rows.floats) @ self._float_weights
        ids = np.zeros(shape, np.float32)
        for i, weight in enumerate(self._id_weights):
            effects = self._normals(i, rows.ids[:, i], (0, 1))
            ids[:, 0] += weight * effects[:, 0]
            ids[:, 1] += weight * (0.6 * effects[:, 0] + 0.8 * effects[:, 1])
        if self._ids:
            groups["ids"] = ids
        means = [self._list_mean(i, *entry) for i, entry in enumerate(rows.lists)]
        if means:
            groups["lists"] = np.stack(means, axis=1) @ self._list_weights
        pairs = self._pairs(rows, means)
        if pairs:
            weights = self._pair_weights[: len(pairs)]
            groups["interactions"] = np.stack(pairs, axis=1) @ weights
        if rows.history is not None:
            similarity = rows.history.similarity.astype(np.float32)
            groups["history"] = np.repeat(similarity[:, None], _TASKS, axis=1)
        return groups

    def _list_mean(
        self, index: int, lengths: np.ndarray, values: np.ndarray, weights: np.ndarray | None
    ) -> np.ndarray:
        """Returns the weighted mean of the effects of a list's ids, f32[n], 0 for an empty list."""
        effects = self._normals(_FIRST_LIST + index, values, (0,))[:, 0]
        owner = np.repeat(np.arange(len(lengths)), lengths)
        if weights is None:
            total = lengths
        else:
            effects *= weights
            total = np.bincount(owner, weights, len(lengths))
        sums = np.bincount(owner, effects, len(lengths))
        return np.divide(sums, total, out=np.zeros(len(lengths)), where=total > 0).astype(
            np.float32
        )

    def _pairs(self, rows: Rows, means: list[np.ndarray]) -> list[np.ndarray]:
        """Returns products of features, f32[n] each.

        The factors are floats without missing values, latent vectors of length 2 of the ids of the
        smallest vocabularies, and the mean of a list with an id.
        """
        floats = [rows.floats[:, i] for i in range(0, min(6, rows.floats.shape[1]), 2)]
        chosen = self._by_size[:4]
        latent = [self._normals(i, rows.ids[:, i], (2, 3)) for i in chosen]
        pairs = []
        if len(floats) > 1:
            pairs.append(floats[0] * floats[1])
        for a, b in zip(latent[::2], latent[1::2], strict=False):
            pairs.append((a * b).sum(axis=1))
        for column, vector in zip(floats, latent, strict=False):
            pairs.append(column * vector[:, 0])
        if means and latent:
            pairs.append(means[0] / self._list_size * latent[0][:, 1])
        return pairs

    def calibrate(
        self,
        sample: Rows,
        signal: float,
        rates: tuple[float, float],
        crosses: float,
        history: float = 0,
    ) -> None:
        """Sets scales and intercepts from a sample.

        Afterwards the sample's logits have deviation `signal`, with the fraction `crosses` from
        interactions, and its mean probabilities are `rates`, the second one over the clicks. The
        similarity to the history contributes the fraction `history` of the variance.
        """
        if sample.lists:  # the mean of a long list is small
            self._list_size = max(float(self._list_mean(0, *sample.lists[0]).std()), 1e-6)
        groups = self._groups(sample)
        others = 1 - _SHARES["interactions"]
        shares = _SHARES | {"interactions": others * crosses / (1 - crosses)}
        whole = sum(shares[name] for name in groups if name != "history") or 1.0
        shares["history"] = whole * history / (1 - history)
        whole = sum(shares[name] for name in groups) or 1.0
        for name, part in groups.items():
            size = signal * math.sqrt(shares[name] / whole)
            self._centers[name] = part.mean(axis=0)
            self._scales[name] = size / np.maximum(part.std(axis=0), 1e-6)
        logits = self._logits(sample)
        weights = np.ones(len(logits))
        for task, rate in enumerate(rates):
            low, high = -30.0, 30.0
            for _ in range(60):
                middle = (low + high) / 2
                mean = np.average(_sigmoid(logits[:, task] + middle), weights=weights)
                low, high = (middle, high) if mean < rate else (low, middle)
            self._intercepts[task] = low
            weights = _sigmoid(logits[:, task] + low)

    def parts(self, rows: Rows) -> dict[str, np.ndarray]:
        """Returns the contribution of each kind of effect to the logits, f[n, tasks]."""
        return {
            name: (part - self._centers[name]) * self._scales[name]
            for name, part in self._groups(rows).items()
        }

    def _logits(self, rows: Rows) -> np.ndarray:
        logits = np.tile(self._intercepts, (len(rows.floats), 1))
        for part in self.parts(rows).values():
            logits += part
        return logits

    def probabilities(self, rows: Rows, moved: np.ndarray | None = None) -> np.ndarray:
        """Returns f64[n, tasks], the probabilities of a click, and of a conversion given a click.

        Args:
            moved: f64[n, tasks], optional change of the logits.
        """
        logits = self._logits(rows)
        return _sigmoid(logits if moved is None else logits + moved)


def _float_effects(floats: np.ndarray) -> np.ndarray:
    """Maps f32[n, floats] to the effects of the floats, f32[n, floats].

    Odd columns, which may be missing, have odd functions, so that a missing value, which is 0, has
    no effect.
    """
    effects = floats.copy()
    effects[:, 1::4] = np.tanh(floats[:, 1::4])
    effects[:, 2::4] = np.minimum(floats[:, 2::4] ** 2, 4) - 1
    effects[:, 3::4] = np.sin(floats[:, 3::4])
    return effects
