import dataclasses

import examples
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from embeddings import HOT, make, random_grads, reference_row_optimizer
from sharded import (
    embedding_class,
    initial_tables,
    logical,
    lookup,
    new_tables,
    rows_by_table,
    squared_norm,
    update,
)

from jaxrank import mesh as meshes
from jaxrank.embedding import ROW_OPTIMIZERS, duplicates, init, make_row_optimizer
from jaxrank.embedding.backends.lazy import IndexedVectors
from jaxrank.embedding.backends.xla import RowLayout
from jaxrank.errors import InputError
from jaxrank.features import PAD, Ragged
from jaxrank.layout import layout

DIMS = [
    {"ta": 8, "tb": 8, "tc": 8},
    {"ta": 16, "tb": 6, "tc": 6},  # two stacks, one with a padded dimension
    {"ta": 1, "tb": 128, "tc": 160},
]


@pytest.mark.parametrize(
    ("dims", "devices", "replicas", "platform"),
    [
        (DIMS[1], 8, 2, "cpu"),
        (DIMS[2], 1, 1, "cpu"),
        ({"ta": 1, "tb": 160, "tc": 160}, 8, 2, "tpu"),
    ],
)
def test_lookup_and_sgd_update_equal_plain_loops_and_the_dense_step(
    dims, devices, replicas, platform
):
    embedding = make(dims, devices, replicas, platform=platform)
    tables = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 32)
    before = logical(embedding, tables)
    rows = {name: r for name, (r, _) in before.items()}
    expected = examples.lookup_vectors(rows, embedding.layout, batch)
    result, _ = lookup(embedding, tables, batch)
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, atol=1e-5), expected, result)
    grads = random_grads(embedding, batch)
    dense = examples.row_gradients(embedding.layout, batch, grads)
    after = logical(embedding, update(embedding, tables, batch, grads))
    for name, gradient in dense.items():
        np.testing.assert_allclose(after[name][0], rows[name] - 0.1 * gradient, atol=1e-5)


@pytest.mark.parametrize(
    ("devices", "platform", "hot"),
    [
        (1, "cpu", "split"),
        (8, "tpu", "hot"),
        (1, "gpu", "hot"),
        (1, "gpu-kernel", "split"),
    ],
)
def test_lists_that_are_added_up_without_weights_equal_plain_loops(devices, platform, hot):
    lists = (Ragged("la", "ta", "sum"), Ragged("lc", "tc", "sum"))
    schema = dataclasses.replace(examples.small_schema(), ragged=lists)
    lay = layout(schema, {"ta": 8, "tb": 8, "tc": 8}, HOT[hot])
    mesh, rooms = meshes.make_mesh(devices=devices), {"dim8": 0.5}
    embedding = embedding_class(platform)(
        lay, mesh, row_optimizer=make_row_optimizer("sgd"), room=rooms, init_std=1.0
    )
    tables, batch = new_tables(embedding), examples.random_batch(lay, 32)
    weights = batch.lists["dim8"].weights
    assert ((weights == 1) == (batch.lists["dim8"].ids != PAD)).all()
    before = logical(embedding, tables)["dim8"][0]
    expected = examples.lookup_vectors({"dim8": before}, lay, batch)
    result, _ = lookup(embedding, tables, batch)
    jax.tree.map(lambda e, f: np.testing.assert_allclose(f, e, atol=1e-5), expected, result)
    grads = random_grads(embedding, batch)
    gradient = examples.row_gradients(lay, batch, grads)["dim8"]
    after = logical(embedding, update(embedding, tables, batch, grads))["dim8"][0]
    np.testing.assert_allclose(after, before - 0.1 * gradient, atol=1e-5)


@pytest.mark.parametrize("dims", DIMS[::2])
def test_replicated_rows_start_the_same_however_many_are_made_at_a_time(dims, monkeypatch):
    result = []
    for at_once in (2**16, 128, 16):  # 50 rows per table. With 16 the last rows are drawn twice
        monkeypatch.setattr(init, "_AT_ONCE", at_once)
        embedding = make(dims, hot="whole")
        result.append(logical(embedding, initial_tables(embedding)))
    for other in result[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, result[0])


def test_adagrad_on_read_rows_equals_optax_on_the_whole_table_over_many_steps():
    embedding = make(row_optimizer="adagrad")
    tables = new_tables(embedding)
    optimizer = optax.adagrad(0.1, initial_accumulator_value=0.1, eps=1e-7)
    dense = {name: jnp.asarray(rows) for name, (rows, _) in logical(embedding, tables).items()}
    opt_state = optimizer.init(dense)
    for step in range(5):
        batch = examples.random_batch(embedding.layout, 16, seed=step)
        grads = random_grads(embedding, batch, seed=step)
        gradient = examples.row_gradients(embedding.layout, batch, grads)
        gradient = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), gradient)
        updates, opt_state = optimizer.update(gradient, opt_state)
        dense = optax.apply_updates(dense, updates)
        tables = update(embedding, tables, batch, grads, step=step)
    for name, (rows, _) in logical(embedding, tables).items():
        np.testing.assert_allclose(rows, dense[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "devices"), [("rowwise_adagrad", 1), ("lazy_adam", 8), ("ftrl", 1)]
)
def test_rule_equals_the_written_out_float64_rule_on_the_rows_read(name, devices):
    settings = {"ftrl": {"l1": 0.01, "l2": 0.02}}.get(name, {})
    embedding = make(
        devices=devices, row_optimizer=make_row_optimizer(name, **settings), init_std=0.1
    )
    lay = embedding.layout
    tables = new_tables(embedding, 3)
    expected = {
        n: (rows.astype(np.float64), {k: v.astype(np.float64) for k, v in slots.items()})
        for n, (rows, slots) in logical(embedding, tables).items()
    }
    for rows, slots in expected.values():
        if name == "ftrl":
            slots["s"] = np.zeros_like(rows)
    for step in range(4):
        batch = examples.random_batch(lay, 32, seed=step)
        grads = random_grads(embedding, batch, seed=step)
        dense = examples.row_gradients(lay, batch, grads)
        learning_rate = 0.1 / (step + 1)
        for stack, gradient in dense.items():
            rows, slots = expected[stack]
            for r in np.flatnonzero(np.abs(gradient).sum(axis=1)):
                local = {k: v[r] for k, v in slots.items()}
                rows[r], new = reference_row_optimizer(
                    name, rows[r], local, gradient[r], learning_rate, step
                )
                for k, v in new.items():
                    slots[k][r] = v
        tables = update(embedding, tables, batch, grads, learning_rate=learning_rate, step=step)
    for stack, (rows, slots) in logical(embedding, tables).items():
        np.testing.assert_allclose(rows, expected[stack][0], rtol=1e-4, atol=2e-6)
        for k, v in slots.items():
            scale = np.abs(expected[stack][1][k]).max()
            np.testing.assert_allclose(v, expected[stack][1][k], rtol=1e-4, atol=1e-6 * scale)


def test_ftrl_keeps_its_random_start_when_the_gradient_is_tiny():
    embedding = make(row_optimizer="ftrl")
    tables = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 16)
    grads = jax.tree.map(lambda g: g * 1e-6, random_grads(embedding, batch))
    after = update(embedding, tables, batch, grads)
    np.testing.assert_allclose(after["dim8"].rows, tables["dim8"].rows, atol=1e-5)


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
def test_what_has_no_gradient_stays_where_nothing_is_added_to_its_sum(name):
    """Without initial value and eps the root of the sum is 0. Equals optax."""
    embedding = make(row_optimizer=make_row_optimizer(name, initial_accumulator=0.0, eps=0.0))
    tables = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 16)
    grads = random_grads(embedding, batch)
    for g in jax.tree.leaves(grads):  # some columns and some examples have zeros
        g[..., 3:] = 0
        g[8:] = 0
    gradient = examples.row_gradients(embedding.layout, batch, grads)["dim8"]
    before = logical(embedding, tables)["dim8"][0]
    after = logical(embedding, update(embedding, tables, batch, grads))["dim8"][0]
    moved = gradient != 0
    assert moved.any()
    np.testing.assert_array_equal(after[~moved], before[~moved])
    assert (after[moved] != before[moved]).all()


def test_the_penalty_of_proximal_adagrad_does_not_depend_on_how_often_a_row_is_read():
    """A row that is read every fourth step ends near one of a quarter of the gradient each step."""
    row_optimizer = make_row_optimizer("proximal_adagrad", l2=0.1)
    result = {}
    for every in (1, 4):
        rows = np.zeros((1, 1), np.float32)
        slots = {"accumulator": np.zeros((1, 1), np.float32), "read_at": np.zeros(1, np.float32)}
        change_of = jax.jit(row_optimizer.change)
        for step in range(0, 400, every):
            read = step + every - 1  # the last of these steps
            gradient = np.float32(every) * (rows - 1)
            change, changes = change_of(rows, slots, gradient, 0.3, np.int32(read))
            rows = rows + change
            slots = {name: slots[name] + changes[name] for name in slots}
        assert slots["read_at"] == 400
        result[every] = float(rows[0, 0])
    optimum = 1 / 1.1  # of (w - 1)^2 / 2 + 0.1 w^2 / 2
    assert result == {1: pytest.approx(optimum, abs=5e-3), 4: pytest.approx(optimum, abs=5e-3)}


def test_ftrl_without_regularisation_follows_any_rate():
    """Each change is -g / s.

    Without regard to the schedule, the whole row would be rescaled, and a rate that rises from
    nearly 0, such as a warm-up, would move rows at random.
    """
    change_of = jax.jit(make_row_optimizer("ftrl").change)
    rows, slots = np.float32([[0.5]]), {k: np.zeros((1, 1), np.float32) for k in ("n", "z")}
    of_steps = [(0.5, 2.0, 4.0), (0.05, 1.0, 5.0), (1e-8, 2.0, 9.0), (0.2, -1.0, 10.0)]
    for learning_rate, gradient, squares in of_steps:
        change, slot_changes = change_of(rows, slots, np.float32([[gradient]]), learning_rate, 0)
        expected = -gradient * learning_rate / (1 + squares**0.5)
        np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-7)
        rows = rows + change
        slots = {k: v + slot_changes[k] for k, v in slots.items()}


@pytest.mark.parametrize("name", sorted(ROW_OPTIMIZERS))
def test_rows_that_are_not_read_and_all_rows_at_a_rate_of_zero_do_not_change(name):
    embedding = make(row_optimizer=name, l2=0.1)
    tables = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 16)
    grads = random_grads(embedding, batch)
    untouched = ~examples.row_gradients(embedding.layout, batch, grads)["dim8"].any(axis=1)
    assert 0 < untouched.sum() < len(untouched)
    before = logical(embedding, tables)["dim8"]
    after = logical(embedding, update(embedding, tables, batch, grads))["dim8"]
    np.testing.assert_array_equal(after[0][untouched], before[0][untouched])
    assert (after[0][~untouched] != before[0][~untouched]).any(axis=1).all()
    unmoved = update(embedding, tables, batch, grads, learning_rate=0.0)
    np.testing.assert_array_equal(unmoved["dim8"].rows, tables["dim8"].rows)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(unmoved))


def test_pad_reads_zeros_and_changes_no_row():
    embedding = make(row_optimizer="adagrad", l2=0.1)
    tables = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 16)
    pad = jax.tree.map(lambda x: np.full_like(x, PAD), (batch.ids, batch.lists["dim8"].ids))
    batch = batch._replace(
        ids=pad[0],
        lists={
            "dim8": batch.lists["dim8"]._replace(
                ids=pad[1], segments=pad[1], weights=np.zeros_like(batch.lists["dim8"].weights)
            )
        },
    )
    result, _ = lookup(embedding, tables, batch)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(result))
    after = update(embedding, tables, batch, random_grads(embedding, batch))
    jax.tree.map(np.testing.assert_array_equal, after, tables)


def test_first_values_are_all_different():
    embedding = make()
    rows = rows_by_table(embedding, initial_tables(embedding))
    everything = np.concatenate([array.reshape(-1) for array in rows.values()])
    assert len(np.unique(everything)) == everything.size
    assert abs(everything.std() - 1) < 0.1


@pytest.mark.parametrize(("name", "platform"), [("adagrad", "cpu"), ("sgd", "tpu")])
def test_whole_table_l2_equals_the_dense_optimizer_with_weight_decay(name, platform):
    embedding = make(row_optimizer=name, devices=2, l2=0.3, l2_scope="table", platform=platform)
    dense_step = {"sgd": optax.sgd(0.1), "adagrad": optax.adagrad(0.1)}[name]
    tables = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 16)
    grads = random_grads(embedding, batch)
    rows = logical(embedding, tables)["dim8"][0]
    gradient = examples.row_gradients(embedding.layout, batch, grads)["dim8"] + 0.3 * rows
    change, _ = dense_step.update(jnp.asarray(gradient, jnp.float32), dense_step.init(rows))
    after = logical(embedding, update(embedding, tables, batch, grads))["dim8"][0]
    np.testing.assert_allclose(after, rows + change, atol=1e-5)


def test_clip_norm_bounds_the_summed_gradient_of_a_row():
    embedding = make(clip_norm=0.5)
    tables = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 16)
    grads = random_grads(embedding, batch)
    gradient = examples.row_gradients(embedding.layout, batch, grads)["dim8"]
    norm = np.linalg.norm(gradient, axis=1, keepdims=True)
    assert (norm > 0.5).any()
    assert ((norm > 0) & (norm < 20)).any()
    clipped = gradient * np.minimum(1, 0.5 / np.maximum(norm, 1e-12))
    before = logical(embedding, tables)["dim8"][0]
    after = logical(embedding, update(embedding, tables, batch, grads))["dim8"][0]
    np.testing.assert_allclose(after, before - 0.1 * clipped, atol=1e-5)


@pytest.mark.parametrize(
    ("hot", "devices", "replicas", "room", "platform"),
    [
        ("dealt", 8, 1, 0.05, "cpu"),
        ("hot", 8, 2, 0.05, "tpu"),
    ],
)
def test_the_norm_of_row_gradients_is_that_of_plain_loops(hot, devices, replicas, room, platform):
    embedding = make(DIMS[1], devices, replicas, hot=hot, room=room, platform=platform)
    batch = examples.random_batch(embedding.layout, 32)
    grads = random_grads(embedding, batch)
    rows = examples.row_gradients(embedding.layout, batch, grads)
    expected = sum(np.square(gradient).sum() for gradient in rows.values())
    assert float(squared_norm(embedding, batch, grads)) == pytest.approx(expected, rel=1e-5)


def test_sums_by_scratch_and_by_sort_equal_a_dictionary_of_sums():
    rng = np.random.default_rng(0)
    ids = np.where(rng.random(200) < 0.2, PAD, rng.integers(0, 40, 200)).astype(np.int32)
    grads = rng.normal(size=(200, 3)).astype(np.float32)
    expected: dict = {}
    for i, g in zip(ids, grads, strict=True):
        if i != PAD:
            expected[int(i)] = expected.get(int(i), 0) + g.astype(np.float64)
    dirty = jnp.asarray(rng.integers(0, 300, 40), jnp.int32)
    # The second half by index and scale, like the ids of lists.
    pieces = [
        IndexedVectors(100, jnp.asarray(grads[:100])),
        IndexedVectors(
            100, jnp.asarray(grads[:99:-1] / 2), jnp.arange(99, -1, -1), jnp.full(100, 2.0)
        ),
    ]
    vector_layout = RowLayout(3, 4)
    by_scratch = jax.jit(lambda: duplicates.sum_by_scratch(vector_layout, ids, pieces, dirty)[:2])
    by_sort = jax.jit(lambda: duplicates.sum_by_sort(vector_layout, ids, pieces))
    for unique, sums in jax.device_get((by_scratch(), by_sort())):
        count = len(expected)
        assert set(np.asarray(unique[:count]).tolist()) == set(expected)
        assert (np.asarray(unique[count:]) == PAD).all()
        for i, s in zip(np.asarray(unique[:count]), np.asarray(sums), strict=False):
            np.testing.assert_allclose(s, expected[int(i)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [4096, 4097, 600_000])
def test_counts_by_products_are_those_of_a_cumsum(size):
    count = jax.jit(duplicates.count_by_products)
    for share in (0.0, 0.5, 1.0):
        flags = np.random.default_rng(size).random(size) < share
        result = count(flags)
        assert result.dtype == jnp.int32
        np.testing.assert_array_equal(result, np.cumsum(flags))


def test_unknown_rule_and_unknown_setting_are_named():
    with pytest.raises(InputError, match="optim.tables.name: must .*'adam9'"):
        make_row_optimizer("adam9")
    with pytest.raises(InputError, match="optim.tables.settings.beta7: must be a field"):
        make_row_optimizer("sgd", beta7=1)
    with pytest.raises(InputError, match="settings.eps: must .* 0: found -5"):
        make_row_optimizer("adagrad", eps=-5)
    with pytest.raises(InputError, match=r"settings.b1: must be .* at most 0.99999: found 1"):
        make_row_optimizer("lazy_adam", b1=1)
    with pytest.raises(InputError, match="settings.eps: must .* 1e-37: found 0.*NaN"):
        make_row_optimizer("lazy_adam", eps=0.0)
