"""Stand-ins for the tools that launch/ calls, with their documented flags and a cloud of files.

Each call is written to calls.jsonl beside cloud.json, which holds the TPUs by name. A worker of a
TPU is a directory, in which `ssh` runs its command. The jaxrank that a worker installs is a script
that records its arguments.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path


def _flags(values="", switches=""):
    """Returns {flag: True if it takes a value}."""
    return dict.fromkeys(values.split(), True) | dict.fromkeys(switches.split(), False)


# From the reference at https://cloud.google.com/sdk/gcloud/reference (compute/tpus/...), equal to
# version 528 of the SDK.
_ANY = _flags("project format verbosity", "quiet")
_CREATE = _flags(
    "zone accelerator-type boot-disk data-disk description labels metadata metadata-from-file"
    " network range scopes service-account subnetwork tags topology type",
    "async internal-ips reserved shielded-secure-boot spot",
)
_LIST = _flags("zone filter limit page-size sort-by", "uri")
_SSH = _flags(
    "zone worker ssh-key-expiration ssh-key-expire-after ssh-key-file strict-host-key-checking",
    "dry-run force-key-file-overwrite internal-ip plain",
)
_COMMAND = _flags("command output-directory ssh-flag")
_FILES = _flags("scp-flag", "compress recurse")
_NODES = _flags("node batch-size", "tunnel-through-iap")
_QUEUED = _flags(
    "runtime-version node-id node-count node-prefix valid-after-duration valid-after-time"
    " valid-until-duration valid-until-time reservation-host-folder"
    " reservation-host-organization reservation-host-project",
    "guaranteed",
)
_TPU = {
    "tpu-vm create": _CREATE | _flags("version queue-count", "preemptible"),
    "tpu-vm list": _LIST,
    "tpu-vm delete": _flags("zone", "async"),
    "tpu-vm ssh": _SSH | _COMMAND,
    "tpu-vm scp": _SSH | _FILES,
    "queued-resources create": _CREATE | _QUEUED,
    "queued-resources list": _LIST,
    "queued-resources delete": _flags("zone", "async force"),
    "queued-resources ssh": _SSH | _COMMAND | _NODES,
    "queued-resources scp": _SSH | _FILES | _NODES,
}
DOCUMENTED = {f"gcloud compute tpus {verb}": _ANY | flags for verb, flags in _TPU.items()}
# https://kubernetes.io/docs/reference/kubectl/generated/
_KUBECTL = _flags("namespace context")
DOCUMENTED |= {
    "kubectl apply": _KUBECTL | _flags("filename", "recursive server-side"),
    "kubectl get": _KUBECTL | _flags("selector output", "watch"),
    "kubectl logs": _KUBECTL | _flags("selector tail container", "follow prefix"),
    "kubectl delete": _KUBECTL | _flags("selector wait", "force"),
}
# https://slurm.schedmd.com/sbatch.html and srun.html
_SLURM = _flags(
    "account cpus-per-task gpus-per-node gpus-per-task job-name mem nodes ntasks ntasks-per-node"
    " open-mode output partition qos signal time"
)
DOCUMENTED |= {
    "sbatch": _SLURM | _flags("wrap", "requeue parsable"),
    "srun": _SLURM | _flags("kill-on-bad-exit", "label"),
}
# https://docs.astral.sh/uv/reference/cli/ and https://pip.pypa.io/en/stable/cli/pip_install/
DOCUMENTED |= {
    "python3 -m pip install": _flags("constraint", "quiet user"),
    "python3 -m uv venv": _flags("python", "quiet allow-existing"),
    "python3 -m uv pip install": _flags("python constraints editable", "quiet"),
}
# Flags that the reference marks as required.
_REQUIRED = {
    "tpu-vm create": {"zone", "version"},
    "queued-resources create": {"zone", "runtime-version", "accelerator-type"},
    "queued-resources ssh": {"command"},
}

_JAXRANK = """#!/bin/sh
printf '%s\\0' "$@" "(end)" >>"$HOME/ran"
read -r status <"$STAND_IN/jaxrank" && [ "$status" != run ] && exit "$status"
exec sleep 60
"""


def parsed(words):
    """Returns the name of a call, its flags and its other words. Exits with 64 if it is invalid."""
    name = max((n for n in DOCUMENTED if words[: len(n.split())] == n.split()), key=len, default="")
    if not name:
        _reject(f"no such command: {words}")
    words = words[len(name.split()) :]
    flags, others = {}, []
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            others.append(word)
            if name == "srun":  # the program follows
                return name, flags, others + words
            continue
        flag, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or flag not in DOCUMENTED[name]:
            _reject(f"{name} has no {word}")
        if DOCUMENTED[name][flag]:
            value = value if equals else words.pop(0)
        elif equals:
            _reject(f"{name}: {word} takes no value")
        flags[flag] = value
    verb = name.removeprefix("gcloud compute tpus ")
    missing = _REQUIRED.get(verb, set()) - set(flags)
    if verb == "queued-resources create" and ("node-id" in flags) == ("node-count" in flags):
        missing.add("one of node-id and node-count")
    if missing:
        _reject(f"{name} needs {missing}")
    return name, flags, others


def _reject(text):
    print(f"stand-in: {text}", file=sys.stderr)
    sys.exit(64)


def end(home):
    """Kills the jaxrank of a worker, if it runs."""
    path = home / "jaxrank.lock"
    with contextlib.suppress(FileNotFoundError), open(path) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # otherwise another process may have its id
            os.killpg(int(path.with_suffix(".pid").read_text()), signal.SIGKILL)


def main(tool, *words):
    current = Path(os.environ["STAND_IN"])
    name, flags, others = parsed([tool, *words])
    stdin = sys.stdin.read() if flags.get("filename") == "-" else ""
    call = dict(name=name, words=[tool, *words], flags=flags, others=others, stdin=stdin)
    with open(current / "calls.jsonl", "a") as file:
        file.write(json.dumps(call) + "\n")
    if name.startswith("gcloud"):
        service, verb = name.split()[-2:]
        _Cloud(current).do(service, verb, flags, others)
    elif name == "python3 -m uv venv":
        program = Path(others[0]) / "bin" / "jaxrank"
        program.parent.mkdir(parents=True, exist_ok="allow-existing" in flags)
        program.write_text(_JAXRANK)
        program.chmod(0o755)
    elif tool == "srun":
        os.execvp(others[0], others)


class _Cloud:
    """TPUs in cloud.json: {name: {service, states, workers}}. Each `list` consumes one state."""

    def __init__(self, directory):
        self.directory, self.file = directory, directory / "cloud.json"
        self.tpus = json.loads(self.file.read_text())

    def do(self, service, verb, flags, others):
        if (self.directory / "offline").exists():
            print("no route to the cloud", file=sys.stderr)
            sys.exit(int((self.directory / "offline").read_text() or 1))
        if verb == "list":
            self._list(service, flags)
        elif verb == "create":
            self._create(service, flags, others)
        else:
            tpu = others[-1].split(":")[0]
            if self.tpus.get(tpu, {}).get("service") != service:
                print(f"{tpu}: NOT_FOUND", file=sys.stderr)
                sys.exit(1)
            getattr(self, f"_{verb}")(tpu, flags, others)
        self.file.write_text(json.dumps(self.tpus))

    def _list(self, service, flags):
        field = {"tpu-vm": "state", "queued-resources": "state.state"}[service]
        assert flags["format"] == f"value(name.basename(),{field})"
        print("other-tpu\tREADY")
        for name, tpu in self.tpus.items():
            if tpu["service"] == service:
                state = tpu["states"].pop(0) if len(tpu["states"]) > 1 else tpu["states"][0]
                print(f"{name}\t{state}")

    def _create(self, service, flags, others):
        (name,) = others
        assert re.fullmatch(r"[a-z][-a-z0-9]*", name)
        assert name not in self.tpus, "ALREADY_EXISTS"
        cores = int(flags["accelerator-type"].split("-")[1])
        workers = max(1, cores // 8) * int(flags.get("node-count", 1))
        ready = {"tpu-vm": ["READY"], "queued-resources": ["WAITING_FOR_RESOURCES", "ACTIVE"]}
        self.tpus[name] = dict(service=service, states=ready[service], workers=workers)
        for index in range(workers):
            (self.directory / name / str(index)).mkdir(parents=True)

    def _delete(self, name, flags, others):
        assert self.tpus[name]["service"] == "tpu-vm" or "force" in flags
        assert "quiet" in flags  # gcloud would ask
        for home in (self.directory / name).iterdir():
            end(home)
        shutil.rmtree(self.directory / name)
        del self.tpus[name]

    def _homes(self, name, flags):
        one_of_all = flags.get("worker") == "0" and flags.get("node", "0") == "0"
        assert one_of_all or (flags["worker"] == "all" and flags.get("node", "all") == "all")
        assert self.tpus[name]["states"][0] in ("READY", "ACTIVE")
        homes = sorted((self.directory / name).iterdir())
        assert len(homes) == self.tpus[name]["workers"]
        return homes[:1] if one_of_all else homes

    def _scp(self, name, flags, others):
        source, target = others
        for home in self._homes(name, flags):
            shutil.copy(source, home / target.split(":")[1])

    def _ssh(self, name, flags, others):
        for home in self._homes(name, flags):
            env = os.environ | {"HOME": str(home)}
            result = subprocess.run(
                ["bash", "-c", flags["command"]], cwd=home, env=env, check=False
            )
            if result.returncode:
                sys.exit(result.returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
