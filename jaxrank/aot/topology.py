"""TPU slices and GPUs by name, such as v3-32 or h200-8."""

import os
import re
from typing import NamedTuple

from jaxrank.errors import InputError

_GIB = 2**30


class Generation(NamedTuple):
    """A generation of TPUs or of GPUs.

    numbers_cores: True if the number in a slice's name counts cores, False if it counts chips.
    cores_per_device: 2 if both cores of a chip are one device.
    hbm_bytes: memory of one device.
    usable_bytes: memory that the compiler gives to a program. For GPUs see `Topology`.
    axes: dimensions of the network between TPU chips, a torus or mesh: 2 or 3. 0 for GPUs.
    """

    numbers_cores: bool
    cores_per_device: int
    hbm_bytes: int
    usable_bytes: int
    axes: int


# Usable bytes as reported by the compilers of libtpu 0.0.42.1 for programs that are too large.
GENERATIONS = {
    "v2": Generation(True, 1, 8 * _GIB, int(7.48 * _GIB), 2),
    "v3": Generation(True, 1, 16 * _GIB, int(15.48 * _GIB), 2),
    "v4": Generation(True, 2, 32 * _GIB, int(30.75 * _GIB), 3),
    "v5e": Generation(False, 1, 16 * _GIB, int(15.75 * _GIB), 2),
    "v5p": Generation(True, 2, 95 * _GIB, 95 * _GIB, 3),
    "v6e": Generation(False, 1, 32 * _GIB, int(31.25 * _GIB), 2),
    "a100": Generation(False, 1, 79 * _GIB, 79 * _GIB, 0),
    "h100": Generation(False, 1, 79 * _GIB, 79 * _GIB, 0),
    "h200": Generation(False, 1, 139 * _GIB, 139 * _GIB, 0),
}
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ALIASES = {"v5litepod": "v5e"}
# Beginnings of the names that JAX gives to devices, the longest first.
_DEVICE_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v6 lite": "v6e",
    "TPU v5": "v5p",
    "TPU v4": "v4",
    "TPU v3": "v3",
    "TPU v2": "v2",
    "NVIDIA A100": "a100",
    "NVIDIA H100": "h100",
    "NVIDIA H200": "h200",
}


class Topology(NamedTuple):
    """A TPU slice, or GPUs of one kind, eight to a machine.

    name: such as "v3-32" or "h200-8".
    generation: a key of `GENERATIONS`.
    devices: number of devices that JAX sees.
    chips: number of chips. Chips of v2 and v3 have two devices each.
    hbm_bytes: memory of each device.
    """

    name: str
    generation: str
    devices: int
    chips: int
    hbm_bytes: int

    @property
    def cores(self) -> int:
        return self.devices * GENERATIONS[self.generation].cores_per_device

    @property
    def is_gpu(self) -> bool:
        return not GENERATIONS[self.generation].axes

    @property
    def usable_bytes(self) -> int:
        """Memory of a device for a program.

        For a GPU it is the fraction that JAX allocates at start: XLA_PYTHON_CLIENT_MEM_FRACTION, or
        three quarters.

        Raises:
            InputError: the variable is not a valid fraction.
        """
        usable = GENERATIONS[self.generation].usable_bytes
        return int(_fraction() * usable) if self.is_gpu else usable


def _fraction() -> float:
    text = os.environ.get(_FRACTION, "0.75")
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise InputError(f"{_FRACTION}: must be a number above 0 and up to 1: found {text!r}.")
    return number


def topology(name: str, flag: str = "--topology") -> Topology:
    """Parses the name of a slice.

    v3-32 has 32 cores, each a device. v4-128 has 128 cores, two per device. v5e-16 has 16 chips,
    each a device. h200-8 has 8 GPUs.

    Args:
        flag: that names the slice, for errors.

    Raises:
        InputError: the generation is unknown, or the number is invalid for it.
    """
    match = re.fullmatch(r"([a-z0-9]+)-([0-9]+)", name)
    alias = _ALIASES.get(match[1], match[1]) if match else ""
    if match is None or alias not in GENERATIONS:
        raise InputError(
            f"{flag}: must be a generation of TPUs or of GPUs, one of"
            f" {', '.join(GENERATIONS)}, and a number, such as v3-32: found {name!r}."
        )
    generation, number = GENERATIONS[alias], int(match[2])
    unit = 2 if generation.numbers_cores else 1  # a chip of v2, v3, v4 or v5p has two cores
    if number < 1 or number % unit:
        counted = "cores, two per chip" if generation.numbers_cores else "chips"
        raise InputError(
            f"{flag}: the number of a {alias} slice counts {counted}, so it must be a positive"
            f" multiple of {unit}: found {name!r}."
        )
    return Topology(
        name, alias, number // generation.cores_per_device, number // unit, generation.hbm_bytes
    )


def find_topology(device_kind: str, devices: int) -> Topology | None:
    """Returns the topology of devices that are present, or None if their kind is unknown.

    Args:
        device_kind: as JAX names it, such as "TPU v5 lite".
        devices: number of devices of a whole slice.
    """
    generation = next((g for k, g in _DEVICE_KINDS.items() if device_kind.startswith(k)), "")
    if not generation:
        return None
    chip = GENERATIONS[generation]
    number = devices * chip.cores_per_device if chip.numbers_cores else devices
    return topology(f"{generation}-{number}")


def sides(topology: Topology) -> tuple[int, ...]:
    """Returns the number of chips of a TPU slice along each axis, as even as possible.

    Raises:
        InputError: the number of chips is not a power of two.
    """
    if topology.chips & (topology.chips - 1):
        raise InputError(
            f"--topology: the number of chips must be a power of two: found {topology.name}, of"
            f" {topology.chips} chips."
        )
    bits, axes = topology.chips.bit_length() - 1, GENERATIONS[topology.generation].axes
    lengths = sorted(2 ** ((bits + i) // axes) for i in range(axes))
    # A host has four chips in one plane.
    return tuple(reversed(lengths) if axes == 3 and topology.chips < 8 else lengths)
