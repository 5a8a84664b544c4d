"""Connects the processes of a run, by flags, environment variables or cluster detection.

Nothing in this module touches a device, because JAX must know its processes before it opens
devices.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrank.errors import InputError, RunError
from jaxrank.runtime.processes import SHUTDOWN_SECONDS

_IMPATIENCE = 20  # seconds after which a process reports that it waits for the others
_METADATA_SECONDS = 2.0


def join(
    coordinator: str = "", num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Connects this process to the others of the run. Call it before anything touches a device.

    Missing values are read from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    Without any value, JAX detects the other processes on the hosts of a TPU pod, in a SLURM step
    and under Open MPI. Elsewhere, and if only `num_processes=1` is set, the process is alone.

    Args:
        coordinator: HOST:PORT on which process 0 listens.
        num_processes: number of processes.
        process_id: index of this process, from 0.

    Raises:
        InputError: the values are invalid or incomplete.
        RunError: the other processes cannot be reached.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    if num_processes is None:
        num_processes = _from_environment("JAX_NUM_PROCESSES")
    if process_id is None:
        process_id = _from_environment("JAX_PROCESS_ID")
    if not coordinator and not process_id and num_processes == 1:
        return
    if not coordinator and num_processes is None and process_id is None:
        if _found_without_flags():
            _initialize()
        return
    if not coordinator or num_processes is None or process_id is None:
        raise InputError(
            "--coordinator, --num-processes and --process-id must be set together, or none of"
            f" them: found --coordinator={coordinator or None}, --num-processes={num_processes},"
            f" --process-id={process_id}. Missing flags are read from JAX_COORDINATOR_ADDRESS,"
            " JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )
    _check(coordinator, num_processes, process_id)
    _initialize(
        coordinator_address=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        cluster_detection_method="deactivate",
    )


def check_alone(verb: str) -> None:
    """Checks that this process is not one of several. For verbs that run in one process.

    Raises:
        InputError: it is one of several. Each would do the same work, and write the same files.
    """
    number = _from_environment("JAX_NUM_PROCESSES")
    if number is None:
        several = "a launcher of several processes" if _found_without_flags() else ""
    else:
        several = f"JAX_NUM_PROCESSES={number}" if number > 1 else ""
    if several:
        rate = "examples_per_second in the metrics.jsonl of a run has the throughput of several. "
        raise InputError(
            f"{verb}: must run in one process: found {several}."
            f" {rate if verb == 'bench' else ''}Start the command by itself, or set"
            " JAX_NUM_PROCESSES=1 to use the devices of this process only."
        )


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise InputError(f"{name}: must be a whole number: found {text!r}.")
    return int(text) if text else None


def _check(coordinator: str, num_processes: int, process_id: int) -> None:
    port = re.fullmatch(r"\S+:(\d{1,5})", coordinator)
    if not port or not 0 < int(port[1]) < 2**16:
        raise InputError(
            f"--coordinator: must be HOST:PORT, on which process 0 listens: found {coordinator!r}."
        )
    if num_processes < 1:
        raise InputError(f"--num-processes: must be at least 1: found {num_processes}.")
    if not 0 <= process_id < num_processes:
        raise InputError(
            f"--process-id: must be at least 0 and less than --num-processes={num_processes}:"
            f" found {process_id}."
        )
    if process_id == 0:
        try:  # if the port is taken, JAX ends the process without an exception
            socket.create_server(("", int(port[1]))).close()
        except OSError as error:
            raise InputError(f"--coordinator: port {port[1]} must be free: {error}.") from error


def _initialize(**arguments: Any) -> None:
    # The preemption service would catch SIGTERM, and the process would ignore the signal.
    jax.config.update("jax_enable_preemption_service", False)
    _leave_standard_output_to_python()
    try:
        with _reported_if_slow("waiting for the other processes of this run"):
            jax.distributed.initialize(shutdown_timeout_seconds=SHUTDOWN_SECONDS, **arguments)
    except (RuntimeError, ValueError, OSError) as error:
        raise RunError(
            "the processes could not be connected. Check --coordinator, --num-processes and"
            f" --process-id: {' '.join(str(error).split())}"
        ) from error


@contextlib.contextmanager
def _reported_if_slow(action: str) -> Iterator[None]:
    timer = threading.Timer(_IMPATIENCE, sys.stderr.write, [f"jaxrank: {action}\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _leave_standard_output_to_python() -> None:
    """Redirects standard output of C++ code, where Gloo prints connections, to the null device."""
    stdout = sys.stdout
    stdout.flush()
    descriptor = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(descriptor, "w", encoding=stdout.encoding, errors=stdout.errors)


def _found_without_flags() -> bool:
    """Returns True if this is one of several processes that JAX can detect.

    jax.distributed.initialize detects them too, but it fails for a single process. On a TPU VM with
    one process it takes the port that the next job needs.
    """
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    return (
        (all(name in os.environ for name in slurm) and (_from_environment("SLURM_NTASKS") or 1) > 1)
        or (_from_environment("OMPI_COMM_WORLD_SIZE") or 1) > 1
        or _tpu_hosts() > 1
    )


def _tpu_hosts() -> int:
    """Returns the number of hosts of all slices of this TPU, 1 without a TPU or if it is unused."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    chips = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    if (platforms and "tpu" not in platforms) or not chips:
        return 1
    slices = _from_environment("MEGASCALE_NUM_SLICES") or 1
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if not hosts and "TPU_SKIP_MDS_QUERY" not in os.environ:
        hosts = _metadata("worker-network-endpoints")
        match = re.search(r"MEGASCALE_NUM_SLICES: '(\d+)'", _metadata("tpu-env"))
        slices = int(match[1]) if match else slices
    return slices * len(hosts.split(",")) if hosts else slices


def _metadata(name: str) -> str:
    """Reads an instance attribute of Google Cloud, "" elsewhere."""
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_METADATA_SECONDS) as answer:
            return answer.read().decode()
    except OSError:
        return ""
