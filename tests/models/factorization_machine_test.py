import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rankers import apply_model

from jaxrank import models
from jaxrank.errors import InputError
from jaxrank.models import Inputs

TASKS, DIM, ROWS = 2, 5, 4
SCALES = {"a": 0.5, "b": 2.0, "s": 0.25}


def inputs(dims=(DIM, DIM)):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=(ROWS, *shape)).astype(np.float32)

    mask = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)
    return Inputs.from_arrays(
        {"x": normal(), "y": normal()},
        {"a": normal(dims[0]), "b": normal(2, dims[1])},
        {"s": (normal(3, DIM), mask)},
    )


def build(**fields):
    return models.build(tasks=TASKS, name="factorization_machine", **fields)


def random_params(model, params_input):
    params, _ = model.init(jax.random.key(0), params_input)
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=x.shape).astype(np.float32) for name, x in params.items()}


@pytest.mark.parametrize("units", [(), (0.1, 3.0)])
def test_logits_are_weights_and_products_of_all_pairs(units):
    arguments = inputs()
    model = build(scales=SCALES, cross_scale=0.3, task_scales=units)
    params = random_params(model, arguments)
    logits, _ = apply_model(model, params, {}, arguments, train=True)
    for row in range(ROWS):
        vectors, mask = arguments.sequences["s"]
        filled = [v for v, is_filled in zip(vectors[row], mask[row], strict=True) if is_filled]
        mean = np.mean(filled, axis=0) if filled else np.zeros(DIM)
        parts = [SCALES["a"] * arguments.vectors["a"][row]]
        parts += [SCALES["b"] * v for v in arguments.vectors["b"][row]]
        parts += [SCALES["s"] * mean]
        factors = [part[TASKS:] for part in parts]
        numbers = np.array([arguments.dense["x"][row], arguments.dense["y"][row]])
        factors += [x * u for x, u in zip(numbers, params["factors"], strict=True)]
        pairs = sum(a * b for a, b in itertools.combinations(factors, 2))
        effects = sum(part[:TASKS] for part in parts)
        effects = effects + numbers @ params["linear"] + 0.3 * pairs @ (1 + params["mix"])
        expected = params["bias"] + np.array(units or 1) * effects
        np.testing.assert_allclose(logits[row], expected, rtol=1e-4, atol=1e-5)


def test_a_table_of_as_many_numbers_as_tasks_is_a_linear_model():
    arguments = Inputs.from_arrays({}, {"a": jnp.ones((ROWS, TASKS))})
    params, _ = build().init(jax.random.key(0), arguments)
    assert set(params) == {"bias"}
    logits, _ = build(scales={"a": 3.0}).apply(params, {}, arguments, train=False)
    np.testing.assert_array_equal(logits, np.full((ROWS, TASKS), 3.0))


def test_a_factor_for_some_tasks_alone_is_rejected():
    with pytest.raises(InputError, match=r"task_scales: .* found \(0.5,\), 2 task"):
        build(task_scales=(0.5,)).init(jax.random.key(0), inputs())


@pytest.mark.parametrize(("dims", "shown"), [((DIM, 3), r"\[3, 5\]"), ((1, 1), r"\[1, 5\]")])
def test_tables_of_several_dimensions_are_rejected(dims, shown):
    with pytest.raises(InputError, match=f"found dimensions {shown}, 2 tasks"):
        build().init(jax.random.key(0), inputs(dims))
