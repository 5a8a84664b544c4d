"""Tests `jaxrank plan` on the command line, and the placement of the acceptance case."""

import json
import re

import jax
import numpy as np
import pytest
import tiny
from checkout import ROOT, TINY
from runs import saved, store_config

from jaxrank import cli, report
from jaxrank import run as job
from jaxrank.aot import topology
from jaxrank.config_files import load, overridden
from jaxrank.embedding import make_row_optimizer
from jaxrank.errors import InputError, RunError
from jaxrank.features import Categorical, Schema, Table, Task
from jaxrank.layout import ReplicatedRows, layout
from jaxrank.placement import budget
from jaxrank.placement import plan as plans
from jaxrank.program import BatchShape

CONFIGS = ROOT / "configs"
# All devices, for tests that set a machine of their own.
WHOLE = (f"--config={TINY}", "--config.mesh.devices=0")
SMALL = (*WHOLE, "--batches=2")
ON_EIGHT = (*SMALL, "--devices=8", "--memory=1GiB")


def plan(capsys, *args):
    """Runs `plan` and returns its JSON object and its standard error."""
    cli.run(["plan", *args, "--json"])
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    return json.loads(line), err


def test_a_plan_reports_all_that_is_asked_of_it(capsys):
    result, err = plan(capsys, *ON_EIGHT)
    assert result["devices"] == 8
    assert result["fits"] is True
    assert result["over_bytes"] == 0
    assert result["memory_bytes"] == 2**30
    assert len(result["bytes_per_device"]) == len(result["lookups_per_device"]) == 8
    assert set(result["bytes_per_device"]) == {sum(result["bytes_by_kind"].values())}
    lookups = np.array(result["lookups_per_device"])
    assert lookups.min() > 0
    assert 1 < result["imbalance"] <= result["largest_imbalance"] < 8
    assert 0 < result["buffer_use"] < 1
    assert result["capacity"]["dim8"] % 8 == 0
    assert result["rounds"]["dim8"] >= 1
    assert result["fullest_over_mean"]["dim8"] > 1
    assert result["exchanged_bytes_per_step"] > 0
    assert result["error"] == ""
    tables = {t["name"]: t for t in result["tables"]}
    assert list(tables) == ["c0", "c1", "l0", "l1"]
    assert tables["c0"]["rows"] == 300
    assert tables["c0"]["dim"] == 8
    assert tables["c0"]["placement"] == "rows"
    assert tables["c1"]["placement"] == "replicated"
    assert tables["c1"]["reason"] == "at most 64 rows"
    assert tables["c1"]["replicated_rows"] == 40
    assert tables["c0"]["bytes"] == 300 * (8 + 1) * 4  # rows, and one accumulator per row
    for word in ("c0", "accumulators", "imbalance", "buffer use", "fits"):
        assert word in err


def test_a_prepared_store_is_planned_by_where_there_is_one(capsys, tmp_path):
    _, err = plan(capsys, *ON_EIGHT, f"--workdir={tmp_path}")
    assert "generated data" in err
    assert re.search(r"Packed lists of dim8: capacity \d+ ids .* estimated from a sample", err)
    cli.run(["prepare", f"--config={TINY}", f"--output={tmp_path / 'data'}"])
    capsys.readouterr()
    by_workdir, err = plan(capsys, *ON_EIGHT, f"--workdir={tmp_path}")
    assert f"sample of {tmp_path / 'data' / 'train'}" in err
    assert re.search(r"Packed lists of dim8: capacity \d+ ids .* \(largest group of the run\)", err)
    by_field, _ = plan(capsys, *ON_EIGHT, f"--config.data.store={tmp_path / 'data'}")
    assert by_field == by_workdir
    with pytest.raises(InputError, match="(?s)features of the config.*300.*, now .*301"):
        plan(
            capsys, *ON_EIGHT, f"--workdir={tmp_path}", "--config.features.categorical[0].rows=301"
        )


def test_the_store_that_a_run_names_is_read_where_the_command_names_none(capsys, store, tmp_path):
    run = tmp_path / "run"
    saved(store_config(store), run)
    _, err = plan(capsys, *ON_EIGHT, f"--workdir={run}")
    assert f"sample of {store / 'train'}" in err
    other = tmp_path / "other"
    cli.run(["prepare", f"--config={TINY}", f"--output={other}"])
    capsys.readouterr()
    _, err = plan(capsys, *ON_EIGHT, f"--workdir={run}", f"--config.data.store={other}")
    assert f"sample of {other / 'train'}" in err
    lines = []
    plans.load_inputs(tiny.config(), str(run), lines.append)  # as `compile` does
    assert lines[-1:] == [f"Reading a sample of {store / 'train'}"]


@pytest.mark.parametrize("is_stored", [True, False])
def test_what_training_rejects_is_rejected_before_a_sample_is_read(store, is_stored):
    c = tiny.config()
    c.data.store = str(store) if is_stored else ""
    lines = []
    for wrong, message in (
        ({"task_weights": (1.0,)}, "task_weights: must have one number per task"),
        ({"embedding.dims.nosuch": 4}, "embedding.dims: 'nosuch' must match a table"),
    ):
        with pytest.raises(InputError, match=message):
            plans.load_inputs(overridden(c, wrong), "", lines.append)
    assert lines == []


def test_a_vocabulary_is_planned_from_its_store(capsys, tmp_path):
    """Rows 0 and 1 are for missing and unknown values, and are hardly ever read."""
    encoding = (
        "--config.features.categorical[0].encoding=vocabulary",
        "--config.features.categorical[0].rows=0",
    )
    store = tmp_path / "store"
    cli.run(["prepare", f"--config={TINY}", f"--output={store}", *encoding])
    capsys.readouterr()
    result, _ = plan(capsys, *ON_EIGHT, *encoding, f"--config.data.store={store}")
    (table,) = [t for t in result["tables"] if t["name"] == "c0"]
    assert table["replicated_rows"] > 2
    assert result["warnings"] == [] or "falling" not in result["warnings"][0]


def test_counted_bytes_are_those_of_the_state_that_a_run_makes(tmp_path):
    config = tiny.config()
    built = job.build(config, tmp_path, report=lambda _: None)
    machine = dict(devices=1, memory=2**30)
    planned = plans.plan(config, **machine, batches=1, workdir=str(tmp_path), report=lambda _: None)
    state = built.program.state_shape

    def size(tree):
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))

    result = planned.cost.bytes
    assert result.tables == sum(size(t.rows) for t in state.tables.values())
    assert result.accumulators == sum(size(t.slots) for t in state.tables.values())
    assert result.dense == 2 * size(state.params) + size((state.model_state, state.opt_state))
    batch = built.program.shape.struct(planned.cost.layout)
    assert result.batches == 3 * config.steps_per_execution * size(batch)
    assert result.buffers == 0
    # Layers of 16, 2 tasks and cross layers on the input. At least their outputs are kept.
    assert result.activations > 128 * (16 + 2) * 4


def test_bytes_of_a_device_fall_with_the_devices_and_replicas_keep_them(capsys):
    args = (*SMALL, "--memory=1GiB", "--config.embedding.placement=rows")
    tables = {}
    for devices, replicas in ((1, 1), (2, 1), (8, 1), (8, 4)):
        mesh = (f"--devices={devices}", f"--replicas={replicas}")
        result, _ = plan(capsys, *args, *mesh)
        tables[devices, replicas] = result["bytes_by_kind"]["tables"]
        assert result["replicas"] == replicas
    assert tables[1, 1] == 2 * tables[2, 1] == 8 * tables[8, 1] == 2 * tables[8, 4]


def test_what_is_exchanged_is_counted_from_the_buffers(capsys):
    split = (*SMALL, "--memory=1GiB", "--config.embedding.placement=rows")
    single, _ = plan(capsys, *split, "--devices=1")
    assert single["exchanged_bytes_per_step"] == 0
    small, _ = plan(capsys, *split, "--devices=4", "--config.embedding.exchange_capacity=16")
    large, _ = plan(capsys, *split, "--devices=4", "--config.embedding.exchange_capacity=32")
    assert (small["capacity"], large["capacity"]) == ({"dim8": 16}, {"dim8": 32})
    # 16 more ids, vectors and gradients of 8 numbers to each of 3 other devices.
    more = large["exchanged_bytes_per_step"] - small["exchanged_bytes_per_step"]
    assert more == 3 * 16 * (1 + 2 * 8) * 4
    assert small["rounds"]["dim8"] > large["rounds"]["dim8"] > 1
    assert re.search(r"dim8 takes \d.*Raise embedding.exchange_slack", small["warnings"][-1])


def test_bytes_are_those_of_each_buffer_and_each_collective():
    """Two replicas of four owners, buffers of 16 ids, dimension 8, 40 replicated rows."""
    schema = Schema(
        tasks=(Task("click"),),
        dense=(),
        categorical=(Categorical("a", "a"), Categorical("b", "b")),
        ragged=(),
        tables=(Table("a", 40, "integer"), Table("b", 5000, "integer")),
    )
    planned = layout(schema, {"a": 8, "b": 8}, {"dim8": ReplicatedRows(replicated_tables=("a",))})
    partition = budget.Partition(replicas=2, shards=4, capacities={"dim8": 16})
    dense = budget.DensePart(parameters=8000, state=0, activations=10)
    number, row = 4, 8 * 4

    to_other_owners = 3 * 16 * (number + row + row)  # ids and gradients out, vectors back
    to_other_replica = 4 * 16 * (number + row)
    summed = 8000 + 40 * (row + number)
    assert budget.exchanged(planned, partition, dense) == round(
        to_other_owners + to_other_replica + 2 * 7 / 8 * summed
    )

    result = budget.device_bytes(
        planned,
        make_row_optimizer("sgd"),
        partition,
        BatchShape(64, 8, {}).struct(planned),
        dense,
        steps_per_execution=3,
        updates_whole_tables=False,
    )
    both_ways = 2 * 4 * 16 * (number + row + row)
    at_owner = 2 * 4 * 16 * (number + row + row)  # gathered from both replicas, and summed
    # 16 rows of 8 numbers are a line of 128, so 40 rows are stored as 48. 5,000 rows are stored as
    # 16,384: 1,024 groups of whole lines.
    assert result.buffers == both_ways + at_owner + 48 * (row + number)
    assert result.tables == 48 * row + 16384 // 4 * row
    assert result.accumulators == 0
    assert result.vectors == 3 * (64 // 8) * 2 * row
    assert result.activations == 8 * 10


def test_placements_are_mixed_freely(capsys):
    result, _ = plan(
        capsys,
        *ON_EIGHT,
        "--config.embedding.placement=rows",
        "--config.embedding.placements={'c*': 'auto', 'l0': 'replicated'}",
    )
    placement = {t["name"]: (t["placement"], t["replicated_rows"]) for t in result["tables"]}
    assert placement["c1"] == ("replicated", 40)
    assert placement["l0"] == ("replicated", 60)
    assert placement["l1"] == ("rows", 0)
    assert placement["c0"][0] == "rows"
    assert placement["c0"][1] > 0


def test_a_plan_that_does_not_fit_reports_the_smallest_change_that_helps(capsys):
    split = (*SMALL, "--config.embedding.placement=rows", "--config.source.categorical=(300000,40)")
    split += ("--config.features.categorical[0].rows=300000",)
    whole, _ = plan(capsys, *split, "--devices=1", "--memory=1GiB")
    memory = f"--memory={whole['bytes_per_device'][0] // 5}"
    with pytest.raises(RunError, match="found .* too much.*--devices=8 ") as e:
        cli.run(["plan", *split, "--devices=2", memory, "--json"])
    assert e.value.exit_status == 1
    rejected = json.loads(capsys.readouterr().out)
    assert rejected["fits"] is False
    assert rejected["over_bytes"] == rejected["bytes_per_device"][0] - rejected["memory_bytes"]
    assert rejected["error"] == str(e.value)
    plan(capsys, *split, "--devices=8", memory)
    with pytest.raises(RunError):
        cli.run(["plan", *split, "--devices=4", memory])


def test_a_table_that_is_replicated_by_force_is_named_where_it_does_not_fit(capsys):
    args = (
        *ON_EIGHT,
        "--config.source.categorical=(300000,40)",
        "--config.features.categorical[0].rows=300000",
    )
    forced = "--config.embedding.placements={'*': 'replicated'}"
    auto, _ = plan(capsys, *args)
    args += (f"--memory={auto['bytes_per_device'][0] * 2}",)
    with pytest.raises(RunError, match=re.escape("embedding.placements = {'c0': 'rows'} (")):
        cli.run(["plan", *args, forced])


def test_fewer_replicas_are_the_change_where_they_help(capsys):
    args = (
        *SMALL,
        "--config.source.categorical=(300000,40)",
        "--config.features.categorical[0].rows=300000",
    )
    single, _ = plan(capsys, *args, "--devices=8", "--memory=1GiB")
    memory = f"--memory={round(single['bytes_per_device'][0] * 1.2)}"
    with pytest.raises(RunError, match="change that fits: --replicas=1 "):
        cli.run(["plan", *args, "--devices=8", "--replicas=4", memory])


def test_nothing_is_promised_where_nothing_helps():
    with pytest.raises(RunError, match="Neither other placements nor more"):
        cli.run(["plan", *SMALL, "--devices=8", "--memory=1000"])


def test_a_device_that_is_nearly_full_is_reported(capsys):
    result, _ = plan(capsys, *ON_EIGHT)
    memory = f"--memory={round(result['bytes_per_device'][0] / 0.95)}"
    full, err = plan(capsys, *ON_EIGHT, memory)
    assert full["fits"] is True
    assert "a device needs 95% of its memory" in full["warnings"][0]
    assert f"warning: {full['warnings'][0]}" in err


def test_a_plan_is_for_the_devices_that_a_run_uses(capsys):
    four, _ = plan(capsys, *SMALL, "--devices=4", "--memory=1GiB")
    some, _ = plan(capsys, *SMALL, "--devices=24", "--memory=1GiB", "--config.mesh.devices=4")
    assert some == four
    need = four["bytes_per_device"][0]
    two = (*SMALL, "--devices=8", f"--memory={need}", "--config.mesh.devices=2")
    with pytest.raises(RunError, match="change that fits: mesh.devices=4 "):
        cli.run(["plan", *two])


def test_the_picture_is_a_png(capsys, tmp_path):
    path = tmp_path / "plan.png"
    plan(capsys, *ON_EIGHT, f"--picture={path}")
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert width > 800
    assert height > 600
    with pytest.raises(RunError, match="/dev/full: cannot be written"):
        cli.run(["plan", *ON_EIGHT, "--picture=/dev/full"])


def test_without_a_store_only_generated_data_can_be_planned():
    config = f"--config={ROOT / 'configs' / 'criteo.py'}"
    with pytest.raises(InputError, match="data.store: .*: found 'none'.*`jaxrank prepare`"):
        cli.run(["plan", config, "--topology=v3-8"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--devices, --topology: one of them.*--devices=None"),
        (("--devices=8", "--topology=v3-8"), "--devices, --topology: one of them.*'v3-8'"),
        (("--devices=8",), "--memory: must be given with --devices"),
        (("--devices=8", "--memory=16XB"), "--memory: must be.*16GiB: found '16XB'"),
        (("--devices=8", "--memory=0"), "--memory: must be .* above 0.*'0'"),
        (("--devices=0", "--memory=1GiB"), "--devices.* at least 1: found 0"),
        (("--devices=-2", "--memory=1GiB"), "--devices.* at least 1: found -2"),
        (("--devices=48", "--memory=1GiB"), "divides 1024: found 48"),
        (
            ("--topology=v3-8", "--config.mesh.devices=9"),
            "mesh.devices: must be at most 8.*found 9",
        ),
        (("--topology=v3-8", "--config.eval.metric=click/foo"), "eval.metric: must be one of"),
        (("--topology=v3-8", "--config.data.valid=nope"), "data.valid: must be a split"),
        (
            ("--topology=v3-8", "--config.num_epochs=1.0"),
            "num_steps, num_epochs: .* 0: found num_steps=16",
        ),
        (("--devices=256", "--memory=1GiB"), "batch_size=128, 256 devices"),
        (
            ("--devices=8", "--memory=1GiB", "--replicas=3"),
            "--replicas: must divide .* found 3, 8 devices",
        ),
        (("--devices=8", "--memory=1GiB", "--batches=0"), "--batches.* at least 1: found 0"),
        (
            ("--topology=v9-8",),
            "v2, v3, v4, .*, h200.*'v9-8'",
        ),
        (
            ("--topology=v3-8", "--config.embedding.placement=row"),
            "embedding.placement.* 'auto', 'rows', 'replicated': found 'row'",
        ),
        (
            ("--topology=v3-8", "--config.embedding.placements={'x*': 'rows'}"),
            r"embedding.placements: 'x\*' must match a table: .* c0",
        ),
        (
            ("--topology=v3-8", "--config.embedding.exchange_slack=-1.0"),
            "embedding.exchange_slack.* at least 0: found -1.0",
        ),
        (
            ("--topology=v3-8", "--config.source.kind=csv"),
            r"source\..*: must be a field.*delimiter, .*files, kind",
        ),
        (
            ("--topology=v3-8", "--config.data.train=x"),
            r"data.train: .* \['train', 'valid'\]: found 'x'",
        ),
        (("--topology=v3-8", "--config.optim.dense.name=x"), "optim.dense.name: must be one of"),
        (
            ("--topology=v3-8", "--config.optim.tables.base_learning_rate=-1"),
            "tables.base_learning_rate: must be at",
        ),
    ],
)
def test_what_cannot_be_planned_is_rejected(args, message):
    with pytest.raises(InputError, match=message):
        cli.run(["plan", *WHOLE, *args])


@pytest.mark.parametrize(
    ("name", "devices", "gibibytes"),
    [
        ("v2-8", 8, 8),
        ("v3-32", 32, 16),
        ("v4-128", 64, 32),
        ("v5e-16", 16, 16),
        ("v5litepod-16", 16, 16),
        ("v5p-8", 4, 95),
        ("v6e-8", 8, 32),
        ("h200-16", 16, 139),
    ],
)
def test_names_of_slices_and_gpus_say_how_many_devices_of_which_memory(name, devices, gibibytes):
    result = topology.topology(name)
    assert (result.devices, result.hbm_bytes) == (devices, gibibytes * 2**30)


def test_a_number_that_no_slice_has_is_rejected():
    with pytest.raises(InputError, match="two per chip.*multiple of 2: found 'v4-7'"):
        topology.topology("v4-7")
    with pytest.raises(InputError, match="found 'v3-0'"):
        topology.topology("v3-0")
    with pytest.raises(InputError, match="found 'v3'"):
        topology.topology("v3")


def test_a_program_may_use_of_a_gpu_what_jax_takes_there(monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(name, raising=False)
    assert topology.topology("h200-1").usable_bytes == 0.75 * 139 * 2**30
    monkeypatch.setenv(name, "0.9")
    assert topology.topology("h200-1").usable_bytes == int(0.9 * 139 * 2**30)
    assert topology.topology("v5p-8").usable_bytes == 95 * 2**30
    machines = []

    def stop(config, *, topology, memory, **_):
        machines.append((topology, memory))
        raise InputError("stop")

    monkeypatch.setattr(plans, "plan", stop)
    with pytest.raises(InputError, match="stop"):
        cli.run(["plan", f"--config={TINY}", "--topology=h200-16"])
    assert machines == [("h200-16", int(0.9 * 139 * 2**30))]
    for wrong in ("", "much", "0", "1.5", "nan"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(InputError, match=f"{name}: must be a number above 0.*{wrong!r}"):
            topology.topology("a100-1").usable_bytes  # noqa: B018


def test_sizes_of_memory_are_read_as_people_write_them():
    sizes = {"16GiB": 2**34, "80GB": 80 * 10**9, "1.5 TiB": 3 * 2**39, "1000": 1000, "2kb": 2000}
    assert {text: report.parse_bytes(text) for text in sizes} == sizes
    assert report.format_bytes(3 * 2**29) == "1.50 GiB"
    assert report.format_bytes(12) == "12 B"


def power_law(exponent, devices, batches, placement="auto"):
    """26 tables of 10 to 40 M rows, a global batch of 131,072 examples."""
    config = load(CONFIGS / "powerlaw.py")
    config.source.exponent = exponent
    config.embedding.placement = placement
    machine = dict(devices=devices, memory=16 * 2**30)
    return plans.plan(config, **machine, batches=batches, workdir="", report=lambda _: None)


@pytest.mark.parametrize(("exponent", "devices"), [(1.05, 32), (1.5, 128)])
def test_devices_serve_alike_under_a_power_law(exponent, devices):
    result = power_law(exponent, devices, batches=10)
    tables = result.cost.plan.tables
    assert len(tables) == 26
    assert (tables[0].rows, tables[-1].rows) == (10, 40_000_000)
    assert result.batch_size == 131_072
    assert result.replay.imbalance <= 1.05
    assert max(result.replay.rounds.values()) == 1
    assert result.warnings == ()


def test_without_the_hottest_rows_on_every_device_one_serves_too_much():
    result = power_law(1.5, 128, batches=4, placement="rows")
    assert result.replay.imbalance > 1.08
    assert "the busiest device serves 1." in result.warnings[0]
