"""Effects of features and of pairs of features on labels beyond chance: the prior of a model."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxrank.data.examples import Examples, entries
from jaxrank.data.statistics.prior import variance_scale
from jaxrank.data.statistics.prior.residuals import (
    Labels,
    Residuals,
    constant_outputs,
    prepare_labels,
    residuals,
)
from jaxrank.features import Schema, Task

# Variance for features whose ids differ by no more than chance. Of correlated features, such as the
# site and the app of an ad, the first one explains everything, but the others need some variance
# too, but no more than their ids differ by without the others. Where no feature explains anything,
# the model stays close to the constant.
MIN_VARIANCE = 0.0005
_MIN_FRACTION = 0.7  # of the mean variance
# Numbers are few, so their effects need little shrinkage. More variance than this would let the
# products of numbers and rare ids overfit.
_MAX_VARIANCE_OF_NUMBERS = 0.2
# Where numbers matter, ids may matter by their products with them alone.
_FRACTION_OF_NUMBERS = 0.2
_TYPICAL_VARIANCE = 0.1  # of effects, for the weights of ids in estimates
_MAX_VARIANCE = 4.0  # of effects on an output
_STANDARD_ERRORS = 2.0  # required distance of a variance from chance
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


class _Estimate(NamedTuple):
    """Variances of effects on a task, or on tasks of one unit.

    ids: {feature: variance}.
    limits: {feature: variance of its effects without the other features, not reduced by
        standard errors}.
    """

    ids: dict[str, float]
    limits: dict[str, float]
    numbers: float


class Prior(NamedTuple):
    """Standard deviations of effects on the outputs of tasks, whose units `tasks` has.

    ids: {feature of ids or lists: deviation of the effects of its ids}.
    numbers: deviation of the effects of standardised numbers.
    has_pairs: True if pairs of features have effects beyond those of the features alone, or if
        there is no pair of which that can be tested.
    tasks: {task: factor of these deviations}, 1 without an entry.
    dispersions: {task: noise of its labels}; see `Residuals`. 1 without an entry.
    """

    ids: dict[str, float]
    numbers: float
    has_pairs: bool = True
    tasks: Mapping[str, float] = {}
    dispersions: Mapping[str, float] = {}


def prior(blocks: Iterable[Examples], schema: Schema) -> Prior:
    """Estimates the standard deviation of the effects of the ids of each feature on the outputs.

    Features are processed one by one, those with few ids first. The scores S_j = sum x (y - p) of
    the ids are compared with their variances V_j = sum x^2 p (1 - p). The expectation of S_j^2 is
    V_j by chance, plus variance * V_j^2 where effects differ (method of moments, with weights that
    a single example of a rare id does not dominate). Two standard errors are subtracted. The
    shrunken effects S_j / (V_j + 1 / variance) are included in p for the following features, so
    that redundant features do not count twice. Each variance is then shrunk towards the mean over
    features, by its error and by how much the variances differ beyond their errors. Without this,
    the largest of many chance effects would stand out where clicks are rare. Variances are means
    over the binary tasks. That of numbers is at least the mean over features. Features of a single
    id, and tasks whose labels are all equal, do not count in a mean. See `_has_pairs` for the
    pairs, `_mean_estimate` for the least variances, and `variance_scale` for a last factor.

    Tasks of other kinds have y - p and p (1 - p) of their own; see `residuals`. Each of them has a
    unit of its own, which `Prior.tasks` returns relative to that of the binary tasks, or of the
    first task.

    References:
        DerSimonian and Laird, Meta-analysis in clinical trials, 1986.
    """
    parts = list(blocks)
    labels = np.concatenate([block.labels for block in parts]).astype(np.float64)
    features = _features(parts, schema)
    dense = np.concatenate([block.dense for block in parts])
    columns = _columns(features, dense)
    has_pairs = not columns
    by_unit: dict[str, list[_Estimate]] = {}
    dispersions = {}
    binary = []
    for i, task in enumerate(schema.tasks):
        known = prepare_labels(labels[:, i], task.kind)
        if known is None:
            continue
        variances, limits, outputs = _variances(features, known)
        if task.kind == "binary":
            binary.append(known)
        else:
            dispersions[task.name] = residuals(outputs, known).dispersion
        has_pairs = has_pairs or _has_pairs(columns, known, outputs)
        estimate = _Estimate(variances, limits, _variance_of_numbers(dense, known))
        by_unit.setdefault(_unit(task), []).append(estimate)
    units = sorted(by_unit, key=bool)
    ids, numbers, factors = _in_one_unit(
        [_mean_estimate(by_unit[unit], features, has_pairs) for unit in units]
        or [_mean_estimate([], features, has_pairs)]
    )
    factor = dict(zip(units, factors, strict=False))
    deviations = {name: variance**0.5 for name, variance in ids.items()}
    scale = variance_scale.choose(
        [variance_scale.Column(*features[name], deviations[name]) for name in features],
        _standardised(dense) * numbers**0.5,
        binary,
    )
    return Prior(
        {name: deviation * scale**0.5 for name, deviation in deviations.items()},
        numbers**0.5,
        has_pairs,
        {t.name: factor[_unit(t)] for t in schema.tasks if factor.get(_unit(t), 1.0) != 1},
        dispersions,
    )


def _unit(task: Task) -> str:
    """Returns the name of the unit of a task's effects. Binary tasks share one, log-odds."""
    return "" if task.kind == "binary" else task.name


def _mean_estimate(
    estimates: list[_Estimate], features: Iterable[str], has_pairs: bool
) -> _Estimate:
    """Returns the mean over tasks of one unit, with the least variances.

    The least variance is for features whose effects others explain, and for those that matter in
    pairs alone. Where pairs have no effects, it is therefore limited by the variance of a feature
    without the others.
    """
    limits = {name: _mean(estimate.limits[name] for estimate in estimates) for name in features}
    means = {name: _mean(estimate.ids[name] for estimate in estimates) for name in features}
    mean = _mean(means.values())
    numbers = _mean(estimate.numbers for estimate in estimates)
    numbers = min(numbers, _MAX_VARIANCE_OF_NUMBERS)
    least = _largest(MIN_VARIANCE, _MIN_FRACTION * mean, _FRACTION_OF_NUMBERS * numbers)
    variances = {}
    for name, variance in means.items():
        limited = least if has_pairs else float(np.fmin(least, limits[name]))
        variances[name] = _largest(variance, limited, MIN_VARIANCE)
    known = _mean(variances[name] for name in features if not math.isnan(means[name]))
    return _Estimate(variances, limits, _largest(numbers, known, MIN_VARIANCE))


def _in_one_unit(estimates: list[_Estimate]) -> tuple[dict[str, float], float, list[float]]:
    """Returns the mean variances of ids and numbers in the first unit, and each unit's factor.

    A factor is a ratio of deviations, not of variances.
    """
    totals = [_mean([*estimate.ids.values(), estimate.numbers]) for estimate in estimates]
    ratios = [total / totals[0] for total in totals]
    pairs = list(zip(estimates, ratios, strict=True))
    ids = {name: _mean(e.ids[name] / ratio for e, ratio in pairs) for name in estimates[0].ids}
    numbers = _mean(e.numbers / ratio for e, ratio in pairs)
    return ids, numbers, [ratio**0.5 for ratio in ratios]


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
    features: Mapping[str, _Feature], labels: Labels
) -> tuple[dict[str, float], dict[str, float], np.ndarray]:
    """Returns variances and limits as `_Estimate` has them for a task, and the outputs f64[n].

    A variance is NaN if the feature has a single id. Its limit is then infinite.
    """
    outputs = constant_outputs(labels)
    constant = residuals(outputs, labels)
    variances = dict.fromkeys(features, _Variance(0.0, math.inf))
    limits = {}
    for name, (example, index, factor) in features.items():
        score = np.bincount(index, factor * constant.score[example])
        variance = np.bincount(index, factor**2 * constant.variance[example])
        alone = _effect_variance(score, variance, constant.tail)
        limits[name] = alone.value + _STANDARD_ERRORS * alone.error  # 0 above chance: the errors
        now = residuals(outputs, labels)
        score = np.bincount(index, factor * now.score[example])
        variance = np.bincount(index, factor**2 * now.variance[example])
        variances[name] = _effect_variance(score, variance, now.tail)
        if variances[name].value:
            effects = now.effects(score, variance, variances[name].value)
            outputs += np.bincount(example, factor * effects[index], len(outputs))
    shrunken = _shrunken(list(variances.values()))
    return dict(zip(features, shrunken, strict=True)), limits, outputs


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


def _has_pairs(columns: list[np.ndarray], labels: Labels, outputs: np.ndarray) -> bool:
    """Returns True if pairs of columns affect a task beyond the columns themselves.

    The examples are divided into halves. In each half, the residuals y - p lose their means by
    each column alone. What remains is added up by the pair's values: S_c and S'_c, with variances
    V_c and V'_c. By chance sum S_c S'_c is 0 with variance sum V_c V'_c.

    Args:
        outputs: f64[n], by the effects of ids.
    """
    stride = -(-len(outputs) // _MAX_EXAMPLES)
    columns, outputs = [column[::stride] for column in columns], outputs[::stride].copy()
    labels = Labels(labels.kind, labels.values[::stride], labels.known[::stride])
    if len(columns) < 2 or not labels.varies():
        return False
    for column in columns:  # numbers are not among the outputs yet
        now = residuals(outputs, labels)
        score, information = (np.bincount(column, x) for x in (now.score, now.variance))
        if variance := _effect_variance(score, information, now.tail).value:
            outputs += now.effects(score, information, variance)[column]
    now = residuals(outputs, labels)
    is_first = (np.arange(len(outputs)) * 2_654_435_761 >> 7) % 2 == 0
    pairs = list(itertools.combinations(columns, 2))
    pairs = pairs[:: -(-len(pairs) // _MAX_PAIRS)]
    products = np.array([_product_of_halves(pair, now, is_first) for pair in pairs])
    agreement, variance = products[products[:, 1] > 0].T
    if not len(variance):
        return False
    pooled = agreement.sum() / variance.sum() ** 0.5
    return bool(pooled > _POOLED_ERRORS or (agreement / variance**0.5).max() > _SINGLE_ERRORS)


def _product_of_halves(
    pair: tuple[np.ndarray, np.ndarray], residual: Residuals, is_first: np.ndarray
) -> tuple[float, float]:
    """Returns sum S_c S'_c and sum V_c V'_c over the values c of a pair; see `_has_pairs`."""
    first, second = pair
    cell = np.unique(first * (second.max() + 1) + second, return_inverse=True)[1]
    scores, variances = [], []
    for half in (is_first, ~is_first):
        score, v = residual.score[half], residual.variance[half]
        for column in 2 * (first[half], second[half]):
            means = np.bincount(column, score) / np.maximum(np.bincount(column, v), 1e-12)
            score = score - v * means[column]
        scores.append(np.bincount(cell[half], score, cell.max() + 1))
        variances.append(np.bincount(cell[half], v, cell.max() + 1))
    return float(np.prod(scores, axis=0).sum()), float(np.prod(variances, axis=0).sum())


def _standardised(dense: np.ndarray) -> np.ndarray:
    """Returns the numbers f64[n, k] that vary, with mean 0 and deviation 1."""
    x = dense.astype(np.float64)
    x = (x - x.mean(axis=0))[:, x.std(axis=0) > 0]
    return x / x.std(axis=0)


def _variance_of_numbers(dense: np.ndarray, labels: Labels) -> float:
    """Returns the variance of the effects of numbers f32[n, k], per deviation, on a task.

    NaN if there are no numbers.
    """
    if not dense.shape[1]:
        return math.nan
    x = _standardised(dense[labels.known])
    constant = residuals(constant_outputs(labels), labels)
    score = x.T @ constant.score[labels.known]
    information, k = constant.variance.sum(), x.shape[1]
    above = (score**2).sum() / information - k - _STANDARD_ERRORS * (2 * k) ** 0.5
    return float(max(above, 0) / (max(k, 1) * information))


def _effect_variance(score: np.ndarray, variance: np.ndarray, tail: float) -> _Variance:
    """Estimates the variance of the effects of ids from scores and their variances, f64[ids].

    Args:
        tail: see `Residuals`.
    """
    s, v = score[variance > 0], variance[variance > 0]
    if len(v) < 2:
        return _Variance(0.0, math.inf)
    # Frequent ids have less weight, so that not a few of them decide. The intercept takes the mean
    # of the scores, in proportion to the variances.
    weight, share = 1 / (1 + _TYPICAL_VARIANCE * v) ** 2, v / v.sum()
    chance = (weight * v * (1 - share)).sum()
    error = np.sqrt((weight**2 * (2 * v**2 + tail * v)).sum())
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
