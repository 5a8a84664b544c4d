"""Devices of absent TPU slices and GPUs. libtpu and JAX's plugin for CUDA compile for them."""

import importlib.util
import os
from typing import Any

import jax

from jaxrank.aot.topology import GENERATIONS, Topology, sides
from jaxrank.errors import InputError

# Without these variables libtpu queries the machine that it runs on.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_PER_MACHINE = 8  # GPUs
_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
# Properties that XLA reads from a GPU if there is one. sms: multiprocessors, with `units` float32
# units and `shared` KiB of shared memory each. clock: GHz. memory: GB/s. l2: MiB.
_GPUS = {
    "a100": dict(capability=8, sms=108, units=64, shared=164, clock=1.41, memory=2039, l2=40),
    "h100": dict(capability=9, sms=132, units=128, shared=228, clock=1.98, memory=3352, l2=50),
    "h200": dict(capability=9, sms=132, units=128, shared=228, clock=1.98, memory=4800, l2=50),
}


def devices(topology: Topology) -> list[Any]:
    """Makes the devices of a slice, in the order of JAX. No program can run on them.

    Raises:
        InputError: the compiler is not installed, or the slice does not exist.
    """
    make = _gpus if topology.is_gpu else _tpus
    try:
        described = make(topology)
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"--topology: {topology.name} must be an available slice: {str(error)[:300]}"
        ) from error
    assert len(described) == topology.devices, (topology, described)
    return described


def _tpus(topology: Topology) -> list[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "the TPU compiler must be installed: found no libtpu. Install jaxrank's extra `tpu`, on"
            " Linux on x86-64."
        )
    from jax.experimental import topologies

    os.environ |= _NO_MACHINE
    _run_on_cpu()
    options: dict[str, Any] = {}
    if GENERATIONS[topology.generation].cores_per_device > 1:
        options["chip_config_name"] = "megacore"
    if topology.chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    return topologies.get_topology_desc(_shape(topology), "tpu", **options).devices


def _gpus(topology: Topology) -> list[Any]:
    if not any(_is_installed(name) for name in _PLUGINS):
        raise InputError(
            "the GPU compiler must be installed: found no JAX plugin for CUDA. Install jaxrank's"
            " extra `gpu-compiler` or `cuda`, on Linux."
        )
    from jax.experimental import topologies

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # it would warn about the absent GPU
    _run_on_cpu()
    machines = -(-topology.devices // _PER_MACHINE)
    if machines * min(topology.devices, _PER_MACHINE) != topology.devices:
        raise InputError(
            f"--topology: GPUs must be up to {_PER_MACHINE}, or a multiple of {_PER_MACHINE}: found"
            f" {topology.name}."
        )
    shape = f"1x{machines}x{topology.devices // machines}"
    return topologies.get_topology_desc(
        platform="cuda", topology=shape, target_config=_target(topology)
    ).devices


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # no plugin at all
        return False


def _run_on_cpu() -> None:
    """Runs all other computations on CPU, even on a machine with an accelerator."""
    jax.config.update("jax_platforms", "cpu")


def _target(topology: Topology) -> str:
    """Returns XLA's description of the GPU to compile for, a GpuTargetConfigProto as text."""
    gpu, kib = _GPUS[topology.generation], 2**10
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * kib}
  shared_memory_per_core: {gpu["shared"] * kib}
  shared_memory_per_block_optin: {(gpu["shared"] - 1) * kib}
  threads_per_core_limit: 2048
  core_count: {gpu["sms"]}
  fpus_per_core: {gpu["units"]}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  memory_bandwidth: {gpu["memory"] * 10**9}
  l2_cache_size: {gpu["l2"] * kib**2}
  clock_rate_ghz: {gpu["clock"]}
  device_memory_size: {topology.hbm_bytes}
  cuda_compute_capability {{ major: {gpu["capability"]} }}
  registers_per_core_limit: {2**16}
  registers_per_block_limit: {2**16}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "NVIDIA {topology.generation.upper()}"
"""


def _shape(topology: Topology) -> str:
    """Returns the number of chips of a slice along each axis, as "v3:4x4"."""
    return f"{topology.generation}:{'x'.join(str(side) for side in sides(topology))}"
