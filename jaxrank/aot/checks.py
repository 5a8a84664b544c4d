"""Checks the arrays and collectives of a compiled program, from its text."""

from jaxrank.aot import hlo
from jaxrank.aot.hlo import COLLECTIVES, Computation, Instruction

# These rename existing arrays, or pass on the results of other instructions.
_MAKES_NOTHING = frozenset({"parameter", "get-tuple-element", "bitcast", "tuple", "while", "call"})


def large_results(text: str, elements: int) -> list[Instruction]:
    """Lists instructions, except scatters, whose result has at least this number of elements.

    A scatter into a donated array works in place, and so does a fusion whose root is a scatter.
    Operands that a custom call changes in place are not counted either.
    """
    _, inside = hlo.computations(text)
    return [
        instruction
        for instruction in hlo.instructions(inside)
        if instruction.largest >= elements
        and instruction.opcode not in _MAKES_NOTHING
        and not _is_scatter(instruction, inside)
    ]


def _is_scatter(instruction: Instruction, inside: dict[str, Computation]) -> bool:
    """Returns True for a scatter, or a fusion whose root is a scatter."""
    while instruction.opcode == "fusion":
        instruction = hlo.root(inside[instruction.called("calls")])
    return instruction.opcode == "scatter"


def collective_bytes(text: str) -> dict[str, int]:
    """Sums bytes of the results of each kind of collective on one device.

    Each instruction counts once, however often a loop runs it.
    """
    sizes = dict.fromkeys(COLLECTIVES, 0)
    for instruction in hlo.instructions(hlo.computations(text)[1]):
        kind = instruction.opcode.removesuffix("-start")
        if kind in sizes:
            sizes[kind] += instruction.written_bytes
    return {kind: count for kind, count in sizes.items() if count}
