"""Order, content and restart of batches are the same for any number of readers."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from checkout import ROOT
from examples import stack_rows
from store_blocks import SPEC, write_train

from jaxrank.data import guard
from jaxrank.data.batches import packing, room
from jaxrank.data.batches.pipeline import EvaluationBatches, TrainBatches
from jaxrank.data.batches.shuffle_order import Order
from jaxrank.data.batches.workers import suitable_workers
from jaxrank.data.examples import Examples
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.reader import open_store
from jaxrank.data.store.same_values import rows_in_model
from jaxrank.data.store.stored_split import StoredSplit
from jaxrank.data.store.view import View, ViewedSplit
from jaxrank.data.store.writer import StoreWriter
from jaxrank.errors import InputError
from jaxrank.features import PAD, UNKNOWN_ROW, Categorical, Dense, Ragged, Schema, Table, Task
from jaxrank.layout import ReplicatedRows, layout

_BLOCKS = (300, 512, 100, 512, 512, 512, 301, 512, 512, 230)
_ROWS = sum(_BLOCKS)  # 4003: prime, so shards have pieces of different sizes
_SCHEMA = Schema(
    tasks=(Task("click"), Task("buy")),
    dense=(Dense("row"), Dense("twice")),
    categorical=(Categorical("row", "rows"), Categorical("pair", "small", 2)),
    ragged=(Ragged("a", "small", "sum", weighted=True), Ragged("b", "rows", "mean")),
    tables=(Table("small", 50, "integer"), Table("rows", 5000, "integer")),
)
_LAYOUT = layout(_SCHEMA, {"small": 8, "rows": 8})
_ROW_OFFSET = 50


def _pair(row):
    return [row % 50, PAD if row % 3 == 0 else row % 7]


def _lists(row):
    return [[row % 11] * (row % 4), [row, (row + 1) % 5000] if row % 2 else []]


def _labels(row):  # sorted by label
    return [float(row < _ROWS // 4), np.nan if row % 2 else 1.0]


def _block(start, stop):
    rows = range(start, stop)
    lists = [_lists(r) for r in rows]
    values = np.array([v for pair in lists for ids in pair for v in ids], np.int32)
    weights = [0.5 if i == 0 else 1 for pair in lists for i in (0, 1) for _ in pair[i]]
    return Examples(
        dense=np.array([[r, 2 * r] for r in rows], np.float32),
        ids=np.array([[r, *_pair(r)] for r in rows], np.int32),
        list_lengths=np.array([[len(a), len(b)] for a, b in lists], np.int32),
        list_values=values,
        list_weights=np.array(weights, np.float32),
        labels=np.array([_labels(r) for r in rows], np.float32),
        weights=np.array([[1 + r % 3, 2] for r in rows], np.float32),
        kept=pa.RecordBatch.from_pydict({"key": pa.array(rows)}),
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("pipeline") / "store"
    lengths = np.array([[len(ids) for ids in _lists(r)] for r in range(_ROWS)])
    runs = [lengths[start : start + 512].sum(axis=0) for start in range(_ROWS)]
    statistics = {
        "list_lengths": {
            "mean": lengths.mean(axis=0).tolist(),
            "covariance": np.cov(lengths.T).tolist(),
            "max_total_per_run": np.max(runs, axis=0).tolist(),
            "max_per_example": lengths.max(axis=0).tolist(),
        }
    }
    with StoreWriter(path) as writer:
        starts = np.cumsum((0, *_BLOCKS)).tolist()
        write_train(writer, map(_block, starts[:-1], starts[1:]), statistics)
        writer.finish(_SCHEMA, SPEC)
    return open_store(path)


_SETTINGS = {
    "batch_size": 64,
    "steps_per_execution": 1,
    "seed": 5,
    "shards": 8,
    "window_blocks": 1,
    "num_workers": 0,
    "prefetch_batches": 2,
    "list_slack": 8.0,
    "on_overflow": "error",
    "order": "shuffled",
    "num_steps": 40,
}


def _train(store, **changes):
    return TrainBatches(store.split("train"), _LAYOUT, **(_SETTINGS | changes))


def _leaves(batch):
    lists = [array for name in batch.lists for array in batch.lists[name]]
    rest = [leaf for leaf in batch[3:] if isinstance(leaf, np.ndarray)]  # there are no requests
    return [*batch[:1], *batch.ids.values(), *lists, *rest]


def _rows(batch):
    """Returns the row numbers of a batch's examples, [steps, B]."""
    return np.asarray(batch.ids["dim8"][..., 0], np.int64) - _ROW_OFFSET


def _collect(batches):
    """Returns all executions of an iterator as plain arrays, joined along the steps."""
    executions = [[np.array(leaf) for leaf in _leaves(batch)] for batch in batches]
    return [np.concatenate(leaves) for leaves in zip(*executions, strict=True)]


def _check_content(batch, group):
    """Asserts that every field of a batch without a leading axis belongs to its row."""
    ids = batch.ids["dim8"]
    lists = batch.lists["dim8"]
    for place, row in enumerate(ids[:, 0].astype(int) - _ROW_OFFSET):
        np.testing.assert_array_equal(batch.dense[place], [row, 2 * row])
        np.testing.assert_array_equal(ids[place, 1:], _pair(row))
        labels = _labels(row)
        np.testing.assert_array_equal(batch.labels[place], np.nan_to_num(labels))
        np.testing.assert_array_equal(
            batch.weights[place], [1 + row % 3, 0 if np.isnan(labels[1]) else 2]
        )
        g, e = divmod(place, group)
        a, b = _lists(row)
        for index, (values, offset, factor) in enumerate(
            ((a, 0, 0.5), (b, _ROW_OFFSET, 1 / max(1, len(b))))
        ):
            local = lists.segments[g] == 2 * e + index
            assert lists.ids[g][local].tolist() == [v + offset for v in values]
            np.testing.assert_allclose(lists.weights[g][local], factor)
    filler = lists.segments == PAD
    assert (lists.ids[filler] == PAD).all()
    assert (lists.weights[filler] == 0).all()
    assert not batch.dropped.any()


def _step(batch, step):
    def take_step(tree):
        return {k: type(v)(*(a[step] for a in v)) for k, v in tree.items()}

    return batch._replace(
        dense=batch.dense[step],
        ids={k: v[step] for k, v in batch.ids.items()},
        lists=take_step(batch.lists),
        labels=batch.labels[step],
        weights=batch.weights[step],
        dropped=batch.dropped[step],
    )


def test_a_batch_holds_whole_examples_with_all_their_features(store):
    batches = _train(store, steps_per_execution=4, num_steps=8)
    assert batches.group == 8
    execution = next(batches)
    assert execution.dense.shape == (4, 64, 2)
    assert execution.lists["dim8"].ids.shape == (4, 8, batches.capacities["dim8"])
    assert execution.dropped.shape == (4, 8, 2)
    for step in range(4):
        _check_content(_step(execution, step), batches.group)
    batches.close()


@pytest.mark.parametrize(
    ("shards", "cores", "accelerators", "expected"),
    [
        (8, 16, 1, 4),
        (8, 64, 8, 8),
        (8, 6, 1, 2),  # 3 does not divide the number of shards
        (12, 6, 1, 3),
        (8, 2, 1, 0),
        (7, 16, 1, 0),
        (8, 64, 0, 0),  # the step uses all cores
    ],
)
def test_the_number_of_workers_follows_from_cores_and_accelerators(
    shards, cores, accelerators, expected
):
    result = suitable_workers(shards, cores=cores, accelerators=accelerators)
    assert result == expected


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_calls_end_at_multiples_and_with_the_run(store, workers):
    """The last execution is shorter, as is the first one after a resume between multiples."""
    plain = _collect(_train(store, num_steps=23))
    batches = _train(store, num_steps=23, steps_per_execution=8, first_step=5, num_workers=workers)
    step = 5
    for end in (8, 16, 23):
        execution = [np.array(leaf) for leaf in _leaves(next(batches))]
        for leaf, expected in zip(execution, plain, strict=True):
            count = end - step
            assert len(leaf) == 8
            np.testing.assert_array_equal(leaf[:count], expected[step:end])
            np.testing.assert_array_equal(leaf[count:], expected[[end - 1] * (8 - count)])
        step = batches.position
        assert step == end
    with pytest.raises(StopIteration):
        next(batches)


def test_every_example_occurs_once_in_each_epoch_of_the_shards_streams(store):
    for shards, window_blocks in ((8, 1), (2, 3), (1, 2)):
        share = 8
        epochs = 3
        steps = -(-epochs * -(-_ROWS // shards) // share)
        settings = {"shards": shards, "window_blocks": window_blocks, "num_steps": steps}
        result = np.concatenate(
            [_rows(b) for b in _train(store, batch_size=shards * share, **settings)]
        )
        streams = result.reshape(steps, shards, share).transpose(1, 0, 2).reshape(shards, -1)
        for epoch in range(epochs):
            seen = []
            for shard, stream in enumerate(streams):
                size = (shard + 1) * _ROWS // shards - shard * _ROWS // shards
                seen.append(stream[epoch * size : (epoch + 1) * size])
            assert np.array_equal(np.sort(np.concatenate(seen)), np.arange(_ROWS))
        size = _ROWS // shards
        assert not np.array_equal(streams[0][:size], streams[0][size : 2 * size])


@pytest.mark.parametrize("processes", [2, 4])
def test_the_global_batch_does_not_depend_on_the_number_of_processes(store, processes):
    whole = _collect(_train(store))
    shares = [_collect(_train(store, process=(p, processes))) for p in range(processes)]
    for leaf, *parts in zip(whole, *shares, strict=True):
        np.testing.assert_array_equal(leaf, np.concatenate(parts, axis=1))


def test_batches_do_not_depend_on_calls_or_on_how_far_ahead_they_are_made(store):
    whole = _collect(_train(store))
    for changes in (
        {"prefetch_batches": 0},
        {"prefetch_batches": 9},
        {"steps_per_execution": 10, "prefetch_batches": 4},
    ):
        for leaf, other in zip(whole, _collect(_train(store, **changes)), strict=True):
            np.testing.assert_array_equal(leaf, other)


def test_the_seed_decides_the_order(store):
    whole, again, other = (_rows(next(_train(store, seed=seed))) for seed in (5, 5, 6))
    np.testing.assert_array_equal(whole, again)
    assert not np.array_equal(whole, other)


@pytest.mark.parametrize("first", [1, 7, 39])
def test_a_restart_at_any_step_gives_the_same_batches(store, first):
    whole = _collect(_train(store))
    restarted = _collect(_train(store, first_step=first))
    batches = _train(store)
    next(batches), next(batches)
    batches.seek(first)
    moved = _collect(batches)
    for leaf, after_restart, after_seek in zip(whole, restarted, moved, strict=True):
        np.testing.assert_array_equal(leaf[first:], after_restart)
        np.testing.assert_array_equal(leaf[first:], after_seek)


@pytest.fixture
def read_blocks(monkeypatch):
    """Returns the indices of the blocks that are read, in order."""
    read, original = [], StoredSplit.read_block

    def counted(self, index):
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(StoredSplit, "read_block", counted)
    return read


def test_a_restart_far_ahead_reads_only_what_it_serves(store, read_blocks):
    batches = _train(store, num_steps=10**9, first_step=10**8, shards=1, prefetch_batches=0)
    next(batches)
    batches.close()
    assert 1 <= len(read_blocks) <= 6


def test_data_sorted_by_label_is_mixed(store):
    labels = np.concatenate([b.labels[0, :, 0] for b in _train(store, num_steps=60)])
    rates = labels.reshape(60, 64).mean(axis=1)
    rate = labels.mean()
    assert rate == pytest.approx(0.25, abs=0.03)
    # Of 8 shards with a window of one block each. The value is 1 if batches are not mixed at all.
    assert rates.std() / np.sqrt(rate * (1 - rate)) < 0.45
    order = Order(np.asarray(_BLOCKS), seed=0, shards=1, window=_ROWS)
    (spans, permutation) = order.window(0, 0, 0)
    assert len(spans) == len(_BLOCKS)
    assert abs(np.corrcoef(permutation, np.arange(_ROWS))[0, 1]) < 0.05


def test_every_epoch_shard_and_window_has_an_order_of_its_own():
    order = Order(np.full(40, 100), seed=0, shards=4, window=250)
    windows = [order.window(s, e, w) for s in range(4) for e in range(3) for w in (1, 2)]
    permutations = {tuple(permutation) for _, permutation in windows}
    assert {len(p) for p in permutations} == {250}
    assert len(permutations) == len(windows)
    lines = []
    for epoch in range(3):
        whole = Order(np.full(40, 100), seed=0, shards=1, window=4000)
        lines.append(tuple(span.block for span in whole.window(0, epoch, 0)[0]))
        assert sorted(lines[-1]) == list(range(40))
    assert len({*lines, tuple(range(40))}) == 4


def test_windows_tile_a_piece_and_do_not_all_change_at_the_same_time():
    order = Order(np.asarray(_BLOCKS), seed=0, shards=4, window=200)
    changes = set()
    for shard in range(4):
        lo, hi = order.piece(shard)
        runs = order.runs(shard, 0, hi - lo)
        covered = []
        for run in runs:
            spans, permutation = order.window(shard, run.turn, run.window)
            size = sum(s.stop - s.start for s in spans)
            assert run.turn == 0
            assert (run.start, run.stop) == (0, size)
            assert sorted(permutation) == list(range(size))
            covered += [(s.block, i) for s in spans for i in range(s.start, s.stop)]
        assert len(set(covered)) == len(covered) == hi - lo
        changes.add(runs[0].stop)
    assert changes == {200, 150, 100, 50}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"process": (0, 3)}, r"found data\.shards=8, 3 processes"),
        ({"num_workers": 3}, r"found data\.num_workers=3, data\.shards=8 on 1 processes"),
        ({"batch_size": 4004, "shards": 4004}, r"found 4,?004 shards and 4,003 examples"),
    ],
)
def test_sizes_that_do_not_fit_are_rejected_with_the_numbers(store, changes, message):
    with pytest.raises(InputError, match=message):
        _train(store, **changes)


def test_threads_that_read_the_same_batches_get_each_call_once(store):
    expected = [execution.ids["dim8"].tobytes() for execution in _train(store, num_steps=200)]
    batches, result = _train(store, num_steps=200), []

    def read():
        result.extend(execution.ids["dim8"].tobytes() for execution in batches)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result) == sorted(expected)


def _ids_of_groups(batches):
    """Returns the ids of each group of all steps."""
    return np.concatenate([(b.lists["dim8"].ids != PAD).sum(axis=-1).ravel() for b in batches])


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_steps=4),  # less than an epoch
        dict(num_steps=150, batch_size=128, process=(0, 2)),
        dict(num_steps=70, batch_size=96, shards=3, window_blocks=4),
        dict(num_steps=5, batch_size=4096),  # groups of 512 examples, of several windows and epochs
    ],
)
def test_lists_have_the_room_of_the_largest_group_of_the_run(store, changes, monkeypatch):
    monkeypatch.setattr(packing, "_ALIGNMENT", 1)
    batches = _train(store, **changes)
    groups = [_ids_of_groups(batches)]
    if "process" in changes:
        groups.append(_ids_of_groups(_train(store, **changes | {"process": (1, 2)})))
    groups = np.concatenate(groups)
    assert batches.list_room.measured.is_exact
    assert batches.capacities == {"dim8": groups.max()}
    np.testing.assert_allclose(batches.list_room.measured.mean, groups.mean())
    monkeypatch.setattr(room, "_EXAMINED", 0)
    bound = _train(store, **changes)
    assert not bound.list_room.measured.is_exact
    group = bound.group
    lengths = sorted(sum(map(len, _lists(r))) for r in range(_ROWS))
    assert bound.capacities == {"dim8": sum(lengths[-group:])}


def test_lists_that_do_not_fit_are_cut_and_counted(store):
    execution = next(
        _train(store, batch_size=4096, list_slack=0.0, num_steps=1, on_overflow="truncate")
    )
    assert execution.lists["dim8"].ids.shape[-1] == 512 * 2.5  # the mean of a group
    kept = (execution.lists["dim8"].ids != PAD).sum()
    lengths = np.array([[len(ids) for ids in _lists(r)] for r in _rows(execution)[0]])
    assert execution.dropped.sum() > 0
    assert kept + execution.dropped.sum() == lengths.sum()


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_evaluation_pass_sees_each_example_once_in_order(store, processes, prefetch):
    size = 2048
    passes = []
    for p in range(processes):
        batches = EvaluationBatches(
            store.split("train"),
            _LAYOUT,
            batch_size=size,
            shards=4,
            process=(p, processes),
            prefetch_batches=prefetch,
        )
        assert batches.group == 512
        passes.append(list(batches))
        assert len(passes[-1]) == len(batches) == 2
    expected = list(range(_ROWS)) + [PAD] * (2 * size - _ROWS)
    for k, executions in enumerate(zip(*passes, strict=True)):
        assert {rows for _, rows in executions} == {min(size, _ROWS - k * size)}
        ids = np.concatenate([batch.ids["dim8"][:, 0] for batch, _ in executions])
        real = np.arange(k * size, (k + 1) * size) < _ROWS
        wanted = np.array(expected[k * size : (k + 1) * size])
        np.testing.assert_array_equal(ids, np.where(real, wanted + _ROW_OFFSET, PAD))
        for p, (batch, _) in enumerate(executions):
            local = real[p * len(batch.dense) :][: len(batch.dense)]
            _check_filler(batch, ~local, 512)
    _check_content(passes[0][0][0], 512)


def _check_filler(batch, filler, group):
    assert not batch.weights[filler].any()
    assert not batch.labels[filler].any()
    assert not batch.dense[filler].any()
    assert (batch.ids["dim8"][filler] == PAD).all()
    lists = batch.lists["dim8"]
    for g, segments in enumerate(lists.segments):
        used = np.unique(segments[segments != PAD] // 2) + g * group
        assert not filler[used].any()


def test_an_evaluation_pass_reads_each_block_once(store, read_blocks):
    batches = EvaluationBatches(store.split("train"), _LAYOUT, batch_size=512)
    assert sum(rows for _, rows in batches) == _ROWS
    assert sorted(read_blocks) == list(range(len(_BLOCKS)))


@pytest.mark.parametrize(
    ("batch_size", "shards", "message"),
    [
        (64, 1, r"multiple of 512 \* shards: found batch_size=64, shards=1\. The next .* is 512"),
        (3072, 4, r"found batch_size=3072, shards=4\. The next larger one is 4096"),
    ],
)
def test_an_evaluation_batch_must_be_whole_groups(store, batch_size, shards, message):
    with pytest.raises(InputError, match=message):
        EvaluationBatches(store.split("train"), _LAYOUT, batch_size=batch_size, shards=shards)


def _prepared(path, users, tags, earlier=""):
    """Writes columns user (vocabulary), fixed (row numbers) and tags (lists of users, and of
    numbers).
    """
    n = len(users)
    columns = {
        "label": [1] * n,
        "user": users,
        "fixed": [99, None] * (n // 2),
        "tags": tags,
        "numbers": [[99, 3]] * n,
        "recent": [tag[-2:] for tag in tags],
    }
    pq.write_table(pa.table(columns), path.with_suffix(".parquet"))
    features = dict(
        tasks=[dict(name="click", label="label")],
        categorical=[dict(columns="user"), dict(columns="fixed", encoding="integer", rows=100)],
        ragged=[
            dict(columns="tags", table="user"),
            dict(columns="numbers", encoding="integer", rows=100),
            dict(columns="recent", table="user", combiner="none", max_length=3),
        ],
    )
    source = dict(kind="parquet", files=dict(train=str(path.with_suffix(".parquet"))))
    return prepare(features, source, path, vocabularies=earlier, report=lambda _: None)


def test_values_that_came_after_a_model_are_unknown_to_it(tmp_path):
    old = _prepared(tmp_path / "old", ["a", "b", "a", None], [["a"], [], ["b", "a"], ["a"]])
    users, tags = ["b", "new", "a", None], [["a", "new", "b"], ["newer"], [], ["b"]]
    new = _prepared(tmp_path / "new", users, tags, earlier=str(old.path))
    dims = {"user": 8, "fixed": 8, "numbers": 16}
    result = {}
    for name, schema in (("old", old.schema), ("new", new.schema)):
        rows = {"user": rows_in_model(schema.tables[0], new, lambda: old)}
        split = ViewedSplit(new.split("train"), View(new.schema, schema, rows))
        batches = EvaluationBatches(split, layout(schema, dims), batch_size=512)
        ((batch, rows),) = list(batches)
        assert rows == 4
        ids, lists = batch.ids["dim8"][:4], batch.lists["dim8"]
        stack = layout(schema, dims).stacks[0]
        offset = stack.offsets[stack.column_tables[1]]
        assert ids[:, 1].tolist() == [99 + offset, PAD, 99 + offset, PAD]
        assert (batch.ids["dim8"][4:] == PAD).all()
        assert batch.lists["dim16"].ids[0, :8].tolist() == [99, 3] * 4
        result[name] = ids[:, 0].tolist(), lists.ids[0, :5].tolist(), ids[:, 2:].tolist()
        np.testing.assert_allclose(lists.weights[0, :5], [1 / 3, 1 / 3, 1 / 3, 1, 1], rtol=1e-6)
    a, b = 2, 3
    for name, new, newer in (("old", UNKNOWN_ROW, UNKNOWN_ROW), ("new", 4, 5)):
        none = [PAD, PAD, PAD]
        recent = [[new, b, PAD], [newer, PAD, PAD], none, [b, PAD, PAD]]
        assert result[name] == ([b, new, a, 0], [a, new, b, newer, b], recent)


def _fewer_rows(**rows):
    tables = tuple(dataclasses.replace(t, rows=rows.get(t.name, t.rows)) for t in _SCHEMA.tables)
    return layout(dataclasses.replace(_SCHEMA, tables=tables), {"small": 8, "rows": 8})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (dict(rows=3000), r"the feature '(row|b)' must be rows of the table 'rows', 0 to 2999"),
        (dict(small=49), r"the feature 'pair' must be .* 'small', 0 to 48 \(rows=49\).*: found 49"),
        (dict(small=10), r"the feature '(pair|a)' must be .* 'small', 0 to 9 \(rows=10\)"),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_ids_that_no_table_has_stop_training_and_evaluation(store, rows, message, prefetch):
    lay = _fewer_rows(**rows)
    settings = _SETTINGS | {"batch_size": 4096, "prefetch_batches": prefetch}
    training = TrainBatches(store.split("train"), lay, **settings)
    with pytest.raises(InputError, match=rf"Example \d+ of the batch: ids of {message}"):
        next(training)
    training.close()
    evaluation = EvaluationBatches(
        store.split("train"), lay, batch_size=4096, prefetch_batches=prefetch
    )
    with pytest.raises(InputError, match=rf"Example \d+ of the batch: ids of {message}"):
        next(iter(evaluation))


def test_hot_rows_change_the_rows_of_the_stack_and_nothing_else(store):
    hot = ReplicatedRows(hot_rows=("rows", "small", "rows", "rows", "small"), replicated=3)
    lay = layout(_SCHEMA, {"small": 8, "rows": 8}, {"dim8": hot})
    (stack,) = lay.stacks
    to_plain = np.empty(stack.rows, np.int64)  # the row without hot rows of each row of the stack
    for table, rows, offset in (("small", 50, 0), ("rows", 5000, _ROW_OFFSET)):
        to_plain[stack_rows(stack, table, np.arange(rows))] = np.arange(rows) + offset
    plain, moved = (
        _collect(TrainBatches(store.split("train"), each, **_SETTINGS)) for each in (_LAYOUT, lay)
    )
    assert (plain[1] != moved[1]).any()
    for i, (array, other) in enumerate(zip(plain, moved, strict=True)):
        if i in (1, 2):  # single ids, and ids of lists
            other = np.where(other == PAD, PAD, to_plain[np.where(other == PAD, 0, other)])
        np.testing.assert_array_equal(array, other)


_SCRIPT = """
    import dataclasses, json, sys
    import numpy as np
    from jaxrank.data.batches.pipeline import TrainBatches
    from jaxrank.data.store.reader import open_store
    from jaxrank.errors import InputError
    from jaxrank.layout import ReplicatedRows, layout

    def digest(batches):
        return [np.asarray(b.ids["dim8"]).tolist() + np.asarray(b.lists["dim8"].ids).tolist()
                for b in batches]

    if __name__ == "__main__":
        store = open_store(sys.argv[1])
        settings = json.loads(sys.argv[2])
        lay = layout(store.schema, {"small": 8, "rows": 8})
        split = store.split("train")
        plain = digest(TrainBatches(split, lay, **settings))
        hot = ReplicatedRows(hot_rows=("rows", "small") * 25, replicated=9)
        hot_lay = layout(store.schema, {"small": 8, "rows": 8}, {"dim8": hot})
        plain_hot = digest(TrainBatches(split, hot_lay, **settings))
        settings["num_workers"] = 2
        workers = digest(TrainBatches(split, hot_lay, **settings))
        tables = [dataclasses.replace(table, rows=4) for table in store.schema.tables]
        schema = dataclasses.replace(store.schema, tables=tuple(tables))
        narrow = TrainBatches(split, layout(schema, {"small": 8, "rows": 8}), **settings)
        try:
            next(narrow)
            error = None
        except InputError as raised:
            error = str(raised)
        narrow.close()
        print(json.dumps([plain, workers == plain_hot != plain, error]))
"""


def test_a_plain_script_reads_with_and_without_workers_and_gets_the_same(store, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT))
    settings = _SETTINGS | {"num_steps": 10, "steps_per_execution": 2}
    done = subprocess.run(
        [sys.executable, str(script), str(store.path), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    plain, workers_equal, error = json.loads(done.stdout)
    expected = _collect(_train(store, num_steps=10, steps_per_execution=2))
    result = np.concatenate([np.array(execution[:2]) for execution in plain])
    np.testing.assert_array_equal(result, expected[1])
    assert workers_equal
    assert "0 to 3" in error


_ENDS = """
    import copy, json, multiprocessing, os, signal, sys, threading
    from jaxrank.data.batches.pipeline import TrainBatches
    from jaxrank.data.store.reader import open_store
    from jaxrank.errors import RunError
    from jaxrank.layout import layout

    def kill_the_first():
        while not multiprocessing.active_children():
            pass
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)

    if __name__ == "__main__":
        store, settings, end = open_store(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
        lay = layout(store.schema, {"small": 8, "rows": 8})
        batches = TrainBatches(store.split("train"), lay, **settings)
        if end == "left after faults":  # a worker dies while it starts
            threading.Thread(target=kill_the_first).start()
            try:
                next(batches)
            except RunError as error:
                assert "One of 2 input workers (data.num_workers) ended with exit" in str(error)
                assert "code -9: it was killed" in str(error)
            else:
                sys.exit("nothing was raised")
        held = [next(batches) for _ in range(5)]  # more than are lent
        kept = [b.ids["dim8"].copy() for b in held]
        if end == "left after faults":  # signals to the workers
            workers = multiprocessing.active_children()
            assert len(workers) == 2
            for worker in workers:
                os.kill(worker.pid, signal.SIGTERM)
                os.kill(worker.pid, signal.SIGINT)
            for _ in range(100):
                next(batches)
            assert all((b.ids["dim8"] == ids).all() for b, ids in zip(held, kept))
            # The death of a worker.
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGBUS)
            try:
                for _ in range(100):
                    next(batches)
            except RunError as error:
                assert "code -7: a file that it reads was cut short" in str(error)
                where = batches.position
            alone = TrainBatches(store.split("train"), lay, **settings | {"num_workers": 0})
            alone.seek(where)
            for _ in range(3):
                assert (next(batches).ids["dim8"] == next(alone).ids["dim8"]).all()
        if end == "closed":
            other = copy.copy(batches)
            for _ in range(3):
                assert (next(batches).ids["dim8"] == next(other).ids["dim8"]).all()
            # Read by two threads and closed meanwhile: reading starts again at the same position.
            def read():
                for _ in range(40):
                    next(batches)

            threads = [threading.Thread(target=read) for _ in range(2)]
            for thread in threads:
                thread.start()
            batches.close()
            for thread in threads:
                thread.join()
            for _ in range(80):
                next(other)
            assert (next(batches).ids["dim8"] == next(other).ids["dim8"]).all()
            batches.close()
        elif end == "left by an error":
            sys.exit("an error")
        print("the end")
"""


# A worker takes two CPU seconds to start.
@pytest.mark.parametrize(
    ("end", "workers"), [("closed", 1), ("left by an error", 1), ("left after faults", 2)]
)
def test_a_program_with_workers_ends_without_a_word(store, tmp_path, end, workers):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_ENDS))
    settings = _SETTINGS | {"num_steps": 1000, "num_workers": workers}
    done = subprocess.run(
        [sys.executable, str(script), str(store.path), json.dumps(settings), end],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    expected = ("an error\n", "") if "error" in end else ("", "the end\n")
    assert (done.stderr, done.stdout) == expected


def test_a_program_that_each_worker_would_run_again_ends_and_says_why(store, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_ENDS).replace('if __name__ == "__main__":', "if True:"))
    settings = _SETTINGS | {"num_steps": 1000, "num_workers": 1}
    done = subprocess.run(
        [sys.executable, str(script), str(store.path), json.dumps(settings), "left"],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f"\njaxrank.errors.InputError: data.num_workers: {guard.REMEDY}, because" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "jaxrank.errors.RunError: One of 1 input workers (data.num_workers) ended"
    )
