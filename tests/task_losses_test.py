"""Losses of single examples against their formulas in float64, and their registry."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkout import HELPERS
from registries import restored

from jaxrank import extensions, losses, task_losses
from jaxrank.errors import InputError
from jaxrank.features import Task


@pytest.fixture(autouse=True)
def registered():
    """Registers the loss of a user."""
    with restored():
        extensions.load(HELPERS / "own_loss.py")
        yield


CLICK, PRICE = Task("click"), Task("price", "real")
OUTPUTS = np.array([[-3.0, 2.0, 0.0], [0.5, 30.0, -30.0]])
LABELS = np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]])


def loss_value(entry, task=CLICK):
    (function,) = task_losses.select_losses({task.name: entry}, [task])
    return function


def focal(gamma, alpha=0.0):
    """The formula of the paper, whose (1 - p)^gamma rounds for p near 1."""
    p = 1 / (1 + np.exp(-OUTPUTS))
    of_label = np.where(LABELS == 1, p, 1 / (1 + np.exp(OUTPUTS)))
    weight = np.where(LABELS == 1, alpha, 1 - alpha) if alpha else 1.0
    return -weight * (1 - of_label) ** gamma * np.log(of_label)


def cross_entropy(labels):
    return labels * np.logaddexp(0, -OUTPUTS) + (1 - labels) * np.logaddexp(0, OUTPUTS)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("bce", cross_entropy(LABELS)),
        ({"name": "bce", "label_smoothing": 0.2}, cross_entropy(0.8 * LABELS + 0.1)),
        ({"label_smoothing": 0.2}, cross_entropy(0.8 * LABELS + 0.1)),
        ({"name": "focal", "gamma": 0.0}, cross_entropy(LABELS)),
        ("focal", focal(2.0)),
        ({"name": "focal", "gamma": 1.5, "alpha": 0.25}, focal(1.5, 0.25)),
        ({"name": "expected_cost", "miss": 3}, None),
    ],
)
def test_a_loss_equals_its_formula(entry, expected):
    if expected is None:
        p = 1 / (1 + np.exp(-OUTPUTS))
        expected = 3 * LABELS * (1 - p) + (1 - LABELS) * p
    with jax.enable_x64(True):
        result = loss_value(entry)(jnp.asarray(OUTPUTS), jnp.asarray(LABELS))
        slope = jax.grad(lambda x: loss_value(entry)(x, jnp.asarray(LABELS)).sum())(
            jnp.asarray(OUTPUTS)
        )
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-12)
    assert np.isfinite(slope).all()


def test_the_loss_of_a_task_without_an_entry_is_that_of_its_kind():
    tasks = [CLICK, PRICE, Task("visits", "count")]
    functions = task_losses.select_losses({}, tasks)
    assert functions == (losses.logistic, losses.squared, losses.poisson)
    for task, function in zip(tasks, functions, strict=True):
        chosen = loss_value(losses.DEFAULT_OF_KIND[task.kind], task)
        np.testing.assert_array_equal(chosen(OUTPUTS, LABELS), function(OUTPUTS, LABELS))


def test_each_task_has_its_own_loss():
    other = Task("buy")
    chosen = {"buy": {"name": "focal", "gamma": 1.0}}
    functions = task_losses.select_losses(chosen, [CLICK, other, Task("like")])
    weights, total = jnp.ones((2, 3)), jnp.full(3, 2.0)
    result = losses.per_task(jnp.asarray(OUTPUTS), LABELS, weights, total, functions)
    expected = cross_entropy(LABELS).mean(0)
    expected[1] = focal(1.0).mean(0)[1]
    np.testing.assert_allclose(result, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"clik": "bce"}, "task_losses: must be of tasks click, price: found 'clik'"),
        ({"click": "focl"}, "task_losses.click: must be one of .*'focl'. Did you mean 'focal'?"),
        (
            {"click": "mine"},
            "found 'mine'. A file that registers a loss is given by --models=FILE.py. In Python, ",
        ),
        ({"click": "squared"}, "task_losses.click: must be one of 'bce', .*kind 'binary'"),
        ({"price": {"name": "bce"}}, "task_losses.price: must be one of 'squared': found 'bce'"),
        ({"click": {"name": "focal", "gama": 1}}, "task_losses.click.gama: .*Did you mean .*gamma"),
        ({"click": {"label_smoothing": 1}}, "task_losses.click.label_smoothing: must be .*below 1"),
        ({"click": 3}, "task_losses.click: must be the name of a loss, or a dict"),
    ],
)
def test_an_invalid_entry_is_rejected_with_its_path(chosen, message):
    with pytest.raises(InputError, match=message):
        task_losses.select_losses(chosen, [CLICK, PRICE])


def test_a_loss_that_is_not_elementwise_is_rejected():
    function = task_losses.TaskLoss("mean", lambda outputs, labels: jnp.mean(outputs))
    with pytest.raises(
        InputError, match=r"'mean' must return one number per label.*\[2, 3\]: found shape \[\], f"
    ):
        function(jnp.asarray(OUTPUTS), jnp.asarray(LABELS))


@dataclasses.dataclass
class NotFrozen:
    """Settings that could change after compilation."""


@dataclasses.dataclass(frozen=True)
class Named:
    """A setting that an entry of the config cannot set."""

    name: str = "mine"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (NotFrozen, "must be a function or a frozen dataclass"),
        (lambda outputs, labels, *, miss: outputs, "miss must have a default"),
        (lambda outputs, labels, miss=2.0: outputs, r"miss must be a keyword .*Put `\*` before it"),
        (lambda outputs, labels, *, name="": outputs, "a setting must not be called 'name'"),
        (Named, "a setting must not be called 'name'"),
    ],
)
def test_a_loss_that_has_no_fixed_settings_is_rejected(code, message):
    with pytest.raises(InputError, match=message):
        task_losses.register("other")(code)
    assert "other" not in task_losses.names()
