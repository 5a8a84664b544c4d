"""The text of a compiled program taken apart: computations, instructions, arrays."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

COLLECTIVES = (
    "all-to-all",
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "collective-permute",
    "ragged-all-to-all",
)

_BITS = {"pred": 8, "bf16": 16}  # of the types whose name does not end in their bits
_ARRAY = r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?"


def bits_of(dtype: str) -> int:
    """Of one number of a type of HLO, as "f32"; 0 of what is no number."""
    return _BITS.get(dtype) or int((re.search(r"\d+", dtype) or [0])[0])


class Array(NamedTuple):
    """size: in bytes. is_fast: in the fast memory of a core, not in HBM."""

    dims: tuple[int, ...]
    size: int
    is_fast: bool

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def in_memory(self) -> int:
        """Its bytes in HBM."""
        return 0 if self.is_fast else self.size


class Instruction(NamedTuple):
    """What one line says.

    arrays: of its result.
    sent: how many of these, the first, are what it sends, handed on in a tuple of their own.
    rest: of its line, behind the opcode.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    sent: int
    operands: tuple[str, ...]
    rest: str

    @property
    def size(self) -> int:
        return sum(array.size for array in self.arrays)

    @property
    def in_memory(self) -> int:
        return sum(array.in_memory for array in self.arrays)

    @property
    def made(self) -> tuple[Array, ...]:
        """Of its result, but for what it sends and for operands that it changes where they are."""
        if self.opcode != "custom-call":
            return self.arrays[self.sent :]
        aliases = self.found(r"output_to_operand_aliasing=\{(.*?\))\}")
        changed = re.findall(r"\{(\d*)\}: \(", aliases)  # nothing between: the whole result
        if "" in changed:
            return ()
        return tuple(a for i, a in enumerate(self.arrays) if str(i) not in changed)

    @property
    def largest(self) -> int:
        """Elements of the largest array that it makes."""
        return max((array.elements for array in self.made), default=0)

    @property
    def made_bytes(self) -> int:
        return sum(array.size for array in self.made)

    @property
    def scope(self) -> str:
        """Where in the program that JAX traced, as `transpose(jvp(model))/Ranker/tower/layer_0`."""
        return self.found(r'op_name="([^"]*)"')

    def found(self, pattern: str) -> str:
        """The first group of a pattern in the rest of the line; empty where it is not there."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    def called(self, what: str) -> str:
        """The computation that it calls as its `body`, `condition`, `calls` or `to_apply`."""
        return self.found(rf"\b{what}=%?([\w.-]+)")

    @property
    def branches(self) -> list[str]:
        """The computations of a condition."""
        listed = self.found(r"branch_computations=\{([^}]*)\}")
        names = listed.split(",") if listed else [self.called(f"{w}_computation") for w in _BOTH]
        return [name.strip().lstrip("%") for name in names if name]

    @property
    def place(self) -> int:
        """Of a get-tuple-element, or the number of a parameter."""
        return int(self.found(r"index=(\d+)") or self.rest.split(")")[0])

    @property
    def value(self) -> int | None:
        """Of a constant that is a whole number."""
        text = self.rest.split(")")[0]
        whole = self.opcode == "constant" and re.fullmatch(r"-?\d+", text)
        return int(text) if whole else None


_BOTH = ("true", "false")

Computation = dict[str, Instruction]  # by name, the root last unless it is a parameter


def computations(text: str) -> tuple[str, dict[str, Computation]]:
    """The name of the entry, and all computations by name."""
    entry = ""
    found: dict[str, Computation] = {}
    inside: Computation = {}
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start:
            inside = found[start[2]] = {}
            entry = start[2] if start[1] else entry
        elif one := _instruction(line):
            inside[one.name] = one
    return entry, found


def instructions(inside: Mapping[str, Computation]) -> Iterator[Instruction]:
    """Those of all computations."""
    return (one for computation in inside.values() for one in computation.values())


def root(computation: Computation) -> Instruction:
    return next(reversed(computation.values()))


def origin(computation: Mapping[str, Instruction], name: str) -> Instruction | None:
    """What was copied under that name, or is there itself."""
    found = computation.get(name)
    while found is not None and found.opcode in ("copy", "bitcast"):
        found = computation.get(found.operands[0])
    return found


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$", line)
    if match is None:
        return None
    name, kind, opcode, rest = match.groups()
    arrays = tuple(_array(*found) for found in re.findall(_ARRAY, kind))
    # What begins an exchange may hand on what is sent, in front of what will be received.
    handed_on = re.match(r"\(\(.*?\), ", kind)
    sent = len(re.findall(_ARRAY, handed_on[0])) if handed_on else 0
    depth, end = 1, len(rest)
    for i, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            end = i
            break
    operands = tuple(re.findall(r"%([\w.-]+)", rest[:end]))
    return Instruction(name, opcode, arrays, sent, operands, rest)


def _array(dtype: str, sides: str, layout: str) -> Array:
    dims = tuple(int(side) for side in sides.split(",") if side)
    return Array(dims, math.prod(dims) * bits_of(dtype) // 8, bool(re.search(r"S\([1-9]", layout)))
