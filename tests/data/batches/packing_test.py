"""Packing of ragged lists, and mapping of table rows to stack rows, against plain Python loops."""

import dataclasses
import pickle

import numpy as np
import pytest
from examples import stack_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank.data.batches import packing
from jaxrank.data.batches.batcher import Batcher
from jaxrank.data.batches.packing import Packer
from jaxrank.data.batches.stack_rows import StackRows
from jaxrank.data.examples import Examples
from jaxrank.errors import InputError
from jaxrank.features import PAD, Categorical, Ragged, Schema, Table, Task
from jaxrank.layout import ReplicatedRows, layout

_LISTS = (
    Ragged("clicked", "items", "mean", weighted=True),
    Ragged("words", "words", "sum"),
    Ragged("bought", "items", "sqrtn"),
    Ragged("tags", "tags", "sqrtn", weighted=True),
)
_TABLES = (
    Table("words", 100, "integer"),
    Table("items", 200, "integer"),
    Table("tags", 300, "integer"),
)


def _layout(lists=_LISTS, dims=(8, 16, 16), hot=None):
    schema = Schema(tasks=(), dense=(), categorical=(), ragged=tuple(lists), tables=_TABLES)
    return layout(schema, dict(zip(("words", "items", "tags"), dims, strict=True)), hot)


def _hot(random, tables, rows):
    """Returns any number of hot rows per table, from none to all, possibly all rows of a table."""
    whole = tuple(t for t in tables if random.random() < 0.3)
    most = {t: random.choice([0, 1, rows[t] // 2, rows[t]]) for t in tables if t not in whole}
    merged = random.permutation(np.repeat(list(most), list(most.values())).astype(object))
    return ReplicatedRows(
        replicated_tables=whole, hot_rows=tuple(map(str, merged)), replicated=len(merged) // 2
    )


def _examples(random, n, lists, longest=5):
    """Returns lists of `n` examples. Weights are as in a store, 1 in unweighted lists."""
    lengths = random.integers(0, longest + 1, (n, len(lists))).astype(np.int32)
    values = random.integers(0, 100, lengths.sum()).astype(np.int32)
    values[random.random(len(values)) < 0.1] = PAD
    weights = None
    if any(f.weighted for f in lists):
        alone = np.repeat(np.tile([f.weighted for f in lists], n), lengths.reshape(-1))
        weights = np.where(
            alone, random.choice(np.float32([0, 0.5, 1, 3]), len(alone)), np.float32(1)
        )
    return lengths, values, weights


def _unpack(lengths, values, weights):
    """Returns [example][list] -> (ids, weights), by reading the values one at a time."""
    place, result = 0, []
    for row in lengths:
        result.append([])
        for count in row:
            ids = [int(v) for v in values[place : place + count]]
            alone = (
                [1.0] * count if weights is None else [float(w) for w in weights[place:][:count]]
            )
            result[-1].append((ids, alone))
            place += count
    return result


def _cut_longest_first(lists, room):
    """Drops the last id of the longest list (the last of equally long ones) until all fits."""
    sizes = [len(ids) for ids, _ in lists]
    while sum(sizes) > room:
        longest = max(sizes)
        sizes[max(i for i, s in enumerate(sizes) if s == longest)] -= 1
    return [(ids[:size], alone[:size]) for (ids, alone), size in zip(lists, sizes, strict=True)]


def _reference(lay, lengths, values, weights, group, capacities):
    """Computes the expected result of `pack`, example by example and id by id."""
    walked = _unpack(lengths, values, weights)
    dropped = np.zeros((len(lengths) // group, lengths.shape[1]), np.int32)
    packed = {}
    for stack in lay.stacks:
        if not stack.lists:
            continue
        room = capacities[stack.name]
        ids = np.full((len(dropped), room), PAD, np.int32)
        segments = np.full((len(dropped), room), PAD, np.int32)
        factors = np.zeros((len(dropped), room), np.float32)
        for g in range(len(dropped)):
            rows = walked[g * group : (g + 1) * group]
            before = [row[i] for row in rows for i in stack.lists]
            after = _cut_longest_first(before, room)
            place = 0
            for segment, ((kept, alone), (all_ids, _)) in enumerate(
                zip(after, before, strict=True)
            ):
                index = segment % len(stack.lists)
                feature = lay.schema.ragged[stack.lists[index]]
                dropped[g, stack.lists[index]] += len(all_ids) - len(kept)
                alone = alone if feature.weighted else [1.0] * len(kept)
                norm = {
                    "sum": 1.0,
                    "mean": sum(alone),
                    "sqrtn": sum(w * w for w in alone) ** 0.5,
                }[feature.combiner]
                table = stack.tables[stack.list_tables[index]]
                for value, weight in zip(kept, alone, strict=True):
                    ids[g, place] = PAD if value == PAD else stack_rows(stack, table, [value])[0]
                    segments[g, place] = segment
                    factors[g, place] = weight / norm if norm else 0
                    place += 1
        packed[stack.name] = (ids, segments, factors)
    return packed, dropped


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    group=st.sampled_from([1, 2, 4]),
    groups=st.integers(1, 3),
    dims=st.sampled_from([(8, 16, 16), (16, 16, 16), (8, 16, 32)]),
    weighted=st.booleans(),
    room=st.sampled_from([0, 1, 7, 20, 128]),
    combiner=st.sampled_from([None, "sum", "sqrtn"]),
    any_hot=st.booleans(),
)
def test_packing_equals_a_loop_over_ids(
    seed, group, groups, dims, weighted, room, combiner, any_hot
):
    lists = _LISTS
    if combiner:
        lists = [dataclasses.replace(f, combiner=combiner) for f in lists]
    if not weighted:
        lists = [dataclasses.replace(f, weighted=False) for f in lists]
    random = np.random.default_rng(seed)
    lay = _layout(lists, dims)
    if any_hot:
        rows = {t.name: t.rows for t in _TABLES}
        lay = _layout(lists, dims, {s.name: _hot(random, s.tables, rows) for s in lay.stacks})
    lengths, values, weights = _examples(random, group * groups, lists)
    capacities = {stack.name: room for stack in lay.stacks}
    packed, dropped = Packer(lay, group, capacities, "truncate")(lengths, values, weights)
    expected, expected_dropped = _reference(lay, lengths, values, weights, group, capacities)
    assert set(packed) == set(expected)
    for name, (ids, segments, factors) in expected.items():
        np.testing.assert_array_equal(packed[name].ids, ids)
        np.testing.assert_array_equal(packed[name].segments, segments)
        np.testing.assert_allclose(packed[name].weights, factors, rtol=1e-6)
        assert packed[name].ids.dtype == packed[name].segments.dtype == np.int32
        assert packed[name].weights.dtype == np.float32
    np.testing.assert_array_equal(dropped, expected_dropped)
    assert dropped.dtype == np.int32


def test_truncation_cuts_the_longest_list_first():
    lay = _layout(_LISTS[1:2])
    lengths = np.int32([[5], [2], [4], [3]])
    values = np.arange(14, dtype=np.int32)
    packed, dropped = Packer(lay, 4, {"dim8": 11}, "truncate")(lengths, values, None)
    assert packed["dim8"].segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3]]
    assert packed["dim8"].ids.tolist() == [[0, 1, 2, 5, 6, 7, 8, 9, 11, 12, 13]]
    assert dropped.tolist() == [[3]]


def test_overflow_stops_with_the_features_and_the_numbers():
    lay = _layout(_LISTS[1:3], dims=(8, 8, 8))
    lengths = np.int32([[1, 0], [0, 1], [3, 90], [7, 60]])
    values = np.zeros(lengths.sum(), np.int32)
    with pytest.raises(InputError) as error:
        Packer(lay, 2, {"dim8": 128})(lengths, values, None)
    message = str(error.value)
    assert "stack dim8" in message
    assert "2 examples packed together have 160 ids and there is room for 128" in message
    assert "Longest: bought (150 ids), words (10 ids)" in message
    assert "start it again if the data has changed" in message


def test_a_group_that_fills_the_capacity_exactly_fits():
    lay = _layout(_LISTS[1:2])
    lengths = np.int32([[60], [68]])
    values = np.arange(128, dtype=np.int32) % 100
    packed, dropped = Packer(lay, 2, {"dim8": 128})(lengths, values, None)
    assert packed["dim8"].ids[0].tolist() == values.tolist()
    assert not dropped.any()


def _sequence_schema(rows=(100, 40, 7)):
    """Returns a schema whose table `a` is used by a column, a list and a sequence."""
    tables = tuple(Table(n, r, "integer") for n, r in zip("abc", rows, strict=True))
    return Schema(
        tasks=(Task("click"),),
        dense=(),
        categorical=(Categorical("i", "a"), Categorical("j", "b", 2), Categorical("k", "c")),
        ragged=(
            Ragged("combined", "a", "mean"),
            Ragged("history", "a", "none", length=5),
            Ragged("others", "b", "none", length=3),
            Ragged("last", "c", "none", length=1),
        ),
        tables=tables,
    )


def _drawn(random, schema, n, missing=0.2):
    """Returns examples with all kinds of ids: first and last row of a table, PAD, empty lists."""
    rows = {t.name: t.rows for t in schema.tables}

    def ids(table, count):
        values = random.integers(0, rows[table], count).astype(np.int32)
        edges = random.random(count) < 0.3
        values[edges] = random.choice([0, rows[table] - 1], edges.sum())
        return values

    columns = [ids(f.table, n) for f in schema.id_columns]
    matrix = np.stack(columns, axis=1)
    matrix[random.random(matrix.shape) < missing] = PAD
    lengths = np.stack([random.integers(0, (f.length or 6) + 1, n) for f in schema.ragged], axis=1)
    parts = [ids(f.table, c) for row in lengths for f, c in zip(schema.ragged, row, strict=True)]
    return Examples(
        dense=np.zeros((n, 0), np.float32),
        ids=matrix,
        list_lengths=lengths.astype(np.int32),
        list_values=np.concatenate(parts),
        list_weights=None,
        labels=np.zeros((n, 1), np.float32),
    )


def _places(schema, stack, examples):
    """Computes the expected `Batch.ids`, id by id."""
    columns = [f.table for f in schema.id_columns]
    walked = _unpack(examples.list_lengths, examples.list_values, None)
    rows = []
    for row, lists in zip(examples.ids, walked, strict=True):
        result = [(columns[i], int(row[i])) for i in stack.columns]
        for i in stack.sequences:
            values = lists[i][0]
            values = values + [int(PAD)] * (schema.ragged[i].length - len(values))
            result += [(schema.ragged[i].table, value) for value in values]
        rows.append([v if v == PAD else stack_rows(stack, t, [v])[0] for t, v in result])
    return np.array(rows, np.int32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    n=st.sampled_from([1, 7, 8, 64, 96]),
    dims=st.sampled_from([(8, 8, 8), (8, 16, 16), (8, 16, 8)]),
    any_hot=st.booleans(),
    missing=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_ids_and_sequences_equal_a_loop_over_ids(seed, n, dims, any_hot, missing):
    random = np.random.default_rng(seed)
    schema = _sequence_schema()
    dim_of = dict(zip("abc", dims, strict=True))
    lay = layout(schema, dim_of)
    if any_hot:
        rows = {t.name: t.rows for t in schema.tables}
        lay = layout(schema, dim_of, {s.name: _hot(random, s.tables, rows) for s in lay.stacks})
    examples = _drawn(random, schema, n, missing)
    batcher = pickle.loads(pickle.dumps(Batcher(lay, n, {s.name: 1024 for s in lay.stacks})))
    batch = batcher(examples)
    assert set(batch.ids) == {stack.name for stack in lay.stacks}
    for stack in lay.stacks:
        result = batch.ids[stack.name]
        assert result.dtype == np.int32
        assert result.shape == (n, stack.places)
        np.testing.assert_array_equal(result, _places(schema, stack, examples))
    # Sequences are not packed.
    assert set(batch.lists) == {"dim8"}
    assert batch.dropped.shape == (1, 4)
    assert (batch.lists["dim8"].ids != PAD).sum() == examples.list_lengths[:, 0].sum()


def test_a_stack_may_have_sequences_only():
    schema = _sequence_schema()
    schema = dataclasses.replace(schema, categorical=(), ragged=schema.ragged[1:3])
    lay = layout(schema, dict(a=8, b=8, c=16))
    lengths = np.int32([[5, 0], [1, 3]])
    examples = dataclasses.replace(
        _drawn(np.random.default_rng(0), _sequence_schema(), 2),
        ids=np.zeros((2, 0), np.int32),
        list_lengths=lengths,
        list_values=np.arange(9, dtype=np.int32),
    )
    batch = Batcher(lay, 2, {})(examples)
    assert set(batch.ids) == {"dim8"}
    b = 100
    assert batch.ids["dim8"].tolist() == [
        [0, 1, 2, 3, 4, PAD, PAD, PAD],
        [5, PAD, PAD, PAD, PAD, b + 6, b + 7, b + 8],
    ]
    assert batch.lists == {}


def test_a_sequence_that_is_longer_than_its_places_is_rejected():
    schema = _sequence_schema()
    examples = _drawn(np.random.default_rng(0), schema, 8)
    lengths = np.zeros((8, 4), np.int32)
    lengths[6, 2] = 4
    values = np.zeros(4, np.int32)
    examples = dataclasses.replace(examples, list_lengths=lengths, list_values=values)
    with pytest.raises(
        InputError, match=r"Example 6 .* 'others' must have at most 3 ids.*: found 4\."
    ):
        Batcher(layout(schema, dict(a=8, b=8, c=8)), 8, {"dim8": 128})(examples)


def test_tens_of_thousands_of_hot_rows_are_those_of_a_loop():
    random = np.random.default_rng(3)
    tables = tuple(Table(f"t{i}", 1000 + i, "integer") for i in range(200))
    ids = tuple(Categorical(f"c{i}", f"t{i}") for i in range(200))
    schema = Schema(tasks=(Task("click"),), dense=(), categorical=ids, ragged=(), tables=tables)
    merged = tuple(f"t{i}" for i in random.permutation(np.repeat(np.arange(150), 400)))
    lay = layout(
        schema, {t.name: 8 for t in tables}, {"dim8": ReplicatedRows(("t199", "t150"), merged)}
    )
    (stack,) = lay.stacks
    place = StackRows(lay, stack, [f.name for f in ids], stack.column_tables)
    rows = random.integers(0, 1000, (64, 200)).astype(np.int32)
    expected = [stack_rows(stack, f"t{i}", rows[:, i]) for i in range(200)]
    np.testing.assert_array_equal(place.matrix(rows), np.transpose(expected))


def test_pad_stays_pad_and_the_largest_rows_do_not_overflow():
    most = 2**31 - 12  # after the first table, so the last row of the stack is 2^31 - 3
    schema = Schema(
        tasks=(),
        dense=(),
        categorical=(Categorical("i", "small"), Categorical("j", "large")),
        ragged=(),
        tables=(Table("small", 10, "integer"), Table("large", most, "integer")),
    )
    rows = np.int32([[0, 5], [9, most - 1], [PAD, PAD]])
    lay = layout(schema, dict(small=8, large=8))
    place = StackRows(lay, lay.stacks[0], ["i", "j"], [0, 1])
    assert place.matrix(rows).tolist() == [[0, 15], [9, 2**31 - 3], [PAD, PAD]]
    out = np.empty(6, np.int32)
    lists = StackRows(lay, lay.stacks[0], ["i", "j"], [0, 1], examples=3)
    lists.values(rows.reshape(-1), np.arange(6), 0, out)
    np.testing.assert_array_equal(out, place.matrix(rows).reshape(-1))


# An invalid row is `times` the table's rows plus `plus`.
_BAD = pytest.mark.parametrize(
    ("times", "plus"), [(0, -1), (0, -(2**31)), (1, 0), (1, 1), (0, 2**31 - 2)]
)


@_BAD
@pytest.mark.parametrize("any_hot", [False, True])
@pytest.mark.parametrize(
    ("feature", "example", "column"), [("j", 5, 2), ("others", 11, None), ("history", 90, None)]
)
def test_no_batch_has_an_id_outside_its_table(times, plus, any_hot, feature, example, column):
    schema = _sequence_schema()
    dims = dict(a=8, b=8, c=8)
    hot = {"dim8": ReplicatedRows(hot_rows=("a", "b", "a", "b", "b"))} if any_hot else None
    lay = layout(schema, dims, hot)
    table, rows = ("a", 100) if feature == "history" else ("b", 40)
    examples = _drawn(np.random.default_rng(1), schema, 96)
    lengths = np.tile(np.int32([[2, 5, 3, 0]]), (96, 1))  # 10 ids per example
    values = np.zeros(960, np.int32)
    ids = examples.ids.copy()
    bad = times * rows + plus
    if column is not None:
        ids[example, column] = bad
    else:
        values[example * 10 + (4 if feature == "history" else 9)] = bad
    examples = dataclasses.replace(examples, ids=ids, list_lengths=lengths, list_values=values)
    with pytest.raises(InputError) as error:
        Batcher(lay, 32, {"dim8": 128})(examples)
    assert str(error.value).startswith(
        f"Example {example} of the batch: ids of the feature {feature!r} must be rows of the table"
        f" {table!r}, 0 to {rows - 1} (rows={rows}), or PAD: found {bad}."
    )


@_BAD
@pytest.mark.parametrize("any_hot", [False, True])
@pytest.mark.parametrize("pads", [False, True])
def test_no_list_has_an_id_outside_its_table(times, plus, any_hot, pads):
    # Tables of 100, 200 and 300 rows in one stack: a row of one may be out of range of another.
    hot = {"dim16": ReplicatedRows(hot_rows=("words", "items", "items"))} if any_hot else None
    lay = _layout(dims=(16, 16, 16), hot=hot)
    lengths = np.tile(np.int32([[1, 3, 0, 2]]), (8, 1))
    values = np.tile(np.int32([199, 0, 50, 99, 299, 0]), 8)
    if pads:
        values[::6] = PAD
    packed, _ = Packer(lay, 4, {"dim16": 128})(lengths, values, None)
    assert (packed["dim16"].ids != PAD).sum() == (40 if pads else 48)
    bad = times * 100 + plus
    values[6 * 6 + 2] = bad
    with pytest.raises(InputError) as error:
        Packer(lay, 4, {"dim16": 128})(lengths, values, None)
    assert str(error.value).startswith(
        "Example 6 of the batch: ids of the feature 'words' must be rows of the table 'words', 0 to"
        f" 99 (rows=100), or PAD: found {bad}."
    )


@pytest.mark.parametrize(
    ("batch_size", "shards", "expected"),
    [
        (8192, 16, 512),
        (8192, 64, 128),
        (96, 8, 12),
        (10_000, 8, 250),
        (3 * 4096, 4, 512),
        (24, 8, 3),
        (8 * 1021, 8, 1),
        (8, 8, 1),
    ],
)
def test_groups_are_the_largest_that_divide_a_shards_share(batch_size, shards, expected):
    assert packing.group_size(batch_size, shards) == expected


def _statistics(lengths):
    runs = [lengths[start : start + 512].sum(axis=0) for start in range(len(lengths))]
    return {
        "list_lengths": {
            "mean": lengths.mean(axis=0).tolist(),
            "covariance": np.cov(lengths.T, bias=True).tolist(),
            "max_total_per_run": np.max(runs, axis=0).tolist(),
            "max_per_example": lengths.max(axis=0).tolist(),
        }
    }


def test_capacity_is_the_mean_and_some_deviations_of_a_groups_total():
    random = np.random.default_rng(0)
    shared = random.poisson(3, (512 * 64, 1))  # lists of an example have correlated lengths
    lengths = shared + random.poisson(2, (512 * 64, 4))
    statistics = _statistics(lengths)
    stack = _layout().stacks[1]
    assert stack.lists == (0, 2, 3)
    totals = lengths[:, [0, 2, 3]].sum(axis=1)
    expected = 256 * totals.mean() + 8 * 16 * totals.std()
    result = packing.capacity(stack, statistics, 256)
    assert result % 128 == 0
    assert 0 <= result - expected < 128
    groups = random.permutation(totals).reshape(-1, 256).sum(axis=1)
    assert groups.max() <= result < 1.25 * groups.mean()
    assert packing.capacity(stack, statistics, 256, slack=16.0) > result


def test_capacity_is_at_most_what_a_group_can_have_and_never_nothing():
    statistics = _statistics(np.full((512, 4), 7))
    statistics["list_lengths"]["covariance"] = np.full((4, 4), 1e6).tolist()
    assert packing.capacity(_layout().stacks[1], statistics, 64) == 1408  # 64 * 21, aligned
    empty = _statistics(np.zeros((512, 4), np.int64))
    assert packing.capacity(_layout().stacks[1], empty, 64) == 128
    assert packing.bound(_layout().stacks[1], empty) == 128


def test_no_group_of_stored_examples_exceeds_the_bound_wherever_it_begins():
    random = np.random.default_rng(1)
    lengths = random.negative_binomial(1, 0.05, (512 * 16, 4))
    lengths = lengths[np.argsort(lengths[:, 0])]  # the worst order
    stack = _layout().stacks[1]
    most = packing.bound(stack, _statistics(lengths))
    totals = lengths[:, list(stack.lists)].sum(axis=1)
    for group in (64, 512):
        runs = np.lib.stride_tricks.sliding_window_view(totals, group).sum(axis=1)
        assert runs.max() <= most
    assert most % 128 == 0


def test_the_bound_is_at_most_what_a_group_of_the_longest_examples_has():
    statistics = _statistics(np.full((512, 4), 7))
    statistics["list_lengths"]["max_total_per_run"] = [10**6] * 4
    assert packing.bound(_layout().stacks[1], statistics) == 512 * 3 * 7
