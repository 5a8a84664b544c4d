"""Effects of features and of pairs of features on labels beyond chance: the prior of a model."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxrank.data.examples import Examples, entries
from jaxrank.features import Schema

# Variance for features whose ids differ by no more than chance. Of correlated features, such as the
# site and the app of an ad, the first one explains everything, but the others need some variance
# too. Where no feature explains anything, the model stays close to the constant.
MIN_VARIANCE = 0.0005
_MIN_FRACTION = 0.7  # of the mean variance
# Numbers are few, so their effects need little shrinkage. More variance than this would let the
# products of numbers and rare ids overfit.
_MAX_VARIANCE_OF_NUMBERS = 0.2
# Where numbers matter, ids may matter by their products with them alone.
_FRACTION_OF_NUMBERS = 0.2
_TYPICAL_VARIANCE = 0.1  # of effects, for the weights of ids in estimates
_MAX_VARIANCE = 4.0  # of the log-odds
_STANDARD_ERRORS = 2.0  # required distance of a variance from chance
_MAX_LOG_ODDS = 15.0
# Pairs of features: the sample, and the required distance from chance in standard errors. The
# largest distance of many pairs is above 3 by chance now and then.
_MAX_EXAMPLES = 100_000
_MAX_PAIRS = 60
_QUANTILES = 8  # into which a number is divided
_POOLED_ERRORS, _SINGLE_ERRORS = 2.5, 3.5


class _Feature(NamedTuple):
    """The ids of a feature: example i64[k], id i64[k] from 0 without gaps, factor f32[k]."""

    example: np.ndarray
    id: np.ndarray
    factor: np.ndarray


class _Variance(NamedTuple):
    """An estimated variance of effects, and its standard error by chance if the truth were 0.

    error: infinite where nothing is known.
    """

    value: float
    error: float


class Prior(NamedTuple):
    """Standard deviations of effects on the log-odds.

    ids: {feature of ids or lists: deviation of the effects of its ids}.
    numbers: deviation of the effects of standardised numbers.
    has_pairs: True if pairs of features have effects beyond those of the features alone, or if
        there is no pair of which that can be tested.
    """

    ids: dict[str, float]
    numbers: float
    has_pairs: bool = True


def prior(blocks: Iterable[Examples], schema: Schema) -> Prior:
    """Estimates the standard deviation of the effects of the ids of each feature on the log-odds.

    Features are processed one by one, those with few ids first. The scores S_j = sum x (y - p) of
    the ids are compared with their variances V_j = sum x^2 p (1 - p). The expectation of S_j^2 is
    V_j by chance, plus variance * V_j^2 where effects differ (method of moments, with weights that
    a single example of a rare id does not dominate). Two standard errors are subtracted. The
    shrunken effects S_j / (V_j + 1 / variance) are included in p for the following features, so
    that redundant features do not count twice. Each variance is then shrunk towards the mean over
    features, by its error and by how much the variances differ beyond their errors. Without this,
    the largest of many chance effects would stand out where clicks are rare. Variances are means
    over the binary tasks. That of numbers is at least the mean over features. Features of a single
    id, and tasks whose labels are all equal, do not count in a mean.
    See `_has_pairs` for the pairs.

    References:
        DerSimonian and Laird, Meta-analysis in clinical trials, 1986.
    """
    parts = list(blocks)
    labels = np.concatenate([block.labels for block in parts]).astype(np.float64)
    features = _features(parts, schema)
    binary = [i for i, task in enumerate(schema.tasks) if task.kind == "binary"]
    dense = np.concatenate([block.dense for block in parts])
    columns = _columns(features, dense)
    by_task, has_pairs = [], not columns
    for i in binary:
        variances, log_odds = _variances(features, labels[:, i])
        by_task.append(variances)
        has_pairs = has_pairs or _has_pairs(columns, labels[:, i], log_odds)
    means = {name: _mean(variances[name] for variances in by_task) for name in features}
    mean = _mean(means.values())
    numbers = _mean(_variance_of_numbers(dense, labels[:, i]) for i in binary)
    numbers = min(numbers, _MAX_VARIANCE_OF_NUMBERS)
    least = _largest(MIN_VARIANCE, _MIN_FRACTION * mean, _FRACTION_OF_NUMBERS * numbers)
    variances = {name: _largest(mean, least) for name, mean in means.items()}
    known = _mean(variances[name] for name in features if not math.isnan(means[name]))
    deviations = {name: v**0.5 for name, v in variances.items()}
    return Prior(deviations, _largest(numbers, known, MIN_VARIANCE) ** 0.5, has_pairs)


def _mean(variances: Iterable[float]) -> float:
    """Returns the mean of the known variances, NaN if there is none."""
    known = [variance for variance in variances if not math.isnan(variance)]
    return sum(known) / len(known) if known else math.nan


def _largest(*variances: float) -> float:
    """Returns the largest of the known variances."""
    return float(np.fmax.reduce(variances))


def _features(parts: list[Examples], schema: Schema) -> Mapping[str, _Feature]:
    """Returns the ids of each feature, by increasing number of distinct ids."""
    first = np.cumsum([0, *(block.rows for block in parts)])
    ids = [entries(block, schema) for block in parts]
    example = np.concatenate([e.example + n for e, n in zip(ids, first, strict=False)])
    column, row, factor = (np.concatenate([e[i] for e in ids]) for i in (1, 2, 3))
    names = [f.name for f in schema.id_columns] + [f.name for f in schema.ragged]
    sizes: dict[str, int] = {}
    features: dict[str, _Feature] = {}
    for name in dict.fromkeys(names):
        chosen = np.isin(column, [i for i, other in enumerate(names) if other == name])
        distinct, index = np.unique(row[chosen], return_inverse=True)
        sizes[name] = len(distinct)
        features[name] = _Feature(example[chosen], index, factor[chosen])
    return {name: features[name] for name in sorted(features, key=lambda name: sizes[name])}


def _variances(
    features: Mapping[str, _Feature], labels: np.ndarray
) -> tuple[dict[str, float], np.ndarray]:
    """Returns the variance of each feature's effects on a task, and the log-odds f64[n] by them.

    A variance is NaN if the feature has a single id, or if all labels are equal.

    labels: f64[n], NaN if unknown.
    """
    known = ~np.isnan(labels)
    variances = dict.fromkeys(features, _Variance(0.0, math.inf))
    mean = labels[known].mean() if known.any() else 0.0
    if not 0 < mean < 1:
        return dict.fromkeys(features, math.nan), np.zeros(len(labels))
    labels = np.where(known, labels, 0)
    log_odds = np.full(len(labels), np.log(mean / (1 - mean)))
    for name, (example, index, factor) in features.items():
        p = _probabilities(log_odds, labels, known)
        score = np.bincount(index, factor * (labels - p)[example])
        variance = np.bincount(index, factor**2 * (p * (1 - p))[example])
        variances[name] = _effect_variance(score, variance)
        if variances[name].value:
            effects = score / (variance + 1 / variances[name].value)
            log_odds += np.bincount(example, factor * effects[index], len(labels))
    shrunken = _shrunken(list(variances.values()))
    return dict(zip(features, shrunken, strict=True)), log_odds


def _columns(features: Mapping[str, _Feature], dense: np.ndarray) -> list[np.ndarray]:
    """Returns i64[n] per feature with one id in each example, and per number its quantile.

    Features with the fewest values come first. Those with a single value are left out.
    """
    examples = len(dense)
    columns = [feature.id for feature in features.values() if len(feature.id) == examples]
    for number in dense.T:
        edges = np.quantile(number, np.linspace(0, 1, _QUANTILES + 1)[1:-1]) if examples else []
        columns.append(np.searchsorted(np.unique(edges), number, side="right"))
    sized = [(int(column.max(initial=0)), column) for column in columns]
    return [column for last, column in sorted(sized, key=lambda pair: pair[0]) if last > 0]


def _has_pairs(columns: list[np.ndarray], labels: np.ndarray, log_odds: np.ndarray) -> bool:
    """Returns True if pairs of columns affect a task beyond the columns themselves.

    The examples are divided into halves. In each half, the residuals y - p lose their means by
    each column alone. What remains is added up by the pair's values: S_c and S'_c, with variances
    V_c and V'_c. By chance sum S_c S'_c is 0 with variance sum V_c V'_c.

    Args:
        labels: f64[n], NaN if unknown.
        log_odds: f64[n], by the effects of ids.
    """
    stride = -(-len(labels) // _MAX_EXAMPLES)
    columns, labels, log_odds = [c[::stride] for c in columns], labels[::stride], log_odds[::stride]
    known = ~np.isnan(labels)
    labels = np.where(known, labels, 0)
    if len(columns) < 2 or not 0 < labels.sum() < known.sum():
        return False
    log_odds = log_odds.copy()
    for column in columns:  # numbers are not among the log-odds yet
        p = _probabilities(log_odds, labels, known)
        score, information = (np.bincount(column, x) for x in (labels - p, p * (1 - p)))
        if variance := _effect_variance(score, information).value:
            log_odds += (score / (information + 1 / variance))[column]
    p = _probabilities(log_odds, labels, known)
    is_first = (np.arange(len(labels)) * 2_654_435_761 >> 7) % 2 == 0
    pairs = list(itertools.combinations(columns, 2))
    pairs = pairs[:: -(-len(pairs) // _MAX_PAIRS)]
    products = np.array(
        [_product_of_halves(pair, labels - p, p * (1 - p), is_first) for pair in pairs]
    )
    agreement, variance = products[products[:, 1] > 0].T
    if not len(variance):
        return False
    pooled = agreement.sum() / variance.sum() ** 0.5
    return bool(pooled > _POOLED_ERRORS or (agreement / variance**0.5).max() > _SINGLE_ERRORS)


def _product_of_halves(
    pair: tuple[np.ndarray, np.ndarray],
    residual: np.ndarray,
    variance: np.ndarray,
    is_first: np.ndarray,
) -> tuple[float, float]:
    """Returns sum S_c S'_c and sum V_c V'_c over the values c of a pair; see `_has_pairs`."""
    first, second = pair
    cell = np.unique(first * (second.max() + 1) + second, return_inverse=True)[1]
    scores, variances = [], []
    for half in (is_first, ~is_first):
        score, v = residual[half], variance[half]
        for column in 2 * (first[half], second[half]):
            means = np.bincount(column, score) / np.maximum(np.bincount(column, v), 1e-12)
            score = score - v * means[column]
        scores.append(np.bincount(cell[half], score, cell.max() + 1))
        variances.append(np.bincount(cell[half], v, cell.max() + 1))
    return float(np.prod(scores, axis=0).sum()), float(np.prod(variances, axis=0).sum())


def _variance_of_numbers(dense: np.ndarray, labels: np.ndarray) -> float:
    """Returns the variance of the effects of numbers f32[n, k], per deviation, on a task.

    NaN if there are no numbers, or if all labels are equal.
    """
    known = ~np.isnan(labels)
    mean = labels[known].mean() if known.any() else 0.0
    if not 0 < mean < 1 or not dense.shape[1]:
        return math.nan
    x = dense[known].astype(np.float64)
    x = (x - x.mean(axis=0))[:, x.std(axis=0) > 0]
    score = (x / x.std(axis=0)).T @ (labels[known] - mean)
    information, k = len(x) * mean * (1 - mean), x.shape[1]
    above = (score**2).sum() / information - k - _STANDARD_ERRORS * (2 * k) ** 0.5
    return float(max(above, 0) / (max(k, 1) * information))


def _probabilities(log_odds: np.ndarray, labels: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Returns f64[n], 0 where the label is unknown. The intercept is refitted to the mean of
    labels.
    """
    p = 1 / (1 + np.exp(-np.clip(log_odds, -_MAX_LOG_ODDS, _MAX_LOG_ODDS)))
    log_odds += np.log(labels.sum() / p[known].sum())
    p = 1 / (1 + np.exp(-np.clip(log_odds, -_MAX_LOG_ODDS, _MAX_LOG_ODDS)))
    return np.where(known, p, 0)


def _effect_variance(score: np.ndarray, variance: np.ndarray) -> _Variance:
    """Estimates the variance of the effects of ids from scores and their variances, f64[ids]."""
    s, v = score[variance > 0], variance[variance > 0]
    if len(v) < 2:
        return _Variance(0.0, math.inf)
    # Frequent ids have less weight, so that not a few of them decide. The intercept takes the mean
    # of the scores, in proportion to the variances.
    weight, share = 1 / (1 + _TYPICAL_VARIANCE * v) ** 2, v / v.sum()
    chance = (weight * v * (1 - share)).sum()
    error = np.sqrt((weight**2 * (2 * v**2 + v)).sum())
    per_variance = (weight * v**2 * (1 - 2 * share + (share**2).sum())).sum()
    above = (weight * s**2).sum() - chance - _STANDARD_ERRORS * error
    value = float(min(max(above, 0) / per_variance, _MAX_VARIANCE))
    return _Variance(value, float(error / per_variance))


def _shrunken(variances: list[_Variance]) -> list[float]:
    """Shrinks estimates towards their mean, as random effects whose variance is estimated.

    Features of which nothing is known are NaN and do not change the others.

    References:
        DerSimonian and Laird, Meta-analysis in clinical trials, 1986.
    """
    values, errors = np.array(variances).reshape(-1, 2).T
    weights = 1 / errors**2  # 0 for a feature of a single id
    known = weights > 0
    if known.sum() < 2:
        return [float(value) for value in np.where(known, values, math.nan)]
    total = weights.sum()
    mean = (weights * values).sum() / total
    excess = (weights * (values - mean) ** 2).sum() - (known.sum() - 1)
    # total - (weights**2).sum() / total, without cancellation where one weight dominates.
    scale = 2 * np.triu(np.outer(weights, weights / total), 1).sum()
    # With two or three features their spread is not known. It is at least as wide as their mean.
    between = max(max(excess, 0.0) / scale, values[known].mean() ** 2)
    share = between * weights / (1 + between * weights)
    shrunken = np.where(known, share * values + (1 - share) * values[known].mean(), math.nan)
    return [float(value) for value in shrunken]
