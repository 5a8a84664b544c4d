"""Several processes: subprocesses on this machine, joined over loopback."""

import gzip
import http.server
import json
import os
import re
import shutil
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
import tiny
from checkout import HELPERS, ROOT, TINY
from runs import newest_state, nothing, on_store, records, without_speed

from jaxrank import cli
from jaxrank.data.prepare.passes import prepare
from jaxrank.errors import InputError, RunError
from jaxrank.evaluation import evaluate
from jaxrank.runtime import processes, rendezvous
from jaxrank.train import train
from jaxrank.workdir.lock import locked

SECONDS = 240  # far more than any of these takes, far less than for ever
AS_USERS = {"XLA_FLAGS": ""}  # a process compiles as users have it


def environment(**more):
    here = {"PYTHONPATH": f"{ROOT}:{HELPERS}", "PYTHON": sys.executable}
    # Compiled as by this process, with whose results theirs are compared.
    here |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_compile.XLA_FLAGS}
    return os.environ | here | more


def launched(number, verb, *args, restarts=0, **more):
    """Runs processes that have eight devices together, until all have ended."""
    script = ROOT / "launch" / "local.sh"
    options = (f"--devices={8 // number}", f"--restarts={restarts}")
    command = [script, str(number), *options, "--", verb, *map(str, args)]
    (found,) = ended([popen(command, environment(**more))])
    return found


def popen(command, env):
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def ended(several):
    """What became of processes; none outlives this."""
    try:
        told = [p.communicate(timeout=SECONDS) for p in several]
    finally:
        for process in several:
            process.terminate()
    return [
        subprocess.CompletedProcess(p.args, p.returncode, *t)
        for p, t in zip(several, told, strict=True)
    ]


def alone_as_users(verb, *args):
    """Runs one process, which knows of no others, on eight devices."""
    command = [sys.executable, "-m", "jaxrank", verb, *map(str, args)]
    env = environment(JAX_NUM_CPU_DEVICES="8", **AS_USERS)
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=SECONDS)


def flags(store, workdir):
    return (
        f"--config={TINY}",
        f"--workdir={workdir}",
        f"--config.data.store={store}",
        "--config.data.shards=8",
        "--config.mesh.devices=8",
    )


def config(store):
    c = on_store(store)
    c.data.shards = 8
    c.mesh.devices = 8
    return c


@pytest.fixture(scope="module")
def trained(store, tmp_path_factory):
    """The workdir of a run of this process."""
    workdir = tmp_path_factory.mktemp("runs") / "trained"
    train(config(store), workdir, report=nothing)
    return workdir


@pytest.fixture(scope="module")
def one(store, tmp_path_factory):
    """A run of one process on eight devices, as users have it."""
    workdir = tmp_path_factory.mktemp("runs") / "one"
    return workdir, alone_as_users("train", *flags(store, workdir), "--json")


@pytest.fixture(scope="module")
def two(store, tmp_path_factory):
    """The same run in two processes of four devices."""
    workdir = tmp_path_factory.mktemp("runs") / "two"
    traced = "--profile_steps=9:10"
    return workdir, launched(2, "train", *flags(store, workdir), traced, "--json", **AS_USERS)


def final_state(store, workdir):
    return newest_state(config(store), workdir)


def every_record(workdir):
    return without_speed(records(workdir, None))


def assert_the_same_run(store, found, expected, starts=1):
    assert every_record(found) == every_record(expected)
    steps = [r["step"] for r in records(found)]
    assert steps == list(range(1, 17))
    assert len(list((found / "tensorboard").iterdir())) == starts
    jax.tree.map(
        np.testing.assert_array_equal, final_state(store, found), final_state(store, expected)
    )


def test_two_processes_train_the_model_of_one_to_the_bit(store, one, two):
    workdir, found = two
    assert found.returncode == 0, found.stderr
    assert_the_same_run(store, workdir, one[0])
    (line,) = found.stdout.splitlines()
    expected = json.loads(one[1].stdout)
    for part in ("step", "metrics", "constant", "best_possible"):
        assert json.loads(line)[part] == expected[part]
    assert "[1]" not in found.stderr  # the second is silent


def test_each_of_two_processes_writes_a_trace_of_the_same_name(two):
    workdir, _ = two
    folder = workdir / "profile" / "plugins" / "profile" / "steps_9_to_10"
    host = socket.gethostname()
    for index in (0, 1):
        written = (folder / f"{index}_{host}.trace.json.gz").read_bytes()
        events = json.loads(gzip.decompress(written))["traceEvents"]
        calls = [e for e in events if e.get("name") == "train"]
        assert [call["args"]["step_num"] for call in calls] == ["10"]
        assert (folder / f"{index}_{host}.xplane.pb").is_file()
    assert len(list(folder.iterdir())) == 4
    assert [p.name for p in (workdir / "profile").iterdir()] == ["plugins"]


# The interpreter of a process that, if it is the third, kills itself before step 15, once.
DYING = """#!/bin/sh
if [ "$1" != -m ] || [ "$JAX_PROCESS_ID" != 2 ]; then exec {python} "$@"; fi
shift 2
exec {python} -c '
import os, signal, time
from pathlib import Path
from jaxrank import cli
from jaxrank.data.batches.pipeline import TrainBatches
workdir, whole = Path("{workdir}"), TrainBatches.__next__
def dying(self):
    if self.position == 14 and not (workdir / "died").exists():
        while not (workdir / "checkpoints" / "8").is_dir():
            time.sleep(0.05)
        (workdir / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self)
TrainBatches.__next__ = dying
cli.main()
' "$@"
"""


@pytest.mark.slow
def test_four_processes_of_which_one_is_killed_train_the_model_of_one_to_the_bit(
    store, trained, tmp_path
):
    workdir, python = tmp_path / "four", tmp_path / "python"
    python.write_text(DYING.format(python=sys.executable, workdir=workdir))
    python.chmod(0o755)
    found = launched(4, "train", *flags(store, workdir), restarts=1, PYTHON=str(python))
    assert found.returncode == 0, found.stderr
    assert (workdir / "died").exists()
    assert "all are started again (0 restarts left)" in found.stderr
    assert found.stdout.count("Resuming after step 8") == 1
    assert found.stdout.count("Trained to step 16") == 1
    assert_the_same_run(store, workdir, trained, starts=2)


# The interpreter of a process that, if it is the second, asks itself to end before step 11.
ASKED = """#!/bin/sh
if [ "$1" != -m ] || [ "$JAX_PROCESS_ID" != 1 ]; then exec {python} "$@"; fi
shift 2
exec {python} -c '
import os, signal
from jaxrank import cli
from jaxrank.runtime import stop
whole = stop.Stop.asked
calls = []
def asked(self):
    calls.append(self)
    if len(calls) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    return whole(self)
stop.Stop.asked = asked
cli.main()
' "$@"
"""


def test_a_signal_to_one_of_two_processes_ends_both_after_one_checkpoint(store, trained, tmp_path):
    workdir, python = tmp_path / "two", tmp_path / "python"
    python.write_text(ASKED.format(python=sys.executable))
    python.chmod(0o755)
    found = launched(2, "train", *flags(store, workdir), PYTHON=str(python))
    assert found.returncode == 143, found.stderr
    for name in ("jaxrank[0]", "jaxrank[1]"):
        assert f"{name}: stopped after step 12 of 16 by SIGTERM" in found.stderr
    assert sorted(int(p.name) for p in (workdir / "checkpoints").iterdir()) == [8, 12]

    told = []
    train(config(store), workdir, report=told.append)
    assert "Resuming after step 12" in "\n".join(told)
    assert every_record(workdir) == every_record(trained)
    states = [final_state(store, path) for path in (workdir, trained)]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_run_of_two_processes_is_resumed_by_one(store, one, two, tmp_path):
    shutil.copytree(two[0], tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "16")
    found = alone_as_users("train", *flags(store, tmp_path / "copy"))
    assert "Resuming after step 8" in found.stdout, found.stderr
    assert every_record(tmp_path / "copy") == every_record(one[0])
    expected = final_state(store, one[0])
    jax.tree.map(np.testing.assert_array_equal, final_state(store, tmp_path / "copy"), expected)


@pytest.mark.slow
def test_two_processes_start_from_the_model_of_one_as_one_does(store, trained, tmp_path):
    short = ("--config.num_steps=4", "--config.ema_decay=0.9", f"--init-from={trained}")
    found = launched(2, "train", *flags(store, tmp_path / "two"), *short)
    assert found.returncode == 0, found.stderr
    assert "Started from" in found.stdout
    c = config(store)
    c.num_steps, c.ema_decay = 4, 0.9
    train(c, tmp_path / "one", init_from=str(trained), report=nothing)
    states = [newest_state(c, tmp_path / name) for name in ("one", "two")]
    assert int(states[0].earlier) == 16
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_two_processes_score_the_days_of_one_and_learn_the_same(tmp_path):
    names = daily.DAYS[:3]
    days = {day: daily.table(i, 0) for i, day in enumerate(names)}
    store = by_day.write(tmp_path, days, daily.FEATURES, block_size=100)
    changes = dict(data__train=f"train/{names[0]}:{names[1]}", data__shards=8, mesh__devices=8)
    file = tmp_path / "config.py"
    file.write_text(
        "import daily\nfrom jaxrank.data.store.reader import open_store\n"
        f"store = open_store({str(store.path)!r})\n"
        f"get_config = lambda: daily.config(store, **{changes})\n"
    )

    args = ("train", f"--config={file}", f"--workdir={tmp_path / 'two'}", "--json")
    two = launched(2, *args)
    assert two.returncode == 0, two.stderr
    c = daily.config(store, **changes)
    one = train(c, tmp_path / "one", report=nothing)
    found = json.loads(two.stdout)
    assert [score["day"] for score in found["days"]] == names[1:]
    for part in ("step", "days", "metrics", "constant", "best_possible"):
        assert found[part] == getattr(one, part)
    assert every_record(tmp_path / "two") == every_record(tmp_path / "one")
    states = [newest_state(c, tmp_path / workdir) for workdir in ("two", "one")]
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_predictions_of_two_processes_are_those_of_one(trained, tmp_path):
    which = dict(checkpoint="newest", data="", split="")
    evaluate.predict(trained, output=tmp_path / "one.parquet", **which)
    args = ("predict", f"--workdir={trained}", f"--output={tmp_path / 'two.parquet'}")
    found = launched(2, *args)
    assert found.returncode == 0, found.stderr
    assert pq.read_table(tmp_path / "two.parquet") == pq.read_table(tmp_path / "one.parquet")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.parquet", "two.parquet"]


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def is_free(port):
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def started(index, settings, *args, program=("-m", "jaxrank")):
    command = [sys.executable, *program, *map(str, args)]
    return popen(command, environment(JAX_NUM_CPU_DEVICES="4", **settings(index)))


def test_processes_of_a_slurm_step_meet_without_flags(trained):
    # JAX takes the port from the number of the job.
    job = next(n for n in range(os.getpid(), 2**30) if is_free(2**16 - 2**12 + n % 2**12))

    def slurm(index):
        return {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(index),
            "SLURM_LOCALID": str(index),
        }

    args = ("evaluate", f"--workdir={trained}", "--json")
    first, second = ended([started(i, slurm, *args) for i in (0, 1)])
    assert first.returncode == 0, first.stderr
    assert second.stdout == ""
    found, expected = json.loads(first.stdout), evaluate.evaluate(str(trained))
    assert found["metrics"] == expected.metrics
    assert found["buckets"] == expected.buckets


def coordinator():
    port = free_port()

    def settings(index):
        return {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
        }

    return settings


def test_a_failure_of_process_0_alone_ends_all_with_its_reason(tmp_path):
    args = (f"--config={TINY}", f"--workdir={tmp_path}", "--config.source.rows.train=-5")
    found = launched(2, "train", *args, restarts=3)
    assert found.returncode == 2
    assert "started again" not in found.stderr
    reason = "source.rows.train: must be a whole number, not negative: found -5."
    assert f"\njaxrank[0]: error: {reason}\n" in f"\n{found.stderr}"
    assert f"jaxrank[1]: error: process 0 ended: {reason}" in found.stderr
    assert "Traceback" not in found.stderr


def test_processes_that_were_told_different_things_are_refused(store, tmp_path):
    settings = coordinator()
    args = ("train", *flags(store, tmp_path))
    several = [started(i, settings, *args, f"--config.seed={i}") for i in (0, 1)]
    for index, found in enumerate(ended(several)):
        assert found.returncode == 2
        assert f"jaxrank[{index}]: error: flags and config must be the same" in found.stderr
    assert list(tmp_path.iterdir()) == []


def test_processes_of_different_versions_are_refused(store, tmp_path):
    settings = coordinator()
    other = "import jaxrank, jaxrank.cli; jaxrank.__version__ = '0.0.1'; jaxrank.cli.main()"
    args = ("train", *flags(store, tmp_path / "run"))
    several = [
        started(0, settings, *args),
        started(1, settings, *args, program=("-c", other)),
    ]
    for index, found in enumerate(ended(several)):
        assert found.returncode == 2, found.stderr
        assert f"jaxrank[{index}]: error: versions of jaxrank, JAX and NumPy" in found.stderr
        assert "jaxrank 0.0.1, jax " in found.stderr
    assert not (tmp_path / "run").exists()


def test_processes_of_which_one_cannot_use_native_code_are_refused(store, tmp_path):
    settings = coordinator()
    args = ("train", *flags(store, tmp_path / "run"))
    several = [
        started(i, lambda i: settings(i) | {"JAXRANK_NATIVE": str(i)}, *args) for i in (0, 1)
    ]
    for index, found in enumerate(ended(several)):
        assert found.returncode == 2, found.stderr
        assert f"jaxrank[{index}]: error: what works on rows and layers must" in found.stderr
        assert "native code and XLA, as with JAXRANK_NATIVE=0" in found.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_processes_that_read_other_data_under_the_same_name_are_refused(store, trained, tmp_path):
    """Of which only the part to evaluate differs."""
    c = tiny.config()
    source = c.source.to_dict()
    source["rows"]["valid"] += 100
    other = tmp_path / "other" / "store"
    prepare(c.features.to_dict(), source, other, block_size=512, report=nothing)
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "store").symlink_to(store)
    for args in (
        ("train", *flags("store", tmp_path / "run")),
        ("evaluate", f"--workdir={trained}", "--data=store"),
    ):
        settings = coordinator()
        several = [
            subprocess.Popen(
                [sys.executable, "-m", "jaxrank", *args],
                stderr=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=tmp_path / name,
                env=environment(JAX_NUM_CPU_DEVICES="4", **settings(i)),
            )
            for i, name in enumerate(("one", "other"))
        ]
        for index, found in enumerate(ended(several)):
            assert found.returncode == 2, found.stderr
            assert f"jaxrank[{index}]: error: the data in store" in found.stderr
    assert not (tmp_path / "run" / "config.json").exists()


def assert_knows_that_the_other_is_gone(found):
    assert found.returncode != 0
    # As jaxrank says it, or JAX, which ends the process if it is the first to know.
    assert re.search("another process has ended|another task died", found.stderr)


@pytest.mark.slow
def test_a_process_that_is_killed_does_not_leave_the_other_waiting(store, tmp_path):
    settings = coordinator()
    args = ("train", *flags(store, tmp_path), "--config.num_steps=100000")
    several = [started(i, settings, *args) for i in (0, 1)]
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "checkpoints" / "8").is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    several[0].kill()
    assert_knows_that_the_other_is_gone(ended(several)[1])


# What process 1 reads after step 6 is damaged.
DAMAGED = """
from jaxrank import cli
from jaxrank.runtime import processes
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.errors import InputError
whole = TrainBatches.__next__
def damaged(self):
    if self.position == 6 and processes.place()[0] == 1:
        raise InputError("block 3 is damaged")
    return whole(self)
TrainBatches.__next__ = damaged
cli.main()
"""


@pytest.mark.slow
def test_what_one_process_cannot_read_ends_all(store, tmp_path):
    settings = coordinator()
    args = ("train", *flags(store, tmp_path))
    several = [started(i, settings, *args, program=("-c", DAMAGED)) for i in (0, 1)]
    first, second = ended(several)
    assert second.returncode == 2
    assert second.stderr == "jaxrank[1]: error: block 3 is damaged\n"
    assert_knows_that_the_other_is_gone(first)


# Each process in a directory of its own.
APART = """
import os
from jaxrank import cli
os.chdir("{}/" + os.environ["JAX_PROCESS_ID"])
cli.main()
"""


def test_data_that_one_process_does_not_have_ends_all_and_all_say_so(store, tmp_path):
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    (tmp_path / "0" / "data").symlink_to(store)
    settings, program = coordinator(), ("-c", APART.format(tmp_path))
    args = ("train", *flags("data", tmp_path / "run"))
    several = [started(i, settings, *args, program=program) for i in (0, 1)]
    for index, found in enumerate(ended(several)):
        assert found.returncode == 2
        assert "no such store" in found.stderr
        assert ("process 1 ended: " in found.stderr) == (index == 0)


# A checkpoint that process 1 cannot read.
UNREADABLE = """
import orbax.checkpoint as ocp
from jaxrank import cli
from jaxrank.runtime import processes
whole = ocp.CheckpointManager.restore
def unreadable(*args, **kwargs):
    found = whole(*args, **kwargs)  # in which Orbax waits for all processes
    if processes.place()[0] == 1:
        raise ValueError("a bad disk")
    return found
ocp.CheckpointManager.restore = unreadable
cli.main()
"""


@pytest.mark.slow
def test_a_checkpoint_that_one_process_cannot_read_ends_all(store, trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    settings = coordinator()
    args = ("train", *flags(store, tmp_path / "copy"))
    several = [started(i, settings, *args, program=("-c", UNREADABLE)) for i in (0, 1)]
    first, second = ended(several)
    assert second.returncode == 2
    assert second.stderr.endswith("checkpoint cannot be restored; it is damaged: a bad disk\n")
    assert first.returncode != 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--coordinator=localhost:1",), "must be given together.*--num-processes=None"),
        (("--num-processes=2",), "must be given together.*--coordinator=None"),
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
def test_flags_that_do_not_fit_together_are_refused(args, message):
    with pytest.raises(InputError, match=message):
        cli.run(["evaluate", "--workdir=/nowhere/run", *args])


def test_a_bad_environment_ends_with_status_2(tmp_path):
    def settings(index):
        return {"JAX_NUM_PROCESSES": "two"}

    (found,) = ended([started(0, settings, "evaluate", f"--workdir={tmp_path}")])
    assert (found.returncode, found.stdout) == (2, "")
    message = "JAX_NUM_PROCESSES: must be a whole number: found 'two'."
    assert found.stderr == f"jaxrank: error: {message}\n"


def test_a_port_that_is_taken_is_refused():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(InputError, match=f"--coordinator: port {port} must be free"):
            rendezvous.join(f"localhost:{port}", 2, 0)


def test_one_process_by_its_number_alone_joins_no_one(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    rendezvous.join(num_processes=1)
    assert processes.place() == (0, 1)
    assert processes.name() == "jaxrank"


def test_a_workdir_that_is_not_shared_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(processes, "from_first", lambda value: "what process 0 wrote")
    message = "must be one directory that all processes share"
    with pytest.raises(InputError, match=message), locked(tmp_path / "elsewhere"):
        pass


@pytest.mark.parametrize(
    ("platform", "error", "kind", "told"),
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
def test_devices_that_cannot_be_opened_are_told(monkeypatch, platform, error, kind, told):
    def devices():
        raise error

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    with pytest.raises(kind, match=told):
        processes.open_devices()


def test_processes_of_unlike_shares_are_refused(monkeypatch):
    monkeypatch.setattr(processes, "place", lambda: (0, 3))
    for owners in ([0, 1, 2], [0, 0, 1, 1, 2, 2]):
        monkeypatch.setattr(jax, "devices", lambda owners=owners: mesh(*owners).devices)
        processes.check_shares()
    monkeypatch.setattr(jax, "devices", lambda: mesh(0, 0, 1, 2, 2).devices)
    with pytest.raises(InputError, match=r"equally many devices: found \[2, 1, 2\]"):
        processes.check_shares()


def mesh(*owners):
    devices = [SimpleNamespace(process_index=i) for i in owners]
    return SimpleNamespace(devices=np.asarray(devices))


def test_devices_of_a_mesh_must_be_equal_shares_of_the_processes(monkeypatch):
    monkeypatch.setattr(processes, "place", lambda: (0, 2))
    processes.check_devices(mesh(0, 0, 1, 1))
    for owners in [(0, 0), (0, 0, 1), (0, 1, 0, 1), (1, 1, 0, 0), (0, 0, 0, 1)]:
        with pytest.raises(InputError, match=r"mesh.devices must be an equal share.*of 2"):
            processes.check_devices(mesh(*owners))


@pytest.fixture
def metadata(monkeypatch):
    """A server of what Google's cloud tells its machines: {attribute: text}."""
    told = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.removeprefix("/computeMetadata/v1/instance/attributes/")
            self.send_response(200 if name in told else 404)
            self.end_headers()
            self.wfile.write(told.get(name, "").encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
    monkeypatch.setattr(Path, "glob", lambda path, pattern: [path / "accel0"])
    for name in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.delenv(name, raising=False)
    yield told
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
    """This process is the first of two; the other one tells what is in the list, in turn."""
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
    assert 90 < len(beside) < 98  # it told that it is at work, about six times
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
