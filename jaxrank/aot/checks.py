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
        one
        for one in hlo.instructions(inside)
        if one.largest >= elements
        and one.opcode not in _MAKES_NOTHING
        and not _is_scatter(one, inside)
    ]


def _is_scatter(one: Instruction, inside: dict[str, Computation]) -> bool:
    """Returns True for a scatter, or a fusion whose root is a scatter."""
    while one.opcode == "fusion":
        one = hlo.root(inside[one.called("calls")])
    return one.opcode == "scatter"


def collective_bytes(text: str) -> dict[str, int]:
    """Sums bytes of the results of each kind of collective on one device.

    Each instruction counts once, however often a loop runs it.
    """
    found = dict.fromkeys(COLLECTIVES, 0)
    for one in hlo.instructions(hlo.computations(text)[1]):
        kind = one.opcode.removesuffix("-start")
        if kind in found:
            found[kind] += one.made_bytes
    return {kind: count for kind, count in found.items() if count}
