"""Tests learning rate multipliers of tables and parameters."""

import examples
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from embeddings import HOT, make, random_grads
from sharded import new_tables, rows_by_table, update

from jaxrank import optim
from jaxrank.embedding.rates import row_values
from jaxrank.errors import InputError
from jaxrank.features import PAD

RATES = {"ta": 0.5, "tc": 0.0}


def table_of_rows(stack, rows):
    """Lists the table of each row of a stack."""
    hot = list(stack.hot)
    result = {stack.hot_start + i: t for i, t in enumerate(hot)}
    for table, offset in enumerate(stack.offsets):
        alone = range(hot.count(table), rows[stack.tables[table]])
        result |= {offset + r: table for r in alone}
    return [stack.tables[result[r]] for r in range(stack.rows)]


@pytest.mark.parametrize("hot", HOT)
def test_each_row_has_the_factor_of_its_table(hot):
    lay = examples.small_layout(None, 50, HOT[hot])
    (stack,) = lay.stacks
    rows = {t.name: t.rows for t in lay.schema.tables}
    expected = [RATES.get(name, 1.0) for name in table_of_rows(stack, rows)]
    result = row_values(stack, RATES, 1.0).gather(jnp.arange(stack.rows))
    np.testing.assert_array_equal(result[:, 0], np.float32(expected))
    assert row_values(stack, {"ta": 1.0}, 1.0) is None


@pytest.mark.parametrize(
    ("row_optimizer", "devices", "replicas", "hot"),
    [
        ("sgd", 8, 2, "hot"),
        ("adagrad", 2, 1, "whole"),
        ("ftrl", 1, 1, "split"),
    ],
)
def test_the_rows_of_a_table_move_as_at_its_own_rate(row_optimizer, devices, replicas, hot):
    """Each table with a multiplier changes as in a run where all tables have its learning rate."""
    settings = dict(devices=devices, replicas=replicas, row_optimizer=row_optimizer, hot=hot)
    embedding = make(**settings, lr_multipliers=RATES)
    before = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 32)
    grads = random_grads(embedding, batch)
    moved = rows_by_table(embedding, update(embedding, before, batch, grads))
    for name in ("ta", "tb", "tc"):
        factor = RATES.get(name, 1.0)
        alike = make(**settings, lr_multipliers=dict.fromkeys(("ta", "tb", "tc"), factor))
        expected = rows_by_table(alike, update(alike, before, batch, grads))[name]
        np.testing.assert_allclose(moved[name], expected, atol=3e-7)
    start = rows_by_table(embedding, before)
    np.testing.assert_array_equal(moved["tc"], start["tc"])
    assert not np.array_equal(moved["ta"], start["ta"])


@pytest.mark.parametrize(
    ("row_optimizer", "devices", "hot", "scope"),
    [("sgd", 1, "split", "read"), ("rowwise_adagrad", 2, "hot", "table")],
)
def test_the_rows_of_a_table_move_as_with_its_own_l2(row_optimizer, devices, hot, scope):
    settings = dict(devices=devices, row_optimizer=row_optimizer, hot=hot, l2_scope=scope)
    embedding = make(**settings, l2=0.2, l2s={"ta": 0.5, "tc": 0.0})
    before = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 32)
    grads = random_grads(embedding, batch)
    moved = rows_by_table(embedding, update(embedding, before, batch, grads))
    for name, l2 in {"ta": 0.5, "tb": 0.2, "tc": 0.0}.items():
        alike = make(**settings, l2=l2)
        expected = rows_by_table(alike, update(alike, before, batch, grads))[name]
        np.testing.assert_allclose(moved[name], expected, atol=3e-7)


def test_half_the_rate_moves_rows_half_as_far_over_whole_tables_too():
    for scope in ("read", "table"):
        embedding = make(lr_multipliers={"ta": 0.5}, l2_scope=scope)
        plain = make(l2_scope=scope)
        tables = new_tables(plain)
        batch = examples.random_batch(plain.layout, 32)
        grads = random_grads(plain, batch)
        start = rows_by_table(plain, tables)["ta"]
        half = rows_by_table(embedding, update(embedding, tables, batch, grads))["ta"] - start
        whole = rows_by_table(plain, update(plain, tables, batch, grads))["ta"] - start
        np.testing.assert_allclose(2 * half, whole, atol=1e-6)


def test_the_row_at_a_place_is_the_inverse_of_its_position():
    embedding = make(rows=3000)
    (part,) = (s for s in embedding.storages if s.is_split)
    row = jnp.append(jnp.arange(3000, dtype=jnp.int32), PAD)
    np.testing.assert_array_equal(part.row(part.position(row)), row)


def optimizer(**settings):
    return optim.dense_optimizer(
        optim.AdamW(), learning_rate=lambda _: 0.1, clip_norm=0.0, weight_decay=0.1, **settings
    )


def test_dense_parameters_move_by_their_factor_and_at_zero_not_at_all():
    params = {"cross": {"kernel": jnp.ones(3)}, "tower": {"layer_0": {"bias": jnp.ones(2)}}}
    grads = jax.tree.map(lambda x: 0.5 * x, params)
    moved = {}
    for lr_multipliers in ({}, {"*": 0.25, "cross/*": 0.0}):
        row_optimizer = optimizer(lr_multipliers=lr_multipliers)
        updates, _ = row_optimizer.update(grads, row_optimizer.init(params), params)
        moved[len(lr_multipliers)] = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(moved[2]["cross"]["kernel"], params["cross"]["kernel"])
    whole = moved[0]["tower"]["layer_0"]["bias"] - 1
    assert (whole < 0).all()
    np.testing.assert_allclose(moved[2]["tower"]["layer_0"]["bias"] - 1, 0.25 * whole, rtol=1e-5)


def test_a_pattern_that_matches_no_parameter_names_those_that_are():
    row_optimizer = optimizer(lr_multipliers={"crss/*": 0.0})
    with pytest.raises(InputError, match=r"'crss/\*' must match a parameter: .*cross/kernel"):
        row_optimizer.init({"cross": {"kernel": jnp.ones(3)}})
