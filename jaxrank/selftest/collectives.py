"""Measures exchanges and sums over the devices, and compares them with the model of `aot`."""

import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrank import mesh as meshes
from jaxrank.aot import scaling
from jaxrank.aot.topology import find_topology
from jaxrank.errors import InputError
from jaxrank.report import format_bytes
from jaxrank.runtime import processes
from jaxrank.selftest.check import FAIL, NOT_APPLICABLE, Verdict, passes

# Fraction of the predicted rate from which a measured one passes. The model takes the full rate of
# every link, which no library reaches.
_ENOUGH = 1 / 3
_WARM = 3  # repetitions

_ADVICE = {
    "gpu": "Check `nvidia-smi topo -m` (NVLink) and, between hosts, NCCL_DEBUG=INFO: it must use"
    " InfiniBand or the fast adapters (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), not the network of the"
    " host.",
    "tpu": "Check that all hosts belong to one slice and that no other job uses it.",
    "cpu": "",
}


def exchange(mesh: Mesh, size: int, seconds: float) -> Verdict:
    """Checks the values and the rate of all-to-all, which moves rows of tables.

    Args:
        size: bytes per device.
        seconds: duration of the measurement.
    """
    devices = mesh.size
    width = max(1, size // 4 // devices)

    def collective(local: Any) -> Any:
        return jax.lax.all_to_all(local, meshes.EXAMPLES, 0, 0, tiled=True)

    def first(index: Any) -> Any:
        rows = index * devices + jnp.arange(devices, dtype=jnp.float32)
        return jnp.broadcast_to(rows[:, None], (devices, width))

    def expected(index: Any) -> Any:
        rows = jnp.arange(devices, dtype=jnp.float32) * devices + index
        return jnp.broadcast_to(rows[:, None], (devices, width))

    return _verdict(mesh, "all-to-all", collective, first, expected, 4 * devices * width, seconds)


def all_reduce(mesh: Mesh, size: int, seconds: float) -> Verdict:
    """Checks the values and the rate of the sum over devices, which adds gradients of layers."""
    devices = mesh.size
    width = max(1, size // 4)

    def collective(local: Any) -> Any:
        return meshes.total(mesh, local / devices)

    def first(index: Any) -> Any:
        return jnp.full(width, index, jnp.float32)

    def expected(index: Any) -> Any:
        return jnp.full(width, (devices - 1) / 2, jnp.float32)

    return _verdict(mesh, "all-reduce", collective, first, expected, 4 * width, seconds)


def _verdict(
    mesh: Mesh,
    opcode: str,
    collective: Callable[[Any], Any],
    first: Callable[[Any], Any],
    expected: Callable[[Any], Any],
    size: int,
    seconds: float,
) -> Verdict:
    """Measures a collective whose result on each device is known.

    Args:
        collective: the operation, of a device's array.
        first, expected: the array of a device before and after it, by the device's index.
        size: bytes of the result per device.
    """
    if mesh.size == 1:
        return Verdict(NOT_APPLICABLE, "one device")
    wrong, took = measure(mesh, collective, first, expected, seconds)
    if wrong:
        return Verdict(
            FAIL,
            f"{wrong:,} of {mesh.size * size // 4:,} numbers are wrong after one {opcode}",
            "Replace the host or device: run `jaxrank selftest --full`, which tests each device.",
        )
    rate = f"{format_bytes(size / took)}/s per device, {format_bytes(size)} in {1e3 * took:.2f} ms"
    expected_seconds = predicted(mesh, opcode, size)
    if expected_seconds is None:
        kind = mesh.devices.flat[0].device_kind
        return Verdict("pass", f"values are right; {rate}; no prediction for {kind}")
    return passes(
        took * _ENOUGH <= expected_seconds,
        f"{rate}; predicted {1e3 * expected_seconds:.2f} ms, {expected_seconds / took:.0%} of it"
        " reached",
        _ADVICE.get(meshes.platform(mesh), ""),
    )


def predicted(mesh: Mesh, opcode: str, size: int) -> float | None:
    """Returns the seconds that the model of `aot` predicts, None for unknown devices."""
    try:
        topology = find_topology(mesh.devices.flat[0].device_kind, mesh.size)
        return scaling.collective_seconds(opcode, size, topology) if topology else None
    except InputError:  # a number of chips that no slice has
        return None


def measure(
    mesh: Mesh,
    collective: Callable[[Any], Any],
    first: Callable[[Any], Any],
    expected: Callable[[Any], Any],
    seconds: float,
) -> tuple[int, float]:
    """Returns the number of wrong values after one collective, and the seconds of one."""
    spec = P(meshes.EXAMPLES)
    on_devices = functools.partial(jax.shard_map, mesh=mesh, check_vma=False, out_specs=(spec, P()))

    def index() -> Any:
        return meshes.device_index(mesh).astype(jnp.float32)

    def start() -> Any:
        local = first(index())
        after = collective(local)
        differs = jnp.abs(after - expected(index())) > 1e-3
        return local, jax.lax.psum(jnp.sum(differs, dtype=jnp.int32), meshes.EXAMPLES)

    def repeat(local: Any, count: Any) -> Any:
        local = jax.lax.fori_loop(0, count, lambda _, x: collective(x), local)
        return local, jax.lax.psum(jnp.float32(0) * local.ravel()[0], meshes.EXAMPLES)

    local, wrong = jax.jit(on_devices(start, in_specs=()))()
    run = jax.jit(on_devices(repeat, in_specs=(spec, P())), donate_argnums=0)
    replicated = NamedSharding(mesh, P())

    def timed(local: Any, count: int) -> tuple[Any, float]:
        number = jax.device_put(np.int32(count), replicated)
        started = time.perf_counter()
        local, done = run(local, number)
        jax.block_until_ready(done)
        return local, time.perf_counter() - started

    local, _ = timed(local, 1)  # compiles
    local, took = timed(local, _WARM)
    count = processes.broadcast_value(max(1, min(10_000, int(seconds / took * _WARM))))
    local, took = timed(local, count)
    return int(wrong), max(processes.gather_values(took)) / count
