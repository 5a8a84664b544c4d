"""The device mesh, its axis names, shardings of state and batches, and sums over its devices.

A step runs in `shard_map`: it is the program of one device, with every exchange between devices
written out. The compiler decides only the sharding of state and batches between steps. Axes are
Auto, unlike the Explicit default of `jax.make_mesh`. With Explicit axes, every gather from a split
array outside `shard_map`, as in tests and tools, would have to name its output's sharding.
"""

import contextlib
import functools
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrank.errors import InputError

# Tables are split along SHARD and equal along REPLICA; examples are split along both.
REPLICA = "replica"
SHARD = "shard"
EXAMPLES = (REPLICA, SHARD)

_STARTS_EXCHANGES = 5  # first generation of TPUs for which exchanges are asynchronous


def make_mesh(*, replicas: int = 1, devices: int = 0) -> Mesh:
    """Makes a mesh of `replicas` x (devices / replicas).

    Args:
        replicas: number of copies of every split table.
        devices: number of devices to use, from the first. 0: all.

    Raises:
        InputError: the numbers do not fit the available devices.
    """
    available = jax.devices()
    return device_mesh(available[: used(devices, len(available))], replicas)


def used(devices: int, present: int) -> int:
    """Returns the number of devices that a run uses. 0 stands for all of the available devices.

    Raises:
        InputError: fewer devices are available.
    """
    if devices > present:
        raise InputError(
            f"mesh.devices: must be at most {present}, the number of devices: found {devices}."
        )
    return devices or present


def device_mesh(devices: Any, replicas: int) -> Mesh:
    """Makes a mesh of these devices, in this order.

    Raises:
        InputError: `replicas` does not divide their number.
    """
    if len(devices) % replicas:
        raise InputError(
            f"mesh.replicas: must divide the number of devices: found replicas={replicas},"
            f" {len(devices)} devices."
        )
    grid = np.asarray(devices).reshape(replicas, len(devices) // replicas)
    return Mesh(grid, (REPLICA, SHARD), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def example_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Returns the sharding by example. `leading` axes in front, such as steps, are not split."""
    return NamedSharding(mesh, P(*([None] * leading), EXAMPLES))


def put_batch(batch: Any, mesh: Mesh, leading: int = 0) -> Any:
    """Makes global arrays, split by example over the mesh, from this process's share of a batch."""
    sharding = example_sharding(mesh, leading)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def platform(mesh: Mesh) -> str:
    """Returns "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def bytes_on_device(shapes: Any, shardings: Any) -> int:
    """Sums the bytes on one device of arrays with these shapes and shardings."""
    sizes = jax.tree.map(
        lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, shapes, shardings
    )
    return sum(jax.tree.leaves(sizes))


def host_memory() -> int:
    """Returns the bytes of this machine's memory, or the limit of its cgroup if that is less."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # "max" if there is no limit
        size = min(size, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return size


def exchange_options(mesh: Mesh) -> dict[str, str]:
    """Returns XLA options for programs in which the devices of this mesh exchange arrays.

    By default an exchange on TPU is one instruction beside which nothing runs. The option makes it
    asynchronous: it is started, and awaited later. The option is set from v5 on, where other
    projects train with it. It also compiles for earlier generations.
    """
    generation = re.match(r"TPU ?v?(\d+)", mesh.devices.flat[0].device_kind)
    if generation and int(generation[1]) >= _STARTS_EXCHANGES:
        return {"xla_tpu_enable_async_all_to_all": "true"}
    return {}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(mesh: Mesh, tree: Any) -> Any:
    """Sums each array of a device over all devices, in `shard_map`. All get the same bits.

    Differentiable: if the loss of each device is its part of a sum, its gradients are summed too.
    """
    return _total(mesh, tree)


def _total(mesh: Mesh, tree: Any) -> Any:
    if mesh.size == 1:
        return tree
    if platform(mesh) != "cpu":
        return jax.lax.psum(tree, EXAMPLES)
    # On CPU, the order of summation over devices depends on the number of processes. Therefore
    # every device sums one part, in the order of the devices, and the parts are concatenated. This
    # moves the bytes of an all-reduce, and the result does not depend on the processes.
    leaves, structure = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    for dtype in sorted({x.dtype for x in leaves}, key=str):
        chosen = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in chosen])
        parts = jnp.pad(flat, (0, -len(flat) % mesh.size)).reshape(mesh.size, -1)
        local_sum = jax.lax.all_to_all(parts, EXAMPLES, 0, 0, tiled=True).sum(0)
        flat = jax.lax.all_gather(local_sum, EXAMPLES, tiled=True)
        at = 0
        for i in chosen:
            summed[i] = flat[at : at + leaves[i].size].reshape(leaves[i].shape)
            at += leaves[i].size
    return jax.tree.unflatten(structure, summed)


def _total_forward(mesh: Mesh, tree: Any) -> tuple[Any, None]:
    return _total(mesh, tree), None


def _total_backward(mesh: Mesh, _: None, cotangents: Any) -> tuple[Any]:
    return (_total(mesh, cotangents),)


total.defvjp(_total_forward, _total_backward)


def device_index(mesh: Mesh) -> jax.Array:
    """Returns this device's index in the mesh, i32[], in `shard_map`: the order of examples."""
    return jax.lax.axis_index(REPLICA) * mesh.shape[SHARD] + jax.lax.axis_index(SHARD)
