"""Packing of ragged lists, against plain Python loops."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank.data import packing
from jaxrank.errors import InputError
from jaxrank.features import PAD, Ragged, Schema, Table, layout

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


def _layout(lists=_LISTS, dims=(8, 16, 16)):
    schema = Schema(tasks=(), floats=(), ids=(), lists=tuple(lists), tables=_TABLES)
    return layout(schema, dict(zip(("words", "items", "tags"), dims, strict=True)))


def _examples(random, n, lists, longest=5, weighted=True):
    lengths = random.integers(0, longest + 1, (n, lists)).astype(np.int32)
    values = random.integers(0, 100, lengths.sum()).astype(np.int32)
    values[random.random(len(values)) < 0.1] = PAD
    weights = random.choice(np.float32([0, 0.5, 1, 3]), len(values)) if weighted else None
    return lengths, values, weights


def _unpack(lengths, values, weights):
    """[example][list] -> (ids, weights), by walking the values one at a time."""
    place, found = 0, []
    for row in lengths:
        found.append([])
        for count in row:
            ids = [int(v) for v in values[place : place + count]]
            own = [1.0] * count if weights is None else [float(w) for w in weights[place:][:count]]
            found[-1].append((ids, own))
            place += count
    return found


def _cut_longest_first(lists, room):
    """Drops the last id of the longest list (the last of equally long ones) until all fits."""
    sizes = [len(ids) for ids, _ in lists]
    while sum(sizes) > room:
        longest = max(sizes)
        sizes[max(i for i, s in enumerate(sizes) if s == longest)] -= 1
    return [(ids[:size], own[:size]) for (ids, own), size in zip(lists, sizes, strict=True)]


def _reference(lay, lengths, values, weights, group, capacities):
    """What `pack` must give, example by example and id by id."""
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
            for segment, ((kept, own), (all_ids, _)) in enumerate(zip(after, before, strict=True)):
                index = segment % len(stack.lists)
                feature = lay.schema.lists[stack.lists[index]]
                dropped[g, stack.lists[index]] += len(all_ids) - len(kept)
                own = own if feature.weighted else [1.0] * len(kept)
                norm = {
                    "sum": 1.0,
                    "mean": sum(own),
                    "sqrtn": sum(w * w for w in own) ** 0.5,
                }[feature.combiner]
                for value, weight in zip(kept, own, strict=True):
                    offset = stack.offsets[stack.list_tables[index]]
                    ids[g, place] = PAD if value == PAD else value + offset
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
    combiner=st.sampled_from([None, "sum"]),
)
def test_packing_equals_a_loop_over_ids(seed, group, groups, dims, weighted, room, combiner):
    lists = _LISTS
    if combiner:
        lists = [dataclasses.replace(f, combiner=combiner, weighted=False) for f in lists]
    lay = _layout(lists, dims)
    random = np.random.default_rng(seed)
    lengths, values, weights = _examples(random, group * groups, len(lists), weighted=weighted)
    capacities = {stack.name: room for stack in lay.stacks}
    packed, dropped = packing.pack(lay, lengths, values, weights, group, capacities, "truncate")
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
    packed, dropped = packing.pack(lay, lengths, values, None, 4, {"dim8": 11}, "truncate")
    assert packed["dim8"].segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3]]
    assert packed["dim8"].ids.tolist() == [[0, 1, 2, 5, 6, 7, 8, 9, 11, 12, 13]]
    assert dropped.tolist() == [[3]]


def test_overflow_stops_with_the_features_the_numbers_and_the_field():
    lay = _layout(_LISTS[1:3], dims=(8, 8, 8))
    lengths = np.int32([[1, 0], [0, 1], [3, 90], [7, 60]])
    values = np.zeros(lengths.sum(), np.int32)
    with pytest.raises(InputError) as error:
        packing.pack(lay, lengths, values, None, 2, {"dim8": 128})
    message = str(error.value)
    assert "stack dim8" in message
    assert "2 examples packed together have 160 ids and there is room for 128" in message
    assert "Longest: bought (150 ids), words (10 ids)" in message
    assert "data.list_slack" in message
    assert "data.on_overflow='truncate'" in message


def test_a_group_that_fills_the_capacity_exactly_fits():
    lay = _layout(_LISTS[1:2])
    lengths = np.int32([[60], [68]])
    values = np.arange(128, dtype=np.int32)
    packed, dropped = packing.pack(lay, lengths, values, None, 2, {"dim8": 128})
    assert packed["dim8"].ids[0].tolist() == list(range(128))
    assert not dropped.any()


def test_pad_stays_pad_and_the_largest_rows_do_not_overflow():
    rows = np.int32([0, 5, PAD, 2**31 - 11])
    assert packing.to_stack_rows(rows, 10).tolist() == [10, 15, PAD, 2**31 - 1]
    assert packing.to_stack_rows(rows, np.int32([1, 2, 3, 4])).tolist() == [1, 7, PAD, 2**31 - 7]


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
    totals = lengths.reshape(-1, 512, lengths.shape[1]).sum(axis=1)
    return {
        "list_lengths": {
            "mean": lengths.mean(axis=0).tolist(),
            "covariance": np.cov(lengths.T, bias=True).tolist(),
            "max_total_per_group": totals.max(axis=0).tolist(),
            "max_per_example": lengths.max(axis=0).tolist(),
        }
    }


def test_capacity_is_the_mean_and_some_deviations_of_a_groups_total():
    random = np.random.default_rng(0)
    shared = random.poisson(3, (512 * 64, 1))  # lists of an example are long together
    lengths = shared + random.poisson(2, (512 * 64, 4))
    statistics = _statistics(lengths)
    stack = _layout().stacks[1]
    assert stack.lists == (0, 2, 3)
    totals = lengths[:, [0, 2, 3]].sum(axis=1)
    expected = 256 * totals.mean() + 8 * 16 * totals.std()
    found = packing.capacity(stack, statistics, 256)
    assert found % 128 == 0
    assert 0 <= found - expected < 128
    groups = random.permutation(totals).reshape(-1, 256).sum(axis=1)
    assert groups.max() <= found < 1.25 * groups.mean()
    assert packing.capacity(stack, statistics, 256, slack=16.0) > found


def test_capacity_is_at_most_what_a_group_can_have_and_never_nothing():
    statistics = _statistics(np.full((512, 4), 7))
    statistics["list_lengths"]["covariance"] = np.full((4, 4), 1e6).tolist()
    assert packing.capacity(_layout().stacks[1], statistics, 64) == 1408  # 64 * 21, aligned
    empty = _statistics(np.zeros((512, 4), np.int64))
    assert packing.capacity(_layout().stacks[1], empty, 64) == 128
    assert packing.bound(_layout().stacks[1], empty) == 128


def test_no_aligned_group_of_stored_examples_exceeds_the_bound():
    random = np.random.default_rng(1)
    lengths = random.negative_binomial(1, 0.05, (512 * 16, 4))
    lengths = lengths[np.argsort(lengths[:, 0])]  # the worst order
    stack = _layout().stacks[1]
    most = packing.bound(stack, _statistics(lengths))
    totals = lengths[:, list(stack.lists)].sum(axis=1)
    for group in (64, 512):
        assert totals.reshape(-1, group).sum(axis=1).max() <= most
    assert most % 128 == 0


def test_the_bound_is_at_most_what_a_group_of_the_longest_examples_has():
    statistics = _statistics(np.full((512, 4), 7))
    statistics["list_lengths"]["max_total_per_group"] = [10**6] * 4
    assert packing.bound(_layout().stacks[1], statistics) == 512 * 3 * 7
