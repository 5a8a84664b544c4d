"""Tests of common properties of the scripts in launch/, and of the container image."""

import contextlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import stand_ins
from launching import HOSTILE, LAUNCH, ROOT, ZONE, Cloud, lines_of_shell
from packaging.requirements import Requirement

SCRIPTS = sorted(path for path in LAUNCH.glob("*.sh") if path.name != "command.sh")


@pytest.fixture
def cloud(tmp_path):
    with contextlib.closing(Cloud(tmp_path)) as cloud:
        yield cloud


def executable(name):
    path = Path(sys.executable).with_name(name)
    return str(path) if path.exists() else shutil.which(name)


def test_scripts_are_shell_that_shellcheck_finds_nothing_in():
    assert len(SCRIPTS) == 6
    for path in [*SCRIPTS, ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK), path
        subprocess.run(["bash", "-n", path], check=True)
    command = [executable("shellcheck"), "--external-sources", *LAUNCH.glob("*.sh")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.stdout + result.stderr == ""


@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_help_lists_every_option(script, cloud):
    result = cloud.run(script, "--help")
    assert result.returncode == 0
    text = (LAUNCH / script).read_text()
    names = " ".join(re.findall(r"^(?:options|switches)=\((.*?)\)", text, re.M | re.S)).split()
    assert names
    for name in [*names, "dry-run"]:
        assert f"--{name}" in result.stdout
    assert cloud.run(script, "--nonsense=1").returncode == 2
    assert cloud.run(script).returncode == 2
    assert cloud.calls() == []


DOCS = ["docs/clusters.md", "docs/tpu.md", "docs/gpu.md", "docs/cookbook/several_hosts.md"]


def commands_of_docs():
    """Yields each documented command of a script in launch/, as words."""
    for name in DOCS:
        for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / name).read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if any(word.startswith("launch/") for word in words):
                    yield words


@pytest.mark.parametrize("words", list(commands_of_docs()), ids=" ".join)
def test_what_the_guides_say_is_what_scripts_and_tools_take(words, cloud):
    at = next(i for i, word in enumerate(words) if word.startswith("launch/"))
    lines = dict(word.split("=", 1) for word in words[:at] if re.match("[A-Z_]+=", word))
    if words[0] == "torchrun":
        lines = dict(MASTER_ADDR="a", MASTER_PORT="1", WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    env = {"CLOUDSDK_COMPUTE_ZONE": "z", "PYTHON": sys.executable} | lines
    script = words[at].removeprefix("launch/")
    result = cloud.run(script, "--dry-run", *words[at + 1 :], **env)
    assert result.returncode == 0, result.stderr
    manifest = result.stdout.find(" <<'END'")
    printed = result.stdout[:manifest] if manifest >= 0 else result.stdout
    tools = [shlex.split(line) for line in lines_of_shell(printed)]
    assert tools
    for call in tools:
        if call[0] in ("gcloud", "kubectl", "sbatch"):
            stand_ins.parsed(call)


def test_stand_ins_reject_what_is_not_documented(cloud):
    good = ["gcloud", "compute", "tpus", "tpu-vm", "create", "a", "--zone=z", "--version=v"]
    assert stand_ins.parsed(good)[2] == ["a"]
    for bad in ("--runtime-version=v", "--spot=yes", "--yes", "-v"):
        with pytest.raises(SystemExit, match="64"):
            stand_ins.parsed([*good, bad])
    with pytest.raises(SystemExit, match="64"):
        stand_ins.parsed(good[:-1])
    with pytest.raises(SystemExit, match="64"):
        stand_ins.parsed(["gcloud", "compute", "tpus", "tpu-vm", "describe", "a"])


@pytest.mark.parametrize("script", ["tpu.sh", "kubernetes.sh"])
def test_delete_without_anyone_to_ask_needs_a_flag(script, cloud):
    cloud.run("tpu.sh", "create", "ads", ZONE, "--accelerator-type=v3-8")
    args = (script, "delete", "ads", *([ZONE] if script == "tpu.sh" else []))
    result = cloud.run(*args)
    assert result.returncode == 2
    assert "--yes" in result.stderr
    assert "delete" not in cloud.verbs("")
    assert cloud.run(*args, "--yes").returncode == 0
    assert "delete" in cloud.verbs("")


def test_a_dry_run_of_processes_here_gives_each_its_place():
    command = [LAUNCH / "local.sh", "3", "--devices=2", "--dry-run", "--", "train", *HOSTILE]
    env = os.environ | {"PYTHON": sys.executable}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    lines = [shlex.split(line) for line in lines_of_shell(result.stdout)]
    for index, words in enumerate(lines):
        assert f"JAX_PROCESS_ID={index}" in words
        assert {"JAX_NUM_PROCESSES=3", "JAX_NUM_CPU_DEVICES=2"} < set(words)
        at = words.index(sys.executable)
        assert words[at:] == [sys.executable, "-m", "jaxrank", "train", *HOSTILE]
    assert len(lines) == 3
    assert len({w for words in lines for w in words if w.startswith("JAX_COORD")}) == 1


# An interpreter that is killed in process 1 at each start except the third. The others then fail.
DYING = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
echo start >>{here}/$JAX_PROCESS_ID
if [ "$(wc -l <{here}/$JAX_PROCESS_ID)" -ge 3 ]; then sleep 3; exit 0; fi
if [ "$JAX_PROCESS_ID" = 1 ]; then kill -9 $$; fi
sleep 1.5; exit 1
"""


@pytest.mark.parametrize(("restarts", "status"), [(1, 137), (2, 0)])
def test_all_are_started_again_when_one_dies_as_often_as_was_said(restarts, status, tmp_path):
    python = tmp_path / "python"
    python.write_text(DYING.format(python=sys.executable, here=tmp_path))
    python.chmod(0o755)
    command = [LAUNCH / "local.sh", "3", f"--restarts={restarts}", "--", "train"]
    env = os.environ | {"PYTHON": str(python)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == status
    lines = re.findall("ended with status ([0-9]+): restarting", result.stderr)
    assert lines == ["137"] * restarts
    for index in "012":
        assert (tmp_path / index).read_text() == "start\n" * (restarts + 1)


# Exits immediately with the status of process 1.
QUICK = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
[ "$JAX_PROCESS_ID" != 1 ] || exit {status}
"""
# Sometimes the result of `wait -n` in bash if all processes have ended before.
LATE = 'wait() { [ "$1" != -n ] || { sleep 0.5; return 127; }; builtin wait "$@"; }'


@pytest.mark.parametrize("status", [0, 3, 127])
def test_processes_that_end_before_they_are_waited_for_have_their_status(status, tmp_path):
    python, late = tmp_path / "python", tmp_path / "late.sh"
    python.write_text(QUICK.format(python=sys.executable, status=status))
    python.chmod(0o755)
    late.write_text(LATE)
    env = os.environ | {"PYTHON": str(python), "BASH_ENV": str(late)}
    command = [LAUNCH / "local.sh", "3", "--", "train"]
    assert subprocess.run(command, env=env, capture_output=True, check=False).returncode == status


# Takes a while to stop after a signal, like a run that saves, and reports it.
SLOW = """#!/bin/sh
if [ "$1" = -c ]; then exec {python} "$@"; fi
end() {{
    sleep 1.5; echo "stopped $JAX_PROCESS_ID" >&2; touch {here}/ended$JAX_PROCESS_ID; exit 143
}}
trap end TERM
mkfifo {here}/wait$JAX_PROCESS_ID
touch {here}/$JAX_PROCESS_ID
while :; do read -r _ <>{here}/wait$JAX_PROCESS_ID; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_script_behind_all_processes_and_what_they_say(number, tmp_path):
    python = tmp_path / "python"
    python.write_text(SLOW.format(python=sys.executable, here=tmp_path))
    python.chmod(0o755)
    run = subprocess.Popen(
        [LAUNCH / "local.sh", "3", "--", "train"],
        env=os.environ | {"PYTHON": str(python)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    while not all((tmp_path / index).exists() for index in "012"):
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(number)
    _, lines = run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert all((tmp_path / f"ended{index}").exists() for index in "012")
    assert sorted(lines.splitlines()) == ["[1] stopped 1", "[2] stopped 2", "stopped 0"]


def test_hadolint_finds_nothing_in_the_dockerfile():
    command = [executable("hadolint"), ROOT / "Dockerfile"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_the_tested_versions_are_those_that_jax_wants_for_tpus():
    wanted = [Requirement(text) for text in importlib.metadata.requires("jax")]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if line and not line.startswith("#")]
    (wanted,) = [r for r in wanted if r.name == "libtpu"]
    (tested,) = [r for r in tested if r.name == "libtpu" and r.marker.evaluate()]
    (version,) = [specifier.version for specifier in tested.specifier]
    assert wanted.specifier.contains(version)


def test_the_images_hold_what_they_copy_and_run_as_no_root():
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if re.match("[A-Z]", line)]
    starts = [i for i, (name, _) in enumerate(lines) if name == "FROM"]
    stages = [lines[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)]
    # A build without --target makes the last one.
    assert [steps[0][1].split()[-1] for steps in stages] == ["server", "trainer"]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert allowed[1] == "*"
    for steps in stages:
        assert re.fullmatch(r"[\w/]+:\d[\w.-]* AS \w+", steps[0][1])
        assert [rest for name, rest in steps if name == "USER"][-1] not in ("root", "0")
        pips = [rest for name, rest in steps if name == "RUN" and "pip install" in rest]
        assert all("--no-cache-dir" in rest for rest in pips)
        assert "--constraint constraints.txt" in pips[0]
        for name, rest in steps:
            if name == "COPY":
                for source in rest.split()[:-1]:
                    assert (ROOT / source).exists()
                    assert f"!{source.split('/')[0]}" in allowed
    installs = [next(rest for _, rest in steps if "pip install" in rest) for steps in stages]
    assert '"./serving[server]"' in installs[0]
    assert '".[${ACCELERATOR}]"' in installs[1]
    assert re.findall(r"apt-get install (.*?) &&", text) == ["--yes --no-install-recommends tini"]
    entries = [json.loads(rest) for name, rest in lines if name == "ENTRYPOINT"]
    # tini forwards signals to jaxrank. The server handles them itself.
    assert entries == [["jaxrank-serve", "--host=0.0.0.0"], ["tini", "--", "jaxrank"]]
    scripts = tomllib.loads((ROOT / "serving" / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["jaxrank-serve"] == "jaxrank_serving.server.__main__:main"
