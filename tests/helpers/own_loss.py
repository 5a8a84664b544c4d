"""A user-defined loss and a metric."""

import jax

from jaxrank import task_losses
from jaxrank.metrics import registry


@task_losses.register("expected_cost", kinds=("binary",))
def expected_cost(outputs, labels, *, miss: float = 2.0):
    """Cost of a decision by chance."""
    p = jax.nn.sigmoid(outputs)
    return miss * labels * (1 - p) + (1 - labels) * p


@registry.register("brier", higher_is_better=False, kinds=("binary",), title="Brier score")
def brier(predictions, labels):
    return (predictions - labels) ** 2
