"""Compares the hosts: devices, versions of software, native code."""

import platform
import socket
from importlib import metadata
from typing import Any

import jax

from jaxrank import mesh as meshes
from jaxrank import native
from jaxrank.report import format_bytes
from jaxrank.runtime import processes, threads
from jaxrank.selftest.check import FAIL, NOT_APPLICABLE, PASS, Verdict, passes

# Their versions may change results, or the format of what processes send and store.
_PACKAGES = ("flax", "optax", "orbax-checkpoint", "grain", "pyarrow", "tensorstore")


def describe() -> Verdict:
    """Describes processes, devices and hosts. Fails if hosts differ in devices or cores."""
    local = jax.local_devices()
    cores = threads.available_cores()
    machine = {
        "host": socket.gethostname(),
        "devices": f"{len(local)} x {local[0].device_kind}",
        "cores": cores,
        "memory": format_bytes(meshes.host_memory()),
    }
    hosts = processes.gather_values(machine)
    kinds = sorted({f"{h['devices']}, {h['cores']} cores, {h['memory']}" for h in hosts})
    count = len({h["host"] for h in hosts})
    text = f"{len(hosts)} processes on {count} hosts, each with {' or '.join(kinds)}"
    same = len({(h["devices"], h["cores"]) for h in hosts}) == 1
    return passes(
        same,
        text,
        "Use hosts of one kind: every step waits for the slowest.",
    )


def versions() -> Verdict:
    """Fails unless all processes have the same versions."""
    return compare_versions(processes.gather_values(_versions()))


def _versions() -> dict[str, str]:
    named = {"Python": platform.python_version()}
    for pair in processes.versions().split(", "):
        name, _, version = pair.partition(" ")
        named[name] = version
    for package in _PACKAGES:
        named[package] = metadata.version(package)
    # Names the versions of the runtime of an accelerator, on several lines.
    named["runtime"] = " ".join(jax.devices()[0].client.platform_version.split())
    return named


def compare_versions(hosts: list[dict[str, Any]]) -> Verdict:
    """Compares the versions of process 0 with the other processes."""
    first = hosts[0]
    for i, other in enumerate(hosts):
        names = [name for name in first if other.get(name) != first[name]]
        if names:
            pairs = "; ".join(f"{n} {first[n]} and {other.get(n)}" for n in names)
            return Verdict(
                FAIL,
                f"processes 0 and {i} differ: {pairs}",
                "Install the same versions on all hosts, by constraints.txt or one image.",
            )
    shown = ("Python", "jaxrank", "jax", "jaxlib", "numpy")
    text = ", ".join(f"{name} {first[name]}" for name in shown)
    return Verdict(PASS, f"{text} and {len(first) - len(shown)} others, in {len(hosts)} processes")


def native_code() -> Verdict:
    """Fails if native code, which CPUs use, is missing in a process."""
    if jax.default_backend() != "cpu":
        return Verdict(NOT_APPLICABLE, f"{jax.default_backend()} does not use it")
    missing = native.missing()
    layers = "rows and layers" if native.has_layers() else "rows"
    return passes(
        not missing,
        missing or f"compiled for {layers}",
        "Install a C++ compiler (g++ or clang) on every host, or set CXX. Without it steps on CPU"
        " are slower.",
    )
