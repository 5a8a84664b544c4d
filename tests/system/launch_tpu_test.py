"""Tests of launch/tpu.sh and worker.sh on stand-ins for TPUs, which are directories."""

import contextlib
import os
import pty
import re
import shlex
import shutil
import subprocess

import pytest
import stand_ins
from launching import HOSTILE, LAUNCH, ROOT, ZONE, Cloud, eventually, lines_of_shell

# Verbs that create a TPU and start a run: two commands unpack the copy, then install, then run.
MADE = ["create", "list", "scp", "ssh", "ssh", "ssh", "ssh"]


@pytest.fixture
def cloud(tmp_path):
    with contextlib.closing(Cloud(tmp_path)) as cloud:
        yield cloud


def resume(cloud, *args, chips="v3-8", run=("train", "--config=c.py", "--workdir=/mnt/w")):
    flags = (ZONE, f"--accelerator-type={chips}", *args)
    return cloud.run("tpu.sh", "resume", "ads", *flags, "--", *run)


def ran(home, calls=1):
    """Waits for the given number of calls of jaxrank on a worker, and returns their words.

    A call is recorded some time after its start.
    """
    path, end = home / "ran", "\0(end)\0"
    eventually(lambda: path.exists() and path.read_text().count(end) >= calls)
    result = path.read_text().split(end)[:-1]
    assert len(result) == calls
    return [call.split("\0") for call in result]


def wait_for_end(cloud, name):
    eventually(lambda: "is running" not in cloud.run("tpu.sh", "status", name, ZONE).stdout)


@pytest.mark.parametrize(
    ("chips", "version"),
    [
        ("v2-8", "tpu-ubuntu2204-base"),
        ("v3-32", "tpu-ubuntu2204-base"),
        ("v4-8", "tpu-ubuntu2204-base"),
        ("v5litepod-8", "v2-alpha-tpuv5-lite"),
        ("v5p-8", "v2-alpha-tpuv5"),
        ("v6e-8", "v2-alpha-tpuv6e"),
    ],
)
def test_a_tpu_gets_the_image_of_its_kind(chips, version, cloud):
    result = cloud.run("tpu.sh", "create", "ads", ZONE, f"--accelerator-type={chips}", "--spot")
    assert result.returncode == 0, result.stderr
    (call,) = cloud.calls("gcloud")
    assert call["flags"] == {
        "zone": "us-central2-b",
        "accelerator-type": chips,
        "version": version,
        "spot": "",
    }


def test_the_zone_may_be_that_of_the_environment(cloud):
    args = ("tpu.sh", "create", "ads", "--accelerator-type=v3-8")
    assert cloud.run(*args, CLOUDSDK_COMPUTE_ZONE="here").returncode == 0
    assert cloud.calls("gcloud")[0]["flags"]["zone"] == "here"


def test_a_tpu_of_an_unknown_kind_needs_its_image(cloud):
    args = ("tpu.sh", "create", "ads", ZONE, "--accelerator-type=v9-8")
    result = cloud.run(*args)
    assert result.returncode == 2
    assert "--runtime-version: must be given for --accelerator-type=v9-8" in result.stderr
    assert cloud.calls("gcloud") == []
    assert cloud.run(*args, "--runtime-version=new").returncode == 0
    assert cloud.calls("gcloud")[0]["flags"]["version"] == "new"


def test_jaxrank_runs_on_every_worker_with_the_words_it_was_given(cloud):
    chips = "--accelerator-type=v3-32"
    cloud.jaxrank(0)
    for verb in ("create", "wait", "copy", "install"):
        result = cloud.run("tpu.sh", verb, "ads", ZONE, chips)
        assert result.returncode == 0, (verb, result.stderr)
    assert cloud.run("tpu.sh", "status", "ads", ZONE).stdout == "jaxrank has not run\n" * 4
    result = cloud.run("tpu.sh", "run", "ads", ZONE, "--", "train", *HOSTILE)
    assert result.returncode == 0, result.stderr
    wait_for_end(cloud, "ads")
    homes = cloud.workers("ads")
    assert len(homes) == 4
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for home in homes:
        assert ran(home) == [["train", *HOSTILE]]
        for file in tracked.stdout.splitlines():
            assert not (ROOT / file).exists() or (home / "jaxrank" / file).exists()
        assert not (home / "jaxrank" / ".git").exists()
        assert "starts: jaxrank train" in (home / "jaxrank.log").read_text()
    assert cloud.run("tpu.sh", "status", "ads", ZONE).stdout == "jaxrank ended with status 0\n" * 4
    installed = cloud.calls("python3 -m uv pip install")
    assert len(installed) == 4
    for call in installed:
        assert call["flags"]["constraints"] == "constraints.txt"
        assert call["flags"]["editable"] == ".[tpu]"


def test_a_run_is_not_started_twice_and_can_be_stopped(cloud):
    assert resume(cloud).returncode == 0
    again = cloud.run("tpu.sh", "run", "ads", ZONE, "--", "train")
    assert again.returncode == 2
    assert "jaxrank is running here" in again.stderr
    assert cloud.run("tpu.sh", "stop", "ads", ZONE).returncode == 0
    assert cloud.run("tpu.sh", "status", "ads", ZONE).stdout == "jaxrank was ended from outside\n"
    assert cloud.run("tpu.sh", "run", "ads", ZONE, "--", "train").returncode == 0


def test_resume_makes_a_run_from_nothing_and_leaves_one_that_runs(cloud):
    result = resume(cloud, chips="v3-16")
    assert result.returncode == 0, result.stderr
    assert cloud.verbs() == ["list", *MADE]
    for home in cloud.workers("ads"):
        assert ran(home) == [["train", "--config=c.py", "--workdir=/mnt/w"]]
    result = resume(cloud)
    assert result.returncode == 0, result.stderr
    assert "jaxrank on ads: running" in result.stderr
    assert cloud.verbs()[8:] == ["list", "ssh"]


def test_what_a_preemption_left_is_deleted_only_if_asked(cloud):
    resume(cloud, "--spot")
    for state in ("TERMINATED", "PREEMPTED"):
        before = len(cloud.calls("gcloud"))
        cloud.tpus(ads=[state])
        result = resume(cloud, "--spot")
        assert result.returncode == 2
        assert "--yes" in result.stderr
        assert cloud.verbs()[before:] == ["list"]
    before = len(cloud.calls("gcloud"))
    result = resume(cloud, "--spot", "--yes")
    assert result.returncode == 0, result.stderr
    assert cloud.verbs()[before:] == [
        "list",
        "delete",
        "create",
        "list",
        "scp",
        "ssh",
        "ssh",
        "ssh",
        "ssh",
    ]
    assert "spot" in cloud.calls("gcloud compute tpus tpu-vm create")[1]["flags"]


def test_a_cloud_that_does_not_answer_is_not_taken_for_a_lost_tpu(cloud):
    resume(cloud)
    before = len(cloud.calls("gcloud"))
    (cloud.directory / "offline").touch()
    result = resume(cloud, "--yes")
    assert result.returncode == 1
    assert "no route to the cloud" in result.stderr
    assert cloud.verbs()[before:] == ["list"]


def test_a_worker_that_was_replaced_gets_jaxrank_again(cloud):
    cloud.jaxrank(1)
    resume(cloud, chips="v3-16")
    wait_for_end(cloud, "ads")
    first, second = cloud.workers("ads")
    shutil.rmtree(second)
    second.mkdir()
    result = resume(cloud, chips="v3-16")
    assert result.returncode == 0, result.stderr
    assert "jaxrank on ads: new" in result.stderr
    assert all(call[0] == "train" for call in ran(first, 2) + ran(second))


def test_a_stopped_tpu_is_left_to_its_owner(cloud):
    resume(cloud)
    cloud.tpus(ads=["STOPPED"])
    result = resume(cloud, "--yes")
    assert result.returncode == 2
    assert "the state STOPPED of ads" in result.stderr
    assert "delete" not in cloud.verbs()


@pytest.mark.parametrize(
    ("status", "code", "text", "again"),
    [
        (0, 0, "jaxrank on ads: finished", 0),
        (137, 0, "jaxrank on ads: failed", 1),
        (2, 2, "rejected its flags", 0),
    ],
)
def test_resume_starts_again_what_failed_but_not_what_was_rejected(
    status, code, text, again, cloud
):
    cloud.jaxrank(status)
    resume(cloud)
    wait_for_end(cloud, "ads")
    result = resume(cloud)
    assert (result.returncode, text in result.stderr) == (code, True), result.stderr
    wait_for_end(cloud, "ads")
    assert all(call[0] == "train" for call in ran(cloud.workers("ads")[0], 1 + again))


def test_watch_continues_through_preemptions_until_jaxrank_has_finished(cloud):
    args = ["tpu.sh", "resume", "ads", ZONE, "--accelerator-type=v3-8", "--watch", "--every=1"]
    result = cloud.run(*args, "--", "train")
    assert result.returncode == 2
    assert "--watch: must have --yes" in result.stderr
    env = cloud.env
    command = [LAUNCH / args[0], *args[1:], "--yes", "--", "train"]
    watch = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    for times in (1, 2):
        eventually(lambda times=times: cloud.verbs().count("create") == times)
        assert any("jaxrank on ads: running" in line for line in watch.stderr)
        if times == 1:
            cloud.tpus(ads=["STOPPING", "PREEMPTED"])
    cloud.jaxrank(0)
    cloud.run("tpu.sh", "stop", "ads", ZONE)  # the watch notices, and restarts it
    _, rest = watch.communicate(timeout=60)
    assert watch.returncode == 0
    assert "jaxrank on ads: failed" in rest
    assert "jaxrank on ads: finished" in rest
    assert cloud.verbs().count("delete") == 1


def test_watch_gives_up_on_what_fails_again_and_again(cloud):
    cloud.jaxrank(1)
    result = resume(cloud, "--watch", "--yes", "--every=0", "--retries=2")
    assert result.returncode == 2
    assert "found 3 failures" in result.stderr


def test_watch_tries_again_whatever_the_status_of_the_cloud(cloud):
    (cloud.directory / "offline").write_text("2")
    result = resume(cloud, "--watch", "--yes", "--every=0", "--retries=2")
    assert result.returncode == 2
    assert "found 3 failures" in result.stderr
    assert cloud.verbs() == ["list"] * 3


def test_slices_are_one_queued_resource(cloud):
    flags = ("--slices=2", "--valid-until-duration=6h", "--every=0", "--project=p")
    result = resume(cloud, *flags, chips="v4-16")
    assert result.returncode == 0, result.stderr
    assert "ads is WAITING_FOR_RESOURCES" in result.stderr
    assert {call["name"].split()[3] for call in cloud.calls("gcloud")} == {"queued-resources"}
    (create,) = cloud.calls("gcloud compute tpus queued-resources create")
    assert create["flags"] == {
        "zone": "us-central2-b",
        "project": "p",
        "accelerator-type": "v4-16",
        "runtime-version": "tpu-ubuntu2204-base",
        "node-count": "2",
        "node-prefix": "ads",
        "valid-until-duration": "6h",
    }
    homes = cloud.workers("ads")
    assert len(homes) == 4
    assert all(ran(home)[0][0] == "train" for home in homes)
    cloud.tpus(ads=["SUSPENDED"])
    assert resume(cloud, *flags, "--yes", chips="v4-16").returncode == 0
    (delete,) = cloud.calls("gcloud compute tpus queued-resources delete")
    assert delete["flags"].keys() == {"zone", "project", "force", "quiet"}


def test_one_slice_can_wait_in_line_too(cloud):
    assert resume(cloud, "--queued", "--every=0").returncode == 0
    (create,) = cloud.calls("gcloud compute tpus queued-resources create")
    assert create["flags"]["node-id"] == "ads"


@pytest.mark.parametrize(
    "flags", [(), ("--slices=2",), ("--queued", "--spot", "--nfs=10.0.0.2:/s")]
)
def test_a_dry_run_prints_what_the_real_one_calls_and_calls_nothing(flags, cloud):
    flags = (*flags, "--yes", "--every=0")
    dry = resume(cloud, *flags, "--dry-run", run=("train", *HOSTILE))
    assert dry.returncode == 0, dry.stderr
    assert cloud.calls() == []
    (cloud.directory / "mountpoint").touch()
    resume(cloud, *flags, run=("train", *HOSTILE))
    printed = [w for w in map(shlex.split, lines_of_shell(dry.stdout)) if w[0] == "gcloud"]
    called = [call["words"] for call in cloud.calls("gcloud")]
    # Without a dry run it waits until the TPU exists, and the archive has a temporary name.
    archives = [words.pop(5) for words in printed + called if words[4] == "scp"]
    assert archives[0] == "/tmp/jaxrank.tgz"
    called = [c for i, c in enumerate(called) if c != called[i - 1] or i == 0]
    assert printed[: len(called)] == called
    if "--nfs=10.0.0.2:/s" not in flags:  # stand-ins cannot mount anything
        assert len(printed) == len(called)
        assert printed[-1][4] == "ssh"


def test_the_log_of_one_worker_is_followed(cloud):
    cloud.run("tpu.sh", "logs", "ads", ZONE, "--worker=3", "--dry-run")
    result = cloud.run(
        "tpu.sh", "logs", "ads", ZONE, "--worker=3", "--slice=1", "--slices=2", "--dry-run"
    )
    _, flags, others = stand_ins.parsed(shlex.split(result.stdout))
    assert (flags["worker"], flags["node"], others) == ("3", "1", ["ads"])
    assert flags["command"] == "tail -n 100 -F jaxrank.log"


@pytest.mark.parametrize(("answer", "deleted"), [("n\n", 0), ("\n", 0), ("y\n", 1)])
def test_delete_asks(answer, deleted, cloud):
    cloud.run("tpu.sh", "create", "ads", ZONE, "--accelerator-type=v3-8")
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    command = [LAUNCH / "tpu.sh", "delete", "ads", ZONE]
    result = subprocess.run(command, env=cloud.env, stdin=theirs, capture_output=True, check=False)
    assert b"Delete ads and the disks of its workers? [y/N]" in result.stderr
    assert result.returncode == (0 if deleted else 2)
    assert cloud.verbs().count("delete") == deleted
    assert ("ads" in cloud.tpus()) == (not deleted)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("create", "ads", "--accelerator-type=v3-8"), "--zone: must be given"),
        (("create", "ads", ZONE), "--accelerator-type: must be given"),
        (("create", "Ads;rm", ZONE), "up to 40 lowercase letters.*found 'Ads;rm'"),
        (("create", ZONE), "a verb and a name: found 'create'"),
        (("create", "ads", "--zone"), "--zone needs a value"),
        (("explode", "ads", ZONE), "unknown verb 'explode'"),
        (("run", "ads", ZONE), "must follow --"),
        (("run", "ads", ZONE, "--workdir=x"), "unknown option --workdir=x"),
        (("run", "ads", ZONE, "--", "train", "--workdir=gs://b/w"), "found the URL gs://b/w"),
        (("create", "ads", ZONE, "--slices=0"), "--slices: must be at least 1: found 0"),
        (("create", "ads", ZONE, "--slices=two"), "--slices: must be a whole number: found 'two'"),
    ],
)
def test_wrong_use_is_rejected_before_anything_is_called(args, message, cloud):
    result = cloud.run("tpu.sh", *args)
    assert result.returncode == 2
    assert re.search(message, result.stderr)
    assert cloud.calls() == []
