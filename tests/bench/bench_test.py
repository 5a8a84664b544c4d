"""Tests `jaxrank bench`: its results and advice, and that it changes nothing."""

import itertools
import json
import re
import time
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from checkout import TINY
from examples import small_schema
from runs import nothing, saved, store_config

from jaxrank import cli, config_files, loop
from jaxrank import config as configs
from jaxrank.bench import input_stages, measure
from jaxrank.bench.advice import STAGES, Setting, Throughput, find_limit, recommend
from jaxrank.build import Builder
from jaxrank.data import examples
from jaxrank.data.batches.batcher import Batcher
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.data.batches.workers import suitable_workers
from jaxrank.data.prepare import passes
from jaxrank.data.store import direct
from jaxrank.data.store.stored_split import StoredSplit
from jaxrank.errors import InputError, RunError
from jaxrank.layout import layout
from jaxrank.runtime import processes
from jaxrank.runtime.watchdog import Watchdog
from jaxrank.telemetry.profiler import Profile
from jaxrank.train import train
from jaxrank.workdir.lock import locked

pytestmark = pytest.mark.usefixtures("shared_programs")

PNG = b"\x89PNG\r\n\x1a\n"


def prepared(path, **arguments):
    c = tiny.config()
    plain = config_files.to_plain
    arguments = dict(block_size=512, report=nothing) | arguments
    return passes.prepare(plain(c.features), plain(c.source), path, **arguments)


def run(capsys, *args):
    """Runs `bench` and returns its JSON object and its standard error."""
    cli.run(["bench", f"--config={TINY}", "--seconds=0.2", *args, "--json"])
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    return json.loads(line), err


def contents(directory):
    """Returns the bytes and the modification time of every file except the lock."""
    result = {p: p for p in directory.rglob("*") if p.name != ".lock"}
    return {
        p: (p.stat().st_mtime_ns, p.read_bytes()) if p.is_file() else p.is_dir() for p in result
    }


def test_bench_reports_rates_stages_and_the_limit(capsys, tmp_path):
    picture = tmp_path / "b.png"
    flags = f"--workdir={tmp_path / 'w'}", f"--picture={picture}"
    result, err = run(capsys, *flags, "--config.data.num_workers=1")
    for part in ("input", "step", "both"):
        assert result[part]["examples_per_second"] > 0
        assert part in err
    assert list(result["stages"]) == list(STAGES)
    assert all(result["stages"][name] > 0 for name in ("shuffle", "pack", "transfer", "step"))
    # The data is one block, which stays in memory and is not compressed.
    assert result["stages"]["read"] == result["stages"]["decompress"] == 0
    rates = [result[part]["examples_per_second"] for part in ("step", "both")]
    assert result["both_over_step"] == pytest.approx(rates[1] / rates[0])
    assert result["stages"]["step"] == pytest.approx(1e6 / rates[0])
    assert result["limit"] in STAGES
    assert result["advice"] in err
    assert result["batch_size"] == 128
    assert result["device"] == "1 x cpu"
    assert picture.read_bytes().startswith(PNG)
    # Only the data, which a run in this workdir would prepare too.
    assert sorted(p.name for p in (tmp_path / "w").iterdir()) == ["data"]


def test_bench_leaves_the_workdir_of_a_run_as_it_is(capsys, tmp_path):
    train(tiny.config(num_steps=8), tmp_path, report=nothing)
    before = contents(tmp_path)
    assert any(p.parts[-3:-1] == ("checkpoints", "8") for p in before)
    run(capsys, f"--workdir={tmp_path}", "--config.num_steps=80")
    assert contents(tmp_path) == before


def test_bench_reads_the_store_that_a_run_names(store, tmp_path):
    saved(store_config(store), tmp_path)
    before = contents(tmp_path)
    measure.bench(tiny.config(), tmp_path, seconds=0.5, report=nothing)
    assert contents(tmp_path) == before  # no new data


def test_bench_needs_nothing_to_evaluate_where_training_waits_for_it():
    c = tiny.config()
    c.eval.early_stopping_patience = c.eval.reduce_lr_patience = 2
    configs.check(Builder(c, small_schema()).without_evaluation().config)
    assert c.eval.early_stopping_patience == 2


def test_bench_waits_for_no_run_and_rejects_what_cannot_be_measured(tmp_path, monkeypatch):
    def rejected(message, seconds=1.0, **changes):
        with pytest.raises(InputError, match=message):
            measure.bench(tiny.config(**changes), tmp_path, seconds=seconds, report=nothing)

    rejected("--seconds: must be .*: found 0", seconds=0)
    rejected("--seconds.* found nan", seconds=float("nan"))
    rejected("num_steps, num_epochs: ", num_epochs=2.0)
    with locked(tmp_path), pytest.raises(RunError, match="another process trains"):
        measure.bench(tiny.config(), tmp_path, seconds=1.0, report=nothing)
    monkeypatch.setattr(processes, "place", lambda: (0, 2))
    rejected("one process: found 2")


class Counting(NamedTuple):
    step: int


def test_bench_measures_the_loop_of_train_from_the_first_call_after_the_warm_ones(
    tmp_path, monkeypatch
):
    now, taken = [0.0], []

    def train_executions(state, batch, count):
        now[0] += 10.0 if len(taken) < 3 else 0.25
        taken.append(batch)
        return Counting(state.step + count), None

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = measure.Clock(warm=3, seconds=1.0)
    profiler = Profile(None, tmp_path, 0, nothing, nothing, steps_per_execution=2, num_steps=100)
    session = loop.Session(
        train=train_executions,
        steps_per_execution=2,
        num_steps=100,
        feed=itertools.count(),
        recorder=clock,
        milestones=clock,
        profiler=profiler,
        watch=Watchdog(0),
        stop=None,
    )
    assert loop.run(session, Counting(4)).step == 4 + 2 * 7
    assert taken == list(range(7))
    assert clock.executions_per_second == 4.0


def test_calls_made_before_the_clock_starts_do_not_count():
    def slow():
        yield from range(50)  # prefetched
        while True:
            time.sleep(0.02)
            yield 0

    assert 0 < measure.executions_per_second(slow(), 50, 0.2) <= 50


def test_each_part_of_the_input_is_reported_with_the_time_that_it_took(tmp_path, monkeypatch):
    # A clock that moves only when these functions are called.
    now, spent = [0.0], []

    def slowed(where, name, part, seconds):
        function = getattr(where, name)

        def call(*args):
            now[0] += seconds
            spent.append((part, seconds))
            return function(*args)

        monkeypatch.setattr(where, name, call)

    stored = prepared(tmp_path / "store")
    split, make = stored.split("train"), make_batches(stored.schema)
    slowed(StoredSplit, "read_block", "read", 0.5)
    slowed(examples, "gather", "shuffle", 0.25)
    slowed(Batcher, "fill", "pack", 0.125)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    result = input_stages.measure(split, make, 256, 100.0)

    # The first execution, of two steps, is not counted.
    counted = spent[[i for i, (_, seconds) in enumerate(spent) if seconds == 0.125][1] + 1 :]
    batches = sum(seconds == 0.125 for _, seconds in counted)
    assert batches > 20
    for part in ("read", "shuffle", "pack"):
        seconds = sum(seconds for name, seconds in counted if name == part)
        assert seconds > 0
        assert result[part] == pytest.approx(seconds / (batches * 128) * 1e6)
    assert result["decompress"] == 0


def test_decompression_costs_where_blocks_are_compressed(tmp_path):
    stored = prepared(tmp_path / "store", compression="zstd")
    result = input_stages.measure(stored.split("train"), make_batches(stored.schema), 256, 0.2)
    assert result["decompress"] > 0


def test_parquet_that_is_read_directly_costs_reading(tmp_path):
    rows = np.arange(2000)
    columns = {"click": rows % 2, "u": rows % 50, "t": [[i % 7] * (i % 3) for i in rows]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=100)
    features = dict(
        tasks=[dict(name="click", label="click")],
        categorical=[dict(columns="u", encoding="integer", rows=50)],
        ragged=[dict(columns="t", encoding="integer", rows=7)],
    )
    source = dict(kind="parquet", files=dict(train=str(tmp_path / "a.parquet")))
    result = direct.open_direct(features, source)
    costing = input_stages.measure(result.split("train"), make_batches(result.schema), 256, 0.2)
    assert max(costing, key=costing.get) == "read"
    assert costing["decompress"] == 0


def make_batches(schema):
    def make(split):
        return TrainBatches(
            split,
            layout(schema, {t.name: 8 for t in schema.tables}),
            batch_size=128,
            steps_per_execution=2,
            seed=0,
            shards=8,
            window_blocks=2,
            num_workers=0,
            prefetch_batches=0,
            list_slack=8.0,
            on_overflow="truncate",
            order="shuffled",
            num_steps=2**20,
        )

    return make


SETTING = Setting(
    cores=16,
    on_host=False,
    batch_size=4096,
    steps_per_execution=8,
    shards=8,
    num_workers=0,
    prefetch_batches=16,
    window_blocks=4,
    compression="lz4",
    direct=False,
)


def stages(read=0.1, decompress=0.1, shuffle=0.1, pack=0.1, transfer=0.1, step=1.0):
    return dict(zip(STAGES, (read, decompress, shuffle, pack, transfer, step), strict=True))


@pytest.mark.parametrize(
    ("rates", "costing", "changes", "limit", "advice"),
    [
        # As fast as the step, at any cost of the input.
        ((9e6, 1e6, 0.96e6), dict(read=5.0), {}, "step", "batch_size, now 4096"),
        ((2e6, 1e6, 1.1e6), {}, {}, "step", "110% of its speed"),
        # The input is much faster, so something else limits.
        ((14e6, 1e6, 0.85e6), {}, {}, "step", "is other work on the machine or noise"),
        # 4 million examples/s can be made, and only 2 million put.
        ((4e6, 5e6, 2e6), dict(transfer=0.5), {}, "transfer", "steps_per_execution, now 8"),
        # One thread needs 1.3 s per million and the step takes 3 million/s: 4 workers.
        ((1e6, 3e6, 1e6), dict(pack=1.0), {}, "pack", "data.num_workers, now 0, to 4"),
        ((1e6, 3e6, 1e6), dict(pack=1.0), dict(cores=2), "pack", "now 0, to 2"),
        ((1e6, 1.2e6, 0.9e6), dict(pack=0.5), dict(prefetch_batches=0), "pack", "now 0, to 1"),
        # More workers than 8 shards can use: one per shard.
        ((1e6, 30e6, 1e6), dict(read=1.0), dict(num_workers=4), "read", "now 4, to 8"),
        ((1e6, 30e6, 1e6), dict(read=1, decompress=0), dict(num_workers=8), "read", "'lz4' to"),
        ((1e6, 30e6, 1e6), dict(read=1.0), dict(num_workers=8), "read", "'zstd' to"),
        (
            (1e6, 30e6, 1e6),
            dict(read=1.0),
            dict(num_workers=8, compression="zstd"),
            "read",
            " Move data.store",
        ),
        ((1e6, 3e6, 1e6), dict(read=1.0), dict(cores=1, direct=True), "read", "data.direct to Fal"),
        ((1e6, 3e6, 1e6), dict(decompress=1.0), dict(cores=1), "decompress", "'lz4' takes less"),
        ((1e6, 3e6, 1e6), dict(shuffle=1.0), dict(cores=1), "shuffle", "data.window_blocks, now 4"),
        (
            (1e6, 3e6, 1e6),
            dict(shuffle=1.0),
            dict(cores=4, num_workers=4, window_blocks=1),
            "shuffle",
            "Add cores",
        ),
        # Two workers make half as much as one thread.
        ((0.4e6, 3e6, 0.4e6), dict(pack=0.9), dict(num_workers=2), "pack", "now 2, to 0"),
        # The input is fast enough on average.
        ((4e6, 3e6, 2e6), dict(shuffle=0.2), {}, "shuffle", "data.prefetch_batches, now 16, to 32"),
        # The input and the step share the cores.
        ((4e6, 3e6, 2e6), dict(pack=0.2), dict(on_host=True, cores=2), "pack", "share 2 cores"),
    ],
)
def test_the_limit_and_the_setting_to_change_follow_from_the_numbers(
    rates, costing, changes, limit, advice
):
    rates, lines = Throughput(*rates), stages(**costing)
    assert find_limit(rates, lines) == limit
    result = recommend(limit, rates, lines, SETTING._replace(**changes))
    assert advice in result


@pytest.mark.parametrize("step", [1e6, 3e6])  # faster and slower than the input
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("limit", "window", "cheaper"),
    [
        ("read", 4, "'zstd' to read fewer bytes"),
        ("decompress", 4, "'lz4' takes less"),
        ("shuffle", 4, "data.window_blocks, now 4"),
        ("shuffle", 1, "Fewer columns"),
        ("pack", 4, "Fewer columns"),
    ],
)
def test_a_cpu_host_is_advised_a_cheaper_input_and_no_workers(
    limit, window, cheaper, workers, step
):
    rates = Throughput(2e6, step, 0.6e6)
    setting = SETTING._replace(on_host=True, cores=2, num_workers=workers, window_blocks=window)
    automatic = suitable_workers(setting.shards, cores=setting.cores, accelerators=0)
    result = recommend(limit, rates, stages(**{limit: 0.2}), setting)
    assert "share 2 cores" in result
    assert cheaper in result
    assert re.findall(r"data.num_workers, now (\d), to (\d+)", result) == (
        [(str(workers), str(automatic))] if workers > automatic else []
    )
    assert "for data.num_workers" not in result
