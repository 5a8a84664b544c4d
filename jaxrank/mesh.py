"""The device mesh, its axis names, where state and batches lie on it, and sums over its devices.

A step runs in `shard_map`: the program of one device, with every exchange between devices written
out. What is left to the compiler is only where state and batches lie between steps. Axes are Auto,
not the Explicit ones that `jax.make_mesh` gives by default: under those every gather from a split
array outside of `shard_map` (as tests and tools do it) would have to name its output's sharding.
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

_STARTS_EXCHANGES = 5  # the generation of TPUs from which on exchanges are started and awaited


def make_mesh(*, replicas: int = 1, devices: int = 0) -> Mesh:
    """A mesh of `replicas` x (devices / replicas).

    Args:
        replicas: how many copies of every split table there are.
        devices: how many of the devices to use, from the first; 0 for all.

    Raises:
        InputError: the numbers do not fit the devices that are there.
    """
    found = jax.devices()
    return mesh_of(found[: used(devices, len(found))], replicas)


def used(devices: int, there: int) -> int:
    """How many devices a run uses of those that are there, from the first; 0: all.

    Raises:
        InputError: there are fewer.
    """
    if devices > there:
        raise InputError(f"mesh.devices must be at most {there}, the devices: found {devices}.")
    return devices or there


def mesh_of(devices: Any, replicas: int) -> Mesh:
    """A mesh of these devices, in this order.

    Raises:
        InputError: `replicas` does not divide their number.
    """
    if len(devices) % replicas:
        raise InputError(
            f"mesh.replicas must divide the number of devices: found replicas={replicas},"
            f" {len(devices)} devices."
        )
    grid = np.asarray(devices).reshape(replicas, len(devices) // replicas)
    return Mesh(grid, (REPLICA, SHARD), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def by_example(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Split by example; `leading` axes in front (steps of an execution) are not split."""
    return NamedSharding(mesh, P(*([None] * leading), EXAMPLES))


def put_batch(batch: Any, mesh: Mesh, leading: int = 0) -> Any:
    """This process's share of a batch -> global arrays split by example over the mesh."""
    sharding = by_example(mesh, leading)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def platform(mesh: Mesh) -> str:
    """ "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def bytes_on_device(shapes: Any, shardings: Any) -> int:
    """Of arrays of those shapes, placed so."""
    found = jax.tree.map(
        lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, shapes, shardings
    )
    return sum(jax.tree.leaves(found))


def host_memory() -> int:
    """Bytes of this machine's memory, or what its group of processes may use if that is less."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no limit is "max"
        found = min(found, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return found


def exchange_options(mesh: Mesh) -> dict[str, str]:
    """XLA's options for programs in which the devices of this mesh exchange arrays.

    On TPU an exchange is one instruction beside which nothing runs, unless XLA is told to start it
    and to await it later. Told so from v5 on, where others are known to train that way; it compiles
    for earlier ones, too.
    """
    generation = re.match(r"TPU ?v?(\d+)", mesh.devices.flat[0].device_kind)
    if generation and int(generation[1]) >= _STARTS_EXCHANGES:
        return {"xla_tpu_enable_async_all_to_all": "true"}
    return {}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(mesh: Mesh, tree: Any) -> Any:
    """Sums each array of a device over all devices, in `shard_map`; the same bits on all of them.

    Differentiable: where every device's loss is its part of one sum, so are the gradients.
    """
    return _total(mesh, tree)


def _total(mesh: Mesh, tree: Any) -> Any:
    if mesh.size == 1:
        return tree
    if platform(mesh) != "cpu":
        return jax.lax.psum(tree, EXAMPLES)
    # On CPU the devices of one process are summed in another order than those of several. Here
    # every device sums one part, in the order of the devices, and the parts are put together: the
    # bytes of an all-reduce, and a result that does not depend on the processes.
    leaves, structure = jax.tree.flatten(tree)
    summed: list[Any] = [None] * len(leaves)
    for dtype in sorted({x.dtype for x in leaves}, key=str):
        chosen = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        flat = jnp.concatenate([leaves[i].reshape(-1) for i in chosen])
        parts = jnp.pad(flat, (0, -len(flat) % mesh.size)).reshape(mesh.size, -1)
        mine = jax.lax.all_to_all(parts, EXAMPLES, 0, 0, tiled=True).sum(0)
        flat = jax.lax.all_gather(mine, EXAMPLES, tiled=True)
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
    """i32[], which device of the mesh this is, in `shard_map`: the order of examples."""
    return jax.lax.axis_index(REPLICA) * mesh.shape[SHARD] + jax.lax.axis_index(SHARD)
