"""Tests of launch/slurm.sh, node.sh and kubernetes.sh."""

import contextlib
import re
import subprocess

import pytest
import yaml
from launching import HOSTILE, Cloud

COMMON = ("ads", "--image=registry/jaxrank:1", "--claim=disk", "--restarts=7")


@pytest.fixture
def cloud(tmp_path):
    with contextlib.closing(Cloud(tmp_path)) as cloud:
        yield cloud


def test_slurm_gets_a_process_for_each_gpu_and_may_queue_it_again(cloud):
    args = ("--nodes=2", "--gpus=8", "--cpus=12", "--time=1:00:00", "--program=printf")
    result = cloud.run("slurm.sh", *args, "--", "%s\\0", "train", *HOSTILE)
    assert result.returncode == 0, result.stderr
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
    # sbatch runs it with sh.
    result = subprocess.run(["sh", "-c", wrap], env=cloud.env, capture_output=True, check=True)
    assert result.stdout.decode().removesuffix("\0").split("\0") == ["train", *HOSTILE]
    (step,) = cloud.calls("srun")
    assert step["flags"] == {"kill-on-bad-exit": "1", "cpus-per-task": "12"}


@pytest.mark.parametrize(("status", "waits"), [(143, True), (1, False), (0, False)])
def test_a_job_that_must_end_waits_for_the_end_that_queues_it_again(status, waits, cloud):
    result = cloud.run("slurm.sh", "--program=sh", "--", "-c", f"exit {status}")
    assert result.returncode == 0, result.stderr
    (call,) = cloud.calls("sbatch")
    script = f"sleep() {{ echo slept $1; }}; {call['flags']['wrap']}"
    result = subprocess.run(["sh", "-c", script], env=cloud.env, capture_output=True, text=True)
    assert result.returncode == status
    assert result.stdout == ("slept 600\n" if waits else "")


HOST = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
PRINTED = ("--program=sh", "--", "-c", 'env; printf "%s\\0" "$@"', "sh")


@pytest.mark.parametrize(
    ("env", "coordinator", "number", "index", "devices"),
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
def test_settings_of_torchrun_reach_jax(env, coordinator, number, index, devices, cloud):
    result = cloud.run("node.sh", *PRINTED, *HOSTILE, **HOST, **env)
    assert result.returncode == 0, result.stderr
    expected = {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": number,
        "JAX_PROCESS_ID": index,
        "JAX_LOCAL_DEVICE_IDS": devices,
    }
    settings = dict(re.findall(r"^(JAX_\w+)=(.*)$", result.stdout, re.M))
    assert settings == {k: v for k, v in expected.items() if v is not None}
    assert result.stdout.removesuffix("\0").endswith("\n" + "\0".join(HOSTILE))


def test_a_node_that_lacks_settings_says_what(cloud):
    result = cloud.run("node.sh", "--", "train", **HOST, WORLD_SIZE="4")
    assert result.returncode == 2
    assert (
        "RANK or NNODES and NODE_RANK must be set: found 'node0', '1234', '4' and ''"
        in result.stderr
    )


def manifest(cloud, *args):
    result = cloud.run("kubernetes.sh", *args, "--", "train", *HOSTILE)
    assert result.returncode == 0, result.stderr
    (call,) = cloud.calls("kubectl apply")
    assert call["flags"]["filename"] == "-"
    return yaml.safe_load(call["stdin"])


def find_job(jobset, name):
    """Checks the common parts of both kinds of JobSets, and returns the rest."""
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
    # Kubernetes replaces $$ by $.
    assert [arg.replace("$$", "$") for arg in container["args"]] == ["train", *HOSTILE]
    assert all("$" not in arg.replace("$$", "") for arg in container["args"])
    volumes = {v["name"]: v for v in pod["volumes"]}
    assert volumes["shared"]["persistentVolumeClaim"] == {"claimName": "disk"}
    mounted = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    assert mounted["shared"] == "/mnt/jaxrank"
    assert set(mounted) == set(volumes)
    return job, spec, pod, container


def test_a_jobset_of_tpu_slices(cloud):
    args = ("--accelerator=tpu-v5-lite-podslice", "--topology=4x4", "--hosts=4", "--slices=2")
    jobset = manifest(cloud, "tpu", *COMMON, *args, "--namespace=team")
    assert cloud.calls("kubectl")[0]["flags"]["namespace"] == "team"
    job, spec, pod, container = find_job(jobset, "slice")
    assert jobset["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert (job["replicas"], spec["completions"]) == (2, 4)
    assert container["resources"] == {"limits": {"google.com/tpu": 4}}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "4x4",
    }
    assert "env" not in container  # GKE connects the pods


def test_a_jobset_of_gpu_nodes(cloud):
    args = ("--nodes=3", "--gpus=8", "--node-selector=cloud.google.com/gke-accelerator=nvidia-l4")
    job, spec, pod, container = find_job(manifest(cloud, "gpu", *COMMON, *args), "node")
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


def test_a_word_that_a_manifest_cannot_hold_is_rejected(cloud):
    result = cloud.run("kubernetes.sh", "gpu", *COMMON, "--", "train", "two\nlines")
    assert result.returncode == 2
    assert "control characters" in result.stderr
    assert cloud.calls() == []


def test_a_dry_run_prints_the_manifest_that_is_applied(cloud):
    args = ("kubernetes.sh", "gpu", *COMMON)
    dry = cloud.run(*args, "--dry-run", "--", "train", *HOSTILE)
    assert cloud.calls() == []
    cloud.run(*args, "--", "train", *HOSTILE)
    (call,) = cloud.calls("kubectl")
    expected = f"kubectl apply --filename=- <<'END'\n{call['stdin'].rstrip()}\nEND\n"
    assert dry.stdout == expected
