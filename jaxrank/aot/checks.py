"""What a compiled program makes and sends, by its text."""

from jaxrank.aot import hlo
from jaxrank.aot.hlo import COLLECTIVES, Computation, Instruction

# These give another name to what is there, or hand on what other instructions made.
_MAKES_NOTHING = frozenset({"parameter", "get-tuple-element", "bitcast", "tuple", "while", "call"})


def large_results(text: str, elements: int) -> list[Instruction]:
    """Instructions that make an array of at least so many elements, but for scatters.

    A scatter into a donated array works in place, and so does a fusion that is nothing else. What a
    custom call changes where it is, is not made either.
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
    """Whether it is one, or a fusion whose result is that of one."""
    while one.opcode == "fusion":
        one = hlo.root(inside[one.called("calls")])
    return one.opcode == "scatter"


def collective_bytes(text: str) -> dict[str, int]:
    """Bytes of the results of each kind of collective, on one device; each instruction once,
    however often a loop runs it."""
    found = dict.fromkeys(COLLECTIVES, 0)
    for one in hlo.instructions(hlo.computations(text)[1]):
        kind = one.opcode.removesuffix("-start")
        if kind in found:
            found[kind] += one.made_bytes
    return {kind: count for kind, count in found.items() if count}
