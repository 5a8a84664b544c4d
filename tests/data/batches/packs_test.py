"""Tests of packs of whole requests: what they hold, and that nothing depends on who reads them."""

import numpy as np
import preparations
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from preparations import files, run
from variants import changed

from jaxrank.build import Builder
from jaxrank.data.batches.packs import PackedSplit, assign_packs, pack_requests, report_packs
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.features import PAD
from jaxrank.layout import layout

GROUPED = preparations.FEATURES | dict(
    group="user",
    keep=["n", "user"],
    # The number of each example, exactly, to recognise it in a batch.
    dense=[dict(columns="n")],
)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    folder = tmp_path_factory.mktemp("requests")
    paths = files(folder / "raw", 700)
    return run(folder / "store", paths, GROUPED, block_size=100).split("train")


def best_fit(sizes, pack):
    """Assigns one request after another, the largest first. Returns the sorted fills of packs."""
    fills = []
    for size in sorted(sizes, reverse=True):
        fitting = [fill for fill in fills if fill + size <= pack]
        if fitting:
            fills.remove(max(fitting))
        fills.append(max(fitting, default=0) + size)
    return sorted(fills)


@given(st.lists(st.integers(1, 16), max_size=60))
@settings(max_examples=60, deadline=None)
def test_requests_fill_packs_by_best_fit_decreasing(sizes):
    packs = assign_packs(np.array(sizes, np.int64), 16)
    fills = np.bincount(packs, sizes).astype(int).tolist()
    assert sorted(fills) == best_fit(sizes, 16)


def test_packs_hold_each_request_whole_and_once(split):
    packed = PackedSplit(split, 64, seed=1)
    numbers, fillers = [], 0
    for index in range(len(split.block_rows)):
        block = packed.read_block(index)
        stored = split.read_block(index)
        user = dict(zip(stored.dense[:, 0], stored.requests[:, 0], strict=True))
        for pack in range(0, block.rows, 64):
            request = block.requests[pack : pack + 64, 0]
            n, real = block.dense[pack : pack + 64, 0], request != PAD
            assert (np.diff(request) >= 0).all()
            assert np.isnan(block.labels[pack : pack + 64][~real]).all()
            assert len({(user[v], r) for v, r in zip(n[real], request[real], strict=True)}) == len(
                set(request[real])
            )
            numbers += n[real].tolist()
            fillers += (~real).sum()
        assert (packed.list_lengths(index) == block.list_lengths).all()
        assert (packed.requests(index) == block.requests[:, 0]).all()
    every = [v for b in split.blocks() for v in b.dense[:, 0]]
    if not packed.cut:
        assert sorted(numbers) == sorted(every)
    assert len(numbers) == 700 - packed.cut
    assert packed.fillers == fillers == packed.rows - len(numbers)
    assert packed.fingerprint == split.fingerprint


def test_a_request_larger_than_a_pack_keeps_its_positives(split):
    packed = PackedSplit(split, 16, seed=1)
    sizes = [np.unique(b.requests, return_counts=True)[1] for b in split.blocks()]
    assert packed.large == sum(int((s > 16).sum()) for s in sizes) > 0
    assert packed.cut == sum(int(np.maximum(s - 16, 0).sum()) for s in sizes)
    for index, stored in enumerate(split.blocks()):
        kept = set(packed.read_block(index).dense[:, 0])
        for request in np.unique(stored.requests):
            inside = stored.requests[:, 0] == request
            labels, numbers = stored.labels[inside, 0], stored.dense[inside, 0]
            is_kept = np.isin(numbers, list(kept))
            assert is_kept.sum() == min(len(numbers), 16)
            assert is_kept[labels > 0].sum() == min((labels > 0).sum(), 16)
    lines = []
    report_packs(packed, lines.append)
    assert f"{packed.fillers / packed.rows:.2%} of the examples of a batch are fillers" in lines[0]
    assert f"{packed.large} requests have more than 16 examples: {packed.cut} of" in lines[1]
    assert "No loss is corrected for them" in lines[1]
    assert "largest divisor of batch_size / data.shards up to 512" in lines[1]
    other = PackedSplit(split, 16, seed=2)
    assert (other.block_rows == packed.block_rows).all()
    blocks = range(len(split.block_rows))
    assert any((other.read_block(i).dense != packed.read_block(i).dense).any() for i in blocks)


SETTINGS = dict(
    batch_size=128,
    steps_per_execution=2,
    seed=5,
    shards=4,
    window_blocks=2,
    num_workers=0,
    prefetch_batches=0,
    list_slack=8.0,
    on_overflow="error",
    order="shuffled",
    num_steps=14,
)


def batches(split, schema, **changes):
    lay = layout(schema, {t.name: 4 for t in schema.tables})
    settings = SETTINGS | changes
    packed = pack_requests(split, settings["batch_size"] // settings["shards"], settings["seed"])
    return TrainBatches(packed, lay, **settings)


def steps(loader):
    return [
        {name: getattr(b, name)[i].copy() for name in ("dense", "requests", "weights", "labels")}
        for b in loader
        for i in range(len(b.labels))
    ]


def test_batches_depend_on_seed_and_step_alone(split, tmp_path):
    schema = open_store(split.path.parent).schema
    whole = steps(batches(split, schema))
    assert len(whole) == 14
    for batch in whole:
        assert ((batch["requests"] == PAD) == (batch["weights"][:, 0] == 0)).all()
    later = steps(batches(split, schema, first_step=6))
    halves = [steps(batches(split, schema, process=(i, 2))) for i in range(2)]
    for step, batch in enumerate(whole):
        for name, array in batch.items():
            if step >= 6:
                assert (array == later[step - 6][name]).all()
            joined = np.concatenate([half[step][name] for half in halves])
            assert (array == joined).all()
    other = steps(batches(split, schema, seed=6))
    assert any((a["dense"] != b["dense"]).any() for a, b in zip(whole, other, strict=True))
    # Every pack occurs once per pass of the streams.
    packed = pack_requests(split, 32, 5)
    numbers = np.concatenate([b["dense"][b["weights"][:, 0] > 0, 0] for b in whole])
    first_pass = packed.rows // 128
    seen = np.concatenate([b["dense"][b["weights"][:, 0] > 0, 0] for b in whole[:first_pass]])
    assert len(set(seen)) == len(seen)
    assert set(numbers) == {v for i in range(len(split.block_rows)) for v in _real(packed, i)}


def test_without_a_loss_of_requests_training_has_no_packs(split):
    config, schema = tiny.config(), open_store(split.path.parent).schema
    builder = Builder(config, schema)
    assert builder.pack(split) is split
    lay = layout(schema, {t.name: 4 for t in schema.tables})
    loader = TrainBatches(split, lay, **SETTINGS)
    assert next(loader).requests == ()
    changed(config, {"task_losses.click": "pairwise"})
    assert builder.pack(split).pack == 128 // 8


def test_an_uneven_batch_size_makes_no_tiny_packs(split):
    config = changed(tiny.config(), {"task_losses.click": "pairwise", "batch_size": 4168})
    builder = Builder(config, open_store(split.path.parent).schema)
    with pytest.raises(InputError, match=r"=4168, data.shards=8, packs of 1. Set batch_size=4096"):
        builder.check_requests(builder.pack(split))
    config.batch_size = 4096
    builder.check_requests(builder.pack(split))


def _real(packed, index):
    block = packed.read_block(index)
    return block.dense[block.requests[:, 0] != PAD, 0].tolist()


def test_a_store_without_requests_has_no_packs(tmp_path):
    store = run(tmp_path / "store", files(tmp_path / "raw", 40))
    split = store.split("train")
    assert pack_requests(split, 8, 0) is split
    with pytest.raises(InputError, match="number of examples: found 80 shards"):
        batches(split, store.schema, shards=80, batch_size=80)
