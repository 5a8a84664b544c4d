"""The common factor of the variances of all effects, by cross-validation."""

from typing import Any, NamedTuple

import numpy as np

from jaxrank.data.statistics.prior.residuals import Labels

FACTORS = 1.0, 2.0, 4.0
_EXAMPLES = 25_000  # at most
_LEAST_EXAMPLES = 100
_STANDARD_ERRORS = 3.0  # by which a larger factor must be better
_ITERATIONS = 15  # of Newton's method
_TOLERANCE = 1e-2  # of the norm of the gradient, relative to that at the start
_RADIUS = 10.0, 1000.0  # of the region of trust: at first and at most
_DEVIATION_OF_CONSTANT = 10.0


class Column(NamedTuple):
    """Ids of a feature: example i64[k], id i64[k], factor f32[k], and the deviation of effects."""

    example: np.ndarray
    id: np.ndarray
    factor: np.ndarray
    deviation: float


def choose(columns: list[Column], numbers: np.ndarray, tasks: list[Labels]) -> float:
    """Returns the factor of the variances by which a linear model predicts best.

    Of groups within groups, such as managers within departments, the outer ones are estimated
    first and leave too little to the inner ones, so the estimated variances are too small. A
    logistic regression whose weights have these variances times a factor is trained on half of the
    examples and scored on the others, in turn. A larger factor is chosen only if its loss is lower
    by three standard errors of the mean over examples.

    Args:
        numbers: f64[n, k], multiplied by the deviation of their effects.
        tasks: binary ones, with n labels.
    """
    labels = [task for task in tasks if task.varies()]
    examples = len(numbers)
    if not labels or not columns or examples < _LEAST_EXAMPLES:
        return FACTORS[0]
    chosen = np.arange(examples)[:: max(1, -(-examples // _EXAMPLES))]
    best, best_loss = FACTORS[0], np.empty(0)
    for factor in FACTORS:
        design = _design(columns, numbers, factor**0.5, examples)[chosen]
        losses = [_scored(design, task.values[chosen], task.known[chosen]) for task in labels]
        loss = np.sum(losses, axis=0)
        if len(best_loss):
            change = loss - best_loss
            if change.mean() >= -_STANDARD_ERRORS * change.std() / len(change) ** 0.5:
                break
        best, best_loss = factor, loss
    return best


def _design(columns: list[Column], numbers: np.ndarray, scale: float, examples: int) -> Any:
    """Returns the sparse matrix of examples and weights, in units of the weights' deviations."""
    from scipy import sparse  # slow to import

    parts = [
        sparse.csr_matrix(
            (
                column.factor.astype(np.float64) * column.deviation * scale,
                (column.example, column.id),
            ),
            shape=(examples, int(column.id.max(initial=-1)) + 1),
        )
        for column in columns
    ]
    constant = np.full((examples, 1), _DEVIATION_OF_CONSTANT)
    return sparse.hstack([*parts, sparse.csr_matrix(np.hstack([numbers, constant]))]).tocsr()


def _scored(design: Any, labels: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Returns the loss f64[n] of each example by the half that does not have it."""
    is_first = (np.arange(len(labels)) * 2_654_435_761 >> 7) % 2 == 0
    losses = np.zeros(len(labels))
    for half in (is_first, ~is_first):
        train, test = half & known, ~half & known
        outputs = design[test] @ _fitted(design[train], labels[train])
        losses[test] = np.logaddexp(0, outputs) - labels[test] * outputs
    return losses


def _fitted(design: Any, labels: np.ndarray) -> np.ndarray:
    """Returns the weights f64[k] of the largest posterior, by Newton's method.

    References:
        Nocedal and Wright, Numerical Optimization, 2006, chapter 7, for the region of trust.
    """
    from scipy import optimize

    transposed = design.T.tocsr()

    def probabilities(weights: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-(design @ weights)))

    def loss(weights: np.ndarray) -> float:
        outputs = design @ weights
        return float((np.logaddexp(0, outputs) - labels * outputs).sum() + weights @ weights / 2)

    def gradient(weights: np.ndarray) -> np.ndarray:
        return transposed @ (probabilities(weights) - labels) + weights

    def curvature(weights: np.ndarray, direction: np.ndarray) -> np.ndarray:
        p = probabilities(weights)
        return transposed @ (p * (1 - p) * (design @ direction)) + direction

    mean = float(np.clip(labels.mean() if len(labels) else 0.5, 1e-6, 1 - 1e-6))
    start = np.zeros(design.shape[1])
    start[-1] = np.log(mean / (1 - mean)) / _DEVIATION_OF_CONSTANT
    first, most = _RADIUS
    options = dict(
        maxiter=_ITERATIONS,
        gtol=_TOLERANCE * float(np.linalg.norm(gradient(start))),
        initial_trust_radius=first,
        max_trust_radius=most,
    )
    return optimize.minimize(
        loss, start, jac=gradient, hessp=curvature, method="trust-ncg", options=options
    ).x
