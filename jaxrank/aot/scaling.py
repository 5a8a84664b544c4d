"""Estimates the time of a step on a TPU slice from its compiled program and published rates.

An instruction takes the maximum of three times: its products at the rate of the matrix unit, its
bytes at the rate of HBM, and the cycles that the compiler expects. Instructions run one after
another, even if the compiler lets them run at the same time.

An exchange or a sum that is started and awaited later counts only beyond the time of the
instructions between. All others overlap with nothing. An exchange takes the time of the busiest cut
through the network when each chip sends the same number of bytes to every other, also if it is
among some of the devices (`mesh.replicas`). A sum goes around rings along all axes at once, in both
directions. Every hop of the longest path adds a microsecond.

Loops that end with the data, and buffers, are assumed to be full. Cycles are per device, also if it
has two cores. The estimate leaves out the input, several slices, the padding of arrays to tiles,
and cores that wait.

GPUs are estimated from the program for a TPU slice of as many devices, see `substitute`. The
estimate leaves out the launch of kernels, and counts the lines of 128 numbers that a TPU reads.

The rates of reads of single rows are unknown. They count their bytes, 512 per line, at the full
rate of HBM.

References:
    Norrie et al., The Design Process for Google's Training Chips: TPUv2 and TPUv3, IEEE Micro 2021
    (v2). Jouppi et al., TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning with
    Hardware Support for Embeddings, ISCA 2023 (v3, v4, twisted tori). Google Cloud, TPU system
    architecture (v5e, v5p, v6e). Austin et al., How to Scale Your Model, 2025 (time of a hop).
    NVIDIA, datasheets of A100, H100, H200, DGX A100 and DGX H100 (links of GPUs).
"""

import re
from typing import NamedTuple

from jaxrank.aot import topology as topologies
from jaxrank.aot.costs import Cost, costs
from jaxrank.aot.topology import GENERATIONS, Topology, sides
from jaxrank.step import MODEL_SCOPE

PARTS = ("model", "sorts", "tables and rest", "exchange", "reduction", "hops")
_MODEL = re.compile(rf"(?:^|[/(]){MODEL_SCOPE}(?:$|[/)])")  # forward and backward
_HOP_SECONDS = 1e-6
_LANES = 1024  # numbers of a vector register
_RADIX_PASSES = 4  # of a sort of 32-bit keys on GPU, each over all keys and places
_SORT_CYCLES = 11  # per pass over a vector register of keys with their places


class ChipRates(NamedTuple):
    """Rates of one chip.

    flops: bfloat16 operations/s.
    memory: bytes/s of HBM.
    link: bytes/s over one link, in one direction.
    clock: cycles/s.
    ring: minimum number of chips along an axis for its ends to be joined, see `joined`.
    """

    flops: float
    memory: float
    link: float
    clock: float
    ring: int


# The clock of v6e is not published, so the clock of v5p is used.
RATES = {
    "v2": ChipRates(46e12, 700e9, 62e9, 0.7e9, 16),
    "v3": ChipRates(123e12, 900e9, 70e9, 0.94e9, 32),
    "v4": ChipRates(275e12, 1200e9, 50e9, 1.05e9, 4),
    "v5e": ChipRates(197e12, 819e9, 50e9, 1.5e9, 16),
    "v5p": ChipRates(459e12, 2765e9, 100e9, 1.75e9, 4),
    "v6e": ChipRates(918e12, 1640e9, 100e9, 1.75e9, 16),
    # GPUs in the form of SXM, without sparsity. `GPU_LINKS` has their networks.
    "a100": ChipRates(312e12, 2039e9, 0.0, 1.41e9, 0),
    "h100": ChipRates(989e12, 3352e9, 0.0, 1.98e9, 0),
    "h200": ChipRates(989e12, 4800e9, 0.0, 1.98e9, 0),
}

# Snap, Training Large-Scale Recommendation Models with TPUs, 2022: speed-up of 5.25 with 16 times
# the cores.
PUBLISHED = (16, 5.25)

# Speed-up of an exchange between all chips in a twisted torus, by its proportions.
_TWISTED: dict[tuple[int, ...], float] = {(1, 1, 2): 1.63, (1, 2, 2): 1.31}


class GpuLinks(NamedTuple):
    """Rates of the network of one GPU, in bytes/s and in one direction.

    machine: to the other GPUs of its machine together, by NVLink and NVSwitch.
    network: to other machines, its own adapter of a DGX.
    """

    machine: float
    network: float


GPU_LINKS = {
    "a100": GpuLinks(300e9, 25e9),
    "h100": GpuLinks(450e9, 50e9),
    "h200": GpuLinks(450e9, 50e9),
}
GPUS_PER_MACHINE = 8


class StepTime(NamedTuple):
    """Estimated time of a step on one slice.

    batch_size: examples of the step, over all devices.
    seconds: by part of `PARTS`: layers of the model, forward and backward; sorts; everything else
        of a core, above all lookups and updates of tables; exchanges between devices; sums over
        devices; the hops of both.
    product_flops: operations of matrix products per device, once per bfloat16 pass.
    memory_bytes: per device.
    """

    topology: Topology
    batch_size: int
    seconds: dict[str, float]
    product_flops: float
    memory_bytes: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def examples_per_second(self) -> float:
        return self.batch_size / self.total

    @property
    def limit(self) -> str:
        return max(self.seconds, key=lambda part: self.seconds[part])


def substitute(topology: Topology) -> Topology:
    """Returns the slice whose program gives the estimate: for GPUs a v6e of as many devices."""
    if not topology.is_gpu:
        return topology
    return topologies.topology(f"v6e-{topology.devices}")


def is_of_model(scope: str) -> bool:
    """Returns True if an instruction of this scope is the model's, forward or backward."""
    return _MODEL.search(scope) is not None


def step_time(text: str, topology: Topology, batch_size: int, steps: int) -> StepTime:
    """Estimates the time of one step.

    Args:
        text: of the program of one device, which takes `steps` steps.
        batch_size: examples of a step, over all devices.

    Raises:
        ValueError: no exchange runs in every step, so the loop over steps was not understood.
    """
    rates, chips = RATES[topology.generation], topology.chips
    devices = topology.devices / chips
    instructions = costs(text, steps=steps)
    sends = [cost.runs for cost in instructions if cost.sent_bytes]
    if sends and max(sends) < steps:
        raise ValueError(f"no exchange runs in each of {steps} steps")
    seconds = dict.fromkeys(PARTS, 0.0)
    hidden: dict[str, float] = {}  # seconds that overlap, by collective
    for cost in instructions:
        if cost.sent_bytes:
            continue
        cycles = cost.cycles + cost.compared * _SORT_CYCLES / _LANES
        part = (
            "sorts" if cost.compared else "model" if is_of_model(cost.scope) else "tables and rest"
        )
        memory_bytes = cost.memory_bytes
        if topology.is_gpu:  # the cycles are counted for a TPU
            cycles, memory_bytes = 0.0, memory_bytes * (_RADIX_PASSES if cost.compared else 1)
        took = max(
            cost.flops / (rates.flops / devices),
            memory_bytes / (rates.memory / devices),
            cycles / rates.clock,
        )
        seconds[part] += took
        hidden[cost.beside] = hidden.get(cost.beside, 0.0) + took
    for cost in instructions:
        if cost.sent_bytes:
            part, took, hops = _collective(cost, topology, rates)
            of_hops = cost.runs * hops * _HOP_SECONDS
            beside = hidden.get(cost.name, 0.0)
            left = 1 - min(1.0, beside / (took + of_hops)) if beside else 1.0
            seconds[part] += left * took
            seconds["hops"] += left * of_hops
    return StepTime(
        topology,
        batch_size,
        {part: took / steps for part, took in seconds.items()},
        product_flops=sum(cost.flops for cost in instructions) / steps,
        memory_bytes=sum(cost.memory_bytes for cost in instructions) / steps,
    )


def collective_seconds(opcode: str, sent_bytes: float, topology: Topology) -> float:
    """Estimates the time of one collective between all devices of a slice or of machines with GPUs.

    Args:
        opcode: such as "all-to-all" or "all-reduce".
        sent_bytes: bytes of its result on one device.
    """
    cost = Cost("", opcode, 1.0, sent_bytes=sent_bytes)
    _, seconds, hops = _collective(cost, topology, RATES[topology.generation])
    return seconds + hops * _HOP_SECONDS


def _gpu_collective(opcode: str, sent_bytes: float, topology: Topology) -> float:
    """Returns the seconds of the slower of the links in a machine and those between machines.

    A sum goes around one ring through all GPUs of each machine.
    """
    links, devices = GPU_LINKS[topology.generation], topology.devices
    inside = min(devices, GPUS_PER_MACHINE)
    if opcode == "all-to-all":
        outside = sent_bytes * (devices - inside) / devices / links.network
        return max(sent_bytes * (inside - 1) / devices / links.machine, outside)
    moved = sent_bytes * (devices - 1) / devices * (2 if opcode == "all-reduce" else 1)
    # Between machines every GPU has its own ring with a part of the array.
    outside = moved / inside / links.network if devices > inside else 0.0
    return max(moved / links.machine, outside)


def _collective(cost: Cost, topology: Topology, rates: ChipRates) -> tuple[str, float, int]:
    """Returns the part that a collective counts to, its seconds and its hops."""
    if topology.is_gpu:
        part = "reduction" if cost.opcode in ("all-reduce", "reduce-scatter") else "exchange"
        return part, _gpu_collective(cost.opcode, cost.sent_bytes, topology), 1
    network, joined_ends = sides(topology), joined(topology)
    axes = [side for side in network if side > 1]
    reach = sum(side // 2 if joined_ends else side - 1 for side in axes)
    if cost.opcode == "all-to-all":
        # The two devices of a chip share its links.
        sent = cost.sent_bytes * topology.devices / topology.chips
        return "exchange", sent / rates.link * _cut(network, joined_ends), reach
    rings = len(axes) * (2 if joined_ends else 1)
    took = cost.sent_bytes / rates.link / rings if rings else 0.0
    if cost.opcode == "all-reduce":  # a reduce-scatter and an all-gather
        return "reduction", 2 * took, 2 * reach
    return ("reduction" if cost.opcode == "reduce-scatter" else "exchange"), took, reach


def joined(topology: Topology) -> bool:
    """Returns True if the ends of a slice's axes are joined: a torus, not a mesh."""
    ring, network = RATES[topology.generation].ring, sides(topology)
    if GENERATIONS[topology.generation].axes == 3:
        return all(side % ring == 0 for side in network)
    return all(side >= ring for side in network)


def _cut(network: tuple[int, ...], joined_ends: bool) -> float:
    """Computes bytes over the busiest link, per byte that every chip sends in equal shares."""
    busiest = max(side / (8 if joined_ends else 4) if side > 1 else 0.0 for side in network)
    least = min(network)
    proportions = tuple(side // least for side in network)
    return busiest / (_TWISTED.get(proportions, 1.0) if joined_ends else 1.0)


def speedup(first: StepTime, other: StepTime) -> float:
    """Returns the ratio of examples/s."""
    return other.examples_per_second / first.examples_per_second


def efficiency(first: StepTime, other: StepTime) -> float:
    """Returns the speed-up over the ratio of devices. 1 is linear."""
    return speedup(first, other) * first.topology.devices / other.topology.devices


def grown(batch_size: int, first: Topology, other: Topology) -> int:
    """Returns the batch size with the same number of examples per device as on `first`."""
    return batch_size * other.devices // first.devices
