"""The self-test passes on this machine, and a seeded fault fails the check that must notice it."""

import contextlib
import json
import math
import re
import time
import types

import jax
import numpy as np
import pytest
import quick_compile

from jaxrank import cli
from jaxrank import mesh as meshes
from jaxrank.data import lock
from jaxrank.errors import InputError
from jaxrank.run import build_endless
from jaxrank.runtime import processes
from jaxrank.selftest import (
    check,
    collectives,
    devices,
    file_system,
    hosts,
    input_rate,
    job,
    process,
    resume,
    supervise,
)
from jaxrank.selftest.check import FAIL, NAMES, NOT_APPLICABLE, PASS, Verdict
from jaxrank.selftest.job import Size

SMALL = Size(
    rows=4000,
    batch_per_device=16,
    least_batch=128,
    tables=2,
    executions=1,
    steps=24,
    seconds=0.1,
    exchange_bytes=4096,
    limit_seconds=240.0,
)


@pytest.fixture
def mesh():
    return meshes.make_mesh(devices=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("selftest")


@contextlib.contextmanager
def built(folder):
    config = job.config(SMALL, 2, 1)
    config.mesh.devices = 2
    with build_endless(config, folder, lambda _: None) as run:
        yield run


@pytest.mark.slow
def test_a_killed_run_of_this_machine_passes_all_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job, "Size", lambda: SMALL)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("XLA_FLAGS", quick_compile.XLA_FLAGS)
    with contextlib.suppress(cli.FailedCheckError):  # the input depends on the load of this machine
        cli.run(["selftest", f"--workdir={tmp_path / 'w'}", "--json"])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert [entry["name"] for entry in result["checks"]] == list(NAMES)
    statuses = {entry["name"]: entry["status"] for entry in result["checks"]}
    assert statuses.pop("input") in (PASS, FAIL)
    several = {statuses.pop(name) for name in ("exchange", "all-reduce", "devices")}
    assert several == {NOT_APPLICABLE}
    assert set(statuses.values()) == {PASS}, err
    assert "Resuming after step" in result["checks"][-1]["finding"]
    assert "what to do" in err
    assert list((tmp_path / "w").iterdir()) == []


def test_all_devices_train_the_model_of_one(folder):
    with built(folder) as run:
        verdict = devices.check(run, SMALL.executions, each_device=False)
        assert verdict.status == PASS, verdict
        rates = input_rate.check(run, SMALL.seconds)
        assert "examples/s, step " in rates.finding


@pytest.mark.parametrize(
    ("together", "alone", "expected"),
    [
        ([[1.0, 4.5], [0.0]], [[2.0, 4.0], [0.0]], 0.25),
        ([[1.0], [math.nan]], [[1.0], [2.0]], math.nan),
        ([[math.nan], [1.0]], [[1.0], [1.0]], math.nan),
        ([[1.0], [math.inf]], [[1.0], [math.inf]], math.nan),
    ],
)
def test_a_difference_is_relative_and_nan_if_a_number_is(together, alone, expected):
    pairs = zip(map(np.array, together), map(np.array, alone), strict=True)
    np.testing.assert_equal(devices.relative_difference(pairs), expected)


def test_a_device_whose_gradients_are_lost_fails_the_check_of_devices(folder, monkeypatch):
    monkeypatch.setattr(meshes, "total", lambda mesh, tree: tree)
    with built(folder) as run:
        verdict = devices.check(run, SMALL.executions, each_device=False)
    assert verdict.status == FAIL
    assert "--full" in verdict.advice


def no_lock(monkeypatch, folder):
    """A file system that grants every lock."""
    monkeypatch.setattr(lock.fcntl, "flock", lambda *_: None)
    return file_system.locks(folder)


def torn_rename(monkeypatch, folder):
    """A file system that copies in place of a rename."""

    @contextlib.contextmanager
    def copying(path):
        yield path
        time.sleep(0.001)

    monkeypatch.setattr(file_system, "replacing", copying)
    return file_system.rename(folder, 0.5)


def full_disk(monkeypatch, folder):
    monkeypatch.setattr(file_system, "_MIN_FREE_BYTES", 2**70)
    return file_system.space(folder)


def not_shared(monkeypatch, folder):
    monkeypatch.setattr(file_system, "_PATIENCE", 0.0)
    monkeypatch.setattr(file_system, "_read", lambda path: "")
    return file_system.visible(folder)


def wrong_exchange(monkeypatch, _):
    monkeypatch.setattr(jax.lax, "all_to_all", lambda x, *_, **__: x)
    return collectives.exchange(meshes.make_mesh(devices=4), 4096, 0.01)


def wrong_sum(monkeypatch, _):
    monkeypatch.setattr(meshes, "total", lambda mesh, x: x)
    return collectives.all_reduce(meshes.make_mesh(devices=4), 4096, 0.01)


def slow_links(monkeypatch, _):
    monkeypatch.setattr(collectives, "predicted", lambda *_: 1e-9)
    return collectives.exchange(meshes.make_mesh(devices=4), 4096, 0.01)


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (no_lock, "got the lock as well"),
        (torn_rename, "is torn|cannot be read"),
        (full_disk, "free, written at"),
        (not_shared, "does not see"),
        (wrong_exchange, "numbers are wrong after one all-to-all"),
        (wrong_sum, "numbers are wrong after one all-reduce"),
        (slow_links, "0% of it reached"),
    ],
)
def test_a_seeded_fault_fails_its_check_with_advice(fault, finding, monkeypatch, tmp_path):
    verdict = fault(monkeypatch, tmp_path)
    assert verdict.status == FAIL
    assert verdict.advice or fault is slow_links  # of the network of CPUs there is none
    assert re.search(finding, verdict.finding)


def test_the_file_system_of_this_machine_passes(tmp_path):
    for verdict in (
        file_system.visible(tmp_path),
        file_system.rename(tmp_path, 0.1),
        file_system.locks(tmp_path),
        file_system.space(tmp_path),
        hosts.describe(),
    ):
        assert verdict.status == PASS, verdict


def test_exchanges_have_the_right_values_and_a_rate(mesh):
    for function in (collectives.exchange, collectives.all_reduce):
        verdict = function(mesh, 4096, 0.01)
        assert verdict.status == PASS
        assert "values are right" in verdict.finding
        assert "no prediction for cpu" in verdict.finding


@pytest.mark.parametrize(
    ("rates", "on_host", "status"),
    [
        ((5e6, 1e6, 0.95e6), False, PASS),
        ((5e6, 1e6, 0.5e6), False, FAIL),
        ((5e6, 1e6, 0.5e6), True, PASS),  # both use the same cores
        ((1e6, 1e6, 0.5e6), True, FAIL),
    ],
)
def test_a_step_that_waits_for_the_input_fails(rates, on_host, status):
    verdict = input_rate.verdict(*rates, on_host=on_host)
    assert verdict.status == status
    assert ("set data.num_workers" in verdict.advice) == (status == FAIL and not on_host)
    assert ("(data.num_workers) take cores from the step" in verdict.advice) == (
        status == FAIL and on_host
    )


def test_another_version_on_one_host_fails():
    machines = [hosts._versions() for _ in range(3)]
    assert hosts.compare_versions(machines).status == PASS
    machines[2]["jaxlib"] = "0.0.1"
    verdict = hosts.compare_versions(machines)
    assert verdict.status == FAIL
    assert "processes 0 and 2 differ: jaxlib" in verdict.finding


def records(folder, name, losses):
    workdir = folder / name
    (workdir / "checkpoints" / "8").mkdir(parents=True)
    lines = [json.dumps(dict(step=i + 1, kind="train", loss=x)) for i, x in enumerate(losses)]
    (workdir / "metrics.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize(
    ("losses", "finding"),
    [
        ([0.5, 0.4], "Resuming after step 1: equal to the unbroken run in 2 records"),
        ([0.5, 0.3], "loss of step 2 is 0.4 and 0.3"),
        ([0.5], "2 and 1 records"),
    ],
)
def test_a_run_that_resumes_as_another_one_fails(losses, finding, tmp_path):
    records(tmp_path, resume.UNBROKEN, [0.5, 0.4])
    records(tmp_path, resume.KILLED, losses)
    verdict = resume.compare(tmp_path, "Resuming after step 1", exact=False)
    assert (verdict.status == PASS) == finding.startswith("Resuming")
    assert verdict.finding == finding


def test_a_check_fails_in_all_processes_if_it_fails_in_one(monkeypatch):
    def raises():
        raise InputError("no way")

    assert check.run("lock", raises, "go").finding == "InputError: no way"
    others = [[PASS, "fine", ""], [FAIL, "torn", "go"]]
    monkeypatch.setattr(processes, "gather_values", lambda value: others)
    result = check.run("rename", lambda: Verdict(PASS, "fine"), "go")
    assert (result.status, result.finding, result.advice) == (FAIL, "process 1: torn", "go")


def test_processes_that_hang_or_crash_fail_the_check_that_they_were_in(tmp_path, monkeypatch):
    hanging = SMALL._replace(limit_seconds=0.2)
    result = supervise.selftest("", hanging, report=lambda text: None)
    assert result.failed == ["processes"]
    assert "no answer for 0 s" in result.checks[0].finding
    assert result.checks[-1].finding == "not run, because `processes` failed"

    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    with pytest.raises(InputError, match="JAX_PLATFORMS.*found 'nonsense'"):
        supervise.selftest(str(tmp_path), SMALL, report=lambda text: None)


@pytest.mark.parametrize(
    ("name", "status", "advice"),
    [
        ("lock", None, "the file system of the workdir answers"),
        ("exchange", None, "all ports between them are open"),
        ("exchange", -9, "If memory ran out, the log of the kernel"),
        ("exchange", 1, "Read the message"),
    ],
)
def test_the_advice_fits_the_check_and_how_its_process_ended(name, status, advice):
    broken = supervise._broken(name, supervise._Ended(status, [], "a: error: too hot"), SMALL)
    assert broken.status == FAIL
    assert advice in broken.advice
    assert ("kernel" in broken.advice) == (status == -9)


def test_every_error_of_a_process_is_its_last_line(monkeypatch, capsys):
    def fail(*arguments):
        raise ValueError("too\nhot")

    monkeypatch.setattr(process, "main", fail)
    assert process.run(["checks"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert supervise._error(error) == "ValueError: too hot"


def test_a_workdir_that_is_a_file_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--workdir: .*file must be a directory"):
        process.make_folder(str(tmp_path / "file"))


def results_program(path, results, after):
    """Writes a program in place of Python that writes results, and then runs a command of sh."""
    text = "\n".join(map(json.dumps, results))
    path.write_text(f"#!/bin/sh\ncat >>\"$6\" <<'END'\n{text}\nEND\n{after}\n")
    path.chmod(0o700)
    return str(path)


def test_the_time_limit_is_that_of_one_check(tmp_path, monkeypatch):
    done = [check.Check(name, PASS, "fine")._asdict() for name in ("rename", "lock", "space")]
    results = [{"place": [0, 1]}, *({"check": entry} for entry in done)]
    program = results_program(tmp_path / "python", results, "sleep 0.3")
    monkeypatch.setattr(supervise.sys, "executable", program)
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(supervise, "time", clock)

    def take_most_of_the_limit(line):
        now[0] += 0.9 * SMALL.limit_seconds

    result = supervise.selftest("", SMALL, report=take_most_of_the_limit)
    assert not result.failed
    assert [entry.name for entry in result.checks if entry.status == PASS] == [
        "rename",
        "lock",
        "space",
    ]


def test_a_result_is_reported_at_once_and_a_stop_leaves_no_directory(tmp_path, monkeypatch):
    folder = tmp_path / ".selftest-new"
    folder.mkdir()
    results = (
        {"place": [0, 1]},
        {"folder": str(folder)},
        {"began": "lock"},
        {"check": check.Check("lock", PASS, "fine")._asdict()},
    )
    program = results_program(tmp_path / "python", results, "exec sleep 600")
    monkeypatch.setattr(supervise.sys, "executable", program)
    lines = []

    def stop_at_result(line):
        lines.append(line)
        if "fine" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        supervise.selftest(str(tmp_path), SMALL, report=stop_at_result)
    assert lines == ["Checking: lock", "  pass: fine"]
    assert not folder.exists()
