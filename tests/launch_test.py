"""The scripts in launch/, run against stand-ins for the tools that they call."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import stand_ins
import yaml

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(path for path in LAUNCH.glob("*.sh") if path.name != "command.sh")
# Of this machine; with the stand-ins the whole PATH, so that no real cloud can be reached.
TOOLS = """
    awk bash cat date env flock git gzip kill mkdir mktemp mountpoint printf rm setsid sh sleep tail
    tar timeout
"""
HOSTILE = ["--config.x=it's", "a b", '"q" \\ $(touch owned) `id`', "*", "", "&", "--", "naïve;#"]
ZONE = "--zone=us-central2-b"
# What makes a TPU and a run on it: the copy is unpacked in two commands, then installed, then run.
MADE = ["create", "list", "scp", "ssh", "ssh", "ssh", "ssh"]


def on_the_path(name):
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else shutil.which(name)


@pytest.fixture
def cloud(tmp_path):
    """A PATH that holds stand-ins, and what they write down."""
    tools, here = tmp_path / "tools", tmp_path / "cloud"
    tools.mkdir()
    here.mkdir()
    for name in TOOLS.split():
        (tools / name).symlink_to(shutil.which(name))
    for name in ("gcloud", "kubectl", "sbatch", "srun", "python3"):
        line = shlex.join([sys.executable, stand_ins.__file__, name])
        (tools / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (tools / name).chmod(0o755)
    (here / "cloud.json").write_text("{}")
    (here / "jaxrank").write_text("run\n")
    env = {"PATH": str(tools), "STAND_IN": str(here), "HOME": str(here), "LC_ALL": "C.UTF-8"}

    def run(script, *args, **more):
        command = [LAUNCH / script, *map(str, args)]
        return subprocess.run(
            command,
            env=env | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def calls(what="gcloud"):
        file = here / "calls.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [call for call in map(json.loads, lines) if call["name"].startswith(what)]

    def tpus(**changes):
        """The TPUs that there are, after changes of their states."""
        found = json.loads((here / "cloud.json").read_text())
        for name, states in changes.items():
            found[name]["states"] = states
        (here / "cloud.json").write_text(json.dumps(found))
        return found

    yield SimpleNamespace(here=here, run=run, calls=calls, tpus=tpus, env=env)
    for pid in here.glob("*/*/jaxrank.pid"):  # of jaxrank that a test left running
        subprocess.run(["kill", "-KILL", "--", f"-{pid.read_text().strip()}"], check=False)


def verbs(calls):
    return [call["name"].split()[-1] for call in calls]


def ran(home):
    """The words of all calls of jaxrank on a worker."""
    text = (home / "ran").read_text()
    return text.removesuffix("\0").split("\0")


def wait_for_end(cloud, name):
    deadline = time.monotonic() + 30
    while "is running" in cloud.run("tpu.sh", "status", name, ZONE).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_scripts_are_shell_that_shellcheck_finds_nothing_in():
    assert len(SCRIPTS) == 6
    for path in [*SCRIPTS, ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), path
        subprocess.run(["bash", "-n", path], check=True)
    command = [on_the_path("shellcheck"), "--external-sources", *LAUNCH.glob("*.sh")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert found.stdout + found.stderr == ""


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_help_tells_every_option(script, cloud):
    found = cloud.run(script, "--help")
    assert found.returncode == 0
    text = (LAUNCH / script).read_text()
    names = " ".join(re.findall(r"^(?:options|switches)=\((.*?)\)", text, re.M | re.S)).split()
    assert names
    for name in [*names, "dry-run"]:
        assert f"--{name}" in found.stdout
    assert cloud.run(script, "--nonsense=1").returncode == 2
    assert cloud.run(script).returncode == 2
    assert cloud.calls("") == []


def test_stand_ins_refuse_what_is_not_documented(cloud):
    good = ["gcloud", "compute", "tpus", "tpu-vm", "create", "a", "--zone=z", "--version=v"]
    assert stand_ins.parsed(good)[2] == ["a"]
    for bad in ("--runtime-version=v", "--spot=yes", "--yes", "-v"):
        with pytest.raises(SystemExit, match="64"):
            stand_ins.parsed([*good, bad])
    with pytest.raises(SystemExit, match="64"):
        stand_ins.parsed(good[:-1])
    with pytest.raises(SystemExit, match="64"):
        stand_ins.parsed(["gcloud", "compute", "tpus", "tpu-vm", "describe", "a"])


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
    found = cloud.run("tpu.sh", "create", "ads", ZONE, f"--accelerator-type={chips}", "--spot")
    assert found.returncode == 0, found.stderr
    (call,) = cloud.calls()
    assert call["flags"] == {
        "zone": "us-central2-b",
        "accelerator-type": chips,
        "version": version,
        "spot": "",
    }


def test_a_tpu_of_an_unknown_kind_needs_its_image(cloud):
    args = ("tpu.sh", "create", "ads", ZONE, "--accelerator-type=v9-8")
    found = cloud.run(*args)
    assert found.returncode == 2
    assert "--runtime-version must be given for --accelerator-type=v9-8" in found.stderr
    assert cloud.calls() == []
    assert cloud.run(*args, "--runtime-version=new").returncode == 0
    assert cloud.calls()[0]["flags"]["version"] == "new"


def test_jaxrank_runs_on_every_worker_with_the_words_it_was_given(cloud):
    chips = "--accelerator-type=v3-32"
    (cloud.here / "jaxrank").write_text("0\n")
    for verb in ("create", "wait", "copy", "install"):
        found = cloud.run("tpu.sh", verb, "ads", ZONE, chips)
        assert found.returncode == 0, (verb, found.stderr)
    assert cloud.run("tpu.sh", "status", "ads", ZONE).stdout == "jaxrank has not run\n" * 4
    found = cloud.run("tpu.sh", "run", "ads", ZONE, "--", "train", *HOSTILE)
    assert found.returncode == 0, found.stderr
    wait_for_end(cloud, "ads")
    homes = sorted((cloud.here / "ads").iterdir())
    assert len(homes) == 4
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    for home in homes:
        assert ran(home) == ["train", *HOSTILE]
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


def resume(cloud, *args, chips="v3-8", run=("train", "--config=c.py", "--workdir=/mnt/w")):
    flags = (ZONE, f"--accelerator-type={chips}", *args)
    return cloud.run("tpu.sh", "resume", "ads", *flags, "--", *run)


def test_resume_makes_a_run_from_nothing_and_leaves_one_that_goes_on(cloud):
    found = resume(cloud, chips="v3-16")
    assert found.returncode == 0, found.stderr
    assert verbs(cloud.calls()) == ["list", *MADE]
    for home in (cloud.here / "ads").iterdir():
        assert ran(home) == ["train", "--config=c.py", "--workdir=/mnt/w"]
    found = resume(cloud)
    assert found.returncode == 0, found.stderr
    assert "jaxrank on ads: running" in found.stderr
    assert verbs(cloud.calls())[8:] == ["list", "ssh"]


@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED"])
def test_what_a_preemption_left_is_deleted_only_if_asked(state, cloud):
    resume(cloud, "--spot")
    before = len(cloud.calls())
    cloud.tpus(ads=[state])
    found = resume(cloud, "--spot")
    assert found.returncode == 2
    assert "--yes" in found.stderr
    assert verbs(cloud.calls()[before:]) == ["list"]
    before = len(cloud.calls())
    found = resume(cloud, "--spot", "--yes")
    assert found.returncode == 0, found.stderr
    assert verbs(cloud.calls()[before:]) == [
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
    before = len(cloud.calls())
    (cloud.here / "offline").touch()
    found = resume(cloud, "--yes")
    assert found.returncode == 1
    assert "no route to the cloud" in found.stderr
    assert verbs(cloud.calls()[before:]) == ["list"]


def test_a_stopped_tpu_is_left_to_its_owner(cloud):
    resume(cloud)
    cloud.tpus(ads=["STOPPED"])
    found = resume(cloud, "--yes")
    assert found.returncode == 2
    assert "ads is STOPPED, which resume cannot help" in found.stderr
    assert "delete" not in verbs(cloud.calls())


@pytest.mark.parametrize(
    ("status", "code", "text", "again"),
    [
        (0, 0, "jaxrank on ads: finished", 0),
        (1, 0, "jaxrank on ads: failed", 1),
        (137, 0, "jaxrank on ads: failed", 1),
        (2, 2, "refused its flags, config or data", 0),
    ],
)
def test_resume_starts_again_what_failed_but_not_what_was_refused(status, code, text, again, cloud):
    (cloud.here / "jaxrank").write_text(f"{status}\n")
    resume(cloud)
    wait_for_end(cloud, "ads")
    found = resume(cloud)
    assert (found.returncode, text in found.stderr) == (code, True), found.stderr
    wait_for_end(cloud, "ads")
    assert ran(cloud.here / "ads" / "0").count("train") == 1 + again


def test_watch_goes_on_through_preemptions_until_jaxrank_has_finished(cloud):
    args = ["tpu.sh", "resume", "ads", ZONE, "--accelerator-type=v3-8", "--watch", "--every=1"]
    found = cloud.run(*args, "--", "train")
    assert found.returncode == 2
    assert "add --yes" in found.stderr
    env = cloud.env
    command = [LAUNCH / args[0], *args[1:], "--yes", "--", "train"]
    watch = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    for times in (1, 2):
        eventually(lambda times=times: verbs(cloud.calls()).count("create") == times)
        eventually(lambda: "jaxrank on ads: running" in read_line(watch))
        if times == 1:
            cloud.tpus(ads=["STOPPING", "PREEMPTED"])
    (cloud.here / "jaxrank").write_text("0\n")
    cloud.run("tpu.sh", "stop", "ads", ZONE)  # the watch finds it dead, and starts it again
    _, rest = watch.communicate(timeout=60)
    assert watch.returncode == 0
    assert "jaxrank on ads: failed" in rest
    assert "jaxrank on ads: finished" in rest
    assert verbs(cloud.calls()).count("delete") == 1


def read_line(process):
    line = process.stderr.readline()
    assert line, "ended too early"
    return line


def eventually(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_watch_gives_up_on_what_fails_again_and_again(cloud):
    (cloud.here / "jaxrank").write_text("1\n")
    found = resume(cloud, "--watch", "--yes", "--every=0", "--retries=2")
    assert found.returncode == 2
    assert "3 failures: given up" in found.stderr


def test_slices_are_one_queued_resource(cloud):
    flags = ("--slices=2", "--valid-until-duration=6h", "--every=0", "--project=p")
    found = resume(cloud, *flags, chips="v4-16")
    assert found.returncode == 0, found.stderr
    assert "ads is WAITING_FOR_RESOURCES" in found.stderr
    assert {call["name"].split()[3] for call in cloud.calls()} == {"queued-resources"}
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
    homes = list((cloud.here / "ads").iterdir())
    assert len(homes) == 4
    assert all(ran(home)[0] == "train" for home in homes)
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
    assert cloud.calls("") == []
    (cloud.here / "mountpoint").touch()
    resume(cloud, *flags, run=("train", *HOSTILE))
    printed = [w for w in map(shlex.split, lines_of_shell(dry.stdout)) if w[0] == "gcloud"]
    called = [call["words"] for call in cloud.calls()]
    # The real one looks until the TPU is there, and its archive has a name of its own.
    archives = [words.pop(5) for words in printed + called if words[4] == "scp"]
    assert archives[0] == "/tmp/jaxrank.tgz"
    called = [c for i, c in enumerate(called) if c != called[i - 1] or i == 0]
    assert printed[: len(called)] == called
    if "--nfs=10.0.0.2:/s" not in flags:  # no worker here can mount anything
        assert len(printed) == len(called)
        assert printed[-1][4] == "ssh"


def lines_of_shell(text):
    """The commands of a script: lines, unless a quote goes on."""
    line = ""
    for part in text.splitlines():
        line += part
        try:
            shlex.split(line)
        except ValueError:
            line += "\n"
            continue
        yield line
        line = ""
    assert not line


def test_the_log_of_one_worker_is_followed(cloud):
    cloud.run("tpu.sh", "logs", "ads", ZONE, "--worker=3", "--dry-run")
    found = cloud.run(
        "tpu.sh", "logs", "ads", ZONE, "--worker=3", "--slice=1", "--slices=2", "--dry-run"
    )
    _, flags, others = stand_ins.parsed(shlex.split(found.stdout))
    assert (flags["worker"], flags["node"], others) == ("3", "1", ["ads"])
    assert flags["command"] == "tail -n 100 -F jaxrank.log"


@pytest.mark.parametrize(("answer", "deleted"), [("n\n", 0), ("\n", 0), ("y\n", 1)])
def test_delete_asks(answer, deleted, cloud):
    cloud.run("tpu.sh", "create", "ads", ZONE, "--accelerator-type=v3-8")
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    command = [LAUNCH / "tpu.sh", "delete", "ads", ZONE]
    found = subprocess.run(command, env=cloud.env, stdin=theirs, capture_output=True, check=False)
    assert b"Delete ads and the disks of its workers? [y/N]" in found.stderr
    assert found.returncode == (0 if deleted else 2)
    assert verbs(cloud.calls()).count("delete") == deleted
    assert ("ads" in cloud.tpus()) == (not deleted)


@pytest.mark.parametrize("script", ["tpu.sh", "kubernetes.sh"])
def test_delete_without_anyone_to_ask_needs_to_be_told(script, cloud):
    cloud.run("tpu.sh", "create", "ads", ZONE, "--accelerator-type=v3-8")
    args = (script, "delete", "ads", *([ZONE] if script == "tpu.sh" else []))
    found = cloud.run(*args)
    assert found.returncode == 2
    assert "--yes" in found.stderr
    assert "delete" not in verbs(cloud.calls(""))
    assert cloud.run(*args, "--yes").returncode == 0
    assert "delete" in verbs(cloud.calls(""))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("create", "ads", "--accelerator-type=v3-8"), "--zone must be given"),
        (("create", "ads", ZONE), "--accelerator-type must be given"),
        (("create", "Ads;rm", ZONE), "a name of up to 40 small letters.*found 'Ads;rm'"),
        (("create", ZONE), "a verb and a name must be given: found 'create'"),
        (("create", "ads", "--zone"), "--zone needs a value"),
        (("explode", "ads", ZONE), "unknown verb 'explode'"),
        (("run", "ads", ZONE), "what jaxrank does must be given behind --"),
        (("run", "ads", ZONE, "--workdir=x"), "unknown option --workdir=x"),
        (("run", "ads", ZONE, "--", "train", "--workdir=gs://b/w"), "--workdir=gs://b/w: must be"),
        (("create", "ads", ZONE, "--slices=0"), "--slices must be at least 1: found 0"),
        (("create", "ads", ZONE, "--slices=two"), "--slices must be a whole number: found 'two'"),
    ],
)
def test_wrong_use_is_refused_before_anything_is_called(args, message, cloud):
    found = cloud.run("tpu.sh", *args)
    assert found.returncode == 2
    assert re.search(message, found.stderr)
    assert cloud.calls("") == []


def test_slurm_gets_a_process_for_each_gpu_and_may_queue_it_again(cloud):
    args = ("--nodes=2", "--gpus=8", "--cpus=12", "--time=1:00:00", "--program=printf")
    found = cloud.run("slurm.sh", *args, "--", "%s\\0", "train", *HOSTILE)
    assert found.returncode == 0, found.stderr
    (call,) = cloud.calls("sbatch")
    wrap = call["flags"].pop("wrap")
    assert call["flags"] == {
        "job-name": "jaxrank",
        "nodes": "2",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "cpus-per-task": "12",
        "time": "1:00:00",
        "output": "jaxrank-%j.log",
        "open-mode": "append",
        "requeue": "",
    }
    # sbatch runs it as a script of sh.
    found = subprocess.run(["sh", "-c", wrap], env=cloud.env, capture_output=True, check=True)
    assert found.stdout.decode().removesuffix("\0").split("\0") == ["train", *HOSTILE]
    (step,) = cloud.calls("srun")
    assert step["flags"] == {"kill-on-bad-exit": "1", "cpus-per-task": "12"}


HOST = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
PRINTED = ("--program=sh", "--", "-c", 'env; printf "%s\\0" "$@"', "sh")


@pytest.mark.parametrize(
    ("told", "coordinator", "number", "index", "devices"),
    [
        (dict(NNODES="2", NODE_RANK="1"), "node0:1234", "2", "1", None),
        (dict(WORLD_SIZE="4", RANK="3"), "node0:1234", "4", "3", None),
        (
            dict(WORLD_SIZE="16", RANK="9", LOCAL_RANK="1", NNODES="2", NODE_RANK="1"),
            "node0:1234",
            "16",
            "9",
            "1",
        ),
        (
            dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", TORCHELASTIC_USE_AGENT_STORE="True"),
            "node0:1235",
            "2",
            "0",
            "0",
        ),
    ],
)
def test_what_torchrun_tells_is_told_to_jax(told, coordinator, number, index, devices, cloud):
    found = cloud.run("node.sh", *PRINTED, *HOSTILE, **HOST, **told)
    assert found.returncode == 0, found.stderr
    expected = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": number,
        "JAX_PROCESS_ID": index,
        "JAX_LOCAL_DEVICE_IDS": devices,
    }
    settings = dict(re.findall(r"^(JAX_\w+)=(.*)$", found.stdout, re.M))
    assert settings == {k: v for k, v in expected.items() if v is not None}
    assert found.stdout.removesuffix("\0").endswith("\n" + "\0".join(HOSTILE))


def test_a_node_that_is_told_too_little_says_what(cloud):
    found = cloud.run("node.sh", "--", "train", **HOST, WORLD_SIZE="4")
    assert found.returncode == 2
    assert (
        "RANK or NNODES and NODE_RANK must be set: found 'node0', '1234', '4' and ''"
        in found.stderr
    )


def manifest(cloud, *args):
    found = cloud.run("kubernetes.sh", *args, "--", "train", *HOSTILE)
    assert found.returncode == 0, found.stderr
    (call,) = cloud.calls("kubectl apply")
    assert call["flags"]["filename"] == "-"
    return yaml.safe_load(call["stdin"])


def job_of(jobset, name):
    """What a JobSet runs, once what both kinds have in common is checked."""
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["metadata"]["name"] == "ads"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 7
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["name"] == name
    spec = job["template"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == dict(containerName="jaxrank", operator="In", values=[2])
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert (container["name"], container["image"]) == ("jaxrank", "registry/jaxrank:1")
    # Kubernetes makes one $ of two.
    assert [arg.replace("$$", "$") for arg in container["args"]] == ["train", *HOSTILE]
    assert all("$" not in arg.replace("$$", "") for arg in container["args"])
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "disk"}
    mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounted["shared"] == "/mnt/jaxrank"
    assert set(mounted) == set(volumes)
    return job, spec, pod, container


COMMON = ("ads", "--image=registry/jaxrank:1", "--claim=disk", "--restarts=7")


def test_a_jobset_of_tpu_slices(cloud):
    args = ("--accelerator=tpu-v5-lite-podslice", "--topology=4x4", "--hosts=4", "--slices=2")
    jobset = manifest(cloud, "tpu", *COMMON, *args, "--namespace=team")
    assert cloud.calls("kubectl")[0]["flags"]["namespace"] == "team"
    job, spec, pod, container = job_of(jobset, "slice")
    assert jobset["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert (job["replicas"], spec["completions"]) == (2, 4)
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert "env" not in container  # GKE tells the pods of each other


def test_a_jobset_of_gpu_nodes(cloud):
    args = ("--nodes=3", "--gpus=8", "--node-selector=cloud.google.com/gke-accelerator=nvidia-l4")
    job, spec, pod, container = job_of(manifest(cloud, "gpu", *COMMON, *args), "node")
    assert (job["replicas"], spec["completions"]) == (1, 3)
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    env = {e["name"]: e for e in container["env"]}
    # <jobset>-<replicated job>-<job index>-<pod index>.<subdomain>, which is the jobset's name
    assert env["JAX_COORDINATOR_ADDRESS"]["value"] == "ads-node-0-0.ads:8476"
    assert env["JAX_NUM_PROCESSES"]["value"] == "3"
    field = env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_a_jobset_is_looked_at_and_deleted_by_its_name(cloud):
    for verb in ("status", "logs"):
        assert cloud.run("kubernetes.sh", verb, "ads").returncode == 0
    assert cloud.run("kubernetes.sh", "delete", "ads", "--yes").returncode == 0
    jobset, pods, logs, delete = cloud.calls("kubectl")
    assert jobset["others"] == delete["others"] == ["jobset", "ads"]
    assert pods["flags"]["selector"] == "jobset.sigs.k8s.io/jobset-name=ads"
    assert logs["flags"]["selector"].startswith("jobset.sigs.k8s.io/jobset-name=ads,")


def test_a_word_that_a_manifest_cannot_hold_is_refused(cloud):
    found = cloud.run("kubernetes.sh", "gpu", *COMMON, "--", "train", "two\nlines")
    assert found.returncode == 2
    assert "control characters" in found.stderr
    assert cloud.calls("") == []


def test_a_dry_run_prints_the_manifest_that_is_applied(cloud):
    args = ("kubernetes.sh", "gpu", *COMMON)
    dry = cloud.run(*args, "--dry-run", "--", "train", *HOSTILE)
    assert cloud.calls("") == []
    cloud.run(*args, "--", "train", *HOSTILE)
    (call,) = cloud.calls("kubectl")
    expected = f"kubectl apply --filename=- <<'END'\n{call['stdin'].rstrip()}\nEND\n"
    assert dry.stdout == expected


def test_a_dry_run_of_processes_here_tells_each_its_place():
    command = [LAUNCH / "local.sh", "3", "--devices=2", "--dry-run", "--", "train", *HOSTILE]
    env = os.environ | {"PYTHON": sys.executable}
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = [shlex.split(line) for line in lines_of_shell(found.stdout)]
    for index, words in enumerate(lines):
        assert f"JAX_PROCESS_ID={index}" in words
        assert {"JAX_NUM_PROCESSES=3", "JAX_NUM_CPU_DEVICES=2"} < set(words)
        at = words.index(sys.executable)
        assert words[at:] == [sys.executable, "-m", "jaxrank", "train", *HOSTILE]
    assert len(lines) == 3
    assert len({w for words in lines for w in words if w.startswith("JAX_COORD")}) == 1


def test_hadolint_finds_nothing_in_the_dockerfile():
    command = [on_the_path("hadolint"), ROOT / "Dockerfile"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_holds_what_it_copies_and_runs_as_no_root():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if re.match("[A-Z]", line)]
    (base,) = [rest for name, rest in steps if name == "FROM"]
    assert re.fullmatch(r"[\w/]+:\d[\w.-]*", base)
    assert [rest for name, rest in steps if name == "USER"][-1] not in ("root", "0")
    pips = [rest for name, rest in steps if name == "RUN" and "pip install" in rest]
    assert all("--no-cache-dir" in rest for rest in pips)
    assert "--constraint constraints.txt" in pips[0]
    assert '".[${ACCELERATOR}]"' in pips[0]
    assert "apt-get" not in text
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert allowed[1] == "*"
    for name, rest in steps:
        if name == "COPY":
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert f"!{source.split('/')[0]}" in allowed
