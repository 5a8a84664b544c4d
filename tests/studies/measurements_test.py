"""The studies `scaling`, `input` and `cost`: their runs, tables and conclusions."""

import dataclasses

import pytest
import tiny
from driving import check_texts, rows_when_stopped
from ml_collections import ConfigDict

from jaxrank import cli, config_files, json_files
from jaxrank.aot.prices import COLUMNS, Prices
from jaxrank.aot.scaling import PARTS
from jaxrank.aot.topology import topology
from jaxrank.errors import InputError
from jaxrank.studies import cost, input, registry, scaling
from jaxrank.studies.execution import measure
from jaxrank.studies.execution.directories import Directories
from jaxrank.studies.execution.kinds import RunInput
from jaxrank.studies.study import Context, RunResult, RunSpec

CPU = {"count": 1, "kind": "cpu", "platform": "cpu", "cores": 2}


def ignore(text):
    """Drops a line of a report."""


def answered(spec, answer):
    """The result of a run by `answer`, see `driven`."""
    measured = answer(spec)
    if measured is None:
        return RunResult(spec, "failed", error="too hot")
    rate, values = measured
    return RunResult(spec, "done", examples_per_second=rate, values=values)


def driven(study, answer, config=None, overrides=(), **options):
    """Drives a study by made-up results.

    answer: spec -> (examples/s, values), or None for a failed run.

    Returns:
        The outcome, and the specs by name.
    """
    config = config or tiny.config(batch_size=128)
    context = Context(config, study.options(**options), ignore, overrides)
    runs, specs = study.runs(context), {}
    batch = next(runs)
    while True:
        results = []
        for spec in batch:
            assert specs.setdefault(spec.name, spec) == spec
            results.append(answered(spec, answer))
        try:
            batch = runs.send(results)
        except StopIteration as stop:
            check_texts(stop.value.conclusion, stop.value.notes)
            return stop.value, specs


def rows(outcome, **cells):
    """The rows of a table with these cells, as dictionaries."""
    tables = [dict(zip(outcome.table.columns, row, strict=True)) for row in outcome.table.rows]
    return [row for row in tables if all(row[name] == value for name, value in cells.items())]


def bench(rate, device="1 x cpu"):
    return rate, {"step": {"examples_per_second": 1.1 * rate}, "limit": "step", "device": device}


def estimated(rate, name):
    seconds = dict.fromkeys(PARTS, 0.001)
    machine = topology(name)
    return rate, {"seconds": seconds, "limit": "model", "devices": machine.devices}


def scaled(spec):
    if spec.kind == "devices":
        return 0.0, CPU
    if spec.kind == "bench":
        devices = spec.overrides["mesh.devices"]
        return None if spec.name == "measured-4-batch-512" else bench(1000.0 * devices**0.5)
    name = spec.settings["topology"]
    return estimated(1000.0 * topology(name).devices ** 0.6, name)


def test_scaling_compares_each_family_with_its_smallest_machine():
    options = dict(devices=(1, 2, 4), topologies=("v3-8", "v3-128", "a100-4"))
    outcome, specs = driven(scaling.STUDY, scaled, **options)
    weak, strong = (specs[f"measured-2-batch-{batch}"] for batch in (256, 128))
    assert strong.overrides["batch_size"] == 128
    assert weak.devices == weak.overrides["mesh.devices"] == 2
    assert sum("v3-8-batch" in name for name in specs) == 1  # for both
    slice_spec = specs[f"estimated-v3-128-batch-{16 * 128}"]
    assert slice_spec.overrides["data.shards"] == 128
    _, small = driven(scaling.STUDY, scaled, **options, measured_batch_size=64)
    assert "measured-2-batch-128" in small
    assert "measured-1-batch-64" in small
    assert f"estimated-v3-128-batch-{16 * 128}" in small
    (two,) = rows(outcome, how="measured", batch="weak", devices=2)
    assert two["speed-up"] == pytest.approx(2**0.5)
    assert two["of linear"] == pytest.approx(2**-0.5)
    (pod,) = rows(outcome, machine="v3-128", batch="strong")
    assert pod["speed-up"] == pytest.approx(16**0.6)
    assert pod["exchange, ms"] == pytest.approx(1)
    assert not rows(outcome, how="measured", batch="weak", devices=4)  # failed
    labels = [series.label for series in outcome.panels[0].series]
    assert "Snap 2022: 5.25x of 16x" in labels
    assert "v3, estimated" in labels
    colors = {s.label: s.color for s in outcome.panels[0].series}
    assert colors["measured"] != colors["v3, estimated"] != colors["a100, estimated"]
    first, second = outcome.conclusion
    assert "is 1.41 times with 2 times the devices (measured)" in first
    assert "5.28 times with 16 times the devices (v3, estimated)" in first
    assert "Estimates come from compiled programs and published rates, not from runs" in second
    assert "devices of this processor share its cores" in second
    assert any("Snap measured 5.25 times" in note for note in outcome.notes)


def test_scaling_measures_powers_of_two_up_to_the_cores_of_a_cpu():
    _, specs = driven(scaling.STUDY, scaled, topologies=("v3-8",))
    assert {s.overrides["mesh.devices"] for s in specs.values() if s.kind == "bench"} == {1, 2}
    with pytest.raises(InputError, match="--topologies: .*found 'v9-8'"):
        driven(scaling.STUDY, scaled, topologies=("v9-8",))
    with pytest.raises(InputError, match="--devices: must be at most 256 .*: found 300"):
        driven(scaling.STUDY, scaled, devices=(1, 300))


def test_scaling_of_one_number_of_devices_concludes_that():
    def on_gpu(spec):
        values = CPU | {"platform": "gpu"} if spec.kind == "devices" else bench(1.0)[1]
        return 1.0, values

    outcome, _ = driven(scaling.STUDY, on_gpu, devices=(1,), topologies=())
    assert outcome.conclusion == [
        "No machine has results with a batch that grows over several numbers of devices."
    ]
    failed, _ = driven(scaling.STUDY, lambda s: (0.0, CPU) if s.kind == "devices" else None)
    assert failed.conclusion == ["No run has finished."]


def fed(spec):
    if spec.kind == "store":
        compression = spec.overrides["data.compression"] or "none"
        values = {"store": f"/{compression}-{spec.settings['block_size']}", "bytes": 100, "rows": 5}
        return 0.0, values
    is_disturbed = spec.name.endswith("-1")  # by another program
    if spec.kind == "bench":
        return bench(1.0 if is_disturbed else 500.0 + 50 * spec.overrides["data.prefetch_batches"])
    if is_disturbed:
        return 1.0, {}
    rate = 1000.0
    rate *= 2 if spec.overrides["data.compression"] == "lz4" else 1
    rate *= {0: 1, 2: 1.5, 4: 1.01}[spec.overrides["data.num_workers"]]
    return rate, {}


def test_input_keeps_the_best_value_of_each_setting():
    options = dict(block_sizes=(8192, 1024), workers=(0, 2, 3, 4), prefetch=(0, 4))
    outcome, specs = driven(input.STUDY, fed, **options)
    assert "input-lz4-workers-3-0" not in specs  # does not divide the 8 streams
    assert specs["input-lz4-workers-2-0"].overrides["data.store"] == "/lz4-8192"
    assert outcome.best_overrides == [
        "--config.data.compression=lz4",
        "--config.data.num_workers=2",
        "--config.data.prefetch_batches=16",  # of the config, and faster than the others
    ]
    (best,) = rows(outcome, setting="workers", value=2)
    assert best["over naive"] == pytest.approx(3)
    (small,) = rows(outcome, setting="block size", value=1024)
    assert small["bytes per example"] == 20
    assert specs["bench-prefetch-16-0"].overrides["data.num_workers"] == 2
    assert "training with it is 2.60 times as fast" in outcome.conclusion[0]
    assert "from the memory of this machine" in outcome.conclusion[1]
    assert outcome.panels[2].series[0].y == [2000.0, 3000.0, 2020.0]


def test_a_faster_input_that_trains_no_faster_is_not_advised():
    def limited(spec):
        return bench(500.0) if spec.kind == "bench" else fed(spec)

    options = dict(block_sizes=(8192,), workers=(0, 2), prefetch=(0, 4))
    outcome, _ = driven(input.STUDY, limited, **options)
    assert outcome.best_overrides[1:] == [
        "--config.data.num_workers=0",
        "--config.data.prefetch_batches=0",
    ]
    text = outcome.conclusion[0]
    assert text.startswith("One thread without prefetching is best")
    assert "the input alone is 3.00 times as fast" in text
    assert "training with it is 1.00 times as fast" in text


def test_data_that_cannot_be_prepared_ends_the_study_of_the_input():
    with pytest.raises(InputError, match="too hot"):
        driven(input.STUDY, lambda spec: None)


PRICES = {"cpu": ("core", 0.05), "v3": ("chip", 2.0), "a100": ("chip", 3.0)}


def price_file(path, text="", **changes):
    lines = [",".join(COLUMNS)]
    for device, (unit, usd) in (PRICES | changes).items():
        lines.append(f"{device},{unit},{usd},{'2026-11-28' if usd else ''},list")
    path.write_text(text or "\n".join(lines) + "\n")
    return str(path)


def priced(spec):
    if spec.kind == "devices":
        return 0.0, CPU
    if spec.kind == "bench":
        return bench(1000.0)
    return estimated(
        1e6 if spec.settings["topology"] == "v3-32" else 5e5, spec.settings["topology"]
    )


def test_cost_compares_examples_per_dollar(tmp_path):
    outcome, specs = driven(
        cost.STUDY, priced, prices=price_file(tmp_path / "p.csv"), other_configs=("quickstart",)
    )
    assert {"measured-config", "measured-quickstart"} <= specs.keys()
    assert specs["estimated-quickstart-a100-4"].overrides["batch_size"] == 4096
    (host,) = rows(outcome, model="config", how="measured")
    assert host["$/hour"] == pytest.approx(0.1)
    assert host["million examples per $"] == pytest.approx(36)
    (slice_,) = rows(outcome, model="config", machine="v3-32")
    assert slice_["$/hour"] == 32  # 16 chips
    assert slice_["peak TFLOPS"] == pytest.approx(16 * 123)
    (cluster,) = rows(outcome, model="config", how="extrapolated")
    assert cluster["examples/s"] == 56_000
    assert cluster["$/hour"] == pytest.approx(6.6)
    assert slice_["speed"] == pytest.approx(1e6 / 56_000)
    (chip,) = rows(outcome, machine="one chip of a100")
    assert chip["TFLOPS per $/hour"] == pytest.approx(104)
    first, second = outcome.conclusion
    best = "examples of config on a100-4 (estimated), 150.0 million and 4.9 times as many as on 56"
    assert best in first
    assert "and most examples of quickstart on a100-4" in first
    assert "Only measured rows were run" in second
    text = " ".join(outcome.notes)
    assert "extrapolation: every worker is assumed" in text
    assert "Check them" in text


def test_cost_measures_on_fewer_rows_and_smaller_batches_than_it_estimates(tmp_path):
    options = dict(measured_batch_size=16, measured_rows=500, estimated_batch_size=256)
    prices = price_file(tmp_path / "p.csv")
    options["other_configs"] = ("quickstart",)
    _, specs = driven(cost.STUDY, priced, prices=prices, **options)
    few = {"batch_size": 16, "source.rows.train": 500, "source.rows.valid": 500}
    for name, file in (("config", ""), ("quickstart", "quickstart")):
        assert specs[f"measured-{name}"].overrides == few
        assert specs[f"measured-{name}"].config == file
    assert "source.rows.train" not in specs["estimated-config-v3-32"].overrides
    assert specs["estimated-config-v3-32"].overrides["batch_size"] == 256
    config = tiny.config()
    with config.unlocked():
        config.source = ConfigDict(dict(kind="csv"))
    with pytest.raises(InputError, match=r"--measured-rows: must be 0 .* found 500 and .*'csv'"):
        driven(cost.STUDY, priced, config=config, prices=prices, **options)
    config = tiny.config()
    config.data.store = "prepared"
    with pytest.raises(InputError, match=r"--measured-rows: must be 0 .* data.store='prepared'"):
        driven(cost.STUDY, priced, config=config, prices=prices, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(v3=("chip", "")), "row 3, column usd_per_hour.*one chip of v3, which is empty"),
        (dict(text=",".join(COLUMNS)), "must have a row for the device 'v3': it has none"),
        (dict(text="device,price\n"), "row 1: must have the columns device, unit"),
        (dict(cpu=("core", "cheap")), "row 2, column usd_per_hour.*found 'cheap'"),
        (dict(a100=("box", 1)), "row 4, column unit: must be 'chip' for a100: found 'box'"),
        (dict(cpu=("chip", 1)), "row 2, column unit: must be 'core' for cpu: found 'chip'"),
        (dict(v3=("chip", -2)), "row 3, column usd_per_hour: must be a number above 0.*'-2'"),
        (dict(v3=("chip", "nan")), "row 3, column usd_per_hour: must be a number above 0.*'nan'"),
        ({"": ("chip", 1)}, "row 5, column device: must be the name of a device: found none"),
        (dict(text=",".join(COLUMNS) + "\nv3,chip,2,soon,x\n"), "row 2, column date.*'soon'"),
        (dict(text=",".join(COLUMNS) + "\nv3,chip,2\n"), "row 2: must have 5 cells: found 3"),
        (
            dict(text=",".join(COLUMNS) + "\n" + 2 * "v3,chip,2,2026-01-01,x\n"),
            "row 3, column device: .* that no other row has: found 'v3', as in row 2",
        ),
    ],
)
def test_a_price_that_is_missing_or_invalid_is_named(changes, message, tmp_path):
    path = price_file(tmp_path / "p.csv", **changes)
    with pytest.raises(InputError, match=message):
        driven(cost.STUDY, priced, prices=path, topologies=("v3-32",))


def test_the_prices_of_the_program_are_dated_or_empty():
    prices = Prices()
    assert prices.by_device.keys() >= {"v3", "a100", "h100", "cpu"}
    assert all(price.date for price in prices.by_device.values() if price.usd_per_hour)


def test_other_configs_have_names_of_their_own(tmp_path):
    other = tmp_path / "quickstart.py"
    other.write_text("from jaxrank.config import default as get_config\n")
    options = dict(prices=price_file(tmp_path / "p.csv"))
    options["other_configs"] = ("quickstart", str(other))
    with pytest.raises(InputError, match=r"--other-configs: .* different names.*quickstart.py'"):
        driven(cost.STUDY, priced, **options)
    options["other_configs"] = ("nowhere.py",)
    with pytest.raises(InputError, match=r"--other-configs: nowhere.py: no such file"):
        driven(cost.STUDY, priced, **options)


def test_a_run_of_another_config_has_a_command_that_names_its_file(tmp_path):
    command = ["--models=m.py", "--config=tiny", "--config.seed", "7"]
    directories = Directories(tiny.config(), tmp_path, command)
    spec = RunSpec("other", {"batch_size": 64}, config="quickstart")
    directories.begin(spec)
    line = (directories.path(spec) / "command.txt").read_text()
    shown = "--models=m.py --config=quickstart --config.seed 7 --config.batch_size=64"
    assert line == f"jaxrank train {shown} --workdir={directories.path(spec)}/train\n"
    plain = json_files.read(directories.path(spec) / "config.json")
    expected = config_files.load("quickstart", ["--config.seed=7", "--config.batch_size=64"])
    assert plain == json_files.plain(config_files.to_plain(expected))


def test_an_estimate_generates_its_sample_and_reads_other_data_of_the_study(tmp_path):
    spec = RunSpec("estimated", kind="estimate", settings={"topology": "v3-8"})
    assert not Directories(tiny.config(), tmp_path, []).reads_shared_data(spec)
    other = tiny.config()
    with other.unlocked():
        other.source = ConfigDict(dict(kind="csv", files=dict(train="a.csv")))
    assert Directories(other, tmp_path, []).reads_shared_data(spec)


def test_kinds_of_runs_measure_devices_stores_and_the_input(store, tmp_path):
    c = tiny.config()
    c.data.store = str(store)
    c.source.rows.train = 512
    c.source.rows.valid = 128
    run = RunInput(config_files.to_plain(c), "", {"block_size": 128}, tmp_path)
    prepared = measure.prepare_store(run)
    assert prepared["values"]["bytes"] > 0
    assert measure.describe_devices(run)["values"]["platform"] == "cpu"
    run = dataclasses.replace(run, settings={"seconds": 0.01}, store=str(store))
    assert measure.input_rate(run)["examples_per_second"] > 0


@pytest.mark.parametrize(
    ("study", "answer", "options"),
    [
        (scaling.STUDY, scaled, dict(devices=(1, 2), topologies=("v3-8",))),
        (input.STUDY, fed, dict(block_sizes=(1024,), workers=(2,), prefetch=(4,), repeats=1)),
        (cost.STUDY, priced, dict(topologies=("v3-32",))),
    ],
)
def test_a_stopped_study_has_the_machines_and_settings_that_are_measured(study, answer, options):
    context = Context(tiny.config(batch_size=128), study.options(**options), ignore)
    counts = rows_when_stopped(lambda: study.runs(context), lambda spec: answered(spec, answer))
    assert counts[0] == 0
    assert 0 < counts[3] <= counts[-1]


@pytest.mark.parametrize("name", ["scaling", "input", "cost"])
def test_options_are_flags_of_the_command_line(name, capsys):
    with pytest.raises(SystemExit):
        cli.run(["study", name, "--help"])
    shown = capsys.readouterr().out
    for option in dataclasses.fields(registry.find(name).options):
        assert f"--{option.name.replace('_', '-')}" in shown
