"""The order of examples follows its definition, for any readers and any restarts."""

import itertools

import by_day
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.data.batches.shuffle_order import Order
from jaxrank.errors import InputError
from jaxrank.layout import layout


def defined(block_rows, seed, shards, window, stages, passes):
    """Computes the streams of all shards by definition: numbers of stored examples."""
    examples = iter(range(sum(block_rows)))
    blocks = [[next(examples) for _ in range(rows)] for rows in block_rows]
    blocks_left = iter(blocks)
    stages = [[next(blocks_left) for _ in range(n)] for n in stages or [len(blocks)]]
    streams = [[] for _ in range(shards)]
    for turn in range(passes * len(stages)):
        stage = stages[turn % len(stages)]
        if turn % len(stages) == 0:
            total, had = 0, [0] * shards
        permuted = np.random.default_rng([seed, 0, turn]).permutation(len(stage))
        line = [example for b in permuted for example in stage[b]]
        total += len(line)
        having = [(v + 1) * total // shards - v * total // shards for v in range(shards)]
        if any(now < before for now, before in zip(having, had, strict=True)):
            having, left = list(had), len(line)
            for v in range(shards):
                if had[v] == min(had) and left:
                    having[v] += 1
                    left -= 1
        for v in range(shards):
            piece = [line.pop(0) for _ in range(having[v] - had[v])]
            number, size = 0, window - window * v // shards
            while piece:
                chosen, piece = piece[:size], piece[size:]
                random = np.random.default_rng([seed, 1, turn, v, number])
                streams[v] += [chosen[i] for i in random.permutation(len(chosen))]
                number, size = number + 1, window
        assert not line
        had = having
    return streams


def served(order, block_rows, shard, start, stop):
    """Returns the places [start, stop) of a shard's stream, as numbers of stored examples."""
    starts = np.cumsum(block_rows) - block_rows
    result = []
    for run in order.runs(shard, start, stop):
        spans, permutation = order.window(shard, run.turn, run.window)
        stored = [starts[s.block] + i for s in spans for i in range(s.start, s.stop)]
        result += [int(stored[i]) for i in permutation[run.start : run.stop]]
    return result


@st.composite
def cases(draw):
    stages = draw(st.lists(st.integers(1, 4), min_size=0, max_size=6))
    blocks = sum(stages) or draw(st.integers(1, 8))
    rows = draw(st.lists(st.integers(0, 12), min_size=blocks, max_size=blocks))
    rows[draw(st.integers(0, blocks - 1))] += 1
    shards = draw(st.integers(1, min(8, sum(rows))))
    window = draw(st.integers(1, 40))
    return np.array(rows), stages, shards, window, draw(st.integers(0, 2**31 - 1))


@settings(deadline=None, max_examples=200)
@given(cases())
def test_the_order_is_that_of_its_definition(case):
    rows, stages, shards, window, seed = case
    order = Order(rows, seed=seed, shards=shards, window=window, stages=stages)
    streams = defined(rows.tolist(), seed, shards, window, stages, passes=2)
    for shard, stream in enumerate(streams):
        assert served(order, rows, shard, 0, len(stream)) == stream
        middle = len(stream) // 2
        assert served(order, rows, shard, middle, len(stream)) == stream[middle:]


@settings(deadline=None, max_examples=200)
@given(cases())
def test_stages_follow_one_another_and_each_example_occurs_once_in_a_pass(case):
    rows, stages, shards, window, seed = case
    order = Order(rows, seed=seed, shards=shards, window=window, stages=stages)
    total, ends = int(rows.sum()), np.cumsum(stages or [len(rows)])
    stage_of = np.repeat(np.searchsorted(ends, np.arange(len(rows)), side="right"), rows)
    pieces = [[order.piece(v, turn) for turn in range(len(ends))] for v in range(shards)]
    sizes = [sum(stop - start for start, stop in alone) for alone in pieces]
    assert {total // shards, -(-total // shards)} >= set(sizes)
    streams = [served(order, rows, v, 0, size) for v, size in enumerate(sizes)]
    assert sorted(itertools.chain(*streams)) == list(range(total))

    first = [total] * len(ends)
    for stream in streams:
        result = stage_of[stream]
        assert (np.diff(result) >= 0).all()
        for stage in set(result.tolist()):
            first[stage] = min(first[stage], result.tolist().index(stage))
    assert order.first_places() == first
    # The streams finish a stage within one example of each other, so at most one batch has examples
    # of two stages.
    for stage in range(len(ends)):
        done = [int((stage_of[stream] <= stage).sum()) for stream in streams]
        assert max(done) - min(done) <= 1
    for share in (1, 3, 5):
        batch_of = {}
        for stream in streams:
            for place, example in enumerate(stream):
                batch_of.setdefault(int(stage_of[example]), set()).add(place // share)
        for earlier, later in itertools.pairwise(sorted(batch_of)):
            assert max(batch_of[earlier]) <= min(batch_of[later])


def test_one_stage_has_the_order_that_it_always_had():
    rows = np.array([5, 3, 4, 0, 6])
    for stages in ((), (5,)):
        order = Order(rows, seed=7, shards=2, window=4, stages=stages)
        assert [served(order, rows, shard, 0, 18) for shard in (0, 1)] == [
            [10, 9, 11, 8, 3, 2, 1, 0, 4, 11, 9, 8, 10, 13, 12, 15, 14, 16],
            [12, 13, 14, 17, 15, 16, 5, 6, 7, 17, 5, 7, 6, 1, 0, 2, 3, 4],
        ]


def test_a_stage_has_another_order_in_every_pass():
    rows = np.full(12, 10)
    order = Order(rows, seed=0, shards=1, window=15, stages=(6, 6))
    passes = [served(order, rows, 0, 120 * p, 120 * (p + 1)) for p in range(3)]
    assert len({tuple(result[:60]) for result in passes}) == 3
    assert all(sorted(result[:60]) == list(range(60)) for result in passes)


def test_stages_that_are_not_all_blocks_are_rejected():
    with pytest.raises(ValueError, match=r"must hold all 3 blocks: found \(1, 1\)"):
        Order(np.full(3, 9), seed=0, shards=1, window=4, stages=(1, 1))


# Examples of each block, by day: a partial block, a day with fewer examples than shards, and days
# that batches do not divide.
_DAYS = {
    "2024-05-01": (64, 64, 31),
    "2024-05-02": (64, 64, 64, 64, 50),
    "2024-05-03": (3,),
    "2024-05-04": (64, 64, 2),
    "2024-05-05": (64, 64, 64, 12),
}
_ROWS = sum(map(sum, _DAYS.values()))
_DAY_OF = np.repeat(np.arange(len(_DAYS)), [sum(rows) for rows in _DAYS.values()])
_SETTINGS = {
    "batch_size": 32,
    "steps_per_execution": 2,
    "seed": 5,
    "shards": 8,
    "window_blocks": 1,
    "num_workers": 0,
    "prefetch_batches": 2,
    "list_slack": 8.0,
    "on_overflow": "error",
    "num_steps": 24,
}


def _write(folder, **options):
    firsts = np.cumsum([0, *(sum(rows) for rows in _DAYS.values())])
    tables = {}
    for day, first, rows in zip(_DAYS, firsts[:-1], np.diff(firsts), strict=True):
        tables[day] = pa.table({"row": np.arange(first, first + rows), "label": np.zeros(rows)})
    features = dict(
        tasks=[dict(name="click", label="label")],
        dense=[dict(columns="row", standardize=False)],
        categorical=[dict(columns="row", encoding="integer", rows=5000)],
    )
    return by_day.write(folder, tables, features, block_size=64, **options)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    result = _write(tmp_path_factory.mktemp("order"))
    assert result.split("train").block_rows.tolist() == [n for rows in _DAYS.values() for n in rows]
    return result


def _train(store, split="train", **changes):
    lay = layout(store.schema, {"row": 8})
    return TrainBatches(store.split(split), lay, **(_SETTINGS | {"order": "days"} | changes))


def _rows(batches, executions=None):
    """Returns the row numbers of the examples of some executions, i64[steps, B]."""
    result = [np.array(b.dense[..., 0], np.int64) for b in itertools.islice(batches, executions)]
    batches.close()
    return np.concatenate(result)


def test_days_follow_one_another_in_the_batches(store):
    assert store.split("train").days == tuple((day, len(rows)) for day, rows in _DAYS.items())
    batches = _train(store)
    whole = _rows(batches)
    days = _DAY_OF[whole]
    one_pass = days[: _ROWS // 32]
    assert (np.diff([d.max() for d in one_pass]) >= 0).all()
    for first, result in zip(batches.first_steps, range(len(_DAYS)), strict=True):
        assert (days[:first] < result).all()
        assert (days[first] == result).any()
    assert (days[_ROWS // 32 + 1 :] == 0).all()
    # The same with days that are selected by name.
    some = _rows(_train(store, "train/2024-05-02:2024-05-04", num_steps=6))
    assert set(_DAY_OF[some].ravel()) == {1}


@pytest.mark.parametrize(
    ("order", "processes", "workers"),
    [
        ("shuffled", 2, 0),
        ("shuffled", 4, 0),
        ("days", 2, 0),
        ("days", 4, 0),
        ("days", 2, 1),
    ],
)
def test_the_global_batch_does_not_depend_on_processes_or_workers(store, order, processes, workers):
    whole = _rows(_train(store, order=order, num_steps=8))
    parts = [
        _rows(_train(store, order=order, process=(p, processes), num_workers=workers, num_steps=8))
        for p in range(processes)
    ]
    np.testing.assert_array_equal(whole, np.concatenate(parts, axis=1))


@pytest.mark.parametrize("order", ["shuffled", "days"])
def test_a_run_that_resumes_with_other_processes_sees_each_example_once(store, order):
    """Runs 3 executions on one process, 5 on two, and on one again to the end of the epoch."""
    share = _SETTINGS["batch_size"] // _SETTINGS["shards"]
    steps = -(-_ROWS // _SETTINGS["batch_size"])
    steps += steps % 2
    parts = [(0, 3, 1), (6, 5, 2), (16, (steps - 16) // 2, 1)]
    result = []
    for first, executions, count in parts:
        local = []
        for process in range(count):
            batches = _train(store, order=order, process=(process, count), num_steps=steps)
            batches.seek(first)
            local.append(_rows(batches, executions))
        result.append(np.concatenate(local, axis=1))
    seen = np.concatenate(result)
    np.testing.assert_array_equal(seen, _rows(_train(store, order=order, num_steps=steps)))
    streams = seen.reshape(steps, _SETTINGS["shards"], share).transpose(1, 0, 2).reshape(8, -1)
    epoch = [s[: (v + 1) * _ROWS // 8 - v * _ROWS // 8] for v, s in enumerate(streams)]
    assert sorted(np.concatenate(epoch)) == list(range(_ROWS))


def test_days_of_a_split_without_days_are_rejected(store, tmp_path):
    alone = _write(tmp_path, by_day=False)
    with pytest.raises(
        InputError, match=r"data\.order: 'days' must have .* by day: .*train is not"
    ):
        _train(alone)


def test_places_are_right_past_the_numbers_that_32_bits_and_floats_hold():
    """Reads six thousand blocks of a thousand million examples, for longer than 2^53 examples."""
    order = Order(np.full(6000, 10**9), seed=1, shards=8, window=10_000)
    assert order.rows == 6 * 10**12
    start, stop = order.piece(3)
    length = stop - start
    assert length > 2**39
    for place in (2**31 - 3, 2**32 + 5, 2**53 + 11, 2**62 + 7):
        runs = order.runs(3, place, place + 10_007)
        assert sum(run.stop - run.start for run in runs) == 10_007
        for run in runs:
            begin, end = order._window_bounds(3, run.turn, run.window)
            # The start of the run in the stream, from its description.
            assert run.turn * length + begin + run.start == place
            place += run.stop - run.start
            spans, permutation = order.window(3, run.turn, run.window)
            assert sum(span.stop - span.start for span in spans) == len(permutation) == end - begin
            assert all(0 <= span.start < span.stop <= 10**9 for span in spans)
