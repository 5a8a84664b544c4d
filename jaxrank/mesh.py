"""The device mesh, its axis names, and where state and batches lie on it.

Axes are Auto, not the Explicit ones that `jax.make_mesh` gives by default: the model is written
once, without a word about devices, and the compiler splits it by example. What must not be left to
the compiler, the exchange of table rows, is written with `shard_map` in `embedding`. Under Explicit
axes every gather from a split array would have to name its output's sharding.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrank.errors import InputError

# Tables are split along SHARD and equal along REPLICA; examples are split along both.
REPLICA = "replica"
SHARD = "shard"
EXAMPLES = (REPLICA, SHARD)


def make_mesh(*, replicas: int = 1, devices: int = 0) -> Mesh:
    """A mesh of `replicas` x (devices / replicas).

    Args:
        replicas: how many copies of every split table there are.
        devices: how many of the devices to use, from the first; 0 for all.

    Raises:
        InputError: the numbers do not fit the devices that are there.
    """
    found = jax.devices()
    devices = devices or len(found)
    if devices > len(found):
        raise InputError(f"mesh.devices must be at most {len(found)}, the devices: got {devices}.")
    if replicas < 1 or devices % replicas:
        raise InputError(
            f"mesh.replicas must divide the number of devices: got replicas={replicas},"
            f" {devices} devices."
        )
    grid = np.asarray(found[:devices]).reshape(replicas, devices // replicas)
    return Mesh(grid, (REPLICA, SHARD), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def by_row(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(SHARD))


def by_example(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """Split by example; `leading` axes in front (steps of a call) are not split."""
    return NamedSharding(mesh, P(*([None] * leading), EXAMPLES))


def put_batch(batch: Any, mesh: Mesh, leading: int = 0) -> Any:
    """This process's share of a batch -> global arrays split by example over the mesh."""
    sharding = by_example(mesh, leading)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)
