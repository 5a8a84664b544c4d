"""Compares the exchange with a NumPy reference, with buffers of every size."""

import functools

import examples
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharded import embedding_class, logical, lookup, new_tables, rows_by_table, set_chunk, update

from jaxrank import mesh as meshes
from jaxrank.embedding import make_row_optimizer
from jaxrank.embedding.backends.xla import RowLayout
from jaxrank.features import PAD, Batch, Categorical, Dense, Lists, Ragged, Schema, Table, Task
from jaxrank.layout import ReplicatedRows, layout

DIM = 8


def one_table(rows, columns, *, replicated=0, dealt=0):
    """Makes a layout of one table that several id columns read."""
    schema = Schema(
        tasks=(Task("click"),),
        dense=(Dense("f"),),
        categorical=(Categorical("a", "t", length=columns),),
        ragged=(),
        tables=(Table("t", rows, "integer"),),
    )
    return layout(
        schema, {"t": DIM}, {"dim8": ReplicatedRows(hot_rows=("t",) * dealt, replicated=replicated)}
    )


def make_batch(ids):
    size = len(ids)
    ones = np.ones((size, 1), np.float32)
    nothing = np.zeros((size, 0), np.float32)
    return Batch(ones, {"dim8": ids}, {}, ones, ones, nothing.astype(np.int32), nothing)


@functools.cache
def make_embedding(lay, devices, replicas, room, row_optimizer="rowwise_adagrad", platform="cpu"):
    mesh = meshes.make_mesh(devices=devices, replicas=replicas)
    return embedding_class(platform)(
        lay,
        mesh,
        row_optimizer=make_row_optimizer(row_optimizer),
        init_std=1.0,
        room={"dim8": room},
    )


def draw(rng, kind, rows, shape):
    ids = {
        "uniform": lambda: rng.integers(0, rows, shape),
        "power law": lambda: np.minimum(rng.zipf(1.5, shape) - 1, rows - 1),
        "one row": lambda: np.full(shape, rng.integers(0, rows)),
        "edges": lambda: rng.choice([0, rows - 1], shape),
        "nothing": lambda: np.full(shape, PAD),
    }[kind]()
    return np.where(rng.random(shape) < 0.1, PAD, ids).astype(np.int32)


KINDS = ("uniform", "power law", "one row", "edges", "nothing")


# Devices, replicas, room, rows of the table, (replicated, other hot) rows, columns. There are few
# values, so that draws share compiled programs.
CASES = [
    (8, 1, 0.01, 5000, (0, 0), 5),
    (8, 2, 0.2, 5000, (17, 40), 5),
    (2, 2, 0.05, 1000, (0, 40), 5),
    (4, 1, 1.0, 2, (1, 1), 1),
    (8, 1, 1.0, 1, (1, 1), 3),
]


@pytest.mark.parametrize("case", CASES)
@given(seed=st.integers(0, 2**32 - 1), kind=st.sampled_from(KINDS))
@settings(max_examples=10, deadline=None)
def test_lookup_is_exact_and_update_is_the_dense_one(case, seed, kind):
    check(case, seed, kind, 32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "platform"),
    [
        (CASES[0], "gpu"),
        (CASES[2], "gpu-kernel"),
        (CASES[1], "tpu"),
        (CASES[3], "tpu"),
    ],
)
def test_the_ways_of_other_platforms_are_right(case, platform, kind, monkeypatch):
    set_chunk(monkeypatch, 64)
    if platform == "gpu":
        monkeypatch.setattr(RowLayout, "_set_rows", RowLayout._add_to_rows)
    check(case, 5, kind, 64, platform)


@pytest.mark.slow
@given(
    mesh=st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 8)]),
    room=st.floats(0.001, 1.0),
    rows=st.integers(1, 4000),
    hot=st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted),
    columns=st.integers(1, 7),
    share=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(KINDS),
)
@settings(max_examples=2, deadline=None)
def test_lookup_and_update_are_right_for_any_shape(
    mesh, room, rows, hot, columns, share, seed, kind
):
    check((*mesh, room, rows, hot, columns), seed, kind, share * mesh[0])


def check(case, seed, kind, size, platform="cpu"):
    """Compares lookup and update of a random batch of `size` examples with NumPy."""
    devices, replicas, room, rows, hot, columns = case
    dealt = min(rows, hot[1])
    lay = one_table(rows, columns, replicated=min(dealt, hot[0]), dealt=dealt)
    embedding = make_embedding(lay, devices, replicas, room, platform=platform)
    rng = np.random.default_rng(seed)
    batch = make_batch(draw(rng, kind, rows, (size, columns)))
    tables = new_tables(embedding, 1)
    before, slots = logical(embedding, tables)["dim8"]
    vectors, _ = lookup(embedding, tables, batch)
    expected = examples.lookup_vectors({"dim8": before}, lay, batch)["dim8"]["ids"]
    np.testing.assert_array_equal(vectors["dim8"]["ids"], expected)

    grads = {"dim8": {"ids": rng.normal(size=expected.shape).astype(np.float32)}}
    gradient = examples.row_gradients(lay, batch, grads)["dim8"]
    accumulator = slots["accumulator"] + np.mean(gradient**2, axis=1)
    change = -0.1 * gradient / np.sqrt(accumulator + 1e-7)[:, None]
    after, slots = logical(embedding, update(embedding, tables, batch, grads))["dim8"]
    np.testing.assert_allclose(after, before + change, atol=2e-6)
    np.testing.assert_allclose(slots["accumulator"], accumulator, rtol=1e-5)
    read = np.unique(batch.ids["dim8"][batch.ids["dim8"] != PAD])
    untouched = np.setdiff1d(np.arange(rows), read)
    np.testing.assert_array_equal(after[untouched], before[untouched])


def test_overflow_takes_rounds_and_changes_nothing_but_rounding():
    lay = one_table(20_000, 10)
    batch = make_batch(draw(np.random.default_rng(0), "uniform", 20_000, (256, 10)))
    grads = {"dim8": {"ids": np.random.default_rng(1).normal(size=(256, 10, DIM))}}
    grads = jax.tree.map(np.float32, grads)
    result = {}
    for room in (1.0, 0.05, 0.001):
        embedding = make_embedding(lay, 8, 1, room)
        tables = new_tables(embedding)
        vectors, exchange_stats = lookup(embedding, tables, batch)
        after = rows_by_table(embedding, update(embedding, tables, batch, grads))["t"]
        result[room] = np.asarray(vectors["dim8"]["ids"]), after, exchange_stats["dim8"]
    rounds = {
        room: np.unique(exchange_stats.rounds) for room, (_, _, exchange_stats) in result.items()
    }
    assert all(len(r) == 1 for r in rounds.values()), "devices must agree on the rounds"
    assert rounds[1.0] == 1
    assert rounds[0.05] == 4
    assert rounds[0.001] >= 9
    for room in (0.05, 0.001):
        np.testing.assert_array_equal(result[room][0], result[1.0][0])
        np.testing.assert_allclose(result[room][1], result[1.0][1], rtol=2e-7, atol=2e-7)
        for a, b in zip(result[room][2][1:], result[1.0][2][1:], strict=True):
            np.testing.assert_array_equal(a, b)


def test_loads_count_different_ids_asked_and_served():
    lay = one_table(3000, 4, replicated=10, dealt=10)
    embedding = make_embedding(lay, 8, 2, 0.3)
    batch = make_batch(draw(np.random.default_rng(3), "power law", 3000, (64, 4)))
    _, exchange_stats = lookup(embedding, new_tables(embedding), batch)
    shape = embedding.parts["dim8"].split
    served = np.zeros((2, 4), int)
    for device, ids in enumerate(np.split(batch.ids["dim8"], 8)):
        alone = np.unique(ids[(ids != PAD) & (ids >= 10)]) - 10
        assert exchange_stats["dim8"].unique[device] == len(alone)
        owners = np.asarray(shape.position(alone.astype(np.int32))) // (shape.rows // 4)
        served[device // 4] += np.bincount(owners, minlength=4)
    np.testing.assert_array_equal(exchange_stats["dim8"].served, served.reshape(-1))


def test_replicas_stay_equal_to_the_bit():
    lay = one_table(3000, 4, replicated=5, dealt=20)
    embedding = make_embedding(lay, 8, 4, 0.2, row_optimizer="lazy_adam")
    tables = new_tables(embedding)
    for step in range(3):
        rng = np.random.default_rng(step)
        batch = make_batch(draw(rng, "power law", 3000, (64, 4)))
        grads = {"dim8": {"ids": rng.normal(size=(64, 4, DIM)).astype(np.float32)}}
        tables = update(embedding, tables, batch, grads, step=step)
    for array in jax.tree.leaves(tables):
        copies = {}
        for shard in array.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        for first, *others in copies.values():
            assert others
            for other in others:
                np.testing.assert_array_equal(first, other)


def test_a_run_is_repeatable_to_the_bit_for_one_room():
    lay = one_table(3000, 4)
    results = []
    for _ in range(2):
        embedding = make_embedding(lay, 8, 1, 0.02)
        rng = np.random.default_rng(0)
        batch = make_batch(draw(rng, "power law", 3000, (64, 4)))
        grads = {"dim8": {"ids": rng.normal(size=(64, 4, DIM)).astype(np.float32)}}
        results.append(update(embedding, new_tables(embedding), batch, grads))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(
    ("combiner", "weighted"),
    [("sum", False), ("sqrtn", True), ("none", False)],
)
def test_lists_at_capacity_and_empty_ones_equal_plain_loops_on_eight_devices(combiner, weighted):
    length = 3 if combiner == "none" else 0
    schema = Schema(
        tasks=(Task("click"),),
        dense=(),
        categorical=(),
        ragged=(Ragged("l", "t", combiner, weighted, length),),
        tables=(Table("t", 90, "integer"),),
    )
    lay = layout(schema, {"t": DIM})
    batch = examples.random_batch(lay, 32, group=4, capacity=6, mean=3.0)
    if combiner != "none":
        assert (batch.lists["dim8"].ids != PAD).all(axis=1).any(), "a group must be full"
        lists = batch.lists["dim8"]
        lists.ids[3], lists.segments[3], lists.weights[3] = PAD, PAD, 0  # only empty lists
        batch = batch._replace(lists={"dim8": Lists(*lists)})
    embedding = make_embedding(lay, 8, 1, 0.2, row_optimizer="sgd")
    tables = new_tables(embedding)
    before = logical(embedding, tables)["dim8"][0]
    result, _ = lookup(embedding, tables, batch)
    expected = examples.lookup_vectors({"dim8": before}, lay, batch)
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, atol=1e-6), expected, result)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), expected)
    gradient = examples.row_gradients(lay, batch, grads)["dim8"]
    after = logical(embedding, update(embedding, tables, batch, grads))["dim8"][0]
    np.testing.assert_allclose(after, before - 0.1 * gradient, atol=1e-5)


# Rows of the replicated tables, and of the split one.
@pytest.mark.parametrize(
    (
        "whole",
        "by_rows",
        "split",
        "devices",
    ),  # by_rows: tables of `whole` that are not read by products
    [
        ((3, 128, 17, 1, 129), 1, 300, 1),
        ((33,), 1, 300, 4),
    ],
)
def test_tiny_tables_are_read_and_changed_by_products_as_by_rows(whole, by_rows, split, devices):
    rows = {f"w{i}": count for i, count in enumerate(whole)} | ({"s": split} if split else {})
    names = [*rows, *list(rows)[::-1]]  # two columns read each table
    schema = Schema(
        tasks=(Task("click"),),
        dense=(Dense("f"),),
        categorical=tuple(Categorical(f"{i}", name) for i, name in enumerate(names)),
        ragged=(),
        tables=tuple(Table(name, count, "integer") for name, count in rows.items()),
    )
    kept = tuple(name for name in rows if name != "s")
    lay = layout(schema, dict.fromkeys(rows, DIM), {"dim8": ReplicatedRows(replicated_tables=kept)})
    (stack,) = lay.stacks
    rng = np.random.default_rng(len(whole) + split)
    ids = np.stack([rng.integers(0, rows[name], 48) for name in names], axis=1)
    ids += np.array([stack.offsets[t] for t in stack.column_tables])
    ids = np.where(rng.random(ids.shape) < 0.1, PAD, ids).astype(np.int32)
    batch, result = make_batch(ids), {}
    grads = {"dim8": {"ids": rng.standard_normal((*ids.shape, DIM)).astype(np.float32)}}
    for platform in ("cpu", "tpu"):
        embedding = make_embedding(lay, devices, 1, 1.0, platform=platform)
        tables = new_tables(embedding)
        vectors, _ = lookup(embedding, tables, batch)
        after = rows_by_table(embedding, update(embedding, tables, batch, grads))
        result[platform] = np.asarray(vectors["dim8"]["ids"]), after
    assert embedding.one_hot["dim8"].num_others == 2 * (by_rows + (split > 0))
    np.testing.assert_array_equal(result["tpu"][0], result["cpu"][0])
    for name in rows:
        np.testing.assert_allclose(result["tpu"][1][name], result["cpu"][1][name], atol=1e-6)
