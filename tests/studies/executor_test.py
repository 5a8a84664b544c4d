"""Runs of a study: reuse, resume, failures, signals. The runs are fakes.

`stability_test` has real ones.
"""

import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
from checkout import HELPERS, ROOT, TINY

from jaxrank import cli, extensions
from jaxrank.errors import InputError, RunError, StoppedError
from jaxrank.studies import registry
from jaxrank.studies.execution.directories import Directories, config_name
from jaxrank.studies.execution.executor import Executor, opened
from jaxrank.studies.study import Outcome, Panel, RunSpec, Series, Study, Table
from jaxrank.validate import field

WORKER = (sys.executable, str(HELPERS / "fake_worker.py"))


@dataclasses.dataclass(frozen=True)
class Options:
    runs: int = field(4, help="number of runs", at_least=1)


def fakes(log, count, **changes):
    """Specs of fake runs. changes: {index: settings}."""
    return [
        RunSpec(f"run-{i}", {"seed": i}, "fake", {"log": str(log), **changes.get(f"of_{i}", {})})
        for i in range(count)
    ]


def study(log, **changes):
    def runs(context):
        first = yield fakes(log, 1, **changes)
        results = yield fakes(log, context.options.runs, **changes)
        rows = [(r.spec.name, r.metrics.get("click/auc")) for r in [*first, *results[1:]]]
        points = Series("runs", [row[0] for row in rows], [row[1] or 0 for row in rows])
        panel = Panel("AUC", "run", "AUC", [points])
        texts = ["It runs."], ["Slowly."]
        return Outcome(Table(("run", "AUC"), rows), [panel], *texts, ["--config.seed=1"])

    return Study("fakes", "fake runs", Options, runs)


def executed(workdir, log, jobs=1, report=lambda text: None, config=None, count=4, **changes):
    return registry.run(
        study(log, **changes),
        config or tiny.config(),
        workdir,
        Options(count),
        command=["--config=tiny"],
        jobs=jobs,
        report=report,
        worker=WORKER,
    )


def names(log):
    return sorted(log.read_text().split())


def test_a_study_writes_its_table_picture_and_the_record_of_each_run(tmp_path):
    lines = []
    actual = executed(tmp_path / "study", tmp_path / "log", report=lines.append)
    assert actual["table"]["rows"] == [[f"run-{i}", i] for i in range(4)]
    assert "error" not in actual
    csv, png, svg = (Path(file) for file in actual["files"])
    assert csv.read_text().splitlines() == ["run,AUC", *(f"run-{i},{i}.0" for i in range(4))]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    text = "\n".join(lines)
    for part in (
        "It runs.\n\nNotes:\n- Slowly.\n",
        "Best values: --config.seed=1",
        "run-3: ",
        "(3 of 3 of this round)",
        "s left",
    ):
        assert part in text
    run = tmp_path / "study" / "runs" / "run-2"
    assert json.loads((run / "config.json").read_text())["seed"] == 2
    assert "--config=tiny --config.seed=2" in (run / "command.txt").read_text()
    assert (run / "log.txt").read_text() == "run-2 at work\n"
    shutil.copy(csv, tmp_path / csv.name)
    with pytest.raises(InputError, match=f"--workdir: .* must not hold other .*found {csv.name}"):
        executed(tmp_path, tmp_path / "log")


def test_finished_runs_are_reused_and_failed_ones_are_not(tmp_path):
    workdir, log = tmp_path / "study", tmp_path / "log"
    first = executed(workdir, log, of_2={"error": "too hot\nreally"}, of_1={"crash": 1})
    assert first["failed"].keys() == {"run-1", "run-2"}
    assert first["failed"]["run-2"] == "too hot\nreally"
    assert "ended with status -9" in first["failed"]["run-1"]
    assert "run-1 at work" in first["failed"]["run-1"]
    assert first["error"].startswith("2 runs failed: run-1, run-2.")
    assert first["table"]["rows"] == [["run-0", 0], ["run-1", None], ["run-2", None], ["run-3", 3]]
    assert names(log) == [f"run-{i}" for i in range(4)]
    again = executed(workdir, log, of_2={"error": "too hot\nreally"}, of_1={"crash": 1}, count=5)
    assert names(log) == ["run-0", "run-1", "run-1", "run-2", "run-2", "run-3", "run-4"]
    assert len(again["table"]["rows"]) == 5


def test_a_moved_study_reuses_its_runs(tmp_path):
    workdir, log = tmp_path / "study", tmp_path / "log"
    executed(workdir, log, count=2)
    prepared = Directories(tiny.config(), workdir, []).preparation()
    Directories(tiny.config(), workdir, []).begin(prepared)
    (workdir / "runs" / prepared.name / "result.json").write_text('{"status": "done"}')
    moved = workdir.rename(tmp_path / "moved")
    assert Directories(tiny.config(), moved, []).result(prepared).is_done
    executed(moved, log, count=3)
    assert names(log) == ["run-0", "run-1", "run-2"]


def test_the_command_of_a_run_without_a_verb_executes_it_again(tmp_path):
    spec = RunSpec("devices", kind="devices", settings={"unused": 1})
    directories = Directories(tiny.config(), tmp_path, ["--config=tiny"])
    directories.begin(spec)
    comment, command = (directories.path(spec) / "command.txt").read_text().splitlines()
    assert comment == '# devices {"unused": 1}: --config=tiny'
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(program, env=env, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["values"]["platform"] == "cpu"
    assert directories.read(spec).values == result["values"]


def test_results_of_another_config_in_the_workdir_are_an_error(tmp_path):
    workdir, log = tmp_path / "study", tmp_path / "log"
    executed(workdir, log, count=2)
    changed = tiny.config(batch_size=256)
    with pytest.raises(InputError, match=r"run-0: .*another config.*\n  batch_size: 128, now 256"):
        executed(workdir, log, config=changed, count=2)
    with pytest.raises(InputError, match=r"settings.seconds: \"unset\", now 0.01"):
        executed(workdir, log, count=2, of_1={"seconds": 0.01})


def test_results_from_before_a_config_field_existed_are_reused(tmp_path):
    workdir, log = tmp_path / "study", tmp_path / "log"
    executed(workdir, log, count=2)
    for run in (workdir / "runs").glob("run-*"):
        config, record = (
            json.loads((run / f"{name}.json").read_text()) for name in ("config", "run")
        )
        del config["eval"]["top_k"]
        (run / "config.json").write_text(json.dumps(config))
        (run / "run.json").write_text(json.dumps(record | dict(key="another digest")))
    assert "error" not in executed(workdir, log, count=2)
    assert names(log) == ["run-0", "run-1"]


def test_results_of_other_code_of_the_user_are_an_error(tmp_path, monkeypatch):
    workdir, log = tmp_path / "study", tmp_path / "log"
    for checksum in "ab":
        origin = extensions.Origin("brier", "/m.py", checksum)
        monkeypatch.setitem(extensions._ORIGINS, ("metric", "brier"), origin)
        if checksum == "a":
            executed(workdir, log, count=2)
    with pytest.raises(InputError, match=r"run-0: .*\n  code.metric.brier: \"a\", now \"b\""):
        executed(workdir, log, count=2)


def test_several_workers_take_one_run_after_the_other(tmp_path):
    directories = Directories(tiny.config(), tmp_path, [])
    specs = fakes(tmp_path / "log", 6, **{f"of_{i}": {"seconds": 0.1} for i in range(6)})
    with opened(directories, tmp_path, jobs=2, report=lambda text: None, worker=WORKER) as executor:
        results = executor.run(specs)
        with (
            pytest.raises(RunError, match="another study runs"),
            opened(directories, tmp_path, jobs=1, report=print, worker=WORKER),
        ):
            pass
    assert [r.metrics["click/auc"] for r in results] == [0, 1, 2, 3, 4, 5]
    assert len({r.values["pid"] for r in results}) == 2


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
import executor_test as of
from jaxrank import errors
try:
    of.executed(Path(sys.argv[2]), Path(sys.argv[3]), count=8, jobs=2, report=print, **of.SLOW)
except errors.StoppedError as error:
    sys.exit(error.exit_status)
"""
SLOW = {f"of_{i}": {"seconds": 0.1} for i in range(8)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return executed(folder / "study", folder / "log", count=8, **SLOW)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_study_that_is_killed_continues_with_the_same_table(tmp_path, whole, number):
    workdir, log = tmp_path / "study", tmp_path / "log"
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}"}
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(workdir), str(log)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    while not (workdir / "runs" / "run-3" / "result.json").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    if number != signal.SIGKILL:
        table = shown.partition("of an unfinished study:\n")[2].splitlines()
        assert table[0].split() == ["run", "AUC"]
        assert table[4].split() == ["run-3", "3"]
    for path in workdir.glob("runs/*/by"):  # workers end with the study
        while is_running(int(path.read_text())):
            time.sleep(0.01)
    assert len(list(workdir.glob("runs/run-*/result.json"))) < 8
    actual = executed(workdir, log, count=8, **SLOW)
    assert actual["table"] == whole["table"]
    assert len(log.read_text().split()) <= 8 + 2  # the two runs that were killed


def test_a_stopped_study_without_a_table_of_its_own_lists_its_runs(tmp_path, monkeypatch):
    def runs(context):
        yield fakes(tmp_path / "log", 1)
        (second,) = yield [RunSpec("second", kind="fake")]
        raise InputError(second.error)  # as a search does that has no valid point

    def run(self, specs):
        if specs[0].name == "second":
            raise StoppedError("stopped by a signal", signal.SIGINT)
        return original(self, specs)

    original, lines = Executor.run, []
    monkeypatch.setattr(Executor, "run", run)
    unfinished = Study("unfinished", "", Options, runs)
    with pytest.raises(StoppedError):
        registry.run(
            unfinished,
            tiny.config(),
            tmp_path / "study",
            Options(2),
            command=[],
            report=lines.append,
            worker=WORKER,
        )
    assert "run    click/auc  examples/s\nrun-0          0           -" in lines[-1]


def test_several_jobs_do_not_share_an_accelerator(tmp_path, monkeypatch):
    workdir, log = tmp_path / "study", tmp_path / "log"
    monkeypatch.setenv("FAKE_PLATFORM", "gpu")
    with pytest.raises(
        InputError, match=r"--jobs: must be 1.*found 2, with 1 x a chip. Set --jobs=1"
    ):
        executed(workdir, log, jobs=2)
    assert [path.name for path in workdir.glob("runs/*/")] == ["devices-present"]
    monkeypatch.setenv("FAKE_PLATFORM", "cpu")  # the workdir is used on another machine
    executed(workdir, log, jobs=2, count=1)
    assert names(log) == ["run-0"]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["--models=a.py", "--config=configs/heavy.py:small", "--config.seed=1"], "heavy"),
        ([], "config"),
    ],
)
def test_a_study_names_its_config_by_its_file(command, name):
    assert config_name(command) == name


def test_an_option_named_like_a_flag_of_every_study_is_an_error(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Clashing:
        jobs: int = field(1, help="number of jobs")

    monkeypatch.setitem(registry.STUDIES, "fakes", lambda: Study("fakes", "", Clashing, None))
    with pytest.raises(InputError, match="the study fakes: the option jobs must have another name"):
        cli.run(["study", "fakes", f"--config={TINY}"])


def test_options_that_a_study_rejects_leave_no_files(tmp_path):
    def runs(context):
        if context.options.runs == 3:
            raise InputError("--runs: must not be 3")
        yield []

    with pytest.raises(InputError, match="must not be 3"):
        registry.run(
            Study("picky", "", Options, runs),
            tiny.config(),
            tmp_path / "study",
            Options(3),
            command=[],
            worker=WORKER,
        )
    assert not (tmp_path / "study").exists()


def test_an_invalid_config_fails_its_run_only(tmp_path):
    directories = Directories(tiny.config(), tmp_path, [])
    with opened(directories, tmp_path, jobs=1, report=lambda text: None, worker=WORKER) as executor:
        (result,) = executor.run([RunSpec("bad", {"batch_size": -1}, "fake")])
    assert result.status == "failed"
    assert "batch_size: must be" in result.error


@pytest.mark.parametrize(
    ("name", "flag", "message"),
    [
        ("stabilty", "--runs=3", r"'stabilty'\. Did you mean 'stability'"),
        ("stability", "--run=3", r"unknown argument '--run=3'. Did you mean --runs"),
        ("stability", "--runs=1", r"--runs: must be at least 2: found 1"),
        ("stability", "--workers=4,a", r"--workers: must be whole numbers .* found '4,a'"),
        ("stability", "--workers=4,4", r"--workers: must have each entry once: found '4,4'"),
        ("stability", "--tune-factor=1", r"--tune-factor: must be above 1: found 1.0"),
        ("stability", "--jobs=0", r"--jobs: must be at least 1: found 0"),
    ],
)
def test_invalid_usage_is_rejected_before_the_workdir_is_made(tmp_path, name, flag, message):
    with pytest.raises(InputError, match=message):
        cli.run(["study", name, f"--config={TINY}", f"--workdir={tmp_path / 'x'}", flag])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["ablation", "batch-size", "stability", "sweep"])
@pytest.mark.parametrize("valid", ["", "next_day"])
def test_studies_of_metrics_need_a_validation_split_before_the_workdir_is_made(
    tmp_path, name, valid
):
    message = rf"the study {name}: data.valid must name a split, .*: found '{valid}'"
    with pytest.raises(InputError, match=message):
        cli.run(
            [
                *("study", name, f"--config={TINY}", f"--config.data.valid={valid}"),
                f"--workdir={tmp_path / 'x'}",
            ]
        )
    assert not (tmp_path / "x").exists()
