"""How long a step takes on a TPU slice, on paper: from its compiled program and published rates.

An instruction of a core takes the longest of its products at the rate of the matrix unit, its bytes
at that of HBM, and the cycles that the compiler expects; instructions follow one another, also
those that the compiler lets run beside others. Of an exchange or a sum that the program starts and
awaits later counts what the instructions between leave; others overlap with nothing. An exchange
takes what the busiest cut through the network does when each chip sends the same to every other,
also one of only some of the devices (`mesh.replicas`); a sum goes around rings along all axes at
once, both ways. Every hop of the longest way adds a microsecond. Loops that end with the data, and
buffers, are taken to be full. The cycles are those of a device, also where it has two cores.
Nothing is said of the input, of several slices, of the padding of arrays to tiles, or of a core
that waits.

Not known are the rates of reads of single rows: they count their bytes, 512 for a line, at the full
rate of HBM.

References:
    Norrie et al., The Design Process for Google's Training Chips: TPUv2 and TPUv3, IEEE Micro 2021
    (v2). Jouppi et al., TPU v4: An Optically Reconfigurable Supercomputer for Machine Learning with
    Hardware Support for Embeddings, ISCA 2023 (v3, v4, twisted tori). Google Cloud, TPU system
    architecture (v5e, v5p, v6e). Austin et al., How to Scale Your Model, 2025 (time of a hop).
"""

import re
from typing import NamedTuple

from jaxrank.aot.costs import Cost, costs
from jaxrank.aot.topology import GENERATIONS, Topology, sides
from jaxrank.step import MODEL_SCOPE

PARTS = ("model", "sorts", "tables and rest", "exchange", "reduction", "hops")
_MODEL = re.compile(rf"(?:^|[/(]){MODEL_SCOPE}(?:$|[/)])")  # forward and backward
_HOP_SECONDS = 1e-6
_LANES = 1024  # numbers of a vector register
_SORT_CYCLES = 11  # of one pass over a vector register of keys with their places


class ChipRates(NamedTuple):
    """Of one chip.

    flops: bfloat16 operations a second.
    memory: of HBM, bytes a second.
    link: bytes a second over one link, one way.
    clock: cycles a second.
    ring: chips along an axis from which on its ends are joined; see `joined`.
    """

    flops: float
    memory: float
    link: float
    clock: float
    ring: int


# No clock of v6e is published: it is taken for that of v5p.
RATES = {
    "v2": ChipRates(46e12, 700e9, 62e9, 0.7e9, 16),
    "v3": ChipRates(123e12, 900e9, 70e9, 0.94e9, 32),
    "v4": ChipRates(275e12, 1200e9, 50e9, 1.05e9, 4),
    "v5e": ChipRates(197e12, 819e9, 50e9, 1.5e9, 16),
    "v5p": ChipRates(459e12, 2765e9, 100e9, 1.75e9, 4),
    "v6e": ChipRates(918e12, 1640e9, 100e9, 1.75e9, 16),
}

# Snap, Training Large-Scale Recommendation Models with TPUs, 2022: times the cores, and how much
# faster.
PUBLISHED = (16, 5.25)

# How much faster all chips send to all others where a torus of these proportions is twisted.
_TWISTED: dict[tuple[int, ...], float] = {(1, 1, 2): 1.63, (1, 2, 2): 1.31}


class StepTime(NamedTuple):
    """What a step takes on one slice.

    batch_size: examples of the step, of all devices together.
    seconds: by part, those of `PARTS`: of the model's layers, both ways; of a core's sorts; of all
        else that it does, above all lookups and updates of tables; of exchanges between devices; of
        sums over them; of the hops of both.
    product_flops: of one device, in matrix products, each pass in bfloat16 counted.
    memory_bytes: of one device.
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


def is_of_model(scope: str) -> bool:
    """Returns whether an instruction of that scope is the model's, forward or backward."""
    return _MODEL.search(scope) is not None


def step_time(text: str, topology: Topology, batch_size: int, steps: int) -> StepTime:
    """The time of one step by the model.

    Args:
        text: of the program of one device, which takes `steps` steps.
        batch_size: examples of a step, of all devices together.

    Raises:
        ValueError: no exchange runs in every step: the loop over them was not understood.
    """
    rates, chips = RATES[topology.generation], topology.chips
    devices = topology.devices / chips
    found = costs(text)
    sends = [cost.runs for cost in found if cost.sent_bytes]
    if sends and max(sends) < steps:
        raise ValueError(f"no exchange runs in each of {steps} steps")
    seconds = dict.fromkeys(PARTS, 0.0)
    hidden: dict[str, float] = {}  # by the collective beside which it is
    for cost in found:
        if cost.sent_bytes:
            continue
        cycles = cost.cycles + cost.compared * _SORT_CYCLES / _LANES
        part = (
            "sorts" if cost.compared else "model" if is_of_model(cost.scope) else "tables and rest"
        )
        took = max(
            cost.flops / (rates.flops / devices),
            cost.memory_bytes / (rates.memory / devices),
            cycles / rates.clock,
        )
        seconds[part] += took
        hidden[cost.beside] = hidden.get(cost.beside, 0.0) + took
    for cost in found:
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
        product_flops=sum(cost.flops for cost in found) / steps,
        memory_bytes=sum(cost.memory_bytes for cost in found) / steps,
    )


def _collective(cost: Cost, topology: Topology, rates: ChipRates) -> tuple[str, float, int]:
    """The part that a collective counts to, its seconds and its hops."""
    network, joined_ends = sides(topology), joined(topology)
    axes = [side for side in network if side > 1]
    reach = sum(side // 2 if joined_ends else side - 1 for side in axes)
    if cost.opcode == "all-to-all":
        # The two devices of a chip share its links.
        sent = cost.sent_bytes * topology.devices / topology.chips
        return "exchange", sent / rates.link * _cut(network, joined_ends), reach
    rings = len(axes) * (2 if joined_ends else 1)
    took = cost.sent_bytes / rates.link / rings if rings else 0.0
    if cost.opcode == "all-reduce":  # a sum to parts of it, and a gathering of the parts
        return "reduction", 2 * took, 2 * reach
    return ("reduction" if cost.opcode == "reduce-scatter" else "exchange"), took, reach


def joined(topology: Topology) -> bool:
    """Whether the ends of the axes of a slice are joined: a torus, else a mesh."""
    ring, network = RATES[topology.generation].ring, sides(topology)
    if GENERATIONS[topology.generation].axes == 3:
        return all(side % ring == 0 for side in network)
    return all(side >= ring for side in network)


def _cut(network: tuple[int, ...], joined_ends: bool) -> float:
    """Bytes over the busiest link, for each byte that every chip sends in equal shares to all."""
    busiest = max(side / (8 if joined_ends else 4) if side > 1 else 0.0 for side in network)
    least = min(network)
    proportions = tuple(side // least for side in network)
    return busiest / (_TWISTED.get(proportions, 1.0) if joined_ends else 1.0)


def speedup(first: StepTime, other: StepTime) -> float:
    """Of examples a second."""
    return other.examples_per_second / first.examples_per_second


def efficiency(first: StepTime, other: StepTime) -> float:
    """The speed-up, for each time that there are more devices; 1 is linear."""
    return speedup(first, other) * first.topology.devices / other.topology.devices


def grown(batch_size: int, first: Topology, other: Topology) -> int:
    """The batch size with which each device has as many examples as one of `first` has."""
    return batch_size * other.devices // first.devices
