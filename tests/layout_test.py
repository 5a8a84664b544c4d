"""Compares the maps between rows of tables and of their stack with an explicit list of rows."""

import numpy as np
from examples import rows_in_order, small_layout
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank.features import PAD, Schema, Table
from jaxrank.layout import ReplicatedRows, ToStack, ToTables, layout, stack_name


@st.composite
def placements(draw):
    """Tables in stacks: rows and dimension by table, and hot rows by stack.

    Of some tables no row is hot, of some every row.
    """
    rows = {f"t{i}": n for i, n in enumerate(draw(st.lists(st.integers(1, 9), min_size=1)))}
    dims = {name: draw(st.sampled_from([8, 16])) for name in rows}
    hot = {}
    for dim in set(dims.values()):
        tables = [name for name in rows if dims[name] == dim]
        whole = draw(st.sets(st.sampled_from(tables)))
        merged = [
            name
            for name in tables
            if name not in whole
            for _ in range(draw(st.sampled_from([0, rows[name], rows[name] // 2])))
        ]
        merged = tuple(draw(st.permutations(merged)))
        hot[stack_name(dim)] = ReplicatedRows(tuple(whole), merged, len(merged) // 2)
    return rows, dims, hot


@given(placements())
@settings(max_examples=200, deadline=None)
def test_rows_of_tables_and_of_their_stack_are_those_that_counting_finds(placement):
    rows, dims, hot = placement
    tables = tuple(Table(name, count, "integer") for name, count in rows.items())
    schema = Schema(tasks=(), dense=(), categorical=(), ragged=(), tables=tables)
    for stack in layout(schema, dims, hot).stacks:
        expected = rows_in_order({name: rows[name] for name in stack.tables}, hot[stack.name])
        assert len(expected) == stack.rows
        of_stack = np.arange(stack.rows, dtype=np.int32)
        table = np.array([stack.tables.index(name) for name, _ in expected])
        alone = np.array([row for _, row in expected], np.int32)

        result = ToStack.from_stack(stack)(alone, table)
        assert result.dtype == np.int32
        np.testing.assert_array_equal(result, of_stack)
        for kind in (np.int32, np.int64):
            found_table, found_own = ToTables.from_stack(stack)(of_stack.astype(kind))
            assert (found_table.dtype, found_own.dtype) == (np.int32, kind)
            np.testing.assert_array_equal(found_table, table)
            np.testing.assert_array_equal(found_own, alone)


def test_pad_stays_pad_and_tables_may_be_one_a_column_or_one_for_all():
    hot = ReplicatedRows(replicated_tables=("tb",), hot_rows=("tc", "ta", "ta"), replicated=1)
    (stack,) = small_layout(hot={"dim8": hot}).stacks  # 7 rows of tb, 3 hot, 48 of ta, 30 of tc
    to_stack = ToStack.from_stack(stack)
    rows = np.int32([[0, PAD, 0], [PAD, 6, 1], [49, PAD, PAD]])
    result = to_stack(rows, np.arange(3))
    assert result.tolist() == [[8, PAD, 7], [PAD, 6, 58], [57, PAD, PAD]]
    np.testing.assert_array_equal(to_stack(rows[:, 0], 0), result[:, 0])
