import examples
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank.embedding import logical_rows, storage
from jaxrank.embedding.storage import GROUPS, Storage, group, split_row
from jaxrank.errors import InputError
from jaxrank.features import PAD
from jaxrank.layout import ReplicatedRows


def split_storage(rows, dim=8):
    lay = examples.small_layout({"ta": dim, "tb": 300, "tc": 300}, rows=rows)
    return storage(next(s for s in lay.stacks if s.dim == dim)).split


@pytest.mark.parametrize("devices", [2, 8, 32, 128, 1024])
def test_each_run_of_n_rows_goes_to_n_devices(devices):
    rows = np.arange(64 * 1024, dtype=np.int32)
    owners = (group(rows).astype(np.int64) * devices // GROUPS).reshape(-1, devices)
    assert (np.sort(owners, axis=1) == np.arange(devices)).all()


def test_which_device_gets_the_first_row_of_a_run_differs_from_run_to_run():
    first = group(np.arange(0, 1024 * 1024, 8, dtype=np.int32)) // 128
    assert np.bincount(first, minlength=8).max() / np.bincount(first, minlength=8).mean() < 1.1


@pytest.mark.parametrize("stride", [2, 8, 128, 1024, 4096])
def test_rows_a_fixed_stride_apart_are_spread_over_the_devices(stride):
    rows = (np.arange(20_000, dtype=np.int64) * stride % (2**31 - 1)).astype(np.int32)
    served = np.bincount(group(rows) // 128, minlength=8)
    assert served.max() / served.mean() < 1.1


@given(st.lists(st.integers(0, 2**31 - 2), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_row_at_is_the_inverse_of_group_in_numpy_and_jax(rows):
    rows = np.array(rows, np.int32)
    result = group(rows)
    assert ((result >= 0) & (result < GROUPS)).all()
    assert (split_row(result, rows // GROUPS) == rows).all()
    np.testing.assert_array_equal(jax.jit(group)(rows), result)
    np.testing.assert_array_equal(jax.jit(split_row)(result, rows // GROUPS), rows)


def test_every_row_has_a_position_of_its_own():
    shape = split_storage(10_000)
    position = np.asarray(shape.position(jnp.arange(shape.rows, dtype=jnp.int32)))
    assert (np.sort(position) == np.arange(shape.rows)).all()


def test_positions_are_right_in_the_largest_table():
    shape = split_storage(2**31 - 3000, dim=128)
    assert shape.rows * shape.width > 2**37
    ids = np.array([0, 5, 2**31 - 3001, PAD], np.int32)
    per_group = shape.rows // 1024
    expected = [int(group(ids)[i]) * per_group + int(ids[i]) // 1024 for i in range(3)]
    assert np.asarray(shape.position(jnp.asarray(ids))).tolist() == [*expected, PAD]
    assert max(expected) < 2**31 - 1


@pytest.mark.parametrize("width", [1, 16, 64, 128, 512])
def test_lines_are_right_in_the_largest_table(width):
    position = np.int32([0, 2**16, 2**25 + 2**16, 2**31 - 2**16]) // (width // 128 or 1)
    expected = [int(p) * width // 128 for p in position]  # Python integers cannot overflow
    result = Storage("", width, width, 2**31 - 1, False).line(jnp.asarray(position))
    assert result.dtype == jnp.int32
    assert result.tolist() == expected


def test_too_many_rows_in_one_stack_are_rejected_with_the_number():
    lay = examples.small_layout({"ta": 16, "tb": 16, "tc": 16}, rows=2**31 - 10)
    with pytest.raises(InputError, match="2147483647 rows .*: found 2147483676"):
        storage(lay.stacks[0])


def test_logical_rows_are_the_replicated_ones_and_the_split_ones_behind_them():
    hot = {"dim8": ReplicatedRows(replicated_tables=("tb",), hot_rows=("ta", "tc"), replicated=1)}
    stack = examples.small_layout(hot=hot).stacks[0]
    parts = storage(stack)
    values = np.random.default_rng(0).normal(size=(stack.rows, 8)).astype(np.float32)
    replicated = np.zeros((parts.replicated.rows, 8), np.float32)
    replicated[: stack.replicated] = values[: stack.replicated]
    split = np.zeros((parts.split.rows, 8), np.float32)
    for row in range(stack.replicated, stack.rows):
        split[int(parts.split.position(jnp.int32(row - stack.replicated)))] = values[row]
    stored = {"dim8_replicated": replicated.reshape(-1, 128), "dim8": split.reshape(-1, 128)}
    np.testing.assert_array_equal(logical_rows(stored, stack), values)
