"""Runs the scripts in launch/ with stand-ins for every tool that reaches a cloud."""

import json
import shlex
import shutil
import subprocess
import sys
import time

import stand_ins
from checkout import ROOT

LAUNCH = ROOT / "launch"
# Tools of this machine. Together with the stand-ins they are the whole PATH, so that no real cloud
# can be reached.
_TOOLS = """
    awk bash cat date env flock git mkdir mktemp mountpoint printf rm setsid sh sleep tail
    tar timeout
"""
# Words with special characters of a shell, YAML or Kubernetes.
HOSTILE = ["--config.x=it's", "a b", '"q" \\ $(touch owned) `id`', "*", "", "&", "--", "naïve;#"]
ZONE = "--zone=us-central2-b"


class Cloud:
    """A PATH with stand-ins, and the calls that they record.

    Args:
        path: an empty directory.
    """

    def __init__(self, path):
        tools, self.directory = path / "tools", path / "cloud"
        tools.mkdir()
        self.directory.mkdir()
        for name in _TOOLS.split():
            (tools / name).symlink_to(shutil.which(name))
        # Quick, because tests copy the whole checkout to each worker.
        (tools / "gzip").write_text(f'#!/bin/sh\nexec {shutil.which("gzip")} -1 "$@"\n')
        (tools / "gzip").chmod(0o755)
        for name in ("gcloud", "kubectl", "sbatch", "srun", "python3"):
            line = shlex.join([sys.executable, stand_ins.__file__, name])
            (tools / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (tools / name).chmod(0o755)
        (self.directory / "cloud.json").write_text("{}")
        self.jaxrank("run")
        home = {"STAND_IN": str(self.directory), "HOME": str(self.directory)}
        self.env = home | {"PATH": str(tools), "LC_ALL": "C.UTF-8"}

    def run(self, script, *args, **more):
        return subprocess.run(
            [LAUNCH / script, *map(str, args)],
            env=self.env | more,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def jaxrank(self, status):
        """Sets the exit status of jaxrank from now on, or "run" to keep it running."""
        (self.directory / "jaxrank").write_text(f"{status}\n")

    def calls(self, what=""):
        """Returns the calls whose name starts with `what`, in order. See stand_ins.main."""
        file = self.directory / "calls.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [call for call in map(json.loads, lines) if call["name"].startswith(what)]

    def verbs(self, what="gcloud"):
        return [call["name"].split()[-1] for call in self.calls(what)]

    def tpus(self, **changes):
        """Changes the states of TPUs, and returns all TPUs."""
        result = json.loads((self.directory / "cloud.json").read_text())
        for name, states in changes.items():
            result[name]["states"] = states
        (self.directory / "cloud.json").write_text(json.dumps(result))
        return result

    def workers(self, name):
        """Returns the directories of a TPU's workers."""
        return sorted((self.directory / name).iterdir())

    def close(self):
        """Kills each jaxrank that still runs."""
        for lock in self.directory.glob("*/*/jaxrank.lock"):
            stand_ins.end(lock.parent)


def lines_of_shell(text):
    """Splits a script into commands: lines, joined inside quotes."""
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


def eventually(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
