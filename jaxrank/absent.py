"""Devices of TPU slices that are not here, for which the TPU compiler of libtpu compiles."""

import importlib.util
import os
from typing import Any

import jax

from jaxrank.errors import InputError
from jaxrank.topology import GENERATIONS, Topology, sides

# Without these libtpu looks for the machine that it would be on.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def devices(topology: Topology) -> list[Any]:
    """The devices of a slice, in the order in which JAX has them there; nothing can run on them.

    Raises:
        InputError: there is no TPU compiler here, or no such slice.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "the TPU compiler must be installed: found no libtpu. Install jaxrank's extra `tpu`, on"
            " Linux on x86-64."
        )
    from jax.experimental import topologies

    os.environ |= _NO_MACHINE
    # What runs here besides is on the CPU, also where a TPU is.
    jax.config.update("jax_platforms", "cpu")
    options: dict[str, Any] = {}
    if GENERATIONS[topology.generation].cores_per_device > 1:
        options["chip_config_name"] = "megacore"
    if topology.chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    try:
        found = topologies.get_topology_desc(_shape(topology), "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"--topology: {topology.name} must be a slice that can be had: {str(error)[:300]}"
        ) from error
    assert len(found.devices) == topology.devices, (topology, found.devices)
    return found.devices


def _shape(topology: Topology) -> str:
    """ "v3:4x4": the chips of a slice along each axis."""
    return f"{topology.generation}:{'x'.join(str(side) for side in sides(topology))}"
