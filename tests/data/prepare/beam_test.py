"""Preparing with Apache Beam gives the same bytes and errors as preparing locally."""

import csv
import random
import subprocess
import sys

import pytest
from apache_beam.runners.portability import prism_runner
from upath import UPath

from jaxrank.data.encode.fit import FIT_NOTHING
from jaxrank.data.prepare import units as units_module
from jaxrank.data.prepare.beam import Beam
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.prepare.runners import make_runner
from jaxrank.data.prepare.settings import PrepareSettings
from jaxrank.data.prepare.units import WorkUnit
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError, RunError

CLICK = dict(name="click", label="label")
HEADER = ["label", "time", "x", "price", "color", "tags"]
FEATURES = dict(
    tasks=[CLICK],
    dense=[dict(columns="x", standardize=True)],
    categorical=[
        dict(columns="color", min_count=2),
        dict(columns="price", encoding="bucket", buckets=4),
    ],
    ragged=[dict(columns="tags", table="tag")],
    keep=["label"],
    time="time",
    by_day=True,
)
THREADS = ["--direct_num_workers=2", "--direct_running_mode=multi_threading"]
PROCESSES = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]


@pytest.fixture(autouse=True)
def _each_file_is_a_unit(monkeypatch):
    monkeypatch.setattr(units_module, "_UNIT_BYTES", 1)


def record(rng):
    return [
        rng.randrange(2),
        f"2026-03-0{rng.randrange(1, 4)}T12:00:00Z",
        f"{rng.gauss(3, 2):.4f}",
        f"{rng.expovariate(0.1):.3f}" if rng.random() < 0.9 else "",
        f"c{int(rng.paretovariate(1))}",
        "|".join(f"t{rng.randrange(30)}" for _ in range(rng.randrange(4))),
    ]


def write(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *rows])


def raw(directory, *, bad=()):
    """Writes three files to fit on and one more, with invalid values (file, row, column, value) in
    `bad`.
    """
    rng = random.Random(5)
    for name, count in dict(a=300, b=200, c=250, test=100).items():
        rows = [record(rng) for _ in range(count)]
        for file, row, column, value in bad:
            if file == name:
                rows[row][HEADER.index(column)] = value
        write(directory / f"{name}.csv", rows)
    train = [str(directory / f"{name}.csv") for name in "abc"]
    return dict(kind="csv", files=dict(train=train, test=str(directory / "test.csv")))


def run(source, output, features=FEATURES, **options):
    return prepare(features, source, output, block_size=64, report=lambda _: None, **options)


def contents(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


# Equal stores.


@pytest.mark.parametrize("options", [[], THREADS], ids=["one", "threads"])
def test_the_store_is_that_of_the_local_runner_byte_for_byte(tmp_path, options):
    bad = [("a", 7, "x", "much"), ("b", 199, "time", ""), ("c", 0, "label", "3"),
           ("test", 50, "label", "x")]  # fmt: skip
    source = raw(tmp_path, bad=bad)
    run(source, tmp_path / "local", on_error="skip")
    run(source, tmp_path / "beam", on_error="skip", runner=Beam("DirectRunner", options))

    local, beam = contents(tmp_path / "local"), contents(tmp_path / "beam")
    assert list(beam) == list(local)
    for name in local:
        assert beam[name] == local[name], name
    days = [f"2026-03-0{day}" for day in (1, 2, 3)]
    assert {f"train/{day}/0000{unit}-00000.arrow" for day in days for unit in range(3)} < set(beam)
    assert {"vocabulary/color.arrow", "vocabulary/tag.arrow"} < set(beam)
    assert beam["rejected.jsonl"].count(b"\n") == len(bad)
    assert open_store(tmp_path / "beam").split("train").rows == 747


@pytest.mark.slow
def test_processes_of_their_own_write_the_same_store(tmp_path):
    source = raw(tmp_path)
    features = FEATURES | dict(
        dense=[dict(columns="x")], categorical=[dict(columns="color", encoding="hash", rows=99)]
    )
    features |= dict(ragged=[])  # with nothing to fit there is one pipeline for each split
    source["files"].pop("test")
    run(source, tmp_path / "local", features)
    run(source, tmp_path / "beam", features, runner=make_runner("DirectRunner", 0, PROCESSES))
    assert contents(tmp_path / "beam") == contents(tmp_path / "local")


def test_a_store_at_a_url_is_the_same_too(tmp_path):
    source = raw(tmp_path)
    run(source, tmp_path / "local")
    url = UPath(f"memory://{tmp_path}/beam")
    # in this process, because the memory file system is local to it
    run(source, url, runner=Beam("DirectRunner"))
    local = contents(tmp_path / "local")
    assert {name: (url / name).read_bytes() for name in local} == local
    assert sum(path.is_file() for path in url.rglob("*")) == len(local)


# Data errors.


@pytest.mark.parametrize("fitted", [True, False])
def test_a_bad_record_is_reported_as_by_the_local_runner(tmp_path, fitted):
    bad = [("b", 120, "x", "much"), ("c", 3, "x", "more")]
    features = FEATURES if fitted else dict(tasks=[CLICK], dense=[dict(columns="x")])
    source = raw(tmp_path, bad=bad)
    with pytest.raises(InputError, match=r"b\.csv, row 122, column x: .*'much'") as local:
        run(source, tmp_path / "local", features)
    with pytest.raises(InputError) as beam:
        run(source, tmp_path / "beam", features, runner=Beam("DirectRunner"))
    assert str(beam.value) == str(local.value)
    assert not (tmp_path / "beam").exists()


def test_it_resumes_once_the_bad_record_is_mended(tmp_path):
    source = raw(tmp_path, bad=[("b", 120, "x", "much")])
    with pytest.raises(InputError, match="row 122"):
        run(source, tmp_path / "beam", runner=Beam("DirectRunner"))
    source = raw(tmp_path)
    run(source, tmp_path / "beam", runner=Beam("DirectRunner"))
    run(source, tmp_path / "local")
    assert contents(tmp_path / "beam") == contents(tmp_path / "local")


# Unit errors.


def make_settings(directory):
    spec = FeatureSpec.from_state(dict(tasks=[CLICK]))
    return PrepareSettings(spec, {}, str(directory), FIT_NOTHING, 64, "", "error", 0, {}, "", "")


def units(count):
    return [WorkUnit("train", index, (), 0, ()) for index in range(count)]


def leave(settings, unit, errors):
    """Writes a file that records the execution of the unit, and raises its error if any."""
    with open(errors["directory"] / str(unit.index), "x") as file:
        file.write(unit.name)
    if unit.index in errors:
        raise errors[unit.index]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("x: must be 1: found 2."), InputError),
        (RunError("the loss must be finite: found nan."), RunError),
        (FileNotFoundError(2, "No such file", "part-7"), OSError),
    ],
)
def test_the_error_of_the_first_unit_comes_out(tmp_path, error, kind):
    errors = {"directory": tmp_path, 7: error} | {i: InputError("another") for i in range(8, 20)}
    with pytest.raises(kind) as result:
        Beam("DirectRunner").run(leave, make_settings(tmp_path / "store"), units(20)[::-1], errors)
    assert str(result.value) == str(error)
    # Each unit runs once, otherwise the error would be that the file exists.
    assert {int(path.name) for path in tmp_path.iterdir() if path.is_file()} >= set(range(8))


def test_an_error_that_none_foresaw_fails_the_pipeline(tmp_path):
    errors = {"directory": tmp_path, 1: ZeroDivisionError("of a unit")}
    with pytest.raises(RunError, match="DirectRunner: the pipeline failed: .*of a unit"):
        Beam("DirectRunner").run(leave, make_settings(tmp_path / "store"), units(3), errors)


def test_hardly_a_unit_behind_one_that_failed_is_worked_on(tmp_path):
    errors = {i: InputError(f"row {i}") for i in range(300)}
    mixed = random.Random(3).sample(units(300), 300)
    settings = make_settings(tmp_path / "store")
    with pytest.raises(InputError, match="^row 0$"):
        Beam("DirectRunner").run(leave, settings, mixed, errors | {"directory": tmp_path})
    # In random order, the n-th error is the first so far with probability 1 / n: 6.3 in total.
    assert 1 <= sum(path.is_file() for path in tmp_path.iterdir()) < 40


def test_an_error_is_read_from_a_store_at_a_url(tmp_path):
    settings = make_settings(f"memory://{tmp_path}/store")
    errors = {"directory": tmp_path, 2: InputError("row 4: must be 1: found 2.")}
    with pytest.raises(InputError, match="^row 4: must be 1: found 2.$"):
        Beam("DirectRunner").run(leave, settings, units(3), errors)
    Beam("DirectRunner").run(leave, settings, units(20)[3:], errors)  # earlier errors are removed
    assert {int(path.name) for path in tmp_path.iterdir()} == set(range(20))


# Command line.


def test_the_direct_runner_fetches_no_program(tmp_path, monkeypatch):
    asked = []  # the runner that would be downloaded
    monkeypatch.setattr(prism_runner.PrismRunner, "run_pipeline", lambda *_: asked.append(1))
    Beam("DirectRunner").run(leave, make_settings(tmp_path), units(1), {"directory": tmp_path})
    assert not asked
    assert (tmp_path / "0").exists()


def test_without_beam_it_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(InputError, match=r"FlinkRunner: .*pip install 'jaxrank\[beam\]'"):
        make_runner("FlinkRunner")


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("NoSuchRunner", [], "NoSuchRunner: .*Unexpected pipeline runner"),
        ("no.such.Runner", [], "no.such.Runner: .*No module named 'no'"),
        (
            "DirectRunner",
            ["--direct_num_workers=many"],
            "--direct_num_workers: invalid int value: 'many'",
        ),
    ],
)
def test_runners_and_options_that_are_not_there_are_rejected(tmp_path, name, options, match):
    with pytest.raises(InputError, match=match):
        Beam(name, options).run(leave, make_settings(tmp_path), units(2), {"directory": tmp_path})


def test_dataflow_needs_an_output_that_its_machines_can_reach(tmp_path):
    source = raw(tmp_path)
    with pytest.raises(InputError, match=rf"DataflowRunner: .*gs://.*found {tmp_path}.*store"):
        run(source, tmp_path / "store", runner=Beam("DataflowRunner", ["--project=mine"]))


def test_what_workers_import_does_not_import_jax():
    program = "import sys; from jaxrank.data.prepare import beam, encode_unit, fit_unit;"
    program += " print('jaxrank.data.encode.encoder' in sys.modules,"
    program += " [name for name in ('jax', 'flax', 'optax', 'orbax') if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "True []\n"
