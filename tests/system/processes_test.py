"""Several processes: subprocesses on this machine, joined over loopback."""

import gzip
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import by_day
import daily
import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import quick_compile
import study_config
import tiny
from checkout import HELPERS, ROOT, TINY
from runs import newest_state, nothing, records, store_config, without_speed

from jaxrank import cli
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import evaluate
from jaxrank.evaluation.report import flatten_metrics
from jaxrank.runtime import processes, rendezvous
from jaxrank.train import train
from jaxrank.workdir.lock import locked

pytestmark = pytest.mark.usefixtures("shared_programs")
SECONDS = 600  # far more than any of these takes, far less than for ever


def environment(**more):
    current = {"PYTHONPATH": f"{ROOT}:{HELPERS}", "PYTHON": sys.executable}
    # Compiled as by this process, with whose results theirs are compared.
    current |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_compile.XLA_FLAGS}
    current["GLIBC_TUNABLES"] = (
        "glibc.malloc.hugetlb=1"  # otherwise each process would restart itself to set it
    )
    return os.environ | current | more


def popen(command, env, **more):
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **more
    )


def ended(several):
    """Waits for processes and returns their results. Terminates those that remain."""
    try:
        lines = [p.communicate(timeout=SECONDS) for p in several]
    finally:
        for process in several:
            process.terminate()
    return [
        subprocess.CompletedProcess(p.args, p.returncode, *t)
        for p, t in zip(several, lines, strict=True)
    ]


def flags(store, workdir):
    return (
        f"--config={TINY}",
        f"--workdir={workdir}",
        f"--config.data.store={store}",
        "--config.data.shards=8",
        "--config.mesh.devices=8",
    )


def config(store):
    c = store_config(store)
    c.data.shards = 8
    c.mesh.devices = 8
    return c


@pytest.fixture(scope="module")
def trained(store, tmp_path_factory):
    """The workdir of a run of this process on eight devices, its result and what it reported."""
    workdir = tmp_path_factory.mktemp("runs") / "trained"
    return workdir, train(config(store), workdir, report=nothing)


def every_record(workdir):
    return without_speed(records(workdir, None))


def assert_the_same_run(c, actual, expected):
    assert every_record(actual) == every_record(expected)
    states = [newest_state(c, path) for path in (actual, expected)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def is_free(port):
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def slurm():
    """Returns the environment that a SLURM step of two tasks gives to each task."""
    # JAX takes the port from the number of the job.
    job = next(n for n in range(os.getpid(), 2**30) if is_free(2**16 - 2**12 + n % 2**12))

    def settings(index):
        return {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index),
        }

    return settings


def coordinator(number=2):
    port = free_port()

    def settings(index):
        return {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(number),
            "JAX_PROCESS_ID": str(index),
        }

    return settings


def started(index, settings, *args, program=("-m", "jaxrank"), devices=4, **more):
    command = [sys.executable, *program, *map(str, args)]
    return popen(command, environment(JAX_NUM_CPU_DEVICES=str(devices), **settings(index)), **more)


# Two processes of four devices that meet in a SLURM step and run commands in lockstep.

DAYS = daily.DAYS[:3]
DAY_CHANGES = dict(data__train=f"train/{DAYS[0]}:{DAYS[1]}", data__shards=8, mesh__devices=8)


@pytest.fixture(scope="module")
def two(store, trained, tmp_path_factory):
    """The folder of all that they did; they end by the last command, each with its status."""
    folder = tmp_path_factory.mktemp("two")
    days = {day: daily.table(i, 0) for i, day in enumerate(DAYS)}
    by_days = by_day.write(folder, days, daily.FEATURES, block_size=100)
    (folder / "days.py").write_text(
        "import daily\nfrom jaxrank.data.store.reader import open_store\n"
        f"store = open_store({str(by_days.path)!r})\n"
        f"get_config = lambda: daily.config(store, **{DAY_CHANGES})\n"
    )
    # Under the same name, data of which only the part to evaluate differs, or none.
    c = tiny.config()
    source = c.source.to_dict()
    source["rows"]["valid"] += 100
    prepare(c.features.to_dict(), source, folder / "1" / "store", block_size=512, report=nothing)
    (folder / "0").mkdir()
    (folder / "selftest").mkdir()
    for name in ("store", "alone"):
        (folder / "0" / name).symlink_to(store)

    run, rejected = folder / "run", flags(store, folder / "rejected")
    warm = ("--config.num_steps=8", "--config.checkpoint.every_minutes=1e-6")
    warm += (f"--init-from={trained[0]}",)
    commands = [
        ("train", "", ("train", *flags(store, run), "--profile_steps=9:10", "--json")),
        ("predict", "", ("predict", f"--workdir={run}", f"--output={folder / 'two.parquet'}")),
        ("evaluate", "", ("evaluate", f"--workdir={run}", "--json")),
        ("warm", "", ("train", *flags(store, folder / "warm start"), *warm)),
        ("days", "", ("train", f"--config={folder / 'days.py'}", f"--workdir={folder / 'days'}",
                      "--json")),
        ("flags", "", ("train", *rejected, "--config.seed={process}")),
        ("version", "version", ("train", *rejected)),
        ("selftest", "version", ("selftest", str(folder / "selftest"))),
        ("native", "native", ("train", *flags(store, folder / "native"))),
        ("data", "apart", ("train", *flags("store", folder / "rejected"))),
        ("scored data", "apart", ("evaluate", f"--workdir={run}", "--data=store")),
        ("no data", "apart", ("train", *flags("alone", folder / "rejected"))),
        ("signal", "asked", ("train", *flags(store, folder / "signal"))),
        ("damaged", "damaged", ("train", *flags(store, folder / "damaged"))),
    ]  # fmt: skip
    (folder / "commands.json").write_text(json.dumps(commands))
    program, settings = ("-m", "lockstep"), slurm()
    args = (folder / "commands.json", folder)
    several = [started(i, settings, *args, program=program, cwd=folder) for i in (0, 1)]
    return folder, ended(several)


def became(two, name):
    """Results of a command in both processes."""
    folder, last = two
    assert (folder / f"{name}.0.json").exists(), last[0].stderr + last[1].stderr
    return [json.loads((folder / f"{name}.{i}.json").read_text()) for i in (0, 1)]


def succeeded(two, name):
    """Output of the first process. Checks that both succeeded and the second wrote nothing."""
    first, second = became(two, name)
    assert (first["status"], first["error"]) == (0, "")
    assert (second["status"], second["error"], second["out"]) == (0, "", "")
    return first["out"]


def test_two_processes_train_the_model_of_one_to_the_bit(store, trained, two):
    (line,) = succeeded(two, "train").splitlines()
    workdir, expected = trained
    assert_the_same_run(config(store), two[0] / "run", workdir)
    assert [r["step"] for r in records(two[0] / "run")] == list(range(1, 17))
    events = sorted((two[0] / "run" / "tensorboard").rglob("events.*"))
    assert [path.parent.name for path in events] == ["train", "valid"]
    result = json.loads(line)
    assert result["step"] == expected.step
    for part in ("metrics", "constant", "best_possible"):
        assert result[part] == (flatten_metrics(getattr(expected, part) or {}) or None)
    for part in ("buckets", "histograms"):
        assert result[part] == getattr(expected, part)
    assert (two[0] / "run" / "report.html").is_file()


def test_each_of_two_processes_writes_a_trace_of_the_same_name(two):
    workdir = two[0] / "run"
    folder = workdir / "profile" / "plugins" / "profile" / "steps_9_to_10"
    host = socket.gethostname()
    for index in (0, 1):
        written = (folder / f"{index}_{host}.trace.json.gz").read_bytes()
        events = json.loads(gzip.decompress(written))["traceEvents"]
        executions = [e for e in events if e.get("name") == "train"]
        assert [execution["args"]["step_num"] for execution in executions] == ["10"]
        assert (folder / f"{index}_{host}.xplane.pb").is_file()
    assert len(list(folder.iterdir())) == 4
    assert [p.name for p in (workdir / "profile").iterdir()] == ["plugins"]


def test_predictions_of_two_processes_are_those_of_one(trained, two, tmp_path):
    succeeded(two, "predict")
    which = dict(checkpoint="newest", data="", split="")
    evaluate.predict(trained[0], output=tmp_path / "one.parquet", **which)
    assert pq.read_table(two[0] / "two.parquet") == pq.read_table(tmp_path / "one.parquet")
    assert [p.name for p in two[0].glob("*.parquet*") if "by_day" not in p.name] == ["two.parquet"]


def test_scores_of_two_processes_are_those_of_one(trained, two):
    result, expected = json.loads(succeeded(two, "evaluate")), evaluate.evaluate(str(trained[0]))
    assert result["metrics"] == flatten_metrics(expected.metrics)
    assert result["buckets"] == expected.buckets


def test_two_processes_start_from_the_model_of_one_as_one_does(store, trained, two, tmp_path):
    assert "Started from" in succeeded(two, "warm")
    c = config(store)
    c.num_steps = 8
    train(c, tmp_path, init_from=str(trained[0]), report=nothing)
    states = [newest_state(c, path) for path in (tmp_path, two[0] / "warm start")]
    assert int(states[0].earlier) == 16
    # By time, which the first process decides.
    checkpoints = (two[0] / "warm start" / "checkpoints").iterdir()
    assert sorted(path.name for path in checkpoints) == ["6", "8"]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_two_processes_score_the_days_of_one_and_learn_the_same(two, tmp_path):
    result = json.loads(succeeded(two, "days"))
    c = daily.config(open_store(two[0] / "by_day_True"), **DAY_CHANGES)
    single = train(c, tmp_path, report=nothing)
    assert [score["day"] for score in result["days"]] == DAYS[1:]
    assert result["step"] == single.step
    for part in ("metrics", "constant", "best_possible"):
        assert result[part] == (flatten_metrics(getattr(single, part) or {}) or None)
    for score, expected in zip(result["days"], single.days, strict=True):
        assert score["metrics"] == flatten_metrics(expected["metrics"])
    assert every_record(two[0] / "days") == every_record(tmp_path)
    states = [newest_state(c, workdir) for workdir in (two[0] / "days", tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("flags", ["flags and config must be the same"]),
        ("version", ["versions of jaxrank, JAX and NumPy", "jaxrank 0.0.1, jax "]),
        (
            "native",
            ["what works on rows and layers must", "native code and XLA, as with JAXRANK_NATIVE=0"],
        ),
        ("data", ["the data in store"]),
        ("scored data", ["the data in store"]),
        ("no data", ["no such store"]),
    ],
)
def test_processes_of_which_one_differs_are_all_rejected(two, name, texts):
    for index, result in enumerate(became(two, name)):
        assert result["status"] == 2
        assert all(text in result["error"] for text in texts)
        assert ("process 1 ended: " in result["error"]) == (name == "no data" and index == 0)
    assert not (two[0] / "rejected").exists() or list((two[0] / "rejected").iterdir()) == []
    assert not (two[0] / "native" / "checkpoints").exists()


def test_the_selftest_of_two_processes_finds_the_one_with_another_version(two):
    for result in became(two, "selftest"):
        assert (result["status"], result["error"]) == (0, "")
        checks = [json.loads(line) for line in result["out"].splitlines()]
        checks = {c["check"]["name"]: c["check"] for c in checks if "check" in c}
        assert "2 processes on 1 hosts, each with 4 x cpu" in checks["processes"]["finding"]
        assert "differ: jaxrank" in checks.pop("versions")["finding"]
        assert "excludes 2 other processes" in checks["lock"]["finding"]
        assert checks.keys() >= {"rename", "exchange", "all-reduce"}
        assert {check["status"] for check in checks.values()} == {"pass"}, checks


def test_a_signal_to_one_of_two_processes_ends_both_after_one_checkpoint(store, trained, two):
    """One process can continue from the checkpoint."""
    for result in became(two, "signal"):
        assert result["status"] == 143
        assert "stopped after step 12 of 16 by SIGTERM" in result["error"]
    workdir = two[0] / "signal"
    assert sorted(int(p.name) for p in (workdir / "checkpoints").iterdir()) == [8, 12]
    lines = []
    train(config(store), workdir, report=lines.append)
    assert "Resuming after step 12" in "\n".join(lines)
    assert_the_same_run(config(store), workdir, trained[0])


def assert_knows_that_the_other_is_gone(process):
    assert process.returncode != 0
    # As jaxrank says it, or JAX, which ends the process if it is the first to know.
    assert re.search("another process has ended|another task died", process.stderr)


def test_what_one_process_cannot_read_ends_all(two):
    first, second = two[1]
    assert second.returncode == 2
    assert second.stderr.endswith("jaxrank[1]: error: block 3 is damaged\n")
    assert_knows_that_the_other_is_gone(first)


# Before step 13 the third process kills itself, once there is a checkpoint. The others wait for it
# less long than JAX lets them by default, which is 100 seconds.
DYING = """
import functools, os, signal, time
from pathlib import Path
import jax
from jaxrank import cli
jax.distributed.initialize = functools.partial(
    jax.distributed.initialize, heartbeat_timeout_seconds=20
)
from jaxrank.data.batches.pipeline import TrainBatches
whole, saved = TrainBatches.__next__, Path("{workdir}") / "checkpoints" / "8"
def dying(self):
    if self.position == 12 and os.environ["JAX_PROCESS_ID"] == "2":
        while not saved.is_dir():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self)
TrainBatches.__next__ = dying
cli.main()
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A smaller config for four devices, its flags, and a run of it in this process."""
    folder = tmp_path_factory.mktemp("small")
    c = study_config.get_config()
    c.num_steps, c.mesh.devices, c.data.shards = 16, 4, 4
    c.data.store = str(folder / "store")
    sections = c.features.to_dict(), c.source.to_dict()
    prepare(*sections, folder / "store", block_size=64, report=nothing)
    train(c, folder / "run", report=nothing)
    args = (f"--config={study_config.__file__}", f"--config.data.store={folder / 'store'}")
    args += ("--config.num_steps=16", "--config.mesh.devices=4", "--config.data.shards=4")
    return c, args, folder / "run"


@pytest.mark.slow
def test_four_processes_of_which_one_is_killed_end_and_are_resumed_by_one(small, tmp_path):
    c, args, run = small
    settings, program = coordinator(4), ("-c", DYING.format(workdir=tmp_path / "four"))
    args = ("train", *args, f"--workdir={tmp_path / 'four'}")
    several = [started(i, settings, *args, program=program, devices=1) for i in range(4)]
    for index, result in enumerate(ended(several)):
        if index == 2:
            assert result.returncode == -signal.SIGKILL
        else:
            assert_knows_that_the_other_is_gone(result)
    lines = []
    train(c, tmp_path / "four", report=lines.append)
    assert "Resuming after step 8" in lines
    assert_the_same_run(c, tmp_path / "four", run)


def test_a_failure_of_process_0_alone_ends_all_with_its_reason(tmp_path):
    args = (f"--config={TINY}", f"--workdir={tmp_path}", "--config.data.train=tran")
    args += ("--config.mesh.devices=0",)
    script, options = ROOT / "launch" / "local.sh", ("--devices=4", "--restarts=3")
    (result,) = ended([popen([script, "2", *options, "--", "train", *args], environment())])
    assert result.returncode == 2
    assert "started again" not in result.stderr
    reason = re.search(r"jaxrank\[0\]: error: (data.train.*tran.*)\n", result.stderr)[1]
    assert f"jaxrank[1]: error: process 0 ended: {reason}" in result.stderr
    assert "Traceback" not in result.stderr


# A checkpoint that process 1 cannot read.
UNREADABLE = """
import orbax.checkpoint as ocp
from jaxrank import cli
from jaxrank.runtime import processes
whole = ocp.CheckpointManager.restore
def unreadable(*args, **kwargs):
    restored = whole(*args, **kwargs)  # in which Orbax waits for all processes
    if processes.place()[0] == 1:
        raise ValueError("a bad disk")
    return restored
ocp.CheckpointManager.restore = unreadable
cli.main()
"""


@pytest.mark.slow
def test_a_checkpoint_that_one_process_cannot_read_ends_all(small, tmp_path):
    _, args, run = small
    shutil.copytree(run, tmp_path / "copy")
    settings, program = coordinator(), ("-c", UNREADABLE)
    args = ("train", *args, f"--workdir={tmp_path / 'copy'}")
    several = [started(i, settings, *args, program=program, devices=2) for i in (0, 1)]
    first, second = ended(several)
    assert second.returncode == 2
    assert "is damaged and cannot be restored: a bad disk. Resume from an older" in second.stderr
    assert first.returncode != 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--coordinator=localhost:1",), "together.*--num-processes=None"),
        (("--num-processes=2",), "together.*--coordinator=None"),
        (
            ("--coordinator=localhost", "--num-processes=2", "--process-id=0"),
            "--coordinator: must be HOST:PORT.*found 'localhost'",
        ),
        (
            ("--coordinator=localhost:70000", "--num-processes=2", "--process-id=0"),
            "--coordinator: must be HOST:PORT.*found 'localhost:70000'",
        ),
        (
            ("--coordinator=localhost:1", "--num-processes=0", "--process-id=0"),
            "--num-processes: must be at least 1: found 0",
        ),
        (
            ("--coordinator=localhost:1", "--num-processes=2", "--process-id=2"),
            "--process-id: must be at least 0 and less than --num-processes=2: found 2",
        ),
        (("--process-id=x",), "--process-id: invalid int value: 'x'"),
    ],
)
def test_flags_that_do_not_fit_together_are_rejected(args, message):
    with pytest.raises(InputError, match=message):
        cli.run(["evaluate", "--workdir=/nowhere/run", *args])


def test_a_bad_environment_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(InputError, match="^JAX_NUM_PROCESSES: must be .* number: found 'two'.$"):
        cli.run(["evaluate", f"--workdir={tmp_path}"])


@pytest.mark.parametrize(
    ("verb", "message"),
    [
        ("bench", "found JAX_NUM_PROCESSES=2. examples_per_second in the metrics.jsonl"),
        ("report", "found JAX_NUM_PROCESSES=2. Start the command by itself"),
    ],
)
def test_a_verb_of_one_process_is_rejected_in_several(verb, message, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    args = ["--config=quickstart", f"--workdir={tmp_path}"] if verb == "bench" else [str(tmp_path)]
    with pytest.raises(InputError, match=f"^{verb}: must run in one process: {message}"):
        cli.run([verb, *args])
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_rejected():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=f"--coordinator: port {port} must be free"):
            rendezvous.join(f"localhost:{port}", 2, 0)


def test_one_process_by_its_number_alone_joins_no_one(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    rendezvous.join(num_processes=1)
    assert processes.place() == (0, 1)
    assert processes.name() == "jaxrank"


def test_a_workdir_that_is_not_shared_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(processes, "broadcast_value", lambda value: "what process 0 wrote")
    message = "--workdir: .* must be .* all processes share"
    with pytest.raises(InputError, match=message), locked(tmp_path / "elsewhere"):
        pass


@pytest.mark.parametrize(
    ("platform", "error", "kind", "message"),
    [
        # As JAX says it without the plugin of CUDA, of a name that nobody knows, and of a busy TPU.
        ("cuda", AssertionError(), InputError, r"^JAX_PLATFORMS: must .*: found 'cuda'\.$"),
        (
            "foo",
            RuntimeError("'foo' is not in the list of known backends: ['cpu']."),
            InputError,
            "",
        ),
        ("tpu", RuntimeError("UNKNOWN: libtpu lockfile"), RunError, r"='tpu'\): UNKNOWN: libtpu"),
    ],
)
def test_devices_that_cannot_be_opened_are_reported(monkeypatch, platform, error, kind, message):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    with pytest.raises(kind, match=message):
        processes.open_devices()


def test_processes_of_unlike_shares_are_rejected(monkeypatch):
    monkeypatch.setattr(processes, "place", lambda: (0, 3))
    for owners in ([0, 1, 2], [0, 0, 1, 1, 2, 2]):
        monkeypatch.setattr(jax, "devices", lambda owners=owners: mesh(*owners).devices)
        processes.check_shares()
    monkeypatch.setattr(jax, "devices", lambda: mesh(0, 0, 1, 2, 2).devices)
    with pytest.raises(InputError, match=r"number of devices: found \[2, 1, 2\]"):
        processes.check_shares()


def mesh(*owners):
    devices = [SimpleNamespace(process_index=i) for i in owners]
    return SimpleNamespace(devices=np.asarray(devices))


def test_devices_of_a_mesh_must_be_equal_shares_of_the_processes(monkeypatch):
    monkeypatch.setattr(processes, "place", lambda: (0, 2))
    processes.check_devices(mesh(0, 0, 1, 1))
    for owners in [(0, 0), (0, 0, 1), (0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 0, 1)]:
        with pytest.raises(InputError, match=r"mesh.devices: must .*of 2"):
            processes.check_devices(mesh(*owners))


@pytest.fixture
def metadata(monkeypatch):
    """A metadata server like that of Google's cloud: {attribute: text}."""
    lines = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            self.send_response(200 if name in lines else 404)
            self.end_headers()
            self.wfile.write(lines.get(name, "").encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path / "accel0"])
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    yield lines
    server.shutdown()


def test_hosts_of_a_tpu_pod_are_counted(metadata, monkeypatch):
    assert rendezvous._tpu_hosts() == 1
    metadata["worker-network-endpoints"] = "10.0.0.1"
    assert rendezvous._tpu_hosts() == 1
    metadata["worker-network-endpoints"] = "10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"
    assert rendezvous._tpu_hosts() == 4
    metadata["tpu-env"] = "ACCELERATOR_TYPE: 'v4-32'\nMEGASCALE_NUM_SLICES: '2'\n"
    assert rendezvous._tpu_hosts() == 8
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert rendezvous._tpu_hosts() == 1


def test_a_machine_alone_or_out_of_reach_of_the_cloud_is_alone(metadata, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{free_port()}")
    assert rendezvous._tpu_hosts() == 1
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert rendezvous._tpu_hosts() == 1
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "host-0,host-1")
    assert rendezvous._tpu_hosts() == 2


@pytest.fixture
def beside(monkeypatch):
    """Makes this process the first of two. The other one sends the items of the list in turn."""
    other = []

    def gather(text):
        return [text, json.dumps(other.pop(0))]

    monkeypatch.setattr(processes, "place", lambda: (0, 2))
    monkeypatch.setattr(processes, "_gather", gather)
    monkeypatch.setattr(processes, "_ROUND", 0.05)
    return other


def test_who_waits_hears_from_who_works_until_all_are_done(beside):
    beside += [[0, ""]] * 100
    with processes.together():
        time.sleep(0.3)
    assert 90 < len(beside) < 98  # it reported progress about six times
    beside[:] = [None, None, [0, ""]]
    with processes.together():
        pass
    assert not beside


@pytest.mark.parametrize(("status", "kind"), [(1, RunError), (2, InputError)])
def test_what_fails_elsewhere_is_raised_here(beside, status, kind):
    beside += [None, [status, "disk 7"]]
    with pytest.raises(kind, match="^process 1 ended: disk 7$"), processes.together():
        pass
    beside += [[status, "disk 7"]]
    with pytest.raises(OSError, match="disk 3"), processes.together():
        raise OSError("disk 3")


def test_what_fails_inside_together_is_raised_as_it_is():
    for error in (InputError("a file"), RunError("a disk"), KeyError("x")):
        with pytest.raises(type(error)) as caught, processes.together():
            raise error
        assert caught.value is error
