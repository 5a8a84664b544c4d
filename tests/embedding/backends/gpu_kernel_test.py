"""Tests the GPU kernel that sums vectors of sorted ids and changes rows, interpreted on CPU."""

import types

import examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embeddings import make, random_grads, reference_row_optimizer
from sharded import logical, new_tables, update

from jaxrank.embedding import make_row_optimizer
from jaxrank.embedding.backends import gpu_kernel
from jaxrank.features import PAD

COUNT, ROWS, RATE, STEP = 200, 300, 0.1, 3
CHUNK = 16  # small, so that pieces of runs leave pieces too
KINDS = ("a hot one", "all different", "all the same", "a few, often", "nothing")


def draw(kind, count=COUNT):
    """Draws i32[count], rising, with PAD behind the last."""
    rng = np.random.default_rng(count)
    keys = {
        "a hot one": lambda: [*rng.integers(0, ROWS, count // 5), *[150] * (count * 3 // 5)],
        "all different": lambda: rng.permutation(ROWS)[:count],
        "all the same": lambda: [7] * count,
        "a few, often": lambda: rng.integers(0, 9, count - 1),
        "nothing": lambda: [],
    }[kind]()
    return np.append(np.sort(keys), [PAD] * (count - len(keys))).astype(np.int32)


def case(key, dim, *, has_index=True, is_rate_per_id=False):
    """Makes the fields of `KernelInputs`. All sums are exact in float32, in any order.

    Behind the last key lies NaN, which no program may read into a row.
    """
    rng = np.random.default_rng(dim)
    count = len(key)
    local_rows = rng.permutation(ROWS).astype(np.int32)
    inputs = dict(key=key, local_row=np.where(key == PAD, 0, local_rows[np.minimum(key, ROWS - 1)]))
    source = rng.integers(-9, 10, (150 if has_index else count, dim)) / np.float32(8)
    inputs["sources"] = (source,)
    if has_index:
        inputs["sources"] = (source[:40], source[40:])
        index = np.where(rng.random(count) < 0.1, PAD, rng.integers(0, 150, count))
        inputs["index"] = index.astype(np.int32)
        scale = rng.choice(np.float32([0.5, 1, 2]), count)
        inputs["scale"] = np.where(key == PAD, np.float32(np.nan), scale)
    rates = np.where(key == PAD, np.float32(np.nan), RATE * np.float32(1 + key % 3))
    inputs["learning_rate"] = rates if is_rate_per_id else np.float32(RATE)
    inputs["scalars"] = (np.int32(STEP),)
    return inputs


def compute_sums(inputs):
    """Computes the sum f64[dim] of each key, with its local row and learning rate."""
    result = {}
    for i, key in enumerate(inputs["key"]):
        if key == PAD:
            continue
        at = inputs["index"][i] if "index" in inputs else i
        scale = inputs["scale"][i] if "scale" in inputs else 1.0
        vector = np.zeros(inputs["sources"][0].shape[1])
        if at != PAD:
            vector += np.concatenate(inputs["sources"]).astype(np.float64)[at] * scale
        before = result[key][0] if key in result else 0.0
        learning_rate = np.broadcast_to(inputs["learning_rate"], len(inputs["key"]))[i]
        result[key] = before + vector, inputs["local_row"][i], learning_rate
    return result.values()


def program(change, chunk=CHUNK):
    @jax.jit
    def run(arrays, inputs):
        inputs = gpu_kernel.KernelInputs(**inputs)
        return gpu_kernel.change_rows(arrays, inputs, change, chunk=chunk, interpret=True)

    return run


def rule_and_arrays(name, dim):
    """Makes a change function of an optimizer, and arrays (rows, slots) for it."""
    row_optimizer = make_row_optimizer(name, **{"ftrl": {"l1": 0.01, "l2": 0.02}}.get(name, {}))
    slots = {
        slot: np.full((ROWS, dim) if is_wide else ROWS, first, np.float32)
        for slot, (is_wide, first) in row_optimizer.slots.items()
    }
    rows = np.random.default_rng(0).normal(size=(ROWS, dim)).astype(np.float32)

    def change(stored, sums, learning_rate, step):
        return row_optimizer.change(*stored, sums, learning_rate, step)

    return change, (rows, slots)


def updated_row(name, row, slots, gradient, learning_rate):
    if name == "sgd":
        return row - learning_rate * gradient, {}
    if name == "adagrad":
        total = slots["accumulator"] + gradient**2
        return row - learning_rate * gradient / np.sqrt(total + 1e-7), {"accumulator": total}
    after, new = reference_row_optimizer(name, row, dict(slots), gradient, learning_rate, STEP)
    if name == "ftrl":  # rows without gradients do not change
        after = np.where(gradient == 0, row, after)
        new = {slot: np.where(gradient == 0, slots[slot], array) for slot, array in new.items()}
    return after, new


@pytest.mark.parametrize(
    ("name", "dim", "is_rate_per_id", "has_index"),
    [
        ("rowwise_adagrad", 1, False, True),
        ("adagrad", 16, True, False),
        ("lazy_adam", 256, True, True),
        ("ftrl", 128, False, True),
    ],
)
def test_rows_follow_the_written_out_rule_and_others_keep_their_bits(
    name, dim, is_rate_per_id, has_index
):
    change, (rows, slots) = rule_and_arrays(name, dim)
    run = program(change)
    for kind in KINDS:
        inputs = case(draw(kind), dim, has_index=has_index, is_rate_per_id=is_rate_per_id)
        after, slots_after = jax.device_get(run((rows, slots), inputs))
        unread = np.ones(ROWS, bool)
        for gradient, local_row, learning_rate in compute_sums(inputs):
            unread[local_row] = False
            local = {slot: np.float64(array[local_row]) for slot, array in slots.items()}
            local |= {"s": np.zeros(dim)} if name == "ftrl" else {}
            row, new = updated_row(
                name, np.float64(rows[local_row]), local, gradient, learning_rate
            )
            np.testing.assert_allclose(after[local_row], row, rtol=1e-5, atol=3e-6)
            for slot, array in slots_after.items():
                np.testing.assert_allclose(array[local_row], new[slot], rtol=1e-5, atol=1e-6)
        assert unread.sum() >= ROWS - COUNT
        np.testing.assert_array_equal(after[unread], rows[unread])
        for slot, array in slots_after.items():
            np.testing.assert_array_equal(array[unread], slots[slot][unread])


@pytest.mark.parametrize(("count", "dim"), [(1, 8), (64, 128), (65, 8)])
def test_each_row_changes_once_for_any_number_of_ids_around_that_of_a_chunk(count, dim):
    def change(stored, sums, learning_rate, step):
        return sums, jnp.ones_like(stored[1])  # the rows, and the number of changes of each

    run = program(change, chunk=64)
    for kind in KINDS:
        inputs = case(draw(kind, count), dim)
        result = run((jnp.zeros((ROWS, dim)), jnp.zeros(ROWS)), inputs)
        sums, counts = np.zeros((ROWS, dim)), np.zeros(ROWS)
        for gradient, local_row, _ in compute_sums(inputs):
            sums[local_row], counts[local_row] = gradient, 1
        jax.tree.map(np.testing.assert_array_equal, result, (sums, counts))


def test_without_any_ids_nothing_changes():
    rows = jnp.ones((3, 8))
    inputs = case(np.zeros(0, np.int32), 8)
    assert (
        program(lambda stored, sums, learning_rate, step: sums)(rows, inputs).tolist()
        == rows.tolist()
    )


def test_bits_repeat_and_do_not_depend_on_what_lies_behind_the_last_id():
    """Chunks lie side by side, so that rows and rates are loaded where no run ends, too."""
    dim = 8
    change, arrays = rule_and_arrays("rowwise_adagrad", dim)
    run = program(change)
    rng = np.random.default_rng(0)
    inputs = case(draw("a hot one"), dim, is_rate_per_id=True)
    inputs["sources"] = tuple(rng.normal(size=(n, dim)).astype(np.float32) for n in (40, 110))
    inputs["sources"][0][9] = np.nan
    is_id = inputs["key"] != PAD
    inputs["index"] = np.where(is_id & (inputs["index"] == 9), 8, inputs["index"])
    first = run(arrays, inputs)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(first))
    after_end = dict(local_row=5, index=9, scale=np.nan, learning_rate=np.nan)
    other = inputs | {
        name: np.where(is_id, inputs[name], value).astype(inputs[name].dtype)
        for name, value in after_end.items()
    }
    for again in (inputs, other):
        jax.tree.map(np.testing.assert_array_equal, run(arrays, again), first)


# Placement, optimizer and devices as in embedding_test.py. "hot" also has replicated rows.
@pytest.mark.parametrize(
    ("row_optimizer", "settings"),
    [
        ("adagrad", dict(l2=0.1, clip_norm=0.5, lr_multipliers={"ta": 0.5, "tc": 0.0})),
        ("rowwise_adagrad", dict(dims={"ta": 1, "tb": 128, "tc": 6})),  # XLA handles 6
        ("ftrl", dict(devices=4, replicas=2, hot="hot", clip_norm=0.5)),
        ("adagrad", dict(l2=0.1, l2_scope="table")),
    ],
)
def test_tables_change_as_without_the_kernel(row_optimizer, settings):
    result = []
    for platform in ("cpu", "gpu-kernel"):
        embedding = make(row_optimizer=row_optimizer, platform=platform, **settings)
        tables = new_tables(embedding)
        batch = examples.random_batch(embedding.layout, 16)
        grads = random_grads(embedding, batch)
        after = update(embedding, tables, batch, grads)
        result.append((logical(embedding, after), logical(embedding, tables)))
    (plain, before), (ours, _) = result
    for stack, (rows, slots) in ours.items():
        np.testing.assert_allclose(rows, plain[stack][0], rtol=1e-5, atol=1e-6)
        for slot, array in slots.items():
            np.testing.assert_allclose(array, plain[stack][1][slot], rtol=1e-5, atol=1e-6)
        stays = (plain[stack][0] == before[stack][0]).all(axis=1)
        assert not stays.all()
        np.testing.assert_array_equal(rows[stays], before[stack][0][stays])


def test_a_step_that_does_not_apply_keeps_all_bits():
    embedding = make(row_optimizer="lazy_adam", platform="gpu-kernel", l2=0.1)
    tables = new_tables(embedding)
    batch = examples.random_batch(embedding.layout, 16)
    grads = random_grads(embedding, batch)
    tables = jax.tree.map(np.asarray, update(embedding, tables, batch, grads, applies=True))
    wrong = jax.tree.map(lambda g: np.full_like(g, np.nan), grads)
    kept = update(embedding, tables, batch, wrong, applies=False)
    jax.tree.map(np.testing.assert_array_equal, kept, tables)
    moved = update(embedding, tables, batch, grads, applies=True)
    assert (moved["dim8"].rows != tables["dim8"].rows).any()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("9.0", True),
        ("8.0", True),
        ("12.1", True),
        ("7.5", False),
        ("gfx942", False),
        (None, False),
    ],
)
def test_the_kernel_is_for_gpus_that_xla_has_triton_for(capability, expected):
    lines = {"compute_capability": capability} if capability else {}
    assert gpu_kernel.is_here(types.SimpleNamespace(**lines)) == expected


def test_without_triton_there_is_no_kernel(monkeypatch):
    monkeypatch.setattr(gpu_kernel, "_has_triton", lambda: False)
    assert not gpu_kernel.is_here(types.SimpleNamespace(compute_capability="9.0"))


def test_no_rows_are_taken_for_no_ids():
    result = gpu_kernel.take(jnp.ones((8, 16)), jnp.zeros(0, jnp.int32), interpret=True)
    assert result.shape == (0, 16)
