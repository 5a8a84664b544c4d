"""Parser for the text of a compiled program: computations, instructions, arrays."""

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

_BITS = {"pred": 8, "bf16": 16}  # types whose name does not end in their number of bits
_ARRAY = r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?"


def dtype_bits(dtype: str) -> int:
    """Returns the bits per number of an HLO type such as "f32". 0 if it is not a number."""
    return _BITS.get(dtype) or int((re.search(r"\d+", dtype) or [0])[0])


class Array(NamedTuple):
    """An array. size: in bytes. is_fast: in the fast memory of a core, not in HBM."""

    dims: tuple[int, ...]
    size: int
    is_fast: bool

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def hbm_bytes(self) -> int:
        """Bytes in HBM."""
        return 0 if self.is_fast else self.size


class Instruction(NamedTuple):
    """An instruction, one line of the text.

    arrays: the arrays of its result.
    sent: number of these arrays, from the first, that it sends. They form a tuple of their own.
    rest: the line behind the opcode.
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
    def hbm_bytes(self) -> int:
        return sum(array.hbm_bytes for array in self.arrays)

    @property
    def written_arrays(self) -> tuple[Array, ...]:
        """Arrays of the result, except arrays that it sends and operands changed in place."""
        if self.opcode != "custom-call":
            return self.arrays[self.sent :]
        aliases = self.search(r"output_to_operand_aliasing=\{(.*?\))\}")
        changed = re.findall(r"\{(\d*)\}: \(", aliases)  # empty index: the whole result
        if "" in changed:
            return ()
        return tuple(a for i, a in enumerate(self.arrays) if str(i) not in changed)

    @property
    def largest(self) -> int:
        """Elements of the largest array of `written_arrays`."""
        return max((array.elements for array in self.written_arrays), default=0)

    @property
    def written_bytes(self) -> int:
        return sum(array.size for array in self.written_arrays)

    @property
    def scope(self) -> str:
        """Scope in the traced program, such as `transpose(jvp(model))/Ranker/tower/layer_0`."""
        return self.search(r'op_name="([^"]*)"')

    def search(self, pattern: str) -> str:
        """Returns the first group of a pattern in the rest of the line, or empty text."""
        match = re.search(pattern, self.rest)
        return match[1] if match else ""

    def called(self, name: str) -> str:
        """Returns the computation that it calls as `body`, `condition`, `calls` or `to_apply`."""
        return self.search(rf"\b{name}=%?([\w.-]+)")

    @property
    def branches(self) -> list[str]:
        """The computations of a condition."""
        listed = self.search(r"branch_computations=\{([^}]*)\}")
        names = listed.split(",") if listed else [self.called(f"{w}_computation") for w in _BOTH]
        return [name.strip().lstrip("%") for name in names if name]

    @property
    def element_index(self) -> int:
        """Index of a get-tuple-element, or number of a parameter."""
        return int(self.search(r"index=(\d+)") or self.rest.split(")")[0])

    @property
    def value(self) -> int | None:
        """Value of a constant that is a whole number, else None."""
        text = self.rest.split(")")[0]
        whole = self.opcode == "constant" and re.fullmatch(r"-?\d+", text)
        return int(text) if whole else None


_BOTH = ("true", "false")

Computation = dict[str, Instruction]  # by name. The root is last, unless it is a parameter


def computations(text: str) -> tuple[str, dict[str, Computation]]:
    """Parses a program. Returns the name of the entry, and all computations by name."""
    entry = ""
    by_name: dict[str, Computation] = {}
    inside: Computation = {}
    for line in text.splitlines():
        start = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if start:
            inside = by_name[start[2]] = {}
            entry = start[2] if start[1] else entry
        elif instruction := _instruction(line):
            inside[instruction.name] = instruction
    return entry, by_name


def instructions(inside: Mapping[str, Computation]) -> Iterator[Instruction]:
    """Yields the instructions of all computations."""
    return (instruction for computation in inside.values() for instruction in computation.values())


def root(computation: Computation) -> Instruction:
    return next(reversed(computation.values()))


def origin(computation: Mapping[str, Instruction], name: str) -> Instruction | None:
    """Returns the instruction behind a name, following copies and bitcasts."""
    instruction = computation.get(name)
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = computation.get(instruction.operands[0])
    return instruction


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\((.*)$", line)
    if match is None:
        return None
    name, kind, opcode, rest = match.groups()
    arrays = tuple(_array(*parts) for parts in re.findall(_ARRAY, kind))
    # The start of an exchange may return the arrays that it sends before the received ones.
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
    return Array(
        dims, math.prod(dims) * dtype_bits(dtype) // 8, bool(re.search(r"S\([1-9]", layout))
    )
